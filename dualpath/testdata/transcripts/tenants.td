# One prefill engine takes one request at each fetch. Tenant a has twice the weight of b. A
# request of a higher priority goes before both.
planner beta=1 weights=(a:2) rate=640000
----

up group=2 role=decode engines=(2@2)
----
nothing

up group=1 role=prefill engines=(1@1)
----
nothing

submit id=1 prompt=1000 tenant=a
----
nothing

submit id=2 prompt=1000 tenant=a
----
nothing

submit id=3 prompt=1000 tenant=a
----
nothing

submit id=4 prompt=1000 tenant=b
----
nothing

submit id=5 prompt=1000 tenant=b
----
nothing

submit id=6 prompt=1000 tenant=b priority=1
----
nothing

fetch group=1 at=1
----
1 assign request 6: prefill engine 1
2 assign request 6: decode engine 2
3 start request 6: prefill 1, decode 2

fetch group=1 tok=(0) at=2
----
4 assign request 1: prefill engine 1
5 assign request 1: decode engine 2
6 start request 1: prefill 1, decode 2

fetch group=1 tok=(0) at=3
----
7 assign request 4: prefill engine 1
8 assign request 4: decode engine 2
9 start request 4: prefill 1, decode 2

fetch group=1 tok=(0) at=4
----
10 assign request 2: prefill engine 1
11 assign request 2: decode engine 2
12 start request 2: prefill 1, decode 2

fetch group=1 tok=(0) at=5
----
13 assign request 3: prefill engine 1
14 assign request 3: decode engine 2
15 start request 3: prefill 1, decode 2

fetch group=1 tok=(0) at=6
----
16 assign request 5: prefill engine 1
17 assign request 5: decode engine 2
18 start request 5: prefill 1, decode 2

explain request=6
----
   0.001  decode group 2: least tokens of all groups (6000 with this request)
   0.001  next of priority 1: work granted to its tenant, by weight, is the least (0; virtual time 0); 0 more of the tenant wait, 0 of the priority
   0.001  prefill engine 1: least tokens (0) of 1 with a short reading queue; 0 more with a long one, of 1 in the group
   0.001  decode engine 2: fewest requests (0) of those that stay below Z = 6300 with 1000 tokens more (6 queued fit)
   0.001  started on engines 1 and 2: prefill side reads 0 of 0 cached tokens
   0.001  read queues: 0 tokens on the prefill side, 0 on the decode side

explain request=3
----
   0.001  decode group 2: least tokens of all groups (3000 with this request)
   0.005  next of priority 0: work granted to its tenant, by weight, is the least (1000; virtual time 500); 0 more of the tenant wait, 1 of the priority
   0.005  prefill engine 1: least tokens (0) of 1 with a short reading queue; 0 more with a long one, of 1 in the group
   0.005  decode engine 2: fewest requests (4) of those that stay below Z = 6300 with 1000 tokens more (2 queued fit)
   0.005  started on engines 1 and 2: prefill side reads 0 of 0 cached tokens
   0.005  read queues: 0 tokens on the prefill side, 0 on the decode side

explain request=5
----
   0.001  decode group 2: least tokens of all groups (5000 with this request)
   0.006  next of priority 0: work granted to its tenant, by weight, is the least (1000; virtual time 1000); 0 more of the tenant wait, 0 of the priority
   0.006  prefill engine 1: least tokens (0) of 1 with a short reading queue; 0 more with a long one, of 1 in the group
   0.006  decode engine 2: fewest requests (5) of those that stay below Z = 6300 with 1000 tokens more (1 queued fit)
   0.006  started on engines 1 and 2: prefill side reads 0 of 0 cached tokens
   0.006  read queues: 0 tokens on the prefill side, 0 on the decode side
