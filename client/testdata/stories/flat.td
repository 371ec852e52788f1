# Keys without parents: a match is the run of keys that are there.

ns f flat
----
4 tokens × [full 4×512 B], flat, epoch 1

put f prompt=1 blocks=3
----
hit: 3 stored, 0 were there; the prefix has 3 blocks

match f prompt=1 blocks=5
----
hit: 3 blocks, 12 tokens, 24576 bytes, epoch 1; cut: absent

put f prompt=1 blocks=5 first=4
----
hit: 1 stored, 0 were there; the prefix has 5 blocks

# Block 3 is missing; block 4 is there, but behind it.

get f prompt=1 blocks=5
----
hit: 3 blocks, 24576 bytes, every one as it was written; cut: absent

put f prompt=1 blocks=5
----
hit: 1 stored, 4 were there; the prefix has 5 blocks

get f prompt=1 blocks=5
----
hit: 5 blocks, 40960 bytes, every one as it was written; cut: complete
