/*
 * penstock.h: the C interface of libpenstock, a client of Penstock's storage nodes.
 *
 * A store is a connection to one or several nodes. A namespace is the KV cache of
 * one model in one layout. A key names one block of it and has one value, whose
 * size follows from the namespace. A batch is a call for many keys.
 *
 *   penstock_open ─► penstock_ensure ─► penstock_register ─► penstock_match, penstock_get, penstock_put, …
 *
 * THREADS. Every function may be called from any thread, several at once, also with
 * the same handle. None needs, takes or keeps a lock of the caller's language: a
 * binding releases the interpreter's lock around each call. penstock_submit,
 * penstock_drain, penstock_cancel, penstock_eventfd and penstock_abi_version do not
 * wait for a node. All others may wait as long as their time limit.
 * None of them may be called from a signal handler.
 *
 * HANDLES are numbers. 0 is no handle. A number is not used twice in a process, so a
 * call with a handle that was closed fails with PENSTOCK_ERR_CLOSED and does nothing.
 *
 * OWNERSHIP. Strings, keys, structures and arrays that are passed in belong to the
 * caller, and are copied before the function returns. Two things are used for
 * longer by a batch that was submitted: the memory of its values and its array of
 * results. They must stay as they are, allocated and otherwise unused, until the
 * completion of the job is returned by penstock_drain or penstock_wait, or until
 * penstock_close has returned. After that the library holds no pointer to them.
 *
 * ERRORS. A function that can fail returns a code, PENSTOCK_OK or one of
 * PENSTOCK_ERR_*, and writes code and text into the caller's penstock_error or
 * penstock_result, either of which may be NULL. The text is for people, in English,
 * ends with a zero byte, and is cut where there is no room. A miss, a node that is
 * down and a store that is full are no errors: they are results of a key.
 *
 * FORK. The library runs threads of its own, which a forked child does not have. In a
 * child of a process that had loaded the library each function returns
 * PENSTOCK_ERR_FORKED at once, whatever its arguments, and does nothing; the parent
 * goes on. A child that wants to use the library is forked before the library is
 * loaded (dlopen, or ctypes.CDLL), or runs a new program. A process has loaded it
 * for good: dlclose does not unload it.
 *
 * SIGNALS. Loading installs handlers for SIGSEGV, SIGBUS, SIGFPE, SIGPIPE and SIGURG.
 * Each passes what was not raised by the library's own code to the handler that was
 * there before. No other signal is touched.
 *
 * VERSIONS. Structures that may grow begin with their size; set it to sizeof. Zero
 * in a field means its default. A library takes callers of the same major version.
 */
#ifndef PENSTOCK_H
#define PENSTOCK_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this interface: major in the upper 16 bits, minor in the lower. */
#define PENSTOCK_ABI_VERSION 0x00010000u

/* The longest key, in bytes. */
#define PENSTOCK_KEY_MAX 256
/* The most keys in one batch. */
#define PENSTOCK_BATCH_MAX 65536

typedef uint64_t penstock_store;
typedef uint64_t penstock_namespace;
typedef uint64_t penstock_memory;
typedef uint64_t penstock_lease;
typedef uint64_t penstock_job;

/* What a function returns. */
enum {
	PENSTOCK_OK = 0,
	PENSTOCK_ERR_INVALID = 1,      /* an argument cannot be: the text says which, and why; fix the caller */
	PENSTOCK_ERR_CLOSED = 2,       /* the handle is closed, or never was one */
	PENSTOCK_ERR_FORKED = 3,       /* the process is a child of the one that loaded the library */
	PENSTOCK_ERR_AUTH = 4,         /* the node does not take our token or certificate */
	PENSTOCK_ERR_MISMATCH = 5,     /* the namespace on the node is another: geometry, index, tenant or salt; or its epoch has moved */
	PENSTOCK_ERR_NOT_FOUND = 6,    /* there is no such namespace, lease or job */
	PENSTOCK_ERR_UNAVAILABLE = 7,  /* no node answers */
	PENSTOCK_ERR_BUSY = 8,         /* as many jobs as may be are under way (penstock_options.jobs_max) */
	PENSTOCK_ERR_TIMEOUT = 9,      /* the time limit has passed; the memory is the caller's again */
	PENSTOCK_ERR_CANCELED = 10,    /* penstock_cancel or penstock_close ended it; the memory is the caller's again */
	PENSTOCK_ERR_UNREGISTERED = 11, /* bytes of a value do not lie in registered memory */
	PENSTOCK_ERR_PROVIDER = 12,    /* the node's data plane is of another kind than this library's, which is tcp */
	PENSTOCK_ERR_VERSION = 13,     /* the node does not know this call: it is of another version */
	PENSTOCK_ERR_INTERNAL = 14     /* none of the above; the text says what */
};

