# The weights change and the node keeps the old epoch live: an engine that has the old
# weights goes on with its own KV.
ns m
----
4 tokens × [full 4×512 B], trie, epoch 1

put m prompt=1 blocks=4
----
hit: 4 stored, 0 were there; the prefix has 4 blocks

bump m keep=2
----

match m prompt=1 blocks=4
----
hit: 4 blocks, 16 tokens, 32768 bytes, epoch 1; cut: complete

get m prompt=1 blocks=4
----
hit: 4 blocks, 32768 bytes, every one as it was written; cut: complete

put m prompt=2 blocks=2
----
hit: 2 stored, 0 were there; the prefix has 2 blocks

# An engine with the new weights gets none of that, unless it tolerates older weights.
weights m
----
epoch 2

match m prompt=1 blocks=4
----
miss: 0 blocks, 0 tokens, 0 bytes, epoch 2; cut: absent

put m prompt=1 blocks=2
----
hit: 2 stored, 0 were there; the prefix has 2 blocks

match m prompt=1 blocks=4
----
hit: 2 blocks, 8 tokens, 16384 bytes, epoch 2; cut: absent

match m prompt=1 blocks=4 oldest=1
----
hit: 4 blocks, 16 tokens, 32768 bytes, epoch 1; cut: complete

match m prompt=1 blocks=2 oldest=1
----
hit: 2 blocks, 8 tokens, 16384 bytes, epoch 2; cut: complete

get m prompt=1 blocks=4
----
hit: 2 blocks, 16384 bytes, every one as it was written; cut: absent

get m prompt=1 blocks=4 epoch=1
----
hit: 4 blocks, 32768 bytes, every one as it was written; cut: complete

match m prompt=2 blocks=2 newest
----
miss: 0 blocks, 0 tokens, 0 bytes, epoch 2; cut: absent

match m prompt=2 blocks=2 newest oldest=1
----
hit: 2 blocks, 8 tokens, 16384 bytes, epoch 1; cut: complete

match m prompt=2 blocks=2 oldest=3
----
error: client: match: bad request: the oldest epoch 3 is later than the newest, 2

match m prompt=2 blocks=2 newest epoch=2
----
error: client: match: bad request: both epoch 2 and the newest are requested

# A group of rollouts pins epoch 2; a strict bump leaves it live until the pin ends.
pin m
----

pin m epoch=9
----
error: client: pin epoch: NODE: namespace differs: trie: namespace "m": epoch 9 is not live; live are [2 1]: bad epoch

bump m
----

match m prompt=1 blocks=2
----
hit: 2 blocks, 8 tokens, 16384 bytes, epoch 2; cut: complete

match m prompt=1 blocks=2 epoch=1
----
miss: 0 blocks, 0 tokens, 0 bytes, epoch 1; cut: epoch

put m prompt=3 blocks=1
----
hit: 1 stored, 0 were there; the prefix has 1 blocks

get m prompt=3 blocks=1
----
hit: 1 blocks, 8192 bytes, every one as it was written; cut: complete

# A restart of the node ends the pin.
kill
----

start
----

match m prompt=1 blocks=2
----
miss: 0 blocks, 0 tokens, 0 bytes, epoch 2; cut: epoch

put m prompt=1 blocks=2
----
miss: 0 stored, 0 were there; the prefix has 0 blocks
  block 0 refused: stale_epoch
  block 1 refused: stale_epoch

weights m
----
epoch 3
