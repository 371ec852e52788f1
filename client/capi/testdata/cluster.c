// A client of a cluster for TestDiscover. The argument is the address of one member. Each line of
// standard input is a command, and has one line of output:
//
//	put FROM TO   stores the sequences [FROM, TO)          put STORED
//	get FROM TO   loads and compares them                  get LOADED DIFFERENT
//	stats         prints the counters and nodes as JSON    the JSON
//
// A sequence i has two blocks, of the tokens i, 1, 2, … 7. A library that reports an error ends the
// program with the exit code 1.
#include <penstock.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCKS = 2, TOKENS = 4, VALUE = 2 * TOKENS * 64 };

static penstock_error e;
static penstock_result r;
static uint8_t memory[BLOCKS * VALUE], results[BLOCKS], ids[16 * BLOCKS];
static uint32_t ends[BLOCKS + 1];
static uint64_t addresses[BLOCKS], lengths[BLOCKS];

static void must(int32_t code, const char *what, const char *message) {
	if (code == PENSTOCK_OK) return;
	fprintf(stderr, "%s: %d %s\n", what, code, message);
	exit(1);
}

// batch returns a batch with all blocks of a sequence.
static penstock_batch batch(penstock_namespace ns, uint32_t sequence) {
	uint32_t tokens[BLOCKS * TOKENS] = {sequence, 1, 2, 3, 4, 5, 6, 7}, n = 0;
	must(penstock_chain(ns, NULL, NULL, 0, tokens, BLOCKS * TOKENS, ids, &n, &e), "chain", e.message);
	for (int i = 0; i < BLOCKS; i++) {
		ends[i + 1] = 16 * (i + 1);
		addresses[i] = (uintptr_t)(memory + i * VALUE);
		lengths[i] = VALUE;
	}
	return (penstock_batch){.size = sizeof(penstock_batch), .flags = PENSTOCK_ANY_MEMORY, .n_keys = BLOCKS, .keys = ids, .key_offsets = ends, .addresses = addresses, .lengths = lengths};
}

static uint8_t byte_of(uint32_t sequence, int i) { return (sequence * 31 + i * 7) % 251; }

static void put(penstock_namespace ns, uint32_t from, uint32_t to) {
	int stored = 0;
	for (uint32_t s = from; s < to; s++) {
		penstock_batch b = batch(ns, s);
		for (int i = 0; i < BLOCKS * VALUE; i++) memory[i] = byte_of(s, i);
		must(penstock_put(ns, &b, results, &r), "put", r.error.message);
		stored += r.ok == BLOCKS;
	}
	printf("put %d\n", stored);
}

static void get(penstock_namespace ns, uint32_t from, uint32_t to) {
	int loaded = 0, different = 0;
	for (uint32_t s = from; s < to; s++) {
		penstock_batch b = batch(ns, s);
		memset(memory, 0, sizeof memory);
		must(penstock_get(ns, &b, results, &r), "get", r.error.message);
		loaded += r.ok == BLOCKS;
		for (int i = 0; i < BLOCKS * VALUE; i++) {
			if (results[i / VALUE] == PENSTOCK_KEY_OK && memory[i] != byte_of(s, i)) {
				different++;
				break;
			}
		}
	}
	printf("get %d %d\n", loaded, different);
}

static void stats(penstock_store store) {
	static char buf[1 << 16];
	uint64_t need;
	must(penstock_stats(store, buf, sizeof buf, &need, &e), "stats", e.message);
	printf("%s\n", buf);
}

int main(int argc, char **argv) {
	if (argc != 2) return 2;
	penstock_options o = {.size = sizeof o, .servers = argv[1], .dial_timeout_ms = 60000, .timeout_ms = 120000, .discover = 1};
	penstock_group group = {.kind = PENSTOCK_GROUP_FULL, .layers = 2, .token_bytes = 64};
	penstock_definition d = {.size = sizeof d, .name = "m", .index = PENSTOCK_CHAINED, .block_tokens = TOKENS, .n_groups = 1, .groups = &group, .keys = PENSTOCK_KEYS_IDS};
	penstock_store store;
	penstock_namespace ns;
	must(penstock_open(&o, &store, &e), "open", e.message);
	must(penstock_ensure(store, &d, &ns, &e), "ensure", e.message);
	char line[64];
	uint32_t from, to;
	setvbuf(stdout, NULL, _IOLBF, 0);
	while (fgets(line, sizeof line, stdin)) {
		if (sscanf(line, "put %u %u", &from, &to) == 2) {
			put(ns, from, to);
		} else if (sscanf(line, "get %u %u", &from, &to) == 2) {
			get(ns, from, to);
		} else if (strcmp(line, "stats\n") == 0) {
			stats(store);
		} else {
			fprintf(stderr, "no command: %s", line);
			return 2;
		}
	}
	must(penstock_close(store, &e), "close", e.message);
	return 0;
}
