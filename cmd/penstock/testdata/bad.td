# What cannot be right is refused with what was wrong and what to do.

tokens any 1 4
----

run
status
block get m --tokens-file @any --out @got
trace replay sample
ns list --format xml
nope
ns crate
ns create
----
penstock: dial tcp 127.0.0.1:1: connect: connection refused
(is `penstock serve` running, and is --server its address?)
exit 1
penstock: client: namespace "m": no storage node answers: describe: 127.0.0.1:1: node is down: dial tcp 127.0.0.1:1: connect: connection refused
(is `penstock serve` running, and is --server its address?)
exit 1
penstock: dial tcp 127.0.0.1:1: connect: connection refused
(is `penstock serve` running, and is --server its address?)
exit 1
penstock: invalid argument "xml" for "--format" flag: "xml" is neither table nor json
Run 'penstock ns list --help' for usage.
exit 2
penstock: unknown command "nope" for "penstock"
Run 'penstock --help' for usage.
exit 2
penstock: unknown command "crate" for "penstock ns"
Run 'penstock ns --help' for usage.
exit 2
penstock: accepts 1 arg(s), received 0 (usage: penstock ns create NAME --layers N --block-tokens N --token-bytes N [flags])
Run 'penstock ns create --help' for usage.
exit 2

start
----
ready

run
ns create m --layers 2 --block-tokens 4 --token-bytes 1024
ns create m --layers 3 --block-tokens 4 --token-bytes 1024
ns create zero --layers 0 --block-tokens 4 --token-bytes 1024
ns create huge --layers 4096 --block-tokens 65536 --token-bytes 16777216
ns create large --layers 64 --block-tokens 64 --token-bytes 32768
ns create minus --layers 2 --block-tokens -4 --token-bytes 1024
ns create bad/näme --layers 2 --block-tokens 4 --token-bytes 1024
ns create g --block-tokens 4 --group full:2
ns create g --block-tokens 4 --group half:2:3
ns create g --block-tokens 4 --group full:2:x
ns create g --block-tokens 4 --group state:1:10 --group full:2:10
ns create g --block-tokens 4 --group full:2:10 --layers 3
ns create g --layers 2 --block-tokens 4 --token-bytes 8 --index tree
ns create g --layers 2 --block-tokens 4 --token-bytes 8 --quota lots
----
name         m
id           1
index        trie
geometry     4 tokens × [full 2×1024 B]
block        8.0 KiB
epoch        1
epoch since  TIME
quota        none
used         0 B
blocks       0
leases       0
penstock: namespace "m" has another definition (4 tokens × [full 2×1024 B], tenant "", index trie): namespace exists
exit 1
penstock: kv: namespace "zero": layer group 0: 0 layers; want 1 to 4096: bad geometry
Run 'penstock ns create --help' for usage.
exit 2
penstock: kv: namespace "huge": layer group 0: a block would be 4503599627370496 bytes; at most 1073741824: bad geometry
Run 'penstock ns create --help' for usage.
exit 2
penstock: bad request: namespace "large", group 0: blockstore: slot of 134221824 bytes; segments of this store hold at most 12578816; format a store with larger segments (more capacity, or --segment): too large for the volumes
exit 1
penstock: kv: namespace "minus": block of -4 tokens; want 1 to 65536: bad geometry
Run 'penstock ns create --help' for usage.
exit 2
penstock: kv: namespace name "bad/näme": character 5 is not one of [A-Za-z0-9._/-]: bad namespace
Run 'penstock ns create --help' for usage.
exit 2
penstock: --group "full:2": 2 parts, want 3; write full:LAYERS:BYTES, window:LAYERS:BYTES:TOKENS or state:LAYERS:BYTES
Run 'penstock ns create --help' for usage.
exit 2
penstock: --group "half:2:3": unknown kind; write full:LAYERS:BYTES, window:LAYERS:BYTES:TOKENS or state:LAYERS:BYTES
Run 'penstock ns create --help' for usage.
exit 2
penstock: --group "full:2:x": "x" is not a number; write full:LAYERS:BYTES, window:LAYERS:BYTES:TOKENS or state:LAYERS:BYTES
Run 'penstock ns create --help' for usage.
exit 2
penstock: kv: namespace "g": layer group 1 is full; the one full group comes first: bad geometry
Run 'penstock ns create --help' for usage.
exit 2
penstock: give either --layers and --token-bytes, or --group for each layer group
Run 'penstock ns create --help' for usage.
exit 2
penstock: --index "tree": want trie or flat
Run 'penstock ns create --help' for usage.
exit 2
penstock: invalid argument "lots" for "--quota" flag: "lots" is not a size; write it like 512MiB, 2TiB or 4096
Run 'penstock ns create --help' for usage.
exit 2

tokens prompt 1 20
----

tokens short 1 3
----

text words
1 2 3
4 five 6
----

text large
1 2 4294967296
----

text minus
-1
----

data blocks 7 40960
----

data others 8 40960
----

data odd 7 40961
----

data fewer 7 32768
----

text nothing
----

