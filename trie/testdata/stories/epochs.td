# Two tenants. A bump with keep leaves the newest epochs live; each epoch is a tree of its own.
create glm
----

create other
----

put glm
a1 a2 a3
----
a1 a2 a3 added

bump glm keep=3
----
live [2 1], retired []

put glm
a1 a2
----
a1 a2 added

bump glm keep=3
----
live [3 2 1], retired []

put glm
a1
----
a1 added

put other
b1 b2
----
b1 b2 added

# A writer with older weights stores under them, as long as they are live.
put glm epoch=2
a1 a2 b3
----
a1 a2 exists
b3 added

put glm epoch=4
a1
----
a1 stale_epoch

draw
----
glm epoch 1
└─ a1000000 v0/s0/1@1
   └─ a2000000 v0/s0/2@2
      └─ a3000000 v0/s0/3@3
other epoch 1
└─ b1000000 v0/s0/7@7
   └─ b2000000 v0/s0/8@8
glm epoch 2
└─ a1000000 v0/s0/4@4
   └─ a2000000 v0/s0/5@5
      └─ b3000000 v0/s0/11@11
glm epoch 3
└─ a1000000 v0/s0/6@6

# A match uses exactly one epoch: the newest, or the one with the longest match of a range. It never
# mixes epochs.
match glm count
a1 a2 a3
----
1 blocks, 2 tokens, cut absent, epoch 3
group 0: 0=v0/s0/6@6

match glm epoch=1 count
a1 a2 a3
----
3 blocks, 6 tokens, cut complete, epoch 1
group 0: 0=v0/s0/1@1 1=v0/s0/2@2 2=v0/s0/3@3

match glm epoch=2
a1 a2 a3
----
2 blocks, 4 tokens, cut absent, epoch 2
group 0: 0=v0/s0/4@4 1=v0/s0/5@5

match glm epoch=3 oldest=2 count
a1 a2 a3
----
2 blocks, 4 tokens, cut absent, epoch 2
group 0: 0=v0/s0/4@4 1=v0/s0/5@5

match glm oldest=1 epoch=3
a1 a2 a3
----
3 blocks, 6 tokens, cut complete, epoch 1
group 0: 0=v0/s0/1@1 1=v0/s0/2@2 2=v0/s0/3@3

match glm oldest=1 epoch=2
a1 a2
----
2 blocks, 4 tokens, cut complete, epoch 2
group 0: 0=v0/s0/4@4 1=v0/s0/5@5

# Of equally long matches, that of the newest epoch is returned.
match glm oldest=1
a1
----
1 blocks, 2 tokens, cut complete, epoch 3
group 0: 0=v0/s0/6@6

match glm oldest=1
c1
----
0 blocks, 0 tokens, cut absent, epoch 3

# A request for a newer epoch than this node has gets a match of an older epoch of the range.
match glm epoch=9 oldest=3
a1
----
1 blocks, 2 tokens, cut complete, epoch 3
group 0: 0=v0/s0/6@6

match glm epoch=9 oldest=8
a1
----
0 blocks, 0 tokens, cut epoch, epoch 3

match glm epoch=1 lease=reader ttl=10m
a1 a2
----
2 blocks, 4 tokens, cut complete, epoch 1
group 0: 0=v0/s0/1@1 1=v0/s0/2@2
lease reader

# A pin keeps an epoch live, also after a bump without keep. It keeps no blocks.
pin-epoch glm 2 as=rollout ttl=1m
----
rollout holds epoch 2

pin-epoch glm 7 as=nobody ttl=1m
----
error: trie: namespace "glm": epoch 7 is not live; live are [3 2 1]: bad epoch

epochs
----
glm epoch 3: kept true  blocks 1  pieces 1  bytes 1  matches 1  hits 1  leases 0  pins 0
glm epoch 2: kept true  blocks 3  pieces 3  bytes 3  matches 1  hits 2  leases 0  pins 1
glm epoch 1: kept true  blocks 3  pieces 3  bytes 3  matches 1  hits 3  leases 1  pins 0
other epoch 1: kept true  blocks 2  pieces 2  bytes 2  matches 0  hits 0  leases 0  pins 0

bump glm
----
live [4 2], retired [3 1]

pins
----
glm epoch 1 of "": 2 blocks, of the epoch: false, for 10m0s
glm epoch 2 of "rollout": 0 blocks, of the epoch: true, for 1m0s

pins endless
----
glm epoch 2 of "rollout": 0 blocks, of the epoch: true, for 1m0s

match glm epoch=2
a1 a2 a3
----
2 blocks, 4 tokens, cut absent, epoch 2
group 0: 0=v0/s0/4@4 1=v0/s0/5@5

