package scenario

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// tiny has scenarios that take almost no time.
var tiny = map[string]string{
	"datacenters": `name: tiny
simulator: datacenters
seeds: 2
datacenters:
  system:
    profile: prfaas-1t
    lengths: {mu: 9.90, sigma: 1.00, min: 128, max: 128000}
    output_tokens: 1024
    prfaas: {accelerator: h200, gpus: 32}
    pd: {accelerator: h20, gpus: 64}
    egress_gbps: 100
  rate: 1
  duration: 5m
  warmup: 1m
  short_term: {}
  long_term: {period: 1m}
  changes:
    - {at: 2m, egress_factor: 0.5}
    - {at: 3m, mu: 9, sigma: 1}
`,
	"netkv": `name: tiny
simulator: netkv
seeds: 2
netkv:
  workload: rag
  policy: netkv
  trace: requests.jsonl
  windows: [0s]
`,
	"agentic": `name: tiny
simulator: agentic
seeds: 2
agentic:
  system: dualpath
  model: 27b
  prefill_nodes: 1
  decode_nodes: 1
  set: 32K
  agents: 4
  rounds: 3
`,
}

// requests returns a trace in Mooncake's format, long enough for retrieval at capacity.
func requests() string {
	var b strings.Builder
	block := 0
	for i := range 400 {
		tokens := 20000 + i*13
		ids := make([]int, (tokens+511)/512)
		for j := range ids {
			ids[j] = block
			block++
		}
		line, _ := json.Marshal(map[string]any{"timestamp": i * 150, "input_length": tokens, "output_length": 30, "hash_ids": ids})
		b.Write(append(line, '\n'))
	}
	return b.String()
}

// load writes the scenario and a trace into a directory and loads it.
func load(t *testing.T, text, trace string) (*Scenario, error) {
	t.Helper()
	dir := t.TempDir()
	for name, body := range map[string]string{"s.yaml": text, "requests.jsonl": trace} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(body), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	s, err := Find(filepath.Join(dir, "s.yaml"), Options{})
	if err != nil {
		return nil, errors.New(strings.ReplaceAll(err.Error(), dir+"/", ""))
	}
	return s, nil
}