run
prefix match nope --tokens-file @prompt
prefix match m --tokens-file @absent
prefix match m --tokens-file @short
prefix match m --tokens-file @nothing
prefix match m --tokens-file @words
prefix match m --tokens-file - < words
prefix match m --tokens-file @large
prefix match m --tokens-file @minus
prefix match m --ids-file @words
----
penstock: namespace "nope": namespace unknown
exit 3
penstock: --tokens-file: open DIR/absent: no such file or directory
exit 1
penstock: DIR/short holds 3 tokens; namespace "m" has blocks of 4, so there is no whole block
exit 1
penstock: DIR/nothing holds 0 tokens; namespace "m" has blocks of 4, so there is no whole block
exit 1
penstock: DIR/words:2:3: "five" is not a decimal token id
exit 1
penstock: standard input:2:3: "five" is not a decimal token id
exit 1
penstock: DIR/large:1:5: token id 4294967296 is larger than 4294967295
exit 1
penstock: DIR/minus:1:1: "-1" is not a decimal token id
exit 1
penstock: DIR/words:1:1: kv: block id "1" has 1 characters; want 32 hexadecimal digits
exit 1

run
block put nope --tokens-file @prompt --data-file @blocks
block put m --tokens-file @prompt --data-file @odd
block put m --tokens-file @prompt --data-file @fewer
block put m --tokens-file @prompt --data-file @absent
block put m --tokens-file @prompt --data-file - < fewer
block put m --tokens-file - --data-file - < fewer
block put m --tokens-file @prompt --data-file @fewer --first-block 1
block put m --tokens-file @prompt --data-file @fewer --first-block 5
block put m --tokens-file @prompt --data-file @blocks --epoch 3
prefix match m --tokens-file @prompt
----
penstock: client: get namespace: SERVER: not found: namespace "nope": namespace unknown
exit 3
penstock: DIR/odd has 40961 bytes, which is not a multiple of the Full Block of namespace "m" (8192 bytes); want 40960 for 5 blocks
exit 1
penstock: DIR/fewer has 32768 bytes, 4 Full Blocks of 8192; the prompt has 5 whole blocks, which are 40960 bytes
exit 1
penstock: --data-file: open DIR/absent: no such file or directory
exit 1
penstock: standard input ends before block 5: unexpected EOF
exit 1
penstock: only one of --tokens-file and --data-file can be standard input
Run 'penstock block put --help' for usage.
exit 2
penstock: block 1 (e7778a2a7d08a280ecc0d623f50fcbfa) was refused: parent_absent (the blocks before it are not stored; put the prompt from its first block)
exit 1
penstock: --first-block 5: the prompt has blocks 0 to 4
Run 'penstock block put --help' for usage.
exit 2
penstock: client: reserve: SERVER: namespace differs: the epoch is 3, but namespace "m" is at 1; bump its epoch first
exit 1
matched  0 of 20 tokens, 0 of 5 blocks, 0 B
cut      absent
epoch    1

# The same id with other bytes: the first ones stay.

run
block put m --tokens-file @prompt --data-file @blocks
block put m --tokens-file @prompt --data-file @others
block get m --tokens-file @prompt --out @got
----
stored 5 blocks (40 KiB), 0 were there already, last block 6ffd6aef31555976c6c8019599673a56
penstock: block 0 (0d5814f8d4401a05076e2bd5898e8182) is stored with other bytes: layer 0 of group 0 differs. A block id must always have the same bytes, so nothing was stored; if the stored block is wrong, delete it first: penstock block delete m 0d5814f8d4401a05076e2bd5898e8182
exit 1
5 of 5 blocks (20 tokens, 40 KiB), cut: complete

same got blocks
----
true

