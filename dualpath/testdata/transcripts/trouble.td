# What goes wrong, and what comes of it.

planner alpha=100000 beta=100000 minpart=256
----

up group=1 role=prefill engines=(1@1)
----
nothing

up group=2 role=decode engines=(2@2) hbm=100000
----
nothing

submit id=1 prompt=8292 hit=8192
----
nothing

fetch group=2
----
nothing

fetch group=1
----
1 assign request 1: prefill engine 1
2 assign request 1: decode engine 2
3 start request 1: prefill 1, decode 2; prefill [0, 4096); decode [4096, 8192)

# Each side should take 410 ms. The decode side is done; the prefill side has brought a sixteenth of its part in 400 ms.

progress at=390 request=1 side=decode upto=8192
----
nothing

progress at=400 request=1 side=prefill upto=256
----
nothing

fetch group=2 queue=(0)
----
nothing

tick at=401
----
4 cut request 1: prefill side, engine 1

# It stops at 320; the decode side reads the rest.

stopped at=403 request=1 side=prefill upto=320
----
5 read request 1: decode side, engine 2; decode [320, 4096)

progress at=800 request=1 side=decode upto=4096
----
nothing

explain request=1
----
   0.000  decode group 2: least tokens of all groups (8292 with this request)
   0.000  prefill engine 1: least tokens (0) of 1 with a short reading queue; 0 more with a long one, of 1 in the group
   0.000  decode engine 2: fewest requests (0) of those that stay below Z = 8706 with 8292 tokens more (1 queued fit)
   0.000  started on engines 1 and 2: prefill side reads 4096 of 8192 cached tokens
   0.000  read queues: 0 tokens on the prefill side, 0 on the decode side
   0.390  decode side: read up to 8192
   0.401  prefill side is slow: 6015 ms left there, 384 ms on the other side; the read is cut
   0.403  prefill side: stopped at 320 of 4096
   0.403  decode side: reads [320, 4096) too
   0.800  decode side: read up to 4096

# A tail that is overdue is read by both; the first to have it counts.

submit at=1000 id=2 prompt=612 hit=512
----
nothing

fetch group=2 queue=(0)
----
nothing

fetch group=1 queue=(0)
----
6 assign request 2: prefill engine 1
7 assign request 2: decode engine 2
8 start request 2: prefill 1, decode 2; prefill [0, 256); decode [256, 512)

progress at=1030 request=2 side=prefill upto=256
----
nothing

progress at=1031 request=2 side=decode upto=448
----
nothing

fetch group=1 queue=(0)
----
nothing

tick at=1100
----
9 read request 2: prefill side, engine 1; prefill [448, 512); hedge

progress at=1105 request=2 side=prefill upto=512
----
10 drop request 2: decode side, engine 2

explain request=2
----
   1.000  decode group 2: least tokens of all groups (8904 with this request)
   1.000  prefill engine 1: least tokens (8292) of 1 with a short reading queue; 0 more with a long one, of 1 in the group
   1.000  decode engine 2: fewest requests (1) of those that stay below Z = 9349 with 612 tokens more (1 queued fit)
   1.000  started on engines 1 and 2: prefill side reads 256 of 512 cached tokens
   1.000  read queues: 0 tokens on the prefill side, 0 on the decode side
   1.030  prefill side: read up to 256
   1.100  prefill side: reads [448, 512) too
   1.105  prefill side: read up to 512

# Storage does not have a block any more: those tokens are recomputed, the rest of the prefix is still used.

submit at=2000 id=3 prompt=2148 hit=2048
----
nothing

fetch group=2 queue=(0)
----
nothing

fetch group=1 queue=(0)
----
11 assign request 3: prefill engine 1
12 assign request 3: decode engine 2
13 start request 3: prefill 1, decode 2; prefill [0, 1024); decode [1024, 2048)

stopped at=2010 request=3 side=prefill upto=128 gone
----
14 recompute request 3: engine 1; prefill [128, 1024); no longer in storage

# An error of one side's NIC: the other side reads it, after its own part.

stopped at=2020 request=3 side=decode upto=1088 failed
----
15 read request 3: prefill side, engine 1; prefill [1088, 2048)

explain request=3
----
   2.000  decode group 2: least tokens of all groups (11052 with this request)
   2.000  prefill engine 1: least tokens (8904) of 1 with a short reading queue; 0 more with a long one, of 1 in the group
   2.000  decode engine 2: fewest requests (2) of those that stay below Z = 11604 with 2148 tokens more (1 queued fit)
   2.000  started on engines 1 and 2: prefill side reads 1024 of 2048 cached tokens
   2.000  read queues: 0 tokens on the prefill side, 0 on the decode side
   2.010  prefill side: stopped at 128 of 1024
   2.010  tokens [128, 1024) are recomputed: no longer in storage
   2.020  decode side: stopped at 1088 of 2048
   2.020  prefill side: reads [1088, 2048) too

# The decode group dies: both engines forget the request, and it waits for another group.

submit at=3000 id=4 prompt=1124 hit=1024
----
nothing

fetch group=2 queue=(0)
----
nothing

fetch group=1 queue=(0)
----
16 assign request 4: prefill engine 1
17 assign request 4: decode engine 2
18 start request 4: prefill 1, decode 2; prefill [0, 512); decode [512, 1024)

down at=3010 group=2
----
19 abort request 4: engine 1; its group is gone
replan request 4; its group is gone
20 abort request 3: engine 1; its group is gone
replan request 3; its group is gone
21 abort request 2: engine 1; its group is gone
replan request 2; its group is gone
22 abort request 1: engine 1; its group is gone
replan request 1; its group is gone

up at=3020 group=3 role=decode engines=(5@5) hbm=100000
----
nothing

