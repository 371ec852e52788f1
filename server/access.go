package server

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/server/access"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
)

// Roles returns the policy in use, or nil if there is neither a roles file nor a roles document in etcd. Then access is decided by
// tokens and certificates alone, and every caller may make every call.
type Roles func() *access.Policy

// current returns the policy in use, nil if there is none.
func (r Roles) current() *access.Policy {
	if r == nil {
		return nil
	}
	return r()
}

// rule is the condition on which a call is allowed.
type rule struct {
	// roles: the caller needs one of these roles.
	roles access.Role
	// where returns for a request the roles and the namespace on which the caller needs one of them.
	// If where is nil, the caller needs one of roles on any namespace. The handler of a call
	// without a namespace shows the caller only the namespaces on which it has one of roles.
	where func(held holdings, req any) (demand, error)
}

// demand is the access that a request needs: one of several roles on one namespace. Every caller
// meets the zero demand.
type demand struct {
	roles     access.Role
	namespace string
	// and, if not 0, is a role that is needed in addition.
	and access.Role
	// every is set if the roles are needed on all namespaces. namespace is then not used.
	every bool
	// unknown, if not nil, is the error for callers without any role on the namespace. It is the
	// error for an id that does not exist, so that it does not reveal that the id exists.
	unknown error
}

// holdings finds the namespaces of leases and reservations. *storage.Node implements it.
type holdings interface {
	Leased(id trie.LeaseID) (trie.Pin, error)
	Reserved(id storage.ReservationID) (string, error)
}

// named is implemented by requests whose field name is the namespace, and inNamespace by requests
// with the field namespace.
type (
	named       interface{ GetName() string }
	inNamespace interface{ GetNamespace() string }
)

// on makes a rule for requests that name one namespace.
func on(roles access.Role) rule {
	return rule{roles: roles, where: func(_ holdings, req any) (demand, error) {
		return demand{roles: roles, namespace: namespaceOf(req)}, nil
	}}
}

// onEach makes a rule for requests that may leave the namespace empty. Then the caller needs one of
// roles on any namespace, and the handler leaves out the other namespaces.
func onEach(roles access.Role) rule {
	return rule{roles: roles, where: func(_ holdings, req any) (demand, error) {
		if namespaceOf(req) == "" {
			return demand{}, nil
		}
		return demand{roles: roles, namespace: namespaceOf(req)}, nil
	}}
}

// anywhere makes a rule for calls that concern no namespace.
func anywhere(roles access.Role) rule { return rule{roles: roles} }

// everywhere makes a rule for calls that concern all namespaces.
func everywhere(roles access.Role) rule {
	return rule{roles: roles, where: func(holdings, any) (demand, error) { return demand{roles: roles, every: true}, nil }}
}

func namespaceOf(req any) string {
	switch r := req.(type) {
	case inNamespace:
		return r.GetNamespace()
	case named:
		return r.GetName()
	}
	return ""
}

