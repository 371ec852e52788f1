# One prefill node and one decode node, idle. The request's 2048 cached tokens are read by both storage NICs, half each.

planner alpha=3000 beta=5000
----

up group=1 role=prefill engines=(1@1,2@1)
----
nothing

up group=2 role=decode engines=(3@2,4@2) hbm=20000
----
nothing

submit id=1 prompt=2148 hit=2048 out=50
----
nothing

fetch group=2
----
nothing

fetch group=1
----
1 assign request 1: prefill engine 1
2 assign request 1: decode engine 3
3 start request 1: prefill 1, decode 3; prefill [0, 1024); decode [1024, 2048)

# The next one finds 1024 tokens in each queue. The decode node then reports that its NIC does 30,000 tokens a second: it takes more.

submit at=10 id=2 prompt=4196 hit=4096
----
nothing

fetch group=2 queue=(1024) rate=(30000)
----
nothing

fetch group=1
----
4 assign request 2: prefill engine 2
5 assign request 2: decode engine 4
6 start request 2: prefill 2, decode 4; prefill [0, 512); decode [512, 4096)

progress at=100 request=1 side=prefill upto=1024
----
nothing

progress request=1 side=decode upto=2048
----
nothing

finished at=150 request=1 side=prefill
----
prefilled request 1

finished at=400 request=1 side=decode
----
done request 1

explain request=1
----
   0.000  decode group 2: least tokens of all groups (2198 with this request)
   0.000  prefill engine 1: least tokens (0) of 2 with a short reading queue; 0 more with a long one, of 2 in the group
   0.000  decode engine 3: least tokens (0); with 2198 more every one with room is above Z = 1153 (1 queued fit)
   0.000  started on engines 1 and 3: prefill side reads 1024 of 2048 cached tokens
   0.000  read queues: 0 tokens on the prefill side, 0 on the decode side
   0.100  prefill side: read up to 1024
   0.100  decode side: read up to 2048
   0.150  prefill done
   0.400  decode done

explain request=2
----
   0.010  decode group 2: least tokens of all groups (6394 with this request)
   0.010  prefill engine 2: least tokens (0) of 2 with a short reading queue; 0 more with a long one, of 2 in the group
   0.010  decode engine 4: least tokens (0); with 4196 more every one with room is above Z = 3356 (1 queued fit)
   0.010  started on engines 2 and 4: prefill side reads 512 of 4096 cached tokens
   0.010  read queues: 1024 tokens on the prefill side, 1024 on the decode side

# A short prefix is not worth two sides: the side with the shorter queue reads all of it.

submit id=3 prompt=300 hit=192
----
nothing

fetch group=2 queue=(5000)
----
nothing

fetch group=1 queue=(64) tok=(0,0)
----
7 assign request 3: prefill engine 1
8 assign request 3: decode engine 3
9 start request 3: prefill 1, decode 3; prefill [0, 192)

# Without a hit there is nothing to read.

submit id=4 prompt=300
----
nothing

fetch group=2
----
nothing

fetch group=1
----
10 assign request 4: prefill engine 2
11 assign request 4: decode engine 3
12 start request 4: prefill 2, decode 3

state
----
prefill group 1
  node 1: read queue 256 at 10000 tokens/s
    engine 1: tok 300, seq 2
    engine 2: tok 300, seq 2
decode group 2, 0 queued, total 6994
  node 2: read queue 5000 at 30000 tokens/s
    engine 3: tok 2798, seq 3, hbm 17120
    engine 4: tok 4196, seq 1, hbm 15776
waiting 0, loading 2

stats
----
{Submitted:4 Started:4 Rejected:0 Replanned:0 Finished:1 PartsPrefill:3 PartsDecode:2 TokensPrefill:1728 TokensDecode:4608 Splits:2 Cuts:0 Hedges:0 Recomputes:0 Aborted:0 Switched:0 SwitchesFailed:0 Late:0 Queued:0 Loading:2 Serving:3 PrefillRate:0}
