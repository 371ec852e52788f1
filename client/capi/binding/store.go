package binding

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/sys"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
)

// Options say how to open a Store. Servers and Engine are required; zero in another
// field means its default.
type Options struct {
	// Servers are the nodes' addresses, separated by commas.
	Servers string
	// Token is the bearer token; TokenFile a file that holds it.
	Token, TokenFile string
	// CAFile, CertFile and KeyFile are files of TLS; all empty: plaintext.
	CAFile, CertFile, KeyFile string
	// Insecure allows a token in plaintext.
	Insecure bool
	// Log takes lines of LogLevel and above, one after the other. nil: none.
	Log      func(level slog.Level, line string)
	LogLevel slog.Level
	// DialTimeout and DeadFor are client.Options'.
	DialTimeout, DeadFor time.Duration
	// Timeout bounds calls that name no time of their own. Default 30 s.
	Timeout time.Duration
	// JobsMax is how many jobs may be under way or not drained; JobsParallel how many
	// run at once. Defaults 1024 and 16.
	JobsMax, JobsParallel int
	// Engine opens the transfer engine, which the Store closes.
	Engine func(ctx context.Context, t *tls.Config, log *slog.Logger) (rdma.Engine, error)
}

// Store is a client.Store with what C callers need around it. All methods may be called
// concurrently.
type Store struct {
	library *Library
	handle  Handle
	opts    Options
	client  *client.Store
	engine  rdma.Engine
	logs    *logQueue
	event   sys.Eventfd
	// turns has an element for each job that runs.
	turns chan struct{}

	// ctx ends when Close begins; calls counts calls and jobs under way.
	ctx    context.Context
	cancel context.CancelFunc
	calls  sync.WaitGroup

	mu     sync.Mutex
	closed bool
	// memories are in order of their addresses, which do not overlap.
	memories []*Memory
	jobs     map[Handle]*job
	// done are the jobs whose completion was not returned, in the order of their ends.
	done []*job
}

func (s *Store) of() *Store { return s }

// Open opens a store and returns its handle. ctx bounds the opening.
func (l *Library) Open(ctx context.Context, o Options) (Handle, error) {
	o.Timeout = cmp.Or(o.Timeout, 30*time.Second)
	o.JobsMax, o.JobsParallel = cmp.Or(o.JobsMax, 1024), cmp.Or(o.JobsParallel, 16)
	token, err := o.token()
	if err != nil {
		return 0, err
	}
	t, err := o.tls()
	if err != nil {
		return 0, err
	}
	s := &Store{library: l, opts: o, turns: make(chan struct{}, o.JobsParallel), jobs: make(map[Handle]*job)}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.logs = newLogQueue(o.Log, o.LogLevel)
	if s.event, err = sys.NewEventfd(); err != nil {
		s.logs.close()
		return 0, err
	}
	if s.engine, err = o.Engine(ctx, t, s.logs.logger()); err != nil {
		return 0, errors.Join(err, s.free())
	}
	s.client, err = client.Open(ctx, client.Options{
		Servers: splitList(o.Servers), Engine: s.engine, BearerToken: token, TLS: t, Insecure: o.Insecure,
		Logger: s.logs.logger(), DialTimeout: o.DialTimeout, DeadFor: o.DeadFor,
	})
	if err != nil {
		if CodeOf(err) == Internal { // what client.Options.Validate says
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

func (o *Options) token() (string, error) {
	if o.TokenFile == "" {
		return o.Token, nil
	}
	if o.Token != "" {
		return "", fmt.Errorf("%w: both a token and a token file are given", ErrInvalid)
	}
	b, err := os.ReadFile(o.TokenFile)
	if err != nil {
		return "", fmt.Errorf("%w: token file: %w", ErrInvalid, err)
	}
	return strings.TrimSpace(string(b)), nil
}

func (o *Options) tls() (*tls.Config, error) {
	if (o.CertFile == "") != (o.KeyFile == "") {
		return nil, fmt.Errorf("%w: a certificate and its key go together: cert_file %q, key_file %q", ErrInvalid, o.CertFile, o.KeyFile)
	}
	if o.CAFile == "" && o.CertFile == "" {
		return nil, nil
	}
	t := &tls.Config{MinVersion: tls.VersionTLS12}
	if o.CAFile != "" {
		pem, err := os.ReadFile(o.CAFile)
		if err != nil {
			return nil, fmt.Errorf("%w: ca_file: %w", ErrInvalid, err)
		}
		t.RootCAs = x509.NewCertPool()
		if !t.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%w: ca_file %s holds no certificate", ErrInvalid, o.CAFile)
		}
	}
	if o.CertFile != "" {
		cert, err := tls.LoadX509KeyPair(o.CertFile, o.KeyFile)
		if err != nil {
			return nil, fmt.Errorf("%w: cert_file: %w", ErrInvalid, err)
		}
		t.Certificates = []tls.Certificate{cert}
	}
	return t, nil
}

// begin enters a call: Close waits for its end.
func (s *Store) begin() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return fmt.Errorf("%w: the store is closed", ErrHandle)
	}
	s.calls.Add(1)
	return nil
}

