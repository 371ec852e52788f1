package membership

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/penstock-kv/penstock/internal/options"
)

// ElectionOptions configures an Election. Endpoints and Address are required.
type ElectionOptions struct {
	// Endpoints, Prefix, TLS, Username and Password are as in Options. The candidates of one election
	// have the same Prefix.
	Endpoints          []string
	Prefix             string
	TLS                *tls.Config
	Username, Password string
	// TTL is the time after which another candidate may lead if the leader has vanished, at least 2 s,
	// in whole seconds. Default 5 s.
	TTL time.Duration
	// Address is the address at which clients reach this candidate.
	Address string
	// Clock measures the time of the lease. Nil: CLOCK_BOOTTIME.
	Clock  Clock
	Logger *slog.Logger
}

// LeaderRecord is the leader of an election, as etcd has it.
type LeaderRecord struct {
	Version int       `json:"version"`
	Address string    `json:"address"`
	Term    uint64    `json:"term"`
	Since   time.Time `json:"since"`
}

// Election chooses one leader among the planners with the same etcd and prefix. All methods may be
// called concurrently, except Campaign.
type Election struct {
	opts ElectionOptions
	log  *slog.Logger

	etcd *etcdClient

	mu     sync.Mutex
	leader LeaderRecord // zero: none is known
	// floor is the highest term that a client has seen, or that this candidate has read from etcd. etcd
	// may have lost its data since.
	floor uint64
	// term is this candidate's present term, nil if it does not lead.
	term *Term
}

// NewElection returns an election. It does not connect to etcd; Campaign does.
func NewElection(o ElectionOptions) (*Election, error) {
	options.SetDefault(&o.Prefix, "/penstock")
	options.SetDefault(&o.TTL, 5*time.Second)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if len(o.Endpoints) == 0 || o.Address == "" || o.TTL < 2*time.Second || o.TTL%time.Second != 0 {
		return nil, errors.New("membership: an election needs Endpoints, Address, and a TTL of whole seconds, at least 2")
	}
	return &Election{opts: o, log: o.Logger, etcd: newEtcdClient(o.Endpoints, o.TLS, o.Username, o.Password, o.TTL)}, nil
}

// The keys of an election: the leader's record under the leader's lease, the highest term, and what
// leaders keep for later terms.
func (e *Election) leaderKey() string { return e.opts.Prefix + "/planner/leader" }
func (e *Election) termKey() string   { return e.opts.Prefix + "/planner/term" }
func (e *Election) keptKey() string   { return e.opts.Prefix + "/planner/kept" }

// Leader returns the leader that etcd had when this candidate last read it. The record is zero if
// there was none, or if etcd does not answer.
func (e *Election) Leader() LeaderRecord {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.leader
}

func (e *Election) setLeader(r LeaderRecord) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.leader = r
	e.floor = max(e.floor, r.Term)
}

// Surpass records a term that a client has seen. If it is above this candidate's present term, the
// candidate ends its own term: another planner has led since, or etcd has lost its data. The next
// term is above every term recorded here.
func (e *Election) Surpass(term uint64) {
	e.mu.Lock()
	e.floor = max(e.floor, term)
	t := e.term
	e.mu.Unlock()
	if t != nil && t.number < term {
		t.lose(fmt.Errorf("a client has seen term %d", term))
	}
}

