# New weights: after one write, no block of the old epoch can be matched.
create glm
----

put glm
a1 a2 a3
----
a1 a2 a3 added

match glm lease=reader ttl=1m
a1 a2
----
2 blocks, 4 tokens, cut complete
group 0: 0=v0/s0/1@1 1=v0/s0/2@2
lease reader

bump glm
----
live [2], retired [1]

match glm
a1 a2 a3
----
0 blocks, 0 tokens, cut absent

match glm epoch=1
a1
----
0 blocks, 0 tokens, cut epoch

put glm epoch=1
a1
----
a1 stale_epoch

put glm
a1 a2
----
a1 a2 added

draw
----
glm epoch 1 (dead)
└─ a1000000 v0/s0/1@1
   └─ a2000000 v0/s0/2@2 leases 1
      └─ a3000000 v0/s0/3@3
glm epoch 2
└─ a1000000 v0/s0/5@5
   └─ a2000000 v0/s0/6@6

# The slots of the old epoch are returned in steps. A reader keeps its blocks.
reclaim max=1
----
glm epoch 1: a3 v0/s0/3@3
more

reclaim
----
nothing

reclaim
----
nothing

stats
----
blocks 2  pieces 2  bytes 4  unmatchable 2  leases 1  pins 1  policy s3fifo
  glm (id 1, epoch 2): blocks 2  pieces 2  bytes 4  unmatchable 2

release reader
----

reclaim
----
glm epoch 1: a2 v0/s0/2@2
glm epoch 1: a1 v0/s0/1@1

draw
----
glm epoch 2
└─ a1000000 v0/s0/5@5
   └─ a2000000 v0/s0/6@6

bump glm to=2
----
live [2], retired []
error: trie: namespace "glm": epoch 2 after 2: bad epoch

bump glm to=9
----
live [9], retired [2]

# Unreclaimed blocks of an old epoch do not survive a restart.
reopen
----
loaded 0  stale epoch 2  orphans 0  duplicates 0  corrupt 0

draw
----
glm epoch 9

bump none
----
error: trie: namespace "none": namespace unknown
