package main

import (
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/bench"
)

// TestBenchSuites runs one short turn of a comparison of each suite that starts nodes and other
// programs. It asserts that each contender that could run has a rate, and asserts no rate.
func TestBenchSuites(t *testing.T) {
	testkit.Long(t, "starts nodes and other programs")
	t.Setenv("TEST_RUN_AS_PENSTOCK", "1") // the suites start this binary as penstock
	for _, tc := range []struct {
		suite, only string
		args        []string
		results     int
	}{
		{"local", "1 MiB", nil, 1},
		{"index", "rebuild|restart", []string{"--blocks", "32768", "--node-blocks", "20000"}, 2},
		{"server", "without a block|read 1 MiB from DRAM, 1 × 4|64 MiB in blocks of 4", nil, 3},
		{"store", "read 4 MiB, depth 4|store 4 MiB", []string{"--size", "1GiB"}, 2},
	} {
		t.Run(tc.suite, func(t *testing.T) {
			args := append([]string{"bench", tc.suite, "--only", tc.only, "--rounds", "1", "--seconds", "0.05", "--data", t.TempDir(), "--format", "json"}, tc.args...)
			r := penstock(t, "", nil, args...)
			r.must(t)
			report := decode[bench.Report](t, r)
			if len(report.NotRun) > 0 && strings.Contains(report.NotRun[0].Why, "built without uring") {
				t.Skip("this build has no io_uring, which the suite needs; make test runs it in the build that has it")
			}
			if report.Suite != tc.suite || len(report.Results) != tc.results || len(report.NotRun) > 0 {
				t.Errorf("%s has %d results; want %d; not run: %v", report.Suite, len(report.Results), tc.results, report.NotRun)
			}
			for _, result := range report.Results {
				if len(result.Absolute) == 0 {
					t.Errorf("%s: no contender ran; not run: %v", result.Name, result.NotRun)
				}
				for _, a := range result.Absolute {
					if len(a.Metrics) == 0 {
						t.Errorf("%s: %s was not measured", result.Name, a.Contender)
					}
					for name, m := range a.Metrics {
						if !(m.Median >= 0) {
							t.Errorf("%s: %s has %s = %v", result.Name, a.Contender, name, m.Median)
						}
					}
				}
			}
		})
	}
}

// TestBenchCommandLine: the report's command line repeats the run, with the flags that the engines use.
func TestBenchCommandLine(t *testing.T) {
	for args, want := range map[string]string{
		"":                        "cluster --engines emulated --agents 96 --rate 200 --turns 8 --skip 16 --divide 8",
		"--engines vllm --rate 5": "cluster --engines vllm --agents 96 --rate 5 --prompt 1024",
	} {
		cmd := newBenchCluster(world{}, &benchFlags{})
		if err := cmd.ParseFlags(strings.Fields(args)); err != nil {
			t.Fatal(err)
		}
		if got := benchCommandLine(cmd); got != want {
			t.Errorf("%q: %s; want %s", args, got, want)
		}
	}
}
