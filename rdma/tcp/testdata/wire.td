# A write of 4096 bytes to offset 8192 of a window, with an immediate.

header write flags=1 imm=7 frames=1 op=4294967297 key=1311768467463790320 offset=8192 length=4096
----
  magic      504e5303
  type       01
  flags      01
  runs       0000
  imm        07000000
  frames     01000000
  op         0100000001000000
  key        f0debc9a78563412
  offset     0020000000000000
  length     0010000000000000
  tableSum   00000000
  piece      00000000
  zero       00000000
  headerSum  47f5fbc4

# One frame of a paged write: two runs, in a table that follows the header.

header write frames=3 piece=2 runs=2 op=4294967301 key=9 length=100
----
  magic      504e5303
  type       01
  flags      00
  runs       0200
  imm        00000000
  frames     03000000
  op         0500000001000000
  key        0900000000000000
  offset     0000000000000000
  length     6400000000000000
  tableSum   00000000
  piece      02000000
  zero       00000000
  headerSum  be4aedb4

table length=100
0+64
4096+36
----
tableSum 0xdf7ecb66
[{offset:0 length:64} {offset:4096 length:36}]

# Runs that do not add up to the frame's length.

table length=100
0+64
4096+35
----
table has 1 bytes less than the frame's 100: malformed frame

table length=100
0+64
4096+37
----
table has more than the frame's 100 bytes: malformed frame

header ack length=16
----
  magic      504e5303
  type       02
  flags      00
  runs       0000
  imm        00000000
  frames     00000000
  op         0000000000000000
  key        0000000000000000
  offset     0000000000000000
  length     1000000000000000
  tableSum   00000000
  piece      00000000
  zero       00000000
  headerSum  af27aa9f

ack op=4294967297 status=2
----
  op         0100000001000000
  status     02
  zero       00000000000000

header message op=6 length=11
----
  magic      504e5303
  type       03
  flags      00
  runs       0000
  imm        00000000
  frames     00000000
  op         0600000000000000
  key        0000000000000000
  offset     0000000000000000
  length     0b00000000000000
  tableSum   00000000
  piece      00000000
  zero       00000000
  headerSum  3967d6d9

header heartbeat
----
  magic      504e5303
  type       04
  flags      00
  runs       0000
  imm        00000000
  frames     00000000
  op         0000000000000000
  key        0000000000000000
  offset     0000000000000000
  length     0000000000000000
  tableSum   00000000
  piece      00000000
  zero       00000000
  headerSum  6f902bae

# A field that the type does not name has to be zero, and limits hold.

header down frames=2 piece=5
----
  magic      504e5303
  type       05
  flags      00
  runs       0000
  imm        00000000
  frames     02000000
  op         0000000000000000
  key        0000000000000000
  offset     0000000000000000
  length     0000000000000000
  tableSum   00000000
  piece      05000000
  zero       00000000
  headerSum  d5881260

header down frames=16
----
does not decode: frame of type 5 with flags 0x0, 0 runs, piece 0 of 16, length 0, offset 0: malformed frame

header heartbeat op=1
----
does not decode: frame of type 4 with flags 0x0, 0 runs, piece 0 of 0, length 0, offset 0: malformed frame

header write frames=1 length=16777217
----
does not decode: frame of type 1 with flags 0x0, 0 runs, piece 0 of 1, length 16777217, offset 0: malformed frame

header write frames=0 length=1
----
does not decode: frame of type 1 with flags 0x0, 0 runs, piece 0 of 0, length 1, offset 0: malformed frame

header write frames=1 runs=1 offset=1 length=1
----
does not decode: frame of type 1 with flags 0x0, 1 runs, piece 0 of 1, length 1, offset 1: malformed frame

# Opening the second of four connections of the second lane of the third rail, for the seventh time.

hello
----
param
  index      0100
  conns      0400
more
  lane       01
  lanes      02
  rail       02
  rails      03
  generation 07000000
  zero       0000000000000000
