/*
 * penstock.h: the C interface of libpenstock, a client of Penstock's storage nodes.
 *
 * A store is a connection to one or several nodes. A namespace is the KV cache of
 * one model in one layout. A key identifies one block of the namespace. Each key has
 * one value; all values of a namespace have the same size. A batch is a call for many
 * keys.
 *
 *   penstock_open ─► penstock_ensure ─► penstock_register ─► penstock_match, penstock_get, penstock_put, …
 *                                  ├──► penstock_leader_open ─► penstock_leader_drain, penstock_attempt_done, …
 *                                  ├──► penstock_gateway_open ─► penstock_gateway_submit, penstock_gateway_drain
 *                                  └──► penstock_traffic_open ─► penstock_traffic_prefill, penstock_transfer_layer, …
 *
 * THREADS. Any thread may call any function, and several threads may use one handle at
 * the same time. No function needs a lock of the caller's language, so a binding releases
 * the interpreter's lock around each call. penstock_submit, penstock_drain,
 * penstock_cancel, penstock_eventfd, penstock_abi_version, and the functions of leaders,
 * attempts, gateways, requests, traffic managers and transfers do not wait for a node, a planner
 * or another engine, except penstock_leader_close, penstock_gateway_close, penstock_traffic_close,
 * penstock_traffic_append, penstock_traffic_append_pages, penstock_traffic_settle and penstock_transfer_layer. All other functions
 * may wait until their time limit.
 * Signal handlers must not call any function of this header.
 *
 * HANDLES are numbers. 0 is no handle. The library uses each number once in a process. A
 * call with a closed handle fails with PENSTOCK_ERR_CLOSED and does nothing.
 *
 * OWNERSHIP. Strings, keys, structures and arrays belong to the caller. The library
 * copies them before the function returns. There are two exceptions. A traffic manager uses its
 * device memory until penstock_traffic_close has returned. A submitted job uses the
 * memory of its values, its array of results and the key_epochs of a match until the job
 * ends. The caller must not change, use or free these until penstock_drain, penstock_wait or penstock_submit_wait
 * has returned the job's completion, or penstock_close has returned. After that the library has no pointer
 * to them.
 *
 * ERRORS. A function that can fail returns a code, PENSTOCK_OK or one of PENSTOCK_ERR_*.
 * It also writes the code and an English text to the caller's penstock_error or
 * penstock_result, which may be NULL. The text ends with a zero byte. A text that is too
 * long is truncated. A missing block, a node that is down and a full node are not errors:
 * the result of the key reports them.
 *
 * FORK. A forked child does not have the library's threads. If the parent had loaded the
 * library, each function returns PENSTOCK_ERR_FORKED in the child at once and does
 * nothing. The parent is not affected. To use the library in a child, fork before the
 * library is loaded (dlopen, ctypes.CDLL), or execute a new program in the child. dlclose
 * does not unload the library.
 *
 * SIGNALS. Loading installs handlers for SIGSEGV, SIGBUS, SIGFPE, SIGPIPE and SIGURG.
 * They pass signals that the library's own code did not raise to the handlers that were
 * installed before. The library does not change the handling of other signals.
 *
 * VERSIONS. Structures that may grow begin with a field size. Set it to the sizeof of the
 * structure. Zero in another field selects the default. A library accepts callers of its
 * major version and of its own or an earlier minor version: fields that the caller's
 * structure lacks are 0.
 */
#ifndef PENSTOCK_H
#define PENSTOCK_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this interface: the major version in the upper 16 bits, the minor version in the lower. */
#define PENSTOCK_ABI_VERSION 0x0001000cu

/* The length of the longest key, in bytes. */
#define PENSTOCK_KEY_MAX 256
/* The greatest number of keys in a batch. */
#define PENSTOCK_BATCH_MAX 65536

typedef uint64_t penstock_store;
typedef uint64_t penstock_namespace;
typedef uint64_t penstock_memory;
typedef uint64_t penstock_lease;
typedef uint64_t penstock_job;
typedef uint64_t penstock_leader;
typedef uint64_t penstock_attempt;
typedef uint64_t penstock_gateway;
typedef uint64_t penstock_request;
typedef uint64_t penstock_traffic;
typedef uint64_t penstock_transfer;

/* Return codes. */
enum {
	PENSTOCK_OK = 0,
	PENSTOCK_ERR_INVALID = 1,      /* an argument is invalid; the text names it and the reason; fix the caller */
	PENSTOCK_ERR_CLOSED = 2,       /* the handle is closed, or the library never returned it */
	PENSTOCK_ERR_FORKED = 3,       /* this process is a forked child of the process that loaded the library */
	PENSTOCK_ERR_AUTH = 4,         /* the node refuses the token or the certificate */
	PENSTOCK_ERR_MISMATCH = 5,     /* the node's namespace has another geometry, index, tenant, salt or epoch */
	PENSTOCK_ERR_NOT_FOUND = 6,    /* the namespace, lease, job or engine does not exist */
	PENSTOCK_ERR_UNAVAILABLE = 7,  /* a required node, or the engine on the other side, does not answer */
	PENSTOCK_ERR_BUSY = 8,         /* penstock_options.jobs_max jobs are running or not drained, the memory is in use, or another limit of the text is reached */
	PENSTOCK_ERR_TIMEOUT = 9,      /* the time limit has passed; the library no longer uses the memory of the call */
	PENSTOCK_ERR_CANCELED = 10,    /* penstock_cancel, penstock_close, or another end of the job or transfer; the library no longer uses its memory */
	PENSTOCK_ERR_UNREGISTERED = 11, /* a value does not lie in registered memory */
	PENSTOCK_ERR_PROVIDER = 12,    /* the node's data plane is not tcp, the only one of this library */
	PENSTOCK_ERR_VERSION = 13,     /* the node is of another version: it does not have the call, or its data plane has another protocol; the text has the versions */
	PENSTOCK_ERR_INTERNAL = 14,    /* another error; see the text */
	PENSTOCK_ERR_REFUSED = 15      /* the planner refuses the request; the text has its reason. Since version 1.4 */
};

/* The result of one key or piece. 0 is a miss. 1 and 2 are successes. */
enum {
	PENSTOCK_KEY_MISS = 0,    /* get, exists, touch, delete: not stored. put: not tried */
	PENSTOCK_KEY_OK = 1,      /* get: loaded and verified. put: stored. exists, touch: stored. delete: removed */
	PENSTOCK_KEY_EXISTS = 2,  /* put: stored before; nothing was sent */
	PENSTOCK_KEY_BUSY = 3,    /* the node is overloaded; try again */
	PENSTOCK_KEY_LOST = 4,    /* get: stored, but corrupt, or the device or the transfer failed. The bytes are undefined */
	PENSTOCK_KEY_REFUSED = 5, /* put: refused, because the node is full, the quota is reached, the parent is absent, or the epoch has ended */
	PENSTOCK_KEY_DOWN = 6     /* the node of this key does not answer */
};

/* The code and the text of a function's result. */
typedef struct penstock_error {
	int32_t code;
	char message[508];
} penstock_error;

/* Levels of log lines. */
enum {
	PENSTOCK_LOG_DEBUG = -4,
	PENSTOCK_LOG_INFO = 0,
	PENSTOCK_LOG_WARN = 4,
	PENSTOCK_LOG_ERROR = 8
};

/*
 * A callback for log lines, which have no newline. The library calls it from a thread of
 * its own, one call at a time. No function of this header waits for the callback. If the
 * callback is too slow, lines are dropped and counted. The callback may call any function
 * but penstock_close. It is not called after penstock_close has returned.
 */
typedef void (*penstock_log)(void *arg, int32_t level, const char *line);

/* Options of a store. Only size and servers are required. */
typedef struct penstock_options {
	uint64_t size;          /* sizeof(penstock_options) */
	const char *servers;    /* host:port of each node's gRPC, separated by commas; without discover all clients must spell the addresses alike */
	const char *token;      /* bearer token; NULL: none */
	const char *token_file; /* file with the bearer token, read again when it has changed; only if token is NULL */
	const char *ca_file;    /* TLS: certificate authority of the nodes (PEM). If ca_file and cert_file are NULL: plaintext */
	const char *cert_file;  /* TLS: client certificate (PEM) */
	const char *key_file;   /* TLS: private key of cert_file (PEM) */
	penstock_log log;       /* callback for log lines; NULL: none */
	void *log_arg;          /* first argument of log */
	int32_t log_level;      /* lowest level of the lines */
	uint32_t insecure;      /* 1: allow sending the token in plaintext to a host other than loopback */
	uint32_t dial_timeout_ms; /* time limit of one attempt to connect to a node; default 3000 */
	uint32_t dead_for_ms;   /* time between two attempts to connect to a node that is down; default 5000 */
	uint32_t timeout_ms;    /* time limit of calls without one of their own; default 30000 */
	uint32_t jobs_max;      /* greatest number of jobs that are running or not drained; default 1024 */
	uint32_t jobs_parallel; /* greatest number of jobs that run at the same time; the others wait and start in the order of their submission; default 16 */
	uint32_t connections;   /* TCP connections for payload to each node; default 4 */
	uint32_t discover;      /* 1: servers are some members of a cluster; the store follows the list of all members, and keys are distributed by the members' capacities. All clients of a cluster must set it alike. Since version 1.8 */
	uint32_t reserved;      /* 0 */
	const char *zone;       /* zone of this host, as in the nodes' cluster.zone: of the replicas of a block, one in this zone is read first. NULL: none. Since version 1.8 */
} penstock_options;

