# A prompt of 5 blocks is stored, found, fetched, verified and deleted.

start
----
ready

run
ns create m --layers 2 --block-tokens 4 --token-bytes 1024 --tenant acme --quota 1GiB
ns create m --layers 2 --block-tokens 4 --token-bytes 1024 --tenant acme --quota 1GiB --format json
ns list
----
name         m
id           1
tenant       acme
index        trie
geometry     4 tokens × [full 2×1024 B]
block        8.0 KiB
epoch        1
epoch since  TIME
quota        1.0 GiB
used         0 B
blocks       0
leases       0
{
  "blocks": 0,
  "counters": {
    "evicted_blocks": 0,
    "evicted_bytes": 0,
    "hit_tokens": 0,
    "queried_tokens": 0,
    "read_blocks": 0,
    "read_bytes": 0,
    "written_blocks": 0,
    "written_bytes": 0
  },
  "epoch": 1,
  "epoch_since_unix_ms": TIME,
  "geometry": {
    "block_tokens": 4,
    "dtype": "",
    "groups": [
      {
        "kind": "full",
        "layers": 2,
        "token_bytes": 1024,
        "window_tokens": 0
      }
    ],
    "layout": ""
  },
  "id": 1,
  "index": "trie",
  "leases": 0,
  "live": [
    {
      "blocks": 0,
      "bytes": 0,
      "epoch": 1,
      "hits": 0,
      "kept": true,
      "leases": 0,
      "matches": 0,
      "pins": 0
    }
  ],
  "name": "m",
  "quota_bytes": 1073741824,
  "replicas": 0,
  "salt_bytes": 0,
  "tenant": "acme",
  "used_bytes": 0
}
NAME  TENANT  INDEX  EPOCH  BLOCKS  USED  QUOTA    BLOCK    GEOMETRY
m     acme    trie   1      0       0 B   1.0 GiB  8.0 KiB  4 tokens × [full 2×1024 B]

tokens prompt 1 22
----

tokens longer 1 30
----

tokens other 1000 22
----

data blocks 7 40960
----

run
prefix match m --tokens-file @prompt
block put m --tokens-file @prompt --data-file @blocks
block put m --tokens-file @prompt --data-file @blocks --format json
prefix match m --tokens-file @prompt --format json
prefix match m --tokens-file @longer
prefix match m --tokens-file - < longer
prefix match m --tokens-file @other
prefix match m --tokens-file @prompt --show-ids
----
matched  0 of 22 tokens, 0 of 5 blocks, 0 B
cut      absent
epoch    1
stored 5 blocks (40 KiB), 0 were there already, last block ac7b70c04004975cb76c5864bbf1feba
{
  "namespace": "m",
  "epoch": 1,
  "blocks": 5,
  "stored_blocks": 0,
  "existed_blocks": 5,
  "stored_bytes": 0,
  "last_block": "ac7b70c04004975cb76c5864bbf1feba"
}
{
  "namespace": "m",
  "epoch": 1,
  "asked_tokens": 22,
  "asked_blocks": 5,
  "matched_tokens": 20,
  "matched_blocks": 5,
  "matched_bytes": 40960,
  "cut": "complete"
}
matched  20 of 30 tokens, 5 of 7 blocks, 40 KiB
cut      absent
epoch    1
matched  20 of 30 tokens, 5 of 7 blocks, 40 KiB
cut      absent
epoch    1
matched  0 of 22 tokens, 0 of 5 blocks, 0 B
cut      absent
epoch    1
matched  20 of 22 tokens, 5 of 5 blocks, 40 KiB
cut      complete
epoch    1
0        d9e06ed8aa9ff816a980eab139e2ccdd
1        88b561a16a295acc271df9c9828bde9e
2        6d1318a0ccb35d665c98bf4e53f0adb1
3        f293ea464778f6c068a3fee2dc203f05
4        ac7b70c04004975cb76c5864bbf1feba