run
block delete m 12
block delete m 00000000000000000000000000000001
evict
evict --bytes 0
evict --bytes -1
evict --bytes 10MiB --namespace nope
pin m --tokens-file @prompt --ttl -1s
unpin 0
ns quota m many
ns quota nope 1GiB
ns bump-epoch nope
status --token-file @absent
status --token-file @short
status --ca @prompt
status --cert @prompt
status --key @prompt
block list m --limit -1
events --count -1
status --server 127.0.0.1:1,127.0.0.1:2
trace replay @absent
trace replay @prompt
trace replay sample --layers 0
trace replay sample --requests -1
trace replay sample --sessions -1
trace replay sample --concurrency 0
trace replay sample --namespace m
store check --data @absent
store check --data @volume
store rebuild-index --data @volume
store inspect --data @volume --slot 1
store inspect --data @volume --segment 4294967296
----
penstock: kv: block id "12" has 2 characters; want 32 hexadecimal digits
Run 'penstock block delete --help' for usage.
exit 2
penstock: trie: namespace "m": block 00000000000000000000000000000001: absent
exit 3
penstock: required flag(s) "bytes" not set
Run 'penstock evict --help' for usage.
exit 2
penstock: --bytes must be more than 0
Run 'penstock evict --help' for usage.
exit 2
penstock: invalid argument "-1" for "--bytes" flag: "-1" is not a size; write it like 512MiB, 2TiB or 4096
Run 'penstock evict --help' for usage.
exit 2
penstock: namespace "nope": namespace unknown
exit 3
penstock: --ttl -DURATION: must not be negative
Run 'penstock pin --help' for usage.
exit 2
penstock: "0" is not a lease; pin prints the lease
Run 'penstock unpin --help' for usage.
exit 2
penstock: "many" is not a size; write it like 512MiB, 2TiB or 4096
Run 'penstock ns quota --help' for usage.
exit 2
penstock: namespace "nope": namespace unknown
exit 3
penstock: namespace "nope": namespace unknown
exit 3
penstock: token file: open DIR/absent: no such file or directory
exit 1
penstock: token file DIR/short: a token of 1 characters can be guessed; use at least 16 (openssl rand -hex 32 > DIR/short)
exit 1
penstock: --ca: DIR/prompt holds no certificate in PEM
exit 1
penstock: --cert "DIR/prompt", --key "": give both a certificate and its key
Run 'penstock status --help' for usage.
exit 2
penstock: --cert "", --key "DIR/prompt": give both a certificate and its key
Run 'penstock status --help' for usage.
exit 2
penstock: --limit -1: must not be negative
Run 'penstock block list --help' for usage.
exit 2
penstock: --count -1: must not be negative
Run 'penstock events --help' for usage.
exit 2
penstock: --server "127.0.0.1:1,127.0.0.1:2": this command uses one node; give one address
Run 'penstock status --help' for usage.
exit 2
penstock: trace: open DIR/absent: no such file or directory
exit 1
penstock: trace: DIR/prompt:1: "1" is the first line of no format known here; want an object with hash_ids (mooncake), reqs (agentic) or rounds (dualpath), or "TIMESTAMP,ContextTokens,GeneratedTokens" (azure) (malformed trace)
exit 1
penstock: --layers, --token-bytes: kv: layer group 0: 0 layers; want 1 to 4096: bad geometry
Run 'penstock trace replay --help' for usage.
exit 2
penstock: --requests -1: must not be negative
Run 'penstock trace replay --help' for usage.
exit 2
penstock: --sessions -1: must not be negative
Run 'penstock trace replay --help' for usage.
exit 2
penstock: --concurrency 0: must be at least 1
Run 'penstock trace replay --help' for usage.
exit 2
penstock: replay: namespace "m" has blocks of 4 tokens and agentic sample (built in) of 64; they must be equal
exit 1
penstock: --data: stat DIR/absent: no such file or directory
exit 1
penstock: blockstore: volume DIR/volume is in use by OWNER; stop that process or choose another --data directory
exit 1
penstock: blockstore: volume DIR/volume is in use by OWNER; stop that process or choose another --data directory
exit 1
penstock: --slot needs --segment
Run 'penstock store inspect --help' for usage.
exit 2
penstock: --segment 4294967296: want 0 to 4294967295
Run 'penstock store inspect --help' for usage.
exit 2

stop
----
exit 0

# Settings.

text garbage
{{{: not yaml
----

text unknown
capcity: 1GiB
----

run
serve
serve --config @absent
serve --config @garbage
serve --config @unknown
serve --data @v --capacity 5
serve --data @v --capacity lots
serve --data @v --listen 0.0.0.0:0
serve --data @v --io aio
serve --data @v --advertise here --data-listen 127.0.0.1:0 --listen 127.0.0.1:0 --http= --arena 8MiB --io posix --free-floor 1MiB --capacity 32MiB
----
penstock: config: data: name at least one directory (--data DIR): bad configuration
Run 'penstock serve --help' for usage.
exit 2
penstock: config: open DIR/absent: no such file or directory
exit 1
penstock: config: DIR/garbage: did not find expected node content: bad configuration
Run 'penstock serve --help' for usage.
exit 2
penstock: config: DIR/unknown:1: unknown key "capcity"; did you mean "capacity"? known are data, shared_data, add_volumes, degraded, capacity, listen, data_listen, http, local_socket, advertise, node, io, arena, hugetlb, index_cache, segment, prewrite, free_floor, durability, sync_interval, eviction, scrub_rate, drain_timeout, encryption, data_plane, auth, cluster, limits, log, trace, insecure: bad configuration
Run 'penstock serve --help' for usage.
exit 2
penstock: config: capacity: 5 B is less than the smallest useful store, 16 MiB: bad configuration
Run 'penstock serve --help' for usage.
exit 2
penstock: invalid argument "lots" for "--capacity" flag: "lots" is not a size; write it like 512MiB, 2TiB or 4096
Run 'penstock serve --help' for usage.
exit 2
penstock: config: listen: 0.0.0.0:0 is reachable from other machines and none of auth.token_file, auth.client_ca and (nodes and planners) auth.roles_file or auth.roles_etcd is set; set one, or say --insecure: bad configuration
Run 'penstock serve --help' for usage.
exit 2
penstock: config: io: "aio" is not one of [auto uring posix usrbio]: bad configuration
Run 'penstock serve --help' for usage.
exit 2
penstock: config: advertise: "here" needs a data_listen with a fixed port, not 127.0.0.1:0: bad configuration
Run 'penstock serve --help' for usage.
exit 2