/* Returns the version of the library, PENSTOCK_ABI_VERSION at build time. A forked child may call it too. */
uint32_t penstock_abi_version(void);

/*
 * Opens a store. It takes at most dial_timeout_ms. Nodes that do not answer are down until
 * they answer; they do not make penstock_open fail. It fails if every node refuses the
 * client. Errors: INVALID, AUTH, PROVIDER, VERSION, FORKED.
 */
int32_t penstock_open(const penstock_options *options, penstock_store *store, penstock_error *error);

/*
 * Closes a store with all its namespaces, memories, leases, jobs, leaders, gateways and traffic managers, and cancels running
 * jobs. When it has returned, the library does not access the caller's memory, and the
 * eventfd is closed. Completions that were not returned are lost. Leases that were not
 * released expire. A second call returns CLOSED. Errors: CLOSED, FORKED.
 */
int32_t penstock_close(penstock_store store, penstock_error *error);

/* Relations between the keys of a namespace. */
enum {
	/*
	 * The keys of a batch are a chain: the keys of one prompt, from its first block on. A
	 * block can be found while all blocks before it are stored. penstock_match finds the
	 * longest prefix. The last blocks of chains are evicted first. A key must identify the
	 * whole prefix up to its block, as the block hashes of engines do. If a key is stored
	 * with one parent, a put with another parent is refused.
	 */
	PENSTOCK_CHAINED = 1,
	/* Keys are independent of each other. */
	PENSTOCK_FLAT = 2
};

/* Formats of keys. */
enum {
	/* 1 to 256 bytes of any value. penstock_key_ids has the formula from keys to block ids. */
	PENSTOCK_KEYS_ANY = 0,
	/* Block ids of 16 bytes, for example from penstock_chain. */
	PENSTOCK_KEYS_IDS = 1
};

/* Kinds of layer groups. */
enum {
	PENSTOCK_GROUP_FULL = 1,   /* a prefix needs all its blocks */
	PENSTOCK_GROUP_WINDOW = 2, /* a prefix needs the blocks of its last window_tokens tokens */
	PENSTOCK_GROUP_STATE = 3   /* a prefix needs its last block, which is one snapshot of token_bytes per layer */
};

/*
 * A layer group: layers of which a prefix needs the same blocks. One block of one group is
 * a piece. A piece has layers × layer bytes, where layer bytes are block_tokens ×
 * token_bytes, or token_bytes in a group of kind STATE.
 */
typedef struct penstock_group {
	uint32_t kind;          /* PENSTOCK_GROUP_* */
	uint32_t layers;        /* each layer has a checksum of its own; fragments begin and end between layers */
	uint32_t token_bytes;   /* bytes of one token in one layer */
	uint32_t window_tokens; /* only for kind WINDOW */
} penstock_group;

/*
 * The definition of a namespace. Engines with equal definitions must have equal bytes for
 * equal keys. Put everything else on which the bytes depend (strides, parallelism, the
 * engine) into dtype and layout.
 */
typedef struct penstock_definition {
	uint64_t size;          /* sizeof(penstock_definition) */
	const char *name;       /* 1 to 128 of A-Z a-z 0-9 . _ / - */
	const char *tenant;     /* the same characters; NULL: none */
	const void *salt;       /* at most 64 bytes; every block id depends on the salt. NULL: the salt of the existing namespace; the node chooses that of a new one */
	uint32_t salt_bytes;
	uint32_t index;         /* PENSTOCK_CHAINED or PENSTOCK_FLAT */
	const char *dtype;      /* at most 64 bytes */
	const char *layout;     /* at most 64 bytes */
	uint32_t block_tokens;  /* tokens in a block; 1 if values do not consist of tokens */
	uint32_t n_groups;      /* 1, or more for a hybrid model with PENSTOCK_CHAINED */
	const penstock_group *groups;
	int64_t quota_bytes;    /* quota of a new namespace; 0: none */
	uint32_t keys;          /* PENSTOCK_KEYS_ANY or PENSTOCK_KEYS_IDS; applies to the handle and is not stored */
	uint32_t reserved;      /* 0 */
} penstock_definition;

/*
 * Creates a namespace on every node, or checks that an existing one has the same
 * definition. Quotas are not compared. It returns a handle at the newest epoch (see
 * penstock_bump).
 * Errors: MISMATCH (the text has both definitions), INVALID, UNAVAILABLE, AUTH, VERSION, TIMEOUT, CLOSED, FORKED.
 */
int32_t penstock_ensure(penstock_store store, const penstock_definition *definition, penstock_namespace *ns, penstock_error *error);

/*
 * Returns the epoch of a handle. A batch with epoch 0 uses this epoch. With refresh 1 the
 * handle first moves to the newest epoch of the nodes; blocks of older epochs are then
 * misses. An engine refreshes after it has loaded new weights. Errors: as penstock_ensure.
 */
int32_t penstock_epoch(penstock_namespace ns, uint32_t refresh, uint64_t *epoch, penstock_error *error);

/*
 * Begins a new epoch on every node, because the weights have changed. to is the new epoch;
 * 0 means the newest epoch + 1. Blocks of older epochs are misses from now on. The handle
 * moves to the new epoch. Other handles stay at their epoch, and all their blocks are
 * misses, until they are refreshed.
 * Errors: MISMATCH (a node is at a later epoch), UNAVAILABLE (a node did not answer; the text names the node), TIMEOUT, CLOSED, FORKED.
 */
int32_t penstock_bump(penstock_namespace ns, uint64_t to, uint64_t *epoch, penstock_error *error);

/* The greatest number of live epochs of a namespace. */
#define PENSTOCK_LIVE_MAX 16

/*
 * Begins a new epoch as penstock_bump does, and keeps the newest keep epochs live, the new
 * one included: 1 to PENSTOCK_LIVE_MAX. penstock_bump keeps 1. Keys of a live epoch can be
 * matched, read and written by calls that name the epoch, and by handles at it. Pinned
 * epochs stay live too. A node that is at epoch to already does not change.
 * Errors: as penstock_bump, INVALID. Since version 1.1.
 */
int32_t penstock_bump_keep(penstock_namespace ns, uint64_t to, uint32_t keep, uint64_t *epoch, penstock_error *error);

/*
 * Keeps an epoch live for ms milliseconds, even if the epoch is bumped meanwhile; epoch 0 selects
 * the epoch of the handle. It writes the epoch to pinned, which may be NULL, and a lease to lease,
 * for penstock_lease_renew and penstock_lease_release. Keys of the epoch may still be evicted. A
 * restart of a node ends the pin on that node, and penstock_retire with force ends it on all nodes.
 * Errors: MISMATCH (the epoch is not live), INVALID, NOT_FOUND, UNAVAILABLE, AUTH, VERSION, TIMEOUT, CLOSED, FORKED.
 * Since version 1.1.
 */
int32_t penstock_pin_epoch(penstock_namespace ns, uint64_t epoch, uint32_t ms, uint64_t *pinned, penstock_lease *lease, penstock_error *error);

/*
 * Ends a live epoch that is not the newest, on every node: all its keys are then misses. On a node
 * where the epoch is not live nothing changes. force 1 ends the pins of the epoch.
 * Errors: MISMATCH (the epoch is pinned), INVALID (it is the newest), NOT_FOUND, UNAVAILABLE, AUTH, VERSION, TIMEOUT, CLOSED, FORKED.
 * Since version 1.1.
 */
int32_t penstock_retire(penstock_namespace ns, uint64_t epoch, uint32_t force, penstock_error *error);

/*
 * Registers the n bytes at addr as memory for values. The memory must stay allocated until
 * penstock_unregister or penstock_close has returned. It must not overlap with other
 * registered memory. Errors: INVALID, CLOSED, FORKED.
 */
int32_t penstock_register(penstock_store store, void *addr, uint64_t n, penstock_memory *memory, penstock_error *error);

/* Options of device memory. */
typedef struct penstock_device_options {
	uint64_t size;          /* sizeof(penstock_device_options) */
	uint64_t staging_bytes; /* pinned host memory of the store for the device; default 256 MiB. The first registration of the device decides it */
	uint32_t device;        /* number of the device in the CUDA driver */
	uint32_t reserved;      /* 0 */
} penstock_device_options;

