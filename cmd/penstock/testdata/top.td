start
----
ready

run
ns create chat --layers 2 --block-tokens 4 --token-bytes 1024 --quota 10MiB
ns create code --layers 2 --block-tokens 4 --token-bytes 1024
----
name         chat
id           1
index        trie
geometry     4 tokens × [full 2×1024 B]
block        8.0 KiB
epoch        1
epoch since  TIME
quota        10 MiB
used         0 B
blocks       0
leases       0
name         code
id           2
index        trie
geometry     4 tokens × [full 2×1024 B]
block        8.0 KiB
epoch        1
epoch since  TIME
quota        none
used         0 B
blocks       0
leases       0

tokens prompt 0 12
----

data bytes 1 24576
----

run
block put chat --tokens-file @prompt --data-file @bytes
ns bump-epoch chat --keep 2
----
stored 3 blocks (24 KiB), 0 were there already, last block 4a9aa07ccc29c24bb8fef42b709ab9f5
namespace chat: epoch 1 -> 2
live: 2, 1

fields
ns top --once --interval 100ms --answer-timeout 1m
top --view namespaces -n 2 --interval 100ms --answer-timeout 1m --sort old --limit 1
top --view nics --once --interval 100ms --answer-timeout 1m
----
----
NAMESPACE EPOCH CHANGED HIT USED QUOTA READS/s READ B/s WRITES/s WRITE B/s EVICT/s OLD LIVE TOKENS/s LEASES NODES
chat 2 DURATION ago - 36 KiB 0.4 % of 10 MiB 0 0 B 0 0 B 0 36 KiB 2 0 0 1
code 1 DURATION ago - 0 B none 0 0 B 0 0 B 0 0 B 1 0 0 1
NAMESPACE EPOCH CHANGED HIT USED QUOTA READS/s READ B/s WRITES/s WRITE B/s EVICT/s OLD LIVE TOKENS/s LEASES NODES
chat 2 DURATION ago - 36 KiB 0.4 % of 10 MiB 0 0 B 0 0 B 0 36 KiB 2 0 0 1

NAMESPACE EPOCH CHANGED HIT USED QUOTA READS/s READ B/s WRITES/s WRITE B/s EVICT/s OLD LIVE TOKENS/s LEASES NODES
chat 2 DURATION ago - 36 KiB 0.4 % of 10 MiB 0 0 B 0 0 B 0 36 KiB 2 0 0 1
NODE NIC STATE SENT B/s SENT RECEIVED B/s RECEIVED LINK ADDRESS REASON
test DATA up 0 B - 0 B - - DATA
----
----

# A node that does not answer has a row. No answer at all is a failure.
run
ns top --once --interval 100ms --server 127.0.0.1:1
----
NAMESPACE    EPOCH  CHANGED  HIT  USED  QUOTA  READS/s  READ B/s  WRITES/s  WRITE B/s  EVICT/s  OLD  LIVE  TOKENS/s  LEASES  NODES
127.0.0.1:1  no answer: dial tcp 127.0.0.1:1: connect: connection refused
exit 1

# Mistakes.
run
top --sort speed
ns top --sort fill
top --view nodes --sort sent
top --view racks
top --interval 10ms
top --once --count 3
top --limit -1
top --answer-timeout -1s
top --server a:1,b:2,a:1
top --server a
top x
ns top chat
----
penstock: --sort "speed": unknown key; want one of node, state, fill, reads, read-bytes, writes, write-bytes, hit, evictions, busy, queue, volumes, tokens, used, up, reason
Run 'penstock top --help' for usage.
exit 2
penstock: --sort "fill": unknown key; want one of namespace, epoch, changed, hit, used, quota, reads, read-bytes, writes, write-bytes, evictions, old, live, tokens, leases, nodes
Run 'penstock ns top --help' for usage.
exit 2
penstock: --sort "sent": unknown key; want one of node, state, fill, reads, read-bytes, writes, write-bytes, hit, evictions, busy, queue, volumes, tokens, used, up, reason
Run 'penstock top --help' for usage.
exit 2
penstock: --view "racks": want nodes, namespaces, nics or volumes
Run 'penstock top --help' for usage.
exit 2
penstock: --interval DURATION: want at least DURATION
Run 'penstock top --help' for usage.
exit 2
penstock: if any flags in the group [count once] are set none of the others can be; [count once] were all set
Run 'penstock top --help' for usage.
exit 2
penstock: --limit -1: must not be negative
Run 'penstock top --help' for usage.
exit 2
penstock: --answer-timeout -DURATION: must not be negative
Run 'penstock top --help' for usage.
exit 2
penstock: --server: a:1 is listed twice
Run 'penstock top --help' for usage.
exit 2
penstock: --server: server "a" is not host:port: address a: missing port in address
Run 'penstock top --help' for usage.
exit 2
penstock: unknown command "x" for "penstock top" (usage: penstock top [flags])
Run 'penstock top --help' for usage.
exit 2
penstock: unknown command "chat" for "penstock ns top" (usage: penstock ns top [flags])
Run 'penstock ns top --help' for usage.
exit 2

stop
----
exit 0
