# Group 3 of two decode groups becomes a prefill group. What it has ends first, and what waits in
# its queue goes to the other one.

planner beta=300
----

up group=1 role=prefill engines=(11@1)
----
nothing

up group=2 role=decode engines=(21@2) hbm=1000
----
nothing

up group=3 role=decode engines=(31@3) hbm=1000
----
nothing

submit id=1 prompt=200 out=50
----
nothing

submit id=2 prompt=200 out=50
----
nothing

submit id=3 prompt=200 out=50
----
nothing

submit id=4 prompt=200 out=50
----
nothing

fetch group=2
----
nothing

fetch group=3
----
nothing

fetch group=1
----
1 assign request 1: prefill engine 11
2 assign request 1: decode engine 21
3 start request 1: prefill 11, decode 21
4 assign request 2: prefill engine 11
5 assign request 2: decode engine 31
6 start request 2: prefill 11, decode 31

# The only prefill group keeps its role, and no group changes to the role that it has.

switch group=1 to=decode drain=finish
----
switched group 1 to decode; no other group has its role

switch group=2 to=decode drain=finish
----
switched group 2 to decode; it has this role

switch group=9 to=decode drain=finish
----
switched group 9 to decode; its group is gone

switch group=3 to=prefill drain=finish
----
7 announce group 3 to prefill

# The other decode group cannot leave now.

switch group=2 to=prefill drain=finish
----
switched group 2 to prefill; no other group has its role

state
----
prefill group 1
  node 1: read queue 0 at 10000 tokens/s
    engine 11: tok 400, seq 2
decode group 2, 1 queued, total 500
  node 2: read queue 0 at 10000 tokens/s
    engine 21: tok 250, seq 1, hbm 744
decode group 3, 0 queued, total 250
  node 3: read queue 0 at 10000 tokens/s
    engine 31: tok 250, seq 1, hbm 744
waiting 2, loading 0

fetch group=3
----
nothing

fetch group=1 tok=(0)
----
8 assign request 3: prefill engine 11
9 assign request 3: decode engine 21
10 start request 3: prefill 11, decode 21
11 assign request 4: prefill engine 11
12 assign request 4: decode engine 21
13 start request 4: prefill 11, decode 21

finished request=2 side=prefill
----
prefilled request 2

tick at=20
----
nothing

finished request=2 side=decode
----
done request 2

tick at=30
----
14 switch group 3 to prefill

# The leader has the order. Its session breaks, and it returns with the old role: it gets the
# order again.

switch group=3 to=decode
----
switched group 3 to decode; its leader has the order to change it

up group=3 role=decode engines=(31@3) hbm=1000 again seen=100
----
101 announce group 3 to prefill

tick at=40
----
102 switch group 3 to prefill

up group=3 role=prefill engines=(31@3) hbm=1000 again seen=101
----
switched group 3 to prefill

fetch group=3
----
nothing

# The leader refuses: the group works on.

switch group=3 to=decode
----
103 switch group 3 to decode

tick at=50
----
nothing

refused group=3
----
switched group 3 to decode; its leader refused

refused group=3
----
nothing

submit id=5 prompt=100 out=5
----
nothing

fetch group=3
----
104 assign request 5: prefill engine 31
105 assign request 5: decode engine 21
106 start request 5: prefill 31, decode 21

# The other prefill group is lost before the order: the switch ends.

switch group=3 to=decode drain=finish
----
107 announce group 3 to decode

down group=1
----
108 announce group 3 to prefill
switched group 3 to decode; no other group has its role
109 abort request 4: engine 21; its group is gone
replan request 4; its group is gone
110 abort request 3: engine 21; its group is gone
replan request 3; its group is gone
111 abort request 1: engine 21; its group is gone
replan request 1; its group is gone

up group=1 role=prefill engines=(11@1)
----
nothing

# The operator takes a switch back.

switch group=3 to=decode drain=finish
----
112 announce group 3 to decode

switch group=3 to=prefill
----
113 announce group 3 to prefill
switched group 3 to decode; withdrawn by the operator

switch group=3 to=prefill
----
switched group 3 to prefill; it has this role

# The group is lost while it is drained, and comes back as it was before.

switch group=3 to=decode drain=finish
----
114 announce group 3 to decode

up group=3 role=prefill engines=(31@3) hbm=1000
----
switched group 3 to decode; its group is gone
115 abort request 5: engine 21; its group is gone
replan request 5; its group is gone

switch group=1 to=decode drain=finish
----
116 switch group 1 to decode

down group=1
----
switched group 1 to decode; its group is gone

up group=1 role=prefill engines=(11@1)
----
nothing

fetch group=2
----
nothing

fetch group=3
----
nothing

# With recompute, what the group has is planned elsewhere at once. After the order, the loss of
# the other group ends no switch.

