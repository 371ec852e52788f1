package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/client/leader"
	"github.com/penstock-kv/penstock/client/planners"
	"github.com/penstock-kv/penstock/client/traffic"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/cluster"
	"github.com/penstock-kv/penstock/lab/testetcd"
)

// electorate is a prefill/decode cluster with two planner processes that elect a leader, under load
// through a gateway.
type electorate struct {
	*testing.T
	planners []*elector
	engines  []*countedEngine
	url      string // the gateway's
	answered atomic.Int64
	// config is the planners' empty configuration, and status the arguments of plan status in docs/dualpath.md.
	config string
	status []string
}

// elector is a planner process behind a gate to etcd.
type elector struct {
	*cluster.Process
	addr, http string
	gate       *testetcd.Gate
	conn       pb.PlannerClient
}

// countedEngine is an engine without KV. A request ends when its completion over HTTP has arrived. The
// engine counts the attempts by the term of the planner that started them.
type countedEngine struct {
	t    *testing.T
	name string

	mu      sync.Mutex
	changed chan struct{} // closed at each change of running
	running map[string]*leader.Request
	// left are the attempts for which no completion waits any more.
	left map[string]bool
	// term is the highest term of an attempt. starts is the number of attempts by term.
	term   uint64
	starts map[uint64]int
	// role is the engine's role, prefills the number of attempts as prefill engine.
	role     leader.Role
	prefills int
	// The next request waits until held, if not nil, is closed; later ones do not. waiting is set when it waits.
	held    chan struct{}
	waiting bool
}

