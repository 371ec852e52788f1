# The epoch of chat began at 500 on a. Node b was restarted at 600, and c joined at 900.
sample 0s
a start=50 up=10s
  ns chat id=1 epoch=8 live=1 since=500
b start=600 up=10s
  ns chat id=1 epoch=8 live=1
c start=890 up=10s
  ns chat id=1 epoch=8 live=1 since=900
----
total 3 of 3: read -/s - B/s  written -/s - B/s  hit - of - tokens/s  evicted -/s - B/s  busy -/s
node a serving: read -/s - B/s  written -/s - B/s  hit - of - tokens/s  evicted -/s - B/s  busy -/s  fill -  volumes map[] 
node b serving: read -/s - B/s  written -/s - B/s  hit - of - tokens/s  evicted -/s - B/s  busy -/s  fill -  volumes map[] 
node c serving: read -/s - B/s  written -/s - B/s  hit - of - tokens/s  evicted -/s - B/s  busy -/s  fill -  volumes map[] 
ns chat on 3: epoch 8..8 since 500, 1 live, old 0 of 0, quota 0 -: read -/s - B/s  written -/s - B/s  hit - of - tokens/s  evicted -/s - B/s

# All nodes but c were restarted: the time at which c joined is not the begin of the epoch.
sample 2s
a start=700 up=12s
  ns chat id=1 epoch=8 live=1
b start=600 up=12s
  ns chat id=1 epoch=8 live=1
c start=890 up=12s
  ns chat id=1 epoch=8 live=1 since=900
----
total 3 of 3: read 0/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s
node a serving, restarted: read -/s - B/s  written -/s - B/s  hit - of - tokens/s  evicted -/s - B/s  busy -/s  fill -  volumes map[] 
node b serving: read 0/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s  fill -  volumes map[] 
node c serving: read 0/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s  fill -  volumes map[] 
ns chat on 3: epoch 8..8 since -, 1 live, old 0 of 0, quota 0 -: read 0/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s

# A bump at 1000.
sample 4s
a start=700 up=14s
  ns chat id=1 epoch=8 live=1
b start=600 up=14s
  ns chat id=1 epoch=9 live=1 since=1000
c start=890 up=14s
  ns chat id=1 epoch=9 live=1 since=1001
----
total 3 of 3: read 0/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s
node a serving: read 0/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s  fill -  volumes map[] 
node b serving: read 0/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s  fill -  volumes map[] 
node c serving: read 0/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s  fill -  volumes map[] 
ns chat on 3: epoch 8..9 since 1000, 1 live, old 0 of 0, quota 0 -: read 0/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s
