# The planner restarted: groups come up and report what they hold. What was started is not planned again, and all of it counts.

planner
----

submit id=7 prompt=100
----
nothing

up group=1 role=prefill engines=(1@1,2@1) holding=(5@1#41,6@2#42)
----
nothing

up group=2 role=decode engines=(3@2) hbm=1000 holding=(5@3#41)
----
nothing

# Request 7 was submitted again by its gateway. A decode group was assigned it and has not heard of its start: it is told to
# leave it.

up group=4 role=decode engines=(4@4) hbm=1000 holding=(7@4)
----
43 abort request 7: engine 4; its group is gone

fetch group=1
----
44 assign request 7: prefill engine 1
45 assign request 7: decode engine 3
46 start request 7: prefill 1, decode 3

finished request=5 side=decode
----
47 abort request 5: engine 1
done request 5

# Group 2 comes up once more, without request 6, of which only the prefill group knows.

up group=2 role=decode engines=(3@2) hbm=1000
----
48 abort request 7: engine 1; its group is gone
replan request 7; its group is gone

state
----
prefill group 1
  node 1: read queue 0 at 10000 tokens/s
    engine 1: tok 200, seq 2
    engine 2: tok 100, seq 1
decode group 2, 0 queued, total 0
  node 2: read queue 0 at 10000 tokens/s
    engine 3: tok 0, seq 0, hbm 1000
decode group 4, 0 queued, total 100
  node 4: read queue 0 at 10000 tokens/s
    engine 4: tok 100, seq 1, hbm 872
waiting 1, loading 0

stats
----
{Submitted:1 Started:1 Rejected:0 Replanned:1 Finished:1 PartsPrefill:0 PartsDecode:0 TokensPrefill:0 TokensDecode:0 Splits:0 Cuts:0 Hedges:0 Recomputes:0 Aborted:0 Switched:0 SwitchesFailed:0 Late:0 Queued:1 Loading:0 Serving:2 PrefillRate:0}

# A decode group loses touch and comes back with one of its two requests: that one goes on, nobody is told anything; the
# other is planned anew.

planner
----

up group=1 role=prefill engines=(1@1)
----
nothing

up group=2 role=decode engines=(2@2) hbm=1000
----
nothing

submit id=1 prompt=300 hit=256
----
nothing

submit id=2 prompt=300 hit=256
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
4 assign request 2: prefill engine 1
5 assign request 2: decode engine 2
6 start request 2: prefill 1, decode 2; prefill [0, 128); decode [128, 256)

up group=2 role=decode engines=(2@2) hbm=1000 holding=(1@2#3)
----
7 abort request 2: engine 1; its group is gone
replan request 2; its group is gone

fetch group=2
----
nothing

progress at=20 request=1 side=prefill upto=128
----
nothing

fetch group=1
----
8 assign request 2: prefill engine 1
9 assign request 2: decode engine 2
10 start request 2: prefill 1, decode 2; prefill [0, 128); decode [128, 256)

state
----
prefill group 1
  node 1: read queue 384 at 10000 tokens/s
    engine 1: tok 900, seq 3
decode group 2, 0 queued, total 600
  node 2: read queue 384 at 10000 tokens/s
    engine 2: tok 600, seq 2, hbm 360
waiting 0, loading 2

# The session of a decode group breaks while the planner sends it the start of request 1. The group returns with the request,
# without its start: the request is planned anew on both sides.

planner
----

up group=1 role=prefill engines=(1@1)
----
nothing

up group=2 role=decode engines=(2@2) hbm=1000
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

up group=2 role=decode engines=(2@2) hbm=1000 holding=(1@2)
----
4 abort request 1: engine 1; its group is gone
5 abort request 1: engine 2; its group is gone
replan request 1; its group is gone

fetch group=2
----
nothing

fetch group=1
----
6 assign request 1: prefill engine 1
7 assign request 1: decode engine 2
8 start request 1: prefill 1, decode 2; prefill [0, 128); decode [128, 256)

explain request=1
----
   0.020  decode group 2: least tokens of all groups (300 with this request)
   0.020  prefill engine 1: least tokens (0) of 1 with a short reading queue; 0 more with a long one, of 1 in the group
   0.020  decode engine 2: fewest requests (0) of those that stay below Z = 315 with 300 tokens more (1 queued fit)
   0.020  started on engines 1 and 2: prefill side reads 128 of 256 cached tokens
   0.020  read queues: 0 tokens on the prefill side, 0 on the decode side
   0.020  engine 2 does not have its start
   0.020  decode group 2: least tokens of all groups (600 with this request)
   0.020  prefill engine 1: least tokens (300) of 1 with a short reading queue; 0 more with a long one, of 1 in the group
   0.020  decode engine 2: fewest requests (1) of those that stay below Z = 630 with 300 tokens more (1 queued fit)
   0.020  started on engines 1 and 2: prefill side reads 128 of 256 cached tokens
   0.020  read queues: 128 tokens on the prefill side, 128 on the decode side

# A decode group was silent for so long that another has its request by now; when it comes back with the request, it is
# told to leave it.

planner
----

up group=1 role=prefill engines=(1@1)
----
nothing

up group=2 role=decode engines=(2@2) hbm=1000
----
nothing

submit id=1 prompt=300 hit=256
----
nothing

fetch group=2
----
nothing

fetch at=8000 group=1
----
1 assign request 1: prefill engine 1
2 assign request 1: decode engine 2
3 start request 1: prefill 1, decode 2; prefill [0, 128); decode [128, 256)

tick at=8100
----
4 abort request 1: engine 1; its group is gone
replan request 1; its group is gone

up group=3 role=decode engines=(3@3) hbm=1000
----
nothing

fetch group=3
----
nothing

up group=2 role=decode engines=(2@2) hbm=1000 holding=(1@2)
----
5 abort request 1: engine 2; its group is gone

# The planner ended while it was telling the starts of requests 1 and 2: each side reports what it knows, the prefill side
# first. Request 1 is planned anew, as its decode engine has not heard of the start, request 2, as neither has; request 3, of
# which the decode side is silent, is given up after the time a group has to come back.

planner
----

up group=1 role=prefill engines=(1@1) holding=(1@1#7,2@1,3@1#6)
----
8 abort request 2: engine 1; its group is gone

up group=2 role=decode engines=(2@2) hbm=10000 holding=(1@2)
----
9 abort request 1: engine 1; its group is gone
10 abort request 1: engine 2; its group is gone
replan request 1; its group is gone

fetch group=2
----
nothing

fetch group=1
----
11 assign request 1: prefill engine 1
12 assign request 1: decode engine 2
13 start request 1: prefill 1, decode 2
14 assign request 2: prefill engine 1
15 assign request 2: decode engine 2
16 start request 2: prefill 1, decode 2

fetch at=12000 group=1
----
nothing

fetch group=2
----
nothing

tick at=13200
----
17 abort request 3: engine 1; its group is gone
replan request 3; its group is gone

explain request=3
----
   8.100  found with engine 1, as its group reports
  13.200  no decode engine has it; planned anew

# The same, the decode side first: it is decoding request 4, whose prefill is done, and that is nobody else's matter.

planner
----

up group=2 role=decode engines=(2@2) hbm=10000 holding=(4@2#9,5@2#8)
----
nothing

submit id=4 prompt=100
----
10 reject request 4; a request of that ID is being served

up group=1 role=prefill engines=(1@1) holding=(5@1#8)
----
nothing

fetch group=1
----
nothing

fetch group=2
----
nothing

finished request=5 attempt=8 side=prefill
----
prefilled request 5

finished request=5 attempt=8 side=decode
----
done request 5

finished request=4 attempt=9 side=decode
----
done request 4

state
----
prefill group 1
  node 1: read queue 0 at 10000 tokens/s
    engine 1: tok 100, seq 1
decode group 2, 0 queued, total 200
  node 2: read queue 0 at 10000 tokens/s
    engine 2: tok 200, seq 2, hbm 9744
waiting 0, loading 0

# Held by an engine that was told in vain: the gateway has submitted again, and another engine has begun.

planner
----

up group=1 role=prefill engines=(1@1)
----
nothing

up group=2 role=decode engines=(2@2) hbm=10000
----
nothing

submit id=1 prompt=100
----
nothing

fetch group=1
----
1 assign request 1: prefill engine 1
2 assign request 1: decode engine 2
3 start request 1: prefill 1, decode 2

up group=3 role=decode engines=(3@3) hbm=10000 holding=(1@3#5)
----
6 abort request 1: engine 3; its group is gone

fetch group=2
----
nothing

# The leaders are of an older version, and do not report what their engines read. When a read stops, a planner that was restarted
# plans the request anew, because no engine would read the rest.

planner
----

up group=1 role=prefill engines=(1@1) holding=(1@1#7)
----
nothing

up group=2 role=decode engines=(2@2) hbm=10000 holding=(1@2#7)
----
nothing

stopped request=1 attempt=7 side=prefill upto=16 failed
----
8 abort request 1: engine 1; an engine could not do its part
9 abort request 1: engine 2; an engine could not do its part
replan request 1; an engine could not do its part

fetch group=2
----
nothing

fetch group=1
----
10 assign request 1: prefill engine 1
11 assign request 1: decode engine 2
12 start request 1: prefill 1, decode 2

explain request=1
----
  13.200  found with engine 1, as its group reports
  13.200  prefill side: stopped at 16 in a read of the planner before this one; planned anew
  13.200  decode group 2: least tokens of all groups (200 with this request)
  13.200  prefill engine 1: least tokens (100) of 1 with a short reading queue; 0 more with a long one, of 1 in the group
  13.200  decode engine 2: fewest requests (1) of those that stay below Z = 210 with 100 tokens more (1 queued fit)
  13.200  started on engines 1 and 2: prefill side reads 0 of 0 cached tokens
  13.200  read queues: 0 tokens on the prefill side, 0 on the decode side

# The planner ended when a read of request 1 had stopped, and the order to read the rest had reached no engine. The engines report
# what they bring: the request is planned anew. Request 2 goes on: the decode side reads what the prefill side left, and the prefill
# side computes the rest. The engine of request 3 has ended its part, and the decode engine of request 4 has an earlier leader.

planner
----

up group=1 role=prefill engines=(1@1) hit=512 holding=(1@1#3/3+0-64,2@1#6/9+0-64+384-512,3@1#12/12/ended,4@1#15/15+0-64)
----
nothing

up group=2 role=decode engines=(2@2) hbm=10000 hit=512 holding=(1@2#3/3+256-512,2@2#6/8+256-384+64-256,3@2#12/12+256-512,4@2#15)
----
16 abort request 1: engine 1; its group is gone
17 abort request 1: engine 2; its group is gone
replan request 1; its group is gone

finished request=2 attempt=6 side=prefill
----
prefilled request 2

finished request=2 attempt=6 side=decode
----
done request 2
