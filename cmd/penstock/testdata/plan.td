# The paper's cluster: 2 prefill and 4 decode nodes of 8 GPUs, one storage NIC each.

run
plan analyze --prefill 2 --decode 4
----
----
resource             load GB/s  limit GB/s  used
prefill CNIC, read   12.5       50.0        25 %
prefill CNIC, write  18.8       50.0        38 %
decode CNIC, read    15.6       50.0        31 %
decode CNIC, write   12.5       50.0        25 %
prefill DRAM         100.0      500.0       20 %
decode DRAM          200.0      500.0       40 %

safe P/D              0.143 to 3.500
this P/D              0.500, safe
binds first           decode DRAM
storage reached       100.0 % of all storage NICs
against prefill only  at most 3.00 times the storage bandwidth
----
----

# Too few decode nodes for this memory.

run
plan analyze --prefill 7 --decode 2 --dram 400 --format json
----
{
  "ratio": 3.5,
  "safe_low": 0.14285714285714285,
  "safe_high": 2.5,
  "safe": false,
  "binds_first": "decode DRAM",
  "storage_saturation": 0.8,
  "bound_over_prefill_only": 1.0285714285714287,
  "resources": [
    {
      "name": "prefill CNIC, read",
      "load_gb_per_second": 12.5,
      "limit_gb_per_second": 50,
      "utilization": 0.25
    },
    {
      "name": "prefill CNIC, write",
      "load_gb_per_second": 8.035714285714286,
      "limit_gb_per_second": 50,
      "utilization": 0.16071428571428573
    },
    {
      "name": "decode CNIC, read",
      "load_gb_per_second": 34.375,
      "limit_gb_per_second": 50,
      "utilization": 0.6875
    },
    {
      "name": "decode CNIC, write",
      "load_gb_per_second": 50,
      "limit_gb_per_second": 50,
      "utilization": 1
    },
    {
      "name": "prefill DRAM",
      "load_gb_per_second": 100,
      "limit_gb_per_second": 400,
      "utilization": 0.25
    },
    {
      "name": "decode DRAM",
      "load_gb_per_second": 500,
      "limit_gb_per_second": 400,
      "utilization": 1.25
    }
  ]
}

# As many storage NICs as compute NICs: no ratio is safe.

run
plan analyze --prefill 1 --decode 1 --gpus 2 --storage-nics 2
----
----
resource             load GB/s  limit GB/s  used
prefill CNIC, read   100.0      50.0        200 %
prefill CNIC, write  100.0      50.0        200 %
decode CNIC, read    150.0      50.0        300 %
decode CNIC, write   150.0      50.0        300 %
prefill DRAM         200.0      500.0       40 %
decode DRAM          500.0      500.0       100 %

safe P/D              none: the compute NICs cannot carry the storage bandwidth at any ratio
this P/D              1.000, not safe
binds first           decode CNIC, read
storage reached       33.3 % of all storage NICs
against prefill only  at most 0.67 times the storage bandwidth
----
----

run
plan analyze --prefill 1
plan analyze --prefill 1 --decode 0
plan analyze --prefill 1 --decode 1 --cnic fast
plan
----
----
penstock: required flag(s) "decode" not set
Run 'penstock plan analyze --help' for usage.
exit 2
penstock: dualpath: decode nodes: 0; it must be positive
Run 'penstock plan analyze --help' for usage.
exit 2
penstock: invalid argument "fast" for "--cnic" flag: strconv.ParseFloat: parsing "fast": invalid syntax
Run 'penstock plan analyze --help' for usage.
exit 2
Show the planner's decisions and state, change weights and roles, and predict clusters

Usage:
  penstock plan [flags]
  penstock plan [command]

Available Commands:
  advise       Predict the time of a cluster for a trace's agents, its bottleneck and its best division
  analyze      Compute the range of P/D in which the storage NICs are the bottleneck
  bump         Begin a new epoch of the weights in the planner, with a policy for running requests
  explain      Explain the decisions about one request: the engines, the reads, the reasons
  network      Poll the sources of the network's cost, and show the resulting network
  prfaas       Compute which prompts to prefill in another datacenter, and the division of instances
  redistribute Compare the time to move the query, to move the cache, and to compute again
  roles        Show the roles and the load of the engine groups, and change the role of a group
  status       Show which planner leads, as each planner sees the election
  top          Show the groups, engines, storage and compute NICs and waiting requests of the planner

Flags:
  -h, --help   help for plan

Global Flags:
      --format table|json   how results are printed (environment: PENSTOCK_FORMAT) (default table)

Use "penstock plan [command] --help" for more information about a command.
----
----

# A planner's mistakes, and a planner that does not run.

run
planner --schedule-read-policy both
planner --schedule-z-factor 0.2 --log-level loud
planner --listen 0.0.0.0:7430
plan top --planner 127.0.0.1:1
plan explain
----
penstock: config: schedule.read_policy: dualpath: read policy "both": it must be one of [split shorter round-robin prefill-only]: bad configuration
Run 'penstock planner --help' for usage.
exit 2
penstock: config: log.level: "loud" is not one of [debug info warn error]: bad configuration
Run 'penstock planner --help' for usage.
exit 2
penstock: config: listen: 0.0.0.0:7430 is reachable from other machines and none of auth.token_file, auth.client_ca and (nodes and planners) auth.roles_file or auth.roles_etcd is set; set one, or say --insecure: bad configuration
Run 'penstock planner --help' for usage.
exit 2
penstock: dial tcp 127.0.0.1:1: connect: connection refused
(is `penstock planner` running, and is --planner its address?)
exit 1
penstock: accepts 1 arg(s), received 0 (usage: penstock plan explain REQUEST [flags])
Run 'penstock plan explain --help' for usage.
exit 2