run
block get m --tokens-file @prompt --out @got
block get m --tokens-file @longer --out @got2 --format json
block get m --tokens-file @other --out @got3
----
5 of 5 blocks (20 tokens, 40 KiB), cut: complete
{
  "namespace": "m",
  "epoch": 1,
  "asked_blocks": 7,
  "blocks": 5,
  "tokens": 20,
  "bytes": 40960,
  "cut": "absent"
}
{"error":"5 of 7 blocks are cached (cut: absent): not found","exit_code":3}
exit 3
0 of 5 blocks (0 tokens, 0 B), cut: absent
penstock: 0 of 5 blocks are cached (cut: absent): not found
exit 3

same got blocks
----
true

same got2 blocks
----
true

run
block stat m --tokens-file @prompt
block stat m --tokens-file @other --format json
block verify m --tokens-file @prompt
block verify m --tokens-file @prompt --format json
block verify m --tokens-file @other
block list m --limit 2
scrub
scrub --format json
----
#  ID                                DEPTH  GROUP  SLOT     GENERATION  CHILDREN  LEASES  CLASS
0  d9e06ed8aa9ff816a980eab139e2ccdd  0      0      v0/s0/0  4294967298  1         0       prefix
1  88b561a16a295acc271df9c9828bde9e  1      0      v0/s0/1  4294967299  1         0       prefix
2  6d1318a0ccb35d665c98bf4e53f0adb1  2      0      v0/s0/2  4294967300  1         0       prefix
3  f293ea464778f6c068a3fee2dc203f05  3      0      v0/s0/3  4294967301  1         0       prefix
4  ac7b70c04004975cb76c5864bbf1feba  4      0      v0/s0/4  4294967302  0         0       prefix
{
  "blocks": [
    {
      "index": 0,
      "id": "af8410a206542a53fec5851df83002ea",
      "present": false,
      "depth": 0,
      "group": 0,
      "generation": 0,
      "children": 0,
      "leases": 0,
      "epoch": 0
    },
    {
      "index": 1,
      "id": "e96462b983021e2c57a8c279d8cb1a9b",
      "present": false,
      "depth": 0,
      "group": 0,
      "generation": 0,
      "children": 0,
      "leases": 0,
      "epoch": 0
    },
    {
      "index": 2,
      "id": "74f9b279ae171456df21b6b03f7cfe22",
      "present": false,
      "depth": 0,
      "group": 0,
      "generation": 0,
      "children": 0,
      "leases": 0,
      "epoch": 0
    },
    {
      "index": 3,
      "id": "13ff57f198d60c2943bb28395ee7c985",
      "present": false,
      "depth": 0,
      "group": 0,
      "generation": 0,
      "children": 0,
      "leases": 0,
      "epoch": 0
    },
    {
      "index": 4,
      "id": "79e6f54147dd23a58c02dbc31516985d",
      "present": false,
      "depth": 0,
      "group": 0,
      "generation": 0,
      "children": 0,
      "leases": 0,
      "epoch": 0
    }
  ]
}
{"error":"5 of 5 blocks: not found","exit_code":3}
exit 3
intact 5, absent 0, corrupt 0, failed 0
{
  "namespace": "m",
  "intact": 5,
  "absent": 0,
  "corrupt": 0,
  "failed": 0,
  "bad": []
}
intact 0, absent 5, corrupt 0, failed 0
block 0  af8410a206542a53fec5851df83002ea  group 0  miss
block 1  e96462b983021e2c57a8c279d8cb1a9b  group 0  miss
block 2  74f9b279ae171456df21b6b03f7cfe22  group 0  miss
block 3  13ff57f198d60c2943bb28395ee7c985  group 0  miss
block 4  79e6f54147dd23a58c02dbc31516985d  group 0  miss
penstock: 5 of 5 blocks: not found
exit 3
#  ID                                DEPTH  GROUP  SLOT     GENERATION  CHILDREN  LEASES  CLASS
0  d9e06ed8aa9ff816a980eab139e2ccdd  0      0      v0/s0/0  4294967298  1         0       prefix
1  88b561a16a295acc271df9c9828bde9e  1      0      v0/s0/1  4294967299  1         0       prefix
… there are more: --limit 0 lists all
verified: 5 blocks, 60 KiB; corrupt: 0
{
  "corrupt_blocks": 0,
  "total_blocks": 5,
  "verified_blocks": 5,
  "verified_bytes": 61440
}

