package profile

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"
	"pgregory.net/rapid"

	"github.com/penstock-kv/penstock/dualpath/batch"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// engine makes the forward passes of a known model: attention, plus linear seconds per token for
// the rest.
func engine(rng *rand.Rand, m batch.Model, linear, noise float64, n int) (out []Forward) {
	for range n {
		f := Forward{Tokens: 1 + rng.IntN(4096), Context: rng.IntN(65536)}
		f.Attention = m.Seconds(f.Context, f.Tokens) * math.Exp(noise*rng.NormFloat64())
		f.Seconds = f.Attention + linear*float64(f.Tokens)
		out = append(out, f)
	}
	return out
}

// TestFit: Fit finds the coefficients of the model. Without attention times it fits whole passes.
// The quota holds the number of tokens that the model gives.
func TestFit(t *testing.T) {
	want, linear := batch.Model{PerToken: 1.1e-5, PerPair: 2.3e-9}, 9e-5
	for _, noise := range []float64{0, 0.03} {
		passes := engine(rand.New(rand.NewPCG(1, 2)), want, linear, noise, 400)
		c, err := Fit(passes, batch.DefaultQuota)
		if err != nil {
			t.Fatal(err)
		}
		if c.Whole || c.NoModel != "" || math.Abs(c.Model().Seconds(30_000, 1000)/want.Seconds(30_000, 1000)-1) > noise+1e-6 || c.MAPE > noise+1e-6 {
			t.Errorf("noise %v: %+v", noise, c)
		}
		for _, q := range []struct{ context, tokens int }{{0, c.FromNothing}, {c.Context, c.AtContext}} {
			quota := batch.DefaultQuota.Seconds()
			if m := c.Model(); m.Seconds(q.context, q.tokens) > quota || m.Seconds(q.context, q.tokens+1) <= quota {
				t.Errorf("%d tokens after %d take %v s of a quota of %v", q.tokens, q.context, m.Seconds(q.context, q.tokens), quota)
			}
		}
		var tokens, seconds float64
		for i := range passes {
			tokens, seconds = tokens+float64(passes[i].Tokens), seconds+passes[i].Seconds
			passes[i].Attention = 0
		}
		if math.Abs(c.Rate/(tokens/seconds)-1) > 1e-9 {
			t.Errorf("rate %v, want %v", c.Rate, tokens/seconds)
		}
		whole, err := Fit(passes, batch.DefaultQuota)
		if err != nil {
			t.Fatal(err)
		}
		if !whole.Whole || math.Abs(whole.PerToken/(want.PerToken+linear)-1) > 3*noise+1e-6 || whole.Rate != c.Rate {
			t.Errorf("whole passes: %+v", whole)
		}
	}
}

// TestFitWithoutModel: equal passes give a rate and the reason why there is no model.
func TestFitWithoutModel(t *testing.T) {
	c, err := Fit([]Forward{{Tokens: 100, Seconds: 0.01}, {Tokens: 100, Seconds: 0.01}}, time.Second)
	if err != nil || math.Abs(c.Rate-1e4) > 1e-6 || !strings.Contains(c.NoModel, "vary the cached length") {
		t.Errorf("%+v, %v", c, err)
	}
	for name, bad := range map[string][]Forward{"none": nil, "no time": {{Tokens: 1}}, "no tokens": {{Seconds: 1}}, "NaN": {{Tokens: 1, Seconds: math.NaN()}}} {
		if c, err := Fit(bad, time.Second); err == nil {
			t.Errorf("%s: %+v", name, c)
		}
	}
	if c, err := Fit([]Forward{{Tokens: 1, Seconds: 1}}, 0); err == nil {
		t.Errorf("no quota: %+v", c)
	}
}