/*
 * Registers the n bytes at address, memory of a CUDA device, as memory for values. It is as
 * penstock_register, with these differences:
 *
 *  - Values are copied by the device's copy engine, in the device's primary context, to and from pinned
 *    host memory, where their checksums are verified and made. The library makes that memory and two
 *    streams of its own at the first registration of the device, and frees them in penstock_close.
 *    A key's values in one batch must have at most staging_bytes / 16 bytes.
 *  - The values of a batch are all on one device. PENSTOCK_ANY_MEMORY does not apply to them: with this
 *    flag the library takes an address that is not registered for one of host memory.
 *  - With PENSTOCK_ON_STREAM the copies wait, on the device, for the caller's stream. No function
 *    waits for the stream but a batch that is waited for. When a get is complete, its values are on the
 *    device, and work that is then put into any stream finds them.
 *  - A copy that was started is not cancelled. So a batch, and penstock_close, may end after the time
 *    limit, as long as the stream for which the copy waits has work.
 *  - The functions do not change the current context of the calling thread.
 *
 * Errors: INVALID (also: the CUDA driver cannot be loaded, there is no such device, the memory cannot be
 * pinned, the library was built without CUDA), CLOSED, FORKED. Since version 1.9.
 */
int32_t penstock_register_device(penstock_store store, const penstock_device_options *options, uint64_t address, uint64_t n, penstock_memory *memory, penstock_error *error);

/*
 * Copies n bytes at address, memory of a CUDA device, to host memory, or from there if to_device is 1. It
 * opens the device, waits until the bytes are there, and closes the device: it is for checks when an engine
 * starts. It does not wait for any stream. Errors: INVALID (as penstock_register_device), INTERNAL (the copy
 * failed), FORKED. Since version 1.9.
 */
int32_t penstock_copy_device(uint32_t device, uint64_t address, void *host, uint64_t n, uint32_t to_device, penstock_error *error);

/* Ends a registration. Errors: BUSY (calls or jobs use the memory), CLOSED, FORKED. */
int32_t penstock_unregister(penstock_memory memory, penstock_error *error);

/* Flags of a batch. */
enum {
	/* Fragments may lie in memory that is not registered. The library registers that memory for the duration of the call. */
	PENSTOCK_ANY_MEMORY = 1,
	/* match: the newest epoch of the nodes takes the place of epoch, which is 0. Since version 1.1. */
	PENSTOCK_NEWEST = 2,
	/*
	 * match: keys of one match may be of different epochs. Each key is of the newest live epoch
	 * from oldest_epoch to epoch that has all pieces of the key that the match needs. Without
	 * this flag all keys of a match are of one epoch. Since version 1.2.
	 */
	PENSTOCK_MIX = 4,
	/*
	 * get, put of device memory: the copies begin when the work is done that stream has when the
	 * batch is started. Since version 1.9.
	 */
	PENSTOCK_ON_STREAM = 8
};

/*
 * A batch. Key i is the bytes [key_offsets[i], key_offsets[i+1]) of keys. In a chained
 * namespace key 0 is the first block of the prompt. get and put transfer the values of the
 * keys from first on; the keys before first identify their ancestors. In a flat namespace
 * first is 0.
 *
 * get and put transfer pieces. If piece_keys is NULL, there are n_keys - first pieces, and
 * piece i is group 0 of key first + i. Otherwise piece i is group piece_groups[i] of key
 * piece_keys[i]. If piece_groups is NULL, all pieces are of group 0.
 *
 * Piece i consists of the fragments [piece_fragments[i], piece_fragments[i+1]), in this
 * order. If piece_fragments is NULL, piece i is fragment i. Fragment k has lengths[k] bytes
 * at addresses[k]. Its length is a multiple of the group's layer bytes. The lengths of a
 * piece's fragments add up to the size of the piece. Fragments of a get must not overlap.
 *
 * A get with layers loads only the layers [first_layer, first_layer + layers) of each piece,
 * and verifies each of them. The fragments are then of these layers only.
 */
typedef struct penstock_batch {
	uint64_t size;                /* sizeof(penstock_batch) */
	uint64_t epoch;               /* 0: the epoch of the handle */
	uint32_t flags;               /* PENSTOCK_ANY_MEMORY, PENSTOCK_NEWEST, PENSTOCK_MIX, PENSTOCK_ON_STREAM */
	uint32_t timeout_ms;          /* time limit; 0: penstock_options.timeout_ms */
	uint32_t lease_ms;            /* match: duration of a lease on the matched prefix, which is not evicted meanwhile; 0: no lease */
	uint32_t n_keys;
	const void *keys;
	const uint32_t *key_offsets;  /* n_keys + 1 elements */
	uint32_t first;
	uint32_t n_pieces;            /* if piece_keys is NULL: 0 or n_keys - first */
	const uint32_t *piece_keys;   /* n_pieces elements, or NULL */
	const uint8_t *piece_groups;  /* n_pieces elements, or NULL */
	const uint32_t *piece_fragments; /* n_pieces + 1 elements, or NULL */
	const uint64_t *addresses;    /* one element for each fragment */
	const uint64_t *lengths;      /* one element for each fragment */
	/*
	 * match: 0 matches keys of epoch only. Otherwise the result is the longest match of one live
	 * epoch from oldest_epoch to epoch, and of equal matches that of the newest epoch. All keys of
	 * the match are of penstock_result.epoch, which a get of them names. Since version 1.1.
	 */
	uint64_t oldest_epoch;
	/*
	 * n_keys elements, or NULL. A match with PENSTOCK_MIX writes the epoch of each matched key, and
	 * 0 for the other keys. A get loads each key from its epoch; epoch is 0 then. Since version 1.2.
	 */
	uint64_t *key_epochs;
	uint32_t first_layer;         /* get: the first layer of each piece that is loaded; 0 if layers is 0. Since version 1.3 */
	uint32_t layers;              /* get: the number of these layers; 0: whole pieces. Since version 1.3 */
	uint64_t stream;              /* with PENSTOCK_ON_STREAM: a CUstream of the device's primary context; 0: the default stream. Since version 1.9 */
} penstock_batch;

/* Reasons why a prefix is not longer. */
enum {
	PENSTOCK_CUT_COMPLETE = 0, /* the prefix has all requested keys */
	PENSTOCK_CUT_ABSENT = 1,   /* the next block is not stored */
	PENSTOCK_CUT_EPOCH = 2,    /* the node is at another epoch */
	PENSTOCK_CUT_GROUPS = 3,   /* more blocks are stored, but a longer prefix lacks pieces of a WINDOW or STATE group */
	PENSTOCK_CUT_LEASE = 4,    /* the node grants no more leases */
	PENSTOCK_CUT_DOWN = 5,     /* the node does not answer */
	PENSTOCK_CUT_BUSY = 6,     /* the node is overloaded */
	PENSTOCK_CUT_LOST = 7      /* the next block is corrupt, or its device or transfer failed */
};

/* The result of a batch. */
typedef struct penstock_result {
	penstock_job job;      /* 0 if the batch was not submitted */
	uint32_t op;           /* PENSTOCK_OP_* */
	uint32_t n;            /* number of results: pieces of a get or put, otherwise keys; 0 of a match */
	uint32_t ok;           /* number of successful results */
	uint32_t prefix;       /* number of keys before the first that failed or did not match; the keys before first are included */
	uint32_t cut;          /* get and match: PENSTOCK_CUT_*, why prefix is not longer */
	uint32_t reserved;
	uint64_t bytes;        /* bytes transferred and verified; of a match: bytes that a get of the prefix transfers */
	uint64_t epoch;        /* the epoch of the batch; of a match: the epoch of all matched keys; with key_epochs the newest of them */
	penstock_lease lease;  /* match: 0 if no lease was granted */
	penstock_error error;
} penstock_result;

/*
 * The batch calls. results may be NULL; otherwise it has a byte for each piece (get, put) or
 * key (exists, touch, delete). out may be NULL, except for a match with lease_ms. A call
 * returns when the batch is done or the time limit has passed. When it has returned, with or
 * without an error, the library does not access the memory of the values, and results has the
 * results of the completed parts of the batch.
 *
 *   match   finds the longest stored prefix of the keys; in a flat namespace, the stored keys before the first absent one
 *   get     loads values, and verifies each against the checksums of its writer
 *   put     stores values. It does not send values that are stored. In a chain the first refused value ends the put
 *   exists  reports for each key whether it is stored. It does not change the order of eviction
 *   touch   is exists, and marks the stored keys as used now in the order of eviction
 *   delete  removes keys; in a chained namespace also all their descendants, including those of other clients
 *
 * Errors: INVALID, UNREGISTERED, TIMEOUT, CANCELED, MISMATCH, NOT_FOUND, AUTH, VERSION, CLOSED, FORKED;
 * delete also UNAVAILABLE.
 */
