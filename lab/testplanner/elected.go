package testplanner

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/server/planner"
)

// Elected is a planner that the test elects, in place of etcd.
type Elected struct {
	// Addr is the planner's host:port.
	Addr string
	// Service is the planner.
	Service *planner.Elected

	t      testing.TB
	leases chan planner.Lease

	mu      sync.Mutex
	leader  planner.Leader
	seen    uint64
	present *Lease
	kept    []byte
	refused error
	deleted map[string]bool
	// unread is the error of Deleted.
	unread error
}

// StartElected starts a standby, and stops it when the test ends.
func StartElected(t testing.TB, o Options) *Elected {
	t.Helper()
	p := &Elected{t: t, leases: make(chan planner.Lease)}
	service, err := planner.NewElected(planner.ElectedOptions{
		Election: election{p}, Registry: o.Planner.Registry,
		New: func(l planner.Lease) (*planner.Service, func() error, error) {
			opts := o.Planner
			opts.Lease = l
			s, err := planner.New(opts)
			return s, nil, err
		},
		Failed: func(err error) { t.Error(err) },
	})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p.Addr, p.Service = l.Addr().String(), service
	pings := grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true})
	server := grpc.NewServer(append([]grpc.ServerOption{pings}, o.Server...)...)
	pb.RegisterPlannerServer(server, service)
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	t.Cleanup(func() {
		service.Close()
		server.Stop()
		if err := <-served; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			t.Errorf("planner: %v", err)
		}
	})
	return p
}

// Elect makes the planner the leader of a term, and waits until it serves. The planner must be a
// standby.
func (p *Elected) Elect(term uint64) *Lease {
	p.t.Helper()
	l := &Lease{of: p, term: term, lost: make(chan struct{})}
	l.held.Store(true)
	p.SetLeader(planner.Leader{Address: p.Addr, Term: term, Since: time.Now()})
	p.mu.Lock()
	p.present = l
	p.mu.Unlock()
	p.leases <- l
	deadline, tick := time.After(time.Minute), time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		r, err := p.Service.Election(context.Background(), &pb.ElectionRequest{})
		if err == nil && r.Leads {
			return l
		}
		select {
		case <-tick.C:
		case <-deadline:
			p.t.Fatalf("the planner does not lead: %v, %v", r, err)
		}
	}
}

// SetLeader sets the leader that the planner reads from the election.
func (p *Elected) SetLeader(l planner.Leader) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.leader = l
}

// RefuseKeep makes Keep of all terms return err, until it is nil.
func (p *Elected) RefuseKeep(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refused = err
}

// DeleteNamespace makes Deleted of all terms return the name.
func (p *Elected) DeleteNamespace(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.deleted == nil {
		p.deleted = make(map[string]bool)
	}
	p.deleted[name] = true
}

// RefuseDeleted makes Deleted of all terms return err, until it is nil.
func (p *Elected) RefuseDeleted(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.unread = err
}

// Kept returns the value that Keep has stored last.
func (p *Elected) Kept() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return string(p.kept)
}

// Seen returns the highest term that a caller of the planner has seen.
func (p *Elected) Seen() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.seen
}

// Lease is a term of an Elected.
type Lease struct {
	of   *Elected
	term uint64
	held atomic.Bool
	lost chan struct{}
	once sync.Once
}

// Number implements planner.Lease.
func (l *Lease) Number() uint64 { return l.term }

// Held implements planner.Lease.
func (l *Lease) Held() bool { return l.held.Load() }

// Lost implements planner.Lease.
func (l *Lease) Lost() <-chan struct{} { return l.lost }

// Keep implements planner.Lease.
func (l *Lease) Keep(_ context.Context, value []byte) error {
	l.of.mu.Lock()
	defer l.of.mu.Unlock()
	if l.of.refused != nil {
		return l.of.refused
	}
	if !l.Held() {
		return errors.New("the term has ended")
	}
	l.of.kept = value
	return nil
}

// Kept implements planner.Lease.
func (l *Lease) Kept(context.Context) ([]byte, error) {
	l.of.mu.Lock()
	defer l.of.mu.Unlock()
	return l.of.kept, nil
}

// Deleted implements planner.Lease.
func (l *Lease) Deleted(_ context.Context, names []string) (deleted []string, err error) {
	l.of.mu.Lock()
	defer l.of.mu.Unlock()
	for _, name := range names {
		if l.of.deleted[name] {
			deleted = append(deleted, name)
		}
	}
	return deleted, l.of.unread
}

// Resign implements planner.Lease.
func (l *Lease) Resign() {
	l.Expire()
	l.once.Do(func() { close(l.lost) })
}

// Expire ends the time for which the planner certainly leads. The planner gets no notice, as if its
// process had not run.
func (l *Lease) Expire() { l.held.Store(false) }

// election is an Elected as planner.Election.
type election struct{ p *Elected }

func (e election) Campaign(ctx context.Context) (planner.Lease, error) {
	select {
	case l := <-e.p.leases:
		return l, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (e election) Leader() planner.Leader {
	e.p.mu.Lock()
	defer e.p.mu.Unlock()
	return e.p.leader
}

func (e election) Surpass(term uint64) {
	e.p.mu.Lock()
	defer e.p.mu.Unlock()
	e.p.seen = max(e.p.seen, term)
	if e.p.present != nil && e.p.present.term < term {
		e.p.present.Resign()
	}
}
