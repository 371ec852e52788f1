package main

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"text/tabwriter"

	"google.golang.org/protobuf/proto"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/server/config"
)

// TestProfile: blocks of a namespace are read from a node, the log of an engine is fitted, and the
// resulting settings are valid in a planner's configuration.
func TestProfile(t *testing.T) {
	node := startServed(t, t.TempDir())
	node.run("trace", "replay", "sample", "--requests", "4", "--layers", "2", "--token-bytes", "64", "--keep").must(t)
	spaces := decode[struct {
		Namespaces []struct {
			Name   string `json:"name"`
			Blocks int64  `json:"blocks"`
		} `json:"namespaces"`
	}](t, node.run("ns", "list", "--format", "json"))
	if len(spaces.Namespaces) != 1 || spaces.Namespaces[0].Blocks == 0 {
		t.Fatalf("%+v", spaces)
	}
	dir := t.TempDir()
	log := writeFile(t, dir, "forwards.csv", []byte("tokens,context,seconds,attention_seconds\n512,0,0.060,0.010\n512,32768,0.100,0.050\n2048,0,0.250,0.050\n64,16384,0.009,0.003\n"))
	path := writeFile(t, dir, "planner.yaml", []byte("# of rack 4\nschedule:\n  patience: 20ms # mine\n  read_rate: 5\n"))
	// Each reader reads at least once, for any duration.
	r := decode[profileResult](t, node.run("profile", "--namespace", spaces.Namespaces[0].Name, "--samples", log, "--duration", "1ns", "--window", "1MiB", "--write", path, "--format", "json"))
	if r.Read == nil || r.Read.Bytes == 0 || r.Read.Lost != 0 || r.Read.BytesPerToken != 128 || r.Read.TokensPerSecond*128 != r.Read.BytesPerSecond || r.Read.Passes <= 0 {
		t.Errorf("read %+v", r.Read)
	}
	if r.Compute == nil || r.Compute.Tokens != 3136 || r.Compute.Whole || r.Compute.NoModel != "" {
		t.Errorf("compute %+v", r.Compute)
	}
	cfg := config.DefaultPlanner()
	if err := config.LoadInto(&cfg, path, nil); err != nil {
		t.Fatal(err)
	}
	o, err := scheduleOf(cfg.Schedule)
	if err != nil {
		t.Fatal(err)
	}
	if o.Alpha != 3*int(o.ReadRate) || o.Beta != 5*int(o.PrefillRate) || int(o.PrefillRate) != 7484 || o.ReadRate < 1 || o.ZFactor != 1.05 || o.Patience.Milliseconds() != 20 {
		t.Errorf("%+v", o)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), "# of rack 4") || !strings.Contains(string(text), "# mine") {
		t.Errorf("comments are lost:\n%s", text)
	}
	if left, err := filepath.Glob(path + ".*"); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}

	// A namespace without blocks is a miss, and so is one that does not exist.
	node.run("ns", "create", "empty", "--layers", "2", "--token-bytes", "64", "--block-tokens", "64").must(t)
	for _, name := range []string{"empty", "nowhere"} {
		if r := node.run("profile", "--namespace", name, "--duration", "100ms"); r.code != exitMiss {
			t.Errorf("%s: exit %d, %s", name, r.code, r.err)
		}
	}
}

