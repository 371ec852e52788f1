# A cluster to begin with, as its file is printed.

run
plan advise --print-config
----
# A cluster for penstock plan advise. Bandwidths are gigabits a second.
prefill_nodes: 2
decode_nodes: 4
gpus: 8                 # engines of a node, each with a compute NIC
storage_gbps: 400       # a node's storage NIC
compute_gbps: 400       # a compute NIC
memory_gbps: 4000       # a node's memory
reads: both             # or prefill: only prefill nodes read from storage
agents: 1024            # agents at once; the trace's are repeated
max_tokens: 65536       # longer trajectories are cut
profile: ds-660b        # or ds-27b; what model gives takes its place
# model:
#   kv_bytes_per_token: 78080
#   linear_gflop_per_token: 74            # outside of attention
#   attention_gflop_per_token: 34.8       # whatever the context
#   attention_mflop_per_context_token: 1.0
#   tflops: 163                           # of a GPU, achieved in prefill
#   step_ms: 18
#   step_per_request_ms: 0.7
#   decode_hbm_tokens: 600000
#   prefill_hbm_tokens: 260000
# prfaas: …             # another datacenter: what penstock plan prfaas --print-config prints

text cluster.yaml
prefill_nodes: 1
decode_nodes: 2
storage_gbps: 400
compute_gbps: 400
memory_gbps: 4000
agents: 200
profile: ds-27b
----

text agents.jsonl
{"id": 0, "rounds": [[9000, 200], [300, 80], [600, 150], [200, 40], [900, 300], [100, 60], [400, 90], [250, 70]]}
{"id": 1, "rounds": [[4000, 100], [2000, 50], [100, 250], [700, 30], [150, 120], [500, 80]]}
{"id": 2, "rounds": [[30000, 50], [100, 40], [100, 40], [100, 40], [100, 40], [100, 40], [100, 40], [100, 40], [100, 40], [100, 40]]}
----

# What it would do, and what a simulation of it did.

run
plan advise --trace @agents.jsonl --cluster @cluster.yaml
----
                                 predicted      simulated
job of 200 agents, 1,799 rounds  95 s           87 s
throughput                       19.0 rounds/s  20.7 rounds/s
TTFT, mean                       7.50 s         8.50 s
TPOT, mean                       0.0106 s       0.0112 s
read by the prefill side         39 %           37 %
prediction's error               +9.2 %
cached                           88.3 % of the prompts
binds                            prefill compute, 98 %
used                             storage NICs, 7 %
used                             decode steps, 2 %
safe prefill/decode              0.14 to 3.50; here 0.50, inside
beside storage, first            decode DRAM; 100 % of the storage bandwidth can be reached
best division                    2P1D, 52 s
1P2D                             95 s  prefill compute
2P1D                             52 s  prefill compute

# The same for a program, without the simulation; another datacenter prefills long prompts.

text elsewhere.yaml
prefill_nodes: 1
decode_nodes: 1
storage_gbps: 200
compute_gbps: 400
memory_gbps: 2000
reads: prefill
agents: 3
max_tokens: 8192
model:
  kv_bytes_per_token: 100000
  linear_gflop_per_token: 20
  attention_gflop_per_token: 5
  attention_mflop_per_context_token: 0.5
  tflops: 100
  step_ms: 10
  step_per_request_ms: 0.5
  decode_hbm_tokens: 500000
prfaas:
  profile: prfaas-1t
  lengths: {mu: 9.90, sigma: 1.00, min: 128, max: 128000}
  output_tokens: 1024
  prfaas: {accelerator: h200, gpus: 32}
  pd: {accelerator: h20, gpus: 64}
  egress_gbps: 100
----

run
plan advise --predict --trace @agents.jsonl --cluster @elsewhere.yaml
----
                           predicted     simulated
job of 3 agents, 8 rounds  8 s           -
throughput                 0.9 rounds/s  -
TTFT, mean                 0.36 s        -
TPOT, mean                 0.0105 s      -
read by the prefill side   100 %         -
cached                     57.0 % of the prompts
binds                      prefill compute, 10 %
used                       storage NICs, 1 %
used                       decode steps, 1 %
safe prefill/decode        0.07 to 3.50; here 1.00, inside
beside storage, first      decode DRAM; 100 % of the storage bandwidth can be reached
best division              1P1D, 8 s
1P1D                       8 s            prefill compute
routing threshold          19,309 tokens  3.27 requests/s, prfaas-compute binds

# What is wrong is said with file, line and remedy.

run
plan advise --trace @agents.jsonl
----
penstock: give a trace with --trace and a cluster with --cluster; --print-config prints an example
Run 'penstock plan advise --help' for usage.
exit 2

text bad.yaml
prefill_nodes: 1
decode_nodes: 0
----

run
plan advise --trace @agents.jsonl --cluster @bad.yaml
----
penstock: DIR/bad.yaml:2: decode_nodes: is 0; give the nodes, above 0
exit 1

text bad.yaml
prefill_nodes: 1
decode_nodes: 1
storage_gbps: 200
compute_gbps: 400
memory_gbps: 2000
agents: 3
profile: gpt-5
----

run
plan advise --trace @agents.jsonl --cluster @bad.yaml
----
penstock: DIR/bad.yaml:7: profile: is "gpt-5"; there are ds-660b and ds-27b; leave it out and give all of model
exit 1

text bad.yaml
prefill_nodes: 1
prefil_nodes: 1
----

run
plan advise --trace @agents.jsonl --cluster @bad.yaml
----
penstock: DIR/bad.yaml:2: unknown key "prefil_nodes"; did you mean "prefill_nodes"? known are prefill_nodes, decode_nodes, gpus, storage_gbps, compute_gbps, memory_gbps, reads, agents, max_tokens, profile, model, prfaas
exit 1

text flat.jsonl
{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
----

run
plan advise --trace @flat.jsonl --cluster @cluster.yaml
----
penstock: workload: DIR/flat.jsonl is a mooncake trace, which has no sessions; agents need the dualpath or agentic format
exit 1
