// Tests the comments of penstock.h against three nodes and a planner, whose addresses are the
// arguments: a node, a node that requires the token TOKEN, a node of another version, and a
// planner.
// The exit code is 0 if all checks hold. Failed checks are printed.
#include <penstock.h>
#include <poll.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int failures;

#define CHECK(ok, ...)                                             \
	do {                                                           \
		if (!(ok)) {                                               \
			failures++;                                            \
			fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #ok); \
			fprintf(stderr, __VA_ARGS__);                          \
			fputc('\n', stderr);                                   \
		}                                                          \
	} while (0)

enum { KEYS = 16, LAYERS = 4, LAYER = 2048, VALUE = LAYERS * LAYER };

static penstock_error e;
static penstock_result r;
static uint8_t results[KEYS];

// keys has KEYS concatenated keys of different lengths.
static char blob[KEYS * PENSTOCK_KEY_MAX];
static uint32_t offsets[KEYS + 1];

static void make_keys(int seed) {
	for (int i = 0; i < KEYS; i++) {
		char key[PENSTOCK_KEY_MAX + 1];
		int n = snprintf(key, sizeof key, "model@%08x@%*d", seed, 8 + 12 * i, i);
		memcpy(blob + offsets[i], key, n);
		offsets[i + 1] = offsets[i] + n;
	}
}

static uint8_t byte_of(int key, size_t i) { return (uint8_t)(key * 31 + i * 7 + i / 251); }

static void fill(uint8_t *p, int key, size_t from, size_t n) {
	for (size_t i = 0; i < n; i++) p[i] = byte_of(key, from + i);
}

static int same(const uint8_t *p, int key, size_t from, size_t n) {
	for (size_t i = 0; i < n; i++)
		if (p[i] != byte_of(key, from + i)) return 0;
	return 1;
}

static uint64_t addresses[KEYS * LAYERS], lengths[KEYS * LAYERS];
static uint32_t fragment_ends[KEYS + 1];

// whole returns a batch of the first n keys. The value of key i lies at base + i * VALUE.
static penstock_batch whole(uint8_t *base, uint32_t n) {
	penstock_batch b = {.size = sizeof b, .n_keys = n, .keys = blob, .key_offsets = offsets, .addresses = addresses, .lengths = lengths};
	for (uint32_t i = 0; i < n; i++) {
		addresses[i] = (uintptr_t)(base + i * VALUE);
		lengths[i] = VALUE;
	}
	return b;
}

// scattered is whole with one fragment for each layer. Odd layers lie in another memory,
// and no two fragments are adjacent.
static penstock_batch scattered(uint8_t *even, uint8_t *odd, uint32_t n) {
	penstock_batch b = whole(even, n);
	for (uint32_t i = 0, k = 0; i < n; i++) {
		for (int l = 0; l < LAYERS; l++, k++) {
			addresses[k] = (uintptr_t)((l % 2 ? odd : even) + (size_t)(l * KEYS + (KEYS - 1 - i)) * LAYER);
			lengths[k] = LAYER;
		}
		fragment_ends[i + 1] = k;
	}
	b.piece_fragments = fragment_ends;
	return b;
}

static int all(const uint8_t *got, uint32_t n, uint8_t want) {
	for (uint32_t i = 0; i < n; i++)
		if (got[i] != want) return 0;
	return 1;
}

static penstock_group group = {.kind = PENSTOCK_GROUP_FULL, .layers = LAYERS, .token_bytes = LAYER / 16};

// patient returns options for a node that answers. Under valgrind on a busy machine a connection
// takes longer than by default.
static penstock_options patient(const char *server) {
	return (penstock_options){.size = sizeof(penstock_options), .servers = server, .dial_timeout_ms = 60000, .timeout_ms = 120000};
}

static penstock_definition define(const char *name, uint32_t index) {
	penstock_definition d = {.size = sizeof d, .name = name, .index = index, .dtype = "bf16", .layout = "test", .block_tokens = 16, .n_groups = 1, .groups = &group};
	return d;
}

