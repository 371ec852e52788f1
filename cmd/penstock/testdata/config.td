# The node reads its own file. Flags win over the file.

text token
0123456789abcdef-old
----

text node.yaml
limits:
  writes: 100
  lease_ttl: 5m
log:
  level: info
auth:
  token_file: ""
----

start --config @node.yaml
----
ready

run
config diff
config reload
config diff --format json
----
the node runs with DIR/node.yaml
nothing to apply: the node runs with DIR/node.yaml
{
  "changes": [],
  "path": "DIR/node.yaml"
}

# A reload applies these.

text node.yaml
limits:
  writes: 50
  queue_wait: 3s
  loan_bytes: 1MiB
log:
  level: debug
drain_timeout: 3s
----

run
config diff
config reload
config diff
config reload --format json
----
SETTING            RUNNING  FILE     APPLIED BY
drain_timeout      DURATION      DURATION       reload
limits.writes      100      50       reload
limits.lease_ttl   5m0s     10m0s    reload
limits.loan_bytes  0 B      1.0 MiB  reload
limits.queue_wait  DURATION       DURATION       reload
log.level          info     debug    reload
exit 1
SETTING            BEFORE  APPLIED
drain_timeout      DURATION     DURATION
limits.writes      100     50
limits.lease_ttl   5m0s    10m0s
limits.loan_bytes  0 B     1.0 MiB
limits.queue_wait  DURATION      DURATION
log.level          info    debug
the node runs with DIR/node.yaml
{
  "changes": [],
  "path": "DIR/node.yaml"
}

# A restart is necessary for some of these, so nothing is applied. The arena is set by a flag.

text node.yaml
sync_interval: 7s
limits:
  writes: 60
  queue_wait: 3s
  loan_bytes: 1MiB
log:
  level: debug
durability: sync
arena: 64MiB
drain_timeout: 3s
----

run
config diff
config diff --format json
config reload
----
SETTING        RUNNING  FILE  APPLIED BY
durability     batch    sync  restart: writers rely on the durability that the node reported to them
sync_interval  DURATION       DURATION    restart: writers rely on the durability that the node reported to them
limits.writes  50       60    reload
exit 1
{
  "changes": [
    {
      "file": "sync",
      "key": "durability",
      "restart": "writers rely on the durability that the node reported to them",
      "running": "batch"
    },
    {
      "file": "DURATION",
      "key": "sync_interval",
      "restart": "writers rely on the durability that the node reported to them",
      "running": "DURATION"
    },
    {
      "file": "60",
      "key": "limits.writes",
      "restart": "",
      "running": "50"
    }
  ],
  "path": "DIR/node.yaml"
}
exit 1
penstock: a restart is necessary, and nothing was applied:
durability: batch → sync: writers rely on the durability that the node reported to them; restart to apply it, or set it back
sync_interval: DURATION → DURATION: writers rely on the durability that the node reported to them; restart to apply it, or set it back
exit 1

# Invalid values: the error names each of them.

text node.yaml
limits:
  writes: -1
  leases: many
----

run
config diff
config reload
config reload --format json
----
penstock: config: DIR/node.yaml:3: limits.leases: is "many"; write a whole number: bad configuration
exit 1
penstock: nothing was applied: config: DIR/node.yaml:3: limits.leases: is "many"; write a whole number: bad configuration
exit 1
{"error":"nothing was applied: config: DIR/node.yaml:3: limits.leases: is \"many\"; write a whole number: bad configuration","exit_code":1}
exit 1

text node.yaml
limits:
  writes: -1
  lease_ttl: 0s
log:
  level: loud
----

run
config reload
----
penstock: nothing was applied: config: log.level: "loud" is not one of [debug info warn error]: bad configuration
config: limits.writes: must be positive, is -1: bad configuration
config: limits.lease_ttl: must be positive, is DURATION: bad configuration
exit 1

text node.yaml
limits:
  leases: 20000000
----

run
config reload
----
penstock: nothing was applied: config: limits.leases: 20000000 is more than 16777216: bad configuration
exit 1

# A token that clients do not have yet.

text node.yaml
auth:
  token_file: /no/such/file
limits:
  writes: 50
----

run
config reload
config nonsense
config reload now
----
penstock: nothing was applied: config: auth.token_file: token file: open /no/such/file: no such file or directory
exit 1
penstock: unknown command "nonsense" for "penstock config"
Run 'penstock config --help' for usage.
exit 2
penstock: unknown command "now" for "penstock config reload" (usage: penstock config reload [flags])
Run 'penstock config reload --help' for usage.
exit 2

stop
----
exit 0