// TestRun: each simulator runs from its file; the same seed gives the same numbers, and another
// seed others.
func TestRun(t *testing.T) {
	for simulator, text := range tiny {
		t.Run(simulator, func(t *testing.T) {
			s, err := load(t, text, requests())
			if err != nil {
				t.Fatal(err)
			}
			ends := 0
			a, err := s.Run(t.Context(), RunOptions{Workers: 1, Progress: func(done, total int) {
				if ends++; done != ends || total != 2 {
					t.Errorf("%d of %d", done, total)
				}
			}})
			if err != nil {
				t.Fatal(err)
			}
			b, err := s.Run(t.Context(), RunOptions{Workers: 4})
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(a, b) {
				t.Errorf("two runs differ:\n%+v\n%+v", a, b)
			}
			if a.Digests[0] == a.Digests[1] || len(a.Metrics) < 8 || ends != 2 {
				t.Errorf("%d ends, digests %v, %d metrics", ends, a.Digests, len(a.Metrics))
			}
			for _, m := range a.Metrics[:1] {
				if !(m.Mean > 0) || len(m.Values) != 2 {
					t.Errorf("%+v", m)
				}
			}
			if _, err := json.Marshal(a); err != nil {
				t.Error(err)
			}
		})
	}
	s, err := load(t, tiny["agentic"], "")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Run(ctx, RunOptions{}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// TestComplaints: errors have file, line and a remedy.
func TestComplaints(t *testing.T) {
	for _, c := range []struct{ simulator, was, is, want string }{
		// Keys and heads.
		{"agentic", "simulator: agentic", "simulator: agents", `s.yaml:2: simulator: is "agents"; it is agentic, netkv or datacenters`},
		{"agentic", "simulator: agentic", "simulator: netkv", `s.yaml:2: simulator: is netkv, and there is no section netkv`},
		{"agentic", "name: tiny\n", "", `name: is missing`},
		{"agentic", "seeds: 2", "seeds: 0", `s.yaml:3: seeds: is 0; from 1 to 1000`},
		{"agentic", "seeds: 2", "seed: -1", `s.yaml:3: seed: is -1`},
		{"agentic", "seeds: 2", "netkv: {policy: netkv}", `s.yaml:3: netkv: is of another simulator`},
		{"agentic", "  agents: 4", "  agent: 4", `s.yaml:10: agentic: unknown key "agent"; did you mean "agents"?`},
		// Agents.
		{"agentic", "dualpath", "quadpath", `s.yaml:5: agentic.system: agentic: system "quadpath"; it must be one of`},
		{"agentic", "27b", "28b", `s.yaml:6: agentic.model: is "28b"; it is 660b or 27b`},
		{"agentic", "prefill_nodes: 1", "prefill_nodes: 0", `s.yaml:7: agentic.prefill_nodes: is 0; from 1 to`},
		{"agentic", "decode_nodes: 1", "decode_nodes: 3\n  decode_group: 2", `s.yaml:9: agentic.decode_group: is 2; groups of 3 nodes must come out even`},
		{"agentic", "decode_nodes: 1", "decode_nodes: 16000\n  gpus: 1000", `are 16001000 engines; at most 65536`},
		{"datacenters", "gpus: 64", "gpus: 64000000000", `8000000000 instances of the PD cluster; at most 65536`},
		{"agentic", "decode_nodes: 1", "decode_nodes: 1\n  snic_gbytes: .nan", `s.yaml:9: agentic.snic_gbytes: is .nan; write a finite number`},
		{"agentic", "decode_nodes: 1", "decode_nodes: 1\n  snic_gbytes: -50", `s.yaml:9: agentic.snic_gbytes: is -50; from 0 to`},
		{"agentic", "agents: 4", "agents: 4\n  agents_per_second: 1", `give one of them`},
		{"agentic", "agents: 4", "agents: 4\n  horizon: 1m", `s.yaml:11: agentic.horizon: applies to agents_per_second`},
		{"agentic", "set: 32K", "set: 33K", `s.yaml:9: agentic.set: workload: no set "33K"`},
		{"agentic", "set: 32K", "trace: none.jsonl", `s.yaml:9: agentic.trace: none.jsonl is not there; looked for none.jsonl, none.jsonl; name its directory by PENSTOCK_TRACES`},
		{"agentic", "set: 32K", "set: 32K\n  trace: x", `s.yaml:10: agentic.trace: set 32K is given too`},
		// NetKV.
		{"netkv", "policy: netkv", "policy: magic", `s.yaml:6: netkv.policy: netcost: policy "magic": it must be one of`},
		{"netkv", "workload: rag", "workload: rags", `s.yaml:5: netkv.workload: workload: no profile "rags"`},
		{"netkv", "policy: netkv", "policy: netkv\n  pods: 3", `s.yaml:7: netkv.pods: is 3; every second pod has prefill instances`},
		{"netkv", "policy: netkv", "policy: netkv\n  load: -1", `s.yaml:7: netkv.load: is -1; from 0.001`},
		{"netkv", "policy: netkv", "policy: netkv\n  oversubscription: 0.5", `s.yaml:7: netkv.oversubscription: is 0.5; from 1`},
		{"netkv", "policy: netkv", "policy: netkv\n  background: 0.7", `s.yaml:7: netkv.background: is 0.7; from 0 to 0.499`},
		{"netkv", "windows: [0s]", "windows: [0s, 500s]", `s.yaml:8: netkv.windows.1: netkv: 0 requests of rag from 8m20s on`},
		{"netkv", "  trace: requests.jsonl\n", "", `netkv.trace: is missing; name a trace file`},
		// Datacenters.
		{"datacenters", "egress_gbps: 100", "egress_gbps: -100", `s.yaml:11: datacenters.system.egress_gbps: is -100`},
		{"datacenters", "gpus: 64", "gpus: 60", `s.yaml:10: datacenters.system.pd.gpus: is 60; an instance of prfaas-1t takes 8`},
		{"datacenters", "prfaas-1t", "prfaas-2t", `s.yaml:6: datacenters.system.profile: no profile is called "prfaas-2t"`},
		{"datacenters", "duration: 5m", "duration: 5", `s.yaml:13: datacenters.duration: is "5", without a unit`},
		{"datacenters", "rate: 1", "rate: 0", `rate of 0 requests/s and a concurrency of 0; one of them must be above 0`},
		{"datacenters", "warmup: 1m", "warmup: 9m", `longer than the warm-up`},
		{"datacenters", "rate: 1", "rate: 1\n  plan: {threshold: 100, prefill: 8}", `s.yaml:13: datacenters.plan.prefill: is 8; from 0 to 7`},
		{"datacenters", "rate: 1", "rate: 1\n  plan: {threshold: 9000}", `no instance prefills prompts up to 9000 tokens`},
		{"datacenters", "short_term: {}", "short_term: {low: 0.95}", `s.yaml:15: datacenters.short_term: prfaas: low utilization 0.95`},
		{"datacenters", "at: 3m", "at: 1m", `s.yaml:19: datacenters.changes.1.at: is 1m0s, before the change above it`},
		{"datacenters", ", egress_factor: 0.5", "", `s.yaml:18: datacenters.changes.0: changes nothing`},
		{"datacenters", "sigma: 1}", "sigma: 0}", `sigma is 0`},
	} {
		if !strings.Contains(tiny[c.simulator], c.was) {
			t.Fatalf("%q is not in the scenario", c.was)
		}
		_, err := load(t, strings.Replace(tiny[c.simulator], c.was, c.is, 1), requests())
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: %v\nwant %s", c.is, err, c.want)
		}
	}
	// An error about a malformed line of a trace names the trace.
	broken := requests()
	broken = strings.Replace(broken, `"input_length":20013`, `"input_length":"many"`, 1)
	if _, err := load(t, tiny["netkv"], broken); err == nil || !strings.Contains(err.Error(), "s.yaml:7: netkv.trace:") || !strings.Contains(err.Error(), "requests.jsonl:2") {
		t.Error(err)
	}
	if _, err := Find("no-such", Options{}); err == nil || !strings.Contains(err.Error(), "prfaas-case-study") {
		t.Error(err)
	}
	if _, err := Find("./no-such.yaml", Options{}); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// TestBuiltIn: every built-in scenario has the name of its file and a description, and loads if its
// trace exists.
func TestBuiltIn(t *testing.T) {
	heads, err := Heads()
	if err != nil {
		t.Fatal(err)
	}
	traces := filepath.Join(testkit.RepositoryRoot(t), "..", "shared", "traces")
	if env := os.Getenv("PENSTOCK_TRACES"); env != "" {
		traces = env
	}
	_, missing := os.Stat(traces)
	for i, name := range Names() {
		if heads[i].Name != name || heads[i].About == "" {
			t.Errorf("%s: %+v", name, heads[i])
		}
		if heads[i].Simulator == "netkv" && missing != nil {
			continue
		}
		if _, err := Find(name, Options{Traces: []string{traces}}); err != nil {
			t.Error(err)
		}
	}
	if missing != nil {
		if os.Getenv("CI") == "true" {
			t.Errorf("the shared traces are missing: %v", missing)
		}
		t.Logf("scenarios on the shared traces were not loaded: %v", missing)
	}
}

// FuzzLoad: no file causes a panic.
func FuzzLoad(f *testing.F) {
	for _, text := range tiny {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if strings.Contains(text, "trace") || strings.Contains(text, "file") {
			return // the fuzzer must not name files of this machine
		}
		if s, err := Load("f.yaml", []byte(text), Options{}); err == nil && (s.Name == "" || len(s.Seeds) == 0) {
			t.Errorf("%+v", s)
		}
	})
}
