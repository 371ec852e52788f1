# An engine that fails: the request is planned anew with its whole hit; the second time after a pause, without what is suspect; the
# fourth time it ends.

planner
----

up group=1 role=prefill engines=(1@1)
----
nothing

up group=2 role=decode engines=(2@2) hbm=10000
----
nothing

submit id=1 prompt=1124 hit=1024
----
nothing

fetch group=2
----
nothing

fetch group=1
----
1 assign request 1: prefill engine 1
2 assign request 1: decode engine 2
3 start request 1: prefill 1, decode 2; prefill [0, 512); decode [512, 1024)

failed request=1 side=prefill upto=300
----
4 abort request 1: engine 2; an engine could not do its part
replan request 1; an engine could not do its part

fetch group=1
----
5 assign request 1: prefill engine 1
6 assign request 1: decode engine 2
7 start request 1: prefill 1, decode 2; prefill [0, 512); decode [512, 1024)

fetch group=2
----
nothing

failed request=1 side=decode upto=300
----
8 abort request 1: engine 1; an engine could not do its part
replan request 1; an engine could not do its part

fetch group=2
----
nothing

fetch group=1 at=1999
----
nothing

fetch group=1 at=2000
----
9 assign request 1: prefill engine 1
10 assign request 1: decode engine 2
11 start request 1: prefill 1, decode 2; prefill [0, 128); decode [128, 256)
12 recompute request 1: engine 1; prefill [256, 1024); an engine could not do its part

failed request=1 side=prefill
----
13 abort request 1: engine 2; an engine could not do its part
replan request 1; an engine could not do its part

fetch group=2
----
nothing

fetch group=1 at=4000
----
14 assign request 1: prefill engine 1
15 assign request 1: decode engine 2
16 start request 1: prefill 1, decode 2
17 recompute request 1: engine 1; prefill [0, 1024); an engine could not do its part

failed request=1 side=prefill
----
18 abort request 1: engine 1; an engine could not do its part
19 abort request 1: engine 2; an engine could not do its part
20 reject request 1; an engine could not do its part

explain request=1
----
   0.000  decode group 2: least tokens of all groups (1124 with this request)
   0.000  prefill engine 1: least tokens (0) of 1 with a short reading queue; 0 more with a long one, of 1 in the group
   0.000  decode engine 2: fewest requests (0) of those that stay below Z = 1180 with 1124 tokens more (1 queued fit)
   0.000  started on engines 1 and 2: prefill side reads 512 of 1024 cached tokens
   0.000  read queues: 0 tokens on the prefill side, 0 on the decode side
   0.000  the prefill engine failed (failure 1); planned anew with 1024 cached tokens
   0.000  decode group 2: least tokens of all groups (2248 with this request)
   0.000  prefill engine 1: least tokens (1124) of 1 with a short reading queue; 0 more with a long one, of 1 in the group
   0.000  decode engine 2: fewest requests (1) of those that stay below Z = 2360 with 1124 tokens more (1 queued fit)
   0.000  started on engines 1 and 2: prefill side reads 512 of 1024 cached tokens
   0.000  read queues: 512 tokens on the prefill side, 512 on the decode side
   0.000  the decode engine failed (failure 2); planned anew with 256 cached tokens
   1.999  decode group 2: least tokens of all groups (3372 with this request)
   2.000  prefill engine 1: least tokens (2248) of 1 with a short reading queue; 0 more with a long one, of 1 in the group
   2.000  decode engine 2: fewest requests (2) of those that stay below Z = 3540 with 1124 tokens more (1 queued fit)
   2.000  started on engines 1 and 2: prefill side reads 128 of 256 cached tokens
          and 10 more

# What an engine says of an earlier start is ignored.

submit id=2 prompt=1124 hit=1024
----
nothing

fetch group=2
----
nothing

fetch group=1
----
21 assign request 2: prefill engine 1
22 assign request 2: decode engine 2
23 start request 2: prefill 1, decode 2; prefill [0, 512); decode [512, 1024)

failed request=2 side=prefill attempt=23
----
24 abort request 2: engine 2; an engine could not do its part
replan request 2; an engine could not do its part

fetch group=1
----
25 assign request 2: prefill engine 1
26 assign request 2: decode engine 2
27 start request 2: prefill 1, decode 2; prefill [0, 512); decode [512, 1024)

fetch group=2
----
nothing

failed request=2 side=decode attempt=23
----
nothing

finished request=2 side=prefill attempt=23
----
nothing

failed request=2 side=decode attempt=27
----
28 abort request 2: engine 1; an engine could not do its part
replan request 2; an engine could not do its part

# A prefill group that has done its part goes; that it said so twice is no news.

planner policy=split
----

up group=1 role=prefill engines=(1@1)
----
nothing

up group=2 role=decode engines=(2@2) hbm=9000
----
nothing

submit id=1 prompt=1200 hit=1024
----
nothing

fetch group=1
----
1 assign request 1: prefill engine 1
2 assign request 1: decode engine 2
3 start request 1: prefill 1, decode 2; prefill [0, 512); decode [512, 1024)

fetch group=2
----
nothing

finished request=1 side=prefill
----
prefilled request 1

down group=1
----
nothing

finished request=1 side=prefill
----
nothing

finished request=1 side=decode
----
done request 1

stats
----
{Submitted:1 Started:1 Rejected:0 Replanned:0 Finished:1 PartsPrefill:1 PartsDecode:1 TokensPrefill:512 TokensDecode:512 Splits:1 Cuts:0 Hedges:0 Recomputes:0 Aborted:0 Switched:0 SwitchesFailed:0 Late:0 Queued:0 Loading:0 Serving:0 PrefillRate:0}

# The end of decode on an attempt that was planned anew is reported late. While the request waits, it has ended; once it was
# started again, the report is of an earlier attempt and the request goes on.

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

submit id=1 prompt=100
----
nothing

submit id=2 prompt=100
----
nothing

fetch group=1
----
1 assign request 1: prefill engine 1
2 assign request 1: decode engine 2
3 start request 1: prefill 1, decode 2
4 assign request 2: prefill engine 1
5 assign request 2: decode engine 3
6 start request 2: prefill 1, decode 3

failed request=1 attempt=3 side=prefill
----
7 abort request 1: engine 2; an engine could not do its part
replan request 1; an engine could not do its part

failed request=2 attempt=6 side=prefill
----
8 abort request 2: engine 3; an engine could not do its part
replan request 2; an engine could not do its part

finished request=2 attempt=6 side=decode
----
done request 2

fetch group=1
----
9 assign request 1: prefill engine 1
10 assign request 1: decode engine 3
11 start request 1: prefill 1, decode 3

finished request=1 attempt=3 side=prefill
----
nothing

finished request=1 attempt=3 side=decode
----
nothing

finished request=1 attempt=11 side=prefill
----
prefilled request 1

finished request=1 attempt=11 side=prefill
----
nothing

finished request=1 attempt=11 side=decode
----
done request 1