put glm epoch=2
a1 a2 a3
----
a1 a2 exists
a3 added

put glm
a1 a2
----
a1 a2 added

settle
----

match glm epoch=1
a1
----
0 blocks, 0 tokens, cut epoch, epoch 4

retire glm 2
----
error: trie: namespace "glm": epoch 2: epoch is pinned

retire glm 4
----
error: trie: namespace "glm": epoch 4 is the newest, which a bump retires: bad epoch

retire glm 3
----
error: trie: namespace "glm": epoch 3 is not live; live are [4 2]: bad epoch

# Retired epochs are evicted first, then the oldest live ones, then the policy decides.
evict want=3
----
glm epoch 1: a3 v0/s0/3@3
glm epoch 3: a1 v0/s0/6@6
glm epoch 2: b3 v0/s0/11@11

evict want=3
----
glm epoch 2: a3 v0/s0/15@15
glm epoch 2: a2 v0/s0/5@5
glm epoch 2: a1 v0/s0/4@4

draw
----
glm epoch 1 (dead)
└─ a1000000 v0/s0/1@1
   └─ a2000000 v0/s0/2@2 leases 1
other epoch 1
└─ b1000000 v0/s0/7@7
   └─ b2000000 v0/s0/8@8
glm epoch 2
glm epoch 4
└─ a1000000 v0/s0/16@16
   └─ a2000000 v0/s0/17@17

renew rollout ttl=1m
----

advance 2m
----

expire
----
1 expired

settle
----
live [4], retired [2]

epochs
----
glm epoch 4: kept true  blocks 2  pieces 2  bytes 2  matches 0  hits 0  leases 0  pins 0
other epoch 1: kept true  blocks 2  pieces 2  bytes 2  matches 0  hits 0  leases 0  pins 0

# The retirement of an epoch ends its pins.
bump glm keep=2
----
live [5 4], retired []

pin-epoch glm 4 as=rollout ttl=1m
----
rollout holds epoch 4

retire glm 4 force
----
live [5], retired [4]

pins
----
glm epoch 1 of "": 2 blocks, of the epoch: false, for 8m0s

renew rollout ttl=1m
----
lease unknown

release rollout
----

# A restart ends pins, and the epochs that need one.
put glm
d1
----
d1 added

bump glm keep=2
----
live [6 5], retired []

put glm
d1 d2
----
d1 d2 added

pin-epoch glm 5 as=rollout ttl=1h
----
rollout holds epoch 5

bump glm
----
live [7 5], retired [6]

namespaces
----
1 glm epoch 7 quota 0: trie 2 tokens × [full 1×1 B]
2 other epoch 1 quota 0: trie 2 tokens × [full 1×1 B]

release reader
----

reopen
----
loaded 2  stale epoch 7  orphans 0  duplicates 0  corrupt 0

namespaces
----
1 glm epoch 7 quota 0: trie 2 tokens × [full 1×1 B]
2 other epoch 1 quota 0: trie 2 tokens × [full 1×1 B]

bump glm keep=17
----
live [7], retired []
error: trie: namespace "glm": keep 17 epochs; want 1 to 16: bad epoch

bump glm keep=2
----
live [8 7], retired []

put glm epoch=7
e1
----
e1 added

put glm
e1 e2
----
e1 e2 added

crash
----
loaded 2  stale epoch 0  orphans 0  duplicates 0  corrupt 0

namespaces
----
1 glm epoch 8 quota 0: trie 2 tokens × [full 1×1 B]
2 other epoch 1 quota 0: trie 2 tokens × [full 1×1 B]

# A deletion removes a block from every live epoch.
put glm epoch=7
e1 e2 e3
----
e1 e2 e3 added

put glm durable
e1 e2
----
e1 e2 added

stat glm e2
----
e2 group 0 depth 1 v0/s0/28@28 prefix children 0 leases 0 parent e1
e2 group 0 depth 1 v0/s0/25@25 prefix children 1 leases 0 parent e1

delete glm e2
----

match glm oldest=7
e1 e2 e3
----
1 blocks, 2 tokens, cut absent, epoch 8
group 0: 0=v0/s0/27@27

delete-namespace glm
----

reclaim
----
namespace 1 epoch 7: e3 v0/s0/26@26
namespace 1 epoch 7: e2 v0/s0/25@25
namespace 1 epoch 7: e1 v0/s0/24@24
namespace 1 epoch 8: e2 v0/s0/28@28
namespace 1 epoch 8: e1 v0/s0/27@27

draw
----
other epoch 1
└─ b1000000 v0/s0/7@7
   └─ b2000000 v0/s0/8@8
