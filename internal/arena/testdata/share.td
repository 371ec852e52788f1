# Of the 512 pages, those from 256 on are the share. Other requests take memory from the beginning,
# and from the share when that is full.

alloc
r1 200
r2 100
----
r1: page 0
r2: page 200
r1@0+200 r2@200+100 .@300+212 waiting=0

# Writers take memory only from the share. w2 does not fit, so it waits.

alloc-share
w1 100
w2 150
----
w1: page 300
r1@0+200 r2@200+100 w1@300+100 .@400+112 waiting=1

# r3 would fit into the rest of the share, but w2 waits for memory of the share: r3 has to wait for
# memory outside of it.

alloc
r3 50
----
r1@0+200 r2@200+100 w1@300+100 .@400+112 waiting=2

release
r1
----
r3: page 0
r3@0+50 .@50+150 r2@200+100 w1@300+100 .@400+112 waiting=1

# w2 still waits. A new request for other memory does not wait for w2.

alloc
r4 20
----
r4: page 50
r3@0+50 r4@50+20 .@70+130 r2@200+100 w1@300+100 .@400+112 waiting=1

# r2 lies partly in the share, and w1 wholly. After both are released, w2 is served.

release
r2
w1
----
w2: page 256
r3@0+50 r4@50+20 .@70+186 w2@256+150 .@406+106 waiting=0

# No request waits for the share: a request that does not fit before it may use the share.

alloc
r5 110
r6 100
----
r5: page 70
r6: page 406
r3@0+50 r4@50+20 r5@70+110 .@180+76 w2@256+150 r6@406+100 .@506+6 waiting=0

# A request larger than the share is refused.

alloc-share
w3 257
----
w3: arena: request of 1052672 bytes, arena or share of 1048576: larger than the arena
r3@0+50 r4@50+20 r5@70+110 .@180+76 w2@256+150 r6@406+100 .@506+6 waiting=0
