package binding

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/bearer"
	"github.com/penstock-kv/penstock/internal/certs"
	"github.com/penstock-kv/penstock/internal/sys"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
)

// Options are the options of a Store. Servers and Engine are required. Zero in another
// field selects the default.
type Options struct {
	// Servers are the nodes' addresses, separated by commas. Discover is client.Options.Discover.
	Servers  string
	Discover bool
	// Zone is client.Options.Zone.
	Zone string
	Credentials
	// Log, if not nil, is called with each log line of LogLevel and above, one at a time.
	Log      func(level slog.Level, line string)
	LogLevel slog.Level
	// DialTimeout and DeadFor have the meaning and defaults of client.Options.
	DialTimeout, DeadFor time.Duration
	// Timeout bounds calls without a time limit of their own. Default 30 s.
	Timeout time.Duration
	// JobsMax is the largest number of jobs that are running or not drained. JobsParallel is the
	// largest number of jobs that run at the same time; other jobs wait. Defaults 1024 and 16.
	JobsMax, JobsParallel int
	// Engine opens the transfer engine. The Store closes the engine.
	Engine func(ctx context.Context, t *tls.Config, log *slog.Logger) (rdma.Engine, error)
}

// Credentials are the secrets and certificates of a caller, and the CA of the nodes or of the planner.
type Credentials struct {
	// Token is the bearer token. TokenFile is a file with the token in its first line, which is read again when it has
	// changed.
	Token, TokenFile string
	// CAFile, CertFile and KeyFile are PEM files for TLS. If all are empty, connections
	// are in plaintext.
	CAFile, CertFile, KeyFile string
	// Insecure allows sending the token in plaintext.
	Insecure bool
}

// Store is a client.Store with the memories, jobs and log queue of a C caller. All methods
// may be called concurrently.
type Store struct {
	library *Library
	handle  Handle
	opts    Options
	client  *client.Store
	engine  rdma.Engine
	logs    *logQueue
	event   sys.Eventfd
	turns   turns

	// ctx ends when Close begins. calls counts the running calls and jobs.
	ctx    context.Context
	cancel context.CancelFunc
	calls  sync.WaitGroup

	mu     sync.Mutex
	closed bool
	// memories are sorted by address and do not overlap.
	memories []*Memory
	jobs     map[Handle]*job
	// done are the complete jobs whose completion was not returned yet, in the order of
	// completion.
	done []*job
	// sessions are the open leaders, gateways and traffic managers.
	sessions map[Handle]interface{ end() error }

	devices devices
}

func (s *Store) of() *Store { return s }

// Open opens a store and returns its handle. ctx bounds only Open itself.
func (l *Library) Open(ctx context.Context, o Options) (Handle, error) {
	o.Timeout = cmp.Or(o.Timeout, 30*time.Second)
	o.JobsMax, o.JobsParallel = cmp.Or(o.JobsMax, 1024), cmp.Or(o.JobsParallel, 16)
	s := &Store{library: l, opts: o, turns: turns{free: o.JobsParallel}, jobs: make(map[Handle]*job), sessions: make(map[Handle]interface{ end() error })}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.logs = newLogQueue(o.Log, o.LogLevel)
	token, err := o.token(s.logs.logger())
	if err != nil {
		s.logs.close()
		return 0, err
	}
	t, err := o.tls(s.logs.logger())
	if err != nil {
		s.logs.close()
		return 0, err
	}
	if s.event, err = sys.NewEventfd(); err != nil {
		s.logs.close()
		return 0, err
	}
	if s.engine, err = o.Engine(ctx, t, s.logs.logger()); err != nil {
		return 0, errors.Join(err, s.free())
	}
	s.client, err = client.Open(ctx, client.Options{
		Servers: splitList(o.Servers), Discover: o.Discover, Zone: o.Zone, Engine: s.engine, TokenSource: token, TLS: t, Insecure: o.Insecure,
		Logger: s.logs.logger(), DialTimeout: o.DialTimeout, DeadFor: o.DeadFor,
	})
	if err != nil {
		if CodeOf(err) == Internal { // an error of client.Options.Validate
			err = fmt.Errorf("%w: %w", ErrInvalid, err)
		}
		return 0, errors.Join(err, s.free())
	}
	s.handle = l.add(s)
	return s.handle, nil
}

func splitList(list string) []string {
	return slices.DeleteFunc(strings.FieldsFunc(list, func(r rune) bool { return r == ',' }), func(s string) bool { return strings.TrimSpace(s) == "" })
}

