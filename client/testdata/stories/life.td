# The life of one prompt's blocks, as the engine that embeds the client sees it.

ns m
----
4 tokens × [full 4×512 B], trie, epoch 1

match m prompt=1 blocks=6
----
miss: 0 blocks, 0 tokens, 0 bytes, epoch 1; cut: absent

put m prompt=1 blocks=4
----
hit: 4 stored, 0 were there; the prefix has 4 blocks

match m prompt=1 blocks=6
----
hit: 4 blocks, 16 tokens, 32768 bytes, epoch 1; cut: absent

get m prompt=1 blocks=6
----
hit: 4 blocks, 32768 bytes, every one as it was written; cut: absent

# The next turn of the conversation: only what is new is sent.

put m prompt=1 blocks=6 first=4
----
hit: 2 stored, 0 were there; the prefix has 6 blocks

# Another client writes the same prompt.

put m prompt=1 blocks=6
----
hit: 0 stored, 6 were there; the prefix has 6 blocks

get m prompt=1 blocks=6
----
hit: 6 blocks, 49152 bytes, every one as it was written; cut: complete

# A chain cannot be stored from its middle.

put m prompt=2 blocks=4 first=2
----
miss: 0 stored, 0 were there; the prefix has 2 blocks
  block 2 refused: parent_absent
  block 3 refused: parent_absent

# New weights: nothing of the old ones is found, and nothing of theirs stored. An
# engine that names no epoch means that of the weights it has.

bump m
----

match m prompt=1 blocks=6
----
miss: 0 blocks, 0 tokens, 0 bytes, epoch 1; cut: epoch

put m prompt=1 blocks=2
----
miss: 0 stored, 0 were there; the prefix has 0 blocks
  block 0 refused: stale_epoch
  block 1 refused: stale_epoch

weights m
----
epoch 2

match m prompt=1 blocks=6
----
miss: 0 blocks, 0 tokens, 0 bytes, epoch 2; cut: absent

match m prompt=1 blocks=6 epoch=1
----
miss: 0 blocks, 0 tokens, 0 bytes, epoch 1; cut: epoch

get m prompt=1 blocks=6 epoch=1
----
miss: 0 blocks, 0 bytes, every one as it was written; cut: epoch

put m prompt=1 blocks=2 epoch=1
----
miss: 0 stored, 0 were there; the prefix has 0 blocks
  block 0 refused: stale_epoch
  block 1 refused: stale_epoch

put m prompt=1 blocks=2 epoch=9
----
error: client: reserve: NODE: namespace differs: the epoch is 9, but namespace "m" is at 2; bump its epoch first

put m prompt=1 blocks=6 epoch=2
----
hit: 6 stored, 0 were there; the prefix has 6 blocks

# Everything that nobody holds can be evicted.

evict 1048576
----

get m prompt=1 blocks=6
----
miss: 0 blocks, 0 bytes, every one as it was written; cut: absent
