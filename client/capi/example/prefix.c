// Finds the longest stored prefix of a prompt, loads it, and stores the blocks after it.
//
//   make lib && bin/penstock serve --data /tmp/kv &
//   gcc -Ibin client/capi/example/prefix.c -o /tmp/prefix -Lbin -lpenstock -Wl,-rpath,$PWD/bin && /tmp/prefix 127.0.0.1:7420
#include <penstock.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCKS = 4, TOKENS = 16, LAYERS = 2, TOKEN_BYTES = 256, VALUE = LAYERS * TOKENS * TOKEN_BYTES };

static penstock_error error;
static penstock_result result;

static void must(int32_t code, const penstock_error *e, const char *what) {
	if (code == PENSTOCK_OK) return;
	fprintf(stderr, "%s: %s\n", what, e->message);
	exit(1);
}

// compute writes the KV of a block, in place of a model.
static void compute(uint8_t *kv, int block) { memset(kv, 'a' + block, VALUE); }

int main(int argc, char **argv) {
	penstock_options options = {.size = sizeof options, .servers = argc > 1 ? argv[1] : "127.0.0.1:7420"};
	penstock_group group = {.kind = PENSTOCK_GROUP_FULL, .layers = LAYERS, .token_bytes = TOKEN_BYTES};
	penstock_definition model = {.size = sizeof model, .name = "example/model", .index = PENSTOCK_CHAINED, .dtype = "bf16", .layout = "example",
		.block_tokens = TOKENS, .n_groups = 1, .groups = &group};
	penstock_store store;
	penstock_namespace ns;
	penstock_memory region;
	uint8_t *kv = malloc(BLOCKS * VALUE), results[BLOCKS];

	must(penstock_open(&options, &store, &error), &error, "open");
	must(penstock_ensure(store, &model, &ns, &error), &error, "ensure");
	must(penstock_register(store, kv, BLOCKS * VALUE, &region, &error), &error, "register");

	// Each key is the engine's hash of all tokens up to the end of a block.
	const char keys[] = "hash-1hash-2hash-3hash-4";
	const uint32_t offsets[BLOCKS + 1] = {0, 6, 12, 18, 24};
	uint64_t addresses[BLOCKS], lengths[BLOCKS];
	for (int i = 0; i < BLOCKS; i++) {
		addresses[i] = (uint64_t)(uintptr_t)(kv + i * VALUE);
		lengths[i] = VALUE;
	}
	penstock_batch batch = {.size = sizeof batch, .n_keys = BLOCKS, .keys = keys, .key_offsets = offsets, .addresses = addresses, .lengths = lengths};
	must(penstock_match(ns, &batch, &result), &result.error, "match");
	uint32_t loaded = 0;
	if (result.prefix > 0) {
		penstock_batch hit = batch;
		hit.n_keys = result.prefix;
		must(penstock_get(ns, &hit, results, &result), &result.error, "get");
		loaded = result.prefix;
	}
	for (uint32_t i = loaded; i < BLOCKS; i++) compute(kv + i * VALUE, (int)i);
	batch.first = loaded;
	batch.addresses += loaded;
	batch.lengths += loaded;
	uint32_t stored = loaded;
	if (loaded < BLOCKS) {
		must(penstock_put(ns, &batch, results, &result), &result.error, "put");
		stored = result.prefix;
	}
	printf("%u of %d blocks were stored, %u are now\n", loaded, BLOCKS, stored);
	must(penstock_close(store, &error), &error, "close");
	free(kv);
	return 0;
}
