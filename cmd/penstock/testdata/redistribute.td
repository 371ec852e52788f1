# The paper's decoding step: 256 query rows, a chunk of 2048 tokens elsewhere.

run
plan redistribute
----
----
                  route    fetch     local
probe             16 µs
turnaround        9 µs
queries there     11.9 µs
holder's compute  15 µs
partials back     10.7 µs
merge             25 µs
pull                       2.548 ms
splice                     3 ms
prefill                              55.3 ms
altogether        87.6 µs  5.548 ms  55.3 ms
over the fabric   546 KiB  61 MiB    0 B

winner         route
rule of thumb  route: a decoding step: its rows are less than the chunk
fabric         h100-ibgda: 25 µs and bytes at 24.7 GB/s

break-evens
bytes of one layer        1080 rows
time of fetch             62010 rows
computed within a splice  111 tokens
computed within a fetch   116 tokens
route takes a splice      at 0.186 GB/s
fetch is repaid           after 64 steps
----
----

# A selection on seven holders, as the paper counts round trips and with one a layer.

run
plan redistribute --rows 64 --reuse selected --holders 7
plan redistribute --rows 64 --reuse selected --holders 7 --trips 27
----
----
                  route    fetch     local
probe             16 µs
turnaround        9 µs
queries there     20.9 µs
holder's compute  15 µs
partials back     18.7 µs
merge             25 µs
pull                       2.548 ms
prefill                              55.3 ms
altogether        105 µs   2.548 ms  55.3 ms
over the fabric   956 KiB  61 MiB    0 B

winner         route
rule of thumb  route: the indexer's choice is attended on its holder
fabric         h100-ibgda: 25 µs and bytes at 24.7 GB/s

break-evens
bytes of one layer  1080 rows
time of fetch       4011 rows
fetch is repaid     never: it serves one step
                  route     fetch     local
probe             432 µs
turnaround        243 µs
queries there     564 µs
holder's compute  405 µs
partials back     505 µs
merge             675 µs
pull                        2.548 ms
prefill                               55.3 ms
altogether        2.825 ms  2.548 ms  55.3 ms
over the fabric   25 MiB    61 MiB    0 B

winner         fetch
rule of thumb  route: the indexer's choice is attended on its holder
fabric         h100-ibgda: 25 µs and bytes at 24.7 GB/s

break-evens
bytes of one layer  1080 rows
time of fetch       47 rows
fetch is repaid     at once
----
----

# A short chunk and a batch that is far larger.

run
plan redistribute --rows 100000 --tokens 50 --transport
----
----
                 route     fetch     local
probe            16 µs
turnaround       9 µs
queries there    4.664 ms
partials back    4.178 ms
pull                       62.2 µs
splice                     3 ms
prefill                              1.35 ms
altogether       8.867 ms  3.062 ms  1.35 ms
over the fabric  208 MiB   1.5 MiB   0 B

winner         local
rule of thumb  local: the query is more than the chunk
fabric         h100-ibgda: 25 µs and bytes at 24.7 GB/s

break-evens
bytes of one layer        26 rows
time of fetch             34349 rows
computed within a splice  111 tokens
computed within a fetch   116 tokens
route takes a splice      at 72.8 GB/s
fetch is repaid           at once
----
----

# A prefix that twenty agents share, over two ranks.

run
plan redistribute --reuse prefix --requesters 20 --steps 4 --ranks 2 --format json
----
{
  "winner": "route",
  "rule_of_thumb": {
    "primitive": "route",
    "why": "a decoding step: its rows are less than the chunk",
    "sure": false
  },
  "fabric": {
    "name": "h100-ibgda",
    "probe_seconds": 0.000016,
    "turnaround_seconds": 0.000009,
    "bandwidth_bytes_per_second": 24700000000,
    "bulk_bytes_per_second": 25000000000,
    "mape": 0.07,
    "contention": {
      "free_flows": 2,
      "probe_factor": 2.7241379310344827,
      "transfer_factor": 2.2
    }
  },
  "costs": [
    {
      "primitive": "route",
      "seconds": 0.0003799535379391406,
      "terms": {
        "probe": 0.000064,
        "turnaround": 0.000036,
        "transfer": 0.000023879514170040488,
        "compute": 0.00013451612903225807,
        "return": 0.000021557894736842105,
        "merge": 0.0001
      },
      "bytes": 1122304
    },
    {
      "primitive": "fetch",
      "seconds": 0.00127401984,
      "terms": {
        "pull": 0.00127401984
      },
      "bytes": 31850496
    },
    {
      "primitive": "local",
      "seconds": 0.055296,
      "terms": {
        "prefill": 0.055296
      },
      "bytes": 0
    }
  ],
  "replicas": 3,
  "break_evens": {
    "rows_as_many_bytes_as_a_layer": 1076.3211678832117,
    "rows_as_long_as_fetch": 5293.2804883438685,
    "tokens_computed_within_a_splice": null,
    "tokens_computed_within_a_fetch": null,
    "bandwidth_where_route_takes_a_splice_bytes_per_second": null,
    "steps_that_repay_a_fetch": 14
  }
}

# An operator's own numbers: the constants of a probe, and a file.

text fabric.json
{"name": "rack 4", "probe_seconds": 2e-5, "turnaround_seconds": 0, "bandwidth_bytes_per_second": 3e9, "mape": 0.11}
----

