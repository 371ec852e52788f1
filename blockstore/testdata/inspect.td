# The output of `penstock store inspect`.

volume a
----
ok

inspect a
----
volume a
blockstore: inspect: a is not a volume: neither superblock nor catalogue nor segments are there: file does not exist

open a segment=65536
----
ok

put x y
----
v0/s0/0 v0/s0/1

free y
----
ok

inspect a
----
volume a
copy A: superblock version 1 sequence 2
  node       6ae6783f4fbde91b6eb88b73a48ed247
  volume     dbe5882e2579683432c1bfc525454add, 0 of 1
  boot       1
  segment    65536 bytes
  catalogue  4096 bytes
copy B: superblock version 1 sequence 1
  node       6ae6783f4fbde91b6eb88b73a48ed247
  volume     dbe5882e2579683432c1bfc525454add, 0 of 1
  boot       0
  segment    65536 bytes
  catalogue  4096 bytes
area A: ondisk: magic "\x00\x00\x00\x00\x00\x00\x00\x00", want "PNSTKCAT": no record
area B: ondisk: magic "\x00\x00\x00\x00\x00\x00\x00\x00", want "PNSTKCAT": no record
segment-00000000: segment 0 of volume dbe5882e2579683432c1bfc525454add: 3 slots of 16384 bytes, cut at generation 4294967297

inspect a segment=0
----
segment 0 of volume dbe5882e2579683432c1bfc525454add: 3 slots of 16384 bytes, cut at generation 4294967297
  0: generation 4294967298 namespace 1 epoch 1 group 0 block 2d711642b726b04401627ca9fbac32f5 depth 0, 12000 bytes in 3 layers
  1: generation 4294967299 namespace 1 epoch 1 group 0 block a1fce4363854ff888cff4b8e7875d600 depth 0, 12000 bytes in 3 layers

inspect a segment=0 slot=0
----
slot v0/s0/0@4294967298 prefix
  namespace  1 epoch 1 group 0
  block      2d711642b726b04401627ca9fbac32f5 depth 0
  parent     00000000000000000000000000000000
  geometry   00000000000000000000000000000000
  payload    12000 bytes in 3 layers
  layer 0    09442581e893c87a
  layer 1    adf979f48d1bedfd
  layer 2    2aa7d82920f18f10
  verdict    every layer has its checksum

inspect a segment=0 slot=2
----
slot 2 of segment 0: ondisk: magic "\x00\x00\x00\x00\x00\x00\x00\x00", want "PNSTKSLT": no record

inspect a segment=0 slot=9
----
blockstore: inspect: slot 9; segment 0 has 3: stale reference

inspect a segment=1
----
blockstore: inspect: memio: open segment-00000001 on a: file does not exist

flip x byte=4096
----
ok

inspect a segment=0 slot=0
----
slot v0/s0/0@4294967298 prefix
  namespace  1 epoch 1 group 0
  block      2d711642b726b04401627ca9fbac32f5 depth 0
  parent     00000000000000000000000000000000
  geometry   00000000000000000000000000000000
  payload    12000 bytes in 3 layers
  layer 0    09442581e893c87a
  layer 1    adf979f48d1bedfd
  layer 2    2aa7d82920f18f10
  verdict    blockstore: v0/s0/0@4294967298: layer 0 has checksum 7a302161a2f4b1a0, the writer's is 09442581e893c87a: slot is corrupt

flip x byte=60
----
ok

inspect a segment=0
----
segment 0 of volume dbe5882e2579683432c1bfc525454add: 3 slots of 16384 bytes, cut at generation 4294967297
  0: ondisk: PNSTKSLT has checksum fe85dc97e35d7d5d, its bytes give fd3cd25ec6eb97bd: damaged record
  1: generation 4294967299 namespace 1 epoch 1 group 0 block a1fce4363854ff888cff4b8e7875d600 depth 0, 12000 bytes in 3 layers

# A volume without a superblock: the other parts are printed nevertheless.
close
----
ok

remove of=a file=superblock
----
ok

inspect a
----
volume a
superblock: blockstore: inspect: memio: open superblock on a: file does not exist
segment-00000000: segment 0 of volume dbe5882e2579683432c1bfc525454add: 3 slots of 16384 bytes, cut at generation 4294967297
