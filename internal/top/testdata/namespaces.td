# A namespace has the sums of its nodes. Node b is behind by one epoch, so that all its bytes are of
# old weights. QuotaBytes is 0 while a node of the namespace has no quota.
sample 0s
a start=1 up=10s
  ns chat id=1 epoch=8 live=2 used=100 newest=70 quota=200 since=500
  ns code id=2 epoch=1 live=1 used=5 newest=5
b start=2 up=10s
  ns chat id=9 epoch=7 live=1 used=40 newest=40 quota=200 since=400
----
total 2 of 2: read -/s - B/s  written -/s - B/s  hit - of - tokens/s  evicted -/s - B/s  busy -/s
node a serving: read -/s - B/s  written -/s - B/s  hit - of - tokens/s  evicted -/s - B/s  busy -/s  fill -  volumes map[] 
node b serving: read -/s - B/s  written -/s - B/s  hit - of - tokens/s  evicted -/s - B/s  busy -/s  fill -  volumes map[] 
ns chat on 2: epoch 7..8 since 500, 2 live, old 70 of 140, quota 400 0.35: read -/s - B/s  written -/s - B/s  hit - of - tokens/s  evicted -/s - B/s
ns code on 1: epoch 1..1 since -, 1 live, old 0 of 5, quota 0 -: read -/s - B/s  written -/s - B/s  hit - of - tokens/s  evicted -/s - B/s

sample 2s
a start=1 up=12s
  ns chat id=1 epoch=8 live=1 used=80 newest=70 quota=200 since=500 queried=100 hit=50 read=4
  ns code id=2 epoch=1 live=1 used=5 newest=5
b start=2 up=12s
  ns chat id=9 epoch=8 live=1 used=40 newest=30 quota=200 since=501 queried=300 hit=300 read=8
----
total 2 of 2: read 0/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s
node a serving: read 0/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s  fill -  volumes map[] 
node b serving: read 0/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s  fill -  volumes map[] 
ns chat on 2: epoch 8..8 since 500, 1 live, old 20 of 120, quota 400 0.3: read 6/s 0 B/s  written 0/s 0 B/s  hit 0.875 of 200 tokens/s  evicted 0/s 0 B/s
ns code on 1: epoch 1..1 since -, 1 live, old 0 of 5, quota 0 -: read 0/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s

# code was deleted and created again: its counters start at 0 within the interval. The namespace new
# was created since the sample before, so that all its work was in the interval.
sample 4s
a start=1 up=14s
  ns code id=3 epoch=1 live=1 read=20
  ns new id=4 epoch=1 live=1 read=6 quota=10 used=9 newest=9
b start=2 up=14s
----
total 2 of 2: read 0/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s
node a serving: read 0/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s  fill -  volumes map[] 
node b serving: read 0/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s  fill -  volumes map[] 
ns code on 1: epoch 1..1 since -, 1 live, old 0 of 0, quota 0 -: read 10/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s
ns new on 1: epoch 1..1 since -, 1 live, old 0 of 9, quota 10 0.9: read 3/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s

# The namespaces of a were not listed, and then listed again: their rates are unknown, because the
# time of their creation is.
sample 6s
a start=1 up=16s unlisted=yes
----
total 1 of 1: read 0/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s
node a serving: read 0/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s  fill -  volumes map[] 

sample 8s
a start=1 up=18s
  ns new id=4 epoch=1 live=1 read=1000000
----
total 1 of 1: read 0/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s
node a serving: read 0/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s  fill -  volumes map[] 
ns new on 1: epoch 1..1 since -, 1 live, old 0 of 0, quota 0 -: read -/s - B/s  written -/s - B/s  hit - of - tokens/s  evicted -/s - B/s
