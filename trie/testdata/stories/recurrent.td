# A geometry without a full group: only the last window and the last state count, and no piece is
# the child of another.
create mamba groups=(state,window:4)
----

put mamba
a3
----
a3 added

put mamba group=1
a2 a3
----
a2 a3 added

match mamba
a1 a2 a3 a4
----
3 blocks, 6 tokens, cut state_missing, stored 0
group 0: 2=v0/s0/1@1
group 1: 1=v0/s0/2@2 2=v0/s0/3@3

match mamba
a1 a2
----
0 blocks, 0 tokens, cut state_missing

put mamba
a4
----
a4 added

match mamba
a1 a2 a3 a4
----
3 blocks, 6 tokens, cut window_missing, stored 0
group 0: 2=v0/s0/1@1
group 1: 1=v0/s0/2@2 2=v0/s0/3@3

put mamba group=1
a4
----
a4 added

match mamba lease=reader
a1 a2 a3 a4
----
4 blocks, 8 tokens, cut complete, stored 0
group 0: 3=v0/s0/4@4
group 1: 2=v0/s0/3@3 3=v0/s0/5@5
lease reader

evict want=10
----
mamba epoch 1: a3 v0/s0/1@1
mamba epoch 1: a2 group 1 v0/s0/2@2

draw
----
mamba epoch 1
├─ a3000000 group 1 v0/s0/3@3 leases 1
├─ a4000000 group 1 v0/s0/5@5 leases 1
└─ a4000000 v0/s0/4@4 leases 1