// Campaign waits until this candidate is the leader, and returns its term. It returns an error only
// if ctx ends. The caller ends a term (Term.Resign) before it campaigns again.
func (e *Election) Campaign(ctx context.Context) (*Term, error) {
	const first, longest = 100 * time.Millisecond, 2 * time.Second
	wait, said := first, ""
	for {
		t, err := e.attempt(ctx)
		switch {
		case ctx.Err() != nil:
			if t != nil {
				t.Resign()
			}
			return nil, context.Cause(ctx)
		case t != nil:
			e.log.Info("elected: this planner leads", "term", t.number, "etcd", e.opts.Endpoints, "prefix", e.opts.Prefix)
			return t, nil
		case err == nil:
			wait, said = first, ""
			continue
		}
		e.setLeader(LeaderRecord{})
		if text := err.Error(); text != said {
			e.log.Warn("no election: this planner does not lead and refuses all calls", "etcd", e.opts.Endpoints, "err", err)
			said = text
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
		wait = min(2*wait, longest)
	}
}

// attempt tries once to become the leader. If another candidate leads, attempt waits until that
// candidate's key has changed, or for a quarter of the TTL, and returns nil.
func (e *Election) attempt(ctx context.Context) (*Term, error) {
	etcd, err := e.etcd.open()
	if err != nil {
		return nil, err
	}
	limited, cancel := context.WithTimeout(ctx, e.opts.TTL)
	defer cancel()
	resp, err := etcd.Txn(limited).Then(clientv3.OpGet(e.leaderKey()), clientv3.OpGet(e.termKey())).Commit()
	if err != nil {
		return nil, fmt.Errorf("read the leader: %w", err)
	}
	leaders, terms := resp.Responses[0].GetResponseRange().Kvs, resp.Responses[1].GetResponseRange().Kvs
	if len(leaders) > 0 {
		var r LeaderRecord
		if err := json.Unmarshal(leaders[0].Value, &r); err != nil {
			return nil, fmt.Errorf("etcd key %s: %w", e.leaderKey(), err)
		}
		if r.Version != recordVersion {
			return nil, fmt.Errorf("etcd key %s has version %d; this program supports version %d: run the same release on all planners", e.leaderKey(), r.Version, recordVersion)
		}
		if e.Leader() != r {
			e.log.Info("this planner is a standby", "leader", r.Address, "term", r.Term)
		}
		e.setLeader(r)
		return nil, e.await(ctx, etcd, resp.Header.Revision)
	}
	e.setLeader(LeaderRecord{})
	e.mu.Lock()
	number := e.floor
	e.mu.Unlock()
	same := clientv3.Compare(clientv3.CreateRevision(e.termKey()), "=", 0)
	if len(terms) > 0 {
		last, err := strconv.ParseUint(string(terms[0].Value), 10, 64)
		if err != nil {
			return nil, fmt.Errorf("etcd key %s: %w", e.termKey(), err)
		}
		number = max(number, last)
		same = clientv3.Compare(clientv3.ModRevision(e.termKey()), "=", terms[0].ModRevision)
	}
	number++
	leads, began := newValidity(e.opts.TTL, e.opts.Clock), time.Now()
	sent := leads.now()
	grant, err := etcd.Grant(limited, int64(e.opts.TTL/time.Second))
	if err != nil {
		return nil, fmt.Errorf("grant a lease: %w", err)
	}
	r := LeaderRecord{Version: recordVersion, Address: e.opts.Address, Term: number, Since: began.UTC()}
	value, err := json.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("membership: %w", err)
	}
	txn, err := etcd.Txn(limited).If(clientv3.Compare(clientv3.CreateRevision(e.leaderKey()), "=", 0), same).
		Then(clientv3.OpPut(e.leaderKey(), string(value), clientv3.WithLease(grant.ID)), clientv3.OpPut(e.termKey(), strconv.FormatUint(number, 10))).Commit()
	if err != nil || !txn.Succeeded {
		// The lease may hold the key although the answer was lost, and limited may have ended. If this
		// call fails too, the lease ends by itself.
		_ = revoke(etcd, grant.ID)
		if err != nil {
			return nil, fmt.Errorf("become the leader: %w", err)
		}
		return nil, nil
	}
	e.setLeader(r)
	leads.renewed(sent)
	return e.begin(etcd, grant.ID, number, leads), nil
}

// await returns when the leader's key has changed after the revision rev, or after a quarter of the
// TTL.
func (e *Election) await(ctx context.Context, etcd *clientv3.Client, rev int64) error {
	ctx, cancel := context.WithTimeout(clientv3.WithRequireLeader(ctx), e.opts.TTL/4)
	defer cancel()
	for resp := range etcd.Watch(ctx, e.leaderKey(), clientv3.WithRev(rev+1)) {
		if err := resp.Err(); err != nil {
			return fmt.Errorf("watch the leader: %w", err)
		}
		if len(resp.Events) > 0 {
			return nil
		}
	}
	return nil
}

// Close closes the connection to etcd. The caller has ended Campaign and the last term.
func (e *Election) Close() error { return e.etcd.close() }

// Term is the time for which one candidate leads. All methods may be called concurrently.
type Term struct {
	election *Election
	etcd     *clientv3.Client
	lease    clientv3.LeaseID
	number   uint64
	// leads is the time for which the candidate certainly leads.
	leads  *validity
	lost   chan struct{}
	once   sync.Once
	cancel context.CancelFunc
	kept   chan struct{}
}

func (e *Election) begin(etcd *clientv3.Client, lease clientv3.LeaseID, number uint64, leads *validity) *Term {
	t := &Term{election: e, etcd: etcd, lease: lease, number: number, leads: leads, lost: make(chan struct{}), kept: make(chan struct{})}
	ctx, cancel := context.WithCancel(context.Background())
	t.cancel = cancel
	e.mu.Lock()
	e.term = t
	seen := e.floor
	e.mu.Unlock()
	if number < seen { // a client has reported a later term while this candidate was being elected
		t.lose(fmt.Errorf("a client has seen term %d", seen))
	}
	go t.keep(ctx)
	return t
}

// Number returns the term's number. Each term has a higher number than all terms before it.
func (t *Term) Number() uint64 { return t.number }

// Lost is closed when the term has ended.
func (t *Term) Lost() <-chan struct{} { return t.lost }

// Held reports whether the candidate certainly leads: etcd has confirmed a renewal of the lease that
// was sent less than nine tenths of the TTL ago.
func (t *Term) Held() bool { return t.leads.holds() }

// lose ends the term.
func (t *Term) lose(why error) {
	t.once.Do(func() {
		t.leads.end()
		t.election.log.Warn("this planner leads no more: its term has ended", "term", t.number, "why", why)
		close(t.lost)
	})
}

