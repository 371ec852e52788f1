# The only volume of a store has one slow request. A slow probe leaves it suspect, and starts the count
# of good probes again.
run
tick at=0s suffice=failed
write at=5s took=4s
tick at=6s suffice=failed
due at=6s
probed at=15s took=9s
due at=16s
probed at=21s took=5s
due at=22s
probed at=25s took=3s
due at=26s
probed at=26s took=1ms
due at=27s
probed at=27s took=1ms
due at=28s
probed at=31s took=3s
due at=32s
probed at=32s took=1ms
due at=33s
probed at=33s took=1ms
due at=34s
probed at=34s took=1ms
----
  ok since always [places true, syncs true, reads true] 
* suspect since 5s [places true, syncs true, reads true] a write took 4s
  suspect since 5s [places true, syncs true, reads true] a write took 4s
  suspect since 5s [places true, syncs true, reads true] a write took 4s probe due: true
  suspect since 5s [places true, syncs true, reads true] a write took 4s
  suspect since 5s [places true, syncs true, reads true] a write took 4s probe due: true
  suspect since 5s [places true, syncs true, reads true] a write took 4s
  suspect since 5s [places true, syncs true, reads true] a write took 4s probe due: true
  suspect since 5s [places true, syncs true, reads true] a write took 4s
  suspect since 5s [places true, syncs true, reads true] a write took 4s probe due: true
  suspect since 5s [places true, syncs true, reads true] a write took 4s
  suspect since 5s [places true, syncs true, reads true] a write took 4s probe due: true
  suspect since 5s [places true, syncs true, reads true] a write took 4s
  suspect since 5s [places true, syncs true, reads true] a write took 4s probe due: true
  suspect since 5s [places true, syncs true, reads true] a write took 4s
  suspect since 5s [places true, syncs true, reads true] a write took 4s probe due: true
  suspect since 5s [places true, syncs true, reads true] a write took 4s
  suspect since 5s [places true, syncs true, reads true] a write took 4s probe due: true
  suspect since 5s [places true, syncs true, reads true] a write took 4s
  suspect since 5s [places true, syncs true, reads true] a write took 4s probe due: true
* ok since 34s [places true, syncs true, reads true] 

# The other volume is OK. It takes three slow probes in a row to make the volume fail; a good one between
# them starts their count again.
run
write at=10m took=4s
tick at=10m suffice=ok
due at=10m2s
probed at=10m6s took=4s
due at=10m7s
probed at=10m11s took=4s
due at=10m12s
probed at=10m12s took=1ms
due at=10m13s
probed at=10m17s took=4s
due at=10m18s
probed at=10m22s took=4s late=true
due at=10m23s
probed at=10m27s took=4s
----
* suspect since 10m0s [places true, syncs true, reads true] a write took 4s
  suspect since 10m0s [places true, syncs true, reads true] a write took 4s
  suspect since 10m0s [places true, syncs true, reads true] a write took 4s probe due: true
  suspect since 10m0s [places true, syncs true, reads true] a write took 4s
  suspect since 10m0s [places true, syncs true, reads true] a write took 4s probe due: true
  suspect since 10m0s [places true, syncs true, reads true] a write took 4s
  suspect since 10m0s [places true, syncs true, reads true] a write took 4s probe due: true
  suspect since 10m0s [places true, syncs true, reads true] a write took 4s
  suspect since 10m0s [places true, syncs true, reads true] a write took 4s probe due: true
  suspect since 10m0s [places true, syncs true, reads true] a write took 4s
  suspect since 10m0s [places true, syncs true, reads true] a write took 4s probe due: true
  suspect since 10m0s [places true, syncs true, reads true] a write took 4s
  suspect since 10m0s [places true, syncs true, reads true] a write took 4s probe due: true
* failed since 10m27s [places false, syncs false, reads true] 3 probes in a row took 3s or longer, the last one 4s

# While the other volume is OK, or suspect, a slow probe does not end the state failed, and the time to
# the next probe doubles.
run
due at=10m30s
due at=10m31s
probed at=10m35s took=4s
due at=10m42s
tick at=10m43s suffice=suspect
due at=10m43s
probed at=10m47s took=4s
due at=11m2s
----
  failed since 10m27s [places false, syncs false, reads true] 3 probes in a row took 3s or longer, the last one 4s probe due: true
  failed since 10m27s [places false, syncs false, reads true] 3 probes in a row took 3s or longer, the last one 4s probe due: false
  failed since 10m27s [places false, syncs false, reads true] 3 probes in a row took 3s or longer, the last one 4s
  failed since 10m27s [places false, syncs false, reads true] 3 probes in a row took 3s or longer, the last one 4s probe due: true
  failed since 10m27s [places false, syncs false, reads true] 3 probes in a row took 3s or longer, the last one 4s
  failed since 10m27s [places false, syncs false, reads true] 3 probes in a row took 3s or longer, the last one 4s probe due: false
  failed since 10m27s [places false, syncs false, reads true] 3 probes in a row took 3s or longer, the last one 4s
  failed since 10m27s [places false, syncs false, reads true] 3 probes in a row took 3s or longer, the last one 4s probe due: true

