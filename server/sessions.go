package server

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/server/access"
)

// Sessions decides which peers may open sessions of the data plane, and keeps the credential of
// each session's client. The data plane is opened with its Admission, and New gets both.
//
//	client ── gRPC Describe, with its credential ──► token of the credential
//	client ── handshake: proves that token ────────► Sessions: engine ↦ credential
//	client ── message from the engine ─────────────► calls: the roles of the credential
//
// A client has the credential of its principal or, without roles, that of its bearer token in the token file. If
// there are neither, a session has no credential. With auth.client_ca, a client also has the authority that verified its
// certificate. There is one token for each pair of both. When a credential or an authority is removed, the
// tokens that were derived from it open no session, and its sessions end (EndRemovedSessions).
//
// The id of an engine is
// the dialer's choice, so an id belongs to the principal that used it first until that principal is
// removed: no other principal can take over the sessions of that engine or receive its reads. The
// principal is that of the engine's credential in the policy in use. While there is no roles file, an
// id belongs to no principal. Ids without a session are forgotten when there are more than enginesMax.
type Sessions struct {
	// secret is the key of all tokens. It is in no reply: a caller that had it could compute the token
	// of every credential, because credentials are public.
	secret rdma.Token
	bearer Tokens
	roles  Roles
	cas    ClientCAs

	mu sync.Mutex
	// engines has the credential of each engine that had a session.
	engines map[rdma.EngineID]*owner
	// policy is the policy, bearers are the bearer tokens if policy is nil, and authorities are the certificates of auth.client_ca, from which
	// tokens and owners were derived. tokens has the tokens, owners the client of each token, and valid
	// the bearer token of each credential, "" for the credential of a principal; it is nil if no credential is required.
	policy      *access.Policy
	bearers     []string
	authorities [][sha256.Size]byte
	tokens      []rdma.Token
	owners      map[string]party
	valid       map[access.Credential]string
	// seen has the authorities that have verified the certificate of a caller of Describe. There are tokens of these only,
	// because a file may have many authorities, and each handshake compares with every token.
	seen map[[sha256.Size]byte]bool
	// peers returns the live sessions; nil before New.
	peers func() []rdma.Peer
}

// party is a set of clients that have the same token.
type party struct {
	// credential is the zero Credential if the node had neither roles nor bearer tokens.
	credential access.Credential
	// authority has verified the certificate of the client; zero if the node had no auth.client_ca.
	authority [sha256.Size]byte
}

// owner is the client of an engine.
type owner struct {
	party
	// bearer is the client's bearer token, "" if the node had roles or no bearer tokens.
	bearer string
	// name is the name that the client's principal had when the session was opened, "" if the node
	// had no roles file.
	name string
	// admitted is the time of the last handshake.
	admitted time.Time
	// idle is set if the engine had no session when the ids were last counted.
	idle bool
}

// principal returns the principal to which the engine belongs by the policy, nil if there is none. A
// renamed principal keeps its engines. When the credential was replaced by another one, the name
// decides.
func (o *owner) principal(policy *access.Policy) *access.Principal {
	if o.name == "" {
		return nil
	}
	if id, ok := policy.ByCredential(o.credential); ok {
		return id.Principal
	}
	return policy.Named(o.name)
}

// enginesMax is the number of engines above which those without a session are forgotten.
const enginesMax = 8192

// principalEnginesMax is the maximum number of engines with a session that one principal has: a
// quarter of the sessions of a data plane (Options.MaxPeers of rdma/tcp and rdma/group is 1,024), so
// that the engines of one principal do not use all of them. An engine has one session, but the
// transfer engine also counts sessions that are being opened, for at most openingMax.
const principalEnginesMax = 256

// NewSessions returns Sessions. secret has at least rdma.MinToken bytes. The tokens of the data plane
// are derived from it: one for each credential of the policy or, while roles returns nil, one for each of the
// bearer tokens, and one for all clients while there are none; of each such token there is one for each authority in use of
// cas. The functions may be nil.
func NewSessions(secret rdma.Token, bearer Tokens, roles Roles, cas ClientCAs) (*Sessions, error) {
	if err := secret.Validate(); err != nil {
		return nil, err
	}
	return &Sessions{secret: secret, bearer: bearer, roles: roles, cas: cas, engines: make(map[rdma.EngineID]*owner), seen: make(map[[sha256.Size]byte]bool)}, nil
}

