# What is refused, and why.

planner queue=2
----

submit id=1 prompt=0
----
1 reject request 1; prompt, hit and output are inconsistent

submit id=1 prompt=10 hit=11
----
2 reject request 1; prompt, hit and output are inconsistent

submit id=1 prompt=10 hit=-1
----
3 reject request 1; prompt, hit and output are inconsistent

submit at=100 id=1 prompt=10 deadline=50
----
4 reject request 1; past its deadline

submit id=1 prompt=10
----
nothing

submit id=1 prompt=10
----
5 reject request 1; a request of that ID is being served

submit id=2 prompt=10
----
nothing

submit id=3 prompt=10
----
6 reject request 3; the queue is full

# Nobody knows these.

fetch group=9
----
nothing

progress request=9 side=prefill upto=5
----
nothing

stopped request=9 side=decode upto=5
----
nothing

finished request=9 side=decode
----
nothing

cancel request=9
----
nothing

down group=9
----
nothing

cancel request=1
----
7 reject request 1; cancelled by the gateway

submit id=3 prompt=10
----
nothing

explain request=3
----

explain request=99
----
not remembered
