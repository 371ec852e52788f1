# An operator drains a volume: it takes no new blocks, but is read and synced, and gets the
# catalogue.
run
order at=1s to=draining
write err=EIO
write err=EIO times=2
----
* draining since 1s [places false, syncs true, reads true] 
* draining since 1s [places false, syncs true, reads true] a write failed: EIO
* failed since 1s [places false, syncs false, reads true] 3 writes failed in a row: EIO

# After a recovery the volume is draining again.
run
due at=5s
probed at=5s took=1ms
due at=6s
probed at=6s took=1ms
due at=7s
probed at=7s took=1ms
order at=8s to=ok
order at=9s to=draining
order at=10s to=removed
sync err=EIO
due at=1h
----
  failed since 1s [places false, syncs false, reads true] 3 writes failed in a row: EIO probe due: true
* draining since 5s [places false, syncs true, reads true] recovering: 3 writes failed in a row: EIO
  draining since 5s [places false, syncs true, reads true] recovering: 3 writes failed in a row: EIO probe due: true
  draining since 5s [places false, syncs true, reads true] recovering: 3 writes failed in a row: EIO
  draining since 5s [places false, syncs true, reads true] recovering: 3 writes failed in a row: EIO probe due: true
* draining since 5s [places false, syncs true, reads true] 
* ok since 8s [places true, syncs true, reads true] 
* draining since 9s [places false, syncs true, reads true] 
* removed since 10s [places false, syncs false, reads false] 
* removed since 10s [places false, syncs false, reads false] a sync failed: EIO
  removed since 10s [places false, syncs false, reads false] a sync failed: EIO probe due: false