int32_t penstock_match(penstock_namespace ns, const penstock_batch *batch, penstock_result *out);
int32_t penstock_get(penstock_namespace ns, const penstock_batch *batch, uint8_t *results, penstock_result *out);
int32_t penstock_put(penstock_namespace ns, const penstock_batch *batch, uint8_t *results, penstock_result *out);
int32_t penstock_exists(penstock_namespace ns, const penstock_batch *batch, uint8_t *results, penstock_result *out);
int32_t penstock_touch(penstock_namespace ns, const penstock_batch *batch, uint8_t *results, penstock_result *out);
int32_t penstock_delete(penstock_namespace ns, const penstock_batch *batch, uint8_t *results, penstock_result *out);

/* Operations of jobs and results. */
enum {
	PENSTOCK_OP_MATCH = 1,
	PENSTOCK_OP_GET = 2,
	PENSTOCK_OP_PUT = 3,
	PENSTOCK_OP_EXISTS = 4,
	PENSTOCK_OP_TOUCH = 5,
	PENSTOCK_OP_DELETE = 6
};

/*
 * Starts a batch as a job and returns at once. The library writes results before it
 * publishes the completion. The time limit counts from this call. After an error there is
 * no job. Each job completes once, and either penstock_drain or penstock_wait returns its
 * completion once. Errors: INVALID, UNREGISTERED, BUSY (drain completions first), CLOSED,
 * FORKED.
 */
int32_t penstock_submit(penstock_namespace ns, uint32_t op, const penstock_batch *batch, uint8_t *results, penstock_job *job, penstock_error *error);

/* The timeout_ms of a penstock_submit_wait without one. */
#define PENSTOCK_NO_LIMIT UINT32_MAX

/*
 * Does what penstock_submit does, and then waits until the job is complete, for at most
 * timeout_ms. If the job is complete by then, the function returns its completion in out, and
 * neither the eventfd nor penstock_drain reports it. After TIMEOUT the job continues: cancel
 * it, drain it or wait for it. It is for interpreters that must run signal handlers while
 * they wait, and it costs less than penstock_submit and penstock_wait. The return code is
 * that of the wait. The code of the job is in out->error.
 *
 * With timeout_ms PENSTOCK_NO_LIMIT the calling thread performs the batch, and the function
 * returns when the job is complete. That costs less, and the batch's time limit, penstock_cancel
 * and penstock_close still end the job.
 *
 * job receives the job before it starts, and 0 if there is none: INVALID (also: job or out
 * is NULL), UNREGISTERED, BUSY, CLOSED, FORKED. Errors with a job: TIMEOUT, NOT_FOUND
 * (penstock_wait of another thread has returned the completion), CLOSED.
 */
int32_t penstock_submit_wait(penstock_namespace ns, uint32_t op, const penstock_batch *batch, uint8_t *results, uint32_t timeout_ms, penstock_job *job, penstock_result *out, penstock_error *error);

/*
 * Cancels a job, and does not wait for its completion. The job completes with CANCELED, or
 * with its result if it had ended before. Errors: NOT_FOUND (the job does not exist, or
 * its completion was returned), CLOSED, FORKED.
 */
int32_t penstock_cancel(penstock_store store, penstock_job job, penstock_error *error);

/*
 * Returns a file descriptor for poll, epoll and event loops. It is readable while a
 * completion of this store waits for penstock_drain or penstock_wait. The caller must not
 * read, write or close it: it belongs to the store. It has the close-on-exec flag.
 * Errors: CLOSED, FORKED.
 */
int32_t penstock_eventfd(penstock_store store, int32_t *fd, penstock_error *error);

/*
 * Returns up to max completions, in the order of completion, and their number in n. It does
 * not wait. Errors: INVALID, CLOSED, FORKED.
 */
int32_t penstock_drain(penstock_store store, penstock_result *completions, uint32_t max, uint32_t *n, penstock_error *error);

/*
 * Waits until a job is complete, for at most timeout_ms, and returns its completion, which
 * penstock_drain does not return again. The return code is that of the wait. The code of
 * the job is in out->error.
 * Errors: TIMEOUT (the job continues), NOT_FOUND, INVALID (out is NULL), CLOSED, FORKED.
 */
int32_t penstock_wait(penstock_store store, penstock_job job, uint32_t timeout_ms, penstock_result *out, penstock_error *error);

/*
 * Makes a lease end ms milliseconds from now. Errors: NOT_FOUND (the lease has ended, and
 * its blocks may have been evicted), UNAVAILABLE, TIMEOUT, CLOSED, FORKED.
 *
 * A lease need not be released. From one minute after its end on, the library may close its handle,
 * and the error is CLOSED.
 */
int32_t penstock_lease_renew(penstock_lease lease, uint32_t ms, penstock_error *error);

/* Ends a lease and closes its handle. Errors: UNAVAILABLE (the lease expires at its time), TIMEOUT, CLOSED, FORKED. */
int32_t penstock_lease_release(penstock_lease lease, penstock_error *error);

/*
 * Writes the block ids of n keys to ids, 16 bytes each. Nodes, logs and events use these ids:
 *
 *   root = SHA-256("penstock kv chain v1\0" ‖ u32 len(tenant) ‖ tenant ‖ u32 len(name) ‖ name ‖ u32 len(salt) ‖ salt ‖ u32 block_tokens)[:16]
 *   id   = SHA-256("penstock kv key v1\0" ‖ root ‖ key)[:16]
 *
 * with little-endian integers. The probability that two of 2^40 keys of one namespace have
 * the same id is below 2^-48. A search for two such keys takes about 2^64 steps.
 * Errors: INVALID, CLOSED, FORKED.
 */
int32_t penstock_key_ids(penstock_namespace ns, const void *keys, const uint32_t *key_offsets, uint32_t n, uint8_t *ids, penstock_error *error);

/*
 * Writes the ids of the whole blocks of tokens to ids, 16 bytes each, and their number to
 * n_ids. It is for engines without block hashes, and for handles with PENSTOCK_KEYS_IDS. ids
 * needs room for n_tokens / block_tokens ids. parent is the id of the block before the
 * tokens, or NULL at the start of the prompt. extra is what the KV depends on besides the
 * tokens (LoRA, cache salt, hashes of images); the ids depend on it too.
 *
 *   tip   = parent, or root as above
 *   tip   = SHA-256("penstock kv salt v1\0" ‖ tip ‖ u32 len(extra) ‖ extra)[:16]   if extra is not empty
 *   id(0) = SHA-256(tip ‖ u32 block_tokens ‖ tokens of block 0 as u32)[:16]
 *   id(i) = SHA-256(id(i-1) ‖ u32 block_tokens ‖ tokens of block i as u32)[:16]
 *
 * Errors: INVALID, CLOSED, FORKED.
 */
int32_t penstock_chain(penstock_namespace ns, const uint8_t *parent, const void *extra, uint32_t extra_bytes, const uint32_t *tokens, uint32_t n_tokens, uint8_t *ids, uint32_t *n_ids, penstock_error *error);

/*
 * LEADERS. Since version 1.4. A leader is the session of a group of engines with the planner of a
 * prefill/decode cluster. It registers the engines of one machine, reports their load, and has
 * a queue of the planner's actions:
 *
 *   planner                        library                             engine
 *      ◄── registration, load ────────┤
 *      ├── START ─────────────────────► queue ── penstock_leader_drain ────► penstock_attempt_describe
 *      ├── READ, CUT, RECOMPUTE ──────► queue ── penstock_leader_drain ────►
 *      ◄── progress, stopped ─────────┤◄──────── penstock_attempt_progress, penstock_attempt_stopped
 *      ├── the request is aborted ────► queue ── END, penstock_leader_drain ►
 *      ◄── finished, failed ──────────┤◄──────── penstock_attempt_done
 *
 * An attempt is one attempt at a request on one engine. Its handle is open from START until
 * penstock_attempt_done, which the engine calls once for each attempt, also after END. The
 * library keeps no pointer to the caller's memory after any of these functions, and the caller
 * gets no pointer to the library's memory: penstock_attempt_describe copies. The engine moves the
 * KV with a traffic manager (penstock_traffic_open), with the batch calls, or with transfers of its
 * own. The library makes no decisions about requests.
 *
 * The library restarts a lost session. The new registration lists the open attempts, so that they
 * continue after a restart of the planner. If the planner does not answer, or refuses the token,
 * the store logs that, and the library tries again until the planner answers. The queue is bounded
 * by the number of open attempts: an engine that does not drain gets at most as many attempts as
 * the planner allows it to hold.
 */

/* A planner and how to connect to it. Only size and address are required. */
typedef struct penstock_planner {
	uint64_t size;          /* sizeof(penstock_planner) */
	const char *address;    /* host:port of the planner's gRPC; of several planners that elect a leader all, commas between */
	const char *token;      /* as in penstock_options */
	const char *token_file;
	const char *ca_file;
	const char *cert_file;
	const char *key_file;
	uint32_t insecure;
	uint32_t reserved;      /* 0 */
} penstock_planner;

