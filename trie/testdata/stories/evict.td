# FIFO order, leaf first: the oldest chain is evicted from its end.
open policy=fifo
----

create glm
----

put glm
a1 a2 a3
b1 b2 b3
----
a1 a2 a3 b1 b2 b3 added

evict want=2
----
glm epoch 1: a3 v0/s0/3@3
glm epoch 1: a2 v0/s0/2@2

evict want=2
----
glm epoch 1: a1 v0/s0/1@1
glm epoch 1: b3 v0/s0/6@6

# A block that is put again counts as new.
put glm
a1 a2 a3
----
a1 a2 a3 added

evict want=2
----
glm epoch 1: b2 v0/s0/5@5
glm epoch 1: b1 v0/s0/4@4

draw
----
glm epoch 1
└─ a1000000 v0/s0/7@7
   └─ a2000000 v0/s0/8@8
      └─ a3000000 v0/s0/9@9

# Transfer blocks are evicted first, or dropped after their delivery.
put glm transfer
a1 a2 a3 c4 c5
----
a1 a2 a3 exists
c4 c5 added

draw
----
glm epoch 1
└─ a1000000 v0/s0/7@7
   └─ a2000000 v0/s0/8@8
      └─ a3000000 v0/s0/9@9
         └─ c4000000 v0/s0/13@13 transfer
            └─ c5000000 v0/s0/14@14 transfer

evict want=1
----
glm epoch 1: c5 v0/s0/14@14

delivered glm
a1 a2 a3 c4
----
glm epoch 1: c4 v0/s0/13@13

draw
----
glm epoch 1
└─ a1000000 v0/s0/7@7
   └─ a2000000 v0/s0/8@8
      └─ a3000000 v0/s0/9@9

# A transfer block that is put again as a prefix is kept.
put glm transfer
e1 e2
----
e1 e2 added

put glm
d1
----
d1 added

put glm transfer
d2
----
d2 added

put glm
d2
----
d2 exists

evict want=1
----
glm epoch 1: e2 v0/s0/16@16

reopen
----
loaded 6  stale epoch 0  orphans 0  duplicates 0  corrupt 0

draw
----
glm epoch 1
├─ a1000000 v0/s0/7@7
│  └─ a2000000 v0/s0/8@8
│     └─ a3000000 v0/s0/9@9
├─ d1000000 v0/s0/17@17
├─ d2000000 v0/s0/18@18
└─ e1000000 v0/s0/15@15 transfer