// rules has the rule of every method of the services. A method without a rule is refused.
var rules = map[string]rule{
	pb.Cache_Describe_FullMethodName:     anywhere(access.Any),
	pb.Cache_Match_FullMethodName:        {roles: access.Read, where: ofMatch},
	pb.Cache_RenewLease_FullMethodName:   {roles: access.Read | access.Admin, where: ofLease},
	pb.Cache_ReleaseLease_FullMethodName: {roles: access.Read | access.Admin, where: ofLease},
	pb.Cache_Read_FullMethodName:         on(access.Read),
	// The id of the local session is a secret of its engine.
	pb.Cache_ReturnLoans_FullMethodName: anywhere(access.Read),
	pb.Cache_Reserve_FullMethodName:     on(access.Write),
	pb.Cache_Commit_FullMethodName:      {roles: access.Write, where: ofReservation},
	pb.Cache_Abort_FullMethodName:       {roles: access.Write, where: ofReservation},
	pb.Cache_PinEpoch_FullMethodName:    on(access.Read),
	pb.Cache_Delivered_FullMethodName:   on(access.Write),
	pb.Cache_Demote_FullMethodName:      on(access.Write),
	pb.Cache_Exists_FullMethodName:      on(access.Read),
	pb.Cache_Delete_FullMethodName:      on(access.Write),
	pb.Cache_Events_FullMethodName:      onEach(access.Read),

	pb.Admin_CreateNamespace_FullMethodName: {roles: access.Admin, where: ofNewNamespace},
	pb.Admin_GetNamespace_FullMethodName:    on(access.Any),
	pb.Admin_ListNamespaces_FullMethodName:  anywhere(access.Any),
	pb.Admin_DeleteNamespace_FullMethodName: on(access.Admin),
	pb.Admin_BumpEpoch_FullMethodName:       on(access.Admin),
	pb.Admin_RetireEpoch_FullMethodName:     on(access.Admin),
	pb.Admin_SetQuota_FullMethodName:        on(access.Admin),
	pb.Admin_SetReplicas_FullMethodName:     on(access.Admin),
	pb.Admin_DeleteBlocks_FullMethodName:    on(access.Admin),
	pb.Admin_Evict_FullMethodName:           {roles: access.Admin | access.Operate, where: ofEvict},
	pb.Admin_Status_FullMethodName:          anywhere(access.Operate),
	pb.Admin_StatBlock_FullMethodName:       on(access.Admin),
	pb.Admin_ListBlocks_FullMethodName:      on(access.Admin),
	pb.Admin_VerifyBlocks_FullMethodName:    on(access.Admin),
	pb.Admin_ListTenants_FullMethodName:     anywhere(access.Any),
	pb.Admin_ListPins_FullMethodName:        onEach(access.Admin),
	// Clients place blocks by the members of the cluster.
	pb.Admin_ListMembers_FullMethodName:  anywhere(access.Any),
	pb.Admin_DrainMember_FullMethodName:  anywhere(access.Operate),
	pb.Admin_FillMembers_FullMethodName:  anywhere(access.Operate),
	pb.Admin_RemoveMember_FullMethodName: anywhere(access.Operate),
	pb.Admin_Scrub_FullMethodName:        anywhere(access.Operate),
	pb.Admin_ListVolumes_FullMethodName:  anywhere(access.Operate),
	pb.Admin_DrainVolume_FullMethodName:  anywhere(access.Operate),
	pb.Admin_RemoveVolume_FullMethodName: anywhere(access.Operate),
	pb.Admin_AdoptVolume_FullMethodName:  anywhere(access.Operate),
	pb.Admin_DiffConfig_FullMethodName:   anywhere(access.Operate),
	pb.Admin_ReloadConfig_FullMethodName: anywhere(access.Operate),
	pb.Admin_GetRoles_FullMethodName:     anywhere(access.Operate),
	pb.Admin_SetRoles_FullMethodName:     {roles: access.Operate, where: ofRoles},

	pb.Planner_Submit_FullMethodName: on(access.Read),
	// The engines of a group get the requests of every namespace, and store their blocks.
	pb.Planner_Lead_FullMethodName:        everywhere(access.Write),
	pb.Planner_BumpWeights_FullMethodName: on(access.Admin),
	pb.Planner_SwitchRole_FullMethodName:  anywhere(access.Operate),
	pb.Planner_Roles_FullMethodName:       anywhere(access.Operate),
	pb.Planner_Explain_FullMethodName:     anywhere(access.Operate),
	pb.Planner_Top_FullMethodName:         anywhere(access.Operate),
	// All clients find the leader with it.
	pb.Planner_Election_FullMethodName: anywhere(access.Any),
}

// ofMatch returns the demand of a Match. A pin without an expiry holds space until an administrator
// ends it, so it needs the role admin in addition.
func ofMatch(_ holdings, req any) (demand, error) {
	r, _ := req.(*pb.MatchRequest)
	if r.GetPin() {
		return demand{roles: access.Read, and: access.Admin, namespace: r.GetNamespace()}, nil
	}
	return demand{roles: access.Read, namespace: r.GetNamespace()}, nil
}

// ofLease returns the demand of a call on a lease, which concerns the namespace of the lease's
// blocks. A pin without an expiry needs the role admin, as in ofMatch.
func ofLease(held holdings, req any) (demand, error) {
	r, _ := req.(interface{ GetLease() uint64 })
	unknown := status.Errorf(codes.NotFound, "lease %d: %v", r.GetLease(), trie.ErrLeaseUnknown)
	pin, err := held.Leased(trie.LeaseID(r.GetLease()))
	if err != nil {
		return demand{}, unknown
	}
	d := demand{roles: access.Read | access.Admin, namespace: pin.Namespace, unknown: unknown}
	if pin.Expires.IsZero() {
		d.roles = access.Admin
	}
	return d, nil
}

