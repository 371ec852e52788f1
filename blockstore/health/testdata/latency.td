# A request counts before it completes. After 3 s the volume is suspect, after 10 s it has failed.
# If the request is a read, the volume is not read any more.
run
tick at=1s oldest=0s read=0s
tick at=3s oldest=0s read=0s
tick at=9s oldest=0s read=0s
tick at=10s oldest=0s read=0s
tick at=60s oldest=0s read=0s
----
  ok since always [places true, syncs true, reads true] 
* suspect since 3s [places true, syncs true, reads true] a request has not completed for 3s
  suspect since 3s [places true, syncs true, reads true] a request has not completed for 3s
* failed since 10s [places false, syncs false, reads false] a read has not completed for 10s
  failed since 10s [places false, syncs false, reads false] a read has not completed for 10s

# The request never completes, but the volume works again: the volume recovers, and requests that
# started before do not count any more.
run
due at=60s
probed at=60s took=2ms
tick at=60s
due at=61s
probed at=61s took=2ms
due at=62s
probed at=62s took=2ms
tick at=70s
----
  failed since 10s [places false, syncs false, reads false] a read has not completed for 10s probe due: true
* suspect since 1m0s [places true, syncs true, reads true] recovering: a read has not completed for 10s
  suspect since 1m0s [places true, syncs true, reads true] recovering: a read has not completed for 10s
  suspect since 1m0s [places true, syncs true, reads true] recovering: a read has not completed for 10s probe due: true
  suspect since 1m0s [places true, syncs true, reads true] recovering: a read has not completed for 10s
  suspect since 1m0s [places true, syncs true, reads true] recovering: a read has not completed for 10s probe due: true
* ok since 1m2s [places true, syncs true, reads true] 
  ok since 1m2s [places true, syncs true, reads true] 

# While a request is outstanding for long, good probes do not make the volume ok.
run
tick at=8m3s oldest=8m
due at=8m4s
probed at=8m4s took=1ms
tick at=8m5s oldest=8m
due at=8m5s
probed at=8m5s took=1ms
tick at=8m6s oldest=8m
due at=8m6s
probed at=8m6s took=1ms
tick at=8m10s oldest=8m
due at=8m11s
probed at=8m11s took=1ms
tick at=8m12s
due at=8m12s
probed at=8m12s took=1ms
due at=8m13s
probed at=8m13s took=1ms
----
* suspect since 8m3s [places true, syncs true, reads true] a request has not completed for 3s
  suspect since 8m3s [places true, syncs true, reads true] a request has not completed for 3s probe due: true
  suspect since 8m3s [places true, syncs true, reads true] a request has not completed for 3s
  suspect since 8m3s [places true, syncs true, reads true] a request has not completed for 3s
  suspect since 8m3s [places true, syncs true, reads true] a request has not completed for 3s probe due: true
  suspect since 8m3s [places true, syncs true, reads true] a request has not completed for 3s
  suspect since 8m3s [places true, syncs true, reads true] a request has not completed for 3s
  suspect since 8m3s [places true, syncs true, reads true] a request has not completed for 3s probe due: true
  suspect since 8m3s [places true, syncs true, reads true] a request has not completed for 3s
* failed since 8m10s [places false, syncs false, reads true] a write or sync has not completed for 10s
  failed since 8m10s [places false, syncs false, reads true] a write or sync has not completed for 10s probe due: true
* suspect since 8m11s [places true, syncs true, reads true] recovering: a write or sync has not completed for 10s
  suspect since 8m11s [places true, syncs true, reads true] recovering: a write or sync has not completed for 10s
  suspect since 8m11s [places true, syncs true, reads true] recovering: a write or sync has not completed for 10s probe due: true
  suspect since 8m11s [places true, syncs true, reads true] recovering: a write or sync has not completed for 10s
  suspect since 8m11s [places true, syncs true, reads true] recovering: a write or sync has not completed for 10s probe due: true
* ok since 8m13s [places true, syncs true, reads true] 

# A request that completed late makes the volume suspect.
run
read at=20m took=5s
due at=20m1s
probed at=20m1s took=1ms
due at=20m2s
probed at=20m2s took=1ms
due at=20m3s
probed at=20m3s took=1ms
----
* suspect since 20m0s [places true, syncs true, reads true] a read took 5s
  suspect since 20m0s [places true, syncs true, reads true] a read took 5s probe due: true
  suspect since 20m0s [places true, syncs true, reads true] a read took 5s
  suspect since 20m0s [places true, syncs true, reads true] a read took 5s probe due: true
  suspect since 20m0s [places true, syncs true, reads true] a read took 5s
  suspect since 20m0s [places true, syncs true, reads true] a read took 5s probe due: true
* ok since 20m3s [places true, syncs true, reads true] 

# The latency of a volume is compared with that of the others. A volume with a mean above 100 ms is
# suspect only if the others are much faster; below 100 ms it is ok.
run
read at=30m took=500ms times=31
tick others=2ms
read took=500ms
tick
tick others=100ms
tick others=2ms
----
  ok since 20m3s [places true, syncs true, reads true] 
  ok since 20m3s [places true, syncs true, reads true] 
  ok since 20m3s [places true, syncs true, reads true] 
  ok since 20m3s [places true, syncs true, reads true] 
  ok since 20m3s [places true, syncs true, reads true] 
* suspect since 30m0s [places true, syncs true, reads true] requests take 500ms, those of other volumes 2ms

# A write or a sync that hangs makes the volume fail; it is still read until a read hangs.
run
due at=31m
probed at=31m took=1ms
due at=31m1s
probed at=31m1s took=1ms
due at=31m2s
probed at=31m2s took=1ms
tick at=40m10s oldest=40m
tick at=40m20s oldest=40m read=40m11s
tick at=40m21s oldest=40m read=40m11s
due at=40m22s
probed at=40m22s took=1ms
----
  suspect since 30m0s [places true, syncs true, reads true] requests take 500ms, those of other volumes 2ms probe due: true
  suspect since 30m0s [places true, syncs true, reads true] requests take 500ms, those of other volumes 2ms
  suspect since 30m0s [places true, syncs true, reads true] requests take 500ms, those of other volumes 2ms probe due: true
  suspect since 30m0s [places true, syncs true, reads true] requests take 500ms, those of other volumes 2ms
  suspect since 30m0s [places true, syncs true, reads true] requests take 500ms, those of other volumes 2ms probe due: true
* ok since 31m2s [places true, syncs true, reads true] 
* failed since 40m10s [places false, syncs false, reads true] a write or sync has not completed for 10s
  failed since 40m10s [places false, syncs false, reads true] a write or sync has not completed for 10s
* failed since 40m10s [places false, syncs false, reads false] a read has not completed for 10s
  failed since 40m10s [places false, syncs false, reads false] a read has not completed for 10s probe due: true
* suspect since 40m22s [places true, syncs true, reads true] recovering: a read has not completed for 10s
