# A node on three disks. One of them is drained and removed while the node serves.

tokens prompt 1 48
----

data kv 1 98304
----

start --data=@second --data=@third
----
ready

run
ns create m --layers 2 --block-tokens 4 --token-bytes 1024
block put m --tokens-file @prompt --data-file @kv
volume list
volume drain 9
volume remove @second/
volume drain @second --dry-run
----
name         m
id           1
index        trie
geometry     4 tokens × [full 2×1024 B]
block        8.0 KiB
epoch        1
epoch since  TIME
quota        none
used         0 B
blocks       0
leases       0
stored 12 blocks (96 KiB), 0 were there already, last block 8283b2bad5e4c80f2fe872de0d80b3b2
INDEX  STATE  CAPACITY  USED     BLOCKS  LEFT TO MOVE  RATE  TIME LEFT  VOLUME
0      ok     16 MiB    0 B      0                                      DIR/volume
1      ok     16 MiB    144 KiB  12                                     DIR/second
2      ok     16 MiB    0 B      0                                      DIR/third
penstock: blockstore: volume "9": no such volume: want an index from 0 to 2, or the directory of a volume
exit 3
penstock: blockstore: volume 1 (DIR/second) is not draining: drain it first: refused in this state of the volume
exit 1
would be moved: 12 blocks, 144 KiB

# A prompt that is put while the volume drains is stored on the other volumes.

tokens other 100 16
----

data kv2 2 32768
----

run
volume drain @second/ --wait
volume drain 1 --wait
block put m --tokens-file @other --data-file @kv2
volume list
block verify m --tokens-file @prompt
volume drain 1 --cancel --format json
volume drain 1
volume remove 1 --dry-run
volume remove 1
volume list
volume drain 1
block verify m --tokens-file @prompt
block verify m --tokens-file @other
----
drained: 12 blocks, 144 KiB
drained: 0 blocks, 0 B
stored 4 blocks (32 KiB), 0 were there already, last block b3818af5a37c045619d97386f5323419
INDEX  STATE     CAPACITY  USED     BLOCKS  LEFT TO MOVE  RATE  TIME LEFT  VOLUME
0      ok        16 MiB    48 KiB   4                                      DIR/volume
1      draining  16 MiB    0 B      0       0 B                            DIR/second
2      ok        16 MiB    144 KiB  12                                     DIR/third
  DIR/second: drained; it can be removed
intact 12, absent 0, corrupt 0, failed 0
{
  "volume": "1",
  "blocks": 0,
  "bytes": 0,
  "dry_run": false,
  "cancelled": true,
  "drained": false
}
draining: 0 blocks, 0 B
would be lost: 0 blocks, 0 B
lost: 0 blocks, 0 B
INDEX  STATE    CAPACITY  USED     BLOCKS  LEFT TO MOVE  RATE  TIME LEFT  VOLUME
0      ok       16 MiB    48 KiB   4                                      DIR/volume
1      removed  16 MiB    0 B      0                                      DIR/second
2      ok       16 MiB    144 KiB  12                                     DIR/third
penstock: blockstore: volume 1 (DIR/second) was removed: refused in this state of the volume
exit 1
intact 12, absent 0, corrupt 0, failed 0
intact 4, absent 0, corrupt 0, failed 0

# The node starts without the volume, also if the list of directories still names it.

stop
----
exit 0

start --data=@third
----
ready

run
volume list
block verify m --tokens-file @prompt
----
INDEX  STATE    CAPACITY  USED     BLOCKS  LEFT TO MOVE  RATE  TIME LEFT  VOLUME
0      ok       16 MiB    48 KiB   4                                      DIR/volume
1      removed  16 MiB    0 B      0                                      volume-1
2      ok       16 MiB    144 KiB  12                                     DIR/third
intact 12, absent 0, corrupt 0, failed 0

stop
----
exit 0

start --data=@second --data=@third
----
ready

run
block verify m --tokens-file @other
----
intact 4, absent 0, corrupt 0, failed 0

# A removal by force loses the blocks on the volume. The last volume cannot be removed.

run
volume remove 2
volume remove 2 --force --dry-run
volume remove 2 --force
volume remove 0 --force
volume list
----
penstock: blockstore: volume 2 (DIR/third) is not draining: drain it first: refused in this state of the volume
exit 1
would be lost: 12 blocks, 144 KiB
lost: 12 blocks, 144 KiB
penstock: blockstore: volume 0 (DIR/volume) is the only one that may take new blocks: refused in this state of the volume
exit 1
INDEX  STATE    CAPACITY  USED    BLOCKS  LEFT TO MOVE  RATE  TIME LEFT  VOLUME
0      ok       16 MiB    48 KiB  4                                      DIR/volume
1      removed  16 MiB    0 B     0                                      volume-1
2      removed  16 MiB    0 B     0                                      DIR/third

stop
----
exit 0
