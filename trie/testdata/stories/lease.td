# A lease pins the deepest block of a prefix; eviction takes the other blocks, leaf first.
open leases=2 policy=fifo
----

create glm
----

put glm
a1 a2 a3 a4
b1 b2
----
a1 a2 a3 a4 b1 b2 added

match glm lease=reader ttl=30s
a1 a2 a3
----
3 blocks, 6 tokens, cut complete
group 0: 0=v0/s0/1@1 1=v0/s0/2@2 2=v0/s0/3@3
lease reader

draw
----
glm epoch 1
├─ a1000000 v0/s0/1@1
│  └─ a2000000 v0/s0/2@2
│     └─ a3000000 v0/s0/3@3 leases 1
│        └─ a4000000 v0/s0/4@4
└─ b1000000 v0/s0/5@5
   └─ b2000000 v0/s0/6@6

# a4 is a leaf without a lease. a3 is pinned, and its ancestors are safe because they have a child.
evict want=100
----
glm epoch 1: a4 v0/s0/4@4
glm epoch 1: b2 v0/s0/6@6
glm epoch 1: b1 v0/s0/5@5

draw
----
glm epoch 1
└─ a1000000 v0/s0/1@1
   └─ a2000000 v0/s0/2@2
      └─ a3000000 v0/s0/3@3 leases 1

# A second lease on the same block succeeds. For a third there is no room: nothing matches, because
# nothing would keep the blocks from eviction.
match glm lease=second
a1 a2 a3
----
3 blocks, 6 tokens, cut complete
group 0: 0=v0/s0/1@1 1=v0/s0/2@2 2=v0/s0/3@3
lease second

match glm lease=third ttl=1s
a1
----
0 blocks, 0 tokens, cut lease_denied, stored 1

stats
----
blocks 3  pieces 3  bytes 3  unmatchable 0  leases 2  pins 2  policy fifo
  glm (id 1, epoch 1): blocks 3  pieces 3  bytes 3  unmatchable 0

# After its time the first lease has ended, even before a call of ExpireLeases.
advance 31s
----

renew reader ttl=30s
----
lease unknown

match glm lease=third ttl=10s
a1 a2
----
2 blocks, 4 tokens, cut complete
group 0: 0=v0/s0/1@1 1=v0/s0/2@2
lease third

release reader
----
lease unknown

# The second lease has no expiry.
release second
----

release second
----
lease unknown

renew third ttl=60s
----

advance 20s
----

expire
----
0 expired

evict want=1
----
glm epoch 1: a3 v0/s0/3@3

evict want=100
----
nothing

advance 41s
----

expire
----
1 expired

evict want=100
----
glm epoch 1: a2 v0/s0/2@2
glm epoch 1: a1 v0/s0/1@1

draw
----
glm epoch 1