// TestReadForwards reads the same log in each form.
func TestReadForwards(t *testing.T) {
	want := []Forward{{512, 0, 0.061, 0.012}, {429, 32721, 0.083, 0}}
	for name, log := range map[string]string{
		"csv":      "tokens,context,seconds,attention_seconds\n512,0,0.061,0.012\n429,32721,0.083,\n",
		"columns":  "# from the engine\nseconds, rank, context, tokens, attention_seconds\n0.061,3,0,512,0.012\n0.083,3,32721,429,0\n",
		"list":     "[{\"tokens\":512,\"context\":0,\"seconds\":0.061,\"attention_seconds\":0.012},\n {\"tokens\":429,\"context\":32721,\"seconds\":0.083,\"rank\":3}]\n",
		"lines":    "{\"tokens\":512,\"context\":0,\"seconds\":0.061,\"attention_seconds\":0.012}\n{\"tokens\":429,\"context\":32721,\"seconds\":0.083}\n",
		"crlf csv": "tokens,context,seconds,attention_seconds\r\n512,0,0.061,0.012\r\n429,32721,0.083,0\r\n",
	} {
		got, err := ReadForwards("log", strings.NewReader(log))
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
	for log, complaint := range map[string]string{
		"": "no forward pass", "\n\n": "no forward pass", "[]": "no forward pass", "tokens,context,seconds\n": "no forward pass",
		"tokens,seconds\n1,2\n":                                          `log:1: there is no column "context"`,
		"tokens,context,seconds\n1,0,1\nmany,0,1\n":                      `log:3: tokens: "many"`,
		"tokens,context,seconds\n1,0,1\n1,0,-1\n":                        "log:3: -1 seconds",
		"tokens,context,seconds\n1,0,NaN\n":                              "log:2: NaN seconds",
		"tokens,context,seconds,attention_seconds\n1,0,1,2\n":            "log:2: 2 of 1 seconds",
		"tokens,context,seconds\n1,0\n":                                  "wrong number of fields",
		"[{\"tokens\":1,\"context\":0,\"seconds\":1},\n{\"tokens\":0}]":  "log:2: an object without context",
		"[{\"tokens\":1,\"context\":0,\"seconds\":1}\n":                  "log:1: the list has no end",
		"[{\"tokens\":1,\"context\":0,\"seconds\":1}] x":                 "log:1",
		"{\"tokens\":1,\"context\":-1,\"seconds\":1}":                    "log:1: 1 tokens after -1",
		"{\"tokens\":\"one\",\"context\":-1,\"seconds\":1}":              "log:1",
		"tokens,context,seconds\n99999999999999999999999999999999,0,1\n": "log:2: tokens",
	} {
		if got, err := ReadForwards("log", strings.NewReader(log)); err == nil || !strings.Contains(err.Error(), complaint) {
			t.Errorf("%q: %v, %v; want %q", log, got, err, complaint)
		}
	}
}

// FuzzReadForwards: a log that is accepted can be fitted, or Fit refuses it.
func FuzzReadForwards(f *testing.F) {
	f.Add("tokens,context,seconds\n1,0,1\n2,5,3\n")
	f.Add(`[{"tokens":1,"context":0,"seconds":1}]`)
	f.Add(`{"tokens":1,"context":0,"seconds":1e-300}` + "\n" + `{"tokens":10,"context":10,"seconds":1}`)
	f.Fuzz(func(t *testing.T, log string) {
		passes, err := ReadForwards("log", strings.NewReader(log))
		if err != nil {
			if !strings.HasPrefix(err.Error(), "log:") {
				t.Fatalf("an error without the file's name: %v", err)
			}
			return
		}
		c, err := Fit(passes, time.Second)
		if err == nil {
			if _, err = json.Marshal(c); err != nil {
				t.Fatalf("%+v: %v", c, err)
			}
		}
	})
}

// TestRuns: every readable block is in exactly one run, after its ancestors.
func TestRuns(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 200).Draw(t, "blocks")
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		id := func(i int) (b kv.BlockID) { copy(b[:], fmt.Sprintf("%016d", i)); return b }
		orphan := map[kv.BlockID]bool{}
		parent := map[kv.BlockID]kv.BlockID{}
		var blocks []Link
		for i := 1; i <= n; i++ {
			b := Link{ID: id(i)}
			switch at := rng.IntN(2 * i); {
			case at == 0 && rng.IntN(4) == 0:
				b.Parent = id(1_000_000) // not listed
				orphan[b.ID] = true
			case at > 0:
				b.Parent = id(1 + at%max(1, i-1))
				if b.Parent == b.ID {
					b.Parent = kv.BlockID{}
				}
				orphan[b.ID] = orphan[b.Parent]
			}
			parent[b.ID] = b.Parent
			blocks = append(blocks, b)
		}
		rng.Shuffle(n, func(i, j int) { blocks[i], blocks[j] = blocks[j], blocks[i] })
		seen := map[kv.BlockID]int{}
		for _, r := range Runs(blocks, rng) {
			if r.First < 0 || r.First >= len(r.IDs) {
				t.Fatalf("a run from %d of %d", r.First, len(r.IDs))
			}
			for i, b := range r.IDs {
				want := kv.BlockID{}
				if i > 0 {
					want = r.IDs[i-1]
				}
				if parent[b] != want {
					t.Fatalf("block %v follows %v", b, want)
				}
				if i >= r.First {
					seen[b]++
				}
			}
		}
		for b := range parent {
			want := 1
			if orphan[b] {
				want = 0
			}
			if seen[b] != want {
				t.Fatalf("block %v is read %d times, want %d", b, seen[b], want)
			}
		}
	})
	keys := []kv.BlockID{{1}, {2}, {3}, {4}, {5}}
	total := 0
	for _, r := range FlatRuns(keys, 2, rand.New(rand.NewPCG(1, 1))) {
		total += len(r.IDs)
	}
	if total != 5 {
		t.Errorf("%d of 5 keys are read", total)
	}
}

