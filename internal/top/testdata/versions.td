# A node of an older version reports neither counters nor its uptime: the rates of its NICs and
# volumes are over the time between the samples.
sample 1s
a start=1 up=0s old=yes
  nic eth0 sent=1000 received=0 link=8000
  volume /v state=ok read=0
  ns chat id=1 epoch=3 used=10 old=yes
----
total 1 of 1: read -/s - B/s  written -/s - B/s  hit - of - tokens/s  evicted -/s - B/s  busy -/s
node a serving: read -/s - B/s  written -/s - B/s  hit - of - tokens/s  evicted -/s - B/s  busy -/s  fill -  volumes map[ok:1] 
ns chat on 1: epoch 3..3 since -, 1 live, old - of 10, quota 0 -: read -/s - B/s  written -/s - B/s  hit - of - tokens/s  evicted -/s - B/s
nic a eth0 up=true: sent - B/s -  received - B/s -  link 8000
volume a /v ok: read - B/s  written - B/s  failures -/s

sample 3s
a start=1 up=0s old=yes
  nic eth0 sent=2000 received=500 link=8000
  volume /v state=ok read=4000
  ns chat id=1 epoch=3 used=10 old=yes
----
total 1 of 1: read -/s - B/s  written -/s - B/s  hit - of - tokens/s  evicted -/s - B/s  busy -/s
node a serving: read -/s - B/s  written -/s - B/s  hit - of - tokens/s  evicted -/s - B/s  busy -/s  fill -  volumes map[ok:1] 
ns chat on 1: epoch 3..3 since -, 1 live, old - of 10, quota 0 -: read -/s - B/s  written -/s - B/s  hit - of - tokens/s  evicted -/s - B/s
nic a eth0 up=true: sent 500 B/s 0.5  received 250 B/s 0.25  link 8000
volume a /v ok: read 2000 B/s  written 0 B/s  failures 0/s

# It was replaced by the present version, which counts from its start on.
sample 5s
a start=5 up=1s read=100
  nic eth0 sent=2000 received=500
  volume /v state=ok read=4000
  ns chat id=1 epoch=3 used=10 live=1 newest=10 read=50
----
total 1 of 1: read -/s - B/s  written -/s - B/s  hit - of - tokens/s  evicted -/s - B/s  busy -/s
node a serving, restarted: read -/s - B/s  written -/s - B/s  hit - of - tokens/s  evicted -/s - B/s  busy -/s  fill -  volumes map[ok:1] 
ns chat on 1: epoch 3..3 since -, 1 live, old 0 of 10, quota 0 -: read -/s - B/s  written -/s - B/s  hit - of - tokens/s  evicted -/s - B/s
nic a eth0 up=true: sent - B/s -  received - B/s -  link -
volume a /v ok: read - B/s  written - B/s  failures -/s
