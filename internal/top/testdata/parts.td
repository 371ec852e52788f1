# NICs and volumes. A volume without free space is below_floor, and the reason of a node names the
# first volume that is not ok.
sample 0s
a name=node-a start=1 up=10s capacity=100 used=95
  nic eth0 sent=0 received=0 link=8000
  nic eth1 sent=0 received=0 down=yes
  volume /v0 state=ok full=yes read=5
  volume /v1 state=failed reason=EIO
----
total 1 of 1: read -/s - B/s  written -/s - B/s  hit - of - tokens/s  evicted -/s - B/s  busy -/s
node a serving: read -/s - B/s  written -/s - B/s  hit - of - tokens/s  evicted -/s - B/s  busy -/s  fill 0.95  volumes map[below_floor:1 failed:1] /v0: below_floor
nic node-a eth0 up=true: sent - B/s -  received - B/s -  link 8000
nic node-a eth1 up=false: sent - B/s -  received - B/s -  link -
volume node-a /v0 below_floor: read - B/s  written - B/s  failures -/s
volume node-a /v1 failed: read - B/s  written - B/s  failures -/s

sample 1s
a name=node-a start=1 up=11s capacity=100 used=95
  nic eth0 sent=500 received=1000 link=8000
  nic eth1 sent=0 received=0 down=yes
  volume /v0 state=ok full=yes read=105 written=50
  volume /v1 state=failed reason=EIO failures=3
----
total 1 of 1: read 0/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s
node a serving: read 0/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s  fill 0.95  volumes map[below_floor:1 failed:1] /v0: below_floor
nic node-a eth0 up=true: sent 500 B/s 0.5  received 1000 B/s 1  link 8000
nic node-a eth1 up=false: sent 0 B/s -  received 0 B/s -  link -
volume node-a /v0 below_floor: read 100 B/s  written 50 B/s  failures 0/s
volume node-a /v1 failed: read 0 B/s  written 0 B/s  failures 3/s

# The order of the NICs has changed, as after a change of the configuration: no rates.
sample 2s
a name=node-a start=1 up=12s
  nic eth1 sent=500 received=1000
  nic eth0 sent=700 received=1000 link=8000
  volume /v1 state=ok
----
total 1 of 1: read 0/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s
node a serving: read 0/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s  fill -  volumes map[ok:1] 
nic node-a eth1 up=true: sent - B/s -  received - B/s -  link -
nic node-a eth0 up=true: sent - B/s -  received - B/s -  link 8000
volume node-a /v1 ok: read - B/s  written - B/s  failures -/s

sample 3s
a silent=timeout
----
total 0 of 1: read -/s - B/s  written -/s - B/s  hit - of - tokens/s  evicted -/s - B/s  busy -/s
node a node-a: no answer: timeout
