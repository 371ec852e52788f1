# The first eight prefills take a second each. From then on the planner estimates first tokens.
planner beta=1 compute=1000
----

up group=2 role=decode engines=(2@2)
----
nothing

up group=1 role=prefill engines=(1@1)
----
nothing

submit id=100 prompt=50000 first=1
----
nothing

tick at=1
----
1 reject request 100; the first token cannot come by its deadline

submit id=1 prompt=1000 at=1000
----
nothing

fetch group=1 tok=(0)
----
2 assign request 1: prefill engine 1
3 assign request 1: decode engine 2
4 start request 1: prefill 1, decode 2

finished request=1 side=prefill at=2000
----
prefilled request 1

finished request=1 side=decode
----
done request 1

submit id=2 prompt=1000 at=2000
----
nothing

fetch group=1 tok=(0)
----
5 assign request 2: prefill engine 1
6 assign request 2: decode engine 2
7 start request 2: prefill 1, decode 2

finished request=2 side=prefill at=3000
----
prefilled request 2

finished request=2 side=decode
----
done request 2

submit id=3 prompt=1000 at=3000
----
nothing

fetch group=1 tok=(0)
----
8 assign request 3: prefill engine 1
9 assign request 3: decode engine 2
10 start request 3: prefill 1, decode 2

finished request=3 side=prefill at=4000
----
prefilled request 3

finished request=3 side=decode
----
done request 3

submit id=4 prompt=1000 at=4000
----
nothing

fetch group=1 tok=(0)
----
11 assign request 4: prefill engine 1
12 assign request 4: decode engine 2
13 start request 4: prefill 1, decode 2

finished request=4 side=prefill at=5000
----
prefilled request 4

finished request=4 side=decode
----
done request 4

submit id=5 prompt=1000 at=5000
----
nothing

fetch group=1 tok=(0)
----
14 assign request 5: prefill engine 1
15 assign request 5: decode engine 2
16 start request 5: prefill 1, decode 2

finished request=5 side=prefill at=6000
----
prefilled request 5

finished request=5 side=decode
----
done request 5

submit id=6 prompt=1000 at=6000
----
nothing

fetch group=1 tok=(0)
----
17 assign request 6: prefill engine 1
18 assign request 6: decode engine 2
19 start request 6: prefill 1, decode 2

finished request=6 side=prefill at=7000
----
prefilled request 6

finished request=6 side=decode
----
done request 6

submit id=7 prompt=1000 at=7000
----
nothing

fetch group=1 tok=(0)
----
20 assign request 7: prefill engine 1
21 assign request 7: decode engine 2
22 start request 7: prefill 1, decode 2

finished request=7 side=prefill at=8000
----
prefilled request 7

finished request=7 side=decode
----
done request 7

submit id=8 prompt=1000 at=8000
----
nothing

fetch group=1 tok=(0)
----
23 assign request 8: prefill engine 1
24 assign request 8: decode engine 2
25 start request 8: prefill 1, decode 2

finished request=8 side=prefill at=9000
----
prefilled request 8

finished request=8 side=decode
----
done request 8

# A request is under way for one of its four seconds, and two wait.
submit id=10 prompt=4000
----
nothing

fetch group=1 tok=(0)
----
26 assign request 10: prefill engine 1
27 assign request 10: decode engine 2
28 start request 10: prefill 1, decode 2

submit id=11 prompt=2000
----
nothing

submit id=12 prompt=2000
----
nothing

submit id=13 prompt=500 first=11000 at=10000
----
29 reject request 13; the first token cannot come by its deadline: 5452000, at most 1000000

explain request=13
----
  10.000  its first token is expected in 5452 ms at the earliest; its deadline is in 1000 ms
  10.000  ended: the first token cannot come by its deadline

submit id=14 prompt=500 first=15500
----
nothing

fetch group=2 at=12000
----
nothing

fetch group=1 tok=(4000)
----
nothing

# It waits until no engine could be in time.
tick at=14999
----
nothing

tick at=15000
----
30 reject request 14; the first token cannot come by its deadline: 2452000, at most 500000

explain request=14
----
  12.000  decode group 2: least tokens of all groups (16500 with this request)
  15.000  its first token is expected in 2452 ms at the earliest; its deadline is in 500 ms
  15.000  ended: the first token cannot come by its deadline
