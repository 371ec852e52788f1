package reload_test

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/penstock-kv/penstock/server/config"
)

// valid fails unless the metrics have the revision of the roles document in use, and whether it is that of etcd.
func (p *process) valid(revision int64, valid int) {
	p.t.Helper()
	text := fmt.Sprintf(`# HELP penstock_config_roles_revision Revision in etcd of the roles document in use (auth.roles_etcd); 0: none.
# TYPE penstock_config_roles_revision gauge
penstock_config_roles_revision %d
# HELP penstock_config_roles_valid 0 while the roles document in etcd (auth.roles_etcd) is missing, invalid or cannot be read; the document that was read before stays in use. Otherwise 1, also without auth.roles_etcd.
# TYPE penstock_config_roles_valid gauge
penstock_config_roles_valid %d
`, revision, valid)
	if err := testutil.GatherAndCompare(p.registry, strings.NewReader(text), "penstock_config_roles_revision", "penstock_config_roles_valid"); err != nil {
		p.t.Error(err)
	}
}

// TestRolesFromEtcd: without a document every call is refused. A valid document is used, and a problem
// of a later one leaves the document in use and is shown until a valid one comes.
func TestRolesFromEtcd(t *testing.T) {
	document := func(names ...string) []byte {
		text := "principals:\n"
		for _, name := range names {
			text += fmt.Sprintf("  - {name: %s, tokens: [sha256:%x], grants: [{roles: [read], namespaces: [m]}]}\n", name, sha256.Sum256([]byte(newToken+name)))
		}
		return []byte(text)
	}
	p := newProcess(t)
	take := func(text []byte, revision int64) {
		t.Helper()
		p.reloader.TakeRoles(text, revision, time.Now().Add(time.Hour))
	}
	p.valid(0, 1)
	p.next.Auth = config.Auth{RolesEtcd: "/penstock/roles"}
	p.start()
	admitted := func(want string) {
		t.Helper()
		got, policy := "", p.creds.Roles()
		if policy == nil {
			t.Fatal("there is no policy, so every caller may make every call")
		}
		for _, name := range []string{"a", "b"} {
			if _, ok := policy.ByHeader("Bearer " + newToken + name); ok {
				got += name
			}
		}
		if got != want {
			t.Errorf("admitted are %q, want %q", got, want)
		}
	}
	state := func(revision int64, problem string, changed int32) {
		t.Helper()
		s := p.creds.RolesState()
		if s.Revision != revision || (s.Problem == "") != (problem == "") || !strings.Contains(s.Problem, problem) {
			t.Errorf("revision %d, problem %q; want %d, %q", s.Revision, s.Problem, revision, problem)
		}
		if got := p.changed.Load(); got != changed {
			t.Errorf("%d reports of changed credentials, want %d", got, changed)
		}
		valid := 1
		if problem != "" {
			valid = 0
		}
		if problem != "not read yet" {
			p.valid(revision, valid)
		}
	}
	admitted("")
	state(0, "not read yet", 0)
	p.reloader.RolesFailed(errors.New("etcd is down"))
	p.logged("every call is refused")
	admitted("")
	state(0, "etcd is down", 0)
	take(nil, 0)
	admitted("")
	state(0, "has no key /penstock/roles", 0)
	take(document("a"), 5)
	if line := p.logged("setting changed"); !strings.Contains(line[len(line)-1], `old=none new="1 principal`) {
		t.Errorf("the log has %q", line)
	}
	admitted("a")
	state(5, "", 1)
	take(document("a"), 5)
	state(5, "", 1)
	take([]byte("principals: []"), 6)
	p.logged("revision 6")
	admitted("a")
	state(5, "no principal", 1)
	take(document("b"), 7)
	admitted("b")
	state(7, "", 2)
	take(nil, 0)
	p.logged("the one in use stays")
	admitted("b")
	state(7, "has no key", 2)
	p.reloader.RolesFailed(errors.New("etcd is down"))
	admitted("b")
	state(7, "etcd is down", 2)
	take(document("b"), 7)
	admitted("b")
	state(7, "", 2)

	// Each read of etcd, also of an unchanged or invalid document, extends the time of the document in use, and a change
	// that a watch has returned does not.
	outdated := func(want bool) {
		t.Helper()
		if got := p.creds.Roles().Outdated(); got != want {
			t.Errorf("the policy is outdated: %v, want %v", got, want)
		}
	}
	past := time.Now().Add(-time.Second)
	for _, text := range [][]byte{document("b"), []byte("principals: []"), nil} {
		p.reloader.TakeRoles(document("b"), 7, past)
		outdated(true)
		admitted("b")
		if first := p.creds.Roles(); first != p.creds.Roles() {
			t.Error("each call has another outdated policy, for which sessions derive all tokens anew")
		}
		take(text, int64(len(text)))
		outdated(false)
	}
	take(document("b"), 8)
	p.reloader.TakeRoles(document("a"), 9, time.Time{})
	outdated(false)
	p.reloader.TakeRoles(document("a"), 9, past)
	p.reloader.TakeRoles(document("b"), 10, time.Time{})
	outdated(true)
	admitted("b")
	take(document("b"), 10)

	// A reload of the files leaves the document in use.
	if _, err := p.reloader.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	admitted("b")
	// A process can neither begin nor end to follow the key.
	p.next.Auth = config.Auth{}
	if _, err := p.reloader.Reload(t.Context()); err == nil || !strings.Contains(err.Error(), "auth.roles_etcd") {
		t.Errorf("a reload without auth.roles_etcd: %v", err)
	}
	admitted("b")
}