switch group=3 to=decode drain=recompute
----
117 switch group 3 to decode

explain request=5
----
   0.050  decode group 2: least tokens of all groups (855 with this request)
   0.050  prefill engine 31: least tokens (0) of 1 with a short reading queue; 0 more with a long one, of 1 in the group
   0.050  decode engine 21: fewest requests (3) of those that stay below Z = 897 with 105 tokens more (1 queued fit)
   0.050  started on engines 31 and 21: prefill side reads 0 of 0 cached tokens
   0.050  read queues: 0 tokens on the prefill side, 0 on the decode side
   0.050  planned anew: group 3 is gone
   0.050  decode group 2: least tokens of all groups (960 with this request)

down group=1
----
nothing

# Group 4 is the only one that takes request 6: it keeps its role. It is being drained when the
# group that could take the request instead is lost: it keeps its role too. Requests that were
# planned anew go before request 6, to group 5, because group 2 is full.

up group=1 role=prefill engines=(11@1)
----
nothing

up group=4 role=decode engines=(41@4) hbm=5000
----
nothing

submit id=6 prompt=2000 out=5
----
nothing

switch group=4 to=prefill drain=recompute
----
switched group 4 to prefill; a request under way fits into no other group of its role

up group=5 role=decode engines=(51@5) hbm=5000
----
nothing

fetch group=4
----
nothing

fetch group=5
----
nothing

fetch group=1
----
118 assign request 5: prefill engine 11
119 assign request 5: decode engine 51
120 start request 5: prefill 11, decode 51
121 assign request 1: prefill engine 11
122 assign request 1: decode engine 51
123 start request 1: prefill 11, decode 51
124 assign request 3: prefill engine 11
125 assign request 3: decode engine 51
126 start request 3: prefill 11, decode 51

fetch group=1 tok=(0) seen=126
----
127 assign request 4: prefill engine 11
128 assign request 4: decode engine 51
129 start request 4: prefill 11, decode 51
130 assign request 6: prefill engine 11
131 assign request 6: decode engine 41
132 start request 6: prefill 11, decode 41

switch group=4 to=prefill drain=finish
----
133 announce group 4 to prefill

down group=5
----
134 announce group 4 to decode
switched group 4 to prefill; a request under way fits into no other group of its role
135 abort request 5: engine 11; its group is gone
replan request 5; its group is gone
136 abort request 4: engine 11; its group is gone
replan request 4; its group is gone
137 abort request 3: engine 11; its group is gone
replan request 3; its group is gone
138 abort request 1: engine 11; its group is gone
replan request 1; its group is gone

# A planner that was restarted gets from the leader that its engines are switching.

planner
----

up group=1 role=prefill engines=(11@1)
----
nothing

up group=2 role=decode engines=(21@2) hbm=1000
----
nothing

up group=3 role=prefill engines=(31@3) hbm=1000 seen=5 switching=decode
----
nothing

submit id=1 prompt=100
----
nothing

fetch group=2
----
nothing

fetch group=3
----
nothing

fetch group=1
----
6 assign request 1: prefill engine 11
7 assign request 1: decode engine 21
8 start request 1: prefill 11, decode 21

up group=3 role=decode engines=(31@3) hbm=1000 again seen=6
----
switched group 3 to decode

stats
----
{Submitted:1 Started:1 Rejected:0 Replanned:0 Finished:0 PartsPrefill:0 PartsDecode:0 TokensPrefill:0 TokensDecode:0 Splits:0 Cuts:0 Hedges:0 Recomputes:0 Aborted:0 Switched:1 SwitchesFailed:0 Late:0 Queued:0 Loading:0 Serving:1 PrefillRate:0}

# A request whose attempt failed on group 1 does not wait for group 3, which is being drained.

planner
----

up group=1 role=prefill engines=(11@1)
----
nothing

up group=3 role=prefill engines=(31@3)
----
nothing

up group=2 role=decode engines=(21@2) hbm=1000
----
nothing

fetch group=2
----
nothing

submit id=1 prompt=100
----
nothing

fetch group=3
----
1 assign request 1: prefill engine 31
2 assign request 1: decode engine 21
3 start request 1: prefill 31, decode 21

submit id=2 prompt=100
----
nothing

fetch group=1
----
4 assign request 2: prefill engine 11
5 assign request 2: decode engine 21
6 start request 2: prefill 11, decode 21

failed request=2 side=prefill
----
7 abort request 2: engine 21; an engine could not do its part
replan request 2; an engine could not do its part

switch group=3 to=decode drain=finish
----
8 announce group 3 to decode

fetch group=3
----
nothing

fetch group=2
----
nothing

fetch group=1
----
9 assign request 2: prefill engine 11
10 assign request 2: decode engine 21
11 start request 2: prefill 11, decode 21
