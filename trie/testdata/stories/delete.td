# Deleting a block makes all its descendants unmatchable at once.
create glm
----

put glm
a1 a2 a3 a4
a1 a2 b3
c1 c2
----
a1 a2 a3 a4 added
a1 a2 exists
b3 c1 c2 added

match glm lease=reader
a1 a2 b3
----
3 blocks, 6 tokens, cut complete
group 0: 0=v0/s0/1@1 1=v0/s0/2@2 2=v0/s0/7@7
lease reader

delete glm a2
----

match glm
a1 a2 a3
----
1 blocks, 2 tokens, cut absent
group 0: 0=v0/s0/1@1

known glm
a1 a2 a3
----
a1 exists
a2 a3 added

list glm
----
a1 group 0 depth 0 v0/s0/1@1 prefix children 1 leases 0
c1 group 0 depth 0 v0/s0/8@8 prefix children 1 leases 0
c2 group 0 depth 1 v0/s0/9@9 prefix children 0 leases 0 parent c1

# The block may be put again before its old descendants are collected.
put glm
a1 a2 a3
----
a1 exists
a2 a3 added

draw
----
glm epoch 1
├─ a1000000 v0/s0/1@1
│  ├─ a2000000 v0/s0/2@2 doomed
│  │  ├─ a3000000 v0/s0/3@3 doomed
│  │  │  └─ a4000000 v0/s0/4@4
│  │  └─ b3000000 v0/s0/7@7 leases 1
│  └─ a2000000 v0/s0/11@11
│     └─ a3000000 v0/s0/12@12
└─ c1000000 v0/s0/8@8
   └─ c2000000 v0/s0/9@9

reclaim
----
glm epoch 1: a4 v0/s0/4@4
glm epoch 1: a3 v0/s0/3@3

draw
----
glm epoch 1
├─ a1000000 v0/s0/1@1
│  ├─ a2000000 v0/s0/2@2 doomed
│  │  └─ b3000000 v0/s0/7@7 leases 1 doomed
│  └─ a2000000 v0/s0/11@11
│     └─ a3000000 v0/s0/12@12
└─ c1000000 v0/s0/8@8
   └─ c2000000 v0/s0/9@9

release reader
----

reclaim
----
glm epoch 1: b3 v0/s0/7@7
glm epoch 1: a2 v0/s0/2@2

delete glm a9
----
error: trie: namespace "glm": block a9000000000000000000000000000000: absent

# The store found a slot corrupt.
remove glm c1
----

match glm
c1 c2
----
0 blocks, 0 tokens, cut absent

remove glm c1
----
error: trie: slot v0/s0/8@8: absent

crash
----
loaded 3  stale epoch 0  orphans 3  duplicates 0  corrupt 0

draw
----
glm epoch 1
├─ a1000000 v0/s0/1@1
└─ c1000000 v0/s0/8@8
   └─ c2000000 v0/s0/9@9

# All blocks of a namespace are deleted, and then the namespace.
delete-all glm
----

stats
----
blocks 0  pieces 0  bytes 3  unmatchable 3  leases 0  pins 0  policy s3fifo
  glm (id 1, epoch 1): blocks 0  pieces 0  bytes 3  unmatchable 3

put glm
a1
----
a1 added

reclaim
----
glm epoch 1: a1 v0/s0/1@1
glm epoch 1: c2 v0/s0/9@9
glm epoch 1: c1 v0/s0/8@8

delete-namespace glm
----

namespaces
----

reclaim
----
namespace 1 epoch 1: a1 v0/s0/13@13

# The id is not used again.
create glm
----

namespaces
----
2 glm epoch 1 quota 0: trie 2 tokens × [full 1×1 B]

create glm
----
it has id 2
error: trie: create "glm": namespace exists

delete-namespace other
----
error: trie: namespace "other": namespace unknown

# A piece of a window group belongs to the block under which it was put. When that block
# is deleted and put again, the old window piece does not match.
create hybrid groups=(full,window:2)
----

put hybrid
a1
----
a1 added

put hybrid group=1
a1
----
a1 added

match hybrid
a1
----
1 blocks, 2 tokens, cut complete
group 0: 0=v0/s0/14@14
group 1: 0=v0/s0/15@15

delete hybrid a1
----

put hybrid
a1
----
a1 added

match hybrid
a1
----
0 blocks, 0 tokens, cut window_missing, stored 1

put hybrid group=1
a1
----
a1 added

match hybrid
a1
----
1 blocks, 2 tokens, cut complete
group 0: 0=v0/s0/16@16
group 1: 0=v0/s0/17@17
