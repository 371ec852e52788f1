package server

import (
	"maps"
	"slices"
	"testing"

	"google.golang.org/grpc"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/server/access"
)

// TestEveryMethodHasARule: each method of the services has a rule with a role, and each rule has a
// method.
func TestEveryMethodHasARule(t *testing.T) {
	left := maps.Clone(rules)
	for _, s := range []grpc.ServiceDesc{pb.Cache_ServiceDesc, pb.Admin_ServiceDesc, pb.Planner_ServiceDesc} {
		var names []string
		for _, m := range s.Methods {
			names = append(names, m.MethodName)
		}
		for _, m := range s.Streams {
			names = append(names, m.StreamName)
		}
		for _, name := range names {
			full := "/" + s.ServiceName + "/" + name
			if rules[full].roles == 0 {
				t.Errorf("%s has no rule: declare in rules which role may call it", full)
			}
			delete(left, full)
		}
	}
	if len(left) > 0 {
		t.Errorf("rules for methods that no service has: %v", slices.Sorted(maps.Keys(left)))
	}
}

// TestNamedRequests: the rules that take the namespace from a field of the request find that field.
func TestNamedRequests(t *testing.T) {
	for _, req := range []any{
		&pb.MatchRequest{Namespace: "m"}, &pb.ReadRequest{Namespace: "m"}, &pb.ReserveRequest{Namespace: "m"}, &pb.PinEpochRequest{Namespace: "m"},
		&pb.DeliveredRequest{Namespace: "m"}, &pb.ExistsRequest{Namespace: "m"}, &pb.DeleteRequest{Namespace: "m"}, &pb.EventsRequest{Namespace: "m"},
		&pb.GetNamespaceRequest{Name: "m"}, &pb.DeleteNamespaceRequest{Name: "m"}, &pb.BumpEpochRequest{Name: "m"}, &pb.RetireEpochRequest{Name: "m"},
		&pb.SetQuotaRequest{Name: "m"}, &pb.SetReplicasRequest{Name: "m"}, &pb.DeleteBlocksRequest{Namespace: "m"}, &pb.StatBlockRequest{Namespace: "m"}, &pb.ListBlocksRequest{Namespace: "m"},
		&pb.VerifyBlocksRequest{Namespace: "m"}, &pb.ListPinsRequest{Namespace: "m"}, &pb.SubmitRequest{Namespace: "m"}, &pb.BumpWeightsRequest{Namespace: "m"},
	} {
		if got := namespaceOf(req); got != "m" {
			t.Errorf("%T: namespace %q", req, got)
		}
	}
}

// TestMethodWithoutARule: the guard refuses a method that is not declared.
func TestMethodWithoutARule(t *testing.T) {
	policy, err := access.Parse("roles.yaml", []byte("principals: [{name: all, subjects: [CN=a], grants: [{roles: [read, write, admin, operate], namespaces: ['*']}]}]"))
	if err != nil {
		t.Fatal(err)
	}
	id, _ := policy.BySubject("CN=a")
	g := guard{roles: func() *access.Policy { return policy }}
	if err := g.check(withIdentity(t.Context(), id), "/penstock.v1.Cache/New", &pb.MatchRequest{Namespace: "m"}); refused(err) == nil {
		t.Errorf("a method without a rule: %v", err)
	}
	if err := g.check(withIdentity(t.Context(), id), pb.Cache_Match_FullMethodName, &pb.MatchRequest{Namespace: "m"}); err != nil {
		t.Error(err)
	}
}
