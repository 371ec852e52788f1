# One failed write makes a volume suspect; three in a row make it fail. A success between them
# resets the count, but does not make the volume ok: only probes do.
run
write took=1ms
write err=EIO
write took=1ms
write err=EIO times=2
write err=EIO
----
  ok since always [places true, syncs true, reads true] 
* suspect since 0s [places true, syncs true, reads true] a write failed: EIO
  suspect since 0s [places true, syncs true, reads true] a write failed: EIO
  suspect since 0s [places true, syncs true, reads true] a write failed: EIO
* failed since 0s [places false, syncs false, reads true] 3 writes failed in a row: EIO

# A failed volume is still read, unless its reads fail as well.
run
read took=1ms
read err=EIO times=15
read took=1ms
read err=EIO times=16
----
  failed since 0s [places false, syncs false, reads true] 3 writes failed in a row: EIO
  failed since 0s [places false, syncs false, reads true] 3 writes failed in a row: EIO
  failed since 0s [places false, syncs false, reads true] 3 writes failed in a row: EIO
* failed since 0s [places false, syncs false, reads false] 16 reads failed in a row: EIO

# Each failed probe doubles the time to the next one.
run
due at=999ms
due at=1s
due at=2s
probed at=2s err=EIO
due at=3s
due at=4s
probed at=4s err=EIO
due at=7s
due at=8s
----
  failed since 0s [places false, syncs false, reads false] 16 reads failed in a row: EIO probe due: false
  failed since 0s [places false, syncs false, reads false] 16 reads failed in a row: EIO probe due: true
  failed since 0s [places false, syncs false, reads false] 16 reads failed in a row: EIO probe due: false
  failed since 0s [places false, syncs false, reads false] 16 reads failed in a row: EIO
  failed since 0s [places false, syncs false, reads false] 16 reads failed in a row: EIO probe due: false
  failed since 0s [places false, syncs false, reads false] 16 reads failed in a row: EIO probe due: true
  failed since 0s [places false, syncs false, reads false] 16 reads failed in a row: EIO
  failed since 0s [places false, syncs false, reads false] 16 reads failed in a row: EIO probe due: false
  failed since 0s [places false, syncs false, reads false] 16 reads failed in a row: EIO probe due: true

# The first good probe makes the volume suspect, the third one makes it ok.
run
probed at=8s took=1ms
due at=8s
due at=9s
probed at=9s took=1ms
due at=10s
probed at=10s took=1ms
due at=20s
----
* suspect since 8s [places true, syncs true, reads true] recovering: 16 reads failed in a row: EIO
  suspect since 8s [places true, syncs true, reads true] recovering: 16 reads failed in a row: EIO probe due: false
  suspect since 8s [places true, syncs true, reads true] recovering: 16 reads failed in a row: EIO probe due: true
  suspect since 8s [places true, syncs true, reads true] recovering: 16 reads failed in a row: EIO
  suspect since 8s [places true, syncs true, reads true] recovering: 16 reads failed in a row: EIO probe due: true
* ok since 10s [places true, syncs true, reads true] 
  ok since 10s [places true, syncs true, reads true]  probe due: false

# A relapse within five minutes waits twice as long for its first probe. An error
# between good probes starts their count again, and a failed probe of a suspect
# volume makes it fail.
run
write err=EIO at=30s
due at=45s
due at=46s
probed at=46s took=1ms
write err=EIO
due at=47s
probed at=47s took=1ms
due at=48s
probed at=48s err=EIO
----
* suspect since 30s [places true, syncs true, reads true] a write failed: EIO
  suspect since 30s [places true, syncs true, reads true] a write failed: EIO probe due: true
  suspect since 30s [places true, syncs true, reads true] a write failed: EIO probe due: false
  suspect since 30s [places true, syncs true, reads true] a write failed: EIO
  suspect since 30s [places true, syncs true, reads true] a write failed: EIO
  suspect since 30s [places true, syncs true, reads true] a write failed: EIO probe due: true
  suspect since 30s [places true, syncs true, reads true] a write failed: EIO
  suspect since 30s [places true, syncs true, reads true] a write failed: EIO probe due: true
* failed since 48s [places false, syncs false, reads true] a probe failed: EIO

# A single failed sync makes the volume fail, because the system may have dropped data that it could
# not write.
run
due at=2m
probed at=2m took=1ms
due at=2m1s
probed at=2m1s took=1ms
due at=2m2s
probed at=2m2s took=1ms
sync at=2m3s err=EIO
----
  failed since 48s [places false, syncs false, reads true] a probe failed: EIO probe due: true
* suspect since 2m0s [places true, syncs true, reads true] recovering: a probe failed: EIO
  suspect since 2m0s [places true, syncs true, reads true] recovering: a probe failed: EIO probe due: true
  suspect since 2m0s [places true, syncs true, reads true] recovering: a probe failed: EIO
  suspect since 2m0s [places true, syncs true, reads true] recovering: a probe failed: EIO probe due: true
* ok since 2m2s [places true, syncs true, reads true] 
* failed since 2m3s [places false, syncs false, reads true] a sync failed: EIO
