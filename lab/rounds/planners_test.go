package rounds

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/client/gateway"
	"github.com/penstock-kv/penstock/client/leader"
	"github.com/penstock-kv/penstock/client/planners"
	"github.com/penstock-kv/penstock/client/traffic"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
)

const (
	// gateways is the number of requests in flight at a time. requestEvery is the pause between two requests
	// of one caller, and requestTakes the time that an engine computes.
	gateways     = 6
	requestEvery = 30 * time.Millisecond
	requestTakes = 20 * time.Millisecond
)

// planner is a planner process, which is the leader or a standby.
type planner struct {
	process
	addr string
	conn pb.PlannerClient
}

// newPlanner starts a planner.
func newPlanner(t *testing.T, binary, dir, name string, etcd []string) *planner {
	t.Helper()
	p := &planner{process: process{t: t, name: name, logFile: filepath.Join(dir, name+".log")}, addr: testkit.Port(t)}
	conn, err := client.Dial(p.addr, client.DialOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	p.conn = pb.NewPlannerClient(conn)
	p.args = []string{binary, "planner", "--listen", p.addr, "--http", "", "--schedule-block-tokens", "4", "--schedule-min-part", "4",
		"--cluster-etcd", strings.Join(etcd, ","), "--cluster-lease-ttl", leaseTTL.String()}
	t.Cleanup(p.kill)
	p.start()
	return p
}

// state returns the planner's answer about the election, nil if it does not answer.
func (p *planner) state() *pb.ElectionResponse {
	ctx, cancel := context.WithTimeout(context.Background(), leaseTTL)
	defer cancel()
	r, err := p.conn.Election(ctx, &pb.ElectionRequest{})
	if err != nil {
		return nil
	}
	return r
}

// engine is an engine without KV: it computes each request for requestTakes. All engines report to the load
// if a planner starts an attempt after one of a later term has started another.
type engine struct {
	*requests
	name string
	mu   sync.Mutex
	term uint64 // the highest term of an attempt
}

// Start implements leader.Engine.
func (e *engine) Start(ctx context.Context, r *leader.Request) {
	seq, err := strconv.ParseUint(r.Name[strings.LastIndexByte(r.Name, '#')+1:], 10, 64)
	if err != nil {
		e.report("engine %s: the attempt %q has no number", e.name, r.Name)
	}
	e.mu.Lock()
	if term := seq >> 40; term < e.term {
		e.report("engine %s: the planner of term %d started %s after term %d had begun", e.name, term, r.Name, e.term)
	} else {
		e.term = term
	}
	e.mu.Unlock()
	e.wg.Go(func() {
		computed := time.NewTimer(requestTakes)
		defer computed.Stop()
		select {
		case <-computed.C:
		case <-ctx.Done():
		}
		r.Done(ctx.Err())
	})
}

func (e *engine) Read(string, traffic.Part)      {}
func (e *engine) Cut(string)                     {}
func (e *engine) Recompute(string, traffic.Part) {}

// requests is the load on the planners.
type requests struct {
	*load
	done atomic.Int64 // requests that have ended with Done
	// mu guards the names of the requests in flight, the number of requests that waited for a planner, and the
	// number of requests that were planned again.
	mu                sync.Mutex
	flying            map[string]bool
	waited, replanned int
}

// startRequests starts engines and callers, until the context of the load ends.
func (l *load) startRequests(seed uint64, seeds []string, addrs string) *requests {
	l.t.Helper()
	q := &requests{load: l, flying: make(map[string]bool)}
	dial := func() *planners.Conn {
		conn, err := planners.Dial(addrs, client.DialOptions{})
		if err != nil {
			l.t.Fatal(err)
		}
		l.closers = append(l.closers, conn.Close)
		return conn
	}
	for i, role := range []leader.Role{leader.Prefill, leader.Prefill, leader.Decode, leader.Decode} {
		e := &engine{requests: q, name: fmt.Sprintf("e%d", i)}
		group, err := leader.New(leader.Options{
			Group: e.name, Node: e.name, Role: role, Geometry: geometry, Planner: dial(),
			Members: []leader.Member{{Name: e.name, Engine: e, DeviceBlocks: 1000}},
		})
		if err != nil {
			l.t.Fatal(err)
		}
		l.wg.Go(func() { group.Run(l.ctx) })
	}
	g, err := gateway.New(gateway.Options{Namespace: *l.spaces[0].given.Load(), Store: l.open(seeds), Planner: dial()})
	if err != nil {
		l.t.Fatal(err)
	}
	for i := range gateways {
		l.wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(300+i)))
			tick := time.NewTicker(requestEvery)
			defer tick.Stop()
			for k := 0; ; k++ {
				select {
				case <-tick.C:
					q.request(g, fmt.Sprintf("r%d-%d", i, k), tokens(rng.IntN(l.spaces[0].sequences)))
				case <-l.ctx.Done():
					return
				}
			}
		})
	}
	return q
}

