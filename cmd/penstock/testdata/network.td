# What the operator says of the network, before the planner is told.

text network.yaml
tiers:
  - {bandwidth_gbps: 3600, latency: 1us}
  - {bandwidth_gbps: 100, latency: 3us}
  - {bandwidth_gbps: 50, latency: 8us}
  - {bandwidth_gbps: 25, latency: 15us}
congestion: [0, 0, 0.1, 0.2]
places:
  node-a: {pod: a, rack: a1}
  node-b: {pod: a, rack: a2}
  node-c: {pod: b, rack: b1}
----

run
plan network --network-file @network.yaml --network-bytes-per-token 327680
----
source file        answers
machines           3 in 2 pods, 3 racks
tier 0, same node  3600 Gbit/s, 1 us, 0 % used by others
tier 1, same rack  100 Gbit/s, 3 us, 0 % used by others
tier 2, same pod   50 Gbit/s, 8 us, 10 % used by others
tier 3, cross pod  25 Gbit/s, 15 us, 20 % used by others

# 16K tokens are 5.4 GB: at nine tenths of 50 Gbit/s within the pod, at eight tenths of 25 across.

run
plan network --network-file @network.yaml --network-bytes-per-token 327680 --from node-a --to node-b --tokens 16384
----
source file        answers
machines           3 in 2 pods, 3 racks
tier 0, same node  3600 Gbit/s, 1 us, 0 % used by others
tier 1, same rack  100 Gbit/s, 3 us, 0 % used by others
tier 2, same pod   50 Gbit/s, 8 us, 10 % used by others
tier 3, cross pod  25 Gbit/s, 15 us, 20 % used by others
node-a to node-b   tier 2; KV of 16,384 tokens: 0.954 s

run
plan network --network-file @network.yaml --network-bytes-per-token 327680 --from node-a --to node-c --tokens 16384
----
source file        answers
machines           3 in 2 pods, 3 racks
tier 0, same node  3600 Gbit/s, 1 us, 0 % used by others
tier 1, same rack  100 Gbit/s, 3 us, 0 % used by others
tier 2, same pod   50 Gbit/s, 8 us, 10 % used by others
tier 3, cross pod  25 Gbit/s, 15 us, 20 % used by others
node-a to node-c   tier 3; KV of 16,384 tokens: 2.15 s

run
plan network --network-file @network.yaml --network-bytes-per-token 327680 --from node-a --to node-x
----
penstock: machine "node-x" has no place in any source; it would be far from all others
exit 1

run
plan network --network-file @network.yaml
----
penstock: config: network.bytes_per_token: must be the bytes of KV of one token, is 0: bad configuration
Run 'penstock plan network --help' for usage.
exit 2

run
plan network
----
penstock: there is no source of the network; give one with --network-file or --config
Run 'penstock plan network --help' for usage.
exit 2

# A file that says too little, and one that is wrong.

text short.yaml
tiers: [{bandwidth_gbps: 5}]
----

run
plan network --network-file @short.yaml --network-bytes-per-token 1
----
source file  FAILS: netoracle: DIR/short.yaml:1: tiers: has 1 entries; it must have 4, near to far: same node, same rack, same pod, cross pod
machines     0 in 0 pods, 0 racks
exit 1
