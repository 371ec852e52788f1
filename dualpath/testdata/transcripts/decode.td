# Two decode groups. Requests go to the group with the fewest tokens; a group's engines take the head of its queue while HBM lasts.

planner policy=shorter
----

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
1 assign request 1: decode engine 3
2 assign request 2: decode engine 4
3 assign request 4: decode engine 4

# 3 does not find 600 tokens free in one engine: head of line, the fetch ends.

fetch group=1 tok=(500,300) seq=(5,1) hbm=(500,590)
----
nothing

explain request=3
----
   0.000  decode group 1: least tokens of all groups (1400 with this request)

# An engine finishes: there is room.

fetch group=1 tok=(0,300) seq=(0,1) hbm=(1000,590)
----
4 assign request 3: decode engine 1

explain request=3
----
   0.000  decode group 1: least tokens of all groups (1400 with this request)
   0.000  decode engine 1: least tokens (0); with 600 more every one with the HBM is above Z = 472 (1 queued fit)

# Above Z everywhere: the engine with the fewest tokens takes it.

submit id=5 prompt=350
----
nothing

fetch group=1 tok=(600,610) seq=(1,9) hbm=(400,390) seen=100
----
5 assign request 5: decode engine 1

fetch group=2 tok=(0,0) seq=(0,0) hbm=(1000,1000)
----
nothing

# Longer than any engine's HBM: said at once, not queued for ever.

submit id=6 prompt=1001
----
nothing

fetch group=1
----
6 reject request 6; longer than any decode engine's HBM

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
waiting for prefill 5, for a decode group 0, loading 0
