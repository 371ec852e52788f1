# After a crash each read is exact or a miss.

volume a
----
ok

open a segment=65536
----
ok

put x y
----
v0/s0/0 v0/s0/1

sync
----
ok

put u v after=y
----
v0/s0/2 v0/s1/0

# u and v were never synced.

crash seed=3
----
ok

open a
----
ok

read x y u v
----
x: exact
y: exact
u: miss: blockstore: read v0/s0/2@4294967301: layer 0 has checksum d5eda1e19dc8b45c, the writer's is 825d42585feec157: slot is corrupt
v: miss: blockstore: read v0/s1/0@4294967302: slot is corrupt: ondisk: magic "\x00\x00\x00\x00\x00\x00\x00\x00", want "PNSTKSLT": no record

check
----
checked

# The slots that the index dropped are free. The slots that the index kept are in use.

free u v
----
ok

forget u v
----
ok

put w
----
v0/s1/0

sync
----
ok

# A clean close and open loses nothing, and generations continue.

close
----
ok

open a
----
ok

read x y w
----
x: exact
y: exact
w: exact

inspect a
----
volume a
copy A: superblock version 1 sequence 4
  node       6ae6783f4fbde91b6eb88b73a48ed247
  volume     dbe5882e2579683432c1bfc525454add, 0 of 1
  boot       3
  segment    65536 bytes
  catalogue  4096 bytes
copy B: superblock version 1 sequence 3
  node       6ae6783f4fbde91b6eb88b73a48ed247
  volume     dbe5882e2579683432c1bfc525454add, 0 of 1
  boot       2
  segment    65536 bytes
  catalogue  4096 bytes
area A: ondisk: magic "\x00\x00\x00\x00\x00\x00\x00\x00", want "PNSTKCAT": no record
area B: ondisk: magic "\x00\x00\x00\x00\x00\x00\x00\x00", want "PNSTKCAT": no record
segment-00000000: segment 0 of volume dbe5882e2579683432c1bfc525454add: 3 slots of 16384 bytes, cut at generation 4294967297
segment-00000001: segment 1 of volume dbe5882e2579683432c1bfc525454add: 3 slots of 16384 bytes, cut at generation 4294967300

close
----
ok

# One superblock copy may be damaged.

flip file=superblock of=a byte=100
----
ok

open a
----
ok

read x y w
----
x: exact
y: exact
w: exact

close
----
ok

inspect a
----
volume a
copy A: superblock version 1 sequence 4
  node       6ae6783f4fbde91b6eb88b73a48ed247
  volume     dbe5882e2579683432c1bfc525454add, 0 of 1
  boot       4
  segment    65536 bytes
  catalogue  4096 bytes
copy B: superblock version 1 sequence 3
  node       6ae6783f4fbde91b6eb88b73a48ed247
  volume     dbe5882e2579683432c1bfc525454add, 0 of 1
  boot       2
  segment    65536 bytes
  catalogue  4096 bytes
area A: ondisk: magic "\x00\x00\x00\x00\x00\x00\x00\x00", want "PNSTKCAT": no record
area B: ondisk: magic "\x00\x00\x00\x00\x00\x00\x00\x00", want "PNSTKCAT": no record
segment-00000000: segment 0 of volume dbe5882e2579683432c1bfc525454add: 3 slots of 16384 bytes, cut at generation 4294967297
segment-00000001: segment 1 of volume dbe5882e2579683432c1bfc525454add: 3 slots of 16384 bytes, cut at generation 4294967300

flip file=superblock of=a byte=100
----
ok

flip file=superblock of=a byte=4196
----
ok

# Both copies are damaged, and there are segments: the volume is not formatted again.

open a
----
blockstore: volume a: segment-00000000 but no superblock; restore it, or empty the directory: copy A: ondisk: PNSTKSUP has checksum 892152c8c9a417d5, its bytes give 9bcc2f171d46d5ee: damaged record; copy B: ondisk: PNSTKSUP has checksum e14fba3875897aef, its bytes give 2f5f0e6fe0b7c8f1: damaged record: damaged record

flip file=superblock of=a byte=4196
----
ok

# An index entry without a slot is dropped, and so is a second entry for a slot.

open a raw=1
----
ok

close
----
ok

# A damaged segment header loses the blocks of its segment only.

flip file=segment-00000000 of=a byte=50
----
ok

open a
----
drop x: blockstore: adopt v0/s0/0@4294967298 with slots of 16384 bytes: segment has 0 of 0: stale reference
drop y: blockstore: adopt v0/s0/1@4294967299 with slots of 16384 bytes: segment has 0 of 0: stale reference
ok

put again
----
v0/s1/1

read again
----
again: exact