// within bounds a call by the store's life and a time; 0 means the store's.
func (s *Store) within(d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(s.ctx, cmp.Or(d, s.opts.Timeout))
}

// Close ends the store; see penstock_close.
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
	return s.free()
}

// free gives back what Open made. No call is under way.
func (s *Store) free() error {
	s.cancel()
	var errs []error
	if s.client != nil {
		errs = append(errs, s.client.Close())
	}
	// Nothing uses the memory any more, so this does not wait.
	for _, m := range s.memories {
		errs = append(errs, m.client.Close(context.Background()))
	}
	if s.engine != nil {
		errs = append(errs, s.engine.Close())
	}
	s.logs.close()
	return errors.Join(append(errs, s.event.Close())...)
}

// Namespace is a namespace with the epoch of a caller's weights.
type Namespace struct {
	store *Store
	keys  kv.Keys
	// ids: keys are block ids.
	ids bool

	mu  sync.Mutex
	def kv.Namespace
}

func (n *Namespace) of() *Store { return n.store }

// Ensure creates a namespace, or checks the one that is there. ids says that its keys
// are block ids.
func (s *Store) Ensure(def kv.Namespace, ids bool) (Handle, error) {
	if err := s.begin(); err != nil {
		return 0, err
	}
	defer s.calls.Done()
	ctx, cancel := s.within(0)
	defer cancel()
	ns, err := s.client.EnsureNamespace(ctx, def)
	if err != nil {
		return 0, err
	}
	n := &Namespace{store: s, def: ns, ids: ids}
	if n.keys, err = ns.Keys(); err != nil {
		return 0, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return s.library.add(n), nil
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

// Refresh takes over the newest epoch of the nodes, and returns it.
func (n *Namespace) Refresh() (kv.Epoch, error) {
	s := n.store
	if err := s.begin(); err != nil {
		return 0, err
	}
	defer s.calls.Done()
	ctx, cancel := s.within(0)
	defer cancel()
	ns, err := s.client.Namespace(ctx, n.Definition().Name)
	if err != nil {
		return 0, err
	}
	n.setEpoch(ns.Epoch)
	return n.Definition().Epoch, nil
}

// Bump begins an epoch; see client.Store.BumpEpoch. The handle is at it then, also if a
// node did not answer.
func (n *Namespace) Bump(to kv.Epoch) (kv.Epoch, error) {
	s := n.store
	if err := s.begin(); err != nil {
		return 0, err
	}
	defer s.calls.Done()
	ctx, cancel := s.within(0)
	defer cancel()
	epoch, err := s.client.BumpEpoch(ctx, n.Definition().Name, to)
	if err == nil || errors.Is(err, client.ErrUnavailable) {
		n.setEpoch(epoch)
	}
	return epoch, err
}

// Lease is a client.Lease with a handle.
type Lease struct {
	store  *Store
	handle Handle
	lease  *client.Lease
}

func (l *Lease) of() *Store { return l.store }

// Renew makes the lease end ttl from now.
func (l *Lease) Renew(ttl time.Duration) error {
	return l.call(func(ctx context.Context) error { return l.lease.Renew(ctx, ttl) })
}

// Release ends the lease and the handle.
func (l *Lease) Release() error {
	l.store.library.remove(l.handle)
	return l.call(l.lease.Release)
}

func (l *Lease) call(f func(context.Context) error) error {
	if err := l.store.begin(); err != nil {
		return err
	}
	defer l.store.calls.Done()
	ctx, cancel := l.store.within(0)
	defer cancel()
	return f(ctx)
}

// status is what Status encodes.
type status struct {
	client.Stats
	Nodes       []nodeStatus
	Jobs        int
	Completions int
	LogsDropped uint64
}

type nodeStatus struct {
	Server, Node, Version, Error string
	Up                           bool
}

// Status returns counters and nodes as JSON.
func (s *Store) Status() ([]byte, error) {
	if err := s.begin(); err != nil {
		return nil, err
	}
	defer s.calls.Done()
	out := status{Stats: s.client.Stats(), LogsDropped: s.logs.dropped.Load()}
	for _, n := range s.client.Nodes() {
		ns := nodeStatus{Server: n.Server, Node: n.Node, Version: n.Version, Up: n.Up}
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
