# Of a read under way the leader says how much is in the buffer, verified (upto), and how much has arrived (landed). The
# speed of a side follows from what has arrived, what moves to the other side from what is verified.

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

progress at=390 request=1 side=decode upto=8192
----
nothing

# The prefill side has verified nothing yet, and is late: but nearly all has arrived, so it goes on.

progress at=600 request=1 side=prefill upto=0 landed=4000
----
nothing

tick at=800
----
nothing

progress at=810 request=1 side=prefill upto=4096 landed=4096
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
   0.810  prefill side: read up to 4096

# Another one: a quarter is verified, a little more has arrived, and then it crawls. It is cut, and only what is verified stays.

submit id=2 prompt=8292 hit=8192 at=1000
----
nothing

fetch group=2 queue=(0)
----
nothing

fetch group=1 queue=(0)
----
4 assign request 2: prefill engine 1
5 assign request 2: decode engine 2
6 start request 2: prefill 1, decode 2; prefill [0, 4096); decode [4096, 8192)

progress at=1390 request=2 side=decode upto=8192
----
nothing

progress at=1400 request=2 side=prefill upto=256 landed=300
----
nothing

tick at=1401
----
7 cut request 2: prefill side, engine 1

stopped at=1403 request=2 side=prefill upto=256
----
8 read request 2: decode side, engine 2; decode [256, 4096)

progress at=1500 request=2 side=decode upto=4096 landed=3840
----
nothing

# Two more at a time: each side of either reads behind, or beside, one of the other. A little has arrived of the prefill
# side's part, which says how the two share the NIC: the side is cut only when it is overdue.

submit id=3 prompt=8292 hit=8192 at=2000
----
nothing

submit id=4 prompt=8292 hit=8192
----
nothing

fetch group=2 queue=(0)
----
nothing

fetch group=1 queue=(0)
----
9 assign request 3: prefill engine 1
10 assign request 3: decode engine 2
11 start request 3: prefill 1, decode 2; prefill [0, 4096); decode [4096, 8192)
12 assign request 4: prefill engine 1
13 assign request 4: decode engine 2
14 start request 4: prefill 1, decode 2; prefill [0, 4096); decode [4096, 8192)

progress at=2500 request=4 side=decode upto=8192
----
nothing

progress at=2500 request=4 side=prefill upto=0 landed=100
----
nothing

tick at=2501
----
nothing

fetch group=2 queue=(0)
----
nothing

tick at=3000
----
15 cut request 4: prefill side, engine 1
