# Two pods. The prefill engine is in pod a, and so is decode node 2; node 3 is in pod b. 4,000 tokens are 4 GB:
# 0.64 s within the pod (6.25 GB/s), 1.28 s across.

planner
----

up group=1 role=prefill engines=(1@1)
----
nothing

up group=2 role=decode engines=(2@2)
----
nothing

up group=3 role=decode engines=(3@3)
----
nothing

places 1=a/1/x 2=a/2/y 3=b/1/z
----
nothing

submit id=1 prompt=4000
----
nothing

# A decode group's fetch only reports. When a prefill group fetches, the decode engine is chosen by the distance from
# the KV.

fetch group=2
----
nothing

fetch group=1
----
assign request 1: prefill engine 1
assign request 1: decode engine 2
start request 1: prefill 1, decode 2

explain request=1
----
   0.000  prefill engine 1: least tokens (0) of 1 with a short reading queue; 0 more with a long one, of 1 in the group
   0.000  decode engine 2 on node 2: transfer from node 1, wait and first step take 652468 us, the least of all with room
   0.000  started on engines 1 and 2: prefill side reads 0 of 0 cached tokens
   0.000  read queues: 0 tokens on the prefill side, 0 on the decode side

flying node=1
----
1 on tier 2 (same pod)

# One transfer of the planner's own uses the pod: half of the bandwidth is left, as much as across pods. There the batch
# is empty and its first step earlier, so the request goes across.

submit id=2 prompt=4000
----
nothing

fetch group=1
----
assign request 2: prefill engine 1
assign request 2: decode engine 3
start request 2: prefill 1, decode 3

fetch group=2
----
nothing

fetch group=3
----
nothing

flying node=1
----
1 on tier 2 (same pod)
1 on tier 3 (cross pod)

# Both are computed; other traffic congests the pod.

finished request=1 side=prefill
----
prefilled request 1

finished request=2 side=prefill
----
prefilled request 2

flying node=1
----
none

places 1=a/1/x 2=a/2/y 3=b/1/z congestion=(0,0,0.8,0.1)
----
nothing

submit id=3 prompt=4000
----
nothing

fetch group=1
----
assign request 3: prefill engine 1
assign request 3: decode engine 3
start request 3: prefill 1, decode 3

fetch group=3
----
nothing

fetch group=2
----
nothing

explain request=3
----
   0.000  prefill engine 1: least tokens (8000) of 1 with a short reading queue; 0 more with a long one, of 1 in the group
   0.000  decode engine 3 on node 3: transfer from node 1, wait and first step take 1434857 us, the least of all with room
   0.000  started on engines 1 and 3: prefill side reads 0 of 0 cached tokens
   0.000  read queues: 0 tokens on the prefill side, 0 on the decode side

# Two hops. A cached prefix of 4,000 tokens: both storage NICs read 10 GB/s. On the prefill side the second hop is
# NVLink at 450 GB/s, on the decode side the way back at 6.25 GB/s: 0.1 and 0.26 ms a token.

planner
----

up group=1 role=prefill engines=(1@1)
----
nothing

up group=2 role=decode engines=(2@2)
----
nothing

places 1=a/1/x 2=a/2/y
----
nothing

submit id=1 prompt=4100 hit=4000
----
nothing

fetch group=1
----
assign request 1: prefill engine 1
assign request 1: decode engine 2
start request 1: prefill 1, decode 2; prefill [0, 2880); decode [2880, 4000)

fetch group=2
----
nothing

explain request=1
----
   0.000  prefill engine 1: least tokens (0) of 1 with a short reading queue; 0 more with a long one, of 1 in the group
   0.000  decode engine 2 on node 2: transfer from node 1, wait and first step take 668468 us, the least of all with room
   0.000  started on engines 1 and 2: prefill side reads 2880 of 4000 cached tokens
   0.000  read queues: 0 tokens on the prefill side, 0 on the decode side
   0.000  both hops, for all cached tokens: 408889 us on the prefill side, 1040007 us on the decode side

