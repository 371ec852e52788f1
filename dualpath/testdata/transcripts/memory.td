# Each engine has a buffer in DRAM besides its device memory. A block takes 100 bytes of the buffer while it passes, its
# checksums one byte for as long as the request is under way, the request 10. A request of 10 blocks takes 1,020 bytes of the
# decode engine's, for the whole prompt passes there. Of the prefill engine's it takes 20, and 100 for each block that is read
# on that side.

planner block=10 minpart=10 rate=1000
----

up group=1 role=prefill engines=(1@1) hbm=300 buffer=500
----
nothing

up group=2 role=decode engines=(2@2) hbm=1000 longest=400 buffer=3000
----
nothing

# Half of the hit would be five blocks on each side; the prefill side's buffer has room for four. Requests 2 and 3 have none
# left there, so that the decode side reads; request 3 finds no room in the decode engine's buffer and waits. It holds nothing
# meanwhile.

submit id=1 prompt=100 hit=100
----
nothing

submit id=2 prompt=100 hit=100
----
nothing

submit id=3 prompt=100 hit=100
----
nothing

fetch group=1
----
1 assign request 1: prefill engine 1
2 assign request 1: decode engine 2
3 start request 1: prefill 1, decode 2; prefill [0, 40); decode [40, 100)
4 assign request 2: prefill engine 1
5 assign request 2: decode engine 2
6 start request 2: prefill 1, decode 2; decode [0, 100)

state
----
prefill group 1
  node 1: read queue 40 at 1000 tokens/s
    engine 1: tok 200, seq 2, hbm 100, buffer 60
decode group 2, 1 queued, total 300
  node 2: read queue 160 at 1000 tokens/s
    engine 2: tok 200, seq 2, hbm 800, buffer 960
waiting 1, loading 2

# The prefill side's part cannot be read there. The decode side reads it after its own, for it has room for the whole prompt.

stopped request=1 side=prefill upto=0 failed
----
nothing

progress request=1 side=decode upto=100
----
7 read request 1: decode side, engine 2; decode [0, 40)

# The decode side of request 2 fails: the prefill side's buffer has no room for what is left, and waiting for room would hold
# what others wait for. It is recomputed.

stopped request=2 side=decode upto=0 failed
----
8 recompute request 2: engine 1; prefill [0, 100); no longer in storage

# Request 1 is computed: what passed through the buffers has passed.

finished request=1 side=prefill
----
prefilled request 1

fetch group=2 buffer=(1980)
----
nothing

fetch group=1 tok=(100) hbm=(200) buffer=(480)
----
9 assign request 3: prefill engine 1
10 assign request 3: decode engine 2
11 start request 3: prefill 1, decode 2; prefill [0, 40); decode [40, 100)

# What no engine could ever take is rejected at once.

submit id=4 prompt=310
----
12 reject request 4; larger than any engine's buffer: 3141, at most 3000

submit id=5 prompt=401
----
13 reject request 5; the prompt is longer than any engine accepts: 401, at most 400

submit id=6 prompt=300
----
14 reject request 6; larger than any engine's buffer: 3040, at most 3000

submit id=7 prompt=100 out=901
----
15 reject request 7; longer than any decode engine's HBM: 1010, at most 1000

# Request 8 is within all limits until the prefill group comes back with less memory.

submit id=8 prompt=290
----
nothing

up group=1 role=prefill engines=(1@1) hbm=200 buffer=500
----
16 abort request 3: engine 2; its group is gone
replan request 3; its group is gone
17 abort request 2: engine 2; its group is gone
replan request 2; its group is gone

fetch group=2 tok=(0) hbm=(1000) buffer=(3000)
----
nothing

fetch group=1
----
18 assign request 2: prefill engine 1
19 assign request 2: decode engine 2
20 start request 2: prefill 1, decode 2; prefill [0, 40); decode [40, 100)
21 assign request 3: prefill engine 1
22 assign request 3: decode engine 2
23 start request 3: prefill 1, decode 2; decode [0, 100)
24 reject request 8; longer than any prefill engine's device memory: 290, at most 200
