# Two decode groups. Requests go to the group with the fewest tokens; a group's engines take the head of its queue while HBM lasts.

planner policy=shorter block=1
----

up group=9 role=prefill engines=(9@9)
----
nothing

up group=1 role=decode engines=(1@1,2@1) hbm=1000
----
nothing

up group=2 role=decode engines=(3@2,4@2) hbm=1000
----
nothing

fetch group=1 tok=(500,300) seq=(5,1) hbm=(500,700)
----
nothing

submit id=1 prompt=400 out=100
----
nothing

submit id=2 prompt=200 out=100
----
nothing

submit id=3 prompt=500 out=100
----
nothing

submit id=4 prompt=400 out=100
----
nothing

# Group 2 is empty and takes 1 and 2. It is then level with group 1, at 800: 3 goes to the lower number, and 4 to group 2.

fetch group=2
----
nothing

# 3 does not find 600 tokens free in one engine and waits, with whatever is routed to its group after it.

fetch group=1 tok=(500,300) seq=(5,1) hbm=(500,590)
----
nothing

fetch group=9
----
1 assign request 1: prefill engine 9
2 assign request 1: decode engine 3
3 start request 1: prefill 9, decode 3
4 assign request 2: prefill engine 9
5 assign request 2: decode engine 4
6 start request 2: prefill 9, decode 4
7 assign request 4: prefill engine 9
8 assign request 4: decode engine 4
9 start request 4: prefill 9, decode 4

explain request=3
----
   0.000  decode group 1: least tokens of all groups (1400 with this request)

# An engine finishes: there is room. A decode group's fetch only reports; requests are granted when a prefill group fetches.

fetch group=1 tok=(0,300) seq=(0,1) hbm=(1000,590)
----
nothing

fetch group=9
----
10 assign request 3: prefill engine 9
11 assign request 3: decode engine 1
12 start request 3: prefill 9, decode 1

explain request=3
----
   0.000  decode group 1: least tokens of all groups (1400 with this request)
   0.000  prefill engine 9: least tokens (1000) of 1 with a short reading queue; 0 more with a long one, of 1 in the group
   0.000  decode engine 1: least tokens (0); with 600 more every one with room is above Z = 472 (1 queued fit)
   0.000  started on engines 9 and 1: prefill side reads 0 of 0 cached tokens
   0.000  read queues: 0 tokens on the prefill side, 0 on the decode side

# Above Z everywhere: the engine with the fewest tokens takes it.

submit id=5 prompt=350
----
nothing

fetch group=1 tok=(600,610) seq=(1,9) hbm=(400,390) seen=100
----
nothing

fetch group=9
----
13 assign request 5: prefill engine 9
14 assign request 5: decode engine 1
15 start request 5: prefill 9, decode 1

fetch group=2 tok=(0,0) seq=(0,0) hbm=(1000,1000)
----
nothing

# Longer than any engine's HBM: rejected at once, with the length and the largest that there is.

submit id=6 prompt=1001
----
16 reject request 6; longer than any decode engine's HBM: 1001, at most 1000

fetch group=1
----
nothing

state
----
decode group 1, 0 queued, total 1560
  node 1: read queue 0 at 10000 tokens/s
    engine 1: tok 950, seq 2, hbm 50
    engine 2: tok 610, seq 9, hbm 390
decode group 2, 0 queued, total 0
  node 2: read queue 0 at 10000 tokens/s
    engine 3: tok 0, seq 0, hbm 1000
    engine 4: tok 0, seq 0, hbm 1000
prefill group 9
  node 9: read queue 0 at 10000 tokens/s
    engine 9: tok 1850, seq 5
waiting 0, loading 0