# When the hops overlap, the slower one counts: 0.1 and 0.16 ms.

planner overlap
----

up group=1 role=prefill engines=(1@1)
----
nothing

up group=2 role=decode engines=(2@2)
----
nothing

places 1=a/1/x 2=a/2/y
----
nothing

submit id=1 prompt=4100 hit=4000
----
nothing

fetch group=1
----
assign request 1: prefill engine 1
assign request 1: decode engine 2
start request 1: prefill 1, decode 2; prefill [0, 2432); decode [2432, 4000)

fetch group=2
----
nothing

# One side only: the decode side's queue is shorter by 1,000 tokens (0.1 s), its second hop longer by 0.63 s.

planner policy=shorter
----

up group=1 role=prefill engines=(1@1)
----
nothing

up group=2 role=decode engines=(2@2)
----
nothing

places 1=a/1/x 2=a/2/y
----
nothing

submit id=1 prompt=4100 hit=4000
----
nothing

fetch group=1 queue=(1000)
----
assign request 1: prefill engine 1
assign request 1: decode engine 2
start request 1: prefill 1, decode 2; prefill [0, 4000)

fetch group=2
----
nothing

# Equation 2: the part of the prompt that an engine holds is not sent. The 4,000 tokens take 0.64 s within the pod;
# across, 3,200 of them are there and the other 800 take 0.26 s.

planner
----

up group=1 role=prefill engines=(1@1)
----
nothing

up group=2 role=decode engines=(2@2)
----
nothing

up group=3 role=decode engines=(3@3)
----
nothing

places 1=a/1/x 2=a/2/y 3=b/1/z
----
nothing

submit id=1 prompt=4000 resident=(1000@2,3200@3)
----
nothing

fetch group=1
----
assign request 1: prefill engine 1
assign request 1: decode engine 3
start request 1: prefill 1, decode 3

explain request=1
----
   0.000  prefill engine 1: least tokens (0) of 1 with a short reading queue; 0 more with a long one, of 1 in the group
   0.000  decode engine 3 on node 3: transfer from node 1, wait and first step take 268474 us, the least of all with room
   0.000  started on engines 1 and 3: prefill side reads 0 of 0 cached tokens
   0.000  read queues: 0 tokens on the prefill side, 0 on the decode side

# New weights: the request that waits has no prefix on engine 3, because the KV there is of the earlier weights.

planner
----

up group=1 role=prefill engines=(1@1)
----
nothing

up group=2 role=decode engines=(2@2)
----
nothing

up group=3 role=decode engines=(3@3)
----
nothing

places 1=a/1/x 2=a/2/y 3=b/1/z
----
nothing

submit id=1 prompt=4000 resident=(1000@2,3200@3)
----
nothing

epoch number=1
----
nothing

fetch group=1
----
assign request 1: prefill engine 1
assign request 1: decode engine 2
start request 1: prefill 1, decode 2

# The reserve: 1,000 of the 100,000 tokens of each engine stay free. One request takes 99,000 tokens of engine 2; no second one
# fits there, though 64 tokens would be free. 99,008 tokens are more than any engine gives.

planner reserve=1000
----

up group=1 role=prefill engines=(1@1)
----
nothing

up group=2 role=decode engines=(2@2)
----
nothing

submit id=1 prompt=98944
----
nothing

submit id=2 prompt=64
----
nothing

submit id=3 prompt=99008
----
reject request 3; longer than any decode engine's HBM: 99008, at most 99000

fetch group=1
----
assign request 1: prefill engine 1
assign request 1: decode engine 2
start request 1: prefill 1, decode 2

# Engine 2 becomes free. The older request 2 goes first; 4 waits, because an engine also reserves room for the resident
# part of a prompt.

finished request=1 side=prefill
----
prefilled request 1

finished request=1 side=decode
----
done request 1

submit id=4 prompt=98944 resident=(98304@2)
----
nothing

fetch group=2 hbm=(100000)
----
nothing

fetch group=1
----
assign request 2: prefill engine 1
assign request 2: decode engine 2
start request 2: prefill 1, decode 2