// token returns a function that returns the bearer token of each call, or nil if there is none.
func (o *Credentials) token(log *slog.Logger) (func() string, error) {
	switch {
	case o.Token != "" && o.TokenFile != "":
		return nil, fmt.Errorf("%w: both a token and a token file are given", ErrInvalid)
	case o.Token != "":
		return func() string { return o.Token }, nil
	case o.TokenFile == "":
		return nil, nil
	}
	f, err := bearer.Open(o.TokenFile, log)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return f.Token, nil
}

func (o *Credentials) tls(log *slog.Logger) (*tls.Config, error) {
	if (o.CertFile == "") != (o.KeyFile == "") {
		return nil, fmt.Errorf("%w: give both cert_file and key_file or neither: cert_file %q, key_file %q", ErrInvalid, o.CertFile, o.KeyFile)
	}
	if o.CAFile == "" && o.CertFile == "" {
		return nil, nil
	}
	t := &tls.Config{MinVersion: tls.VersionTLS12}
	if o.CAFile != "" {
		pool, err := certs.Pool(o.CAFile)
		if err != nil {
			return nil, fmt.Errorf("%w: ca_file: %w", ErrInvalid, err)
		}
		t.RootCAs = pool
	}
	if o.CertFile != "" {
		pair, err := certs.OpenPair(o.CertFile, o.KeyFile, log)
		if err != nil {
			return nil, fmt.Errorf("%w: cert_file: %w", ErrInvalid, err)
		}
		pair.SetOn(t)
	}
	return t, nil
}

// begin counts a call in s.calls, for which Close waits. It fails if the store is closed.
func (s *Store) begin() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return fmt.Errorf("%w: the store is closed", ErrHandle)
	}
	s.calls.Add(1)
	return nil
}

// within returns a context that ends with the store or after d. If d is 0, Options.Timeout
// applies.
func (s *Store) within(d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(s.ctx, cmp.Or(d, s.opts.Timeout))
}

// call calls f within Options.Timeout, if the store is open.
func (s *Store) call(f func(context.Context) error) error {
	if err := s.begin(); err != nil {
		return err
	}
	defer s.calls.Done()
	ctx, cancel := s.within(0)
	defer cancel()
	return f(ctx)
}

// Close closes the store; see penstock_close.
func (s *Store) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return fmt.Errorf("%w: the store is closed", ErrHandle)
	}
	s.closed = true
	s.mu.Unlock()
	s.library.removeOf(s)
	s.cancel()
	s.calls.Wait()
	var errs []error
	for _, open := range s.takeSessions() {
		errs = append(errs, open.end())
	}
	s.library.removeOf(s) // the handles that the calls have added
	return errors.Join(append(errs, s.free())...)
}

// own registers a session (a leader, gateway or traffic manager) that Close must end. forget undoes
// own.
func (s *Store) own(h Handle, session interface{ end() error }) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sessions[h] = session
}

func (s *Store) forget(h Handle) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.sessions, h)
}

// takeSessions returns the open sessions. No call of the store is running, so no further session
// can be opened.
func (s *Store) takeSessions() []interface{ end() error } {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.sessions))
}

// free releases everything that Open opened. No call may be running.
func (s *Store) free() error {
	s.cancel()
	var errs []error
	if s.client != nil {
		errs = append(errs, s.client.Close())
	}
	// No transfer uses the memories, so Close does not wait for a transfer.
	for _, m := range s.memories {
		errs = append(errs, m.close(context.Background()))
	}
	for _, d := range s.devices.open {
		errs = append(errs, d.close())
	}
	if s.engine != nil {
		errs = append(errs, s.engine.Close())
	}
	s.logs.close()
	return errors.Join(append(errs, s.event.Close())...)
}

// Namespace is a namespace at the epoch of the caller's weights.
type Namespace struct {
	store *Store
	keys  kv.Keys
	// ids is set if keys are block ids.
	ids bool

	mu  sync.Mutex
	def kv.Namespace
}

func (n *Namespace) of() *Store { return n.store }

// Ensure creates a namespace, or checks that an existing one has the same definition. If
// ids is set, the keys of the handle are block ids.
func (s *Store) Ensure(def kv.Namespace, ids bool) (h Handle, err error) {
	err = s.call(func(ctx context.Context) error {
		ns, err := s.client.EnsureNamespace(ctx, def)
		if err != nil {
			return err
		}
		n := &Namespace{store: s, def: ns, ids: ids}
		if n.keys, err = ns.Keys(); err != nil {
			return fmt.Errorf("%w: %w", ErrInvalid, err)
		}
		h = s.library.add(n)
		return nil
	})
	return h, err
}

