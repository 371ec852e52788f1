# Hybrid models, and keys that an engine made.

start
----
ready

run
ns create hybrid --block-tokens 4 --group full:2:512 --group window:1:100:6 --group state:1:1000
ns create flat --layers 2 --block-tokens 4 --token-bytes 1024 --index flat
----
name         hybrid
id           1
index        trie
geometry     4 tokens × [full 2×512 B, window 1×100 B window 6, state 1×1000 B]
block        5.4 KiB
epoch        1
epoch since  TIME
quota        none
used         0 B
blocks       0
leases       0
name         flat
id           2
index        flat
geometry     4 tokens × [full 2×1024 B]
block        8.0 KiB
epoch        1
epoch since  TIME
quota        none
used         0 B
blocks       0
leases       0

tokens prompt 1 20
----

tokens part 1 12
----

# 5 blocks of 4096 + 400 + 1000 bytes

data blocks 7 27480
----

run
block put hybrid --tokens-file @prompt --data-file @blocks
prefix match hybrid --tokens-file @prompt --format json
block get hybrid --tokens-file @prompt --out @got
block get hybrid --tokens-file @part --out @got
block stat hybrid --tokens-file @part
----
stored 5 blocks (27 KiB), 0 were there already, last block 6b46d7f723493b0cbcda609519c4ee68
{
  "namespace": "hybrid",
  "epoch": 1,
  "asked_tokens": 20,
  "asked_blocks": 5,
  "matched_tokens": 20,
  "matched_blocks": 5,
  "matched_bytes": 22280,
  "cut": "complete"
}
5 of 5 blocks (20 tokens, 27 KiB), cut: complete
3 of 3 blocks (12 tokens, 16 KiB), cut: complete
#  ID                                DEPTH  GROUP  SLOT     GENERATION  CHILDREN  LEASES  CLASS
0  5de7edf61aebd1e557df36f531757209  0      0      v0/s0/0  4294967298  3         0       prefix
1  bd7d8bdea64d2a218568c4957d68b4aa  1      0      v0/s0/1  4294967299  3         0       prefix
2  3f05797363697be6813dda35f98fe0b9  2      0      v0/s0/2  4294967300  3         0       prefix

data keyed 9 16384
----

text keys
00000000000000000000000000000001
00000000000000000000000000000002
----

text mixed
00000000000000000000000000000002
00000000000000000000000000000001
00000000000000000000000000000003
----

run
block put flat --ids-file @keys --data-file @keyed
block get flat --ids-file @keys --out @flat
prefix match flat --ids-file @mixed
block put flat --ids-file @mixed --data-file @keyed
----
stored 2 blocks (16 KiB), 0 were there already, last block 00000000000000000000000000000002
2 of 2 blocks (8 tokens, 16 KiB), cut: complete
matched  8 of 12 tokens, 2 of 3 blocks, 16 KiB
cut      absent
epoch    1
penstock: DIR/keyed has 16384 bytes, 2 Full Blocks of 8192; the prompt has 3 whole blocks, which are 24576 bytes
exit 1

same flat keyed
----
true

run
prefix match flat --ids-file @prompt
prefix match flat --ids-file @keys --tokens-file @prompt
prefix match flat
----
penstock: DIR/prompt:1:1: kv: block id "1" has 1 characters; want 32 hexadecimal digits
exit 1
penstock: if any flags in the group [tokens-file ids-file] are set none of the others can be; [ids-file tokens-file] were all set
Run 'penstock prefix match --help' for usage.
exit 2
penstock: at least one of the flags in the group [tokens-file ids-file] is required
Run 'penstock prefix match --help' for usage.
exit 2

stop
----
exit 0