static void test_arguments(const char *server) {
	penstock_options o = {.size = sizeof o, .servers = server};
	penstock_store store = 0;
	CHECK(penstock_abi_version() == PENSTOCK_ABI_VERSION, "%x", penstock_abi_version());
	CHECK(penstock_open(NULL, &store, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	CHECK(penstock_open(&o, NULL, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	CHECK(penstock_open(NULL, NULL, NULL) == PENSTOCK_ERR_INVALID, "store and error are NULL");
	const uint64_t wrong[] = {0, offsetof(penstock_options, discover) - 1, sizeof o + 1};
	for (int i = 0; i < 3; i++) {
		o.size = wrong[i];
		CHECK(penstock_open(&o, &store, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "size") != NULL, "%s", e.message);
	}
	// The structure of version 1.7 has no discover. The library ignores the memory after it.
	o = patient(server);
	o.size = offsetof(penstock_options, discover);
	o.discover = 1;
	CHECK(penstock_open(&o, &store, &e) == PENSTOCK_OK && penstock_close(store, &e) == PENSTOCK_OK, "%s", e.message);
	o.size = sizeof o;
	store = 0;
	CHECK(penstock_open(&o, &store, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "cluster") != NULL, "discover at a node that stands alone: %s", e.message);
	o = (penstock_options){.size = sizeof o};
	CHECK(penstock_open(&o, &store, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "server") != NULL, "%s", e.message);
	o.servers = "no port";
	CHECK(penstock_open(&o, &store, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "no port") != NULL, "%s", e.message);
	o.servers = server;
	o.ca_file = "/no/such/file";
	CHECK(penstock_open(&o, &store, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "/no/such/file") != NULL, "%s", e.message);
	CHECK(store == 0, "a store was opened");
	for (penstock_store h = 0; h < 2; h++) {
		h = h == 0 ? 0 : UINT64_MAX - 1;
		CHECK(penstock_close(h, &e) == PENSTOCK_ERR_CLOSED, "%s", e.message);
		CHECK(penstock_match(h, NULL, &r) == PENSTOCK_ERR_CLOSED, "%s", r.error.message);
		CHECK(penstock_lease_release(h, &e) == PENSTOCK_ERR_CLOSED, "%s", e.message);
		CHECK(penstock_unregister(h, &e) == PENSTOCK_ERR_CLOSED, "%s", e.message);
	}
}

static void test_ensure(penstock_store store) {
	penstock_namespace ns = 0, again = 0;
	penstock_definition d = define("ensured", PENSTOCK_FLAT);
	CHECK(penstock_ensure(store, &d, &ns, &e) == PENSTOCK_OK && ns != 0, "%s", e.message);
	CHECK(penstock_ensure(store, &d, &again, &e) == PENSTOCK_OK && again != ns, "%s", e.message);
	CHECK(penstock_ensure(store, NULL, &ns, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	CHECK(penstock_ensure(store, &d, NULL, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	d.dtype = "fp8";
	CHECK(penstock_ensure(store, &d, &ns, &e) == PENSTOCK_ERR_MISMATCH && strstr(e.message, "bf16") && strstr(e.message, "fp8"), "%s", e.message);
	d = define("ensured", PENSTOCK_CHAINED);
	CHECK(penstock_ensure(store, &d, &ns, &e) == PENSTOCK_ERR_MISMATCH, "%s", e.message);
	d = define("a b", PENSTOCK_FLAT);
	CHECK(penstock_ensure(store, &d, &ns, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	d = define("x", 7);
	CHECK(penstock_ensure(store, &d, &ns, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	d = define("x", PENSTOCK_FLAT);
	d.n_groups = 0;
	CHECK(penstock_ensure(store, &d, &ns, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	d = define("x", PENSTOCK_FLAT);
	d.groups = NULL;
	CHECK(penstock_ensure(store, &d, &ns, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
}

static void test_flat(penstock_store store, uint8_t *a, uint8_t *b) {
	penstock_namespace ns;
	penstock_memory ma, mb, mc;
	penstock_definition d = define("flat", PENSTOCK_FLAT);
	CHECK(penstock_ensure(store, &d, &ns, &e) == PENSTOCK_OK, "%s", e.message);
	make_keys(1);
	penstock_batch batch = whole(a, KEYS);
	CHECK(penstock_get(ns, &batch, results, &r) == PENSTOCK_ERR_UNREGISTERED && strstr(r.error.message, "penstock_register"), "%s", r.error.message);
	CHECK(penstock_register(store, a, KEYS * VALUE, &ma, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_register(store, a + KEYS * VALUE - 1, 2, &mc, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "overlaps"), "%s", e.message);
	CHECK(penstock_register(store, NULL, 1, &mc, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	CHECK(penstock_register(store, a, 0, &mc, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	CHECK(penstock_register(store, b, KEYS * VALUE, &mb, &e) == PENSTOCK_OK, "%s", e.message);

	CHECK(penstock_get(ns, &batch, results, &r) == PENSTOCK_OK && r.ok == 0 && r.prefix == 0 && r.n == KEYS, "%s", r.error.message);
	CHECK(all(results, KEYS, PENSTOCK_KEY_MISS) && r.cut == PENSTOCK_CUT_ABSENT, "cut %u", r.cut);
	for (int i = 0; i < KEYS; i++) fill(a + i * VALUE, i, 0, VALUE);
	CHECK(penstock_put(ns, &batch, results, &r) == PENSTOCK_OK && r.ok == KEYS && r.bytes == KEYS * VALUE, "%s", r.error.message);
	CHECK(all(results, KEYS, PENSTOCK_KEY_OK), "first %u", results[0]);
	CHECK(penstock_put(ns, &batch, results, &r) == PENSTOCK_OK && all(results, KEYS, PENSTOCK_KEY_EXISTS) && r.bytes == 0, "%s", r.error.message);
	memset(a, 0, KEYS * VALUE);
	CHECK(penstock_get(ns, &batch, results, &r) == PENSTOCK_OK && all(results, KEYS, PENSTOCK_KEY_OK) && r.prefix == KEYS, "%s", r.error.message);
	for (int i = 0; i < KEYS; i++) CHECK(same(a + i * VALUE, i, 0, VALUE), "key %d", i);

	// get into fragments in two memories, and put from these fragments.
	memset(a, 0, KEYS * VALUE);
	batch = scattered(a, b, KEYS);
	CHECK(penstock_get(ns, &batch, results, &r) == PENSTOCK_OK && all(results, KEYS, PENSTOCK_KEY_OK), "%s", r.error.message);
	for (int i = 0; i < KEYS; i++)
		for (int l = 0; l < LAYERS; l++) CHECK(same((uint8_t *)(uintptr_t)addresses[i * LAYERS + l], i, l * LAYER, LAYER), "key %d, layer %d", i, l);
	CHECK(penstock_delete(ns, &batch, results, &r) == PENSTOCK_OK && all(results, KEYS, PENSTOCK_KEY_OK), "%s", r.error.message);
	CHECK(penstock_put(ns, &batch, results, &r) == PENSTOCK_OK && all(results, KEYS, PENSTOCK_KEY_OK), "%s", r.error.message);
	memset(a, 0, KEYS * VALUE);
	batch = whole(a, KEYS);
	CHECK(penstock_get(ns, &batch, results, &r) == PENSTOCK_OK && all(results, KEYS, PENSTOCK_KEY_OK), "%s", r.error.message);
	for (int i = 0; i < KEYS; i++) CHECK(same(a + i * VALUE, i, 0, VALUE), "gathered key %d", i);

	// Some keys are absent; the others are found.
	uint32_t gone[] = {0, 5, 6, 15};
	for (int i = 0; i < 4; i++) {
		penstock_batch one = batch;
		uint32_t ends[2] = {offsets[gone[i]], offsets[gone[i] + 1]};
		one.n_keys = 1;
		one.key_offsets = ends;
		CHECK(penstock_delete(ns, &one, results, &r) == PENSTOCK_OK && results[0] == PENSTOCK_KEY_OK, "%s", r.error.message);
		CHECK(penstock_delete(ns, &one, results, &r) == PENSTOCK_OK && results[0] == PENSTOCK_KEY_MISS, "%s", r.error.message);
	}
	for (int call = 0; call < 3; call++) {
		memset(a, 0, KEYS * VALUE);
		int32_t code = call == 0 ? penstock_get(ns, &batch, results, &r) : call == 1 ? penstock_exists(ns, &batch, results, &r) : penstock_touch(ns, &batch, results, &r);
		CHECK(code == PENSTOCK_OK && r.ok == KEYS - 4 && r.prefix == 0, "call %d: %s, %u", call, r.error.message, r.ok);
		for (uint32_t i = 0; i < KEYS; i++) {
			int there = i != 0 && i != 5 && i != 6 && i != 15;
			CHECK((results[i] == PENSTOCK_KEY_OK) == there, "call %d, key %u: %u", call, i, results[i]);
			if (call == 0 && there) CHECK(same(a + i * VALUE, (int)i, 0, VALUE), "key %u", i);
		}
	}

	// Values of a wrong size, invalid keys, and missing arrays.
	batch = whole(a, KEYS);
	lengths[3] = VALUE - LAYER;
	CHECK(penstock_put(ns, &batch, results, &r) == PENSTOCK_ERR_INVALID && strstr(r.error.message, "piece 3"), "%s", r.error.message);
	lengths[3] = VALUE - 1;
	CHECK(penstock_put(ns, &batch, results, &r) == PENSTOCK_ERR_INVALID, "%s", r.error.message);
	batch = whole(a, KEYS);
	uint32_t bad[] = {0, 0, 300, 200};
	for (int i = 0; i < 3; i++) {
		batch.n_keys = 1;
		batch.key_offsets = bad + i;
		CHECK(penstock_exists(ns, &batch, results, &r) == PENSTOCK_ERR_INVALID && strstr(r.error.message, "key"), "%d: %s", i, r.error.message);
	}
	batch = whole(a, KEYS);
	batch.key_offsets = NULL;
	CHECK(penstock_get(ns, &batch, results, &r) == PENSTOCK_ERR_INVALID, "%s", r.error.message);
	batch = whole(a, KEYS);
	batch.keys = NULL;
	CHECK(penstock_get(ns, &batch, results, &r) == PENSTOCK_ERR_INVALID, "%s", r.error.message);
	batch = whole(a, KEYS);
	batch.addresses = NULL;
	CHECK(penstock_get(ns, &batch, results, &r) == PENSTOCK_ERR_INVALID, "%s", r.error.message);
	batch = whole(a, KEYS);
	batch.n_keys = 0;
	CHECK(penstock_get(ns, &batch, results, &r) == PENSTOCK_ERR_INVALID, "%s", r.error.message);
	batch = whole(a, KEYS);
	batch.first = 1;
	CHECK(penstock_get(ns, &batch, results, &r) == PENSTOCK_ERR_INVALID, "%s", r.error.message);
	batch = whole(a, KEYS);
	batch.size = 8;
	CHECK(penstock_get(ns, &batch, results, &r) == PENSTOCK_ERR_INVALID, "%s", r.error.message);
	CHECK(penstock_get(ns, NULL, results, &r) == PENSTOCK_ERR_INVALID, "%s", r.error.message);
	batch = whole(a, KEYS);
	addresses[2] = addresses[1] + LAYER;
	CHECK(penstock_get(ns, &batch, results, &r) == PENSTOCK_ERR_INVALID && strstr(r.error.message, "share bytes"), "%s", r.error.message);

	// Calls without registered memory, and without results.
	CHECK(penstock_unregister(mb, &e) == PENSTOCK_OK && penstock_unregister(mb, &e) == PENSTOCK_ERR_CLOSED, "%s", e.message);
	batch = whole(b, 5);
	batch.flags = PENSTOCK_ANY_MEMORY;
	CHECK(penstock_get(ns, &batch, NULL, &r) == PENSTOCK_OK && r.ok == 4 && same(b + VALUE, 1, 0, VALUE), "%s, %u", r.error.message, r.ok);
	CHECK(penstock_get(ns, &batch, NULL, NULL) == PENSTOCK_OK, "results and out are NULL");
	batch.flags = 0;
	CHECK(penstock_get(ns, &batch, NULL, &r) == PENSTOCK_ERR_UNREGISTERED, "%s", r.error.message);

	// After a bump all blocks are misses. A second bump to the same epoch changes nothing.
	uint64_t epoch = 0, next = 0;
	CHECK(penstock_epoch(ns, 0, &epoch, &e) == PENSTOCK_OK && epoch > 0, "%s", e.message);
	CHECK(penstock_bump(ns, epoch + 1, &next, &e) == PENSTOCK_OK && next == epoch + 1, "%s", e.message);
	CHECK(penstock_bump(ns, epoch + 1, &next, &e) == PENSTOCK_OK && next == epoch + 1, "%s", e.message);
	CHECK(penstock_bump(ns, epoch, &next, &e) == PENSTOCK_ERR_MISMATCH, "%s", e.message);
	CHECK(penstock_epoch(ns, 1, &next, &e) == PENSTOCK_OK && next == epoch + 1, "%s", e.message);
	batch = whole(a, KEYS);
	CHECK(penstock_exists(ns, &batch, results, &r) == PENSTOCK_OK && r.ok == 0 && r.epoch == epoch + 1, "%s", r.error.message);
	batch.epoch = epoch;
	CHECK(penstock_get(ns, &batch, results, &r) == PENSTOCK_OK && r.ok == 0, "%s", r.error.message);
	CHECK(penstock_put(ns, &batch, results, &r) == PENSTOCK_OK || r.error.code == PENSTOCK_ERR_MISMATCH, "%s", r.error.message);
	CHECK(r.ok == 0, "%u values of old weights were stored", r.ok);

	// A bump that keeps the epoch before. A match names one epoch, a range or the newest.
	CHECK(penstock_epoch(ns, 0, &epoch, &e) == PENSTOCK_OK, "%s", e.message);
	batch = whole(a, KEYS);
	for (int i = 0; i < KEYS; i++) fill(a + i * VALUE, i, 0, VALUE);
	CHECK(penstock_put(ns, &batch, results, &r) == PENSTOCK_OK && r.ok == KEYS, "%s", r.error.message);
	CHECK(penstock_bump_keep(ns, 0, 0, &next, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "1 to 16"), "%s", e.message);
	CHECK(penstock_bump_keep(ns, UINT64_MAX, 2, &next, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	CHECK(penstock_bump_keep(ns, 0, 2, &next, &e) == PENSTOCK_OK && next == epoch + 1, "%s", e.message);
	CHECK(penstock_match(ns, &batch, &r) == PENSTOCK_OK && r.prefix == 0 && r.epoch == next, "%s", r.error.message);
	batch.oldest_epoch = epoch;
	CHECK(penstock_match(ns, &batch, &r) == PENSTOCK_OK && r.prefix == KEYS && r.epoch == epoch, "%s, epoch %lu", r.error.message, (unsigned long)r.epoch);
	batch.size = offsetof(penstock_batch, oldest_epoch); // a caller of version 1.0
	CHECK(penstock_match(ns, &batch, &r) == PENSTOCK_OK && r.prefix == 0, "%s, %u", r.error.message, r.prefix);
	batch.size++;
	CHECK(penstock_match(ns, &batch, &r) == PENSTOCK_ERR_INVALID && strstr(r.error.message, "size"), "%s", r.error.message);
	batch.size = sizeof batch;
	CHECK(penstock_get(ns, &batch, results, &r) == PENSTOCK_ERR_INVALID && strstr(r.error.message, "match only"), "%s", r.error.message);
	batch.oldest_epoch = 0;
	batch.flags = PENSTOCK_NEWEST;
	CHECK(penstock_match(ns, &batch, &r) == PENSTOCK_OK && r.prefix == 0 && r.epoch == next, "%s", r.error.message);
	batch.epoch = epoch;
	CHECK(penstock_match(ns, &batch, &r) == PENSTOCK_ERR_INVALID, "%s", r.error.message);
	batch.flags = 0;
	CHECK(penstock_get(ns, &batch, results, &r) == PENSTOCK_OK && r.ok == KEYS && r.epoch == epoch, "%s", r.error.message);

	// Epoch next has keys 3 and 9 with other bytes. A match may mix epochs, and a get loads each
	// key from its epoch.
	uint64_t key_epochs[KEYS];
	for (int i = 0; i < 2; i++) {
		int key = i == 0 ? 3 : 9;
		penstock_batch one = whole(a, KEYS);
		uint32_t ends[2] = {offsets[key], offsets[key + 1]};
		one.n_keys = 1;
		one.key_offsets = ends;
		fill(a, key + 100, 0, VALUE);
		CHECK(penstock_put(ns, &one, results, &r) == PENSTOCK_OK && r.ok == 1 && r.epoch == next, "%s", r.error.message);
	}
	memset(a, 0, KEYS * VALUE);
	penstock_batch mixed = whole(a, KEYS);
	mixed.oldest_epoch = epoch;
	mixed.flags = PENSTOCK_MIX;
	CHECK(penstock_match(ns, &mixed, &r) == PENSTOCK_OK && r.prefix == KEYS && r.epoch == next, "%s, %u", r.error.message, r.prefix);
	mixed.key_epochs = key_epochs;
	CHECK(penstock_match(ns, &mixed, &r) == PENSTOCK_OK && r.prefix == KEYS && r.epoch == next, "%s, %u", r.error.message, r.prefix);
	for (int i = 0; i < KEYS; i++) CHECK(key_epochs[i] == (i == 3 || i == 9 ? next : epoch), "key %d is of epoch %lu", i, (unsigned long)key_epochs[i]);
	CHECK(penstock_get(ns, &mixed, results, &r) == PENSTOCK_ERR_INVALID && strstr(r.error.message, "match only"), "%s", r.error.message);
	mixed.oldest_epoch = 0;
	mixed.flags = 0;
	CHECK(penstock_match(ns, &mixed, &r) == PENSTOCK_ERR_INVALID && strstr(r.error.message, "mix"), "%s", r.error.message);
	CHECK(penstock_get(ns, &mixed, results, &r) == PENSTOCK_OK && r.ok == KEYS && r.prefix == KEYS && r.epoch == next, "%s, %u", r.error.message, r.ok);
	for (int i = 0; i < KEYS; i++) CHECK(same(a + i * VALUE, i == 3 || i == 9 ? i + 100 : i, 0, VALUE), "key %d", i);
	key_epochs[5] = next + 7; // this epoch does not exist, so the key is a miss, and the others are not
	CHECK(penstock_get(ns, &mixed, results, &r) == PENSTOCK_OK && r.ok == KEYS - 1 && results[5] == PENSTOCK_KEY_MISS, "%s, %u", r.error.message, r.ok);
	mixed.epoch = epoch;
	CHECK(penstock_get(ns, &mixed, results, &r) == PENSTOCK_ERR_INVALID, "%s", r.error.message);
	mixed.epoch = 0;
	key_epochs[15] = 0;
	CHECK(penstock_get(ns, &mixed, results, &r) == PENSTOCK_ERR_INVALID && strstr(r.error.message, "key 15"), "%s", r.error.message);
	mixed.size = offsetof(penstock_batch, key_epochs); // a caller of version 1.1
	CHECK(penstock_get(ns, &mixed, results, &r) == PENSTOCK_OK && r.ok == 2, "%s, %u", r.error.message, r.ok);

	// A get of a range of layers loads these layers, and no byte of the others.
	memset(a, 0, KEYS * VALUE);
	penstock_batch range = whole(a, KEYS);
	for (int i = 0; i < KEYS; i++) {
		addresses[i] += LAYER;
		lengths[i] -= 2 * LAYER;
	}
	range.epoch = epoch;
	range.first_layer = 1;
	range.layers = LAYERS - 2;
	CHECK(penstock_get(ns, &range, results, &r) == PENSTOCK_OK && r.ok == KEYS && r.bytes == KEYS * (VALUE - 2 * LAYER), "%s, %u, %lu bytes", r.error.message, r.ok, (unsigned long)r.bytes);
	for (int i = 0; i < KEYS; i++) {
		CHECK(same(a + i * VALUE + LAYER, i, LAYER, VALUE - 2 * LAYER), "key %d", i);
		for (size_t k = 0; k < LAYER; k++) CHECK(a[i * VALUE + k] == 0 && a[(i + 1) * VALUE - 1 - k] == 0, "key %d, byte %zu of another layer", i, k);
	}
	CHECK(penstock_put(ns, &range, results, &r) == PENSTOCK_ERR_INVALID && strstr(r.error.message, "for get only"), "%s", r.error.message);
	range.layers = LAYERS;
	CHECK(penstock_get(ns, &range, results, &r) == PENSTOCK_ERR_INVALID && strstr(r.error.message, "from layer 1; group 0 has"), "%s", r.error.message);
	range.layers = LAYERS - 3;
	CHECK(penstock_get(ns, &range, results, &r) == PENSTOCK_ERR_INVALID && strstr(r.error.message, "bytes; "), "%s", r.error.message);
	range.layers = 0;
	CHECK(penstock_get(ns, &range, results, &r) == PENSTOCK_ERR_INVALID && strstr(r.error.message, "at least 1 layer"), "%s", r.error.message);
	range.first_layer = 0xffffffff;
	range.layers = 0xffffffff;
	CHECK(penstock_get(ns, &range, results, &r) == PENSTOCK_ERR_INVALID, "%s", r.error.message);
	range = whole(a, KEYS);
	range.epoch = epoch;
	range.layers = 1;
	range.size = offsetof(penstock_batch, first_layer); // a caller of version 1.2
	CHECK(penstock_get(ns, &range, results, &r) == PENSTOCK_OK && r.ok == KEYS, "%s, %u", r.error.message, r.ok);

	// A pin keeps an epoch live through a bump, until it is released or the epoch is retired.
	penstock_lease lease = 0;
	uint64_t pinned = 0;
	CHECK(penstock_pin_epoch(ns, epoch, 60000, NULL, NULL, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	CHECK(penstock_pin_epoch(ns, epoch, 0, NULL, &lease, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	CHECK(penstock_pin_epoch(ns, epoch + 50, 60000, NULL, &lease, &e) == PENSTOCK_ERR_MISMATCH && strstr(e.message, "not live"), "%s", e.message);
	CHECK(penstock_pin_epoch(ns, epoch, 60000, &pinned, &lease, &e) == PENSTOCK_OK && pinned == epoch && lease != 0, "%s", e.message);
	CHECK(penstock_bump(ns, 0, &next, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_get(ns, &batch, results, &r) == PENSTOCK_OK && r.ok == KEYS, "%s", r.error.message);
	CHECK(penstock_lease_renew(lease, 60000, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_retire(ns, epoch, 0, &e) == PENSTOCK_ERR_MISMATCH && strstr(e.message, "pinned"), "%s", e.message);
	CHECK(penstock_retire(ns, next, 0, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "newest"), "%s", e.message);
	CHECK(penstock_retire(ns, epoch, 1, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_retire(ns, epoch, 0, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_lease_renew(lease, 60000, &e) == PENSTOCK_ERR_NOT_FOUND, "%s", e.message);
	CHECK(penstock_get(ns, &batch, results, &r) == PENSTOCK_OK && r.ok == 0, "%s", r.error.message);
	CHECK(penstock_unregister(ma, &e) == PENSTOCK_OK, "%s", e.message);
}

static void test_chained(penstock_store store, uint8_t *a) {
	penstock_namespace ns;
	penstock_memory m;
	penstock_definition d = define("chained", PENSTOCK_CHAINED);
	CHECK(penstock_ensure(store, &d, &ns, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_register(store, a, KEYS * VALUE, &m, &e) == PENSTOCK_OK, "%s", e.message);
	make_keys(2);
	for (int i = 0; i < KEYS; i++) fill(a + i * VALUE, i, 0, VALUE);
	penstock_batch batch = whole(a, 10);
	CHECK(penstock_put(ns, &batch, results, &r) == PENSTOCK_OK && r.ok == 10 && r.prefix == 10, "%s", r.error.message);
	batch = whole(a + 10 * VALUE, KEYS);
	batch.first = 10;
	CHECK(penstock_put(ns, &batch, results, &r) == PENSTOCK_OK && r.n == 6 && r.ok == 6 && r.prefix == KEYS, "%s, %u", r.error.message, r.prefix);
	batch.first = 0;
	batch.lease_ms = 60000;
	CHECK(penstock_match(ns, &batch, &r) == PENSTOCK_OK && r.prefix == KEYS && r.lease != 0 && r.bytes == KEYS * VALUE && r.cut == PENSTOCK_CUT_COMPLETE, "%s, %u", r.error.message, r.prefix);
	CHECK(penstock_match(ns, &batch, NULL) == PENSTOCK_ERR_INVALID, "a match with a lease, and out is NULL");
	CHECK(penstock_lease_renew(r.lease, 1000, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_lease_renew(r.lease, 0, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	CHECK(penstock_lease_release(r.lease, &e) == PENSTOCK_OK && penstock_lease_release(r.lease, &e) == PENSTOCK_ERR_CLOSED, "%s", e.message);
	// The deletion of a block deletes its descendants.
	penstock_batch one = batch;
	uint32_t ends[2] = {offsets[12], offsets[13]};
	one.n_keys = 1;
	one.key_offsets = ends;
	CHECK(penstock_delete(ns, &one, results, &r) == PENSTOCK_OK && results[0] == PENSTOCK_KEY_OK, "%s", r.error.message);
	batch.lease_ms = 0;
	CHECK(penstock_match(ns, &batch, &r) == PENSTOCK_OK && r.prefix == 12 && r.cut == PENSTOCK_CUT_ABSENT && r.lease == 0, "%s, %u", r.error.message, r.prefix);
	memset(a, 0, KEYS * VALUE);
	batch = whole(a, KEYS);
	CHECK(penstock_get(ns, &batch, results, &r) == PENSTOCK_OK && r.prefix == 12 && r.ok == 12, "%s, %u", r.error.message, r.prefix);
	CHECK(all(results, 12, PENSTOCK_KEY_OK) && all(results + 12, 4, PENSTOCK_KEY_MISS) && same(a + 11 * VALUE, 11, 0, VALUE), "result 12 is %u", results[12]);
	CHECK(penstock_unregister(m, &e) == PENSTOCK_OK, "%s", e.message);
}

static void test_ids(penstock_store store, uint8_t *a) {
	penstock_namespace ns;
	penstock_definition d = define("ids", PENSTOCK_CHAINED);
	d.keys = PENSTOCK_KEYS_IDS;
	CHECK(penstock_ensure(store, &d, &ns, &e) == PENSTOCK_OK, "%s", e.message);
	uint32_t tokens[16 * 4 + 3], n = 0, ends[5] = {0, 16, 32, 48, 64};
	for (int i = 0; i < 67; i++) tokens[i] = 7 * i;
	uint8_t ids[64], salted[64], rest[64];
	CHECK(penstock_chain(ns, NULL, NULL, 0, tokens, 67, ids, &n, &e) == PENSTOCK_OK && n == 4, "%s, %u", e.message, n);
	CHECK(penstock_chain(ns, NULL, "lora", 4, tokens, 67, salted, &n, &e) == PENSTOCK_OK && memcmp(ids, salted, 16) != 0, "%s", e.message);
	CHECK(penstock_chain(ns, ids + 16, NULL, 0, tokens + 32, 35, rest, &n, &e) == PENSTOCK_OK && n == 2 && memcmp(rest, ids + 32, 32) == 0, "%s", e.message);
	CHECK(penstock_chain(ns, NULL, NULL, 0, NULL, 16, ids, &n, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	penstock_batch batch = whole(a, 4);
	batch.keys = ids;
	batch.key_offsets = ends;
	batch.flags = PENSTOCK_ANY_MEMORY;
	CHECK(penstock_put(ns, &batch, results, &r) == PENSTOCK_OK && r.ok == 4, "%s", r.error.message);
	CHECK(penstock_match(ns, &batch, &r) == PENSTOCK_OK && r.prefix == 4, "%s", r.error.message);
	batch.keys = salted;
	CHECK(penstock_match(ns, &batch, &r) == PENSTOCK_OK && r.prefix == 0, "%s", r.error.message);
	ends[1] = 15;
	CHECK(penstock_match(ns, &batch, &r) == PENSTOCK_ERR_INVALID, "%s", r.error.message);
	CHECK(penstock_key_ids(ns, blob, offsets, 3, salted, &e) == PENSTOCK_ERR_INVALID, "keys of other lengths than ids");
}

// next waits for the eventfd and returns one completion.
static penstock_result next(penstock_store store, int fd) {
	penstock_result done = {0};
	for (uint32_t n = 0; n == 0;) {
		struct pollfd p = {.fd = fd, .events = POLLIN};
		CHECK(poll(&p, 1, 60000) == 1, "no completion within a minute");
		CHECK(penstock_drain(store, &done, 1, &n, &e) == PENSTOCK_OK, "%s", e.message);
		if (failures > 0) break;
	}
	return done;
}

static int readable(int fd) {
	struct pollfd p = {.fd = fd, .events = POLLIN};
	return poll(&p, 1, 0) == 1;
}

static void test_jobs(penstock_store store, uint8_t *a, uint8_t *b) {
	penstock_namespace ns;
	penstock_memory m;
	penstock_job put = 0, get = 0, again = 0;
	int32_t fd = -1;
	uint32_t n = 9;
	penstock_definition d = define("jobs", PENSTOCK_FLAT);
	CHECK(penstock_ensure(store, &d, &ns, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_register(store, a, KEYS * VALUE, &m, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_eventfd(store, &fd, &e) == PENSTOCK_OK && fd >= 0 && !readable(fd), "%s", e.message);
	CHECK(penstock_drain(store, &r, 1, &n, &e) == PENSTOCK_OK && n == 0, "%s", e.message);
	make_keys(3);
	for (int i = 0; i < KEYS; i++) fill(a + i * VALUE, i, 0, VALUE);
	penstock_batch batch = whole(a, KEYS);
	CHECK(penstock_submit(ns, PENSTOCK_OP_PUT, &batch, results, &put, &e) == PENSTOCK_OK && put != 0, "%s", e.message);
	// The caller may change keys, offsets, addresses and lengths now.
	memset(&batch, 0xff, sizeof batch);
	memset(blob, 0xff, sizeof blob);
	memset(addresses, 0xff, sizeof addresses);
	memset(lengths, 0xff, sizeof lengths);
	penstock_result done = next(store, fd);
	CHECK(done.job == put && done.op == PENSTOCK_OP_PUT && done.ok == KEYS && done.error.code == PENSTOCK_OK && all(results, KEYS, PENSTOCK_KEY_OK), "%s", done.error.message);
	CHECK(!readable(fd), "the eventfd is readable and there is no completion");
	CHECK(penstock_wait(store, put, 1, &r, &e) == PENSTOCK_ERR_NOT_FOUND, "%s", e.message);
	CHECK(penstock_cancel(store, put, &e) == PENSTOCK_ERR_NOT_FOUND, "%s", e.message);

	make_keys(3);
	memset(a, 0, KEYS * VALUE);
	batch = whole(a, KEYS);
	uint8_t more[KEYS];
	CHECK(penstock_submit(ns, PENSTOCK_OP_GET, &batch, results, &get, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_submit(ns, PENSTOCK_OP_EXISTS, &batch, more, &again, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_wait(store, again, 60000, &done, &e) == PENSTOCK_OK && done.job == again && all(more, KEYS, PENSTOCK_KEY_OK), "%s", e.message);
	done = next(store, fd);
	CHECK(done.job == get && done.bytes == KEYS * VALUE, "%s", done.error.message);
	for (int i = 0; i < KEYS; i++) CHECK(same(a + i * VALUE, i, 0, VALUE), "key %d", i);
	// After the completion the library accesses neither memory nor results.
	memset(a, 0x5a, KEYS * VALUE);

	// A job that completes during penstock_submit_wait is not reported again.
	again = 0;
	CHECK(penstock_submit_wait(ns, PENSTOCK_OP_GET, &batch, results, 60000, &again, &done, &e) == PENSTOCK_OK && again != 0 && again != get, "%s", e.message);
	CHECK(done.job == again && done.bytes == KEYS * VALUE && done.error.code == PENSTOCK_OK && all(results, KEYS, PENSTOCK_KEY_OK), "%s", done.error.message);
	for (int i = 0; i < KEYS; i++) CHECK(same(a + i * VALUE, i, 0, VALUE), "key %d", i);
	CHECK(!readable(fd), "the eventfd reports a job of penstock_submit_wait");
	CHECK(penstock_wait(store, again, 1, &r, &e) == PENSTOCK_ERR_NOT_FOUND, "%s", e.message);
	// The same without a time limit, in the calling thread.
	memset(a, 0x5a, KEYS * VALUE);
	CHECK(penstock_submit_wait(ns, PENSTOCK_OP_GET, &batch, results, PENSTOCK_NO_LIMIT, &again, &done, &e) == PENSTOCK_OK && done.job == again && all(results, KEYS, PENSTOCK_KEY_OK), "%s", e.message);
	for (int i = 0; i < KEYS; i++) CHECK(same(a + i * VALUE, i, 0, VALUE), "key %d", i);
	CHECK(!readable(fd), "the eventfd reports a job of penstock_submit_wait");
	// With no time, the job is complete, or it continues as after penstock_submit.
	int32_t code = penstock_submit_wait(ns, PENSTOCK_OP_EXISTS, &batch, more, 0, &again, &done, &e);
	CHECK((code == PENSTOCK_OK || code == PENSTOCK_ERR_TIMEOUT) && again != 0, "%s", e.message);
	if (code == PENSTOCK_ERR_TIMEOUT) done = next(store, fd);
	CHECK(done.job == again && done.ok == KEYS, "%s", done.error.message);
	CHECK(penstock_submit_wait(ns, 77, &batch, results, 0, &again, &done, &e) == PENSTOCK_ERR_INVALID && again == 0, "%s", e.message);
	CHECK(penstock_submit_wait(ns, PENSTOCK_OP_GET, &batch, results, 0, NULL, &done, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	CHECK(penstock_submit_wait(ns, PENSTOCK_OP_GET, &batch, results, 0, &again, NULL, &e) == PENSTOCK_ERR_INVALID && again == 0, "%s", e.message);
	CHECK(penstock_submit(ns, 77, &batch, results, &get, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	CHECK(penstock_submit(ns, PENSTOCK_OP_GET, &batch, results, NULL, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	CHECK(penstock_wait(store, 1, 0, NULL, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);

	// The job after jobs_max jobs is BUSY. Each other job completes once.
	penstock_job jobs[8], seen[8] = {0};
	for (int i = 0; i < 8; i++) {
		batch = whole(b + (i % 4) * 4 * VALUE, 4);
		batch.flags = PENSTOCK_ANY_MEMORY;
		CHECK(penstock_submit(ns, PENSTOCK_OP_EXISTS, &batch, NULL, &jobs[i], &e) == PENSTOCK_OK, "%s", e.message);
	}
	CHECK(penstock_submit(ns, PENSTOCK_OP_EXISTS, &batch, NULL, &get, &e) == PENSTOCK_ERR_BUSY && strstr(e.message, "jobs_max"), "%s", e.message);
	for (int i = 0; i < 8; i++) {
		done = next(store, fd);
		for (int k = 0; k < 8; k++)
			if (jobs[k] == done.job) seen[k]++;
	}
	for (int k = 0; k < 8; k++) CHECK(seen[k] == 1, "job %d completed %d times", k, (int)seen[k]);
	CHECK(penstock_unregister(m, &e) == PENSTOCK_OK, "%s", e.message);

	uint64_t need = 0;
	char stats[4096];
	CHECK(penstock_stats(store, NULL, 0, &need, &e) == PENSTOCK_ERR_INVALID && need > 1, "%s", e.message);
	CHECK(penstock_stats(store, stats, sizeof stats, &need, &e) == PENSTOCK_OK && strlen(stats) + 1 == need && strstr(stats, "\"Up\":true"), "%s", stats);
}

struct worker {
	penstock_store store;
	penstock_namespace ns;
	int number, bad;
};

// work stores and loads values. Each thread has its own keys, memory and jobs.
static void *work(void *arg) {
	struct worker *w = arg;
	uint8_t *mem = malloc(2 * VALUE), got[2];
	penstock_memory m = 0;
	penstock_error err;
	penstock_result out;
	w->bad += penstock_register(w->store, mem, 2 * VALUE, &m, &err) != PENSTOCK_OK;
	for (int round = 0; round < 20; round++) {
		char keys[64];
		uint32_t ends[3] = {0, 0, 0};
		for (int i = 0; i < 2; i++) {
			ends[i + 1] = ends[i] + snprintf(keys + ends[i], 32, "%d/%d/%d", w->number, round, i);
			fill(mem + i * VALUE, w->number + round + i, 0, VALUE);
		}
		uint64_t at[2] = {(uintptr_t)mem, (uintptr_t)(mem + VALUE)}, n[2] = {VALUE, VALUE};
		penstock_batch b = {.size = sizeof b, .n_keys = 2, .keys = keys, .key_offsets = ends, .addresses = at, .lengths = n};
		w->bad += penstock_put(w->ns, &b, got, &out) != PENSTOCK_OK || out.ok != 2;
		memset(mem, 0, 2 * VALUE);
		w->bad += penstock_get(w->ns, &b, got, &out) != PENSTOCK_OK || out.ok != 2;
		for (int i = 0; i < 2; i++) w->bad += !same(mem + i * VALUE, w->number + round + i, 0, VALUE);
	}
	w->bad += penstock_unregister(m, &err) != PENSTOCK_OK;
	free(mem);
	return NULL;
}

static void test_threads(penstock_store store) {
	enum { WORKERS = 8 };
	pthread_t threads[WORKERS];
	struct worker workers[WORKERS];
	penstock_namespace ns;
	penstock_definition d = define("threads", PENSTOCK_FLAT);
	CHECK(penstock_ensure(store, &d, &ns, &e) == PENSTOCK_OK, "%s", e.message);
	for (int i = 0; i < WORKERS; i++) {
		workers[i] = (struct worker){.store = store, .ns = ns, .number = i};
		CHECK(pthread_create(&threads[i], NULL, work, &workers[i]) == 0, "thread %d", i);
	}
	for (int i = 0; i < WORKERS; i++) {
		pthread_join(threads[i], NULL);
		CHECK(workers[i].bad == 0, "thread %d: %d calls", i, workers[i].bad);
	}
}

static void test_fork(penstock_store store, penstock_namespace ns) {
	pid_t child = fork();
	if (child == 0) {
		alarm(20); // ends a child whose call has entered Go and hangs
		penstock_options o = {.size = sizeof o, .servers = "127.0.0.1:1"};
		penstock_store other;
		penstock_batch batch = whole(NULL, 1);
		uint32_t n;
		int bad = 0;
		bad += penstock_open(&o, &other, &e) != PENSTOCK_ERR_FORKED || strstr(e.message, "fork") == NULL;
		bad += penstock_close(store, &e) != PENSTOCK_ERR_FORKED;
		bad += penstock_get(ns, &batch, results, &r) != PENSTOCK_ERR_FORKED || r.error.code != PENSTOCK_ERR_FORKED;
		bad += penstock_match(ns, NULL, NULL) != PENSTOCK_ERR_FORKED;
		bad += penstock_drain(store, NULL, 0, &n, NULL) != PENSTOCK_ERR_FORKED;
		bad += penstock_leader_open(ns, NULL, &other, &e) != PENSTOCK_ERR_FORKED;
		bad += penstock_attempt_done(store, NULL, 0, &e) != PENSTOCK_ERR_FORKED;
		bad += penstock_gateway_drain(store, NULL, 0, &n, &e) != PENSTOCK_ERR_FORKED;
		bad += penstock_traffic_open(ns, NULL, &other, &e) != PENSTOCK_ERR_FORKED;
		bad += penstock_transfer_layer(store, 0, PENSTOCK_NO_LIMIT, &e) != PENSTOCK_ERR_FORKED;
		bad += penstock_abi_version() != PENSTOCK_ABI_VERSION;
		_exit(bad);
	}
	int status = -1;
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0, "child's status %#x", status);
	penstock_batch batch = whole(NULL, KEYS);
	CHECK(penstock_exists(ns, &batch, results, &r) == PENSTOCK_OK, "the parent after the fork: %s", r.error.message);
}

static int lines;

static void count_line(void *arg, int32_t level, const char *line) {
	lines += *(int *)arg;
	(void)level;
	(void)line;
}

static void test_down(const char *closed_port) {
	penstock_store store;
	penstock_namespace ns;
	int one = 1;
	penstock_options o = {.size = sizeof o, .servers = closed_port, .timeout_ms = 2000, .log = count_line, .log_arg = &one};
	penstock_definition d = define("down", PENSTOCK_FLAT);
	CHECK(penstock_open(&o, &store, &e) == PENSTOCK_OK, "a node that does not answer is tolerated: %s", e.message);
	CHECK(penstock_ensure(store, &d, &ns, &e) == PENSTOCK_ERR_UNAVAILABLE, "%s", e.message);
	CHECK(penstock_close(store, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(lines > 0, "nothing was logged of a node that does not answer");
}

#define TOKEN "a token of the conformance test"

// test_token: a store with a wrong token does not open, and one with the right token works.
static void test_token(const char *server) {
	penstock_store store = 0;
	penstock_namespace ns;
	const char *wrong[] = {NULL, "another token of the same test"};
	penstock_options o = patient(server);
	for (int i = 0; i < 2; i++) {
		o.token = wrong[i];
		CHECK(penstock_open(&o, &store, &e) == PENSTOCK_ERR_AUTH && e.code == PENSTOCK_ERR_AUTH, "%s", e.message);
		CHECK(strstr(e.message, server) && strstr(e.message, "token") && !strstr(e.message, "another token"), "%s", e.message);
		CHECK(store == 0, "a store was opened");
	}
	o.token = TOKEN;
	penstock_definition d = define("token", PENSTOCK_FLAT);
	CHECK(penstock_open(&o, &store, &e) == PENSTOCK_OK && penstock_ensure(store, &d, &ns, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_close(store, &e) == PENSTOCK_OK, "%s", e.message);
}

// test_version: a store does not open if the only node is of another version. With a second
// node it opens, and the keys of the first node are misses.
static void test_version(const char *server, const char *other) {
	penstock_store store = 0;
	penstock_namespace ns;
	penstock_options o = patient(other);
	CHECK(penstock_open(&o, &store, &e) == PENSTOCK_ERR_VERSION && e.code == PENSTOCK_ERR_VERSION && store == 0, "%s", e.message);
	CHECK(strstr(e.message, other) && strstr(e.message, "speaks version 4") && strstr(e.message, "this side version 3") && strstr(e.message, "same release"), "%s", e.message);
	char both[128];
	snprintf(both, sizeof both, "%s,%s", server, other);
	o.servers = both;
	char name[64]; // memcheck reports a read behind the zero byte
	snprintf(name, sizeof name, "version");
	penstock_definition d = define(name, PENSTOCK_FLAT);
	CHECK(penstock_open(&o, &store, &e) == PENSTOCK_OK && penstock_ensure(store, &d, &ns, &e) == PENSTOCK_OK, "%s", e.message);
	make_keys(7);
	uint8_t *memory = calloc(KEYS, VALUE);
	penstock_batch batch = whole(memory, KEYS);
	batch.flags = PENSTOCK_ANY_MEMORY;
	CHECK(penstock_put(ns, &batch, results, &r) == PENSTOCK_OK && r.ok > 0 && r.ok < KEYS, "%s, %u", r.error.message, r.ok);
	uint32_t stored = r.ok, down = 0;
	CHECK(penstock_get(ns, &batch, results, &r) == PENSTOCK_OK && r.ok == stored, "%s, %u of %u", r.error.message, r.ok, stored);
	for (int i = 0; i < KEYS; i++) down += results[i] == PENSTOCK_KEY_DOWN;
	CHECK(down == KEYS - stored, "%u stored, %u down", stored, down);
	free(memory);
	CHECK(penstock_close(store, &e) == PENSTOCK_OK, "%s", e.message);
}

// A leader of one engine.
struct engine {
	penstock_leader leader;
	int32_t fd;
	uint32_t role;
};

static const char *roles[] = {NULL, "prefill", "decode"};

static struct engine lead(penstock_namespace ns, const char *planner, uint32_t role) {
	struct engine engine = {.role = role};
	penstock_planner p = {.size = sizeof p, .address = planner};
	penstock_member m = {.size = sizeof m, .name = roles[role], .address = "\0\1", .address_bytes = 2, .token = roles[role], .token_bytes = 3, .device_blocks = 100};
	penstock_leader_options o = {.size = sizeof o, .planner = &p, .group = roles[role], .node = roles[role], .members = &m, .n_members = 1, .role = role};
	CHECK(penstock_leader_open(ns, &o, &engine.leader, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_leader_eventfd(engine.leader, &engine.fd, &e) == PENSTOCK_OK, "%s", e.message);
	penstock_leader again = 0;
	o.size++;
	CHECK(penstock_leader_open(ns, &o, &again, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "size"), "%s", e.message);
	o.size--;
	p.address = "no port";
	CHECK(penstock_leader_open(ns, &o, &again, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "no port"), "%s", e.message);
	p.address = planner;
	m.name = "";
	CHECK(penstock_leader_open(ns, &o, &again, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "engine"), "%s", e.message);
	m.name = roles[role];
	// Members of version 1.10 end before prefix_cache_blocks.
	struct { char bytes[offsetof(penstock_member, prefix_cache_blocks)]; } old[2];
	m.size = sizeof old[0];
	m.name = "first";
	memcpy(&old[0], &m, sizeof old[0]);
	memcpy(&old[1], &m, sizeof old[1]);
	o.members = (const penstock_member *)old;
	o.n_members = 2;
	CHECK(penstock_leader_open(ns, &o, &again, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "first"), "%s", e.message); // twice
	uint64_t other_size = sizeof m; // of the second member only
	memcpy(&old[1], &other_size, sizeof other_size);
	CHECK(penstock_leader_open(ns, &o, &again, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "one size"), "%s", e.message);
	m.name = "second";
	memcpy(&old[1], &m, sizeof old[1]);
	o.group = "version 1.10";
	CHECK(penstock_leader_open(ns, &o, &again, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_leader_remove(again, "second", &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_leader_close(again, &e) == PENSTOCK_OK, "%s", e.message);
	again = 0;
	m.size = sizeof m;
	m.name = roles[role];
	o.members = &m;
	o.n_members = 1;
	o.group = roles[role];
	o.role = 3;
	CHECK(penstock_leader_open(ns, &o, &again, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "role"), "%s", e.message);
	CHECK(penstock_leader_open(ns, NULL, &again, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	CHECK(again == 0, "a leader was opened");
	CHECK(penstock_leader_add(engine.leader, &m, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "is a member"), "%s", e.message);
	CHECK(penstock_leader_remove(engine.leader, "another", &e) == PENSTOCK_ERR_NOT_FOUND, "%s", e.message);
	penstock_nic nics[PENSTOCK_NICS_MAX + 1] = {{.name = "eth0", .bytes_out = 1, .bytes_in = 2}};
	CHECK(penstock_leader_report_nics(engine.leader, roles[role], nics, PENSTOCK_NICS_MAX, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_leader_report_nics(engine.leader, roles[role], NULL, 0, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_leader_report_nics(engine.leader, roles[role], nics, PENSTOCK_NICS_MAX + 1, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	CHECK(penstock_leader_report_nics(engine.leader, roles[role], NULL, 1, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	CHECK(penstock_leader_report_nics(engine.leader, NULL, nics, 1, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	CHECK(penstock_leader_report_nics(engine.leader, "another", nics, 1, &e) == PENSTOCK_ERR_NOT_FOUND, "%s", e.message);
	memset(nics[0].name, 'n', sizeof nics[0].name);
	CHECK(penstock_leader_report_nics(engine.leader, roles[role], nics, 1, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "zero byte"), "%s", e.message);
	return engine;
}

// becomes_readable waits until a descriptor is readable.
static int becomes_readable(int32_t fd) {
	struct pollfd p = {.fd = fd, .events = POLLIN};
	return poll(&p, 1, 120000) == 1;
}

// action returns the next action of an engine, and checks its kind. Orders about reads may
// come before END, because the other engine has not read its part yet.
static penstock_action action(const struct engine *engine, uint32_t kind) {
	penstock_action a = {0};
	uint32_t n = 0;
	do {
		CHECK(becomes_readable(engine->fd), "%s: no action", roles[engine->role]);
		CHECK(penstock_leader_drain(engine->leader, &a, 1, &n, &e) == PENSTOCK_OK && n == 1, "%s: %u actions: %s", roles[engine->role], n, e.message);
	} while (kind == PENSTOCK_ACTION_END && n == 1 && (a.kind == PENSTOCK_ACTION_READ || a.kind == PENSTOCK_ACTION_CUT));
	CHECK(a.kind == kind, "%s: action %u; want %u", roles[engine->role], a.kind, kind);
	return a;
}

// event takes the events of a gateway until one is of the kind.
static penstock_event event(penstock_gateway gateway, int32_t fd, penstock_request request, uint32_t kind) {
	penstock_event ev = {0};
	uint32_t n = 0;
	while (ev.kind != kind) {
		CHECK(becomes_readable(fd), "no event");
		CHECK(penstock_gateway_drain(gateway, &ev, 1, &n, &e) == PENSTOCK_OK && n == 1 && ev.request == request, "%u events: %s", n, e.message);
		if (n == 0 || (ev.kind >= PENSTOCK_EVENT_DONE && ev.kind != kind)) {
			CHECK(0, "event %u: %s; want %u", ev.kind, ev.error.message, kind);
			break;
		}
	}
	return ev;
}

// perform describes an attempt, checks the description, and reports that its parts were read.
static void perform(const penstock_action *a, const struct engine *engine, const uint8_t *ids, uint32_t blocks) {
	uint64_t need = 0;
	penstock_start *s = malloc(a->start_bytes);
	CHECK(penstock_attempt_describe(a->attempt, s, a->start_bytes - 1, &need, &e) == PENSTOCK_ERR_INVALID && need == a->start_bytes, "%s", e.message);
	CHECK(penstock_attempt_describe(a->attempt, s, a->start_bytes, NULL, &e) == PENSTOCK_OK, "%s", e.message);
	const char *peer = roles[3 - engine->role];
	CHECK(s->size == sizeof *s && strcmp(s->id, "r") == 0 && strcmp(s->ns, "cluster") == 0 && s->name[0] != 0, "%s %s %s", s->id, s->ns, s->name);
	CHECK(strcmp(s->engine, roles[engine->role]) == 0 && strcmp(s->peer_engine, peer) == 0, "%s, %s", s->engine, s->peer_engine);
	CHECK(s->peer_address_bytes == 2 && memcmp(s->peer_address, "\0\1", 2) == 0 && s->peer_token_bytes == 3 && memcmp(s->peer_token, peer, 3) == 0, "peer");
	CHECK(s->n_ids == blocks && memcmp(s->ids, ids, 16 * blocks) == 0 && strcmp(s->extra, "{\"n\":1}") == 0, "%u ids", s->n_ids);
	CHECK(s->payload_bytes > 0 && memchr(s->payload, '{', s->payload_bytes) != NULL, "payload");
	CHECK(s->prompt_tokens == blocks * 16 + 1 && s->output_tokens == 4, "%u tokens, %u", s->prompt_tokens, s->output_tokens);
	for (uint32_t i = 0; i < s->n_parts; i++) {
		penstock_part p = s->parts[i];
		CHECK(p.from < p.to && p.to <= s->hit_blocks, "[%u, %u) of %u", p.from, p.to, s->hit_blocks);
		CHECK(penstock_attempt_progress(a->attempt, p, p.to, (uint64_t)(p.to - p.from) * VALUE, &e) == PENSTOCK_OK, "%s", e.message);
	}
	penstock_part bad = {.from = 0, .to = s->hit_blocks + 1};
	CHECK(penstock_attempt_progress(a->attempt, bad, 0, 0, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	CHECK(penstock_attempt_stopped(a->attempt, bad, 0, 1, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	CHECK(penstock_attempt_passed(a->attempt, &e) == PENSTOCK_OK, "%s", e.message);
	free(s);
}

// test_cluster: two leaders and a gateway serve a request, and give up another one. One leader
// stays open, for penstock_close.
static struct engine test_cluster(penstock_store store, const char *planner, uint8_t *values) {
	enum { BLOCKS = 4, TOKENS = BLOCKS * 16 + 1 };
	penstock_namespace ns, flat;
	penstock_definition d = define("cluster", PENSTOCK_CHAINED);
	d.keys = PENSTOCK_KEYS_IDS;
	CHECK(penstock_ensure(store, &d, &ns, &e) == PENSTOCK_OK, "%s", e.message);
	uint32_t tokens[TOKENS], n = 0;
	uint8_t ids[BLOCKS * 16];
	for (uint32_t i = 0; i < TOKENS; i++) tokens[i] = i * 7;
	CHECK(penstock_chain(ns, NULL, NULL, 0, tokens, TOKENS, ids, &n, &e) == PENSTOCK_OK && n == BLOCKS, "%s", e.message);
	penstock_batch batch = whole(values, BLOCKS);
	uint32_t ends[BLOCKS + 1];
	for (uint32_t i = 0; i <= BLOCKS; i++) ends[i] = 16 * i;
	batch.keys = ids;
	batch.key_offsets = ends;
	batch.flags = PENSTOCK_ANY_MEMORY;
	CHECK(penstock_put(ns, &batch, results, &r) == PENSTOCK_OK && r.ok == BLOCKS, "%s", r.error.message);

	struct engine prefill = lead(ns, planner, PENSTOCK_ROLE_PREFILL), decode = lead(ns, planner, PENSTOCK_ROLE_DECODE);
	penstock_planner p = {.size = sizeof p, .address = planner};
	penstock_gateway_options o = {.size = sizeof o, .planner = &p};
	penstock_gateway gateway = 0, again = 0;
	penstock_request request = 0;
	int32_t fd = -1;
	CHECK(penstock_gateway_open(ns, &o, &gateway, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_gateway_eventfd(gateway, &fd, &e) == PENSTOCK_OK, "%s", e.message);
	d = define("cluster.flat", PENSTOCK_FLAT);
	CHECK(penstock_ensure(store, &d, &flat, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_gateway_open(flat, &o, &again, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "flat") && again == 0, "%s", e.message);

	penstock_prompt prompt = {.size = sizeof prompt, .id = "r", .tokens = tokens, .n_tokens = TOKENS, .output_tokens = 4, .extra = "{"};
	CHECK(penstock_gateway_submit(gateway, &prompt, &request, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "JSON"), "%s", e.message);
	prompt.extra = "{\"n\":1}";
	CHECK(penstock_gateway_submit(gateway, &prompt, &request, &e) == PENSTOCK_OK && request != 0, "%s", e.message);
	memset(tokens, 0xff, sizeof tokens); // the library has copied them
	penstock_event ev = event(gateway, fd, request, PENSTOCK_EVENT_MATCHED);
	CHECK(ev.hit_tokens == BLOCKS * 16, "%u", ev.hit_tokens);
	ev = event(gateway, fd, request, PENSTOCK_EVENT_STARTED);
	CHECK(strcmp(ev.prefill, "prefill") == 0 && strcmp(ev.decode, "decode") == 0 && ev.read_by_prefill + ev.read_by_decode == BLOCKS * 16, "%s, %s, %u + %u", ev.prefill, ev.decode, ev.read_by_prefill, ev.read_by_decode);
	CHECK(strncmp(ev.error.message, "r#", 2) == 0, "the attempt is \"%s\"", ev.error.message);
	struct engine *engines[] = {&prefill, &decode};
	for (int i = 0; i < 2; i++) {
		penstock_action a = action(engines[i], PENSTOCK_ACTION_START);
		perform(&a, engines[i], ids, BLOCKS);
		CHECK(penstock_attempt_done(a.attempt, NULL, BLOCKS + 1, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
		CHECK(penstock_attempt_done(a.attempt, NULL, 0, &e) == PENSTOCK_OK, "%s", e.message);
		CHECK(penstock_attempt_done(a.attempt, NULL, 0, &e) == PENSTOCK_ERR_CLOSED, "%s", e.message);
	}
	event(gateway, fd, request, PENSTOCK_EVENT_DONE);
	CHECK(penstock_request_cancel(request, &e) == PENSTOCK_ERR_CLOSED, "%s", e.message);

	prompt = (penstock_prompt){.size = sizeof prompt, .id = "given up", .ids = ids, .n_ids = BLOCKS, .prompt_tokens = TOKENS};
	CHECK(penstock_gateway_submit(gateway, &prompt, &request, &e) == PENSTOCK_OK, "%s", e.message);
	penstock_action starts[2];
	for (int i = 0; i < 2; i++) starts[i] = action(engines[i], PENSTOCK_ACTION_START);
	CHECK(penstock_request_cancel(request, &e) == PENSTOCK_OK, "%s", e.message);
	ev = event(gateway, fd, request, PENSTOCK_EVENT_FAILED);
	CHECK(ev.error.code == PENSTOCK_ERR_CANCELED, "%d %s", ev.error.code, ev.error.message);
	for (int i = 0; i < 2; i++) {
		CHECK(action(engines[i], PENSTOCK_ACTION_END).attempt == starts[i].attempt, "END of another attempt");
		CHECK(penstock_attempt_done(starts[i].attempt, "given up", 0, &e) == PENSTOCK_OK, "%s", e.message);
	}
	int last = dup(decode.fd);
	CHECK(penstock_leader_close(decode.leader, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_leader_close(decode.leader, &e) == PENSTOCK_ERR_CLOSED, "%s", e.message);
	CHECK(becomes_readable(last), "the duplicate of a closed leader's descriptor");
	close(last);
	CHECK(penstock_gateway_close(gateway, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_gateway_submit(gateway, &prompt, &request, &e) == PENSTOCK_ERR_CLOSED, "%s", e.message);
	return prefill;
}

// A traffic manager with PAGES pages, in which all layers of a block are adjacent.
enum { PAGES = 8 };
struct side {
	penstock_traffic traffic;
	int32_t fd;
	uint8_t *memory;
	penstock_traffic_description description;
};

static struct side move(penstock_namespace ns, penstock_namespace flat) {
	struct side side = {.memory = calloc(PAGES, VALUE), .description = {.size = sizeof(penstock_traffic_description)}};
	uint64_t bases[LAYERS];
	for (int l = 0; l < LAYERS; l++) bases[l] = l * LAYER;
	penstock_traffic_options o = {.size = sizeof o, .memory = side.memory, .memory_bytes = PAGES * VALUE, .bases = bases, .n_bases = LAYERS, .stride = VALUE, .pages = PAGES, .buffer_bytes = 1 << 20, .verify = PENSTOCK_VERIFY_LAST_HOP};
	CHECK(penstock_traffic_open(ns, &o, &side.traffic, &e) == PENSTOCK_OK, "%s", e.message);
	memset(bases, 0xff, sizeof bases); // the library has copied them
	CHECK(penstock_traffic_eventfd(side.traffic, &side.fd, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_traffic_follow(side.traffic, 0, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "host memory"), "%s", e.message);
	penstock_traffic_description *d = &side.description;
	CHECK(penstock_traffic_describe(side.traffic, d, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(d->address_bytes == strlen(d->address) && strncmp(d->address, "127.0.0.1:", 10) == 0 && d->token_bytes == 32, "%s, %u", d->address, d->token_bytes);
	CHECK(d->buffer_bytes == 1 << 20 && d->block_bytes == VALUE && d->sums_bytes == 8 * LAYERS && d->request_bytes > 0, "%llu", (unsigned long long)d->block_bytes);
	d->size--;
	CHECK(penstock_traffic_describe(side.traffic, d, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "size"), "%s", e.message);
	CHECK(penstock_traffic_describe(side.traffic, NULL, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);

	penstock_traffic again = 0;
	for (int l = 0; l < LAYERS; l++) bases[l] = l * LAYER;
	CHECK(penstock_traffic_open(flat, &o, &again, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "flat"), "%s", e.message);
	CHECK(penstock_traffic_open(ns, NULL, &again, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	CHECK(penstock_traffic_open(ns, &o, NULL, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	o.size++;
	CHECK(penstock_traffic_open(ns, &o, &again, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "size"), "%s", e.message);
	o.size--;
	o.pages++;
	CHECK(penstock_traffic_open(ns, &o, &again, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "device pages"), "%s", e.message);
	o.pages--;
	o.bases = NULL;
	CHECK(penstock_traffic_open(ns, &o, &again, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "bases"), "%s", e.message);
	o.bases = bases;
	o.size = offsetof(penstock_traffic_options, cuda); /* a caller of version 1.5, whose structure has other bytes behind it */
	o.cuda = 100;
	CHECK(penstock_traffic_open(ns, &o, &again, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_traffic_close(again, &e) == PENSTOCK_OK, "%s", e.message);
	again = 0;
	o.cuda = 0;
	o.size = offsetof(penstock_traffic_options, ca_file); /* a caller of version 1.6 */
	o.ca_file = "/no/such/file";
	CHECK(penstock_traffic_open(ns, &o, &again, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_traffic_close(again, &e) == PENSTOCK_OK, "%s", e.message);
	again = 0;
	o.size = sizeof o;
	CHECK(penstock_traffic_open(ns, &o, &again, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "cert_file"), "%s", e.message);
	o.cert_file = o.key_file = "/no/such/file";
	CHECK(penstock_traffic_open(ns, &o, &again, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "ca_file"), "%s", e.message);
	o.ca_file = o.cert_file = o.key_file = NULL;
	uint32_t order[LAYERS + 1] = {0}; /* layer 0 more than once */
	o.order = order;
	o.size = offsetof(penstock_traffic_options, order); /* a caller of version 1.9 */
	o.n_order = LAYERS;
	CHECK(penstock_traffic_open(ns, &o, &again, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_traffic_close(again, &e) == PENSTOCK_OK, "%s", e.message);
	again = 0;
	o.size = sizeof o;
	CHECK(penstock_traffic_open(ns, &o, &again, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "order lists"), "%s", e.message);
	o.order = NULL;
	CHECK(penstock_traffic_open(ns, &o, &again, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "order"), "%s", e.message);
	o.n_order = 0;
	o.tables = order;
	o.n_tables = LAYERS + 1;
	CHECK(penstock_traffic_open(ns, &o, &again, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "page tables"), "%s", e.message);
	o.tables = NULL;
	CHECK(penstock_traffic_open(ns, &o, &again, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "page tables"), "%s", e.message);
	o.n_tables = 0;
	o.memory = NULL;
	CHECK(penstock_traffic_open(ns, &o, &again, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "device memory"), "%s", e.message);
	o.memory = side.memory;
	o.token_bytes = 300;
	CHECK(penstock_traffic_open(ns, &o, &again, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "token"), "%s", e.message);
	o.token_bytes = 0;
	o.cuda = 100;
	CHECK(penstock_traffic_open(ns, &o, &again, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "device memory: ") && (strstr(e.message, "CUDA driver") || strstr(e.message, "GPU 99")), "%s", e.message);
	o.cuda = 0;
	o.verify = 1u << 31;
	CHECK(penstock_traffic_open(ns, &o, &again, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "verify"), "%s", e.message);
	o.verify = PENSTOCK_VERIFY_EVERY_HOP;
	o.listen = "no port";
	CHECK(penstock_traffic_open(ns, &o, &again, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "no port"), "%s", e.message);
	CHECK(again == 0, "a traffic manager was opened");
	return side;
}

// moved takes the events of a side until one is of the kind. Only PROGRESS may come before it.
static penstock_transfer_event moved(const struct side *side, penstock_transfer transfer, uint32_t kind) {
	penstock_transfer_event ev = {0};
	uint32_t n = 0;
	do {
		CHECK(becomes_readable(side->fd), "no event");
		CHECK(penstock_traffic_drain(side->traffic, &ev, 1, &n, &e) == PENSTOCK_OK && n == 1 && ev.transfer == transfer, "%u events: %s", n, e.message);
	} while (n == 1 && ev.kind == PENSTOCK_TRANSFER_PROGRESS && kind != ev.kind);
	CHECK(ev.kind == kind, "event %u: %s; want %u", ev.kind, ev.error.message, kind);
	return ev;
}

// test_traffic: a prompt is computed on one side and arrives on the other, which stores it. The next
// request reads it on both sides. One traffic manager stays open, for penstock_close.
static struct side test_traffic(penstock_store store) {
	enum { BLOCKS = 3, TOKENS = (BLOCKS + 2) * 16 };
	penstock_namespace ns, flat;
	penstock_definition d = define("traffic", PENSTOCK_CHAINED);
	d.keys = PENSTOCK_KEYS_IDS;
	CHECK(penstock_ensure(store, &d, &ns, &e) == PENSTOCK_OK, "%s", e.message);
	d = define("traffic.flat", PENSTOCK_FLAT);
	CHECK(penstock_ensure(store, &d, &flat, &e) == PENSTOCK_OK, "%s", e.message);
	uint32_t tokens[TOKENS], n = 0, pages[PAGES];
	uint8_t ids[16 * (BLOCKS + 2)];
	for (uint32_t i = 0; i < TOKENS; i++) tokens[i] = i * 5;
	for (uint32_t i = 0; i < PAGES; i++) pages[i] = PAGES - 1 - i;
	CHECK(penstock_chain(ns, NULL, NULL, 0, tokens, TOKENS, ids, &n, &e) == PENSTOCK_OK && n == BLOCKS + 2, "%s", e.message);
	struct side prefill = move(ns, flat), decode = move(ns, flat);

	penstock_transfer p = 0, q = 0;
	penstock_transfer_options o = {.size = sizeof o, .request = "r", .ids = ids, .n_ids = BLOCKS, .blocks = BLOCKS, .timeout_ms = 120000};
	penstock_part read[] = {{0, 1}, {1, BLOCKS}};
	for (int turn = 0; turn < 2; turn++) {
		uint32_t blocks = turn == 0 ? BLOCKS : BLOCKS + 1, hit = turn == 0 ? 0 : BLOCKS;
		o.blocks = blocks;
		o.n_ids = blocks;
		o.hit_blocks = hit;
		o.n_parts = turn;
		o.parts = &read[0];
		CHECK(penstock_traffic_prefill(prefill.traffic, &o, &p, &e) == PENSTOCK_OK, "%s", e.message);
		penstock_transfer_options to = o;
		to.parts = &read[1];
		to.pages = pages;
		to.n_pages = blocks;
		to.peer_address = prefill.description.address;
		to.peer_address_bytes = prefill.description.address_bytes;
		to.peer_token = prefill.description.token;
		to.peer_token_bytes = prefill.description.token_bytes;
		to.resident_blocks = blocks + 1;
		CHECK(penstock_traffic_decode(decode.traffic, &to, &q, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "resident"), "%s", e.message);
		to.resident_blocks = turn; // the first turn has left the first block in its page
		CHECK(penstock_traffic_decode(decode.traffic, &to, &q, &e) == PENSTOCK_OK, "%s", e.message);
		if (turn == 1) {
			penstock_transfer_event ev = moved(&decode, q, PENSTOCK_TRANSFER_PROGRESS);
			CHECK(ev.part.from == 1 && ev.part.to == BLOCKS && ev.upto <= BLOCKS && ev.bytes <= (BLOCKS - 1) * VALUE, "[%u, %u), %u", ev.part.from, ev.part.to, ev.upto);
		}
		CHECK(moved(&prefill, p, PENSTOCK_TRANSFER_LOADED).first_miss == hit, "the first miss of turn %d", turn);
		if (turn == 0) CHECK(penstock_transfer_computed(p, 0, blocks, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "pages"), "%s", e.message);
		CHECK(penstock_transfer_add_pages(p, pages + 1, blocks, &e) == PENSTOCK_OK, "%s", e.message);
		CHECK(penstock_transfer_add_pages(p, pages, 1, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
		for (uint32_t l = 0; l < LAYERS; l++) {
			CHECK(penstock_transfer_layer(p, l, PENSTOCK_NO_LIMIT, &e) == PENSTOCK_OK, "%s", e.message);
			for (uint32_t b = 0; b < blocks; b++) {
				uint8_t *at = prefill.memory + pages[1 + b] * VALUE + l * LAYER;
				if (b < hit) CHECK(same(at, b, l * LAYER, LAYER), "turn %d, block %u, layer %u in prefill", turn, b, l);
				else fill(at, b, l * LAYER, LAYER);
			}
			CHECK(penstock_transfer_computed(p, l, blocks, &e) == PENSTOCK_OK, "%s", e.message);
		}
		CHECK(penstock_transfer_layer(p, LAYERS, 0, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "layer"), "%s", e.message);
		CHECK(penstock_transfer_layer(q, 0, 0, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "decode"), "%s", e.message);
		CHECK(penstock_transfer_finish(p, &e) == PENSTOCK_OK, "%s", e.message);
		moved(&prefill, p, PENSTOCK_TRANSFER_FINISHED);
		CHECK(penstock_transfer_finish(p, &e) == PENSTOCK_ERR_CLOSED, "%s", e.message);
		moved(&decode, q, PENSTOCK_TRANSFER_READY);
		for (uint32_t b = 0; b < blocks; b++) CHECK(same(decode.memory + pages[b] * VALUE, b, 0, VALUE), "turn %d, block %u in decode", turn, b);
		CHECK(penstock_transfer_finish(q, &e) == PENSTOCK_OK, "%s", e.message);
		moved(&decode, q, PENSTOCK_TRANSFER_FINISHED);
	}
	CHECK(penstock_traffic_append(decode.traffic, "r", ids, BLOCKS + 2, 0, pages[0], PENSTOCK_NO_LIMIT, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_traffic_settle(decode.traffic, ids + 16 * (BLOCKS + 1), PENSTOCK_NO_LIMIT, &e) == PENSTOCK_OK, "%s", e.message);
	uint32_t ends[BLOCKS + 3];
	for (uint32_t i = 0; i < BLOCKS + 3; i++) ends[i] = 16 * i;
	penstock_batch batch = {.size = sizeof batch, .n_keys = BLOCKS + 2, .keys = ids, .key_offsets = ends};
	CHECK(penstock_match(ns, &batch, &r) == PENSTOCK_OK && r.prefix == BLOCKS + 2, "%u of %u blocks are stored: %s", r.prefix, BLOCKS + 2, r.error.message);
	CHECK(penstock_traffic_append(decode.traffic, "r", NULL, 1, 0, 0, 0, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	CHECK(penstock_traffic_append(decode.traffic, "r", ids, 1, 0, PAGES, 1000, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "page 8"), "%s", e.message);
	CHECK(penstock_traffic_append_pages(decode.traffic, "r", ids, BLOCKS + 2, 0, pages, 1, 1000, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_traffic_append_pages(decode.traffic, "r", ids, 1, 0, pages, 2, 1000, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "2 device pages"), "%s", e.message);
	CHECK(penstock_traffic_append_pages(decode.traffic, "r", ids, 1, 0, NULL, 1, 1000, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	CHECK(penstock_traffic_settle(decode.traffic, NULL, 0, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	// The whole prompt of the first turn, and of the second the new block: decode has read or kept the
	// others. Their checksums take less than a block.
	uint64_t forwarded = (BLOCKS + 1) * (uint64_t)VALUE;
	penstock_nic sent, received;
	uint32_t n_sent = 0, n_received = 0;
	CHECK(penstock_traffic_nics(prefill.traffic, &sent, 1, &n_sent, &e) == PENSTOCK_OK && n_sent == 1, "%s", e.message);
	CHECK(penstock_traffic_nics(decode.traffic, &received, 1, &n_received, &e) == PENSTOCK_OK && n_received == 1, "%s", e.message);
	CHECK(sent.name[0] && strcmp(sent.name, received.name), "NICs %s, %s", sent.name, received.name);
	CHECK(received.bytes_in >= forwarded && received.bytes_in < forwarded + VALUE && sent.bytes_out >= received.bytes_in, "sent %llu bytes, received %llu, of %llu of KV",
		(unsigned long long)sent.bytes_out, (unsigned long long)received.bytes_in, (unsigned long long)forwarded);
	CHECK(penstock_traffic_nics(prefill.traffic, NULL, 0, &n_sent, &e) == PENSTOCK_OK && n_sent == 0, "%s", e.message);
	CHECK(penstock_traffic_nics(prefill.traffic, NULL, 1, &n_sent, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	CHECK(penstock_traffic_nics(prefill.traffic, &sent, 1, NULL, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);

	penstock_transfer none = 0;
	CHECK(penstock_traffic_prefill(prefill.traffic, NULL, &none, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	CHECK(penstock_traffic_prefill(prefill.traffic, &o, NULL, &e) == PENSTOCK_ERR_INVALID, "%s", e.message);
	CHECK(penstock_traffic_decode(decode.traffic, &o, &none, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "pages"), "%s", e.message);
	o.hit_blocks = o.blocks + 1;
	CHECK(penstock_traffic_prefill(prefill.traffic, &o, &none, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "cached blocks"), "%s", e.message);
	o.hit_blocks = BLOCKS;
	o.ids = NULL;
	CHECK(penstock_traffic_prefill(prefill.traffic, &o, &none, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "ids"), "%s", e.message);
	o.ids = ids;
	o.size--;
	CHECK(penstock_traffic_prefill(prefill.traffic, &o, &none, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "size"), "%s", e.message);
	o.size++;
	CHECK(none == 0, "a transfer was begun");
	CHECK(penstock_traffic_prefill(prefill.traffic, &o, &p, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_traffic_prefill(prefill.traffic, &o, &none, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "under way"), "%s", e.message);
	CHECK(penstock_transfer_layer(p, 0, 1, &e) == PENSTOCK_ERR_TIMEOUT, "%s", e.message);
	CHECK(penstock_transfer_read(p, (penstock_part){2, BLOCKS + 1}, &e) == PENSTOCK_ERR_INVALID && strstr(e.message, "[2, 4)"), "%s", e.message);
	CHECK(penstock_transfer_read(p, read[1], &e) == PENSTOCK_OK && penstock_transfer_cut(p, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_transfer_recompute(p, read[0], &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_transfer_cancel(p, &e) == PENSTOCK_OK, "%s", e.message);
	penstock_transfer_event ev = moved(&prefill, p, PENSTOCK_TRANSFER_FAILED);
	CHECK(ev.error.code == PENSTOCK_ERR_CANCELED && strstr(ev.error.message, "cancelled") && ev.intact == 0, "%d %s", ev.error.code, ev.error.message);
	CHECK(penstock_transfer_layer(p, 0, 0, &e) == PENSTOCK_ERR_CLOSED, "%s", e.message);

	o.request = "s";
	CHECK(penstock_traffic_prefill(prefill.traffic, &o, &p, &e) == PENSTOCK_OK, "%s", e.message);
	int last = dup(prefill.fd);
	CHECK(penstock_traffic_close(prefill.traffic, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_traffic_close(prefill.traffic, &e) == PENSTOCK_ERR_CLOSED, "%s", e.message);
	CHECK(penstock_transfer_cancel(p, &e) == PENSTOCK_ERR_CLOSED, "%s", e.message);
	CHECK(becomes_readable(last), "the duplicate of a closed traffic manager's descriptor");
	close(last);
	free(prefill.memory);
	return decode;
}

int main(int argc, char **argv) {
	if (argc != 5) return 2;
	uint8_t *a = malloc(KEYS * VALUE), *b = malloc(KEYS * VALUE);
	penstock_store store = 0;
	penstock_namespace ns = 0;
	test_arguments(argv[1]);
	penstock_options o = patient(argv[1]);
	o.jobs_max = 8;
	if (penstock_open(&o, &store, &e) != PENSTOCK_OK) {
		fprintf(stderr, "open %s: %s\n", argv[1], e.message);
		return 1;
	}
	test_ensure(store);
	test_flat(store, a, b);
	test_chained(store, a);
	test_ids(store, a);
	test_jobs(store, a, b);
	test_threads(store);
	penstock_definition d = define("flat", PENSTOCK_FLAT);
	CHECK(penstock_ensure(store, &d, &ns, &e) == PENSTOCK_OK, "%s", e.message);
	test_fork(store, ns);
	test_down("127.0.0.1:1");
	test_token(argv[2]);
	test_version(argv[1], argv[3]);
	struct engine open = test_cluster(store, argv[4], a);
	struct side moving = test_traffic(store);
	int32_t fd = -1;
	uint32_t n;
	CHECK(penstock_eventfd(store, &fd, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_close(store, &e) == PENSTOCK_OK, "%s", e.message);
	CHECK(penstock_close(store, &e) == PENSTOCK_ERR_CLOSED, "%s", e.message);
	CHECK(penstock_leader_drain(open.leader, NULL, 0, &n, &e) == PENSTOCK_ERR_CLOSED, "%s", e.message);
	CHECK(penstock_traffic_drain(moving.traffic, NULL, 0, &n, &e) == PENSTOCK_ERR_CLOSED, "%s", e.message);
	free(moving.memory);
	penstock_batch batch = whole(a, KEYS);
	CHECK(penstock_get(ns, &batch, results, &r) == PENSTOCK_ERR_CLOSED && r.error.message[0] != 0, "a closed store: %s", r.error.message);
	free(a);
	free(b);
	if (failures > 0) fprintf(stderr, "%d checks failed\n", failures);
	return failures > 0;
}