// Definition returns the namespace at the handle's epoch.
func (n *Namespace) Definition() kv.Namespace {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.def
}

func (n *Namespace) setEpoch(e kv.Epoch) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.def.Epoch = max(n.def.Epoch, e)
}

// Refresh moves the handle to the newest epoch of the nodes and returns that epoch.
func (n *Namespace) Refresh() (epoch kv.Epoch, err error) {
	err = n.store.call(func(ctx context.Context) error {
		ns, err := n.store.client.Namespace(ctx, n.Definition().Name)
		if err != nil {
			return err
		}
		n.setEpoch(ns.Epoch)
		epoch = n.Definition().Epoch
		return nil
	})
	return epoch, err
}

// Bump begins an epoch and keeps some older epochs live; see client.Store.BumpEpoch. It moves the
// handle to the new epoch even if a node did not answer.
func (n *Namespace) Bump(to kv.Epoch, keep int) (epoch kv.Epoch, err error) {
	err = n.store.call(func(ctx context.Context) (err error) {
		epoch, err = n.store.client.BumpEpoch(ctx, n.Definition().Name, to, keep)
		if err == nil || errors.Is(err, client.ErrUnavailable) {
			n.setEpoch(epoch)
		}
		return err
	})
	return epoch, err
}

// Retire ends an older live epoch; see client.Store.RetireEpoch.
func (n *Namespace) Retire(epoch kv.Epoch, force bool) error {
	return n.store.call(func(ctx context.Context) error {
		return n.store.client.RetireEpoch(ctx, n.Definition().Name, epoch, force)
	})
}

// PinEpoch keeps an epoch live for ttl; epoch 0 means the epoch of the handle. See
// client.Store.PinEpoch. It returns the epoch and a Lease.
func (n *Namespace) PinEpoch(epoch kv.Epoch, ttl time.Duration) (pinned kv.Epoch, lease Handle, err error) {
	err = n.store.call(func(ctx context.Context) error {
		ns := n.Definition()
		if pinned = epoch; epoch == 0 {
			pinned = ns.Epoch
		}
		l, err := n.store.client.PinEpoch(ctx, ns, pinned, ttl)
		if err == nil {
			lease = n.store.library.addLease(&Lease{store: n.store, lease: l}, ttl)
		}
		return err
	})
	return pinned, lease, err
}

// Lease is a client.Lease with a handle.
type Lease struct {
	store  *Store
	handle Handle
	lease  *client.Lease
	// ends is the time at which the node ends the lease, or later. Guarded by Library.mu.
	ends time.Time
}

func (l *Lease) of() *Store { return l.store }

// Renew makes the lease end ttl from now.
func (l *Lease) Renew(ttl time.Duration) error {
	l.store.library.renewed(l, ttl)
	return l.store.call(func(ctx context.Context) error { return l.lease.Renew(ctx, ttl) })
}

// Release ends the lease and the handle.
func (l *Lease) Release() error {
	l.store.library.remove(l.handle)
	return l.store.call(l.lease.Release)
}

// storeStatus is the JSON of Status.
type storeStatus struct {
	client.Stats
	Nodes       []nodeStatus
	Jobs        int
	Completions int
	LogsDropped uint64
}

type nodeStatus struct {
	Server, Node, Version, Error string
	Up, Cluster                  bool
}

// Status returns the store's counters and the state of its nodes as JSON.
func (s *Store) Status() ([]byte, error) {
	if err := s.begin(); err != nil {
		return nil, err
	}
	defer s.calls.Done()
	out := storeStatus{Stats: s.client.Stats(), LogsDropped: s.logs.dropped.Load()}
	for _, n := range s.client.Nodes() {
		ns := nodeStatus{Server: n.Server, Node: n.Node, Version: n.Version, Up: n.Up, Cluster: n.Cluster}
		if n.Err != nil {
			ns.Error = n.Err.Error()
		}
		out.Nodes = append(out.Nodes, ns)
	}
	s.mu.Lock()
	out.Jobs, out.Completions = len(s.jobs), len(s.done)
	s.mu.Unlock()
	return json.Marshal(out)
}
