package reproduce

import (
	"fmt"
	"strings"
)

// Suites returns all suites, in the order of the page.
func Suites() []Suite {
	return []Suite{
		DualPath(),
		NetKV(),
		PrfaaS(),
		MoveTheQuery(),
	}
}

// Find returns the suites with these names in the order of Suites; without names, it returns all.
func Find(names []string) ([]Suite, error) {
	all := Suites()
	if len(names) == 0 {
		return all, nil
	}
	known := make([]string, len(all))
	want := make(map[string]bool)
	for _, n := range names {
		want[n] = true
	}
	var out []Suite
	for i, s := range all {
		known[i] = s.Name
		if want[s.Name] {
			out = append(out, s)
			delete(want, s.Name)
		}
	}
	for _, n := range names {
		if want[n] {
			return nil, fmt.Errorf("no suite is called %q; there are %s", n, strings.Join(known, ", "))
		}
	}
	return out, nil
}
