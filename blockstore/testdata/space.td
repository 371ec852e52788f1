# The file system is full: no segment can be created, and nothing is damaged.

volume a capacity=150000
----
ok

open a segment=65536 capacity=1048576
----
ok

put x0 x1 x2
----
v0/s0/0 v0/s0/1 v0/s0/2

put y0 y1 y2 y3
----
blockstore: 4 slots of 16384 bytes wanted, 0 free, and no room for another segment: store is full

free x1
----
ok

forget x1
----
ok

put z
----
v0/s0/1

read x0 x2 z
----
x0: exact
x2: exact
z: exact

stats
----
capacity 1048576, files 90112
slots    3 live: 49152 bytes; reserved 0, condemned 0, free 0
reads    3: 49152 bytes; stale 0, corrupt 0, failed 0
writes   4: 65536 bytes; failed 0
scrubbed 0: 0 bytes; corrupt 0, failed 0
class    16384 bytes: 1 segments, 3 slots, 3 live, 0 free
volume 0 a: capacity 1048576, files 90112, 1 segments (0 blank, 0 bad, 0 retiring), used 49152

close
----
ok

# Below the floor nothing is written, and all blocks can be read.

open a capacity=1048576 floor=100000
----
ok

put q
----
blockstore: no volume takes writes: volume 0: 59888 bytes free, 40112 fewer than the floor of 100000: free as many, or lower free_floor

read x0 x2 z
----
x0: exact
x2: exact
z: exact

catalogue set=still
----
ok

close
----
ok

# A smaller capacity: surplus segments are removed as they become empty.

volume b
----
ok

forget x0 x2 z
----
ok

open b segment=65536 capacity=524288
----
ok

put a0 a1 a2
----
v0/s0/0 v0/s0/1 v0/s0/2

put b0 b1 b2
----
v0/s1/0 v0/s1/1 v0/s1/2

put c0 c1 c2
----
v0/s2/0 v0/s2/1 v0/s2/2

put d0
----
v0/s3/0

close
----
ok

open b capacity=180000
----
ok

stats
----
capacity 180000, files 286720
slots    10 live: 163840 bytes; reserved 0, condemned 0, free 32768
reads    0: 0 bytes; stale 0, corrupt 0, failed 0
writes   0: 0 bytes; failed 0
scrubbed 0: 0 bytes; corrupt 0, failed 0
class    16384 bytes: 4 segments, 12 slots, 10 live, 2 free
volume 0 b: capacity 176128, files 286720, 4 segments (0 blank, 0 bad, 2 retiring), used 163840

put e0
----
blockstore: 1 slots of 16384 bytes wanted, 0 free, and no room for another segment: store is full

free b0 b1 b2 c0 c1 c2 d0
----
ok

forget b0 b1 b2 c0 c1 c2 d0
----
ok

stats
----
capacity 180000, files 155648
slots    3 live: 49152 bytes; reserved 0, condemned 0, free 49152
reads    0: 0 bytes; stale 0, corrupt 0, failed 0
writes   0: 0 bytes; failed 0
scrubbed 0: 0 bytes; corrupt 0, failed 0
class    16384 bytes: 2 segments, 6 slots, 3 live, 3 free
volume 0 b: capacity 176128, files 155648, 2 segments (0 blank, 0 bad, 0 retiring), used 49152

read a0 a1 a2
----
a0: exact
a1: exact
a2: exact

check
----
checked

close
----
ok

# One segment is kept ready, filled with zeroes, within the capacity.

volume c
----
ok

forget a0 a1 a2
----
ok

open c segment=65536 capacity=230000 prewrite=1
----
ok

stats
----
capacity 230000, files 90112
slots    0 live: 0 bytes; reserved 0, condemned 0, free 0
reads    0: 0 bytes; stale 0, corrupt 0, failed 0
writes   0: 0 bytes; failed 0
scrubbed 0: 0 bytes; corrupt 0, failed 0
volume 0 c: capacity 229376, files 90112, 1 segments (1 blank, 0 bad, 0 retiring), used 0

put p
----
v0/s0/0

sleep seconds=2
----
ok

stats
----
capacity 230000, files 155648
slots    1 live: 16384 bytes; reserved 0, condemned 0, free 32768
reads    0: 0 bytes; stale 0, corrupt 0, failed 0
writes   1: 16384 bytes; failed 0
scrubbed 0: 0 bytes; corrupt 0, failed 0
class    16384 bytes: 1 segments, 3 slots, 1 live, 2 free
volume 0 c: capacity 229376, files 155648, 2 segments (1 blank, 0 bad, 0 retiring), used 16384

read p
----
p: exact
