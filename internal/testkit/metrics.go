package testkit

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"testing"
)

var describedMetric = regexp.MustCompile(`fqName: "([^"]+)", help: "([^"]+)"`)

// CheckMetricsPage fails the test unless docs/metrics.md has a row for each metric of a registry,
// with its help text, and no row for another metric whose name begins with prefix. describe is the
// Describe of a prometheus.Registry with at most 1024 metrics.
func CheckMetricsPage[Desc fmt.Stringer](t testing.TB, prefix string, describe func(chan<- Desc)) {
	t.Helper()
	ch := make(chan Desc, 1024)
	describe(ch)
	close(ch)
	page, err := os.ReadFile(filepath.Join(RepositoryRoot(t), "docs", "metrics.md"))
	if err != nil {
		t.Fatal(err)
	}
	documented := regexp.MustCompile("(?m)^\\| `(" + prefix + "[a-z0-9_]+)` \\|[^|]*\\| (.*) \\|$")
	want, got := map[string]string{}, map[string]string{}
	for d := range ch {
		m := describedMetric.FindStringSubmatch(d.String())
		want[m[1]] = m[2]
	}
	for _, m := range documented.FindAllStringSubmatch(string(page), -1) {
		got[m[1]] = m[2]
	}
	for name, help := range want {
		if got[name] != help {
			t.Errorf("docs/metrics.md: %s is %q; the registry has %q", name, got[name], help)
		}
	}
	for name := range got {
		if want[name] == "" {
			t.Errorf("docs/metrics.md documents %s, which does not exist", name)
		}
	}
}
