# Flipped bits are misses, and are counted.

volume a
----
ok

open a segment=65536
----
ok

put x y z
----
v0/s0/0 v0/s0/1 v0/s0/2

# In the payload: only a read of the second layer of x finds the damage.

flip x byte=8200
----
ok

read x
----
x: miss: blockstore: read v0/s0/0@4294967298: layer 1 has checksum 7554669299acd6c2, the writer's is adf979f48d1bedfd: slot is corrupt

read x layers=0+1
----
x: exact

read x layers=1+1
----
x: miss: blockstore: read v0/s0/0@4294967298: layer 1 has checksum 7554669299acd6c2, the writer's is adf979f48d1bedfd: slot is corrupt

# In the header.

flip y byte=60
----
ok

read y z
----
y: miss: blockstore: read v0/s0/1@4294967299: slot is corrupt: ondisk: PNSTKSLT has checksum fbd12e059f342a32, its bytes give 1a9b598ff8d808aa: damaged record
z: exact

read y layers=2+1
----
y: miss: blockstore: read v0/s0/1@4294967299: slot is corrupt: ondisk: PNSTKSLT has checksum fbd12e059f342a32, its bytes give 1a9b598ff8d808aa: damaged record

stats
----
capacity 1048576, files 90112
slots    3 live: 49152 bytes; reserved 0, condemned 0, free 0
reads    6: 24576 bytes; stale 0, corrupt 4, failed 0
writes   3: 49152 bytes; failed 0
scrubbed 0: 0 bytes; corrupt 0, failed 0
class    16384 bytes: 1 segments, 3 slots, 3 live, 0 free
volume 0 a: capacity 1048576, files 90112, 1 segments (0 blank, 0 bad, 0 retiring), used 49152

scrub
----
blockstore: v0/s0/0@4294967298: layer 1 has checksum 7554669299acd6c2, the writer's is adf979f48d1bedfd: slot is corrupt
blockstore: v0/s0/1@4294967299: slot is corrupt: ondisk: PNSTKSLT has checksum fbd12e059f342a32, its bytes give 1a9b598ff8d808aa: damaged record
{Next:v0/s0/0 Done:true Slots:3 Bytes:49152 Corrupt:2 Unreadable:0} in 0s

scan verify=1
----
v0/s0/2@4294967300 z
{Segments:1 Slots:3 Found:1 Blank:0 Damaged:2 Unreadable:0 Bytes:49152}

scan
----
v0/s0/0@4294967298 x
v0/s0/2@4294967300 z
{Segments:1 Slots:3 Found:2 Blank:0 Damaged:1 Unreadable:0 Bytes:49152}

scan z x verify=1
----
v0/s0/2@4294967300 z
{Segments:1 Slots:2 Found:1 Blank:0 Damaged:1 Unreadable:0 Bytes:32768}

# The engine drops corrupt blocks.

scrub free=1
----
blockstore: v0/s0/0@4294967298: layer 1 has checksum 7554669299acd6c2, the writer's is adf979f48d1bedfd: slot is corrupt
free: ok
blockstore: v0/s0/1@4294967299: slot is corrupt: ondisk: PNSTKSLT has checksum fbd12e059f342a32, its bytes give 1a9b598ff8d808aa: damaged record
free: ok
{Next:v0/s0/0 Done:true Slots:3 Bytes:49152 Corrupt:2 Unreadable:0} in 0s

forget x y
----
ok

check
----
checked

# The scrubber stops at its budget and continues from that slot, at its rate.

put p q r
----
v0/s0/0 v0/s0/1 v0/s1/0

scrub max=16384
----
{Next:v0/s0/1 Done:false Slots:1 Bytes:16384 Corrupt:0 Unreadable:0} in 0s

scrub from=1
----
{Next:v0/s0/0 Done:true Slots:3 Bytes:49152 Corrupt:0 Unreadable:0} in 0s

scrub rate=16384
----
{Next:v0/s0/0 Done:true Slots:4 Bytes:65536 Corrupt:0 Unreadable:0} in 3s
