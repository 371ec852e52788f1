# What breaks is a miss, and costs no more than it must.

ns m
----
4 tokens × [full 4×512 B], trie, epoch 1

put m prompt=1 blocks=6
----
hit: 6 stored, 0 were there; the prefix has 6 blocks

# A flipped bit in the third block read: the node finds it and drops the block.

faults
(Flip 40000 (And Reads (File "segment-*") (After 2) (Count 1)))
----

get m prompt=1 blocks=6
----
hit: 2 blocks, 16384 bytes, every one as it was written; cut: lost
  block 2 lost: corrupt
  block 3 lost: skipped
  block 4 lost: skipped
  block 5 lost: skipped

faults
----

match m prompt=1 blocks=6
----
hit: 2 blocks, 8 tokens, 16384 bytes, epoch 1; cut: absent

put m prompt=1 blocks=6 first=2
----
hit: 4 stored, 0 were there; the prefix has 6 blocks

get m prompt=1 blocks=6
----
hit: 6 blocks, 49152 bytes, every one as it was written; cut: complete

# A read that fails once is tried again.

faults
(Err EIO (And Reads (File "segment-*") (Count 1)))
----

get m prompt=1 blocks=6
----
hit: 6 blocks, 49152 bytes, every one as it was written; cut: complete

# A device that fails altogether loses the blocks for this read only.

faults
(Err EIO Reads)
----

get m prompt=1 blocks=6
----
miss: 0 blocks, 0 bytes, every one as it was written; cut: lost
  block 0 lost: failed
  block 1 lost: skipped
  block 2 lost: skipped
  block 3 lost: skipped
  block 4 lost: skipped
  block 5 lost: skipped

faults
----

get m prompt=1 blocks=6
----
hit: 6 blocks, 49152 bytes, every one as it was written; cut: complete

# Blocks that cannot be read, twice, on a device that can are dropped, and stored anew.

faults
(Err EIO (And Reads (File "segment-*") (After 4)))
----

get m prompt=1 blocks=6
----
hit: 4 blocks, 32768 bytes, every one as it was written; cut: lost
  block 4 lost: failed
  block 5 lost: skipped

faults
----

get m prompt=1 blocks=6
----
hit: 4 blocks, 32768 bytes, every one as it was written; cut: absent

put m prompt=1 blocks=6 first=4
----
hit: 2 stored, 0 were there; the prefix has 6 blocks

get m prompt=1 blocks=6
----
hit: 6 blocks, 49152 bytes, every one as it was written; cut: complete

# A node that is dead is a miss, for readers and writers.

kill
----

match m prompt=1 blocks=6
----
miss: 0 blocks, 0 tokens, 0 bytes, epoch 1; cut: node_down

get m prompt=1 blocks=6
----
miss: 0 blocks, 0 bytes, every one as it was written; cut: node_down
  block 0 lost: node_down
  block 1 lost: skipped
  block 2 lost: skipped
  block 3 lost: skipped
  block 4 lost: skipped
  block 5 lost: skipped

put m prompt=3 blocks=2
----
miss: 0 stored, 0 were there; the prefix has 0 blocks
  block 0 refused: node_down
  block 1 refused: node_down

start
----

get m prompt=1 blocks=6
----
hit: 6 blocks, 49152 bytes, every one as it was written; cut: complete