// Admission returns the Admission of the data plane.
func (s *Sessions) Admission() *rdma.Admission {
	return &rdma.Admission{Tokens: s.accepted, Admit: s.admit}
}

// watch sets the function that returns the live sessions of the data plane.
func (s *Sessions) watch(peers func() []rdma.Peer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.peers = peers
}

// token returns the data plane's token for a caller of Describe.
func (s *Sessions) token(ctx context.Context) rdma.Token {
	var p party
	if accepted := s.cas.current(); len(accepted) > 0 {
		var ok bool
		if p.authority, ok = authorityOf(tlsState(ctx), accepted); ok {
			s.see(p.authority)
		}
	}
	if id, ok := identityOf(ctx); ok {
		p.credential = id.Credential
	} else if token := bearerOf(ctx); token != "" {
		p.credential = access.TokenCredential(token)
	}
	return s.derive(p)
}

// see makes the tokens of an authority.
func (s *Sessions) see(authority [sha256.Size]byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.seen[authority] {
		s.seen[authority] = true
		s.tokens = nil // refreshLocked derives them anew
	}
}

// The labels of derive: for the token of a credential, and for the one token without credentials.
// No label is a prefix of the other.
const (
	credentialLabel = "penstock data plane of a credential"
	sharedLabel     = "penstock data plane without roles"
)

// derive returns the token of a party. The data after a label are one or two of the values, which have a fixed length.
func (s *Sessions) derive(p party) rdma.Token {
	m := hmac.New(sha256.New, s.secret)
	if p.credential == (access.Credential{}) {
		m.Write([]byte(sharedLabel))
	} else {
		m.Write([]byte(credentialLabel))
		m.Write(p.credential[:])
	}
	if p.authority != ([sha256.Size]byte{}) {
		m.Write(p.authority[:])
	}
	return m.Sum(nil)
}

// accepted returns the tokens of the clients that are accepted at present.
func (s *Sessions) accepted() []rdma.Token {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refreshLocked()
	return s.tokens
}

// refreshLocked derives the tokens anew if the policy, the bearer tokens or the authorities have changed.
func (s *Sessions) refreshLocked() {
	policy, bearers, authorities := s.roles.current(), []string(nil), s.cas.current()
	if policy == nil {
		bearers = s.bearer.current()
	}
	if s.tokens != nil && s.policy == policy && slices.Equal(s.bearers, bearers) && slices.Equal(s.authorities, authorities) {
		return
	}
	s.policy, s.bearers, s.authorities, s.valid = policy, bearers, authorities, nil
	if policy != nil || len(bearers) > 0 {
		s.valid = make(map[access.Credential]string)
	}
	if policy != nil {
		for _, c := range policy.Credentials() {
			s.valid[c] = ""
		}
	}
	for _, b := range bearers {
		s.valid[access.TokenCredential(b)] = b
	}
	from := [][sha256.Size]byte{{}}
	if len(authorities) > 0 {
		from = slices.DeleteFunc(slices.Clone(authorities), func(a [sha256.Size]byte) bool { return !s.seen[a] })
	}
	s.tokens, s.owners = []rdma.Token{}, make(map[string]party)
	add := func(p party) {
		token := s.derive(p)
		s.tokens = append(s.tokens, token)
		s.owners[string(token)] = p
	}
	for _, a := range from {
		if s.valid == nil {
			add(party{authority: a})
		}
		for c := range s.valid {
			add(party{credential: c, authority: a})
		}
	}
}

// acceptedLocked reports whether a client has the credential and the certificate that are required at present.
func (s *Sessions) acceptedLocked(o *owner) bool {
	if o == nil {
		return s.valid == nil && len(s.authorities) == 0
	}
	if len(s.authorities) > 0 && !slices.Contains(s.authorities, o.authority) {
		return false
	}
	if s.valid == nil {
		return true
	}
	_, ok := s.valid[o.credential]
	return ok && (s.policy == nil || o.name != "") // a session that is older than the policy has no principal
}

