# Each sector of a page is shown as one letter, '.' for zeroes; pages are separated by blanks.
# Synced bytes survive with every seed.
do
create a 2
write a 0 oooooooo oooooooo
sync a
----

crash seeds=(1,2,3)
----
seed 1: a [oooooooo oooooooo]
seed 2: a [oooooooo oooooooo]
seed 3: a [oooooooo oooooooo]

# A write after the sync survives, vanishes, or tears between sectors.
do
write a 0 nnnnnnnn nnnnnnnn
----

crash seeds=(1,2,3,4,5,6,7,8)
----
seed 1: a [nnnnnnnn nnnnnnnn]
seed 2: a [oooooooo oooooooo]
seed 3: a [nnonnnon ooonnnno]
seed 4: a [nnnnnnnn nnnnnnnn]
seed 5: a [oooooooo oooooooo]
seed 6: a [nnnnnnnn nnnnnnnn]
seed 7: a [oooooooo oooooooo]
seed 8: a [oooooooo oooooooo]

# Of two writes to a page, either may survive.
do
write a 0 mmmmmmmm
----

crash seeds=(1,2,3,4,5,6,7,8)
----
seed 1: a [mmmmmmmm nnnnnnnn]
seed 2: a [oooooooo oooooooo]
seed 3: a [oonnmonn ooonnnno]
seed 4: a [mmmmmmmm nnnnnnnn]
seed 5: a [oooooooo oooooooo]
seed 6: a [mmmmmmmm nnnnnnnn]
seed 7: a [oooooooo oooooooo]
seed 8: a [oooooooo oooooooo]

# An unsynced file may be missing, shorter or empty; a removed one may return, until any file is
# synced.
do
create b 4
write b 1 bbbbbbbb
remove a
----

crash seeds=(1,2,3,4,5,6,7,8)
----
seed 1: a [nnnnnnnn oooooooo]  b [........ bbbbbbbb ........ ........]
seed 2: a [onmmmnoo onoononn]  b [........ ........ ........ ........]
seed 3: nothing
seed 4: b [........ ........ ........ ........]
seed 5: b [........]
seed 6: a [oooooooo oooooooo]  b [........ ........ ........]
seed 7: b [........]
seed 8: a [mnmommon nnnnooon]

do
sync b
----

crash seeds=(1,2,3)
----
seed 1: b [........ bbbbbbbb ........ ........]
seed 2: b [........ bbbbbbbb ........ ........]
seed 3: b [........ bbbbbbbb ........ ........]

# PowerOffAfter fails the power at the third mutation from now.
do
create c 1
sync c
poweroff 2
write c 0 1
write c 0 2
write c 0 3
write c 0 4
read c
sync c
list
----
write c 0 3: memio: write 4096 bytes at 0 of c: the power of this memory device is off
write c 0 4: memio: batch of 1 on mem: the power of this memory device is off
read c: memio: batch of 1 on mem: the power of this memory device is off
sync c: memio: sync 1 files of mem: the power of this memory device is off
list: memio: list mem: the power of this memory device is off

crash seeds=(1,2,3,4,5,6,7,8)
----
seed 1: b [........ bbbbbbbb ........ ........]  c [........]
seed 2: b [........ bbbbbbbb ........ ........]  c [........]
seed 3: b [........ bbbbbbbb ........ ........]  c [1211323.]
seed 4: b [........ bbbbbbbb ........ ........]  c [........]
seed 5: b [........ bbbbbbbb ........ ........]  c [2211332.]
seed 6: b [........ bbbbbbbb ........ ........]  c [31213122]
seed 7: b [........ bbbbbbbb ........ ........]  c [22222222]
seed 8: b [........ bbbbbbbb ........ ........]  c [33333333]