// Start implements leader.Engine.
func (e *countedEngine) Start(ctx context.Context, r *leader.Request) {
	context.AfterFunc(ctx, func() { r.Done(ctx.Err()) })
	seq, err := strconv.ParseUint(r.Name[strings.LastIndexByte(r.Name, '#')+1:], 10, 64)
	if err != nil {
		e.t.Error(err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	term := seq >> 40
	if term < e.term {
		e.t.Errorf("engine %s: the planner of term %d started %s after term %d had begun", e.name, term, r.Name, e.term)
	}
	e.term = max(e.term, term)
	e.starts[term]++
	if r.Role != e.role {
		e.t.Errorf("engine %s, whose role is %v, has started %s as %v", e.name, e.role, r.Name, r.Role)
	}
	if r.Role == leader.Prefill {
		e.prefills++
	}
	if e.left[r.Name] { // nothing else would end it
		delete(e.left, r.Name)
		defer r.Done(errors.New("its completion has ended"))
		return
	}
	e.running[r.Name] = r
	close(e.changed)
	e.changed = make(chan struct{})
}

func (e *countedEngine) Read(string, traffic.Part)      {}
func (e *countedEngine) Cut(string)                     {}
func (e *countedEngine) Recompute(string, traffic.Part) {}

// await returns the attempt, and nil if ctx ends first. Then the attempt fails if it arrives later.
func (e *countedEngine) await(ctx context.Context, attempt string) *leader.Request {
	for {
		e.mu.Lock()
		r, changed := e.running[attempt], e.changed
		delete(e.running, attempt)
		if r == nil && ctx.Err() != nil {
			e.left[attempt] = true
		}
		e.mu.Unlock()
		if r != nil || ctx.Err() != nil {
			return r
		}
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
}

// work is the time that an engine computes a request.
const work = 20 * time.Millisecond

// ServeHTTP serves the completions of the gateway.
func (e *countedEngine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/tokenize":
		fmt.Fprint(w, `{"tokens":[1,2,3,4,5,6]}`)
	case "/v1/completions":
		var body struct {
			Params struct {
				Penstock struct{ Attempt string }
			} `json:"kv_transfer_params"`
		}
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
			e.t.Error(err)
		}
		_, _ = io.Copy(io.Discard, r.Body) // so that the end of the connection is noticed
		// As a real engine, the engine bounds its wait for the leader's part of the attempt.
		ctx, cancel := context.WithTimeout(r.Context(), 2*time.Second)
		defer cancel()
		attempt := e.await(ctx, body.Params.Penstock.Attempt)
		if attempt == nil {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		e.mu.Lock()
		held := e.held
		if held != nil { // one only: if the callers of all requests waited, none would be answered
			e.held, e.waiting = nil, true
		}
		e.mu.Unlock()
		if held != nil {
			select {
			case <-held:
			case <-r.Context().Done():
			}
		}
		select {
		case <-time.After(work):
		case <-r.Context().Done():
		}
		attempt.Done(r.Context().Err())
		fmt.Fprint(w, e.name)
	}
}

// newElectorate starts the cluster and the load.
func newElectorate(t *testing.T) *electorate {
	t.Helper()
	testkit.VerifyNone(t)
	etcd := testetcd.Start(t, 1)
	c := &electorate{T: t, config: writeFile(t, t.TempDir(), "planner.yaml", nil)}
	var addrs []string
	for range 2 {
		p := &elector{addr: testkit.Port(t), http: testkit.Port(t), gate: testetcd.NewGate(t, etcd.Endpoints[0])}
		conn, err := client.Dial(p.addr, client.DialOptions{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		p.conn = pb.NewPlannerClient(conn)
		c.start(p)
		t.Cleanup(func() {
			if err := p.Kill(); err != nil {
				t.Error(err)
			}
		})
		c.planners, addrs = append(c.planners, p), append(addrs, p.addr)
	}
	node := startServed(t, t.TempDir())
	node.run("ns", "create", "llama/tp1.0", "--layers", "2", "--block-tokens", "4", "--token-bytes", "1024").must(t)
	all := strings.Join(addrs, ",")
	var engines []string
	for i, role := range []leader.Role{leader.Prefill, leader.Prefill, leader.Decode, leader.Decode} {
		engines = append(engines, c.lead(fmt.Sprintf("e%d", i), role, all))
	}
	commands := pageCommands(t, "--cluster-etcd", "a:7430,b:7430", all, "s:7420", node.ready.Listen, "p0=http://p:8001", engines[0], "d0=http://d:8002", engines[2])
	c.status = pageArgs(t, commands[2], "plan status")
	s := startGateway(t, pageArgs(t, commands[1], "gateway", gatewayArgs(engines[1], engines[3])[1:]...)...)
	c.url = "http://" + s.ready.Listen + "/v1/completions"
	c.load(8)
	return c
}

// start starts a planner process by the command of docs/dualpath.md.
func (c *electorate) start(p *elector) {
	c.Helper()
	command := pageCommands(c.T, "--cluster-etcd", "planner.yaml", c.config, "etcd-0:2379,etcd-1:2379,etcd-2:2379", p.gate.Addr)[0]
	process, err := cluster.StartProcess(c.Context(), cluster.ProcessOptions{
		Name: "planner " + p.addr, Env: append(os.Environ(), childEnv),
		Args: pageArgs(c.T, command, "planner", "--listen", p.addr, "--http", p.http, "--log-format", "json",
			"--schedule-block-tokens", "4", "--schedule-min-part", "4", "--cluster-lease-ttl", "3s",
			"--schedule-group-timeout", "1m"), // a busy machine may leave a group without a CPU for long
	})
	if err != nil {
		c.Fatal(err)
	}
	p.Process = process
}

// lead runs a group of one engine until the test ends, and returns the engine as an argument of the
// gateway.
func (c *electorate) lead(name string, role leader.Role, addrs string) string {
	c.Helper()
	conn, err := planners.Dial(addrs, client.DialOptions{})
	if err != nil {
		c.Fatal(err)
	}
	e := &countedEngine{t: c.T, name: name, role: role, changed: make(chan struct{}), running: make(map[string]*leader.Request), left: make(map[string]bool), starts: make(map[uint64]int)}
	l, err := leader.New(leader.Options{
		Group: name, Node: name, Role: role, Geometry: kv.SingleGroup(2, 4, 512), Planner: conn,
		Members: []leader.Member{{Name: name, Engine: e, DeviceBlocks: 1000}},
		SwitchRole: func(_ context.Context, to leader.Role) ([]leader.Member, error) {
			e.mu.Lock()
			defer e.mu.Unlock()
			e.role = to
			return nil, nil
		},
	})
	if err != nil {
		c.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var run sync.WaitGroup
	run.Go(func() { l.Run(ctx) })
	web := httptest.NewServer(e)
	c.Cleanup(func() {
		web.Close()
		cancel()
		run.Wait()
		if err := conn.Close(); err != nil {
			c.Error(err)
		}
	})
	c.engines = append(c.engines, e)
	return name + "=" + web.URL
}

// load sends requests through the gateway, each of n callers one after the other, until the test ends.
// Each request must be answered by a decode engine.
func (c *electorate) load(n int) {
	ctx, cancel := context.WithCancel(context.Background())
	transport := &http.Transport{MaxIdleConnsPerHost: n}
	callers, web := sync.WaitGroup{}, &http.Client{Transport: transport}
	for range n {
		callers.Go(func() {
			for ctx.Err() == nil {
				resp, err := web.Post(c.url, "application/json", strings.NewReader(`{"prompt":"x"}`))
				if err != nil {
					c.Error(err)
					return
				}
				text, err := io.ReadAll(resp.Body)
				_ = resp.Body.Close()
				if err != nil || resp.StatusCode != http.StatusOK || string(text) != "e2" && string(text) != "e3" {
					c.Errorf("a request is lost: %s, %s, %v", resp.Status, text, err)
				}
				c.answered.Add(1)
			}
		})
	}
	c.Cleanup(func() {
		cancel()
		callers.Wait()
		transport.CloseIdleConnections()
	})
}

// state returns a planner's answer about the election, nil if it does not answer.
func (c *electorate) state(p *elector) *pb.ElectionResponse {
	ctx, cancel := context.WithTimeout(c.Context(), time.Second)
	defer cancel()
	r, err := p.conn.Election(ctx, &pb.ElectionRequest{})
	if err != nil {
		return nil
	}
	return r
}

// leads waits until the planner leads in a later term than after, and then until it has served
// requests. It returns the term.
func (c *electorate) leads(p *elector, after uint64) (term uint64) {
	c.Helper()
	within(c.T, "planner "+p.addr+" leads", func() bool {
		r := c.state(p)
		term = r.GetTerm()
		return r.GetLeads() && term > after
	})
	begin, before := time.Now(), c.answered.Load()
	within(c.T, "all groups register", func() bool {
		ctx, cancel := context.WithTimeout(c.Context(), time.Second)
		defer cancel()
		top, err := p.conn.Top(ctx, &pb.TopRequest{})
		return err == nil && len(top.Groups) == len(c.engines)
	})
	c.Logf("term %d: all groups have registered within %v", term, time.Since(begin).Round(time.Millisecond))
	within(c.T, "requests are answered", func() bool { return c.answered.Load() >= before+20 })
	return term
}

// starts returns the number of attempts that planners of the term have started.
func (c *electorate) starts(term uint64) (n int) {
	for _, e := range c.engines {
		e.mu.Lock()
		n += e.starts[term]
		e.mu.Unlock()
	}
	return n
}

// leader returns the planner that leads, the other one, and the term.
func (c *electorate) leader() (leads, other *elector, term uint64) {
	c.Helper()
	within(c.T, "a planner leads", func() bool {
		for i, p := range c.planners {
			if r := c.state(p); r.GetLeads() {
				leads, other, term = p, c.planners[1-i], r.Term
				return true
			}
		}
		return false
	})
	return leads, other, term
}

// TestNoPlanner: the errors of planners that cannot be reached have the system's words, and the hint names the planner.
func TestNoPlanner(t *testing.T) {
	a, b := testkit.Port(t), testkit.Port(t)
	const hint = "\n(is `penstock planner` running, and is --planner its address?)"
	refused := func(addr string) string { return "dial tcp " + addr + ": connect: connection refused" }
	r := penstock(t, "", nil, "plan", "status", "--planner", a+","+b)
	if r.code != exitFailed || strings.TrimSpace(r.err) != "penstock: "+refused(b)+hint {
		t.Errorf("plan status: exit %d, %s", r.code, r.err)
	}
	if lines := strings.Split(r.out, "\n"); len(lines) < 3 || strings.Join(strings.Fields(lines[1]), " ") != a+" unreachable "+refused(a) {
		t.Errorf("plan status prints\n%s", r.out)
	}
	r = penstock(t, "", nil, "plan", "top", "--planner", a+","+b)
	if want := "penstock: no planner leads (" + a + ": " + refused(a) + "; " + b + ": " + refused(b) + ")" + hint; r.code != exitFailed || strings.TrimSpace(r.err) != want {
		t.Errorf("plan top: exit %d, %s; want %s", r.code, r.err, want)
	}
}

// TestPlannerKilled: a planner that leads is killed, and later one is stopped, under load. The standby
// leads, and no request is lost.
func TestPlannerKilled(t *testing.T) {
	c := newElectorate(t)
	a, b, first := c.leader()
	c.leads(a, first-1)
	if err := a.Kill(); err != nil {
		t.Fatal(err)
	}
	second := c.leads(b, first)
	c.start(a)
	within(t, "the new process is a standby", func() bool {
		r := c.state(a)
		return r != nil && !r.Leads && r.Leader == b.addr
	})
	if err := b.Stop(); err != nil { // its term ends at once
		t.Fatal(err)
	}
	c.leads(a, second)
}

// TestPlannerKilledInSwitch: the planner that leads is killed while it drains a group that is going to change
// its role. The next one continues the switch, and no request is lost. The group has its new role with the
// planner after that, too.
func TestPlannerKilledInSwitch(t *testing.T) {
	c := newElectorate(t)
	a, b, first := c.leader()
	c.leads(a, first-1)
	e, held := c.engines[3], make(chan struct{})
	e.mu.Lock()
	e.held = held
	e.mu.Unlock()
	release := sync.OnceFunc(func() { close(held) })
	t.Cleanup(release)
	group := func(p *elector) *pb.RolesResponse_Group {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		r, err := p.conn.Roles(ctx, &pb.RolesRequest{})
		if err != nil {
			return nil
		}
		for _, g := range r.Groups {
			if g.Group == "e3" {
				return g
			}
		}
		return nil
	}
	within(t, "the group has a request", func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		return e.waiting
	})
	penstock(t, "", nil, "plan", "roles", "e3=prefill", "--apply", "--planner", a.addr+","+b.addr).must(t)
	if err := a.Kill(); err != nil {
		t.Fatal(err)
	}
	second := c.leads(b, first)
	// The next planner may have planned the group's requests again, and then the group is drained.
	within(t, "the next planner continues the switch", func() bool {
		g := group(b)
		return g.GetSwitching() == pb.Side_SIDE_PREFILL || g.GetRole() == pb.Side_SIDE_PREFILL
	})
	release()
	prefills := func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		return e.prefills > 0
	}
	within(t, "the group prefills", func() bool { return group(b).GetRole() == pb.Side_SIDE_PREFILL && prefills() })
	c.start(a)
	within(t, "the new process is a standby", func() bool { return c.state(a).GetLeader() == b.addr })
	if err := b.Kill(); err != nil {
		t.Fatal(err)
	}
	c.leads(a, second)
	if g := group(a); g.GetRole() != pb.Side_SIDE_PREFILL || g.GetSwitching() != 0 {
		t.Errorf("the group with the next planner: %v", g)
	}
}

// TestPlannerPaused: the process of a leader does not run for longer than its lease. It plans nothing
// after the standby has been elected.
func TestPlannerPaused(t *testing.T) {
	c := newElectorate(t)
	a, b, first := c.leader()
	c.leads(a, first-1)
	if err := a.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	second := c.leads(b, first)
	planned := c.starts(first)
	if err := a.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	within(t, "the earlier leader is a standby", func() bool {
		r := c.state(a)
		return r != nil && !r.Leads && r.Term == second
	})
	c.leads(b, first)
	if n := c.starts(first); n != planned {
		t.Errorf("the planner of term %d has started %d attempts after term %d had begun", first, n-planned, second)
	}
}

// TestPlannerWithoutEtcd: a leader that cannot reach etcd stops serving before the standby leads.
func TestPlannerWithoutEtcd(t *testing.T) {
	c := newElectorate(t)
	a, b, first := c.leader()
	c.leads(a, first-1)
	a.gate.Cut()
	within(t, "the leader without etcd stops serving", func() bool { r := c.state(a); return r != nil && !r.Leads })
	c.leads(b, first)
	a.gate.Mend()
	within(t, "the earlier leader is a standby", func() bool { return c.state(a).GetLeader() == b.addr })
	for path, want := range map[string][2]int{"/leaderz": {503, 200}, "/readyz": {503, 200}} {
		for i, p := range []*elector{a, b} {
			if code, text := call(t, http.DefaultClient, "GET", "http://"+p.http+path, ""); code != want[i] || p == a && path == "/readyz" && !strings.Contains(text, "the planner at "+b.addr+" leads") {
				t.Errorf("%s of planner %d: %d %s", path, i, code, text)
			}
		}
	}
	http.DefaultClient.CloseIdleConnections()
	r := penstock(t, "", nil, "plan", "top", "--planner", a.addr+","+b.addr, "--format", "json")
	if !bytes.Contains([]byte(r.must(t)), []byte(`"e3"`)) {
		t.Errorf("plan top with both planners prints\n%s", r.out)
	}
	states := decode[[]planStatus](t, penstock(t, "", nil, append(c.status, "--format", "json")...))
	standby := slices.IndexFunc(states, func(s planStatus) bool { return s.State == "standby" })
	if len(states) != 2 || standby < 0 || states[1-standby].State != "leader" || states[0].Term != states[1].Term || states[standby].Leader != b.addr || states[1-standby].Since.IsZero() {
		t.Errorf("plan status prints %+v", states)
	}
	if r := penstock(t, "", nil, "plan", "status", "--planner", a.addr); r.code != exitFailed || !strings.Contains(r.out, "standby") || !strings.Contains(r.err, "no planner leads") {
		t.Errorf("plan status of the standby: exit %d\n%s%s", r.code, r.out, r.err)
	}
	r = penstock(t, "", nil, "plan", "top", "--planner", a.addr)
	if r.code == exitOK || !strings.Contains(r.err, "the planner at "+b.addr+" leads") {
		t.Errorf("plan top of the standby: exit %d, %s", r.code, r.err)
	}
}