/* What became of one key. Zero is a miss; 1 and 2 are success. */
enum {
	PENSTOCK_KEY_MISS = 0,    /* get, exists, touch, delete: not stored. put: not tried */
	PENSTOCK_KEY_OK = 1,      /* get: in memory, and verified. put: stored now. exists, touch: there. delete: removed */
	PENSTOCK_KEY_EXISTS = 2,  /* put: was stored before, and nothing was sent */
	PENSTOCK_KEY_BUSY = 3,    /* the node had no room for it now */
	PENSTOCK_KEY_LOST = 4,    /* get: stored, and not delivered: corrupt, device or transfer error. The bytes are undefined */
	PENSTOCK_KEY_REFUSED = 5, /* put: the node will not store it: full, over quota, its parent absent, epoch over */
	PENSTOCK_KEY_DOWN = 6     /* the node that has it does not answer */
};

/* Code and text of what a function returned. */
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
 * Takes one log line, without a newline. It is called by one thread of the library at
 * a time, never by a thread that is inside a function of this header, and no call
 * waits for it: lines that it is too slow for are dropped and counted. It may call
 * any function but penstock_close. After penstock_close it is not called again.
 */
typedef void (*penstock_log)(void *arg, int32_t level, const char *line);

/* How to open a store. Only servers is required. */
typedef struct penstock_options {
	uint64_t size;          /* sizeof(penstock_options) */
	const char *servers;    /* host:port of each node's gRPC, separated by commas; spelled the same in all clients */
	const char *token;      /* bearer token; NULL: none */
	const char *token_file; /* file with the bearer token, in place of token */
	const char *ca_file;    /* TLS: certificate authority of the nodes. NULL with cert_file NULL: plaintext */
	const char *cert_file;  /* TLS: own certificate, with its key */
	const char *key_file;
	penstock_log log;       /* NULL: nothing is logged */
	void *log_arg;
	int32_t log_level;      /* least level that is logged */
	uint32_t insecure;      /* 1: the token may go in plaintext to a host that is not loopback */
	uint32_t dial_timeout_ms; /* bound of one attempt to reach a node; default 3000 */
	uint32_t dead_for_ms;   /* how long a node that failed is taken for down; default 5000 */
	uint32_t timeout_ms;    /* time limit of calls that name none; default 30000 */
	uint32_t jobs_max;      /* jobs under way or not drained, at most; default 1024 */
	uint32_t jobs_parallel; /* jobs that move bytes at once; others wait in order; default 16 */
	uint32_t connections;   /* TCP connections for payload to each node; default 4 */
} penstock_options;

/* The version of the library: PENSTOCK_ABI_VERSION of the header it was built with. Also in a forked child. */
uint32_t penstock_abi_version(void);

/*
 * Opens a store. A node that does not answer is tolerated, and is down until it does; it
 * is an error only if every node refuses. It takes at most dial_timeout_ms.
 * Errors: INVALID, AUTH, PROVIDER, FORKED.
 */
int32_t penstock_open(const penstock_options *options, penstock_store *store, penstock_error *error);

/*
 * Closes a store with all its namespaces, memory, leases and jobs. Jobs under way are
 * cancelled. When it returns, the library touches no memory of the caller, no completion
 * comes any more, and the eventfd is closed. Leases that were not released run out.
 * A second call returns CLOSED. Errors: CLOSED, FORKED.
 */
int32_t penstock_close(penstock_store store, penstock_error *error);

/* How the keys of a namespace hang together. */
enum {
	/*
	 * The keys of a batch are a chain: those of one prompt from its first block on. A block
	 * can be found while all before it are stored; match finds the longest prefix; the
	 * ends of chains are evicted first. A key must name all that comes before its block, as
	 * engines' block hashes do: a key that is stored behind one parent is refused behind
	 * another.
	 */
	PENSTOCK_CHAINED = 1,
	/* Keys have nothing to do with each other. */
	PENSTOCK_FLAT = 2
};

