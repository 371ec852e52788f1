# A prompt of four blocks is stored; two prompts that begin like it share its
# blocks, in storage and in the tree.
create glm
----

put glm
a1 a2 a3 a4
a1 a2 b3 b4
----
a1 a2 a3 a4 added
a1 a2 exists
b3 b4 added

draw
----
glm epoch 1
└─ a1000000 v0/s0/1@1
   └─ a2000000 v0/s0/2@2
      ├─ a3000000 v0/s0/3@3
      │  └─ a4000000 v0/s0/4@4
      └─ b3000000 v0/s0/7@7
         └─ b4000000 v0/s0/8@8

# The longest prefix, and the reason why it is not longer.
match glm
a1 a2 a3 a4
----
4 blocks, 8 tokens, cut complete
group 0: 0=v0/s0/1@1 1=v0/s0/2@2 2=v0/s0/3@3 3=v0/s0/4@4

match glm
a1 a2 b3 c4
----
3 blocks, 6 tokens, cut absent
group 0: 0=v0/s0/1@1 1=v0/s0/2@2 2=v0/s0/7@7

match glm
c1
----
0 blocks, 0 tokens, cut absent

# A chain is matched from its first block: the right blocks at another place are no prefix.
match glm
a2 a3
----
0 blocks, 0 tokens, cut absent

match glm
a1 a3
----
1 blocks, 2 tokens, cut absent
group 0: 0=v0/s0/1@1

match glm max=1
a1 a2
----
1 blocks, 2 tokens, cut limit
group 0: 0=v0/s0/1@1

# A block that exists is not stored twice; a block without its parent is not stored.
put glm
a1 a2 c3
d1 > d2 d3
----
a1 a2 exists
c3 added
d2 d3 parent_absent

# Known returns the same status without storing a block.
known glm
a1 a2 c3 c4
d1 > d2
e1 e2
a4 > b3
----
a1 a2 c3 exists
c4 added
d2 parent_absent
e1 e2 added
b3 parent_mismatch

# A block has one parent.
put glm
a4 > b3
----
b3 parent_mismatch

draw
----
glm epoch 1
└─ a1000000 v0/s0/1@1
   └─ a2000000 v0/s0/2@2
      ├─ a3000000 v0/s0/3@3
      │  └─ a4000000 v0/s0/4@4
      ├─ b3000000 v0/s0/7@7
      │  └─ b4000000 v0/s0/8@8
      └─ c3000000 v0/s0/11@11

stat glm a2
----
a2 group 0 depth 1 v0/s0/2@2 prefix children 3 leases 0 parent a1

stat glm ff
----
error: trie: namespace "glm": block ff000000000000000000000000000000: absent

list glm limit=3
----
a1 group 0 depth 0 v0/s0/1@1 prefix children 1 leases 0
a2 group 0 depth 1 v0/s0/2@2 prefix children 3 leases 0 parent a1
a3 group 0 depth 2 v0/s0/3@3 prefix children 1 leases 0 parent a2
…
a4 group 0 depth 3 v0/s0/4@4 prefix children 0 leases 0 parent a3
b3 group 0 depth 2 v0/s0/7@7 prefix children 1 leases 0 parent a2
b4 group 0 depth 3 v0/s0/8@8 prefix children 0 leases 0 parent b3
…
c3 group 0 depth 2 v0/s0/11@11 prefix children 0 leases 0 parent a2

stats
----
blocks 7  pieces 7  bytes 7  unmatchable 0  leases 0  pins 0  policy s3fifo
  glm (id 1, epoch 1): blocks 7  pieces 7  bytes 7  unmatchable 0
