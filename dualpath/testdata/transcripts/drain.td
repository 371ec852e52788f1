# New weights meet four requests: one waits, one is being prefilled, one decodes, and one names
# its weights. Each policy in turn.

planner beta=300
----

up group=1 role=prefill engines=(11@1)
----
nothing

up group=2 role=decode engines=(21@2) hbm=100000
----
nothing

submit id=1 prompt=200 hit=128 out=50 epoch=3
----
nothing

submit id=2 prompt=150 hit=128 out=50 epoch=3
----
nothing

fetch group=2
----
nothing

fetch group=1
----
1 assign request 1: prefill engine 11
2 assign request 1: decode engine 21
3 start request 1: prefill 11, decode 21; prefill [0, 128)
4 assign request 2: prefill engine 11
5 assign request 2: decode engine 21
6 start request 2: prefill 11, decode 21; decode [0, 128)

finished request=1 side=prefill
----
prefilled request 1

submit id=4 prompt=90 hit=64 out=10 epoch=3 exact
----
nothing

fetch group=1 tok=(0)
----
7 assign request 4: prefill engine 11
8 assign request 4: decode engine 21
9 start request 4: prefill 11, decode 21; prefill [0, 64)

submit id=3 prompt=400 hit=128 out=10 epoch=3
----
nothing

# finish: requests 1 and 2 go on, request 3 is planned with the new weights.

epoch to=4 drain=finish
----
{Queued:1 Prefilling:1 Decoding:1 Exact:1}
nothing

explain request=2
----
   0.000  decode group 2: least tokens of all groups (450 with this request)
   0.000  prefill engine 11: least tokens (200) of 1 with a short reading queue; 0 more with a long one, of 1 in the group
   0.000  decode engine 21: fewest requests (1) of those that stay below Z = 472 with 200 tokens more (2 queued fit)
   0.000  started on engines 11 and 21: prefill side reads 0 of 128 cached tokens
   0.000  read queues: 128 tokens on the prefill side, 0 on the decode side
   0.000  weights of epoch 4: the request continues with weights of epoch 3

fetch group=1 tok=(0)
----
10 assign request 3: prefill engine 11
11 assign request 3: decode engine 21
12 start request 3: prefill 11, decode 21
13 recompute request 3: engine 11; prefill [0, 128); the weights have changed

# Request 2 loses its decode engine: it is planned with the new weights, without its prefix. So
# is request 1, which was decoding.

down group=2
----
14 abort request 4: engine 11; its group is gone
replan request 4; its group is gone
15 abort request 3: engine 11; its group is gone
replan request 3; its group is gone
16 abort request 2: engine 11; its group is gone
replan request 2; its group is gone
replan request 1; its group is gone

up group=3 role=decode engines=(31@3) hbm=100000
----
nothing

fetch group=3
----
nothing

fetch group=1 tok=(0)
----
17 assign request 1: prefill engine 11
18 assign request 1: decode engine 31
19 start request 1: prefill 11, decode 31
20 recompute request 1: engine 11; prefill [0, 128); the weights have changed
21 assign request 2: prefill engine 11
22 assign request 2: decode engine 31
23 start request 2: prefill 11, decode 31
24 recompute request 2: engine 11; prefill [0, 128); the weights have changed

explain request=1
----
   0.000  decode group 2: least tokens of all groups (250 with this request)
   0.000  prefill engine 11: least tokens (0) of 1 with a short reading queue; 0 more with a long one, of 1 in the group
   0.000  decode engine 21: fewest requests (0) of those that stay below Z = 472 with 250 tokens more (2 queued fit)
   0.000  started on engines 11 and 21: prefill side reads 128 of 128 cached tokens
   0.000  read queues: 0 tokens on the prefill side, 0 on the decode side
   0.000  prefill done
   0.000  weights of epoch 4: the request continues with weights of epoch 3
   0.000  planned anew: group 2 is gone
   0.000  weights of epoch 4: the prefix of 128 tokens is of epoch 3 and is recomputed
   0.000  decode group 3: least tokens of all groups (250 with this request)
   0.000  prefill engine 11: least tokens (0) of 1 with a short reading queue; 0 more with a long one, of 1 in the group
   0.000  decode engine 31: fewest requests (0) of those that stay below Z = 1008 with 250 tokens more (4 queued fit)
   0.000  started on engines 11 and 31: prefill side reads 0 of 0 cached tokens
   0.000  read queues: 192 tokens on the prefill side, 0 on the decode side
   0.000  tokens [0, 128) are recomputed: the weights have changed

# abort: all but request 4 are rejected. The same epoch again has no requests left.

epoch to=5 drain=abort
----
{Queued:1 Prefilling:2 Decoding:0 Exact:1}
25 abort request 2: engine 11; the weights changed, and the change ended the requests of older weights
26 abort request 2: engine 31; the weights changed, and the change ended the requests of older weights
27 reject request 2; the weights changed, and the change ended the requests of older weights
28 abort request 1: engine 11; the weights changed, and the change ended the requests of older weights
29 abort request 1: engine 31; the weights changed, and the change ended the requests of older weights
30 reject request 1; the weights changed, and the change ended the requests of older weights

epoch to=5 drain=abort
----
{Queued:0 Prefilling:0 Decoding:0 Exact:1}
nothing

# An older epoch is none.

epoch to=4 drain=abort
----
{Queued:0 Prefilling:0 Decoding:0 Exact:1}
nothing

stats
----
{Submitted:4 Started:6 Rejected:2 Replanned:4 Finished:0 PartsPrefill:2 PartsDecode:1 TokensPrefill:192 TokensDecode:128 Splits:0 Cuts:0 Hedges:0 Recomputes:3 Aborted:2 Switched:0 SwitchesFailed:0 Late:0 Queued:2 Loading:0 Serving:2 PrefillRate:0}

# The same epoch with another policy: request 5 finishes, then the operator loses patience.

submit id=5 prompt=200 hit=128 out=50 epoch=5
----
nothing

fetch group=1 tok=(0)
----
31 assign request 3: prefill engine 11
32 assign request 3: decode engine 31
33 start request 3: prefill 11, decode 31
34 recompute request 3: engine 11; prefill [0, 128); the weights have changed

epoch to=6 drain=finish
----
{Queued:1 Prefilling:1 Decoding:0 Exact:1}
nothing

epoch to=6 drain=recompute
----
{Queued:0 Prefilling:1 Decoding:0 Exact:1}
35 abort request 3: engine 11; the weights have changed
36 abort request 3: engine 31; the weights have changed
replan request 3; the weights have changed