// ofReservation returns the demand of a call on a reservation, which concerns the namespace of the
// reserved blocks.
func ofReservation(held holdings, req any) (demand, error) {
	r, _ := req.(interface{ GetReservation() uint64 })
	unknown := status.Errorf(codes.NotFound, "reservation %d: %v", r.GetReservation(), storage.ErrReservation)
	namespace, err := held.Reserved(storage.ReservationID(r.GetReservation()))
	if err != nil {
		return demand{}, unknown
	}
	return demand{roles: access.Write, namespace: namespace, unknown: unknown}, nil
}

func ofNewNamespace(_ holdings, req any) (demand, error) {
	r, _ := req.(*pb.CreateNamespaceRequest)
	return demand{roles: access.Admin, namespace: r.GetNamespace().GetName()}, nil
}

// ofEvict returns the demand of an Evict. Without a namespace it evicts blocks of every namespace.
func ofEvict(_ holdings, req any) (demand, error) {
	r, _ := req.(*pb.EvictRequest)
	if r.GetNamespace() == "" {
		return demand{roles: access.Operate, every: true}, nil
	}
	return demand{roles: access.Admin, namespace: r.GetNamespace()}, nil
}

// ofRoles returns the demand of a replacement of the roles document, with which the caller can give itself every role
// (access.Principal.Governs).
func ofRoles(holdings, any) (demand, error) {
	return demand{roles: access.Operate, and: access.Admin, every: true}, nil
}

// guard allows or refuses calls by the rules. Without roles it allows every call whose bearer token is accepted. The
// zero guard allows every call.
type guard struct {
	tokens Tokens
	roles  Roles
	held   holdings
}

// identityKey is the key of the access.Identity in the context of a call.
type identityKey struct{}

// withIdentity returns a context that carries the caller's identity.
func withIdentity(ctx context.Context, id access.Identity) context.Context {
	return context.WithValue(ctx, identityKey{}, id)
}

// identityOf returns the caller's identity. ok is false if the node had no roles file when the call
// began, and for the node's own calls and those over the unix socket.
func identityOf(ctx context.Context) (id access.Identity, ok bool) {
	id, ok = ctx.Value(identityKey{}).(access.Identity)
	return id, ok
}

// sees reports whether a call may show a namespace to its caller, by one of roles.
func sees(ctx context.Context, roles access.Role, namespace string) bool {
	id, ok := identityOf(ctx)
	return !ok || id.Principal.Has(roles, namespace)
}

// seesAll reports whether a call may show its caller what concerns all namespaces whose names begin with
// a prefix, by one of roles.
func seesAll(ctx context.Context, roles access.Role, prefix string) bool {
	id, ok := identityOf(ctx)
	return !ok || id.Principal.HasAll(roles, prefix)
}

// operates reports whether a call may show the node's own state to its caller.
func operates(ctx context.Context) bool {
	id, ok := identityOf(ctx)
	return !ok || id.Principal.HasAnywhere(access.Operate)
}

// refusal is the error of a call that the guard refuses.
type refusal struct {
	// shown is the status that the caller receives. logged is the reason for the audit log, which
	// may have names that the caller must not get.
	shown  *status.Status
	logged string
}

func (r *refusal) Error() string { return r.shown.Message() }

// GRPCStatus makes gRPC send shown.
func (r *refusal) GRPCStatus() *status.Status { return r.shown }

func refuse(code codes.Code, format string, args ...any) error {
	st := status.Newf(code, format, args...)
	return &refusal{shown: st, logged: st.Message()}
}

// hide returns a refusal that is logged as why and shown to the caller as shown.
func hide(why, shown error) error { return &refusal{shown: status.Convert(shown), logged: why.Error()} }

