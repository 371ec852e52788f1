# A request that names its weights exactly keeps them when newer weights come, and its prefix.

planner policy=split
----

up group=1 role=prefill engines=(1@1) buffer=1000000
----
nothing

up group=3 role=decode engines=(5@5) hbm=100000 buffer=1000000
----
nothing

submit at=10 id=1 prompt=1100 hit=1024 epoch=1
----
nothing

submit id=2 prompt=1100 hit=1024 epoch=1 exact
----
nothing

fetch group=3
----
nothing

fetch group=1 queue=(0)
----
1 assign request 1: prefill engine 1
2 assign request 1: decode engine 5
3 start request 1: prefill 1, decode 5; prefill [0, 512); decode [512, 1024)
4 assign request 2: prefill engine 1
5 assign request 2: decode engine 5
6 start request 2: prefill 1, decode 5; prefill [0, 512); decode [512, 1024)

# Request 1 is planned again with epoch 2, and request 2 goes on with epoch 1.

epoch at=20 ns=0 to=2
----
{Queued:0 Prefilling:1 Decoding:0 Exact:1}
7 abort request 1: engine 1; the weights have changed
8 abort request 1: engine 5; the weights have changed
replan request 1; the weights have changed

fetch group=1 queue=(0)
----
9 assign request 1: prefill engine 1
10 assign request 1: decode engine 5
11 start request 1: prefill 1, decode 5
12 recompute request 1: engine 1; prefill [0, 1024); the weights have changed

submit id=3 prompt=1100 hit=1024 epoch=1 exact
----
nothing

submit id=4 prompt=1100 hit=1024 epoch=1
----
nothing

fetch group=1 queue=(0)
----
13 assign request 3: prefill engine 1
14 assign request 3: decode engine 5
15 start request 3: prefill 1, decode 5; prefill [0, 1024)
16 assign request 4: prefill engine 1
17 assign request 4: decode engine 5
18 start request 4: prefill 1, decode 5
19 recompute request 4: engine 1; prefill [0, 1024); the weights have changed

# Storage has retired epoch 1: the prefix is gone, and the request is computed with epoch 1.

stopped request=3 side=prefill upto=0 gone
----
20 recompute request 3: engine 1; prefill [0, 1024); no longer in storage

fetch group=1 queue=(0)
----
nothing

explain request=3
----
   0.020  decode group 3: least tokens of all groups (4400 with this request)
   0.020  prefill engine 1: least tokens (3300) of 1 with a short reading queue; 0 more with a long one, of 1 in the group
   0.020  decode engine 5: fewest requests (3) of those that stay below Z = 5775 with 1100 tokens more (2 queued fit)
   0.020  started on engines 1 and 5: prefill side reads 1024 of 1024 cached tokens
   0.020  read queues: 0 tokens on the prefill side, 1024 on the decode side
   0.020  prefill side: stopped at 0 of 1024
   0.020  tokens [0, 1024) are recomputed: no longer in storage

explain request=4
----
   0.020  weights of epoch 2: the prefix of 1024 tokens is of epoch 1 and is recomputed
   0.020  decode group 3: least tokens of all groups (5500 with this request)
   0.020  prefill engine 1: least tokens (4400) of 1 with a short reading queue; 0 more with a long one, of 1 in the group
   0.020  decode engine 5: fewest requests (4) of those that stay below Z = 5775 with 1100 tokens more (2 queued fit)
   0.020  started on engines 1 and 5: prefill side reads 0 of 0 cached tokens
   0.020  read queues: 1024 tokens on the prefill side, 1024 on the decode side
   0.020  tokens [0, 1024) are recomputed: the weights have changed

state
----
prefill group 1
  node 1: read queue 0 at 10000 tokens/s
    engine 1: tok 5500, seq 5, buffer 996660
decode group 3, 0 queued, total 5500
  node 5: read queue 1024 at 10000 tokens/s
    engine 5: tok 5500, seq 5, hbm 94240, buffer 990860
waiting 0, loading 1
