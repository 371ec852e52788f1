# The three classes of prefill engines. Alpha 100, beta 1000. Engine 1 is overloaded; 2 has a short reading queue; 3 and 4 share a node with a long one.

planner policy=shorter alpha=100 beta=1000
----

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
2 assign request 2: prefill engine 2
3 assign request 3: prefill engine 3
4 assign request 4: prefill engine 4
5 assign request 5: prefill engine 3
6 assign request 6: prefill engine 4

explain request=1
----
   0.000  prefill engine 2: least tokens (500) of 1 with a short reading queue; 2 more with a long one, of 4 in the group

explain request=3
----
   0.000  prefill engine 3: least tokens (0) of 2 with a long reading queue (here 101); none of 4 has a short one and room

# Nothing is assigned to an overloaded group.

fetch group=1 tok=(1001,1001,1001,1001)
----
nothing

# Exactly at the threshold is not above it.

fetch group=1 tok=(1000,1001,1001,1001) queue=(100,0,0)
----
7 assign request 7: prefill engine 1

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
waiting for prefill 1, for a decode group 8, loading 0

# Two groups, four requests: the first that fetches leaves what the other one can begin sooner; when the other has been
# silent for longer than patience (50 ms), it is not waited for.

planner
----

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

fetch at=11 group=2
----
2 assign request 2: prefill engine 2
3 assign request 3: prefill engine 2

fetch at=12 group=1
----
4 assign request 4: prefill engine 1

submit id=5 prompt=300
----
nothing

submit id=6 prompt=300
----
nothing

fetch at=13 group=1
----
5 assign request 5: prefill engine 1

fetch at=100 group=1
----
6 assign request 6: prefill engine 1