/* Roles of groups: the part of inference that their engines do. */
enum {
	PENSTOCK_ROLE_PREFILL = 1, /* compute prompts */
	PENSTOCK_ROLE_DECODE = 2   /* generate from them */
};

/*
 * An engine of a group. address and token are for the engines on the other side, which get them
 * unchanged (penstock_start). With buffer_bytes 0 the planner does not account for a buffer.
 */
typedef struct penstock_member {
	uint64_t size;           /* sizeof(penstock_member) */
	const char *name;        /* 1 to 256 bytes; no other engine of the cluster has it */
	const void *address;     /* at most 255 bytes */
	const void *token;
	uint32_t address_bytes;
	uint32_t token_bytes;
	uint32_t device_blocks;  /* blocks of KV that device memory holds; prefill: 0: not accounted for */
	uint32_t prompt_blocks;  /* longest prompt; 0: no limit of the engine */
	uint64_t buffer_bytes;   /* size of the host buffer through which KV passes */
	uint64_t block_bytes;    /* bytes of the buffer for each block that passes through it */
	uint64_t sums_bytes;     /* bytes of the buffer for each block of the prompt, in addition */
	uint64_t request_bytes;  /* bytes of the buffer for each request, in addition */
	uint32_t prefix_cache_blocks; /* since version 1.11: decode: device memory keeps up to this number of blocks of ended requests for later ones; 0: none */
	uint32_t reserved;       /* 0 */
} penstock_member;

/* Options of a leader. size, planner, group, node and role are required. */
typedef struct penstock_leader_options {
	uint64_t size;           /* sizeof(penstock_leader_options) */
	const penstock_planner *planner;
	const char *group;       /* 1 to 256 bytes; no other group of the cluster has it */
	const char *node;        /* the machine of the engines; all its engines of this role are in the group */
	const penstock_member *members; /* all of one size */
	uint32_t n_members;      /* 0: the group has no engine until penstock_leader_add */
	uint32_t role;           /* PENSTOCK_ROLE_*; it is fixed: the planner refuses to switch the group to the other one */
	uint64_t read_rate;      /* rate of the machine's storage NIC in tokens a second; 0: the leader measures it from penstock_attempt_progress */
	uint32_t fetch_every_ms; /* how often the load is reported and work is fetched; default 5 */
	uint32_t reserved;       /* 0 */
} penstock_leader_options;

/*
 * Opens a leader of engines that serve the namespace's KV. It does not wait for the planner.
 * Errors: INVALID, CLOSED, FORKED.
 */
int32_t penstock_leader_open(penstock_namespace ns, const penstock_leader_options *options, penstock_leader *leader, penstock_error *error);

/*
 * Closes a leader, its eventfd and its attempts. The planner gives the group's requests to other
 * engines. It takes at most a second. Errors: CLOSED, FORKED.
 */
int32_t penstock_leader_close(penstock_leader leader, penstock_error *error);

/* Makes an engine a member of the group. Errors: INVALID (also: the group has an engine of that name), CLOSED, FORKED. */
int32_t penstock_leader_add(penstock_leader leader, const penstock_member *member, penstock_error *error);

/*
 * Removes an engine from the group. The planner plans its requests again, and its attempts get
 * END. Errors: NOT_FOUND, INVALID, CLOSED, FORKED.
 */
int32_t penstock_leader_remove(penstock_leader leader, const char *name, penstock_error *error);

/* The payload bytes that a NIC has sent and received since its engine's start. Since version 1.10. */
typedef struct penstock_nic {
	char name[256];          /* ends with a zero byte */
	uint64_t bytes_out;
	uint64_t bytes_in;
} penstock_nic;

/* The greatest number of NICs of an engine. */
#define PENSTOCK_NICS_MAX 64

/*
 * Gives the counters of the NICs over which an engine of the group exchanges KV with engines of the other
 * role: those of penstock_traffic_nics of its traffic managers, or of transfers of its own. The leader
 * reports the last ones to the planner every second. The planner computes rates between two such reports, so
 * call this function about every second too. Without a call the leader reports none. The planner adds the counters of
 * NICs of the same name. Errors: NOT_FOUND (the group has no such engine), INVALID (also: n is more than
 * PENSTOCK_NICS_MAX), CLOSED, FORKED. Since version 1.10.
 */
int32_t penstock_leader_report_nics(penstock_leader leader, const char *engine, const penstock_nic *nics, uint32_t n, penstock_error *error);

/*
 * Returns a file descriptor that is readable while an action waits for penstock_leader_drain. A
 * duplicate of it stays readable when the leader has been closed. Otherwise as penstock_eventfd.
 */
int32_t penstock_leader_eventfd(penstock_leader leader, int32_t *fd, penstock_error *error);

/* Blocks [from, to) of a request's cached prefix. */
typedef struct penstock_part {
	uint32_t from;
	uint32_t to;
} penstock_part;

/* Kinds of actions. */
enum {
	PENSTOCK_ACTION_START = 1,     /* begin the attempt; penstock_attempt_describe describes it */
	PENSTOCK_ACTION_READ = 2,      /* also read part */
	PENSTOCK_ACTION_CUT = 3,       /* stop the attempt's reads, and report each that stops with penstock_attempt_stopped */
	PENSTOCK_ACTION_RECOMPUTE = 4, /* compute part, and do not read it (prefill only) */
	PENSTOCK_ACTION_END = 5        /* abandon the attempt, and call penstock_attempt_done */
};

/*
 * An action of the planner. START is the first action of its attempt. If the planner abandoned other
 * attempts before a START, their END comes before it in the queue.
 */
typedef struct penstock_action {
	penstock_attempt attempt;
	uint32_t kind;           /* PENSTOCK_ACTION_* */
	penstock_part part;      /* READ, RECOMPUTE */
	uint32_t reserved;
	uint64_t start_bytes;    /* START: the memory that penstock_attempt_describe needs */
} penstock_action;

/*
 * Returns up to max actions in the planner's order, and their number in n. It does not wait.
 * Another thread may get END of an attempt while this thread ends it: ignore actions of
 * attempts that have ended. Errors: INVALID, CLOSED, FORKED.
 */
int32_t penstock_leader_drain(penstock_leader leader, penstock_action *actions, uint32_t max, uint32_t *n, penstock_error *error);

/* The data with which an engine begins an attempt. A block has the namespace's block_tokens. */
typedef struct penstock_start {
	uint64_t size;           /* sizeof(penstock_start) of the library */
	const char *name;        /* of the attempt; equal on both engines, and unique */
	const char *id;          /* of the request */
	const char *ns;          /* name of the namespace that the gateway gave */
	const char *engine;      /* the member that the attempt is for */
	const char *peer_engine; /* the engine on the other side, and its penstock_member.address and token */
	const void *peer_address; /* of an engine with package client/traffic: the address of its first NIC */
	const void *peer_token;
	uint32_t peer_address_bytes;
	uint32_t peer_token_bytes;
	uint64_t epoch;          /* the version of the weights to compute and store with; a cached prefix of an older version is recomputed */
	uint32_t prompt_tokens;
	uint32_t output_tokens;  /* expected */
	uint32_t hit_blocks;     /* the cached prefix */
	uint32_t n_parts;
	const penstock_part *parts; /* the parts of the cached prefix that this engine reads */
	const void *payload;     /* the gateway's data for the engines */
	const uint8_t *ids;      /* block ids in the payload, 16 bytes each: those of the prompt's full blocks, possibly more; NULL: the payload was not made by client/gateway */
	const char *extra;       /* JSON in the payload; NULL: none */
	uint64_t payload_bytes;
	uint32_t n_ids;
	uint32_t reserved;
} penstock_start;

/*
 * Writes the description of an attempt to buf, which is aligned to 8 bytes and has cap bytes. Its
 * pointers point into buf. need receives the required size. If cap is too small, nothing is
 * written. Errors: INVALID (cap is too small, buf is not aligned), CLOSED, FORKED.
 */
int32_t penstock_attempt_describe(penstock_attempt attempt, penstock_start *buf, uint64_t cap, uint64_t *need, penstock_error *error);

/*
 * Reports that the blocks of part before block upto were read and verified, and that bytes of the
 * part have arrived. Call it as often as convenient, and at the end with upto = part.to.
 * Reports are merged. Errors: INVALID, CLOSED (also: the attempt has ended), FORKED.
 */
int32_t penstock_attempt_progress(penstock_attempt attempt, penstock_part part, uint32_t upto, uint64_t bytes, penstock_error *error);

/*
 * Reports that the read of part ended before block upto. gone is 1 if storage does not have
 * that block, and 0 if this engine stopped or failed. Errors: as penstock_attempt_progress.
 */
int32_t penstock_attempt_stopped(penstock_attempt attempt, penstock_part part, uint32_t upto, uint32_t gone, penstock_error *error);

