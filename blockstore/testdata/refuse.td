# Volumes that are not those of one store are refused; the error names the volume and the reason.

volume a b c
----
ok

open a b segment=65536
----
ok

# Two stores cannot use one volume.

open a b
----
blockstore: volume a is in use by transcript; stop that process or choose another --data directory

close
----
ok

open a
----
blockstore: a is one of 2 volumes, 1 are given; give all of them, or set degraded to serve the present volumes: foreign volume

open a b c
----
blockstore: a is one of 2 volumes, 3 are given; give those, or set add_volumes to format the others: foreign volume

open a a
----
blockstore: volume a is in use by transcript; stop that process or choose another --data directory

open c segment=65536
----
ok

close
----
ok

open a c
----
blockstore: a and c are both volume 0 of node 6ae6783f4fbde91b6eb88b73a48ed247; give one of them: foreign volume

# The configured segment size differs from that of the volumes.

open a b segment=131072
----
blockstore: a was formatted with segments of 65536 bytes, 131072 are configured; remove the setting: foreign volume

# A disk that is not mounted looks like an empty directory.

volume d
----
ok

open a d
----
blockstore: 1 of 2 directories are empty, the others have volumes of node 6ae6783f4fbde91b6eb88b73a48ed247; mount the missing disks, set degraded to serve the present volumes, or set add_volumes to format the empty ones: foreign volume

# The order of the volumes does not matter.

open b a
----
ok

put x
----
v1/s0/0

close
----
ok

# A segment of another volume.

copy file=segment-00000000 of=b to=b as=segment-00000005
----
ok

open a b
----
blockstore: volume b: segment-00000005: the header is that of segment 0 of volume 0cd87274d67084caaf0e0d36c8496db7, but this is volume 0cd87274d67084caaf0e0d36c8496db7; remove the file: foreign volume

remove file=segment-00000005 of=b
----
ok

open a b
----
ok

close
----
ok

# A lost disk is replaced only with add=1: its blocks are misses.

open d b add=1
----
ok

read x
----
x: exact

put y
----
v0/s0/0

close
----
ok

open b d
----
ok

read y
----
y: exact

close
----
ok

# A third volume is added.

volume e
----
ok

open b d e add=1
----
ok

close
----
ok

open e d b
----
ok

read y
----
y: exact

# The capacity is too small.

close
----
ok

volume f
----
ok

open f capacity=20000
----
blockstore: 20000 bytes are too few for 1 volumes: a segment of 8192 bytes with superblock and catalogue takes 32768 on each; raise the capacity, or choose smaller segments

open f capacity=0
----
drop x: blockstore: v1/s0/0@8589934594: no such segment: stale reference
drop y: blockstore: v0/s0/0@17179869186: no such segment: stale reference
ok
