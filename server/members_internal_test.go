package server

import (
	"context"
	"testing"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/server/access"
	"github.com/penstock-kv/penstock/server/membership"
)

// TestDetailsByRole: a caller without the role operate gets the NICs of a node and not its volumes, whose paths and errors are
// those of the host.
func TestDetailsByRole(t *testing.T) {
	policy, err := access.Parse("roles.yaml", []byte(`principals:
  - {name: tenant, subjects: [CN=tenant], grants: [{roles: [read], namespaces: ["a/*"]}]}
  - {name: sre, subjects: [CN=sre], grants: [{roles: [operate], namespaces: ["*"]}]}
`))
	if err != nil {
		t.Fatal(err)
	}
	d := membership.Details{NICs: []membership.NIC{{Name: "eth0", Up: true}}, Volumes: []membership.Volume{{Path: "/v", State: "failed", Reason: "EIO"}}, HotPrefixes: 3,
		Erasures: []membership.Erasures{{Volume: "/w", Namespaces: 1, SinceUnixMs: 5}}}
	for subject, want := range map[string]int{"CN=tenant": 0, "CN=sre": 1, "": 1} {
		ctx := context.Background()
		if subject != "" { // without roles a call has no identity
			id, ok := policy.BySubject(subject)
			if !ok {
				t.Fatalf("no principal has the subject %s", subject)
			}
			ctx = context.WithValue(ctx, identityKey{}, id)
		}
		var m pb.Member
		addDetails(ctx, &m, membership.Member{Blocks: 7}, d)
		if len(m.Volumes) != want || len(m.Erasures) != want || len(m.Nics) != 1 || m.HotPrefixes != 3 || m.Blocks != 7 {
			t.Errorf("subject %q: %v", subject, &m)
		}
	}
}