var (
	errRemoved = errors.New("the credential of the token was removed from auth.token_file, auth.roles_file or auth.roles_etcd, or its CA from auth.client_ca")
	errTaken   = errors.New("the engine's id belongs to another principal")
)

// admit records the client of an engine that has proved a token.
func (s *Sessions) admit(engine rdma.EngineID, proved rdma.Token) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refreshLocked()
	now := &owner{admitted: time.Now()}
	var ok bool
	if now.party, ok = s.owners[string(proved)]; !ok {
		return errRemoved
	}
	now.bearer = s.valid[now.credential]
	if s.policy != nil {
		id, known := s.policy.ByCredential(now.credential)
		if !known {
			return errRemoved
		}
		if was := s.engines[engine]; was != nil {
			if p := was.principal(s.policy); p != nil && p != id.Principal {
				return fmt.Errorf("%w: engine %v", errTaken, engine)
			}
		}
		if n := s.othersLocked(id.Principal, engine); n >= principalEnginesMax {
			return fmt.Errorf("principal %q has sessions with %d engines, the maximum of one principal: %w", id.Principal.Name(), n, rdma.ErrBusy)
		}
		now.name = id.Principal.Name()
	}
	s.engines[engine] = now
	if len(s.engines) > enginesMax {
		s.forgetLocked()
	}
	return nil
}

// othersLocked returns the number of engines of a principal other than engine that have a session or
// may be opening one. It returns 0 if engine is one of these engines itself. A session has several
// handshakes, and the engine was counted at the first one.
func (s *Sessions) othersLocked(of *access.Principal, engine rdma.EngineID) (n int) {
	live, since := s.liveLocked(), time.Now().Add(-openingMax)
	counts := func(id rdma.EngineID, o *owner) bool {
		return o != nil && (o.admitted.After(since) || live[id]) && o.principal(s.policy) == of
	}
	if counts(engine, s.engines[engine]) {
		return 0
	}
	for id, o := range s.engines {
		if counts(id, o) {
			n++
		}
	}
	return n
}

// liveLocked returns the engines that have a session.
func (s *Sessions) liveLocked() map[rdma.EngineID]bool {
	live := make(map[rdma.EngineID]bool)
	if s.peers != nil {
		for _, p := range s.peers() {
			live[p.ID] = true
		}
	}
	return live
}

// forgetLocked forgets the engines that have no session and had none at the previous call. An
// engine whose session is being opened is kept.
func (s *Sessions) forgetLocked() {
	if s.peers == nil {
		return
	}
	live := s.liveLocked()
	for id, o := range s.engines {
		if o.idle && !live[id] {
			delete(s.engines, id)
		}
		o.idle = !live[id]
	}
}

// identity returns the identity of an engine's client by the policy. ok is false if the engine has
// no credential, or one that was removed.
func (s *Sessions) identity(policy *access.Policy, engine rdma.EngineID) (id access.Identity, ok bool) {
	s.mu.Lock()
	o := s.engines[engine]
	s.mu.Unlock()
	if o == nil || o.name == "" {
		return access.Identity{}, false
	}
	return policy.ByCredential(o.credential)
}

// errUnverified is the error of a call on a session whose client has no certificate of auth.client_ca.
var errUnverified = status.Error(codes.Unauthenticated, "auth.client_ca of the node does not verify the certificate of the caller any more")

