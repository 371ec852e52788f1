# The planner after a restart takes over the reads that both engines of a request have under way, with the numbers of the orders.

planner
----

up group=1 role=prefill engines=(1@1) hit=512 holding=(1@1#3/3+0-256r3)
----
nothing

# A report may come before the other engine is known.

progress request=1 attempt=3 side=prefill upto=256 landed=256 read=3
----
nothing

up group=2 role=decode engines=(2@2) hbm=10000 hit=512 holding=(1@2#3/3+256-512r3)
----
nothing

# The read of the decode side stops. The prefill side reads the rest. Storage does not have it, and it is recomputed.

stopped request=1 attempt=3 side=decode upto=320 read=3 failed
----
4 read request 1: prefill side, engine 1; prefill [320, 512)

stopped request=1 attempt=3 side=prefill upto=384 read=4 gone
----
5 recompute request 1: engine 1; prefill [384, 512); no longer in storage

finished request=1 attempt=3 side=prefill
----
prefilled request 1

finished request=1 attempt=3 side=decode
----
done request 1

# The Cut of a slow read was lost with the planner. The next planner cuts the read when it has been slow there too.

planner
----

up group=1 role=prefill engines=(1@1) hit=512 holding=(1@1#3/3+0-256r3)
----
nothing

up group=2 role=decode engines=(2@2) hbm=10000 hit=512 holding=(1@2#3/3+256-512)
----
nothing

fetch group=1 queue=(256)
----
nothing

tick at=1000
----
4 cut request 1: prefill side, engine 1

stopped request=1 attempt=3 side=prefill upto=64 read=3
----
5 read request 1: decode side, engine 2; decode [64, 256)

# Both sides read the same rest. When one of them has it, the other drops its read.

planner
----

up group=1 role=prefill engines=(1@1) hit=512 holding=(1@1#3/3+0-256r3)
----
nothing

up group=2 role=decode engines=(2@2) hbm=10000 hit=512 holding=(1@2#3/5+256-512+128-256r5)
----
nothing

progress request=1 attempt=3 side=decode upto=256 read=5
----
6 drop request 1: prefill side, engine 1

stopped request=1 attempt=3 side=prefill upto=128 read=3
----
nothing

# A read stops before the group of the other engine is back: the request is planned again.

planner
----

up group=1 role=prefill engines=(1@1) hit=512 holding=(1@1#3/3+0-256r3)
----
nothing

stopped request=1 attempt=3 side=prefill upto=64 read=3 failed
----
4 abort request 1: engine 1; an engine could not do its part
replan request 1; an engine could not do its part
