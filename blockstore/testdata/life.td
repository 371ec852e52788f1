# The states of a slot: reserved, written, live, freed, reused.

volume a
----
ok

open a segment=65536
----
ok

reserve x y
----
v0/s0/0 v0/s0/1

# data-before-index: a block that is not written is not committed and cannot be read.

commit x
----
blockstore: commit v0/s0/0@4294967298: slot is reserved, not written (data-before-index): wrong state

read x
----
x: miss: blockstore: read v0/s0/0@4294967298: slot is reserved: stale reference

write x y
----
ok

commit x
----
ok

# y is written, but not committed, so it cannot be read.

read x y
----
x: exact
y: miss: blockstore: read v0/s0/1@4294967299: slot is written: stale reference

pin y
----
blockstore: pin v0/s0/1@4294967299: slot is written: stale reference

abandon y
----
ok

stats
----
capacity 1048576, files 90112
slots    1 live: 16384 bytes; reserved 0, condemned 0, free 32768
reads    3: 16384 bytes; stale 2, corrupt 0, failed 0
writes   2: 32768 bytes; failed 0
scrubbed 0: 0 bytes; corrupt 0, failed 0
class    16384 bytes: 1 segments, 3 slots, 1 live, 2 free
volume 0 a: capacity 1048576, files 90112, 1 segments (0 blank, 0 bad, 0 retiring), used 16384

# A read of a layer range reads only these layers, with the header in the same submission.

read x layers=0+1
----
x: exact

read x layers=1+2
----
x: exact

read x layers=2+2
----
x: blockstore: read v0/s0/0@4294967298: layers 2 to 4 of 3: wrong state

# A freed slot with readers is free after the last reader has left.

pin x
----
ok

pin x
----
ok

free x
----
ok

free x
----
blockstore: v0/s0/0@4294967298: slot is condemned: stale reference

stats
----
capacity 1048576, files 90112
slots    0 live: 0 bytes; reserved 0, condemned 16384, free 32768
reads    6: 40960 bytes; stale 2, corrupt 0, failed 1
writes   2: 32768 bytes; failed 0
scrubbed 0: 0 bytes; corrupt 0, failed 0
class    16384 bytes: 1 segments, 3 slots, 0 live, 2 free
volume 0 a: capacity 1048576, files 90112, 1 segments (0 blank, 0 bad, 0 retiring), used 16384

# The readers continue; a new one is refused.

read x
----
x: exact

pin x
----
blockstore: pin v0/s0/0@4294967298: slot is condemned: stale reference

unpin x
----
ok

unpin x
----
ok

unpin x
----
blockstore: v0/s0/0@4294967298: slot is free at generation 4294967298: stale reference

read x
----
x: miss: blockstore: v0/s0/0@4294967298: slot is free at generation 4294967298: stale reference

# The slot is used again, under another generation.

put z
----
v0/s0/0

read x z
----
x: miss: blockstore: v0/s0/0@4294967298: slot is live at generation 4294967300: stale reference
z: exact

forget x y
----
ok

check
----
checked

# Calls on a closed store return that it is closed.

close
----
ok
