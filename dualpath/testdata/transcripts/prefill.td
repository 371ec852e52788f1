# The three classes of prefill engines. Alpha 100, beta 1000. Engine 1 is overloaded; 2 has a short reading queue; 3 and 4 share a node with a long one.

planner policy=shorter alpha=100 beta=1000
----

up group=9 role=decode engines=(9@9)
----
nothing

up group=1 role=prefill engines=(1@1,2@2,3@3,4@3)
----
nothing

submit id=1 prompt=300
----
nothing

submit id=2 prompt=300
----
nothing

submit id=3 prompt=300
----
nothing

submit id=4 prompt=300
----
nothing

submit id=5 prompt=900
----
nothing

submit id=6 prompt=900
----
nothing

submit id=7 prompt=900
----
nothing

submit id=8 prompt=900
----
nothing

# Engine 2 takes two, though 3 and 4 have fewer tokens: an idle storage NIC is what must not be. Then it is overloaded, and
# the long-queue engines take turns by tokens. When all are above beta the fetch ends; requests 7 and 8 wait.

fetch group=1 tok=(1001,500,0,100) queue=(0,50,101)
----
1 assign request 1: prefill engine 2
2 assign request 1: decode engine 9
3 start request 1: prefill 2, decode 9
4 assign request 2: prefill engine 2
5 assign request 2: decode engine 9
6 start request 2: prefill 2, decode 9
7 assign request 3: prefill engine 3
8 assign request 3: decode engine 9
9 start request 3: prefill 3, decode 9
10 assign request 4: prefill engine 4
11 assign request 4: decode engine 9
12 start request 4: prefill 4, decode 9
13 assign request 5: prefill engine 3
14 assign request 5: decode engine 9
15 start request 5: prefill 3, decode 9
16 assign request 6: prefill engine 4
17 assign request 6: decode engine 9
18 start request 6: prefill 4, decode 9

explain request=1
----
   0.000  decode group 9: least tokens of all groups (300 with this request)
   0.000  prefill engine 2: least tokens (500) of 1 with a short reading queue; 2 more with a long one, of 4 in the group
   0.000  decode engine 9: fewest requests (0) of those that stay below Z = 5040 with 300 tokens more (8 queued fit)
   0.000  started on engines 2 and 9: prefill side reads 0 of 0 cached tokens
   0.000  read queues: 50 tokens on the prefill side, 0 on the decode side

explain request=3
----
   0.000  decode group 9: least tokens of all groups (900 with this request)
   0.000  prefill engine 3: least tokens (0) of 2 with a long reading queue (here 101); none of 4 has a short one and room
   0.000  decode engine 9: fewest requests (2) of those that stay below Z = 5040 with 300 tokens more (8 queued fit)
   0.000  started on engines 3 and 9: prefill side reads 0 of 0 cached tokens
   0.000  read queues: 101 tokens on the prefill side, 0 on the decode side

# Nothing is assigned to an overloaded group.

fetch group=1 tok=(1001,1001,1001,1001)
----
nothing

# Exactly at the threshold is not above it.

fetch group=1 tok=(1000,1001,1001,1001) queue=(100,0,0)
----
19 assign request 7: prefill engine 1
20 assign request 7: decode engine 9
21 start request 7: prefill 1, decode 9

state
----
prefill group 1
  node 1: read queue 100 at 10000 tokens/s
    engine 1: tok 1900, seq 1
  node 2: read queue 0 at 10000 tokens/s
    engine 2: tok 1001, seq 2
  node 3: read queue 0 at 10000 tokens/s
    engine 3: tok 1001, seq 2
    engine 4: tok 1001, seq 2
decode group 9, 1 queued, total 4800
  node 9: read queue 0 at 10000 tokens/s
    engine 9: tok 3900, seq 7
waiting 1, loading 0

# Two groups, four requests: the first that fetches leaves what the other one can begin sooner; when the other has been
# silent for longer than patience (50 ms), it is not waited for.

planner
----

up group=9 role=decode engines=(9@9)
----
nothing

up group=1 role=prefill engines=(1@1)
----
nothing

up group=2 role=prefill engines=(2@2)
----
nothing

fetch group=1
----
nothing

fetch group=2
----
nothing

submit id=1 prompt=300
----
nothing

submit id=2 prompt=300
----
nothing

submit id=3 prompt=300
----
nothing

submit id=4 prompt=300
----
nothing

fetch at=10 group=1
----
1 assign request 1: prefill engine 1
2 assign request 1: decode engine 9
3 start request 1: prefill 1, decode 9

fetch at=11 group=2
----
4 assign request 2: prefill engine 2
5 assign request 2: decode engine 9
6 start request 2: prefill 2, decode 9
7 assign request 3: prefill engine 2
8 assign request 3: decode engine 9
9 start request 3: prefill 2, decode 9

fetch at=12 group=1
----
10 assign request 4: prefill engine 1
11 assign request 4: decode engine 9
12 start request 4: prefill 1, decode 9

submit id=5 prompt=300
----
nothing

submit id=6 prompt=300
----
nothing

fetch at=13 group=1
----
13 assign request 5: prefill engine 1
14 assign request 5: decode engine 9
15 start request 5: prefill 1, decode 9

fetch at=100 group=1
----
16 assign request 6: prefill engine 1
17 assign request 6: decode engine 9
18 start request 6: prefill 1, decode 9
