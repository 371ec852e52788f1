# A match may mix epochs on request: each block has the newest epoch that has the block.
create glm
----

put glm
a1 a2 a3 a4
----
a1 a2 a3 a4 added

bump glm keep=4
----
live [2 1], retired []

put glm
a1 a2 a3
----
a1 a2 a3 added

bump glm keep=4
----
live [3 2 1], retired []

put glm
a1
----
a1 added

match glm oldest=1
a1 a2 a3 a4 a5
----
4 blocks, 8 tokens, cut absent, epoch 1
group 0: 0=v0/s0/1@1 1=v0/s0/2@2 2=v0/s0/3@3 3=v0/s0/4@4

match glm oldest=1 mix count lease=reader ttl=10m
a1 a2 a3 a4 a5
----
4 blocks, 8 tokens, cut absent, epoch 3, 1 of epoch 3, 2 of epoch 2, 1 of epoch 1
group 0: 0=v0/s0/8@8 1=v0/s0/6@6 2=v0/s0/7@7 3=v0/s0/4@4
lease reader

# The lease pins blocks of each epoch, and is counted in each.
stats
----
blocks 8  pieces 8  bytes 8  unmatchable 0  leases 1  pins 3  policy s3fifo
  glm (id 1, epoch 3): blocks 8  pieces 8  bytes 8  unmatchable 0
    epoch 2: blocks 3  pieces 3  bytes 3
    epoch 1: blocks 4  pieces 4  bytes 4

epochs
----
glm epoch 3: kept true  blocks 1  pieces 1  bytes 1  matches 1  hits 1  leases 1  pins 0
glm epoch 2: kept true  blocks 3  pieces 3  bytes 3  matches 1  hits 2  leases 1  pins 0
glm epoch 1: kept true  blocks 4  pieces 4  bytes 4  matches 1  hits 1  leases 1  pins 0

match glm oldest=2 mix
a1 a2 a3 a4
----
3 blocks, 6 tokens, cut absent, epoch 3, 1 of epoch 3, 2 of epoch 2
group 0: 0=v0/s0/8@8 1=v0/s0/6@6 2=v0/s0/7@7

match glm mix
a1 a2 a3 a4
----
1 blocks, 2 tokens, cut absent, epoch 3, 1 of epoch 3
group 0: 0=v0/s0/8@8

match glm epoch=2 oldest=1 mix max=3
a1 a2 a3 a4
----
3 blocks, 6 tokens, cut limit, epoch 2, 3 of epoch 2
group 0: 0=v0/s0/5@5 1=v0/s0/6@6 2=v0/s0/7@7

match glm epoch=9 oldest=8 mix
a1
----
0 blocks, 0 tokens, cut epoch, epoch 3

match glm oldest=1 mix
b1
----
0 blocks, 0 tokens, cut absent, epoch 3

# Eviction takes from the oldest epoch first, but no block that the lease pins.
evict want=8
----
nothing

release reader
----

evict want=1
----
glm epoch 1: a4 v0/s0/4@4

match glm oldest=1 mix
a1 a2 a3 a4
----
3 blocks, 6 tokens, cut absent, epoch 3, 1 of epoch 3, 2 of epoch 2
group 0: 0=v0/s0/8@8 1=v0/s0/6@6 2=v0/s0/7@7

retire glm 2
----
live [3 1], retired [2]

match glm oldest=1 mix
a1 a2 a3 a4
----
3 blocks, 6 tokens, cut absent, epoch 3, 1 of epoch 3, 2 of epoch 1
group 0: 0=v0/s0/8@8 1=v0/s0/2@2 2=v0/s0/3@3

# In a flat namespace any epoch may have any key, so a mixed match can be longer than the match of
# each epoch.
create flat flat
----

put flat
e1 e3
----
e1 e3 added

bump flat keep=2
----
live [2 1], retired []

put flat
e2 e4
----
e2 e4 added

match flat oldest=1
e1 e2 e3 e4 e5
----
1 blocks, 2 tokens, cut absent, epoch 1
group 0: 0=v0/s0/9@9

match flat oldest=1 mix lease=keys ttl=1m
e1 e2 e3 e4 e5
----
4 blocks, 8 tokens, cut absent, epoch 2, 1 of epoch 1, 1 of epoch 2, 1 of epoch 1, 1 of epoch 2
group 0: 0=v0/s0/9@9 1=v0/s0/11@11 2=v0/s0/10@10 3=v0/s0/12@12
lease keys

pins
----
flat epoch 1 of "": 4 blocks, of the epoch: false, for 1m0s

# All pieces of a block have one epoch: the newest one that has all the pieces of it that the match
# needs.
create kimi groups=(full,window:4,state)
----

put kimi
a1 a2 a3 a4
----
a1 a2 a3 a4 added

put kimi group=1
a1 a2 a3 a4
----
a1 a2 a3 a4 added

put kimi group=2
a2 a4
----
a2 a4 added

bump kimi keep=2
----
live [2 1], retired []

put kimi
a1 a2 a3 a4
----
a1 a2 a3 a4 added

put kimi group=1
a1 a2 a3
----
a1 a2 a3 added

put kimi group=2
a2
----
a2 added

match kimi oldest=1 mix
a1 a2 a3 a4 a5
----
4 blocks, 8 tokens, cut absent, epoch 2, 3 of epoch 2, 1 of epoch 1
group 0: 0=v0/s0/23@23 1=v0/s0/24@24 2=v0/s0/25@25 3=v0/s0/16@16
group 1: 2=v0/s0/29@29 3=v0/s0/20@20
group 2: 3=v0/s0/22@22

match kimi oldest=1 mix max=3
a1 a2 a3 a4 a5
----
2 blocks, 4 tokens, cut state_missing, stored 3, epoch 2, 2 of epoch 2
group 0: 0=v0/s0/23@23 1=v0/s0/24@24
group 1: 0=v0/s0/27@27 1=v0/s0/28@28
group 2: 1=v0/s0/30@30
