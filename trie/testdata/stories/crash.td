# Unsynced blocks may be missing after a crash; no other block is wrong.
create glm
----

put glm durable
a1 a2
----
a1 a2 added

put glm
a1 a2 a3 a4
----
a1 a2 exists
a3 a4 added

crash
----
loaded 2  stale epoch 0  orphans 0  duplicates 0  corrupt 0

match glm
a1 a2 a3 a4
----
2 blocks, 4 tokens, cut absent
group 0: 0=v0/s0/1@1 1=v0/s0/2@2

# A durable put also makes blocks durable that existed before.
put glm
a1 a2 a3
----
a1 a2 exists
a3 added

put glm durable
a1 a2 a3
----
a1 a2 a3 exists

crash
----
loaded 3  stale epoch 0  orphans 0  duplicates 0  corrupt 0

# A crash undoes an eviction that was not synced; the store recognises the slot's old generation.
evict want=1
----
glm epoch 1: a3 v0/s0/9@9

crash
----
loaded 3  stale epoch 0  orphans 0  duplicates 0  corrupt 0

draw
----
glm epoch 1
└─ a1000000 v0/s0/1@1
   └─ a2000000 v0/s0/2@2
      └─ a3000000 v0/s0/9@9

# A block whose parent's record is missing is dropped when the index is opened.
delete glm a2
----

crash
----
loaded 1  stale epoch 0  orphans 1  duplicates 0  corrupt 0

draw
----
glm epoch 1
└─ a1000000 v0/s0/1@1
