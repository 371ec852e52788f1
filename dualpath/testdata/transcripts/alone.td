# The planner ended, and the planner after it finds an attempt on one side of a request. The group of the other engine comes back
# without the attempt. The attempt is aborted, and the request is planned again.

# The Start reached the decode engine only: the prefill group has seen no action as late.

planner
----

up group=2 role=decode engines=(2@2) hbm=10000 hit=512 holding=(1@2#3/3+256-512~1) seen=3
----
nothing

submit id=1 prompt=100
----
4 reject request 1; a request of that ID is being served

up group=1 role=prefill engines=(1@1) seen=2
----
5 abort request 1: engine 2; its group is gone
replan request 1; its group is gone

explain request=1
----
   0.000  found with engine 2, as its group reports
   0.000  no prefill engine has it; planned anew

fetch group=2
----
nothing

fetch group=1
----
6 assign request 1: prefill engine 1
7 assign request 1: decode engine 2
8 start request 1: prefill 1, decode 2; prefill [0, 256); decode [256, 512)

# The same, the prefill group first, and the group was never given anything.

planner
----

up group=1 role=prefill engines=(1@1) seen=0
----
nothing

up group=2 role=decode engines=(2@2) hbm=10000 holding=(1@2#3/3~1) seen=3
----
4 abort request 1: engine 2; its group is gone
replan request 1; its group is gone

# The Start reached the prefill engine only, or the decode engine has ended its part or left the attempt.

planner
----

up group=1 role=prefill engines=(1@1) holding=(1@1#3/3~2) seen=3
----
nothing

up group=2 role=decode engines=(2@2) hbm=10000 seen=3
----
4 abort request 1: engine 1; its group is gone
replan request 1; its group is gone

# The prefill engine ends its part before the decode group comes back.

planner
----

up group=1 role=prefill engines=(1@1) holding=(1@1#3/3~2) seen=3
----
nothing

finished request=1 attempt=3 side=prefill
----
prefilled request 1

up group=2 role=decode engines=(2@2) hbm=10000 seen=3
----
replan request 1; its group is gone

# Prefill may have ended: the prefill group has seen the Start, and the decode engine reads nothing. Decode goes on.

planner
----

up group=1 role=prefill engines=(1@1) seen=3
----
nothing

up group=2 role=decode engines=(2@2) hbm=10000 holding=(1@2#3/3~1) seen=3
----
nothing

finished request=1 attempt=3 side=decode
----
done request 1

# Prefill has not ended while the decode engine reads: the prefill engine has left the attempt.

planner
----

up group=2 role=decode engines=(2@2) hbm=10000 hit=512 holding=(1@2#3/3+256-512r3~1) seen=3
----
nothing

up group=1 role=prefill engines=(1@1) seen=4
----
5 abort request 1: engine 2; its group is gone
replan request 1; its group is gone

# A prefill group with a new leader may have completed its part before.

planner
----

up group=2 role=decode engines=(2@2) hbm=10000 holding=(1@2#3/3~1) seen=3
----
nothing

up group=1 role=prefill engines=(1@1)
----
nothing

finished request=1 attempt=3 side=decode
----
done request 1

# The prefill group does not come back within the time in which it must reconnect. Request 1 is being read. The prefill of
# request 2 may have ended.

planner
----

up group=2 role=decode engines=(2@2) hbm=10000 hit=512 holding=(1@2#3/3+256-512r3~1,2@2#6/6~1) seen=6
----
nothing

fetch at=4000 group=2
----
nothing

tick at=5001
----
7 abort request 1: engine 2; its group is gone
replan request 1; its group is gone

finished request=2 attempt=6 side=decode
----
done request 2