# The other volume fails too. Now the next probe is due at once. A late probe does not end the state failed;
# a slow one does. The next probe is due after 1 s, however often probes failed before.
run
tick at=11m2s suffice=failed
due at=11m2s
probed at=11m3s err=EIO
due at=11m4s
probed at=11m14s took=10s late=true
due at=11m15s
probed at=11m19s took=4s
tick at=11m20s suffice=failed
due at=11m20s
probed at=11m20s err=EIO
due at=11m21s
----
  failed since 10m27s [places false, syncs false, reads true] 3 probes in a row took 3s or longer, the last one 4s
  failed since 10m27s [places false, syncs false, reads true] 3 probes in a row took 3s or longer, the last one 4s probe due: false
  failed since 10m27s [places false, syncs false, reads true] 3 probes in a row took 3s or longer, the last one 4s
  failed since 10m27s [places false, syncs false, reads true] 3 probes in a row took 3s or longer, the last one 4s probe due: true
  failed since 10m27s [places false, syncs false, reads true] 3 probes in a row took 3s or longer, the last one 4s
  failed since 10m27s [places false, syncs false, reads true] 3 probes in a row took 3s or longer, the last one 4s probe due: true
* suspect since 11m19s [places true, syncs true, reads true] recovering: 3 probes in a row took 3s or longer, the last one 4s
  suspect since 11m19s [places true, syncs true, reads true] recovering: 3 probes in a row took 3s or longer, the last one 4s
  suspect since 11m19s [places true, syncs true, reads true] recovering: 3 probes in a row took 3s or longer, the last one 4s probe due: true
* failed since 11m20s [places false, syncs false, reads true] a probe failed: EIO
  failed since 11m20s [places false, syncs false, reads true] a probe failed: EIO probe due: true

# The other volume is suspect. Of a suspect volume slow probes are no fault.
run
tick at=11m21s suffice=suspect
probed at=11m21s took=1ms
due at=11m22s
probed at=11m26s took=4s
due at=11m27s
probed at=11m31s took=4s
due at=11m32s
probed at=11m36s took=4s
due at=11m37s
probed at=11m41s took=4s
----
  failed since 11m20s [places false, syncs false, reads true] a probe failed: EIO
* suspect since 11m21s [places true, syncs true, reads true] recovering: a probe failed: EIO
  suspect since 11m21s [places true, syncs true, reads true] recovering: a probe failed: EIO probe due: true
  suspect since 11m21s [places true, syncs true, reads true] recovering: a probe failed: EIO
  suspect since 11m21s [places true, syncs true, reads true] recovering: a probe failed: EIO probe due: true
  suspect since 11m21s [places true, syncs true, reads true] recovering: a probe failed: EIO
  suspect since 11m21s [places true, syncs true, reads true] recovering: a probe failed: EIO probe due: true
  suspect since 11m21s [places true, syncs true, reads true] recovering: a probe failed: EIO
  suspect since 11m21s [places true, syncs true, reads true] recovering: a probe failed: EIO probe due: true
  suspect since 11m21s [places true, syncs true, reads true] recovering: a probe failed: EIO

# The other volume is OK again, and one more slow probe makes the volume fail.
run
tick at=11m42s suffice=ok
due at=11m42s
probed at=11m46s took=4s
----
  suspect since 11m21s [places true, syncs true, reads true] recovering: a probe failed: EIO
  suspect since 11m21s [places true, syncs true, reads true] recovering: a probe failed: EIO probe due: true
* failed since 11m46s [places false, syncs false, reads true] 3 probes in a row took 3s or longer, the last one 4s

# A request that hangs makes the volume fail, also if the store needs it. At a relapse the first probe
# is due after 1 s, because the store needs the volume.
run
tick at=12m suffice=failed
due at=12m
probed at=12m took=1ms
due at=12m1s
probed at=12m1s took=1ms
due at=12m2s
probed at=12m2s took=1ms
tick at=13m3s oldest=13m suffice=failed
due at=13m3s
due at=13m4s
tick at=13m10s oldest=13m suffice=failed
probed at=13m10s err=EIO
due at=13m11s
----
  failed since 11m46s [places false, syncs false, reads true] 3 probes in a row took 3s or longer, the last one 4s
  failed since 11m46s [places false, syncs false, reads true] 3 probes in a row took 3s or longer, the last one 4s probe due: true
* suspect since 12m0s [places true, syncs true, reads true] recovering: 3 probes in a row took 3s or longer, the last one 4s
  suspect since 12m0s [places true, syncs true, reads true] recovering: 3 probes in a row took 3s or longer, the last one 4s probe due: true
  suspect since 12m0s [places true, syncs true, reads true] recovering: 3 probes in a row took 3s or longer, the last one 4s
  suspect since 12m0s [places true, syncs true, reads true] recovering: 3 probes in a row took 3s or longer, the last one 4s probe due: true
* ok since 12m2s [places true, syncs true, reads true] 
* suspect since 13m3s [places true, syncs true, reads true] a request has not completed for 3s
  suspect since 13m3s [places true, syncs true, reads true] a request has not completed for 3s probe due: false
  suspect since 13m3s [places true, syncs true, reads true] a request has not completed for 3s probe due: true
* failed since 13m10s [places false, syncs false, reads true] a write or sync has not completed for 10s
  failed since 13m10s [places false, syncs false, reads true] a write or sync has not completed for 10s
  failed since 13m10s [places false, syncs false, reads true] a write or sync has not completed for 10s probe due: true