// identify returns the identity of a caller over gRPC or HTTP by its Authorization header or, if it
// has none, by the subject of its certificate. A call with several Authorization headers is refused,
// because each of them would cost a hash and a comparison with every token. Without a roles document from etcd the
// code is Unavailable and not Unauthenticated, so that clients try again.
func identify(policy *access.Policy, headers []string, subject string) (access.Identity, error) {
	if policy.Principals() == 0 {
		return access.Identity{}, refuse(codes.Unavailable, "this node has no roles document from etcd (auth.roles_etcd) yet, and refuses every call; the log of the node has the reason")
	}
	if len(headers) > 1 {
		return access.Identity{}, refuse(codes.Unauthenticated, "the call has %d Authorization headers; send one", len(headers))
	}
	if len(headers) == 1 {
		if id, ok := policy.ByHeader(headers[0]); ok {
			return id, nil
		}
		return access.Identity{}, refuse(codes.Unauthenticated, "the bearer token is of no principal of this node; compare the SHA-256 of the client's token (--token-file) with auth.roles_file or auth.roles_etcd of the node")
	}
	if subject == "" {
		return access.Identity{}, refuse(codes.Unauthenticated, "this node requires a bearer token or a certificate of a principal of its auth.roles_file or auth.roles_etcd; give the client its token file (--token-file)")
	}
	if id, ok := policy.BySubject(subject); ok {
		return id, nil
	}
	return access.Identity{}, refuse(codes.Unauthenticated, "the certificate's subject %q is of no principal of this node; compare it with auth.roles_file or auth.roles_etcd of the node", shorten(subject))
}

// subjectOf returns the subject of the caller's certificate, "" if the caller has none.
func subjectOf(ctx context.Context) string {
	if cert := certificateOf(tlsState(ctx)); cert != nil {
		return cert.Subject.String()
	}
	return ""
}

// admit identifies a caller over gRPC by the policy and the headers of its call, and refuses the call
// if the caller has the role for the method on no namespace. The returned context carries the
// identity. admit passes a method without a rule: gRPC answers Unimplemented if no service has the
// method, and otherwise guard.check refuses it.
func admit(ctx context.Context, policy *access.Policy, method string, md metadata.MD) (context.Context, error) {
	id, err := identify(policy, md.Get("authorization"), subjectOf(ctx))
	if err != nil {
		return ctx, err
	}
	ctx = withIdentity(ctx, id)
	if r, ok := rules[method]; ok && !id.Principal.HasAnywhere(r.roles) {
		return ctx, lacks(id, r.roles, "on any namespace")
	}
	return ctx, outdated(policy, shownOutdated[method])
}

// shownOutdated has the methods that an outdated policy admits, so that operators and their monitoring see the state of a
// process that etcd does not answer. They change nothing and show no block.
var shownOutdated = map[string]bool{
	pb.Admin_Status_FullMethodName:      true,
	pb.Admin_ListVolumes_FullMethodName: true,
	pb.Admin_ListMembers_FullMethodName: true,
	pb.Admin_DiffConfig_FullMethodName:  true,
	pb.Planner_Roles_FullMethodName:     true,
	pb.Planner_Top_FullMethodName:       true,
	pb.Planner_Election_FullMethodName:  true,
}

// outdated is the error of a call by an outdated policy; nil if the policy is not outdated, or the call is shown. The code is
// Unavailable, after which clients try another node.
func outdated(policy *access.Policy, shown bool) error {
	if shown || !policy.Outdated() {
		return nil
	}
	return refuse(codes.Unavailable, "etcd has not answered for longer than cluster.lease_ttl, and the principal may have been removed from auth.roles_etcd meanwhile; until etcd answers, the process admits only calls that show its state")
}

// lacks is the error of a caller without a role.
func lacks(id access.Identity, roles access.Role, where string) error {
	what := fmt.Sprintf("lacks the role %v %s", roles, where)
	switch roles {
	case access.Any:
		what = "has no role " + where
	case access.Operate: // it concerns the node
		what = "lacks the role operate"
	}
	return refuse(codes.PermissionDenied, "principal %q %s; an administrator grants it in auth.roles_file or auth.roles_etcd of the node", id.Principal.Name(), what)
}