text mine.yaml
fabric: h100-nvlink4
prefill_seconds_per_token_layer: 5e-7
host:
  fixed_seconds: 0.0035
  row_seconds: 1.25e-5
request:
  rows: 64
  reuse: prefix
----

run
plan redistribute --config @mine.yaml
plan redistribute --config @mine.yaml --fabric @fabric.json --without fetch,local
----
----
                  route     fetch   local
probe             1.2 µs
queries there     3.51 µs
holder's compute  15 µs
partials back     3.15 µs
merge             25 µs
host              4.3 ms
pull                        510 µs
prefill                             27.65 ms
altogether        4.348 ms  510 µs  27.65 ms
over the fabric   137 KiB   61 MiB  0 B

winner         fetch
rule of thumb  route: a decoding step: its rows are less than the chunk
fabric         h100-nvlink4: 1.2 µs and bytes at 21 GB/s

break-evens
bytes of one layer  1080 rows
time of fetch       0 rows
fetch is repaid     at once
                  route     fetch (ruled out)  local (ruled out)
probe             20 µs
queries there     24.6 µs
holder's compute  15 µs
partials back     22 µs
merge             25 µs
host              4.3 ms
pull                        21.23 ms
prefill                                        27.65 ms
altogether        4.407 ms  21.23 ms           27.65 ms
over the fabric   137 KiB   61 MiB             0 B

winner         route
rule of thumb  route: a decoding step: its rows are less than the chunk
fabric         rack 4: 20 µs and bytes at 3 GB/s

break-evens
bytes of one layer  1080 rows
time of fetch       1336 rows
fetch is repaid     after 5 steps
----
----

text wrong.yaml
fabric: h100-ibgda
request:
  row: 64
----

text negative.yaml
fabric: h100-ibgda
host:
  fixed_seconds: 0.1
  row_seconds: -1e-6
----

text words.yaml
request:
  rows: 64
  without:
    - fetch
    - everything
----

text slow.json
{
  "name": "rack 4",
  "bandwidth_bytes_per_second": 0
}
----

run
plan redistribute --config @wrong.yaml
plan redistribute --config @negative.yaml
plan redistribute --config @words.yaml
plan redistribute --fabric @slow.json
plan redistribute --fabric token-ring
plan redistribute --rows 0
plan redistribute --reuse often
plan redistribute --holders 2
plan redistribute --ranks 7
plan redistribute --without everything
fabric probe --listen 0.0.0.0:7440
fabric probe --listen 127.0.0.1:7440 --peer 127.0.0.1:7440
fabric probe --rows 3
fabric probe --provider token-ring
fabric probe --peer 127.0.0.1:1
fabric probe --peer nowhere
----
penstock: DIR/wrong.yaml:3: request: unknown key "row"; did you mean "rows"? known are rows, tokens, reuse, holders, steps, trips, requesters, flows, without
exit 1
penstock: DIR/negative.yaml:4: host.row_seconds: is -1e-06; it must be at least 0
exit 1
penstock: DIR/words.yaml:5: request.without.1: is "everything"; it must be route, fetch or local
exit 1
penstock: DIR/slow.json:1: redistribute: fabric "rack 4": bandwidth of 0 bytes/s; it must be positive
exit 1
penstock: redistribute: fabric "token-ring": it must be one of [h100-ibgda h100-nvlink4 a100-nvlink3 rtx-pro-6000-pcie5 a40-pcie4], or a file that penstock fabric probe wrote: open token-ring: no such file or directory
Run 'penstock plan redistribute --help' for usage.
exit 2
penstock: redistribute: query rows: 0; it must be between 1 and 2^40
Run 'penstock plan redistribute --help' for usage.
exit 2
penstock: --reuse "often": want moved, prefix or selected
Run 'penstock plan redistribute --help' for usage.
exit 2
penstock: redistribute: a moved chunk on 2 holders: only selected tokens are scattered; ask for each holder's chunk by itself
Run 'penstock plan redistribute --help' for usage.
exit 2
penstock: redistribute: rows of 1152 and 1024 bytes and tokens of 1152 cannot be cut in 7 equal slices: choose a degree that divides all three
Run 'penstock plan redistribute --help' for usage.
exit 2
penstock: without "everything": it must be route, fetch or local
Run 'penstock plan redistribute --help' for usage.
exit 2
penstock: --listen 0.0.0.0:7440 reaches beyond this machine: give both ends --token-file with one secret (openssl rand -hex 32 > FILE)
Run 'penstock fabric probe --help' for usage.
exit 2
penstock: if any flags in the group [listen peer] are set none of the others can be; [listen peer] were all set
Run 'penstock fabric probe --help' for usage.
exit 2
penstock: --rows: 1 batches; a line takes at least 2, and at most 255 are measured
Run 'penstock fabric probe --help' for usage.
exit 2
penstock: --provider "token-ring": want tcp, shm, verbs or fabric
Run 'penstock fabric probe --help' for usage.
exit 2
penstock: tcp: connect to 127.0.0.1:1: dial tcp 127.0.0.1:1: connect: connection refused
exit 1
penstock: --peer "nowhere" is not host:port
Run 'penstock fabric probe --help' for usage.
exit 2
