package reload_test

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/server/access"
)

// TestQuotasOfRoles: new quotas of tenants are in use after a reload and after a change of the file. A file that the
// process cannot use leaves the quotas in use, and does not change the principals.
func TestQuotasOfRoles(t *testing.T) {
	p := newProcess(t)
	document := func(name string, quota int) string {
		return fmt.Sprintf("principals:\n  - {name: %s, tokens: [sha256:%x], grants: [{roles: [read], namespaces: [m]}]}\ntenants:\n  - {namespaces: a/*, quota: %d}\n", name, sha256.Sum256([]byte(newToken)), quota)
	}
	p.check = func(policy *access.Policy) error {
		for _, q := range policy.TenantQuotas() {
			if q.Bytes < 100 {
				return errors.New("the quota is below one block")
			}
		}
		return nil
	}
	inUse := func(name string, quota int64) {
		t.Helper()
		policy := p.creds.Roles()
		if got := policy.TenantQuotas(); len(got) != 1 || got[0].Prefix != "a/" || got[0].Bytes != quota || policy.Named(name) == nil {
			t.Errorf("the quotas are %v; want %d, and the principal %s", got, quota, name)
		}
	}
	p.write("roles", document("first", 1000))
	p.next.Auth.RolesFile, p.next.Auth.TokenFile = p.path("roles"), ""
	p.start()
	inUse("first", 1000)
	p.write("roles", document("second", 99))
	if _, err := p.reloader.Diff(t.Context()); err == nil {
		t.Error("config diff shows no error")
	}
	if _, err := p.reloader.Reload(t.Context()); err == nil || !strings.Contains(err.Error(), "auth.roles_file") || !strings.Contains(err.Error(), "below one block") {
		t.Errorf("a file that cannot be used: %v", err)
	}
	inUse("first", 1000)
	p.write("roles", document("second", 500))
	if _, err := p.reloader.Reload(t.Context()); err != nil {
		t.Error(err)
	}
	p.logged("configuration reloaded")
	inUse("second", 500)
	p.run(nil)
	p.write("roles", document("third", 98))
	p.logged("below one block")
	inUse("second", 500)
	p.write("roles", document("third", 200))
	p.logged("configuration reloaded")
	inUse("third", 200)
}