// verified returns an error if auth.client_ca is set, and does not have the authority of an engine's client.
func (s *Sessions) verified(engine rdma.EngineID) error {
	accepted := s.cas.current()
	if len(accepted) == 0 {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if o := s.engines[engine]; o == nil || !slices.Contains(accepted, o.authority) {
		return errUnverified
	}
	return nil
}

// caller returns a context with the identity of an engine's client or, without roles, with its bearer token, for a
// call of that engine.
func (s *Sessions) caller(ctx context.Context, engine rdma.EngineID) context.Context {
	policy := s.roles.current()
	if policy == nil {
		if len(s.bearer.current()) == 0 {
			return ctx
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if o := s.engines[engine]; o != nil {
			return withBearer(ctx, o.bearer)
		}
		return ctx
	}
	if id, ok := s.identity(policy, engine); ok {
		return withIdentity(ctx, id)
	}
	return ctx
}

// own returns an error unless an engine belongs to the caller by the policy in use, so that a caller
// can neither send its reads to another principal's engine nor open windows to it.
func (s *Sessions) own(ctx context.Context, engine rdma.EngineID) error {
	id, ok := identityOf(ctx)
	policy := s.roles.current()
	if !ok || policy == nil || s.ownedBy(id, policy, engine) {
		return nil
	}
	return refuse(codes.PermissionDenied, "engine %v has no data-plane session of principal %q; connect it with the token that Describe returns to this principal", engine, id.Principal.Name())
}

// ownedBy reports whether the clients of a caller and of an engine are one principal of the policy.
func (s *Sessions) ownedBy(id access.Identity, policy *access.Policy, engine rdma.EngineID) bool {
	caller, known := policy.ByCredential(id.Credential)
	owner, ok := s.identity(policy, engine)
	return known && ok && caller.Principal == owner.Principal
}

// ownAll returns the engines of the caller that have a session, for a window that names no engine.
// all is true if the node has no roles file or the call has no identity: then the window is open to
// every engine.
func (s *Sessions) ownAll(ctx context.Context, peers func() []rdma.Peer) (engines []rdma.EngineID, all bool) {
	id, ok := identityOf(ctx)
	policy := s.roles.current()
	if !ok || policy == nil {
		return nil, true
	}
	for _, p := range peers() {
		if s.ownedBy(id, policy, p.ID) {
			engines = append(engines, p.ID)
		}
	}
	return engines, false
}

// removed returns the engines among peers whose clients lack a credential or a certificate that is required at present.
func (s *Sessions) removed(peers []rdma.Peer) (engines []rdma.EngineID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refreshLocked()
	for _, p := range peers {
		if !s.acceptedLocked(s.engines[p.ID]) {
			engines = append(engines, p.ID)
		}
	}
	return engines
}

// openingMax is a time within which every handshake of a provider ends: at most 10 s for one connection
// and 10 s more until the other connections of its session have joined (HandshakeTimeout of rdma/tcp
// and rdma/group).
const openingMax = 30 * time.Second

// EndRemovedSessions ends the data-plane sessions of clients whose token or certificate is in neither the token
// file nor the roles, and the connections and data-plane sessions of clients whose certificates auth.client_ca does not verify. It is called after these have changed. A handshake that is in progress may
// still become a session. The next message of that session ends it, and so does a second pass over the
// sessions after openingMax.
func (s *Server) EndRemovedSessions() {
	s.connections.endUnverified()
	s.endRemoved()
	s.later.start(s.endRemoved)
}

// endRemoved ends the sessions concurrently, because the end of a session waits for a client that does
// not read. The number of sessions is limited by the transfer engine.
func (s *Server) endRemoved() {
	var ending sync.WaitGroup
	for _, engine := range s.sessions.removed(s.data.Peers()) {
		ending.Go(func() { s.endSession(engine) })
	}
	ending.Wait()
}

// endSession ends the session of an engine whose client is not admitted any more.
func (s *Server) endSession(engine rdma.EngineID) {
	s.opts.Logger.Info("data-plane session ended: the token or certificate of its client is not in auth.token_file, auth.roles_file or auth.roles_etcd, or auth.client_ca does not verify it", "peer", engine.String())
	s.data.Disconnect(engine)
}

// laterCall calls a function once, when the time after has passed since the last call of start.
type laterCall struct {
	after time.Duration

	// running counts the calls in progress.
	running sync.WaitGroup
	mu      sync.Mutex
	timer   *time.Timer // nil before the first start
	stopped bool
}

// start arranges a call of f after the time l.after. It replaces an arranged call that has not
// begun.
func (l *laterCall) start(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stopped {
		return
	}
	if l.timer != nil {
		l.timer.Stop()
	}
	l.timer = time.AfterFunc(l.after, func() {
		if l.begin() {
			defer l.running.Done()
			f()
		}
	})
}

// begin counts a call that begins. It returns false after stop.
func (l *laterCall) begin() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.stopped {
		l.running.Add(1)
	}
	return !l.stopped
}

// stop prevents further calls, and waits for those in progress.
func (l *laterCall) stop() {
	l.mu.Lock()
	l.stopped = true
	if l.timer != nil {
		l.timer.Stop()
	}
	l.mu.Unlock()
	l.running.Wait()
}
