package access_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/access"
)

// tenants returns a document with these entries of the list of tenants.
func tenants(entries ...string) string {
	return good() + "tenants:\n  - " + strings.Join(entries, "\n  - ") + "\n"
}

// TestTenants: a tenant is a prefix of the names of namespaces, and its quota a number of bytes.
func TestTenants(t *testing.T) {
	p := parse(t, tenants("{namespaces: team-b/*, quota: 1.5GiB}", "{namespaces: team-a/*, quota: 2TB}"))
	want := []kv.TenantQuota{{Prefix: "team-b/", Bytes: 3 << 29}, {Prefix: "team-a/", Bytes: 2e12}}
	if got := p.TenantQuotas(); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if got := parse(t, good()).TenantQuotas(); len(got) != 0 {
		t.Errorf("a file without tenants has %v", got)
	}
	if got := p.Outdate().TenantQuotas(); !slices.Equal(got, want) {
		t.Errorf("an outdated policy has %v, want %v", got, want)
	}
	if got := (*access.Policy)(nil).TenantQuotas(); got != nil {
		t.Errorf("no policy has %v", got)
	}
}

// TestBadTenants: an entry that is no prefix with a quota, and prefixes that overlap, are refused with the
// line of the entry.
func TestBadTenants(t *testing.T) {
	line := strings.Count(tenants("x"), "\n")
	many := make([]string, access.TenantsMax+1)
	for i := range many {
		many[i] = fmt.Sprintf("{namespaces: t%d/*, quota: 1GiB}", i)
	}
	for name, c := range map[string]struct {
		entries []string
		want    string
	}{
		"all namespaces":    {[]string{`{namespaces: "*", quota: 1GiB}`}, `tenants.0.namespaces: a quota on "*" would be one on the whole node`},
		"one namespace":     {[]string{"{namespaces: team-a/m, quota: 1GiB}"}, `tenants.0.namespaces: "team-a/m" is one namespace; set its quota with penstock ns quota`},
		"a star inside":     {[]string{"{namespaces: team-*/x, quota: 1GiB}"}, `tenants.0.namespaces: "team-*/x" is not a prefix`},
		"two stars":         {[]string{"{namespaces: team-a/**, quota: 1GiB}"}, `tenants.0.namespaces: "team-a/**" is not a prefix`},
		"no namespaces":     {[]string{"{quota: 1GiB}"}, `tenants.0.namespaces: "" is not a prefix`},
		"a long prefix":     {[]string{"{namespaces: " + strings.Repeat("a", 200) + "*, quota: 1GiB}"}, "tenants.0.namespaces: "},
		"no quota":          {[]string{"{namespaces: team-a/*}"}, "tenants.0"},
		"a quota of 0":      {[]string{"{namespaces: team-a/*, quota: 0}"}, `tenants.0.quota: "0" is not a number of bytes`},
		"a negative quota":  {[]string{"{namespaces: team-a/*, quota: -1}"}, `tenants.0.quota: "-1" is not a number of bytes`},
		"a quota of words":  {[]string{"{namespaces: team-a/*, quota: lots}"}, `tenants.0.quota: "lots" is not a number of bytes`},
		"a quota too large": {[]string{"{namespaces: team-a/*, quota: 9EiB}"}, `tenants.0.quota: "9EiB" is not a number of bytes`},
		"a nested prefix":   {[]string{"{namespaces: team-a/*, quota: 2GiB}", "{namespaces: team-a/x/*, quota: 1GiB}"}, "tenants.1.namespaces: team-a/x/* overlaps with the tenant team-a/*"},
		"an outer prefix":   {[]string{"{namespaces: team-a/*, quota: 2GiB}", "{namespaces: team*, quota: 1GiB}"}, "tenants.1.namespaces: team* overlaps with the tenant team-a/*"},
		"the same twice":    {[]string{"{namespaces: team-a/*, quota: 2GiB}", "{namespaces: team-a/*, quota: 2GiB}"}, "tenants.1.namespaces: team-a/* overlaps"},
		"an unknown key":    {[]string{"{namespaces: team-a/*, quotas: 2GiB}"}, `unknown key "quotas"; did you mean "quota"`},
		"a list of names":   {[]string{"{namespaces: [team-a/*], quota: 2GiB}"}, "tenants.0.namespaces"},
		"too many":          {many, "tenants.256: the file has more than 256 tenants"},
	} {
		_, err := access.Parse("roles.yaml", []byte(tenants(c.entries...)))
		at := fmt.Sprintf("roles.yaml:%d", line+len(c.entries)-1)
		if err == nil || !strings.Contains(err.Error(), c.want) || !strings.HasPrefix(err.Error(), at) {
			t.Errorf("%s: the error is %v; want %q in line %s", name, err, c.want, at)
		}
	}
}

// TestTenantChanges: the lines name each tenant whose quota differs.
func TestTenantChanges(t *testing.T) {
	was := parse(t, tenants("{namespaces: a/*, quota: 1000}", "{namespaces: b/*, quota: 2000}", "{namespaces: c/*, quota: 3000}"))
	is := parse(t, tenants("{namespaces: c/*, quota: 3000}", "{namespaces: b/*, quota: 500}", "{namespaces: aa/*, quota: 4000}"))
	want := []string{"tenant a/* is removed: quota 1000", "tenant aa/* is added: quota 4000", "tenant b/*: quota: 2000 → 500"}
	if got := access.Changes(was, is); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