// request makes one request, which must end with Done.
func (q *requests) request(g *gateway.Gateway, id string, prompt []kv.Token) {
	q.mu.Lock()
	q.flying[id] = true
	q.mu.Unlock()
	done, waited, replanned := false, false, false
	for event, err := range g.Serve(q.ctx, gateway.Request{ID: id, Tokens: prompt, Output: 4}) {
		if err != nil {
			if q.ctx.Err() == nil {
				q.report("request %s is lost: %v", id, err)
			}
			return
		}
		done = done || event.Kind == gateway.Done
		waited = waited || event.Kind == gateway.Waiting
		replanned = replanned || event.Kind == gateway.Replanned
	}
	if !done {
		if q.ctx.Err() == nil {
			q.report("request %s has ended without Done", id)
		}
		return
	}
	q.done.Add(1)
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.flying, id)
	if waited {
		q.waited++
	}
	if replanned {
		q.replanned++
	}
}

// inFlight returns the names of the requests in flight.
func (q *requests) inFlight() []string {
	q.mu.Lock()
	defer q.mu.Unlock()
	return slices.Collect(maps.Keys(q.flying))
}

func (q *requests) String() string {
	q.mu.Lock()
	defer q.mu.Unlock()
	return fmt.Sprintf("%d requests to the planners were served, of which %d waited for a planner and %d were planned again", q.done.Load(), q.waited, q.replanned)
}

// planned waits until the requests in flight at the call have ended, and until later ones have.
func (c *cluster) planned(when string) {
	c.t.Helper()
	c.ended(when, c.requests.inFlight())
}

// ended waits until the requests have ended, and as many others as there are callers.
func (c *cluster) ended(when string, ids []string) {
	c.t.Helper()
	q := c.requests
	before := q.done.Load()
	c.await(fmt.Sprintf("%d requests in flight have ended %s", len(ids), when), func() bool {
		flying := q.inFlight()
		return !slices.ContainsFunc(ids, func(id string) bool { return slices.Contains(flying, id) })
	})
	c.await("requests have ended "+when, func() bool { return q.done.Load() >= before+gateways })
}

// leads returns the planner that leads in a later term than after, and the term.
func (c *cluster) leads(after uint64) (p *planner, term uint64) {
	c.t.Helper()
	c.await(fmt.Sprintf("a planner leads in a term above %d", after), func() bool {
		for _, p = range c.planners {
			if p.down {
				continue
			}
			if s := p.state(); s.GetLeads() && s.GetTerm() > after {
				term = s.GetTerm()
				return true
			}
		}
		return false
	})
	return p, term
}

// killPlanner kills the planner that leads, under requests, and starts it again at once or when the standby
// leads.
func (c *cluster) killPlanner() string {
	p, term := c.leads(0)
	atOnce := c.coin()
	flying := c.requests.inFlight()
	p.kill()
	c.event("planner %s was killed with %d requests in flight", p.name, len(flying))
	detail := p.name + ", started at once"
	if atOnce {
		p.start()
	} else {
		detail = p.name + ", started when the standby leads"
	}
	_, next := c.leads(term)
	c.ended("after the planner's end", flying)
	if !atOnce {
		p.start()
	}
	c.event("term %d follows term %d", next, term)
	return detail
}
