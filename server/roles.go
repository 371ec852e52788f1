package server

import (
	"context"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/server/access"
	"github.com/penstock-kv/penstock/server/membership"
)

// RolesDocument is the roles document in etcd. *membership.Roles implements it; see its methods for the contracts.
type RolesDocument interface {
	Key() string
	Get(ctx context.Context) (membership.RolesDocument, error)
	Set(ctx context.Context, text []byte, revision int64) (int64, error)
}

// errNoRoles is the error of calls that need the roles document in etcd.
var errNoRoles = status.Error(codes.FailedPrecondition, "this node does not take its roles from etcd: its setting auth.roles_etcd is empty")

func (s *adminService) GetRoles(ctx context.Context, _ *pb.GetRolesRequest) (*pb.GetRolesResponse, error) {
	if s.opts.RolesDocument == nil {
		return nil, errNoRoles
	}
	d, err := s.opts.RolesDocument.Get(ctx)
	if err != nil {
		return nil, statusOf(err)
	}
	return &pb.GetRolesResponse{Document: d.Text, Revision: d.Revision}, nil
}

func (s *adminService) SetRoles(ctx context.Context, req *pb.SetRolesRequest) (*pb.SetRolesResponse, error) {
	if s.opts.RolesDocument == nil {
		return nil, errNoRoles
	}
	var by *access.Credential
	if id, ok := identityOf(ctx); ok {
		by = &id.Credential
	}
	check := func(p *access.Policy) error { return s.node.CheckTenantQuotas(p.TenantQuotas()) }
	changes, revision, err := ReplaceRoles(ctx, s.opts.RolesDocument, req.GetDocument(), req.GetRevision(), by, check, req.GetDryRun())
	if err != nil {
		return nil, statusOf(err)
	}
	return &pb.SetRolesResponse{Changes: changes, Revision: revision}, nil
}

// ReplaceRoles replaces the roles document that has the given revision, unless dryRun is set, and returns the
// changes for people and the revision of the document. It refuses a document that is invalid, or that the caller with the
// credential by could not replace; nil: that no principal could replace. It refuses a caller who could not replace the
// present document, which the node may not use yet. check, if not nil, returns an error if a node cannot use the
// document.
func ReplaceRoles(ctx context.Context, d RolesDocument, text []byte, revision int64, by *access.Credential, check func(*access.Policy) error, dryRun bool) (changes []string, _ int64, err error) {
	if len(text) > access.BytesMax {
		return nil, 0, status.Errorf(codes.InvalidArgument, "the document has %d bytes; etcd takes at most %d", len(text), access.BytesMax)
	}
	next, err := access.Parse("the new document", text)
	if err != nil {
		return nil, 0, status.Error(codes.InvalidArgument, sentence(err))
	}
	if by != nil {
		if !governs(next, *by) {
			return nil, 0, status.Error(codes.FailedPrecondition, `the document would lock you out: your token or certificate has no principal in it with the roles operate and admin on "*"; give it these, or let another administrator make the change`)
		}
	}
	if !next.Governed() {
		return nil, 0, status.Error(codes.FailedPrecondition, `no principal of the document has the roles operate and admin on "*", so no client could replace it`)
	}
	if check != nil {
		if err := check(next); err != nil {
			return nil, 0, err
		}
	}
	present, err := d.Get(ctx)
	if err != nil {
		return nil, 0, err
	}
	if present.Revision != revision {
		return nil, 0, status.Errorf(codes.Aborted, "%v: it has revision %d, not %d; read it again, and make the change there", membership.ErrRolesChanged, present.Revision, revision)
	}
	was := access.None()
	if present.Revision > 0 {
		if old, err := access.Parse(fmt.Sprintf("etcd key %s", d.Key()), present.Text); err != nil {
			changes = append(changes, "the present document is invalid, and all principals count as added: "+sentence(err))
		} else {
			was = old
			if by != nil && !governs(was, *by) {
				return nil, 0, status.Error(codes.PermissionDenied, `your token or certificate has no principal with the roles operate and admin on "*" in the document that etcd has, which this node does not use yet`)
			}
		}
	}
	changes = append(changes, access.Changes(was, next)...)
	if dryRun {
		return changes, revision, nil
	}
	revision, err = d.Set(ctx, text, revision)
	return changes, revision, err
}

// governs reports whether the credential has a principal that governs the policy.
func governs(p *access.Policy, by access.Credential) bool {
	id, ok := p.ByCredential(by)
	return ok && id.Principal.Governs()
}