fetch group=1 queue=(0)
----
23 assign request 1: prefill engine 1
24 assign request 1: decode engine 5
25 start request 1: prefill 1, decode 5; prefill [0, 4096); decode [4096, 8192)
26 assign request 2: prefill engine 1
27 assign request 2: decode engine 5
28 start request 2: prefill 1, decode 5; prefill [0, 256); decode [256, 512)
29 assign request 3: prefill engine 1
30 assign request 3: decode engine 5
31 start request 3: prefill 1, decode 5; prefill [0, 1024); decode [1024, 2048)
32 assign request 4: prefill engine 1
33 assign request 4: decode engine 5
34 start request 4: prefill 1, decode 5; prefill [0, 512); decode [512, 1024)

fetch at=3030 group=3
----
nothing

# New weights: what is being loaded is of no use.

epoch at=3040 ns=0 to=1
----
{Queued:0 Prefilling:4 Decoding:0 Exact:0}
35 abort request 4: engine 1; the weights have changed
36 abort request 4: engine 5; the weights have changed
replan request 4; the weights have changed
37 abort request 3: engine 1; the weights have changed
38 abort request 3: engine 5; the weights have changed
replan request 3; the weights have changed
39 abort request 2: engine 1; the weights have changed
40 abort request 2: engine 5; the weights have changed
replan request 2; the weights have changed
41 abort request 1: engine 1; the weights have changed
42 abort request 1: engine 5; the weights have changed
replan request 1; the weights have changed

submit id=5 prompt=500 hit=448 epoch=0
----
nothing

fetch group=1 queue=(0)
----
43 assign request 1: prefill engine 1
44 assign request 1: decode engine 5
45 start request 1: prefill 1, decode 5
46 recompute request 1: engine 1; prefill [0, 8192); the weights have changed
47 assign request 2: prefill engine 1
48 assign request 2: decode engine 5
49 start request 2: prefill 1, decode 5
50 recompute request 2: engine 1; prefill [0, 512); the weights have changed
51 assign request 3: prefill engine 1
52 assign request 3: decode engine 5
53 start request 3: prefill 1, decode 5
54 recompute request 3: engine 1; prefill [0, 2048); the weights have changed
55 assign request 4: prefill engine 1
56 assign request 4: decode engine 5
57 start request 4: prefill 1, decode 5
58 recompute request 4: engine 1; prefill [0, 1024); the weights have changed
59 assign request 5: prefill engine 1
60 assign request 5: decode engine 5
61 start request 5: prefill 1, decode 5
62 recompute request 5: engine 1; prefill [0, 448); the weights have changed

fetch group=3
----
nothing

# A group that does not fetch for five seconds is gone. Deadlines end what waits.

submit at=7000 id=6 prompt=500 deadline=8000
----
nothing

fetch group=3
----
nothing

tick at=8100
----
63 abort request 5: engine 5; its group is gone
replan request 5; its group is gone
64 abort request 4: engine 5; its group is gone
replan request 4; its group is gone
65 abort request 3: engine 5; its group is gone
replan request 3; its group is gone
66 abort request 2: engine 5; its group is gone
replan request 2; its group is gone
67 abort request 1: engine 5; its group is gone
replan request 1; its group is gone
68 reject request 6; past its deadline

tick at=8500
----
nothing

stats
----
{Submitted:6 Started:13 Rejected:1 Replanned:13 Finished:0 PartsPrefill:10 PartsDecode:9 TokensPrefill:12800 TokensDecode:15552 Splits:8 Cuts:1 Hedges:1 Recomputes:6 Aborted:0 Switched:0 SwitchesFailed:0 Late:0 Queued:5 Loading:0 Serving:5 PrefillRate:0}

# Engine 2 has lost its compute network: all that it begins fails at once, so it always looks idle. A request that failed
# there goes elsewhere; after the second failure in a row nobody goes there until the cooldown (2 s) is over.

planner
----

up group=1 role=prefill engines=(1@1)
----
nothing

up group=2 role=decode engines=(2@2) hbm=10000
----
nothing

up group=3 role=decode engines=(3@3) hbm=10000
----
nothing

submit id=1 prompt=300 hit=256
----
nothing

fetch group=2
----
nothing

fetch group=1
----
1 assign request 1: prefill engine 1
2 assign request 1: decode engine 2
3 start request 1: prefill 1, decode 2; prefill [0, 128); decode [128, 256)

failed request=1 side=decode
----
4 abort request 1: engine 1; an engine could not do its part
replan request 1; an engine could not do its part

fetch group=2
----
nothing

fetch group=3
----
nothing

fetch group=1
----
5 assign request 1: prefill engine 1
6 assign request 1: decode engine 3
7 start request 1: prefill 1, decode 3; decode [0, 256)

finished request=1 side=prefill
----
prefilled request 1

finished request=1 side=decode
----
done request 1

fetch group=2
----
nothing

fetch group=3
----
nothing

fetch group=1
----
nothing

submit id=2 prompt=300
----
nothing

fetch group=2
----
nothing

fetch group=1
----
8 assign request 2: prefill engine 1
9 assign request 2: decode engine 2
10 start request 2: prefill 1, decode 2

failed request=2 side=decode
----
11 abort request 2: engine 1; an engine could not do its part
replan request 2; an engine could not do its part

fetch group=3
----
nothing

fetch group=1
----
12 assign request 2: prefill engine 1
13 assign request 2: decode engine 3
14 start request 2: prefill 1, decode 3

submit id=3 prompt=300
----
nothing

fetch group=2
----
nothing

fetch group=3
----
nothing

fetch at=10600 group=2
----
nothing

submit id=4 prompt=300
----
nothing

fetch group=2
----
nothing
