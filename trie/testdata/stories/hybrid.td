# Full attention in all blocks, a sliding window of 4 tokens (2 blocks), and a recurrent state. The
# match has the longest length at which all groups have their pieces.
create kimi groups=(full,window:4,state)
----

put kimi
a1 a2 a3 a4 a5
----
a1 a2 a3 a4 a5 added

match kimi
a1 a2 a3 a4 a5
----
0 blocks, 0 tokens, cut window_missing, stored 5

put kimi group=1
a1 a2 a3
----
a1 a2 a3 added

match kimi
a1 a2 a3 a4 a5
----
0 blocks, 0 tokens, cut state_missing, stored 5

put kimi group=2
a2
----
a2 added

match kimi
a1 a2 a3 a4 a5
----
2 blocks, 4 tokens, cut state_missing, stored 5
group 0: 0=v0/s0/1@1 1=v0/s0/2@2
group 1: 0=v0/s0/6@6 1=v0/s0/7@7
group 2: 1=v0/s0/9@9

put kimi group=2
a4 a9
----
a4 added
a9 parent_absent

# The state is stored for four blocks, but the window at four is not.
match kimi
a1 a2 a3 a4 a5
----
2 blocks, 4 tokens, cut state_missing, stored 5
group 0: 0=v0/s0/1@1 1=v0/s0/2@2
group 1: 0=v0/s0/6@6 1=v0/s0/7@7
group 2: 1=v0/s0/9@9

put kimi group=1
a4
----
a4 added

match kimi
a1 a2 a3 a4 a5
----
4 blocks, 8 tokens, cut window_missing, stored 5
group 0: 0=v0/s0/1@1 1=v0/s0/2@2 2=v0/s0/3@3 3=v0/s0/4@4
group 1: 2=v0/s0/8@8 3=v0/s0/12@12
group 2: 3=v0/s0/10@10

match kimi
a1 a2 a3
----
2 blocks, 4 tokens, cut state_missing, stored 3
group 0: 0=v0/s0/1@1 1=v0/s0/2@2
group 1: 0=v0/s0/6@6 1=v0/s0/7@7
group 2: 1=v0/s0/9@9

match kimi lease=reader
a1 a2 a3 a4
----
4 blocks, 8 tokens, cut complete
group 0: 0=v0/s0/1@1 1=v0/s0/2@2 2=v0/s0/3@3 3=v0/s0/4@4
group 1: 2=v0/s0/8@8 3=v0/s0/12@12
group 2: 3=v0/s0/10@10
lease reader

draw
----
kimi epoch 1
└─ a1000000 v0/s0/1@1
   ├─ a1000000 group 1 v0/s0/6@6
   └─ a2000000 v0/s0/2@2
      ├─ a2000000 group 2 v0/s0/9@9
      ├─ a2000000 group 1 v0/s0/7@7
      └─ a3000000 v0/s0/3@3
         ├─ a3000000 group 1 v0/s0/8@8 leases 1
         └─ a4000000 v0/s0/4@4 leases 1
            ├─ a4000000 group 2 v0/s0/10@10 leases 1
            ├─ a4000000 group 1 v0/s0/12@12 leases 1
            └─ a5000000 v0/s0/5@5

# A window piece is a leaf and may be evicted alone; the match becomes shorter.
release reader
----

remove kimi a3 group=1
----

match kimi
a1 a2 a3 a4
----
2 blocks, 4 tokens, cut window_missing, stored 4
group 0: 0=v0/s0/1@1 1=v0/s0/2@2
group 1: 0=v0/s0/6@6 1=v0/s0/7@7
group 2: 1=v0/s0/9@9

stat kimi a2
----
a2 group 0 depth 1 v0/s0/2@2 prefix children 3 leases 0 parent a1
a2 group 1 depth 1 v0/s0/7@7 prefix children 0 leases 0
a2 group 2 depth 1 v0/s0/9@9 prefix children 0 leases 0

reclaim
----
kimi epoch 1: a3 group 1 v0/s0/8@8

delete kimi a2
----

reclaim
----
kimi epoch 1: a2 group 2 v0/s0/9@9
kimi epoch 1: a5 v0/s0/5@5
kimi epoch 1: a2 group 1 v0/s0/7@7
kimi epoch 1: a4 group 2 v0/s0/10@10
kimi epoch 1: a4 group 1 v0/s0/12@12
kimi epoch 1: a4 v0/s0/4@4
kimi epoch 1: a3 v0/s0/3@3
kimi epoch 1: a2 v0/s0/2@2

reopen
----
loaded 2  stale epoch 0  orphans 0  duplicates 0  corrupt 0

draw
----
kimi epoch 1
└─ a1000000 v0/s0/1@1
   └─ a1000000 group 1 v0/s0/6@6