# Pins: nothing can be evicted until unpin.

run
pin m --tokens-file @other
pin m --tokens-file @prompt
evict --bytes 1GiB
unpin 12884901888
unpin 12884901888
unpin x
evict --bytes 1GiB --dry-run
evict --bytes 8KiB --namespace m
prefix match m --tokens-file @prompt
----
penstock: no block of this prompt is cached in "m" (cut: absent): not found
exit 3
matched  20 of 22 tokens, 5 of 5 blocks, 40 KiB
cut      complete
epoch    1
lease    12884901888
evicted: 0 blocks, 0 B
released: [12884901888]
penstock: trie: lease 12884901888: lease unknown
exit 3
penstock: "x" is not a lease; pin prints the lease
Run 'penstock unpin --help' for usage.
exit 2
would be evicted: 5 blocks, 60 KiB
evicted: 1 blocks, 12 KiB
matched  16 of 22 tokens, 4 of 5 blocks, 32 KiB
cut      absent
epoch    1

run
block put m --tokens-file @prompt --data-file @blocks
block delete m 6d1318a0ccb35d665c98bf4e53f0adb1 --dry-run
block delete m 6d1318a0ccb35d665c98bf4e53f0adb1
prefix match m --tokens-file @prompt
block delete m d9e06ed8aa9ff816a980eab139e2ccdd --format json
prefix match m --tokens-file @prompt
----
stored 1 blocks (8.0 KiB), 4 were there already, last block ac7b70c04004975cb76c5864bbf1feba
would be deleted: 3 blocks, 36 KiB
deleted: 3 blocks, 36 KiB
matched  8 of 22 tokens, 2 of 5 blocks, 16 KiB
cut      absent
epoch    1
{
  "blocks": 2,
  "bytes": 24576,
  "dry_run": false
}
matched  0 of 22 tokens, 0 of 5 blocks, 0 B
cut      absent
epoch    1

# The weights change: everything of the old epoch is gone at once.

run
block put m --tokens-file @prompt --data-file @blocks
ns bump-epoch m
prefix match m --tokens-file @prompt
prefix match m --tokens-file @prompt --epoch 7
ns bump-epoch m --to 1
ns bump-epoch m --to 9 --format json
ns quota m 0
ns delete m
ns delete m --dry-run
ns delete m --yes --format json
ns show m
events --after 99 --count 1
events --after 1 --count 2
----
stored 5 blocks (40 KiB), 0 were there already, last block ac7b70c04004975cb76c5864bbf1feba
namespace m: epoch 1 -> 2
matched  0 of 22 tokens, 0 of 5 blocks, 0 B
cut      absent
epoch    2
matched  0 of 22 tokens, 0 of 5 blocks, 0 B
cut      epoch
epoch    2
penstock: bad request: namespace "m" is at epoch 2 and cannot be bumped to 1: bad epoch
exit 1
{
  "namespace": "m",
  "old_epoch": 2,
  "new_epoch": 9,
  "live_epochs": [
    9
  ],
  "retired_epochs": [
    2
  ]
}
name         m
id           1
tenant       acme
index        trie
geometry     4 tokens × [full 2×1024 B]
block        8.0 KiB
epoch        9
epoch since  TIME
quota        none
used         0 B
blocks       0
leases       0
penstock: namespace "m" would be deleted with all its blocks, which cannot be undone; give --yes, or show the contents with --dry-run
Run 'penstock ns delete --help' for usage.
exit 2
would be deleted: 0 blocks, 0 B
{
  "blocks": 0,
  "bytes": 0,
  "dry_run": false
}
penstock: namespace "m": namespace unknown
exit 3
0 TIME gap
2 TIME block_removed m epoch 1: 1 blocks from ac7b70c04004975cb76c5864bbf1feba (evicted)
3 TIME block_stored m epoch 1: 1 blocks from ac7b70c04004975cb76c5864bbf1feba

stop
----
exit 0
