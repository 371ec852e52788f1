package workload

import (
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// near fails the test unless got is within the relative tolerance of want.
func near(t *testing.T, what string, got, want, tolerance float64) {
	t.Helper()
	if !(math.Abs(got/want-1) <= tolerance) {
		t.Errorf("%s is %.4g; want %.4g within %.3g %%", what, got, want, 100*tolerance)
	}
}

// checkTable2 compares a set with Table 2 of the paper.
func checkTable2(t *testing.T, s Spec, set []Trajectory) {
	t.Helper()
	m := Measure(set)
	near(t, s.Name+" turns", m.Turns, s.Turns, 0.05)
	near(t, s.Name+" append", m.Append, s.Append, 0.05)
	near(t, s.Name+" gen", m.Gen, s.Gen, 0.06)
	near(t, s.Name+" total", m.Total, s.Total, 0.05)
	near(t, s.Name+" context", m.Context, s.Context, 0.05)
	if m.Longest > s.MaxLen {
		t.Errorf("%s: a trajectory of %d tokens; at most %d", s.Name, m.Longest, s.MaxLen)
	}
	for i := range set {
		set[i].Turns(func(j int, u Turn) bool {
			if (j == 0) != (u.Context == 0) || u.Append < 1 || u.Gen < 1 {
				t.Fatalf("%s: trajectory %d, round %d is %+v", s.Name, i, j, u)
			}
			return true
		})
	}
}

func TestGenerateTable2(t *testing.T) {
	testkit.Long(t, "generates all sets of the table")
	for _, s := range Table2() {
		for seed := range uint64(30) {
			checkTable2(t, s, s.Generate(500, seed))
		}
		if a, b := s.Generate(50, 7), s.Generate(50, 7); !reflect.DeepEqual(a, b) {
			t.Errorf("%s: one seed, two sets", s.Name)
		}
	}
}

// TestSharedSets: the shared sets have the means of Table 2, and are read without loss.
func TestSharedSets(t *testing.T) {
	for _, s := range Table2() {
		set, err := ReadTrajectories(testkit.TraceFile(t, "dualpath_agentic_"+strings.ToLower(s.Name)+".jsonl.gz"))
		if err != nil {
			t.Fatal(err)
		}
		if len(set) != 500 {
			t.Errorf("%s: %d trajectories; want 500", s.Name, len(set))
		}
		checkTable2(t, s, set)
	}
}

func TestReadTrajectoriesKeepsRounds(t *testing.T) {
	path := filepath.Join(t.TempDir(), "set.jsonl")
	if err := os.WriteFile(path, []byte(`{"id":0,"rounds":[[3084,156],[4718,2040]]}`+"\n"+`{"id":1,"rounds":[[7,1]]}`+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := ReadTrajectories(path)
	if err != nil {
		t.Fatal(err)
	}
	want := []Trajectory{{0, []Round{{3084, 156}, {4718, 2040}}}, {1, []Round{{7, 1}}}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("read %v; want %v", got, want)
	}
	if _, err := ReadTrajectories(testkit.TraceFile(t, "azure_llm_2023_code.csv.gz")); err == nil || !strings.Contains(err.Error(), "no sessions") {
		t.Errorf("a trace without sessions: %v", err)
	}
}

func TestAgentsBeyondTheSet(t *testing.T) {
	s := Table2()[2]
	set := s.Generate(500, 1)
	agents := Agents(set, 1700, s.MaxLen, 3)
	if len(agents) != 1700 {
		t.Fatalf("%d agents; want 1700", len(agents))
	}
	for i, a := range agents {
		if a.ID != i || a.Total() > s.MaxLen {
			t.Fatalf("agent %d has ID %d and %d tokens", i, a.ID, a.Total())
		}
		if i >= 500 && a.Rounds[0] != (Round{prependTokens, 1}) {
			t.Fatalf("agent %d begins with %+v; the prepended round is missing", i, a.Rounds[0])
		}
	}
	if !reflect.DeepEqual(agents, Agents(set, 1700, s.MaxLen, 3)) {
		t.Error("one seed, two lists of agents")
	}
	// Each lap draws every trajectory once, so 500 more agents have the set's rounds.
	count := func(list []Trajectory) (n int) {
		for _, a := range list {
			n += len(a.Rounds)
		}
		return n
	}
	if got, want := count(agents[500:1000]), count(set); got > want+500 || got < want-500 {
		t.Errorf("the first lap has %d rounds; the set has %d", got, want)
	}
}

func TestScales(t *testing.T) {
	set := []Trajectory{{4, []Round{{100, 10}, {50, 5}, {1000, 20}}}}
	for _, c := range []struct {
		name string
		got  []Trajectory
		want []Round
	}{
		{"append x2", ScaleAppend(set, 2, 1<<20), []Round{{200, 10}, {100, 5}, {2000, 20}}},
		{"append x2, cut", ScaleAppend(set, 2, 400), []Round{{200, 10}, {100, 5}}},
		{"gen x0.01", ScaleGen(set, 0.01, 1<<20), []Round{{100, 1}, {50, 1}, {1000, 1}}},
		{"gen x20, first round cut", ScaleGen(set, 20, 150), []Round{{75, 75}}},
		{"two rounds", Scale{Rounds: 2}.Apply(set), []Round{{100, 10}, {50, 5}}},
		{"an eighth in blocks", Scale{Tokens: 0.125, Multiple: 16}.Apply(set), []Round{{16, 16}, {16, 16}, {128, 16}}},
		{"limit", Scale{MaxLen: 120}.Apply(set), []Round{{100, 10}}},
	} {
		if !reflect.DeepEqual(c.got[0].Rounds, c.want) || c.got[0].ID != 4 {
			t.Errorf("%s: %v; want %v", c.name, c.got, c.want)
		}
	}
	if !reflect.DeepEqual(set[0].Rounds, []Round{{100, 10}, {50, 5}, {1000, 20}}) {
		t.Errorf("the set was changed: %v", set)
	}
}

// FuzzApportion: parts sum to the total, are at least 1, and follow the weights.
func FuzzApportion(f *testing.F) {
	f.Add(uint64(1), uint16(100))
	f.Fuzz(func(t *testing.T, seed uint64, total uint16) {
		rng := rand.New(rand.NewPCG(seed, 0))
		w := make([]float64, 1+rng.IntN(40))
		var sum float64
		for i := range w {
			w[i] = math.Exp(rng.NormFloat64())
			sum += w[i]
		}
		got := 0
		rest := float64(max(int(total)-len(w), 0))
		for i, p := range apportion(int(total), w) {
			got += p
			if math.Abs(float64(p-1)-rest*w[i]/sum) > 1 {
				t.Errorf("part %d is %d; its share is %v", i, p-1, rest*w[i]/sum)
			}
		}
		if want := max(int(total), len(w)); got != want {
			t.Errorf("parts sum to %d; want %d", got, want)
		}
	})
}

func TestProfiles(t *testing.T) {
	all, err := ReadArrivals(testkit.TraceFile(t, "mooncake_conversation_trace.jsonl.gz"))
	if err != nil {
		t.Fatal(err)
	}
	// The counts of the trace's README.
	for i, want := range []int{6620, 7675, 2731} {
		p := Profiles()[i]
		got := p.Filter(all)
		if len(got) != want {
			t.Errorf("%s: %d requests; want %d", p.Name, len(got), want)
		}
		fast, err := Compress(got, 6.1)
		if err != nil {
			t.Fatal(err)
		}
		near(t, p.Name+" rate", Rate(fast), 6.1, 1e-6)
		if fast[0].At != 0 || fast[1].Input != got[1].Input {
			t.Errorf("%s: compressed trace begins with %+v, %+v", p.Name, fast[0], fast[1])
		}
		w := Window(fast, 60*time.Second, 75*time.Second)
		for _, a := range w {
			if a.At < 60*time.Second || a.At >= 75*time.Second {
				t.Fatalf("%s: arrival at %v in the window", p.Name, a.At)
			}
		}
		if len(w) == 0 {
			t.Errorf("%s: nothing in the window", p.Name)
		}
	}
	if _, err := Compress(all[:1], 1); err == nil {
		t.Error("one request was compressed to a rate")
	}
	if _, err := Compress(all, math.NaN()); err == nil {
		t.Error("a rate of NaN was accepted")
	}
}

func TestPoisson(t *testing.T) {
	at := Poisson(50_000, 0.4, rand.New(rand.NewPCG(1, 1)))
	near(t, "rate", float64(len(at))/at[len(at)-1].Seconds(), 0.4, 0.02)
	for i := 1; i < len(at); i++ {
		if at[i] < at[i-1] {
			t.Fatalf("arrival %d goes back in time", i)
		}
	}
}
