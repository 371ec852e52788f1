# The paper's case study, as its file is printed.

run
plan prfaas --print-config
----
# The case study of PrfaaS, section 4. Lengths are of the uncached part of the prompts, in tokens.
profile: prfaas-1t              # built in; or profile_file: FILE with measurements of your own
lengths: {mu: 9.90, sigma: 1.00, min: 128, max: 128000}   # log-normal; or {trace: FILE}
output_tokens: 1024
prfaas: {accelerator: h200, gpus: 32}
pd: {accelerator: h20, gpus: 64}   # batch and step_seconds: the profile's, or given here
egress_gbps: 100
present: {threshold: 30000, prefill: 2}   # optional: what runs today
steps: 100                      # of the search for the threshold

text case.yaml
profile: prfaas-1t
lengths: {mu: 9.90, sigma: 1.00, min: 128, max: 128000}
output_tokens: 1024
prfaas: {accelerator: h200, gpus: 32}
pd: {accelerator: h20, gpus: 64}
egress_gbps: 100
----

run
plan prfaas @case.yaml
----
                                  best            homogeneous  naive
threshold, tokens                 19,309          -            -
instances: PrfaaS/prefill/decode  4/3/5           0/9/3        4/0/8
requests/s                        3.27            2.11         2.48
binds                             prfaas-compute  pd-prefill   prfaas-compute
requests/s of PrfaaS              1.62            -            2.48
requests/s of prefill             1.64            2.11         -
requests/s of decode              3.91            2.34         6.25
offloaded                         49.7 %          0.0 %        100.0 %
egress, Gbps                      12.4            0.0          13.0
TTFT, mean                        2.21 s          4.44 s       1.72 s
TTFT, P90                         3.48 s          9.73 s       3.48 s
against homogeneous               1.55 times      1.00 times   1.18 times

# Service times by their means: prompts longer than the mean cost more than those shorter save.

run
plan prfaas @case.yaml --expected --format json
----
[
  {
    "name": "best",
    "threshold_tokens": 19308.8,
    "prfaas_instances": 4,
    "prefill_instances": 3,
    "decode_instances": 5,
    "requests_per_second": 3.190371254885714,
    "binds": "prfaas-compute",
    "offloaded_share": 0.49680862976685414,
    "offloaded_mean_tokens": 44657.09715222381,
    "prfaas_requests_per_second": 1.5850039715873305,
    "prefill_requests_per_second": 1.6382603423782554,
    "decode_requests_per_second": 3.90625,
    "egress_gbps": 12.173372582730037,
    "ttft_mean_seconds": 2.2133786438262546,
    "ttft_p90_seconds": 3.4779882779983167,
    "over_homogeneous": 1.5742018105861408
  },
  {
    "name": "homogeneous",
    "threshold_tokens": null,
    "prfaas_instances": 0,
    "prefill_instances": 9,
    "decode_instances": 3,
    "requests_per_second": 2.026659627394156,
    "binds": "pd-prefill",
    "offloaded_share": 0,
    "offloaded_mean_tokens": 0,
    "prfaas_requests_per_second": null,
    "prefill_requests_per_second": 2.026659627394156,
    "decode_requests_per_second": 2.34375,
    "egress_gbps": 0,
    "ttft_mean_seconds": 4.440804898044002,
    "ttft_p90_seconds": 9.73000454554097,
    "over_homogeneous": 1
  },
  {
    "name": "naive",
    "threshold_tokens": null,
    "prfaas_instances": 4,
    "prefill_instances": 0,
    "decode_instances": 8,
    "requests_per_second": 2.3930155633869123,
    "binds": "prfaas-compute",
    "offloaded_share": 1,
    "offloaded_mean_tokens": 27312.73042580648,
    "prfaas_requests_per_second": 2.3930155633869123,
    "prefill_requests_per_second": null,
    "decode_requests_per_second": 6.25,
    "egress_gbps": 12.60686170911823,
    "ttft_mean_seconds": 1.724213030713191,
    "ttft_p90_seconds": 3.4779882779983167,
    "over_homogeneous": 1.1807683594426808
  }
]

# What is wrong is said with file and line, and what would do.

run
plan prfaas
----
penstock: give a FILE.yaml with the system; --print-config prints an example
Run 'penstock plan prfaas --help' for usage.
exit 2

text typo.yaml
profile: prfaas-1t
lengths: {mu: 9.90, sigma: 1.00, min: 128, max: 128000}
egres_gbps: 100
----

run
plan prfaas @typo.yaml
----
penstock: DIR/typo.yaml:3: unknown key "egres_gbps"; did you mean "egress_gbps"? known are profile, profile_file, lengths, output_tokens, prfaas, pd, egress_gbps, present, steps
exit 1

text nan.yaml
profile: prfaas-1t
lengths: {mu: 9.90, sigma: .nan, min: 128, max: 128000}
----

run
plan prfaas @nan.yaml
----
penstock: DIR/nan.yaml:2: lengths.sigma: is .nan; write a finite number
exit 1

text slow.yaml
profile: prfaas-1t
lengths: {mu: 9.90, sigma: 1.00, min: 128, max: 128000}
output_tokens: 1024
prfaas: {accelerator: h200, gpus: 32}
pd: {accelerator: h20, gpus: 64}
egress_gbps: -3
----

run
plan prfaas @slow.yaml
----
penstock: DIR/slow.yaml:6: egress_gbps: is -3; give the bandwidth between the clusters, above 0
exit 1

text odd.yaml
profile: prfaas-1t
lengths: {mu: 9.90, sigma: 1.00, min: 128, max: 128000}
output_tokens: 1024
pd: {accelerator: h100, gpus: 60}
----

run
plan prfaas @odd.yaml
----
penstock: DIR/odd.yaml:4: pd.accelerator: is "h100"; profile prfaas-1t knows h20, h200
exit 1

# A model of the operator's own.

text model.yaml
name: ours
gpus_per_instance: 4
kv:
  points: [{tokens: 1000, mib: 120}, {tokens: 100000, mib: 3000}]
accelerators:
  fast: {prefill: [{tokens: 1000, seconds: 0.2}, {tokens: 100000, seconds: 6}]}
  slow: {prefill: [{tokens: 1000, seconds: 0.5}, {tokens: 100000, seconds: 20}], decode: {batch: 32, step_seconds: 0.03}}
----

text ours.yaml
profile: prfaas-1t
lengths: {mu: 9, sigma: 1.2, min: 1, max: 100000}
output_tokens: 500
prfaas: {accelerator: Fast, gpus: 8}
pd: {accelerator: slow, gpus: 32}
egress_gbps: 10
present: {threshold: 8000, prefill: 5}
----

run
plan prfaas @ours.yaml --profile @model.yaml
----
                                  best            present         homogeneous  naive
threshold, tokens                 22,001          8,000           -            -
instances: PrfaaS/prefill/decode  2/6/2           2/5/3           0/8/2        2/0/8
requests/s                        4.16            2.61            2.65         2.10
binds                             prfaas-compute  prfaas-compute  pd-prefill   prfaas-compute
requests/s of PrfaaS              0.78            1.29            -            2.10
requests/s of prefill             3.39            4.76            2.65         -
requests/s of decode              4.27            6.40            4.27         17.07
offloaded                         18.8 %          49.5 %          0.0 %        100.0 %
egress, Gbps                      8.5             8.6             0.0          8.7
TTFT, mean                        2.12 s          1.63 s          3.02 s       1.36 s
TTFT, P90                         3.98 s          3.03 s          6.99 s       3.03 s
against homogeneous               1.57 times      0.99 times      1.00 times   0.80 times
