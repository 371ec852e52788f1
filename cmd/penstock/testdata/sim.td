run
sim list
----
scenario                     simulator    about
agentic-660b-basic           agentic      DualPath's offline job, DS 660B on 2P4D, 256 agents of 64K; prefill's storage NICs alone
agentic-660b-dualpath        agentic      DualPath's offline job, DS 660B on 2P4D, 256 agents of 64K; the planner reads on both sides
agentic-660b-online          agentic      DualPath's online service, DS 660B on 2P4D, 0.4 agents a second
agentic-660b-scale           agentic      1,152 engines and 48,000 agents, 48P96D
netkv-rag                    netkv        NetKV section VI, retrieval at capacity, by NetKV
netkv-rag-cache-load         netkv        NetKV section VI, retrieval at capacity, by cache and load (CLA*)
prfaas-case-study            datacenters  PrfaaS section 4, saturated, with the best plan
prfaas-homogeneous           datacenters  the baseline of PrfaaS section 4, 96 H20, saturated
prfaas-link-at-half-fixed    datacenters  a link of 16 Gbps falls to 8 after ten minutes, without a controller
prfaas-link-at-half-steered  datacenters  a link of 16 Gbps falls to 8 after ten minutes, with the short-term controller
prfaas-sessions              datacenters  conversations of five turns, whose cached prefixes cross the link when it has room

text small.yaml
name: small
about: ten minutes of the case study at two requests a second
simulator: datacenters
seeds: 3
datacenters:
  system:
    profile: prfaas-1t
    lengths: {mu: 9.90, sigma: 1.00, min: 128, max: 128000}
    output_tokens: 1024
    prfaas: {accelerator: h200, gpus: 32}
    pd: {accelerator: h20, gpus: 64}
    egress_gbps: 100
  plan: {threshold: 19400, prefill: 3}
  rate: 2
  duration: 10m
  warmup: 1m
----

run
sim run @small.yaml
----
small, 3 runs                              mean    ± std
throughput                                 1.974   ± 0.01933   req/s
highest throughput of the plan, predicted  3.197               req/s
TTFT, mean                                 2.545   ± 0.05241   s
TTFT, P50                                  2.253   ± 0.01479   s
TTFT, P90                                  4.242   ± 0.1339    s
TTFT, P99                                  7.063   ± 0.2395    s
within the objective                       1                   share
offloaded                                  0.5068  ± 0.008942  share
prompt tokens cached                       0                   share
egress                                     7.653   ± 0.3132    Gbps
PrfaaS used                                0.6278  ± 0.02624   share
prefill used                               0.5953  ± 0.02342   share
decode used                                0.5054  ± 0.003254  share
completed                                  1066    ± 10.44
rejected                                   0
prefixes fetched                           0
adjustments                                0
threshold in the end                       19400               tokens
prefill instances in the end               3

# The naive plan, beside it: every prompt crosses the link.

text naive.yaml
name: naive
about: the same, with every prompt offloaded
simulator: datacenters
seeds: 3
datacenters:
  system:
    profile: prfaas-1t
    lengths: {mu: 9.90, sigma: 1.00, min: 128, max: 128000}
    output_tokens: 1024
    prfaas: {accelerator: h200, gpus: 32}
    pd: {accelerator: h20, gpus: 64}
    egress_gbps: 100
  plan: {threshold: 0, prefill: 0}
  rate: 2
  duration: 10m
  warmup: 1m
----

run
sim compare @small.yaml @naive.yaml --seeds 1
----
                                           small     naive     B over A
throughput                                 1.983     1.989     1.003     req/s
highest throughput of the plan, predicted  3.197     2.393     0.749     req/s
TTFT, mean                                 2.515     2.77      1.102     s
TTFT, P50                                  2.237     2.149     0.961     s
TTFT, P90                                  4.159     5.686     1.367     s
TTFT, P99                                  7.016     8.915     1.271     s
within the objective                       1         0.9972    0.997     share
offloaded                                  0.5024    1         1.991     share
prompt tokens cached                       0         0                   share
egress                                     7.303     10.18     1.393     Gbps
PrfaaS used                                0.5985    0.8025    1.341     share
prefill used                               0.5897    0         0.000     share
decode used                                0.5057    0.3174    0.628     share
completed                                  1071      1074      1.003
rejected                                   0         0
prefixes fetched                           0         0
adjustments                                0         0
threshold in the end                       19400     0         0.000     tokens
prefill instances in the end               3         0         0.000

# What cannot be.

text typo.yaml
name: typo
simulator: datacenters
datacenters:
  durations: 10m
----

run
sim run @typo.yaml
----
penstock: DIR/typo.yaml:4: datacenters: unknown key "durations"; did you mean "duration"? known are system, plan, rate, concurrency, duration, warmup, layers, transfers_max, queue_max, turns, think, block_tokens, abundant, switch_time, slo, short_term, long_term, changes
exit 1

text topology.yaml
name: topology
simulator: agentic
agentic:
  system: dualpath
  model: 660b
  prefill_nodes: 3
  prefill_group: 2
  decode_nodes: 4
  set: 64K
  agents: 8
----

run
sim run @topology.yaml
sim run nothing
sim compare @small.yaml
sim compare netkv agentic-660b-basic
sim reproduce relativity
sim run @small.yaml --workers 0
----
penstock: DIR/topology.yaml:7: agentic.prefill_group: is 2; groups of 3 nodes must come out even
exit 1
penstock: no scenario is called "nothing"; built in are agentic-660b-basic, agentic-660b-dualpath, agentic-660b-online, agentic-660b-scale, netkv-rag, netkv-rag-cache-load, prfaas-case-study, prfaas-homogeneous, prfaas-link-at-half-fixed, prfaas-link-at-half-steered, prfaas-sessions; a file is named with its path
exit 1
penstock: accepts 2 arg(s), received 1 (usage: penstock sim compare A B [flags])
Run 'penstock sim compare --help' for usage.
exit 2
penstock: no scenario is called "netkv"; built in are agentic-660b-basic, agentic-660b-dualpath, agentic-660b-online, agentic-660b-scale, netkv-rag, netkv-rag-cache-load, prfaas-case-study, prfaas-homogeneous, prfaas-link-at-half-fixed, prfaas-link-at-half-steered, prfaas-sessions; a file is named with its path
exit 1
penstock: no suite is called "relativity"; there are dualpath, netkv, prfaas, move-the-query
Run 'penstock sim reproduce --help' for usage.
exit 2
penstock: --seeds 0, --workers 0: seeds are 0 or more, workers at least 1
Run 'penstock sim run --help' for usage.
exit 2

text broken.jsonl
{"timestamp": 0, "input_length": 6000, "output_length": 5, "hash_ids": [1,2,3,4,5,6,7,8,9,10,11,12]}
{"timestamp": 10, "input_length": 6000, "output_length": 5, "hash_ids": [1,2,3]}
----

text broken.yaml
name: broken
simulator: netkv
netkv: {workload: rag, policy: netkv, trace: broken.jsonl}
----

run
sim run @broken.yaml
----
penstock: DIR/broken.yaml:3: netkv.trace: trace: DIR/broken.jsonl:2: 3 hash_ids for 6000 tokens; want 12, one per 512 tokens (malformed trace)
exit 1
