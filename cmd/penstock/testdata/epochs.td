# A namespace keeps two versions of the weights, and a rollout pins one.

start
----
ready

run
ns create m --layers 2 --block-tokens 4 --token-bytes 1024
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

tokens prompt 1 22
----

data blocks 5 40960
----

run
block put m --tokens-file @prompt --data-file @blocks
ns bump-epoch m --keep 2
ns bump-epoch m --keep 0
ns bump-epoch m --keep 17
ns bump-epoch m --to 18446744073709551615
prefix match m --tokens-file @prompt
prefix match m --tokens-file @prompt --epoch 1
prefix match m --tokens-file @prompt --oldest-epoch 1
prefix match m --tokens-file @prompt --epoch 1 --oldest-epoch 2
ns show m
ns pin-epoch m --epoch 7
ns pin-epoch m --ttl 0s
ns retire-epoch m 1
ns retire-epoch m one --yes
ns retire-epoch m 2 --yes
ns retire-epoch m 1 --dry-run
ns show m --format json
ns retire-epoch m 1 --yes --format json
ns retire-epoch m 1 --yes
ns bump-epoch m --keep 3 --format json
ns show m
----
----
stored 5 blocks (40 KiB), 0 were there already, last block 6ffd6aef31555976c6c8019599673a56
namespace m: epoch 1 -> 2
live: 2, 1
penstock: --keep 0: want 1 to 16
Run 'penstock ns bump-epoch --help' for usage.
exit 2
penstock: --keep 17: want 1 to 16
Run 'penstock ns bump-epoch --help' for usage.
exit 2
penstock: bad request: epoch 18446744073709551615 of namespace "m" is above the maximum 9223372036854775807, which leaves room for bumps: bad epoch
exit 1
matched  0 of 22 tokens, 0 of 5 blocks, 0 B
cut      absent
epoch    2
matched  20 of 22 tokens, 5 of 5 blocks, 40 KiB
cut      complete
epoch    1
matched  20 of 22 tokens, 5 of 5 blocks, 40 KiB
cut      complete
epoch    1
penstock: bad request: the oldest epoch 2 is later than the newest, 1
exit 1
name         m
id           1
index        trie
geometry     4 tokens × [full 2×1024 B]
block        8.0 KiB
epoch        2
epoch since  TIME
quota        none
used         60 KiB
blocks       5
leases       0

EPOCH  BLOCKS  USED    MATCHES  HITS  LEASES  PINS  LIVE
2      0       0 B     1        0     0       0     newest
1      5       60 KiB  2        10    0       0     kept by the bump
penstock: namespace differs: trie: namespace "m": epoch 7 is not live; live are [2 1]: bad epoch
exit 1
penstock: --ttl DURATION: want at least DURATION
Run 'penstock ns pin-epoch --help' for usage.
exit 2
penstock: the blocks of epoch 1 of namespace "m" would be deleted, which cannot be undone; give --yes, or show the contents with --dry-run
Run 'penstock ns retire-epoch --help' for usage.
exit 2
penstock: "one" is not an epoch; ns show lists the live ones
Run 'penstock ns retire-epoch --help' for usage.
exit 2
penstock: bad request: epoch 2 is the newest of namespace "m"; to retire it, bump the namespace: penstock ns bump-epoch m
exit 1
would be retired: 5 blocks, 60 KiB
{
  "blocks": 5,
  "counters": {
    "evicted_blocks": 0,
    "evicted_bytes": 0,
    "hit_tokens": 40,
    "queried_tokens": 60,
    "read_blocks": 0,
    "read_bytes": 0,
    "written_blocks": 5,
    "written_bytes": 40960
  },
  "epoch": 2,
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
      "epoch": 2,
      "hits": 0,
      "kept": true,
      "leases": 0,
      "matches": 1,
      "pins": 0
    },
    {
      "blocks": 5,
      "bytes": 61440,
      "epoch": 1,
      "hits": 10,
      "kept": true,
      "leases": 0,
      "matches": 2,
      "pins": 0
    }
  ],
  "name": "m",
  "quota_bytes": 0,
  "replicas": 0,
  "salt_bytes": 0,
  "tenant": "",
  "used_bytes": 61440
}
{
  "blocks": 5,
  "bytes": 61440,
  "dry_run": false
}
penstock: bad request: epoch 1 of namespace "m" is not live; live are [2]: bad epoch
exit 1
{
  "namespace": "m",
  "old_epoch": 2,
  "new_epoch": 3,
  "live_epochs": [
    3,
    2
  ],
  "retired_epochs": []
}
name         m
id           1
index        trie
geometry     4 tokens × [full 2×1024 B]
block        8.0 KiB
epoch        3
epoch since  TIME
quota        none
used         0 B
blocks       0
leases       0

EPOCH  BLOCKS  USED  MATCHES  HITS  LEASES  PINS  LIVE
3      0       0 B   0        0     0       0     newest
2      0       0 B   1        0     0       0     kept by the bump
----
----
