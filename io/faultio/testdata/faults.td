call
create a 2
create b 1
write a 0 aaaaaaaa bbbbbbbb
read a 0 2
----
create a 2: ok
create b 1: ok
write a 0 aaaaaaaa bbbbbbbb: ok
read a 0 2: aaaaaaaa bbbbbbbb

# An error: no byte is transferred.
rules
(Err EIO (And Writes (Offset 4096 8192)))
----

call
write a 0 cccccccc
write a 1 dddddddd
read a 0 2
----
write a 0 cccccccc: ok
write a 1 dddddddd: FAULT input/output error
read a 0 2: cccccccc bbbbbbbb

# The fourth and the fifth read.
rules
(Err EIO (And Reads (After 3) (Count 2)))
----

call
read a 0 1
read a 0 1
read a 0 1
read a 0 1
read a 0 1
read a 0 1
----
read a 0 1: cccccccc
read a 0 1: cccccccc
read a 0 1: cccccccc
read a 0 1: FAULT input/output error
read a 0 1: FAULT input/output error
read a 0 1: cccccccc

# A short transfer: the first half is transferred, and the device returns an error.
rules
(Short Writes)
----

call
write a 0 eeeeeeee ffffffff
read a 0 2
----
write a 0 eeeeeeee ffffffff: FAULT unexpected EOF
read a 0 2: eeeeeeee bbbbbbbb

# Every kind of call can fail.
rules
(Err EROFS Creates) (Err ENFILE Opens) (Err EBUSY Removes) (Err EIO (And Syncs (File "a")))
----

call
create c 1
open a
close b
remove b
sync a
open nothing
----
create c 1: FAULT read-only file system
open a: FAULT too many open files in system
close b: ok
remove b: FAULT device or resource busy
sync a: FAULT input/output error
open nothing: FAULT too many open files in system

rules
(ENOSPC (Or Writes Creates))
----

call
create c 1
write a 0 gggggggg
remove b
sync a
----
create c 1: FAULT no space left on volume (no space left on device)
write a 0 gggggggg: FAULT no space left on volume (no space left on device)
remove b: ok
sync a: ok

pending
----

# Silent faults: the call succeeds and the bytes are wrong.
rules
(Torn Writes)
----

call
write a 0 hhhhhhhh iiiiiiii
read a 0 2
----
write a 0 hhhhhhhh iiiiiiii: ok
read a 0 2: eeehheeh ibbbibii

rules
(Torn (And Reads (Count 1)))
----

call
read a 1 1
read a 1 1
----
read a 1 1: ...bi..i
read a 1 1: ibbbibii

rules
(Flip 4096 Writes) (Flip 0 (And Reads (Count 1)))
----

call
write a 0 jjjjjjjj
read a 0 1
read a 0 1
----
write a 0 jjjjjjjj: ok
read a 0 1: !!jjjjjj
read a 0 1: j!jjjjjj

pending
----
fault 12: (Torn Writes) on write of 8192 bytes at 0 of "a"
fault 13: (Torn (And Reads (Count 1))) on read of 4096 bytes at 4096 of "a"
fault 14: (Flip 4096 Writes) on write of 1 bytes at 512 of "a"
fault 15: (Flip 0 (And Reads (Count 1))) on read of 1 bytes at 0 of "a"

# A torn write of the bytes that are already there changes nothing, and is no fault.
rules
----

call
write a 0 kkkkkkkk
----
write a 0 kkkkkkkk: ok

rules
(Torn Writes)
----

call
write a 0 kkkkkkkk
read a 0 1
----
write a 0 kkkkkkkk: ok
read a 0 1: kkkkkkkk

pending
----