/* What keys are. */
enum {
	/* Any 1 to 256 bytes. A block's id is the first 16 bytes of a SHA-256 over namespace and key: see penstock_key_ids. */
	PENSTOCK_KEYS_ANY = 0,
	/* 16 bytes: block ids themselves, as penstock_chain makes them. */
	PENSTOCK_KEYS_IDS = 1
};

/* Kinds of layer groups. */
enum {
	PENSTOCK_GROUP_FULL = 1,   /* every block of a prefix is needed */
	PENSTOCK_GROUP_WINDOW = 2, /* the blocks of the last window_tokens */
	PENSTOCK_GROUP_STATE = 3   /* the last block: one snapshot; token_bytes is the size of one layer's */
};

/*
 * Layers that are needed together. One block of the group is a piece, of
 * layers × layer bytes, where layer bytes = block_tokens × token_bytes (of a state: token_bytes).
 */
typedef struct penstock_group {
	uint32_t kind;
	uint32_t layers;      /* parts that have a checksum each, and at whose borders a value may be cut into fragments */
	uint32_t token_bytes;
	uint32_t window_tokens;
} penstock_group;

/*
 * What a namespace is. Two engines that agree on it agree on every byte: dtype and
 * layout hold whatever else decides the bytes (strides, parallelism, engine).
 */
typedef struct penstock_definition {
	uint64_t size;          /* sizeof(penstock_definition) */
	const char *name;       /* 1 to 128 of A-Z a-z 0-9 . _ / - */
	const char *tenant;     /* NULL: none; the same characters */
	const void *salt;       /* at most 64 bytes; goes into every block id */
	uint32_t salt_bytes;
	uint32_t index;         /* PENSTOCK_CHAINED or PENSTOCK_FLAT */
	const char *dtype;      /* at most 64 bytes each */
	const char *layout;
	uint32_t block_tokens;  /* tokens in a block; 1 where a value is not made of tokens */
	uint32_t n_groups;      /* 1, unless the model is a hybrid; flat namespaces have 1 */
	const penstock_group *groups;
	int64_t quota_bytes;    /* of a namespace that is created; 0: none */
	uint32_t keys;          /* PENSTOCK_KEYS_ANY or PENSTOCK_KEYS_IDS; of the handle, not stored */
	uint32_t reserved;      /* 0 */
} penstock_definition;

/*
 * Creates a namespace on every node, or checks that the one that is there is the same, and
 * returns a handle with the epoch of its weights (penstock_bump). Quotas are not compared.
 * Errors: MISMATCH (the text has both definitions), INVALID, UNAVAILABLE, AUTH, TIMEOUT, CLOSED, FORKED.
 */
int32_t penstock_ensure(penstock_store store, const penstock_definition *definition, penstock_namespace *ns, penstock_error *error);

/*
 * The epoch of a handle: calls are for it unless they name another. refresh 1 asks the
 * nodes for the newest first; blocks of older epochs are then missed. An engine refreshes
 * when it has loaded the weights. Errors: as ensure.
 */
int32_t penstock_epoch(penstock_namespace ns, uint32_t refresh, uint64_t *epoch, penstock_error *error);

/*
 * Begins another epoch: the weights have changed. to 0: the next one. On every node
 * blocks of older epochs are missed from now on. The handle is at the new epoch then, others
 * are at the old one, and miss, until they are refreshed.
 * Errors: MISMATCH (to is not later), UNAVAILABLE (a node did not answer; the text says which), TIMEOUT, CLOSED, FORKED.
 */
int32_t penstock_bump(penstock_namespace ns, uint64_t to, uint64_t *epoch, penstock_error *error);

/*
 * Makes memory usable for values: n bytes from addr. It must stay allocated until
 * penstock_unregister or penstock_close has returned. Memory that is registered may not
 * overlap. Errors: INVALID, CLOSED, FORKED.
 */
int32_t penstock_register(penstock_store store, void *addr, uint64_t n, penstock_memory *memory, penstock_error *error);

/* Ends a registration. It fails with BUSY while jobs use it. Errors: BUSY, CLOSED, FORKED. */
int32_t penstock_unregister(penstock_memory memory, penstock_error *error);

/* Flags of a batch. */
enum {
	/* Fragments need not be registered: those that are not are registered for the call. */
	PENSTOCK_ANY_MEMORY = 1
};