/*
 * Reports that the request's KV has left the buffer (penstock_member.buffer_bytes) before the
 * attempt ends. Errors: as penstock_attempt_progress.
 */
int32_t penstock_attempt_passed(penstock_attempt attempt, penstock_error *error);

/*
 * Ends an attempt. With failure NULL the engine has completed its part. Otherwise failure is the
 * reason, for the log, and the planner plans the request again; the first intact blocks of the
 * cached prefix are certainly intact. Errors: as penstock_attempt_progress.
 */
int32_t penstock_attempt_done(penstock_attempt attempt, const char *failure, uint32_t intact, penstock_error *error);

/*
 * GATEWAYS. Since version 1.4. A gateway submits requests to the planner, and has a queue of their
 * events. It finds the cached prefix of each prompt in the namespace, and passes the block ids of
 * the prompt to both engines. The front end itself sends the prompt's text and takes the output.
 *
 *   penstock_gateway_submit ─► match, submission ─► MATCHED, ACCEPTED, STARTED, PREFILLED, DONE
 *                              planner down ──────► WAITING, and the request is submitted again
 *                              an engine is lost ─► REPLANNED, and STARTED again
 *                              ended otherwise ───► FAILED, with the error
 *
 * DONE or FAILED is the last event of each request, and comes once. The handle of the request is
 * open until that event was drained. While 16 events of a request wait for penstock_gateway_drain,
 * the library does not read the request's stream from the planner.
 */

/* Options of a gateway. Only size and planner are required. */
typedef struct penstock_gateway_options {
	uint64_t size;           /* sizeof(penstock_gateway_options) */
	const penstock_planner *planner;
	uint64_t epoch;          /* a live epoch: all requests use these weights. 0: the newest one */
	uint32_t requests_max;   /* greatest number of requests that run or are not drained; default 1024 */
	uint32_t reserved;       /* 0 */
} penstock_gateway_options;

/*
 * Opens a gateway for the namespace's model; the namespace is chained. It does not wait for the
 * planner. Errors: INVALID, CLOSED, FORKED.
 */
int32_t penstock_gateway_open(penstock_namespace ns, const penstock_gateway_options *options, penstock_gateway *gateway, penstock_error *error);

/*
 * Closes a gateway and its eventfd, and cancels its requests, whose events are lost. It waits
 * until they have ended. Errors: CLOSED, FORKED.
 */
int32_t penstock_gateway_close(penstock_gateway gateway, penstock_error *error);

/* The leading tokens of a prompt that a decode engine has in its device memory. */
typedef struct penstock_resident {
	const char *engine;
	uint32_t tokens;
	uint32_t reserved;       /* 0 */
} penstock_resident;

/*
 * A prompt. It has either tokens, or prompt_tokens and the ids of its full blocks, from
 * penstock_chain. ids may continue with blocks of the output. A prompt whose KV depends on more than
 * its tokens (LoRA, cache salt, images) needs ids.
 */
typedef struct penstock_prompt {
	uint64_t size;           /* sizeof(penstock_prompt) */
	const char *id;          /* 1 to 256 bytes; no other request under way has it */
	const uint32_t *tokens;
	const uint8_t *ids;      /* 16 bytes each */
	const char *extra;       /* JSON that both engines get; NULL: none */
	const penstock_resident *resident; /* at most 64 */
	uint32_t n_tokens;
	uint32_t n_ids;
	uint32_t prompt_tokens;  /* 0 with tokens */
	uint32_t output_tokens;  /* expected; the planner reserves device memory for them */
	uint32_t deadline_ms;    /* how long the request may wait for its engines; 0: no limit */
	uint32_t n_resident;
} penstock_prompt;

/*
 * Submits a request and returns at once. After an error there is no request. Errors: INVALID,
 * BUSY (requests_max; drain events first), CLOSED, FORKED.
 */
int32_t penstock_gateway_submit(penstock_gateway gateway, const penstock_prompt *prompt, penstock_request *request, penstock_error *error);

/*
 * Cancels a request, and does not wait for its end. The planner aborts it on its engines. The
 * last event is FAILED with CANCELED, or DONE if the request had ended before. Errors: CLOSED
 * (also: the last event was drained), FORKED.
 */
int32_t penstock_request_cancel(penstock_request request, penstock_error *error);

/* As penstock_leader_eventfd, for penstock_gateway_drain. */
int32_t penstock_gateway_eventfd(penstock_gateway gateway, int32_t *fd, penstock_error *error);

/* Kinds of events. */
enum {
	PENSTOCK_EVENT_MATCHED = 1,   /* the cached prefix is known: hit_tokens, epoch */
	PENSTOCK_EVENT_WAITING = 2,   /* the planner does not answer; the text of error is the reason. The engines continue */
	PENSTOCK_EVENT_ACCEPTED = 3,  /* the planner has the request */
	PENSTOCK_EVENT_STARTED = 4,   /* both engines are chosen: prefill, decode, epoch, read_by_prefill, read_by_decode; since version 1.5 the text of error is the attempt's name (penstock_start) */
	PENSTOCK_EVENT_PREFILLED = 5, /* the decode engine has the prompt's KV. It may be left out shortly before DONE */
	PENSTOCK_EVENT_REPLANNED = 6, /* the planner plans the request again; the text of error is the reason */
	PENSTOCK_EVENT_DONE = 7,      /* the decode engine has completed the output */
	PENSTOCK_EVENT_FAILED = 8     /* error: REFUSED, CANCELED, INVALID (also: the id is in use), AUTH, BUSY, … */
};

/* An event of a request. Fields that the kind does not name are 0. */
typedef struct penstock_event {
	penstock_request request;
	uint32_t kind;           /* PENSTOCK_EVENT_* */
	uint32_t hit_tokens;     /* the cached prefix */
	uint64_t epoch;          /* the version of the weights: MATCHED: of the cached prefix; STARTED: of the computation, 0 from a planner of an earlier version */
	uint32_t read_by_prefill; /* tokens of the cached prefix that the machine of each engine reads */
	uint32_t read_by_decode;
	char prefill[264];       /* names of the engines */
	char decode[264];
	penstock_error error;
} penstock_event;

/*
 * Returns up to max events, and their number in n. It does not wait. The events of one request are
 * in order. Errors: INVALID, CLOSED, FORKED.
 */
int32_t penstock_gateway_drain(penstock_gateway gateway, penstock_event *events, uint32_t max, uint32_t *n, penstock_error *error);

/*
 * TRAFFIC. Since version 1.5. A traffic manager moves the KV of one engine of a prefill/decode
 * cluster (package client/traffic). It reads cached prefixes from the nodes into a buffer, writes them
 * to device memory, and transfers the prompt's KV from the prefill to the decode engine, a layer at a
 * time, over a compute NIC of its own. It stores the prompt's new blocks and the decoded ones. Each
 * layer of each block is verified where it is used. It makes no decisions: penstock_start lists the parts
 * that an engine reads, and READ, CUT and RECOMPUTE of the planner change them. Report PROGRESS and
 * STOPPED with penstock_attempt_progress and penstock_attempt_stopped.
 *
 *   prefill engine                                     decode engine
 *   penstock_traffic_prefill                           penstock_traffic_decode, with the peer
 *   LOADED: storage has been read
 *   penstock_transfer_add_pages
 *   for each chunk and layer:
 *     penstock_transfer_layer: its hit is in memory
 *     the model computes
 *     penstock_transfer_computed ────── KV ──────────► READY: the whole prompt is in device memory
 *   penstock_transfer_finish                           decode; penstock_traffic_append for each full block
 *   FINISHED: the peer has all layers                  penstock_transfer_finish
 *                                                      FINISHED: storage has the prompt's new blocks
 *
 * A transfer is one side of one attempt. Both sides use the same request, penstock_start.name. They
 * may begin in any order. A transfer waits for the other side and for room in the buffer. Calls on a
 * waiting transfer are performed, in their order, when it has begun.
 *
 * FINISHED or FAILED is the last event of each transfer and comes once, FINISHED only after
 * penstock_transfer_finish. From then on no transfer accesses the pages, and the request may begin again.
 * The handle is open until penstock_traffic_drain has returned the event. The queue holds for each
 * transfer at most one PROGRESS for each part (the newest), one STOPPED for each read, and three other events.
 */

/*
 * Options of a traffic manager. size, memory, memory_bytes, bases, n_bases and buffer_bytes are
 * required. Page p of layer l has the layer's bytes of one block, at memory + bases[l mod n_bases] +
 * p × stride. A decode engine has a base for each layer; a prefill engine may have fewer, and then
 * holds n_bases layers at a time. The layouts of the two sides may differ.
 */
enum {
	PENSTOCK_VERIFY_EVERY_HOP = 0, /* in memory of the prefill engine, and in buffer and memory of the decode engine */
	PENSTOCK_VERIFY_LAST_HOP = 1   /* in memory of either engine, or in the buffer before memory that the CPU cannot address */
};

