# Volumes that no node serves: check, inspect, and an index made from data alone.

start
----
ready

run
ns create m --layers 2 --block-tokens 4 --token-bytes 1024
ns create old --layers 2 --block-tokens 4 --token-bytes 1024
ns create gone --layers 2 --block-tokens 4 --token-bytes 1024
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
name         old
id           2
index        trie
geometry     4 tokens × [full 2×1024 B]
block        8.0 KiB
epoch        1
epoch since  TIME
quota        none
used         0 B
blocks       0
leases       0
name         gone
id           3
index        trie
geometry     4 tokens × [full 2×1024 B]
block        8.0 KiB
epoch        1
epoch since  TIME
quota        none
used         0 B
blocks       0
leases       0

tokens prompt 1 20
----

tokens branch 100 20
----

data blocks 7 40960
----

run
block put m --tokens-file @prompt --data-file @blocks
block put gone --tokens-file @prompt --data-file @blocks
block put old --tokens-file @prompt --data-file @blocks
block put m --tokens-file @branch --data-file @blocks
ns delete gone --yes
ns bump-epoch old
store check --data @volume
----
stored 5 blocks (40 KiB), 0 were there already, last block 6ffd6aef31555976c6c8019599673a56
stored 5 blocks (40 KiB), 0 were there already, last block 11d8e22e07d618954b0226c2ffda25f6
stored 5 blocks (40 KiB), 0 were there already, last block 238ad14e223decab9815749f24fd398a
stored 5 blocks (40 KiB), 0 were there already, last block 6f7a989ad1590bca0be1f7eaad12a3bf
deleted: 5 blocks, 60 KiB
namespace old: epoch 1 -> 2
penstock: blockstore: volume DIR/volume is in use by OWNER; stop that process or choose another --data directory
exit 1

stop
----
exit 0

run
store check --data @volume
store check --data @volume --verify --format json
store rebuild-index --data @volume --dry-run
store rebuild-index --data @volume --verify
store check --data @volume --verify
store inspect --data @volume --segment 0 --slot 0
store inspect --data @nowhere
----
----
blocks  10
all invariants hold
{
  "blocks": 10,
  "stale_entries": 0,
  "verified_blocks": 10,
  "verified_bytes": 81920,
  "findings": []
}
would be indexed  10 blocks of 2 namespaces in DURATION
slots             1,023: 1,003 blank, 0 damaged, 0 unreadable; 12 MiB read
left out          0 deleted, 5 of deleted namespaces, 5 of old epochs, 0 of another geometry, 0 transfers, 0 older copies, 0 orphans, 0 refused
indexed   10 blocks of 2 namespaces in DURATION
slots     1,023: 1,003 blank, 0 damaged, 0 unreadable; 12 MiB read
left out  0 deleted, 5 of deleted namespaces, 5 of old epochs, 0 of another geometry, 0 transfers, 0 older copies, 0 orphans, 0 refused
blocks    10
verified  10 blocks, 80 KiB
all invariants hold
DIR/volume
slot v0/s0/0@4294967298 prefix
  namespace  1 epoch 1 group 0
  block      0d5814f8d4401a05076e2bd5898e8182 depth 0
  parent     00000000000000000000000000000000
  geometry   86bc1b1e632f7f48446043c90261411e
  payload    8192 bytes in 2 layers
  layer 0    49356c5c4607ea52
  layer 1    e234223b2a825397
  verdict    every layer has its checksum

penstock: --data: posixio: open volume DIR/nowhere (an existing directory is needed): no such file or directory
exit 1
----
----

start
----
ready

run
prefix match m --tokens-file @prompt
block get m --tokens-file @branch --out @got
prefix match old --tokens-file @prompt
ns list
ns create next --layers 2 --block-tokens 4 --token-bytes 1024
----
matched  20 of 20 tokens, 5 of 5 blocks, 40 KiB
cut      complete
epoch    1
5 of 5 blocks (20 tokens, 40 KiB), cut: complete
matched  0 of 20 tokens, 0 of 5 blocks, 0 B
cut      absent
epoch    2
NAME  TENANT  INDEX  EPOCH  BLOCKS  USED     QUOTA  BLOCK    GEOMETRY
m             trie   1      10      120 KiB  none   8.0 KiB  4 tokens × [full 2×1024 B]
old           trie   2      0       0 B      none   8.0 KiB  4 tokens × [full 2×1024 B]
name         next
id           4
index        trie
geometry     4 tokens × [full 2×1024 B]
block        8.0 KiB
epoch        1
epoch since  TIME
quota        none
used         0 B
blocks       0
leases       0

same got blocks
----
true

stop
----
exit 0