/*
 * A batch. Key i is the bytes [key_offsets[i], key_offsets[i+1]) of keys. In a chained
 * namespace key 0 is the first block of the prompt; get and put move those from first on, and
 * the others are there as their ancestors. In a flat one first is 0.
 *
 * get and put move pieces. Without piece_keys, piece i is group 0 of key first + i, and
 * there are n_keys - first of them. Otherwise piece i is group piece_groups[i] (NULL: 0) of
 * key piece_keys[i].
 *
 * The bytes of piece i lie, one after the other, in the fragments [piece_fragments[i],
 * piece_fragments[i+1]); piece_fragments NULL: in fragment i. Each is lengths[] bytes at addresses[], a
 * whole number of the group's layers. Together they are as long as the piece. Fragments of one
 * get may not overlap.
 */
typedef struct penstock_batch {
	uint64_t size;                /* sizeof(penstock_batch) */
	uint64_t epoch;               /* 0: that of the handle */
	uint32_t flags;
	uint32_t timeout_ms;          /* time limit; 0: the store's */
	uint32_t lease_ms;            /* match: keep what matched from being evicted for so long; 0: no lease */
	uint32_t n_keys;
	const void *keys;
	const uint32_t *key_offsets;  /* n_keys + 1 */
	uint32_t first;
	uint32_t n_pieces;            /* with piece_keys; otherwise 0 or n_keys - first */
	const uint32_t *piece_keys;   /* n_pieces, or NULL */
	const uint8_t *piece_groups;  /* n_pieces, or NULL */
	const uint32_t *piece_fragments; /* n_pieces + 1, or NULL */
	const uint64_t *addresses;    /* of the fragments */
	const uint64_t *lengths;
} penstock_batch;

/* Why a prefix is not longer. */
enum {
	PENSTOCK_CUT_COMPLETE = 0, /* it is as long as what was asked for */
	PENSTOCK_CUT_ABSENT = 1,   /* the next block is not stored */
	PENSTOCK_CUT_EPOCH = 2,    /* the node is at another epoch */
	PENSTOCK_CUT_GROUPS = 3,   /* blocks are there, but no length at which window or state groups are complete */
	PENSTOCK_CUT_LEASE = 4,    /* the node grants no more leases */
	PENSTOCK_CUT_DOWN = 5,     /* the node does not answer */
	PENSTOCK_CUT_BUSY = 6,     /* the node had no room */
	PENSTOCK_CUT_LOST = 7      /* the next block was lost on the way */
};

/* What came of a batch. */
typedef struct penstock_result {
	penstock_job job;      /* 0 for a call that was not submitted */
	uint32_t op;           /* PENSTOCK_OP_* */
	uint32_t n;            /* how many results there are: pieces of get and put, keys otherwise */
	uint32_t ok;           /* how many are a success */
	uint32_t prefix;       /* keys from the first on that are a success, or match; with first > 0 those before count too */
	uint32_t cut;          /* why prefix is not longer: get and match */
	uint32_t reserved;
	uint64_t bytes;        /* moved and verified; of match: what a get of the prefix would move */
	uint64_t epoch;
	penstock_lease lease;  /* match: 0 if none was granted */
	penstock_error error;
} penstock_result;

/*
 * The batch calls. results has a byte for each piece (get, put) or key (exists, touch, delete)
 * and may be NULL; match takes none. out may be NULL, but a match that asks for a lease needs it.
 * They return when all is done, or the time limit has passed. Then, as always when they have
 * returned, nothing reads or writes the memory, and results say what had been done.
 *
 *   match   the longest prefix of the keys that is stored: of a chain, or the run of keys from the first
 *   get     loads values; each is verified against the checksums of its writer, or is no success
 *   put     stores values; what is stored already is not sent. In a chain the first refusal ends it
 *   exists  which keys are stored, each by itself, without touching the order of eviction
 *   touch   as exists, and marks the stored keys as used now, for the order of eviction
 *   delete  removes keys; in a chained namespace also all keys behind them, whoever stored them
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

/* What a job does. */
enum {
	PENSTOCK_OP_MATCH = 1,
	PENSTOCK_OP_GET = 2,
	PENSTOCK_OP_PUT = 3,
	PENSTOCK_OP_EXISTS = 4,
	PENSTOCK_OP_TOUCH = 5,
	PENSTOCK_OP_DELETE = 6
};

/*
 * Begins a batch and returns its job at once. results as above, written before the
 * completion is. The time limit counts from now. An error means that there is no job:
 * INVALID, UNREGISTERED, BUSY (drain first), CLOSED, FORKED.
 * Every job is completed once, and its completion returned once, by drain or by wait.
 */
