# Principal a, of weight 1, alone holds everything. Its requests a3 and a4 wait.

alloc by=a weight=1
a1 256
a2 256
a3 128
a4 128
----
a1: page 0
a2: page 256
a1@0+256 a2@256+256 waiting=2

# b, of weight 3, has come later, and is served first, because it holds nothing.

alloc by=b weight=3
b1 256
----
a1@0+256 a2@256+256 waiting=3

release
a1
----
b1: page 0
b1@0+256 a2@256+256 waiting=2

# The queue is full at three requests. A second one of b takes the place of the newest one of a.

alloc by=b weight=3
b2 128
b3 100
----
a4: busy
b1@0+256 a2@256+256 waiting=3

# b2 and b3 come before a3, which has waited longer: a was granted more bytes for its weight.

release
a2
----
b2: page 256
b3: page 384
b1@0+256 b2@256+128 b3@384+100 .@484+28 waiting=1

# No other request waits, so a gets memory beyond its share.

release
b1
----
a3: page 0
a3@0+128 .@128+128 b2@256+128 b3@384+100 .@484+28 waiting=0

alloc by=a weight=1
a5 120
----
a5: page 128
a3@0+128 a5@128+120 .@248+8 b2@256+128 b3@384+100 .@484+28 waiting=0

# A request of a principal that holds nothing is served at once if its memory is free, although a larger request of
# another principal waits: it is the next one of the order.

alloc by=a weight=1
a6 64
----
a3@0+128 a5@128+120 .@248+8 b2@256+128 b3@384+100 .@484+28 waiting=1

alloc by=c weight=1
c1 4
----
c1: page 248
a3@0+128 a5@128+120 c1@248+4 .@252+4 b2@256+128 b3@384+100 .@484+28 waiting=1

release
a5
----
a6: page 128
a3@0+128 a6@128+64 .@192+56 c1@248+4 .@252+4 b2@256+128 b3@384+100 .@484+28 waiting=0