// TestUpdate: the settings are written into a configuration, and all other content is kept.
func TestUpdate(t *testing.T) {
	settings := Settings(640_000.4, 8000)
	const before = `# the planner of rack 4
listen: 127.0.0.1:7430 # loopback
schedule:
  # measured by hand
  read_rate: 1
  patience: 20ms
log:
  level: debug
`
	for name, c := range map[string]struct{ before, keeps string }{
		"nothing": {"", ""}, "comments alone": {"# mine\n", "# mine"}, "an empty section": {"schedule:\nlisten: a:1\n", "listen: a:1"},
		"a whole file": {before, "# the planner of rack 4\n# loopback\n# measured by hand\npatience: 20ms\nlevel: debug"},
	} {
		got, err := Update("planner.yaml", []byte(c.before), settings)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		var back struct {
			Schedule map[string]any
		}
		if err := yaml.Unmarshal(got, &back); err != nil {
			t.Fatalf("%s: %v in\n%s", name, err, got)
		}
		for key, want := range map[string]any{"read_rate": 640000, "alpha": 1920000, "prefill_rate": 8000, "beta": 40000, "z_factor": 1.05} {
			if back.Schedule[key] != want {
				t.Errorf("%s: %s is %v, want %v", name, key, back.Schedule[key], want)
			}
		}
		for _, keep := range strings.Split(c.keeps, "\n") {
			if !strings.Contains(string(got), keep) {
				t.Errorf("%s: %q is lost in\n%s", name, keep, got)
			}
		}
		again, err := Update("planner.yaml", got, settings)
		if err != nil || string(again) != string(got) {
			t.Errorf("%s: a second time gives %v\n%s", name, err, again)
		}
	}
	for name, bad := range map[string]string{"a list": "- a\n", "two documents": "a: 1\n---\nb: 2\n", "not YAML": "a: [\n", "a section of text": "schedule: fast\n"} {
		if got, err := Update("planner.yaml", []byte(bad), settings); err == nil || !strings.HasPrefix(err.Error(), "planner.yaml") {
			t.Errorf("%s: %v\n%s", name, err, got)
		}
	}
	if s := Settings(0, 0); len(s) != 0 {
		t.Errorf("of nothing: %v", s)
	}
	if s := Settings(100, 0); len(s) != 3 {
		t.Errorf("of a storage NIC: %v", s)
	}
}
