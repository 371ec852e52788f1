# Two namespaces share the node; one has a quota of four slots.
open policy=s3fifo
----

create small quota=4
----

create large
----

put large
a1 a2 a3 a4 a5 a6
----
a1 a2 a3 a4 a5 a6 added

put small
b1 b2 b3
c1 c2
----
b1 b2 b3 c1 added
c2 over_quota

# Blocks of that namespace only are evicted. A touched block gets a second chance.
match small
b1 b2 b3
----
3 blocks, 6 tokens, cut complete
group 0: 0=v0/s0/7@7 1=v0/s0/8@8 2=v0/s0/9@9

evict want=2 only=small
----
small epoch 1: c1 v0/s0/10@10
small epoch 1: b3 v0/s0/9@9

put small
c1 c2
----
c1 c2 added

# A smaller quota evicts nothing by itself, but the next eviction takes from this namespace first.
quota small bytes=2
----

stats
----
blocks 10  pieces 10  bytes 10  unmatchable 0  leases 0  pins 0  policy s3fifo
  large (id 2, epoch 1): blocks 6  pieces 6  bytes 6  unmatchable 0
  small (id 1, epoch 1): blocks 4  pieces 4  bytes 4 of 2  unmatchable 0

evict want=3
----
small epoch 1: c2 v0/s0/13@13
small epoch 1: c1 v0/s0/12@12
large epoch 1: a6 v0/s0/6@6

stats
----
blocks 7  pieces 7  bytes 7  unmatchable 0  leases 0  pins 0  policy s3fifo
  large (id 2, epoch 1): blocks 5  pieces 5  bytes 5  unmatchable 0
  small (id 1, epoch 1): blocks 2  pieces 2  bytes 2 of 2  unmatchable 0

quota small bytes=-1
----
error: trie: set quota: kv: namespace "small": quota of -1 bytes: bad namespace

quota none bytes=1
----
error: trie: namespace "none": namespace unknown
