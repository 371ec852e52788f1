# An emulated engine, and the log of a real one.

run
profile --emulated 1e-5,2e-9,1e-4
----
----
prefill engine  7,152 tokens/s over 16 forward passes
attention       10 µs a token and 2 ns a pair, MAPE 0.0 %
quota           DURATION: 13,027 tokens from nothing, 6,134 after 16,384

schedule:
  prefill_rate  7,152   # tokens a second that one prefill engine computes, measured
  beta          35,760  # tokens: 5 s of prefill_rate
  z_factor      1.05    # not measured: DualPath, section 6.1
nothing was written; --write FILE puts this into the planner's configuration
----
----

text forwards.csv
tokens,context,seconds,attention_seconds
512,0,0.060,0.010
512,32768,0.100,0.050
2048,0,0.250,0.050
64,16384,0.009,0.003
----

run
profile --samples @forwards.csv --quota 100ms --write @planner.yaml
profile --samples @forwards.csv --format json
----
----
prefill engine  7,484 tokens/s over 4 forward passes
attention       20 µs a token and 2 ns a pair, MAPE 9.8 %
quota           DURATION: 4,144 tokens from nothing, 1,833 after 16,384

schedule:
  prefill_rate  7,484   # tokens a second that one prefill engine computes, measured
  beta          37,420  # tokens: 5 s of prefill_rate
  z_factor      1.05    # not measured: DualPath, section 6.1

written to  DIR/planner.yaml
{
  "compute": {
    "forwards": 4,
    "tokens": 3136,
    "seconds": 0.41900000000000004,
    "tokens_per_second": 7484.486873508353,
    "attention_seconds_per_token": 0.000019989066935440732,
    "attention_seconds_per_pair": 1.996836929012078e-9,
    "attention_mape": 0.09822483682625294,
    "attention_is_whole_pass": false,
    "median_context": 16384,
    "quota_seconds": 0.3,
    "quota_tokens_from_nothing": 10006,
    "quota_tokens_at_median_context": 5183
  },
  "schedule": [
    {
      "key": "prefill_rate",
      "value": 7484,
      "comment": "tokens a second that one prefill engine computes, measured"
    },
    {
      "key": "beta",
      "value": 37420,
      "comment": "tokens: 5 s of prefill_rate"
    },
    {
      "key": "z_factor",
      "value": 1.05,
      "comment": "not measured: DualPath, section 6.1"
    }
  ]
}
nothing was written; --write FILE puts this into the planner's configuration
----
----

text alike.json
[{"tokens": 512, "context": 0, "seconds": 0.06}]
----

text broken.csv
tokens,context,seconds
512,0,0.060
512,many,0.100
----

run
profile --samples @alike.json
profile --samples @broken.csv
profile --samples @nowhere.csv
profile
profile --emulated 1
profile --emulated 1e-5,2e-9,1e-4 --quota 0s
profile --emulated 0,0,0
----
----
prefill engine  8,533 tokens/s over 1 forward passes
attention       not fitted: batch: the samples do not distinguish the cost of a token from that of a pair: vary the cached length

schedule:
  prefill_rate  8,533   # tokens a second that one prefill engine computes, measured
  beta          42,665  # tokens: 5 s of prefill_rate
  z_factor      1.05    # not measured: DualPath, section 6.1
nothing was written; --write FILE puts this into the planner's configuration
penstock: DIR/broken.csv:3: context: "many" is not a whole number
exit 1
penstock: open DIR/nowhere.csv: no such file or directory
exit 1
penstock: nothing to measure: give --namespace, --samples or both
Run 'penstock profile --help' for usage.
exit 2
penstock: --emulated: 1 numbers; it takes three
Run 'penstock profile --help' for usage.
exit 2
penstock: --quota DURATION: it must be positive
Run 'penstock profile --help' for usage.
exit 2
penstock: --emulated: batch: model of 0 s a token and 0 s a pair: both must be positive or zero, and not both zero
exit 1
----
----