// check returns an error if a request is not allowed. It uses the policy that is in use at the time
// of the call, so that a removed credential ends the streams of its principal, and a new roles file
// the streams of callers without an identity. Without a policy the bearer tokens in use decide.
func (g guard) check(ctx context.Context, method string, req any) error {
	policy := g.roles.current()
	if policy == nil {
		return g.checkBearer(ctx)
	}
	id, ok := identityOf(ctx)
	if !ok {
		return refuse(codes.Unauthenticated, "the caller connected before the node had an auth.roles_file; connect again, with the token or the certificate of a principal")
	}
	if id, ok = policy.ByCredential(id.Credential); !ok {
		return refuse(codes.Unauthenticated, "the caller's token or certificate is not in auth.roles_file or auth.roles_etcd of the node")
	}
	r, ok := rules[method]
	if !ok || !id.Principal.HasAnywhere(r.roles) {
		return lacks(id, r.roles, "on any namespace")
	}
	if err := outdated(policy, shownOutdated[method]); err != nil {
		return err
	}
	if r.where == nil {
		return nil
	}
	d, err := r.where(g.held, req)
	if err != nil {
		return err
	}
	return d.of(id)
}

// errTokenRemoved is the error of a request on a stream or a session whose bearer token was removed.
var errTokenRemoved = status.Error(codes.Unauthenticated, "the caller's bearer token is not in auth.token_file of the node any more")

// checkBearer returns an error if bearer tokens are required, and the caller connected without one that is accepted at
// present.
func (g guard) checkBearer(ctx context.Context) error {
	tokens := g.tokens.current()
	if len(tokens) == 0 {
		return nil
	}
	if slices.Contains(tokens, bearerOf(ctx)) {
		return nil
	}
	return errTokenRemoved
}

// of returns an error if a caller does not meet the demand.
func (d demand) of(id access.Identity) error {
	p := id.Principal
	refusal := func(roles access.Role) error {
		return lacks(id, roles, fmt.Sprintf("on namespace %q", shorten(d.namespace)))
	}
	switch {
	case d.every && !p.HasEverywhere(d.roles):
		return lacks(id, d.roles, "on every namespace")
	case d.every && d.and != 0 && !p.HasEverywhere(d.and):
		return lacks(id, d.and, "on every namespace")
	case d.every || d.roles == 0:
		return nil
	case d.unknown != nil && !p.Has(access.Any, d.namespace):
		return hide(refusal(d.roles), d.unknown)
	case !p.Has(d.roles, d.namespace):
		return refusal(d.roles)
	case d.and != 0 && !p.Has(d.and, d.namespace):
		return refusal(d.and)
	}
	return nil
}

// refresh returns a context with the caller's identity by the policy in use. Long calls need it,
// because the policy may change during the call. A caller whose credential was removed gets an
// identity without roles.
func (g guard) refresh(ctx context.Context) context.Context {
	id, ok := identityOf(ctx)
	policy := g.roles.current()
	if !ok || policy == nil {
		return ctx
	}
	if id, ok = policy.ByCredential(id.Credential); !ok {
		id.Principal = new(access.Principal)
	}
	return withIdentity(ctx, id)
}

// unary is a grpc.UnaryServerInterceptor.
func (g guard) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if err := g.check(ctx, info.FullMethod, req); err != nil {
		return nil, err
	}
	return next(ctx, req)
}

// stream is a grpc.StreamServerInterceptor.
func (g guard) stream(srv any, s grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	return next(srv, &guardedStream{ServerStream: s, guard: g, method: info.FullMethod})
}

// guardedStream checks each message of a stream: a message of the caller by its own content, and a
// message of the node by the caller's last message.
type guardedStream struct {
	grpc.ServerStream
	guard  guard
	method string

	mu      sync.Mutex
	request any
}

// RecvMsg implements grpc.ServerStream.
func (s *guardedStream) RecvMsg(m any) error {
	if err := s.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	s.mu.Lock()
	s.request = m
	s.mu.Unlock()
	return s.guard.check(s.Context(), s.method, m)
}

// SendMsg implements grpc.ServerStream. Without roles a call that a bearer token has begun gets its answers also when the
// token was removed meanwhile: a client that has replaced its token does not lose the requests that a planner has taken.
func (s *guardedStream) SendMsg(m any) error {
	if s.guard.roles.current() == nil {
		return s.ServerStream.SendMsg(m)
	}
	s.mu.Lock()
	req := s.request
	s.mu.Unlock()
	if err := s.guard.check(s.Context(), s.method, req); err != nil {
		return err
	}
	return s.ServerStream.SendMsg(m)
}