// keep renews the lease until ctx ends or the term is lost.
func (t *Term) keep(ctx context.Context) {
	defer close(t.kept)
	every := t.election.opts.TTL / 4
	next, end := time.NewTimer(every), time.NewTimer(0)
	defer next.Stop()
	defer end.Stop()
	var last error
	for {
		end.Reset(t.leads.left())
		select {
		case <-next.C:
		case <-end.C:
			t.lose(errors.Join(errors.New("etcd has not confirmed a renewal of the lease in time"), last))
			return
		case <-t.lost:
			return
		case <-ctx.Done():
			return
		}
		sent := t.leads.now()
		limited, cancel := context.WithTimeout(ctx, every)
		last = t.renew(limited, sent)
		cancel()
		switch {
		case errors.Is(last, errDeposed):
			t.lose(last)
			return
		case last != nil && ctx.Err() == nil:
			// A refused connection returns an error at once.
			next.Reset(every / 8)
		default:
			next.Reset(every)
		}
	}
}

// errDeposed: the leader's key is not under the term's lease.
var errDeposed = errors.New("etcd has ended the lease, or another planner leads")

// renew renews the lease once.
func (t *Term) renew(ctx context.Context, sent time.Duration) error {
	if _, err := t.etcd.KeepAliveOnce(ctx, t.lease); errors.Is(err, rpctypes.ErrLeaseNotFound) {
		return errDeposed
	} else if err != nil {
		return err
	}
	// The key is compared as well, so that a key that was deleted by hand is noticed.
	resp, err := t.etcd.Txn(ctx).If(clientv3.Compare(clientv3.LeaseValue(t.election.leaderKey()), "=", t.lease)).Commit()
	switch {
	case err != nil:
		return err
	case !resp.Succeeded:
		return errDeposed
	}
	t.leads.renewed(sent)
	return nil
}

// Keep stores a value for later terms, in place of the last one. It returns an error if this term has
// ended, or if etcd does not confirm the write before ctx ends; then the value may be stored.
func (t *Term) Keep(ctx context.Context, value []byte) error {
	resp, err := t.etcd.Txn(ctx).If(clientv3.Compare(clientv3.LeaseValue(t.election.leaderKey()), "=", t.lease)).
		Then(clientv3.OpPut(t.election.keptKey(), string(value))).Commit()
	switch {
	case err != nil:
		return fmt.Errorf("etcd key %s: %w", t.election.keptKey(), err)
	case !resp.Succeeded:
		return errDeposed
	}
	return nil
}

// Kept returns the value that this or an earlier term has stored last; nil if there is none. It waits at
// most for the TTL.
func (t *Term) Kept(ctx context.Context) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, t.election.opts.TTL)
	defer cancel()
	resp, err := t.etcd.Get(ctx, t.election.keptKey())
	if err != nil {
		return nil, fmt.Errorf("etcd key %s: %w", t.election.keptKey(), err)
	}
	if len(resp.Kvs) == 0 {
		return nil, nil
	}
	return resp.Kvs[0].Value, nil
}

// deletedPerRead is the number of records that one transaction of Deleted reads; etcd permits 128 by default.
const deletedPerRead = 100

// Deleted returns the names, among the given ones, of namespaces that were deleted from the cluster with the election's
// etcd and prefix. It leaves out a name without a record in etcd: the planner's nodes need not be members.
func (t *Term) Deleted(ctx context.Context, names []string) (deleted []string, err error) {
	prefix := namespacesPrefix(t.election.opts.Prefix)
	for some := range slices.Chunk(names, deletedPerRead) {
		reads := make([]clientv3.Op, len(some))
		for i, name := range some {
			reads[i] = clientv3.OpGet(prefix + name)
		}
		resp, err := t.etcd.Txn(ctx).Then(reads...).Commit()
		if err != nil {
			return nil, fmt.Errorf("read the namespaces: %w", err)
		}
		for i, name := range some {
			for _, kv := range resp.Responses[i].GetResponseRange().Kvs {
				r, err := decodeRecord(kv.Key, kv.Value)
				if err != nil {
					return nil, err
				}
				if r.Deleted {
					deleted = append(deleted, name)
				}
			}
		}
	}
	return deleted, nil
}

// Resign ends the term and revokes its lease, so that another candidate is elected at once. If etcd
// does not confirm that within a second, the lease ends by itself.
func (t *Term) Resign() {
	t.once.Do(func() {
		t.leads.end()
		close(t.lost)
	})
	t.cancel()
	<-t.kept
	t.leads.end() // a renewal may have been in flight
	t.election.mu.Lock()
	t.election.term = nil
	t.election.leader = LeaderRecord{}
	t.election.mu.Unlock()
	if err := revoke(t.etcd, t.lease); err != nil && !errors.Is(err, rpctypes.ErrLeaseNotFound) {
		t.election.log.Warn("etcd did not confirm that this planner has resigned; its lease ends by itself", "etcd", strings.Join(t.election.opts.Endpoints, ","), "err", err)
	}
}

// revoke ends a lease. It waits a second at most.
func revoke(etcd *clientv3.Client, lease clientv3.LeaseID) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_, err := etcd.Revoke(ctx, lease)
	return err
}