int32_t penstock_submit(penstock_namespace ns, uint32_t op, const penstock_batch *batch, uint8_t *results, penstock_job *job, penstock_error *error);

/*
 * Ends a job soon: it completes as CANCELED, or as what it had become before. It does not
 * wait. Errors: NOT_FOUND (no such job, or its completion was returned), CLOSED, FORKED.
 */
int32_t penstock_cancel(penstock_store store, penstock_job job, penstock_error *error);

/*
 * A file descriptor that is readable while a completion waits in this store; for poll, epoll
 * and event loops. Only penstock_drain and penstock_wait may read it. It belongs to the store. It is closed in programs that this process
 * executes. Errors: CLOSED, FORKED.
 */
int32_t penstock_eventfd(penstock_store store, int32_t *fd, penstock_error *error);

/* Returns up to max completions, in the order in which they came, in n. It does not wait. Errors: INVALID, CLOSED, FORKED. */
int32_t penstock_drain(penstock_store store, penstock_result *completions, uint32_t max, uint32_t *n, penstock_error *error);

/*
 * Waits until a job is complete, for at most timeout_ms, and returns its completion, which
 * drain then does not. The code is that of the wait; the job's is in out->error.
 * Errors: TIMEOUT (the job goes on), NOT_FOUND, INVALID (out is NULL), CLOSED, FORKED.
 */
int32_t penstock_wait(penstock_store store, penstock_job job, uint32_t timeout_ms, penstock_result *out, penstock_error *error);

/* Makes a lease end ms from now. Errors: NOT_FOUND (it has ended: the blocks may have gone), UNAVAILABLE, TIMEOUT, CLOSED, FORKED. */
int32_t penstock_lease_renew(penstock_lease lease, uint32_t ms, penstock_error *error);

/* Ends a lease, and the handle. Errors: UNAVAILABLE (it runs out by itself), TIMEOUT, CLOSED, FORKED. */
int32_t penstock_lease_release(penstock_lease lease, penstock_error *error);

/*
 * The ids of n keys, 16 bytes each, as nodes, logs and events name them:
 *
 *   root = SHA-256("penstock kv chain v1\0" ‖ u32 len(tenant) ‖ tenant ‖ u32 len(name) ‖ name ‖ u32 len(salt) ‖ salt ‖ u32 block_tokens)[:16]
 *   id   = SHA-256("penstock kv key v1\0" ‖ root ‖ key)[:16]
 *
 * with little-endian integers. Two of 2^40 keys of one namespace have the same id with
 * a probability below 2^-48, and to search for such a pair takes about 2^64 steps.
 * Errors: INVALID, CLOSED, FORKED.
 */
int32_t penstock_key_ids(penstock_namespace ns, const void *keys, const uint32_t *key_offsets, uint32_t n, uint8_t *ids, penstock_error *error);

/*
 * Penstock's own chain, for engines without block hashes: the ids of the whole blocks of
 * tokens, 16 bytes each, for a namespace of PENSTOCK_KEYS_IDS. ids has room for
 * n_tokens / block_tokens of them; n_ids is how many there are. parent NULL: from the start
 * of the prompt; otherwise the id of the block before. extra, if not empty, is what else
 * the blocks from here on depend on (LoRA, cache salt, hashes of images): it goes into the ids.
 *
 *   tip   = parent, or root as above
 *   tip   = SHA-256("penstock kv salt v1\0" ‖ tip ‖ u32 len(extra) ‖ extra)[:16]   if extra is not empty
 *   id(0) = SHA-256(tip ‖ u32 block_tokens ‖ its tokens as u32)[:16], and so on from each id
 *
 * Errors: INVALID, CLOSED, FORKED.
 */
int32_t penstock_chain(penstock_namespace ns, const uint8_t *parent, const void *extra, uint32_t extra_bytes, const uint32_t *tokens, uint32_t n_tokens, uint8_t *ids, uint32_t *n_ids, penstock_error *error);

/*
 * Counters of the store and the state of its nodes as JSON, with a zero byte at the end, into
 * buf of cap bytes. need is how many bytes it takes; with less it writes nothing and returns
 * INVALID. Errors: INVALID, CLOSED, FORKED.
 */
int32_t penstock_stats(penstock_store store, char *buf, uint64_t cap, uint64_t *need, penstock_error *error);

#ifdef __cplusplus
}
#endif

#endif
