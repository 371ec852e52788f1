# The first sample has no rates. Later ones divide by the growth of the node's uptime: node b's
# second answer was taken 4 s after its first, although the samples are 2 s apart.
sample 0s
a start=1 up=10s read=100 readbytes=1000 queried=1000 hit=900 written=5 writtenbytes=50 capacity=1000 used=250
b start=2 up=90s read=7000
----
total 2 of 2: read -/s - B/s  written -/s - B/s  hit - of - tokens/s  evicted -/s - B/s  busy -/s
node a serving: read -/s - B/s  written -/s - B/s  hit - of - tokens/s  evicted -/s - B/s  busy -/s  fill 0.25  volumes map[] 
node b serving: read -/s - B/s  written -/s - B/s  hit - of - tokens/s  evicted -/s - B/s  busy -/s  fill -  volumes map[] 

sample 2s
a start=1 up=12s read=300 readbytes=3000 queried=2000 hit=1700 written=9 writtenbytes=90 evicted=4 evictedbytes=40 busy=6 capacity=1000 used=250
b start=2 up=94s read=7400
----
total 2 of 2: read 200/s 1000 B/s  written 2/s 20 B/s  hit 0.8 of 500 tokens/s  evicted 2/s 20 B/s  busy 3/s
node a serving: read 100/s 1000 B/s  written 2/s 20 B/s  hit 0.8 of 500 tokens/s  evicted 2/s 20 B/s  busy 3/s  fill 0.25  volumes map[] 
node b serving: read 100/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s  fill -  volumes map[] 

# b does not answer. The others go on, and the total has only the nodes that answer.
sample 4s
a start=1 up=14s read=300 queried=2000 hit=1700
b silent=refused
----
total 1 of 2: read 0/s - B/s  written -/s - B/s  hit - of 0 tokens/s  evicted -/s - B/s  busy -/s
node a serving: read 0/s - B/s  written -/s - B/s  hit - of 0 tokens/s  evicted -/s - B/s  busy -/s  fill -  volumes map[] 
node b : no answer: refused

# b answers again: its rate is over the time since its last answer. The counter readbytes of a is
# smaller than before, so that its rate is unknown.
sample 6s
a start=1 up=16s read=304 readbytes=1
b start=2 up=98s read=7480
----
total 2 of 2: read 22/s 0.5 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s
node a serving: read 2/s 0.5 B/s  written 0/s 0 B/s  hit - of - tokens/s  evicted 0/s 0 B/s  busy 0/s  fill -  volumes map[] 
node b serving: read 20/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s  fill -  volumes map[] 

# a has started again, with smaller and with larger counters: no rates. Then there are rates again.
sample 8s
a start=8 up=1s read=2 written=1000000
b start=2 up=100s read=7480
----
total 2 of 2: read 0/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s
node a serving, restarted: read -/s - B/s  written -/s - B/s  hit - of - tokens/s  evicted -/s - B/s  busy -/s  fill -  volumes map[] 
node b serving: read 0/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s  fill -  volumes map[] 

sample 10s
a start=8 up=3s read=12 written=1000000
b start=2 up=102s read=7480
----
total 2 of 2: read 5/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s
node a serving: read 5/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s  fill -  volumes map[] 
node b serving: read 0/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s  fill -  volumes map[] 

# Two answers at nearly the same time give no rate.
sample 10.001s
a start=8 up=3.001s read=500
b start=2 up=104s read=7480
----
total 2 of 2: read 0/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s
node a serving: read -/s - B/s  written -/s - B/s  hit - of - tokens/s  evicted -/s - B/s  busy -/s  fill -  volumes map[] 
node b serving: read 0/s 0 B/s  written 0/s 0 B/s  hit - of 0 tokens/s  evicted 0/s 0 B/s  busy 0/s  fill -  volumes map[] 
