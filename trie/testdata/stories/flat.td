# Opaque keys without parents: a match is the run of keys that are stored.
create lmcache flat
----

put lmcache
a1 b2 c3 e5
----
a1 b2 c3 e5 added

match lmcache
a1 b2 c3 d4 e5
----
3 blocks, 6 tokens, cut absent
group 0: 0=v0/s0/1@1 1=v0/s0/2@2 2=v0/s0/3@3

match lmcache
c3 a1
----
2 blocks, 4 tokens, cut complete
group 0: 0=v0/s0/3@3 1=v0/s0/1@1

match lmcache lease=reader
b2 c3
----
2 blocks, 4 tokens, cut complete
group 0: 0=v0/s0/2@2 1=v0/s0/3@3
lease reader

delete lmcache a1
----

match lmcache
a1 b2
----
0 blocks, 0 tokens, cut absent

evict want=10
----
lmcache epoch 1: a1 v0/s0/1@1
lmcache epoch 1: e5 v0/s0/4@4

draw
----
lmcache epoch 1
├─ b2000000 v0/s0/2@2 leases 1
└─ c3000000 v0/s0/3@3 leases 1

put lmcache
a1 > b1
----
error: trie: namespace "lmcache": block b1000000000000000000000000000000: parent a1000000000000000000000000000000 in a flat namespace: bad entry