typedef struct penstock_traffic_options {
	uint64_t size;           /* sizeof(penstock_traffic_options) */
	const char *listen;      /* host:port of the compute NIC; NULL: 127.0.0.1 and a free port */
	const char *advertise;   /* host:port to which the other engines connect; NULL: the address of listen */
	const void *token;       /* secret with which the other engines authenticate, 16 to 256 bytes; NULL: 32 random bytes */
	void *memory;            /* device memory, or host memory used instead */
	uint64_t memory_bytes;
	const uint64_t *bases;   /* offsets of the layers in memory */
	uint64_t stride;         /* distance of a layer's pages; 0: the bytes of a layer of a block */
	uint64_t buffer_bytes;   /* host memory that the library maps, through which prompts pass */
	uint64_t append_bytes;   /* host memory for decoded blocks; 0: 1/16 of buffer_bytes */
	uint32_t token_bytes;
	uint32_t n_bases;
	uint32_t pages;          /* pages of each layer; 0: as many as memory has */
	uint32_t persist_max;    /* greatest number of blocks that wait for storage; others are not stored; 0: as many as the buffers hold */
	uint32_t transfers_max;  /* greatest number of transfers that run or are not drained; default 1024 */
	uint32_t connections;    /* TCP connections for payload to each engine; default 4 */
	uint32_t cuda;           /* since version 1.6. 0: the CPU can address memory; n: memory is on the CUDA driver's device n-1 */
	uint32_t verify;         /* since version 1.6: the places where blocks are compared with their checksums between engines; see below */
	const char *ca_file;     /* since version 1.7: PEM, the CA of the engines' certificates; NULL, as the next two: no TLS between engines */
	const char *cert_file;   /* since version 1.7: PEM, the certificate of this engine, as server and as client */
	const char *key_file;    /* since version 1.7 */
	const uint32_t *order;   /* since version 1.10: the layers in the order in which the model computes them, see below; NULL: as in a value */
	uint32_t n_order;        /* since version 1.10: the number of layers, or 0 */
	const uint32_t *tables;  /* since version 1.12: the page table of each layer, see below; NULL: one table for all layers */
	uint32_t n_tables;       /* since version 1.12: the number of layers, or 0 */
} penstock_traffic_options;

/* In place of a device page: the block has no page in this page table. Since version 1.12. */
#define PENSTOCK_NO_PAGE 0xffffffffu

/*
 * Opens a traffic manager. The namespace is chained, its keys are PENSTOCK_KEYS_IDS, and it has a group
 * of kind FULL. Since version 1.10 it may also have groups of kind WINDOW, and since version 1.12 of kind STATE; until 1.11
 * a layer of a block has as many bytes in all groups. memory must stay allocated until
 * penstock_traffic_close or penstock_close has returned; it needs no penstock_register.
 *
 * order lists each layer once, by its index in a value, which has the layers of the first group, then those of the
 * second group, and so on. Layer l of bases and of all calls on transfers is the layer order[l] of a value. The
 * engines of both sides must have the same order. A layer of a WINDOW group needs only the blocks of the cached prefix
 * that are within the window at its end: the other blocks are neither read nor sent, and their pages of this
 * layer do not change. A penstock_transfer_recompute of any cached block then applies to all cached blocks. Until
 * version 1.11 a prompt had to have at least one block that is not cached.
 *
 * A layer of a STATE group has recurrent state: the page of a block holds the state after the last token of the block. Of
 * the cached prefix only the state of the last block is read, and only for the prefill engine. Of the prompt only the
 * state of the last block is sent to the decode engine, and stored if that block is full. Other blocks may have
 * PENSTOCK_NO_PAGE in these layers.
 *
 * tables is for an engine that allocates pages for kinds of layers apart: layer l has page table tables[l], from 0
 * on. A block has a page in each table. Wherever this interface has pages of blocks, they are those of the first block in
 * all tables, in the order of the tables, then those of the second block, and so on. Layers of different tables may share
 * memory. With tables there is a base for each layer.
 *
 * Without ca_file, cert_file and key_file the payload is not encrypted. With these files the engines use TLS
 * 1.3, and each one verifies the certificate of the other. The certificate is valid for the host of advertise, or of
 * listen. Engines with and without TLS refuse each other: a transfer between them fails with AUTH or UNAVAILABLE. With
 * TLS the payload is copied in the host's memory.
 *
 * verify is PENSTOCK_VERIFY_EVERY_HOP, PENSTOCK_VERIFY_LAST_HOP, or n > 1: at the last hop, one layer of a
 * block in n, chosen at random. With n some wrong blocks are not detected. Blocks that storage returns, and
 * blocks that it stores, are always verified.
 *
 * Memory on a CUDA device is copied by the device's copy engine, in the device's primary context, to and
 * from the buffer, which the driver pins. Transfers pass through the buffer; on a prefill engine they need
 * two layers of each prompt in addition. When penstock_transfer_layer returns, the layer is on the device.
 * Without penstock_traffic_follow, call penstock_transfer_computed and penstock_traffic_append when the
 * device has computed the pages, and give pages that the device does not use.
 *
 * Errors: INVALID (also: the address is in use, a file for TLS is missing or cannot be read, the CUDA driver cannot be
 * loaded, there is no such device),
 * CLOSED, FORKED.
 */
int32_t penstock_traffic_open(penstock_namespace ns, const penstock_traffic_options *options, penstock_traffic *traffic, penstock_error *error);

/*
 * Names the caller's stream, a CUstream of the primary context of the device that has the memory; 0: the default
 * stream. Each later call of penstock_traffic_prefill, penstock_traffic_decode,
 * penstock_transfer_add_pages, penstock_transfer_computed and penstock_traffic_append records an event in
 * the stream, and the copies of its pages wait for the event on the device: copies to the pages for the
 * work that may still use them, copies from the pages for the work that computes them. Of these functions only
 * penstock_traffic_append waits for its copy. Work that the caller puts into a stream after
 * penstock_transfer_layer has returned, or after READY, finds the pages' KV. A transfer that has been ended has
 * its last event when the stream has done the work for which its copies wait. Another call names another stream,
 * which the caller makes wait for the first one.
 * A prefill engine needs a base for each layer.
 * Errors: INVALID (the memory is host memory), CLOSED, FORKED. Since version 1.9.
 */
int32_t penstock_traffic_follow(penstock_traffic traffic, uint64_t stream, penstock_error *error);

/*
 * Closes a traffic manager, its eventfd and its transfers, whose events are lost. It waits for
 * their ends and for blocks that are being stored, each write for at most a minute. When it has
 * returned, the library does not access the device memory. Errors: CLOSED, FORKED.
 */
int32_t penstock_traffic_close(penstock_traffic traffic, penstock_error *error);

/* The fields of penstock_member that a traffic manager provides. */
typedef struct penstock_traffic_description {
	uint64_t size;           /* sizeof(penstock_traffic_description), set by the caller */
	char address[256];       /* text, with a zero byte at its end */
	uint8_t token[256];
	uint32_t address_bytes;  /* without the zero byte */
	uint32_t token_bytes;
	uint64_t buffer_bytes;
	uint64_t block_bytes;
	uint64_t sums_bytes;
	uint64_t request_bytes;
} penstock_traffic_description;

/* Returns the description of a traffic manager, which does not change. Errors: INVALID, CLOSED, FORKED. */
int32_t penstock_traffic_describe(penstock_traffic traffic, penstock_traffic_description *description, penstock_error *error);

/* Options of a transfer. request and blocks are required; the other fields are those of penstock_start. */
typedef struct penstock_transfer_options {
	uint64_t size;           /* sizeof(penstock_transfer_options) */
	const char *request;     /* penstock_start.name: 1 to 1024 bytes; no other transfer of this traffic manager has it */
	const uint8_t *ids;      /* 16 bytes each, of the prompt's full blocks; prefill: of the cached prefix at least */
	const penstock_part *parts; /* the parts of the cached prefix that this side reads */
	const uint32_t *pages;   /* device pages of the first blocks, of each in all page tables. decode: of all blocks. prefill: of any number; penstock_transfer_add_pages adds the others */
	const void *peer_address; /* decode: the prefill engine */
	const void *peer_token;
	uint64_t epoch;          /* of the ids; 0: the epoch of the namespace's handle */
	uint32_t peer_address_bytes;
	uint32_t peer_token_bytes;
	uint32_t n_ids;
	uint32_t n_parts;
	uint32_t n_pages;
	uint32_t blocks;         /* the whole prompt; its last block may be partly filled */
	uint32_t hit_blocks;     /* the cached prefix */
	uint32_t timeout_ms;     /* time limit of the whole transfer; 0: none */
	uint32_t no_persist;     /* decode: 1: do not store the prompt's new blocks */
	uint32_t resident_blocks; /* decode, since version 1.11: this many of the first pages have their KV of the epoch already; those of the cached prefix do not change */
} penstock_transfer_options;

