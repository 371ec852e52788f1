package main

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/bench"
)

// benchScript runs a copy of .ci/bench with a bin/penstock written by the test, so that nothing is
// measured or installed.
func benchScript(t *testing.T, penstock string, environ ...string) (output string, code int) {
	t.Helper()
	dir := t.TempDir()
	script, err := os.ReadFile(filepath.Join(testkit.RepositoryRoot(t), ".ci", "bench"))
	if err != nil {
		t.Fatal(err)
	}
	write := func(name, text string) {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o700)); err != nil {
			t.Fatal(err)
		}
	}
	write(".ci/bench", string(script))
	write("bin/penstock", "#!/bin/sh\n"+penstock)
	write("page.md", "")
	for _, peer := range []string{"fio", "iperf3", "redis-server"} {
		write("peers/"+peer, "#!/bin/sh\n")
	}
	cmd := exec.Command(filepath.Join(dir, ".ci", "bench"))
	cmd.Env = append(os.Environ(), "PATH="+filepath.Join(dir, "peers")+":"+os.Getenv("PATH"), "BENCH_PAGE=page.md", "BENCH_OUT=out", "BENCH_DATA=data")
	cmd.Env = append(cmd.Env, environ...)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

// TestBenchScript: make bench runs the requested suites, continues after a suite that fails, and
// lists the missing suites at the end.
func TestBenchScript(t *testing.T) {
	const fails = `
echo "penstock $*"
case "$2" in index) exit 1 ;; policy) exit 124 ;; esac
`
	out, code := benchScript(t, fails, "SUITES=index store rdma-shm\npolicy", "BENCH_ROUNDS=1")
	if code != 1 {
		t.Errorf("exit %d, want 1", code)
	}
	for _, want := range []string{
		"penstock bench index --data data --rounds 1",
		"penstock bench store ",
		"penstock bench rdma --provider shm ",
		"penstock bench report out/store.json out/rdma-shm.json --into page.md",
		"could not run:\n  index: exit 1, the reason is above\n  policy: not done after 60 minutes\n",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("without %q:\n%s", want, out)
		}
	}
	if out, code := benchScript(t, "[ $2 != report ] || exit 3", "SUITES=store"); code != 1 || !strings.Contains(out, "the tables of page.md: exit 3") {
		t.Errorf("a page that cannot be written: exit %d\n%s", code, out)
	}
	out, code = benchScript(t, `echo "penstock $*"`, "SUITES=engines store")
	if code != 1 || !strings.Contains(out, "there is no bin/penstock-*.whl; run make wheel") || !strings.Contains(out, "could not run:\n  engines: the reason is above\n") ||
		strings.Contains(out, "penstock bench engines") || !strings.Contains(out, "penstock bench store") {
		t.Errorf("engines without the wheel: exit %d\n%s", code, out)
	}
	if out, code := benchScript(t, "", "SUITES=store index"); code != 0 || strings.Contains(out, "could not") {
		t.Errorf("all ran: exit %d\n%s", code, out)
	}
}

// TestBenchScriptRefuses: an unknown suite is refused before any suite runs, with the list of
// suites. Each listed suite is a subcommand of penstock bench.
func TestBenchScriptRefuses(t *testing.T) {
	for _, suites := range []string{"store polcy", " "} {
		out, code := benchScript(t, "echo ran", "SUITES="+suites)
		_, list, ok := strings.Cut(out, "the suites are: ")
		if code != 2 || !ok || strings.Contains(out, "ran\n") {
			t.Fatalf("SUITES=%q: exit %d\n%s", suites, code, out)
		}
		for _, name := range strings.Fields(list) {
			verb, _, _ := strings.Cut(name, "-")
			if r := penstock(t, "", nil, "bench", verb, "--help"); r.code != exitOK || !strings.Contains(r.out, "penstock bench "+verb) {
				t.Errorf("suite %s: exit %d, %s", name, r.code, r.err)
			}
		}
	}
	if out, code := benchScript(t, "", "SUITES=store", "BENCH_PAGE=absent.md"); code != 2 || !strings.Contains(out, "there is no absent.md") {
		t.Errorf("no page: exit %d\n%s", code, out)
	}
}

// TestBenchReport: the pages in docs have a place for each suite and section, and for the summary
// of each suite with targets. Unchanged pages are not written.
func TestBenchReport(t *testing.T) {
	docs, dir := filepath.Join(testkit.RepositoryRoot(t), "docs"), t.TempDir()
	for _, name := range []string{"benchmarks.md", "benchmarks"} {
		if out, err := exec.Command("cp", "-r", filepath.Join(docs, name), dir).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	summary, stores := filepath.Join(dir, "benchmarks.md"), filepath.Join(dir, "benchmarks", "stores.md")
	for _, suite := range []string{"store", "index", "server", "local", "rdma", "rdma-shm", "rdma-fabric", "rdma-verbs", "cluster", "cluster-vllm", "cluster-vllm-loads", "engines", "engines-first-token", "policy"} {
		pages, err := readPages(summary)
		if err != nil {
			t.Fatal(err)
		}
		if err := pages.Put(bench.Report{Suite: suite, Commit: "c0ffee"}); err != nil {
			t.Error(err)
		}
	}
	saved := filepath.Join(dir, "engines.json")
	report := `{"suite": "engines", "machine": "here", "commit": "c0ffee", "command": "bench engines", "results": [{"name": "get", "measures": [{"name": "rate", "target": {"kind": "min", "bound": 3}, "median": 4, "met": true}]}]}`
	if err := os.WriteFile(saved, []byte(report), 0o600); err != nil {
		t.Fatal(err)
	}
	r := penstock(t, "", nil, "bench", "report", saved, "--into", summary)
	if want := "wrote " + summary + "\nwrote " + stores + "\n"; r.code != exitOK || r.out != want {
		t.Errorf("exit %d, output %q, want %q; %s", r.code, r.out, want, r.err)
	}
	for path, want := range map[string]string{summary: "| rate    | ≥ 3.00 | 1 of 1 | 4.00   | 4.00   | 4.00    |\n\nCommit c0ffee.", stores: "Command: `bench engines`, commit c0ffee."} {
		if text, err := os.ReadFile(path); err != nil || !strings.Contains(string(text), want) {
			t.Errorf("%s is without %q, %v", path, want, err)
		}
	}
}
