package access_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/server/access"
)

// TestChanges: the lines name each principal that differs, with the difference, and have no credentials.
func TestChanges(t *testing.T) {
	was := parse(t, good())
	if got := access.Changes(was, parse(t, good()+"# a comment\n")); len(got) != 0 {
		t.Errorf("a comment changes %q", got)
	}
	for _, c := range []struct{ replace, by, want string }{
		{hash(tokenA), hash(tokenA) + ", " + hash("another-token-0123456789"), "principal team-a: tokens and subjects: 1 added, 0 removed"},
		{hash(tokenA), hash("another-token-0123456789"), "principal team-a: tokens and subjects: 1 added, 1 removed"},
		{"read: 1.5GiB, ", "", "principal team-a: rates: read 1610612736, write 1000 → read none, write 1000"},
		{"weight: 3", "weight: 1000", "principal team-a: weight: 3 → 1000"},
		{"    weight: 3\n", "", "principal team-a: weight: 3 → 1"},
		{`{roles: [operate], namespaces: ["*"]}`, `{roles: [operate, admin], namespaces: ["*"]}`, "principal sre: grants: operate on * → admin+operate on *"},
	} {
		if got := access.Changes(was, parse(t, strings.Replace(good(), c.replace, c.by, 1))); !slices.Equal(got, []string{c.want}) {
			t.Errorf("%q by %q: %q, want %q", c.replace, c.by, got, c.want)
		}
	}
	renamed := strings.Replace(good(), "name: sre", "name: ops", 1)
	if got, want := access.Changes(was, parse(t, renamed)), []string{"principal ops is added: operate on *", "principal sre is removed: operate on *"}; !slices.Equal(got, want) {
		t.Errorf("a new name: %q, want %q", got, want)
	}
	// The token of sre becomes one of team-a, so both differ.
	moved := strings.Replace(strings.Replace(good(), hash(tokenB), hash("another-token-0123456789"), 1), hash(tokenA), hash(tokenA)+", "+hash(tokenB), 1)
	if got := access.Changes(was, parse(t, moved)); len(got) != 2 || !strings.Contains(got[0], "sre: tokens and subjects: 1 added, 1 removed") || !strings.Contains(got[1], "team-a: tokens and subjects: 1 added, 0 removed") {
		t.Errorf("a moved token: %q", got)
	}
	if got := access.Changes(access.None(), was); len(got) != 2 || !strings.Contains(got[0], "sre is added") {
		t.Errorf("a first document: %q", got)
	}
}

// TestGoverned: a principal governs with admin and operate on all namespaces, and not with one of them, or on a prefix.
func TestGoverned(t *testing.T) {
	for grants, want := range map[string]bool{
		`{roles: [operate, admin], namespaces: ["*"]}`:                                              true,
		`{roles: [operate], namespaces: ["*"]}`:                                                     false,
		`{roles: [admin], namespaces: ["*"]}`:                                                       false,
		"{roles: [operate], namespaces: [\"*\"]}\n      - {roles: [admin], namespaces: [team-a/*]}": false,
	} {
		p := parse(t, strings.Replace(good(), `{roles: [operate], namespaces: ["*"]}`, grants, 1))
		if p.Governed() != want || p.Named("sre").Governs() != want || p.Named("team-a").Governs() {
			t.Errorf("%s: governed %v, sre governs %v, team-a governs %v", grants, p.Governed(), p.Named("sre").Governs(), p.Named("team-a").Governs())
		}
	}
	if access.None().Governed() {
		t.Error("the policy without principals is governed")
	}
}
