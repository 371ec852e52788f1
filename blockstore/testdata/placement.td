# Consecutive blocks of a sequence lie in consecutive slots.

volume a
----
ok

open a segment=131072 capacity=524288
----
ok

put a0 a1 a2
----
v0/s0/0 v0/s0/1 v0/s0/2

put b0 b1
----
v0/s0/3 v0/s0/4

# a's next slot is taken, so the longest free run is used.

put a3 after=a2
----
v0/s0/5

# b could continue after b1, but a3 follows b1. a3 can continue.

put a4 a5 after=a3
----
v0/s0/6 v0/s1/0

# Another slot size gets another segment.

put big piece=60000
----
v0/s2/0

stats
----
capacity 524288, files 417792
slots    9 live: 196608 bytes; reserved 0, condemned 0, free 98304
reads    0: 0 bytes; stale 0, corrupt 0, failed 0
writes   9: 196608 bytes; failed 0
scrubbed 0: 0 bytes; corrupt 0, failed 0
class    16384 bytes: 2 segments, 14 slots, 8 live, 6 free
class    65536 bytes: 1 segments, 1 slots, 1 live, 0 free
volume 0 a: capacity 524288, files 417792, 3 segments (0 blank, 0 bad, 0 retiring), used 196608

# Fill the first size.

put c0 c1 c2 c3 c4 c5 c6 c7 c8 c9
----
v0/s1/1 v0/s1/2 v0/s1/3 v0/s1/4 v0/s1/5 v0/s1/6 v0/s3/0 v0/s3/1 v0/s3/2 v0/s3/3

put d0 d1 d2 d3 d4 d5
----
blockstore: 6 slots of 16384 bytes wanted, 2 free, and no room for another segment: store is full

# If nothing else is free, the gaps are used, the longest first.

free a1 c2 c3 c4
----
ok

put e0 e1 e2 e3
----
v0/s1/3 v0/s1/4 v0/s1/5 v0/s3/4

# The store is full. The error has the number of missing slots; a sequence gets all slots or none.

put f0 f1
----
v0/s0/1 v0/s3/5

stats
----
capacity 524288, files 524288
slots    21 live: 393216 bytes; reserved 0, condemned 0, free 0
reads    0: 0 bytes; stale 0, corrupt 0, failed 0
writes   25: 458752 bytes; failed 0
scrubbed 0: 0 bytes; corrupt 0, failed 0
class    16384 bytes: 3 segments, 20 slots, 20 live, 0 free
class    65536 bytes: 1 segments, 1 slots, 1 live, 0 free
volume 0 a: capacity 524288, files 524288, 4 segments (0 blank, 0 bad, 0 retiring), used 393216

forget a1 c2 c3 c4
----
ok

check
----
checked

# The other slot size has free slots, which cannot be used: emptiable lists the segments that could
# be emptied.

emptiable
----
v0/s2/0 to v0/s2/1: 65536 bytes in use

free big
----
ok

forget big
----
ok

put f0 f1
----
v0/s2/0 v0/s2/1

stats
----
capacity 524288, files 524288
slots    22 live: 360448 bytes; reserved 0, condemned 0, free 81920
reads    0: 0 bytes; stale 0, corrupt 0, failed 0
writes   27: 491520 bytes; failed 0
scrubbed 0: 0 bytes; corrupt 0, failed 0
class    16384 bytes: 4 segments, 27 slots, 22 live, 5 free
volume 0 a: capacity 524288, files 524288, 4 segments (0 blank, 0 bad, 0 retiring), used 360448

# No segment can hold a slot of this size.

put huge piece=300000
----
blockstore: slot of 307200 bytes; segments of this store hold at most 126976; format a store with larger segments (more capacity, or --segment): too large for the volumes

put none piece=10 layers=3
----
ondisk: payload of 10 bytes is not 3 equal layers: impossible slot layout