// TestProfileRefuses: a file that would become invalid for a planner is not changed.
func TestProfileRefuses(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"unknown.yaml": "schedul: {}\n", "list.yaml": "- a\n", "factor.yaml": "schedule:\n  slow_factor: 0.5\n"} {
		path := writeFile(t, dir, name, []byte(text))
		if r := penstock(t, "", nil, "profile", "--emulated", "1e-5,2e-9,1e-4", "--write", path); r.code != exitFailed || !strings.Contains(r.err, path) {
			t.Errorf("%s: exit %d, %s%s", name, r.code, r.out, r.err)
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != text {
			t.Errorf("%s: now it is %q, %v", name, got, err)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 3 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// TestWeights: in TENANT=WEIGHT the tenant may contain a =.
func TestWeights(t *testing.T) {
	o, err := scheduleOf(config.Schedule{ReadPolicy: "split", Weights: []string{"team-a=2", "b=c=0.5"}})
	if err != nil || !maps.Equal(o.Weights, map[string]float64{"team-a": 2, "b=c": 0.5}) {
		t.Errorf("%v, %v", o.Weights, err)
	}
	for text, want := range map[string]string{
		"team-a": `"team-a": want TENANT=WEIGHT, e.g. team-a=2`, "=2": `"=2": want TENANT=WEIGHT`, "a=two": `"a=two": want`, "a=": `"a=": want`,
		"a=1,a=2": `tenant "a" has two weights`, "a=0": `tenant "a" has 0; it must be between`, "a=NaN": `tenant "a" has NaN`,
	} {
		_, err := scheduleOf(config.Schedule{ReadPolicy: "split", Weights: strings.Split(text, ",")})
		if !errors.Is(err, config.ErrConfig) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want %q", text, err, want)
		}
	}
}

// TestPrintTop: the table has the compute NICs with their sums and rates, the waiting requests, and the
// number of the requests that it leaves out.
func TestPrintTop(t *testing.T) {
	var b strings.Builder
	tab := &table{tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)}
	printTop(tab, &pb.TopResponse{
		Tenants:     []*pb.TopResponse_Tenant{{Tenant: "team a", Priority: -2, Weight: 0.5, Waiting: 3, Tokens: 70_000}},
		MoreTenants: 4, Late: 9, PrefillTokensPerSecond: 1234, ComputeOutMostOverMean: 1.25,
		Groups: []*pb.TopResponse_Group{{Engines: []*pb.TopResponse_Engine{
			{Engine: "P/0", Node: "m0", ComputeNics: []*pb.TopResponse_NIC{{Counters: &pb.ComputeNIC{Nic: "eth0", BytesOut: 1000, BytesIn: 2}, OutBytesPerSecond: proto.Float64(2500.7), InBytesPerSecond: proto.Float64(0)}}},
			{Engine: "D/0", Node: "m1", ComputeNics: []*pb.TopResponse_NIC{{Counters: &pb.ComputeNIC{Nic: "eth1", BytesOut: 1, BytesIn: 2000}}}},
		}}},
	}, topNICs)
	_ = tab.Flush()
	for _, want := range []string{`"team a"`, "-2", "0.5", "70,000", "4 more", "first token late", "1,234", "2,500", "unknown", "1,001", "2,002", "1.2", "idle"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("without %q:\n%s", want, b.String())
		}
	}
}

// TestPrintTopLimit: the table has the compute NICs with the highest rates, up to the limit, and the number of the others. The
// sums are those of all.
func TestPrintTopLimit(t *testing.T) {
	e := &pb.TopResponse_Engine{Engine: "P/0", Node: "m0"}
	for i, rate := range []float64{10, 30, 20} {
		e.ComputeNics = append(e.ComputeNics, &pb.TopResponse_NIC{Counters: &pb.ComputeNIC{Nic: fmt.Sprint("eth", i), BytesOut: 1000, BytesIn: 1}, OutBytesPerSecond: proto.Float64(rate), InBytesPerSecond: proto.Float64(0)})
	}
	e.ComputeNics = append(e.ComputeNics, &pb.TopResponse_NIC{Counters: &pb.ComputeNIC{Nic: "eth3", BytesOut: 1000, BytesIn: 1}})
	for limit, want := range map[int]string{2: "eth1 eth2 2 more all", 4: "eth1 eth2 eth0 eth3 all", 5: "eth1 eth2 eth0 eth3 all", 0: "eth1 eth2 eth0 eth3 all"} {
		var b strings.Builder
		tab := &table{tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)}
		printComputeNICs(tab, &pb.TopResponse{Groups: []*pb.TopResponse_Group{{Engines: []*pb.TopResponse_Engine{e}}}}, limit)
		_ = tab.Flush()
		if got := strings.Join(regexp.MustCompile(`eth\d|\d more|(?m)^all `).FindAllString(b.String(), -1), " "); strings.TrimSpace(got) != want || !strings.Contains(b.String(), "4,000") {
			t.Errorf("limit %d: %q; want %q:\n%s", limit, got, want, b.String())
		}
	}
}