/*
 * Begins the prefill side of a request and returns at once. Its events are LOADED, READY (since version 1.12, with
 * groups of kind STATE), PROGRESS and STOPPED, and the last one. After an error there is no transfer. Errors: INVALID (also: the request
 * is under way, a page is outside of device memory, or the transfer needs more than the whole
 * buffer), BUSY (transfers_max; drain events first), CLOSED, FORKED.
 */
int32_t penstock_traffic_prefill(penstock_traffic traffic, const penstock_transfer_options *options, penstock_transfer *transfer, penstock_error *error);

/*
 * Begins the decode side. Its events are READY, PROGRESS and STOPPED, and the last one. Otherwise as
 * penstock_traffic_prefill.
 */
int32_t penstock_traffic_decode(penstock_traffic traffic, const penstock_transfer_options *options, penstock_transfer *transfer, penstock_error *error);

/*
 * Makes this side read part of the cached prefix too. The part must be in no buffer, and neither side may
 * be reading it. If the buffer of a prefill engine has no room now, STOPPED follows. The functions of
 * transfers have no effect on a transfer that has ended. Errors: INVALID, BUSY (4096 calls wait until the transfer has begun), CLOSED (also:
 * the last event was drained), FORKED.
 */
int32_t penstock_transfer_read(penstock_transfer transfer, penstock_part part, penstock_error *error);

/* Ends the reads under way. STOPPED follows for each of them. Errors: as penstock_transfer_read. */
int32_t penstock_transfer_cut(penstock_transfer transfer, penstock_error *error);

/*
 * Makes the model compute part of the cached prefix (prefill). After LOADED it lowers first_miss as
 * long as the cached blocks before first_miss lack device pages. After that the transfer fails
 * instead, because the model may have used the part. Errors: as penstock_transfer_read.
 */
int32_t penstock_transfer_recompute(penstock_transfer transfer, penstock_part part, penstock_error *error);

/*
 * Adds the device pages of the next blocks, after the pages given before (prefill). Nothing is
 * written to device memory before all blocks of the cached prefix that the model does not compute
 * have their pages. Errors: as penstock_transfer_read.
 */
int32_t penstock_transfer_add_pages(penstock_transfer transfer, const uint32_t *pages, uint32_t n_pages, penstock_error *error);

/*
 * Reports that the pages of a layer have the KV of all blocks before block (prefill). The blocks that
 * the decode engine lacks are then sent to it. These pages must not change until the last event, or, with fewer
 * bases than layers, until penstock_transfer_layer has returned for layer + n_bases. A prompt that is
 * not computed in chunks has only calls with block = blocks. A block that is not full counts with the
 * last chunk. Chunks need a base for each layer. Errors: as penstock_transfer_read.
 */
int32_t penstock_transfer_computed(penstock_transfer transfer, uint32_t layer, uint32_t block, penstock_error *error);

/*
 * Waits until the cached prefix of a layer is in device memory and verified (prefill), for at most
 * timeout_ms; PENSTOCK_NO_LIMIT: until the transfer ends. Errors: TIMEOUT (it is not there yet), CANCELED
 * (the transfer has ended; the text is the reason), INVALID, CLOSED, FORKED.
 */
int32_t penstock_transfer_layer(penstock_transfer transfer, uint32_t layer, uint32_t timeout_ms, penstock_error *error);

/*
 * Declares that the engine makes no other calls on the transfer, and does not wait for its end. FINISHED
 * comes, for prefill, when each layer has been computed and has arrived; for decode, after READY, when
 * storage has the prompt's new blocks or has refused them. Errors: CLOSED (also: the last event was
 * drained), FORKED.
 */
int32_t penstock_transfer_finish(penstock_transfer transfer, penstock_error *error);

/*
 * Ends a transfer early, and does not wait for its end. The other side fails too. Exception: if the
 * two sides have not exchanged a message yet, the other side waits until it is cancelled, for example
 * after END of the planner, or until its time limit. The last event is FAILED with CANCELED, or FINISHED if the transfer
 * had ended before. Errors: as penstock_transfer_finish.
 */
int32_t penstock_transfer_cancel(penstock_transfer transfer, penstock_error *error);

/*
 * Stores one decoded block, whose KV is in page of every layer. ids are the chain up to and including
 * the block; epoch 0 is the epoch of the namespace's handle. It waits for room for the block, for at most
 * timeout_ms (PENSTOCK_NO_LIMIT: no limit), and returns when the page may change. The block is stored
 * after its parent. If storage refuses the block, no error reports that. request is for the log. Errors:
 * TIMEOUT (nothing was copied; call it again), INVALID, CLOSED, FORKED.
 */
int32_t penstock_traffic_append(penstock_traffic traffic, const char *request, const uint8_t *ids, uint32_t n_ids, uint64_t epoch, uint32_t page, uint32_t timeout_ms, penstock_error *error);

/*
 * As penstock_traffic_append, for a block with a page in each page table. With PENSTOCK_NO_PAGE for all layers of a group
 * with recurrent state the block is stored without that state, and no prefix ends there. Since version 1.12.
 */
int32_t penstock_traffic_append_pages(penstock_traffic traffic, const char *request, const uint8_t *ids, uint32_t n_ids, uint64_t epoch, const uint32_t *pages, uint32_t n_pages, uint32_t timeout_ms, penstock_error *error);

/*
 * Waits until a block of this engine, id of 16 bytes, is stored or was refused, for at most timeout_ms. It
 * returns at once for a block that is not being stored. Errors: TIMEOUT, INVALID, CLOSED, FORKED.
 */
int32_t penstock_traffic_settle(penstock_traffic traffic, const uint8_t *id, uint32_t timeout_ms, penstock_error *error);

/*
 * Returns the counters of up to max of the traffic manager's compute NICs, and their number in n. It does not wait.
 * Errors: INVALID, CLOSED, FORKED. Since version 1.10.
 */
int32_t penstock_traffic_nics(penstock_traffic traffic, penstock_nic *nics, uint32_t max, uint32_t *n, penstock_error *error);

/* As penstock_leader_eventfd, for penstock_traffic_drain. */
int32_t penstock_traffic_eventfd(penstock_traffic traffic, int32_t *fd, penstock_error *error);

/* Kinds of events of transfers. */
enum {
	PENSTOCK_TRANSFER_LOADED = 1,   /* prefill: each block of the cached prefix is in a buffer or is to be computed: first_miss. From then on the transfer does not wait for storage. The last PROGRESS of a part may follow */
	PENSTOCK_TRANSFER_READY = 2,    /* decode: the whole prompt is in device memory and verified. prefill, with groups of kind STATE: the cached prefix is */
	PENSTOCK_TRANSFER_PROGRESS = 3, /* blocks of part before upto were read and verified, and bytes of the part have arrived. upto is part.to at the end */
	PENSTOCK_TRANSFER_STOPPED = 4,  /* the read of part ended before block upto; gone; the text of error is the reason */
	PENSTOCK_TRANSFER_FINISHED = 5, /* the last event: this side is complete */
	PENSTOCK_TRANSFER_FAILED = 6    /* the last event: error, and intact for penstock_attempt_done */
};

/* An event of a transfer. Fields that the kind does not name are 0. */
typedef struct penstock_transfer_event {
	penstock_transfer transfer;
	uint32_t kind;           /* PENSTOCK_TRANSFER_* */
	uint32_t first_miss;     /* the lowest block that the model computes; blocks: none. The model computes the parts of penstock_transfer_recompute, and all blocks from hit_blocks on */
	penstock_part part;
	uint32_t upto;
	uint32_t gone;           /* 1: storage does not have block upto; 0: this side could not read it, or penstock_transfer_cut ended the read */
	uint64_t bytes;
	uint32_t intact;         /* leading blocks of the cached prefix that are certainly intact */
	uint32_t reserved;
	penstock_error error;    /* FAILED: UNAVAILABLE (the other engine), AUTH, TIMEOUT, CANCELED (also by the other side), VERSION, INTERNAL, … */
} penstock_transfer_event;

/*
 * Returns up to max events, and their number in n. It does not wait. The events of one transfer are
 * in order. Errors: INVALID, CLOSED, FORKED.
 */
int32_t penstock_traffic_drain(penstock_traffic traffic, penstock_transfer_event *events, uint32_t max, uint32_t *n, penstock_error *error);

/*
 * Writes the counters of the store and the state of its nodes as JSON to buf, with a zero
 * byte at the end. cap is the size of buf in bytes. need receives the required size. If cap
 * is too small, the function writes nothing to buf. Errors: INVALID (cap is too small),
 * CLOSED, FORKED.
 */
int32_t penstock_stats(penstock_store store, char *buf, uint64_t cap, uint64_t *need, penstock_error *error);

#ifdef __cplusplus
}
#endif

#endif
