# The planner restarted: groups come up and say what they hold. Nothing of it is planned again, all of it counts.

planner
----

submit id=7 prompt=100
----
nothing

up group=1 role=prefill engines=(1@1,2@1) holding=(5@1,6@2)
----
nothing

up group=2 role=decode engines=(3@2) hbm=1000 holding=(5@3)
----
nothing

# Request 7 was submitted again by its gateway; the decode group has it too.

up group=4 role=decode engines=(4@4) hbm=1000 holding=(7@4)
----
nothing

fetch group=1
----
1 assign request 7: prefill engine 1
2 start request 7: prefill 1, decode 4

finished request=5 side=decode
----
3 abort request 5: engine 1

# Group 2 comes up once more, without request 6, of which only the prefill group knows.

up group=2 role=decode engines=(3@2) hbm=1000
----
nothing

state
----
prefill group 1
  node 1: read queue 0 at 10000 tokens/s
    engine 1: tok 100, seq 1
    engine 2: tok 0, seq 0
decode group 2, 0 queued, total 0
  node 2: read queue 0 at 10000 tokens/s
    engine 3: tok 0, seq 0, hbm 1000
decode group 4, 0 queued, total 0
  node 4: read queue 0 at 10000 tokens/s
    engine 4: tok 0, seq 0, hbm 1000
waiting for prefill 0, for a decode group 0, loading 0

stats
----
{Submitted:1 Started:1 Rejected:0 Replanned:0 Finished:1 PartsPrefill:0 PartsDecode:0 TokensPrefill:0 TokensDecode:0 Splits:0 Cuts:0 Hedges:0 Recomputes:0 Queued:0 Loading:0 Serving:2}

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
1 assign request 1: decode engine 2
2 assign request 2: decode engine 2

fetch group=1
----
3 assign request 1: prefill engine 1
4 start request 1: prefill 1, decode 2; prefill [0, 128); decode [128, 256)
5 assign request 2: prefill engine 1
6 start request 2: prefill 1, decode 2; prefill [0, 128); decode [128, 256)

up group=2 role=decode engines=(2@2) hbm=1000 holding=(1@2)
----
7 abort request 2: engine 1; its group is gone

fetch group=2
----
8 assign request 2: decode engine 2

progress at=20 request=1 side=prefill upto=128
----
nothing

fetch group=1
----
9 assign request 2: prefill engine 1
10 start request 2: prefill 1, decode 2; prefill [0, 128); decode [128, 256)

state
----
prefill group 1
  node 1: read queue 384 at 10000 tokens/s
    engine 1: tok 900, seq 3
decode group 2, 0 queued, total 300
  node 2: read queue 384 at 10000 tokens/s
    engine 2: tok 300, seq 1, hbm 700
waiting for prefill 0, for a decode group 0, loading 2

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
1 assign request 1: decode engine 2

fetch at=8000 group=1
----
2 assign request 1: prefill engine 1
3 start request 1: prefill 1, decode 2; prefill [0, 128); decode [128, 256)

tick at=8100
----
4 abort request 1: engine 1; its group is gone

up group=3 role=decode engines=(3@3) hbm=1000
----
nothing

fetch group=3
----
5 assign request 1: decode engine 3

up group=2 role=decode engines=(2@2) hbm=1000 holding=(1@2)
----
6 abort request 1: engine 2; its group is gone
