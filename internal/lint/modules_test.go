package lint

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// places lists the packages that may use a module, in addition to cmd and tests. Other modules may
// be used in all packages above kv.
var places = []struct {
	module string
	may    []string
	why    string
}{
	{"github.com/NVIDIA/go-nvml", []string{"rdma/topo/gpus"}, "its link flags allow missing symbols, so a package of its own has these flags"},
	{"github.com/cockroachdb/pebble/v2", []string{"trie", "lab/bench/suite", "lab/testnode"}, "the index owns its store, and no other package accesses it (the benchmark fills a separate store for comparison)"},
	{"github.com/pawelgaczynski/giouring", []string{"io/uring"}, "its defects are wrapped in one place, behind one build tag"},
	{"github.com/spf13/cobra", nil, "only cmd has the command line"},
	{"github.com/spf13/pflag", []string{"server/config"}, "only cmd has the command line; config names the flags"},
	{"google.golang.org/grpc", []string{"api/...", "server/...", "client/...", "lab/bench/...", "lab/emulate", "lab/cluster", "internal/kvevents", "lab/testplanner", "examples/..."}, "api, server and client have the control plane; the benchmarks compare with a byte stream over gRPC"},
	{"google.golang.org/protobuf", []string{"api/...", "server/...", "client/..."}, "messages are converted at the edge; the inner packages use the types of kv"},
	{"github.com/fsnotify/fsnotify", []string{"server/reload"}, "one package decides when changed files are complete"},
	{"github.com/prometheus/client_golang", []string{"server/...", "lab/testnode"}, "the other packages count with integers; the server exports the counters"},
	{"github.com/prometheus/client_model", []string{"server/metrics"}, "only the definitions of the metrics read counters back"},
	{"go.opentelemetry.io/otel", []string{"server/...", "client/..."}, "spans are made at the edges"},
	{"go.opentelemetry.io/otel/trace", []string{"server/...", "client/..."}, "spans are made at the edges"},
	{"golang.org/x/sys", []string{"internal/...", "io/...", "rdma/...", "lab/..."}, "backends, providers, internal/sys and lab call the kernel; the packages above them run anywhere"},
	{"github.com/vishvananda/netlink", []string{"lab/netlab"}, "only the test lab makes and changes interfaces; the product reads them"},
	{"github.com/vishvananda/netns", []string{"lab/netlab"}, "it goes with netlink"},
	{"gonum.org/v1/plot", []string{"internal/chart"}, "figures have one style, and the code that computes them needs no fonts"},
	{"github.com/tinylib/msgp", []string{"internal/kvevents"}, "only the events for routers are MessagePack"},
	{"github.com/vmihailenco/msgpack/v5", nil, "for tests"},
	{"github.com/grafana/grafana-foundation-sdk/go", nil, "for tests"},
	{"github.com/chromedp/chromedp", nil, "for tests"},
	{"github.com/chromedp/cdproto", nil, "for tests"},
	{"pgregory.net/rapid", nil, "for tests"},
	{"github.com/cockroachdb/datadriven", nil, "for tests"},
}

func TestModulePlaces(t *testing.T) {
	mods := modules(t)
	for _, p := range load(t) {
		if under(p.path, "cmd") {
			continue
		}
		for _, imp := range p.imports {
			if p.path == "kv" && strings.Contains(imp, ".") {
				t.Errorf("kv imports %s; kv uses the standard library only, so that it can be copied into any process", imp)
			}
			m := moduleOf(imp, mods)
			for _, place := range places {
				if m == place.module && !matches(p.path, place.may) {
					t.Errorf("%s uses %s; only cmd, tests and %s may\n\twhy: %s", p.path, imp, list(place.may), place.why)
				}
			}
		}
	}
}

// TestReasons: docs/deps.md has one row for each module that the repository imports or runs, and no
// other row.
func TestReasons(t *testing.T) {
	direct := directModules(t)
	rows := reasons(t)
	for m, user := range direct {
		if rows[m] == "" {
			t.Errorf("%s is used by %s and has no row in docs/deps.md: add \"| `%s` | reason |\", or remove the import", m, user, m)
		}
	}
	for m := range rows {
		if direct[m] == "" {
			t.Errorf("docs/deps.md gives a reason for %s, which no package of the repository imports: delete the row", m)
		}
	}
}

// TestGoMod: go.mod marks exactly those modules as indirect that the repository does not use
// itself.
func TestGoMod(t *testing.T) {
	direct := directModules(t)
	f, err := os.Open(filepath.Join(root(t), "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	tools := toolModules(t, modules(t))
	for s := bufio.NewScanner(f); s.Scan(); {
		m := requireLine.FindStringSubmatch(s.Text())
		if m == nil || slices.Contains(tools, m[1]) {
			continue
		}
		indirect := strings.Contains(s.Text(), "// indirect")
		if user := direct[m[1]]; user != "" && indirect {
			t.Errorf("go.mod marks %s as indirect, but %s imports it: run go mod tidy", m[1], user)
		} else if user == "" && !indirect {
			t.Errorf("go.mod requires %s, which no package of the repository imports: run go mod tidy", m[1])
		}
	}
}

var requireLine = regexp.MustCompile(`^(?:require )?\t?(\S+\.\S+/\S+) v\S+`)

// directModules maps each module that the code, the tests or the tools use to one user.
func directModules(t *testing.T) map[string]string {
	t.Helper()
	mods := modules(t)
	direct := make(map[string]string)
	for _, p := range load(t) {
		for _, imp := range slices.Concat(p.imports, p.tests) {
			if m := moduleOf(imp, mods); m != "" {
				direct[m] = p.path
			}
		}
	}
	for _, m := range toolModules(t, mods) {
		direct[m] = "the tool directive in go.mod"
	}
	return direct
}

func toolModules(t *testing.T, mods []string) []string {
	t.Helper()
	var out []string
	for _, line := range goOutput(t, "list", "-f", "{{.ImportPath}}", "tool") {
		if m := moduleOf(line, mods); m != "" {
			out = append(out, m)
		}
	}
	return out
}

// modules returns the path of every other module in the build list.
func modules(t *testing.T) []string {
	t.Helper()
	return slices.DeleteFunc(goOutput(t, "list", "-m", "-f", "{{.Path}}", "all"), func(m string) bool { return m == module })
}

// moduleOf returns the longest of mods that holds the package, or "".
func moduleOf(importPath string, mods []string) string {
	best := ""
	for _, m := range mods {
		if under(importPath, m) && len(m) > len(best) {
			best = m
		}
	}
	return best
}

func goOutput(t *testing.T, args ...string) []string {
	t.Helper()
	cmd := exec.Command("go", args...)
	cmd.Dir = root(t)
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go %s: %v", strings.Join(args, " "), err)
	}
	return strings.Fields(string(out))
}

var reasonLine = regexp.MustCompile("^\\| `([^`]+)` \\| (.+) \\|$")

// reasons reads the rows of docs/deps.md.
func reasons(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root(t), "docs", "deps.md"))
	if err != nil {
		t.Fatal(err)
	}
	rows := make(map[string]string)
	for line := range strings.Lines(string(text)) {
		if m := reasonLine.FindStringSubmatch(strings.TrimSpace(line)); m != nil {
			if rows[m[1]] != "" {
				t.Errorf("docs/deps.md has two rows for %s", m[1])
			}
			rows[m[1]] = m[2]
		}
	}
	return rows
}
