# The session of a group breaks while the planner lives on, and messages are lost on the way. The group registers again, with
# the last order that it has of each request; its leader repeats its last report about each read and each end.

planner alpha=100000 beta=100000 minpart=256
----

up group=1 role=prefill engines=(1@1) hbm=100000
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

# The report that the decode side has read its part is lost. The leader repeats it. A repetition of what has arrived counts once.

up group=2 role=decode engines=(2@2) hbm=100000 holding=(1@2#3/3) again
----
nothing

progress at=390 request=1 attempt=3 side=decode upto=8192 landed=4096 read=3
----
nothing

up group=2 role=decode engines=(2@2) hbm=100000 holding=(1@2#3/3) again
----
nothing

progress request=1 attempt=3 side=decode upto=8192 landed=4096 read=3
----
nothing

# The Cut of the slow prefill side is lost. The planner sends it again, with a new number, and not a third time.

progress at=400 request=1 attempt=3 side=prefill upto=256 landed=256 read=3
----
nothing

fetch group=2 queue=(0)
----
nothing

tick at=401
----
4 cut request 1: prefill side, engine 1

up group=1 role=prefill engines=(1@1) hbm=100000 holding=(1@1#3/3) again
----
5 cut request 1: prefill side, engine 1

up group=1 role=prefill engines=(1@1) hbm=100000 holding=(1@1#3/5) again
----
nothing

# The answer is lost, and repeated twice. The decode side reads the rest, once.

up group=1 role=prefill engines=(1@1) hbm=100000 holding=(1@1#3/5) again
----
nothing

stopped at=403 request=1 attempt=3 side=prefill upto=320 read=3 failed
----
6 read request 1: decode side, engine 2; decode [320, 4096)

stopped request=1 attempt=3 side=prefill upto=320 read=3 failed
----
nothing

# This Read is lost. The planner sends it again. A repeated report about the decode side's first part is not about the second one,
# whose end is before that of the first.

up group=2 role=decode engines=(2@2) hbm=100000 holding=(1@2#3/3) again
----
7 read request 1: decode side, engine 2; decode [320, 4096)

progress request=1 attempt=3 side=decode upto=8192 landed=4096 read=3
----
nothing

state
----
prefill group 1
  node 1: read queue 4096 at 10000 tokens/s
    engine 1: tok 8292, seq 1, hbm 91680
decode group 2, 0 queued, total 8292
  node 2: read queue 3776 at 10000 tokens/s
    engine 2: tok 8292, seq 1, hbm 91680
waiting 0, loading 1

# Storage does not have the rest. The Recompute is lost and sent again.

stopped at=500 request=1 attempt=3 side=decode upto=384 read=7 gone
----
8 recompute request 1: engine 1; prefill [384, 4096); no longer in storage

up group=1 role=prefill engines=(1@1) hbm=100000 holding=(1@1#3/5) again
----
9 recompute request 1: engine 1; prefill [384, 4096); no longer in storage

# The end of prefill is lost. The prefill group holds the request as ended, and its report is repeated, twice.

up group=1 role=prefill engines=(1@1) hbm=100000 holding=(1@1#3/9/ended) again
----
nothing

finished request=1 attempt=3 side=prefill
----
prefilled request 1

up group=1 role=prefill engines=(1@1) hbm=100000 holding=(1@1#3/9/ended) again
----
nothing

finished request=1 attempt=3 side=prefill
----
nothing

# The same for the end of decode. When the request is over, the repetition is about nothing.

up group=2 role=decode engines=(2@2) hbm=100000 holding=(1@2#3/7/ended) again
----
nothing

finished request=1 attempt=3 side=decode
----
done request 1

up group=2 role=decode engines=(2@2) hbm=100000 holding=(1@2#3/7/ended) again
----
nothing

finished request=1 attempt=3 side=decode
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
   0.401  prefill side is slow: 6015 ms left there, 384 ms on the other side; the read is cut
   0.401  prefill side: sent again: cut
   0.403  prefill side: stopped at 320 of 4096
   0.403  decode side: reads [320, 4096) too
   0.403  decode side: sent again: read
   0.500  decode side: stopped at 384 of 4096
   0.500  tokens [384, 4096) are recomputed: no longer in storage
   0.500  prefill side: sent again: recompute
   0.500  prefill done
   0.500  decode done

state
----
prefill group 1
  node 1: read queue 4096 at 10000 tokens/s
    engine 1: tok 0, seq 0, hbm 100000
decode group 2, 0 queued, total 0
  node 2: read queue 3776 at 10000 tokens/s
    engine 2: tok 0, seq 0, hbm 100000
waiting 0, loading 0

# The Drop of a read that the other side was faster with is lost, and sent again.

submit at=1000 id=2 prompt=612 hit=512
----
nothing

fetch group=2 queue=(0)
----
nothing

fetch group=1 queue=(0)
----
10 assign request 2: prefill engine 1
11 assign request 2: decode engine 2
12 start request 2: prefill 1, decode 2; prefill [0, 256); decode [256, 512)

progress at=1030 request=2 side=prefill upto=256
----
nothing

progress at=1031 request=2 side=decode upto=448
----
nothing

tick at=1100
----
13 read request 2: prefill side, engine 1; prefill [448, 512); hedge

progress at=1105 request=2 side=prefill upto=512
----
14 drop request 2: decode side, engine 2

up group=2 role=decode engines=(2@2) hbm=100000 holding=(2@2#12/12) again
----
15 drop request 2: decode side, engine 2

# The decode engine fails, and the report is lost. The group holds the request as ended; the report is repeated. The second time
# it is about an attempt that the request has left.

up group=2 role=decode engines=(2@2) hbm=100000 holding=(2@2#12/15/ended) again
----
nothing

failed request=2 attempt=12 side=decode
----
16 abort request 2: engine 1; an engine could not do its part
replan request 2; an engine could not do its part

up group=2 role=decode engines=(2@2) hbm=100000 holding=(2@2#12/15/ended) again
----
nothing

failed request=2 attempt=12 side=decode
----
nothing

# It is started again. Assign and Start are lost, and the confirmation of the failure too: the group still holds the attempt that
# failed. The request is planned anew.

fetch group=1
----
17 assign request 2: prefill engine 1
18 assign request 2: decode engine 2
19 start request 2: prefill 1, decode 2; prefill [0, 256); decode [256, 512)

up group=2 role=decode engines=(2@2) hbm=100000 holding=(2@2#12/15/ended) again
----
20 abort request 2: engine 1; its group is gone
replan request 2; its group is gone

failed request=2 attempt=12 side=decode
----
nothing

fetch group=1
----
21 assign request 2: prefill engine 1
22 assign request 2: decode engine 2
23 start request 2: prefill 1, decode 2; prefill [0, 256); decode [256, 512)

# The gateway gives it up, and the Abort of the prefill side is lost. The planner sends it again: a planner that lives on has no such
# request. A request of the same id that its gateway has submitted since is another one.

cancel request=2
----
24 abort request 2: engine 1; cancelled by the gateway
25 abort request 2: engine 2; cancelled by the gateway
26 reject request 2; cancelled by the gateway

up group=1 role=prefill engines=(1@1) hbm=100000 holding=(2@1#23/23) again
----
27 abort request 2: engine 1

submit id=2 prompt=612
----
nothing

up group=2 role=decode engines=(2@2) hbm=100000 holding=(2@2#23/23) again
----
28 abort request 2: engine 2; its group is gone

finished request=2 attempt=23 side=decode
----
nothing

# A leader of an earlier version does not report the last order. A request of which an order may be lost is planned anew, unless
# its prefill has ended.

planner minpart=256
----

up group=1 role=prefill engines=(1@1)
----
nothing

up group=2 role=decode engines=(2@2) hbm=100000
----
nothing

submit id=1 prompt=612 hit=512
----
nothing

submit id=2 prompt=612 hit=512
----
nothing

submit id=3 prompt=612 hit=512
----
nothing

fetch group=1
----
1 assign request 1: prefill engine 1
2 assign request 1: decode engine 2
3 start request 1: prefill 1, decode 2; prefill [0, 256); decode [256, 512)
4 assign request 2: prefill engine 1
5 assign request 2: decode engine 2
6 start request 2: prefill 1, decode 2; prefill [0, 256); decode [256, 512)
7 assign request 3: prefill engine 1
8 assign request 3: decode engine 2
9 start request 3: prefill 1, decode 2; prefill [0, 256); decode [256, 512)

stopped request=1 side=prefill upto=64 gone
----
10 recompute request 1: engine 1; prefill [64, 256); no longer in storage

stopped request=2 side=prefill upto=64 gone
----
11 recompute request 2: engine 1; prefill [64, 256); no longer in storage

finished request=2 side=prefill
----
prefilled request 2

up group=1 role=prefill engines=(1@1) holding=(1@1#3,3@1#9)
----
12 abort request 1: engine 1; its group is gone
13 abort request 1: engine 2; its group is gone
replan request 1; its group is gone

# A prefill group misses the Abort of an attempt. When it is back, the request is decoded on another attempt, whose prefill engine
# has ended its part and holds nothing. The first group is told to leave it, and decode goes on.

planner
----

up group=1 role=prefill engines=(1@1)
----
nothing

up group=2 role=decode engines=(2@2) hbm=1000
----
nothing

submit id=1 prompt=100
----
nothing

fetch group=1
----
1 assign request 1: prefill engine 1
2 assign request 1: decode engine 2
3 start request 1: prefill 1, decode 2

up group=3 role=prefill engines=(3@3)
----
nothing

failed request=1 attempt=3 side=decode
----
4 abort request 1: engine 1; an engine could not do its part
replan request 1; an engine could not do its part

fetch group=3
----
5 assign request 1: prefill engine 3
6 assign request 1: decode engine 2
7 start request 1: prefill 3, decode 2

finished request=1 attempt=7 side=prefill
----
prefilled request 1

up group=3 role=prefill engines=(3@3) again
----
nothing

up group=1 role=prefill engines=(1@1) holding=(1@1#3/3) again
----
8 abort request 1: engine 1; its group is gone

finished request=1 attempt=7 side=decode
----
done request 1
