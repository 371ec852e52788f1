# A sequence moves to the next volume after every stripe, so that one read uses all volumes.

volume a b
----
ok

open a b segment=131072 stripe=65536
----
ok

put s0 s1 s2 s3 s4 s5 s6 s7 s8 s9
----
v1/s0/0 v1/s0/1 v1/s0/2 v1/s0/3 v0/s0/0 v0/s0/1 v0/s0/2 v0/s0/3 v1/s0/4 v1/s0/5

read s0 s5 s9
----
s0: exact
s5: exact
s9: exact

# A new sequence starts on the volume that holds less.

put t0
----
v0/s0/4

# s continues where it ended.

put s10 s11 s12 after=s9
----
v1/s0/6 v1/s1/0 v1/s1/1

stats
----
capacity 1048576, files 442368
slots    14 live: 229376 bytes; reserved 0, condemned 0, free 114688
reads    3: 49152 bytes; stale 0, corrupt 0, failed 0
writes   14: 229376 bytes; failed 0
scrubbed 0: 0 bytes; corrupt 0, failed 0
class    16384 bytes: 3 segments, 21 slots, 14 live, 7 free
volume 0 a: capacity 524288, files 155648, 1 segments (0 blank, 0 bad, 0 retiring), used 81920
volume 1 b: capacity 524288, files 286720, 2 segments (0 blank, 0 bad, 0 retiring), used 147456

check
----
checked

scan
----
v0/s0/0@4294967303 s4
v0/s0/1@4294967304 s5
v0/s0/2@4294967305 s6
v0/s0/3@4294967306 s7
v0/s0/4@4294967309 t0
v1/s0/0@4294967299 s0
v1/s0/1@4294967300 s1
v1/s0/2@4294967301 s2
v1/s0/3@4294967302 s3
v1/s0/4@4294967307 s8
v1/s0/5@4294967308 s9
v1/s0/6@4294967311 s10
v1/s1/0@4294967312 s11
v1/s1/1@4294967313 s12
{Segments:3 Slots:21 Found:14 Blank:7 Damaged:0 Unreadable:0 Bytes:344064}

# Only some slots are scanned; each run of adjacent ones is one read.

scan s5 s6 s9 t0 s1 s12
----
v0/s0/1@4294967304 s5
v0/s0/2@4294967305 s6
v0/s0/4@4294967309 t0
v1/s0/1@4294967300 s1
v1/s0/5@4294967308 s9
v1/s1/1@4294967313 s12
{Segments:3 Slots:6 Found:6 Blank:0 Damaged:0 Unreadable:0 Bytes:98304}
