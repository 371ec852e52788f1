package cluster

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/lab/emulate"
)

// Ports on which the processes listen. Each process has its own network namespace or loopback
// address.
const (
	grpcPort    = 7420
	dataPort    = 7421
	plannerPort = 7430
	computePort = 7500
)

// namespace is the name of the KV's namespace.
const namespace = "cluster"

// Cluster is a running cluster.
type Cluster struct {
	spec    Spec
	net     network
	token   string
	storage *member
	planner *member
	gateway *member
	engines []*member
	ended   time.Duration // CPU time of processes that have ended

	mu       sync.Mutex
	turns    []Turn
	starts   int // how often the planner has started turns of this replay
	loaded   []emulate.Loaded
	flipped  map[string]int
	counts   map[string]emulate.Counts
	replayed chan PlannerStats
	sinks    chan *BurstTarget
	bursts   chan *BurstResult
	bumped   chan *Bumped
	// changed is closed and replaced when a turn (a request of an agent) has started or ended.
	changed chan struct{}
}

// member is one process and the network location (place) at which it runs.
type member struct {
	kind Kind
	*place
	proc *Process
	args []string
	// config is the first line of a node's input.
	config *NodeConfig
}

// send sends an order to a node.
func (m *member) send(o Order) error {
	if m.proc == nil {
		return fmt.Errorf("cluster: %s is not running", m.name)
	}
	return m.proc.Say(o)
}

// Start starts the cluster; Close ends it.
func Start(ctx context.Context, spec Spec) (_ *Cluster, err error) {
	spec.EnsureDefaults()
	if err := spec.Validate(); err != nil {
		return nil, err
	}
	secret := make([]byte, 16)
	_, _ = rand.Read(secret) // never fails
	c := &Cluster{spec: spec, token: hex.EncodeToString(secret), flipped: make(map[string]int), counts: make(map[string]emulate.Counts), replayed: make(chan PlannerStats, 1), sinks: make(chan *BurstTarget, 1), bursts: make(chan *BurstResult, 1), bumped: make(chan *Bumped, 1), changed: make(chan struct{})}
	if c.net, err = openNetwork(spec.Loopback); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Close())
		}
	}()
	if err := c.plan(); err != nil {
		return nil, err
	}
	// The gateway creates the namespace that the engines look up.
	for _, m := range []*member{c.storage, c.planner, c.gateway} {
		if err := c.launch(ctx, m); err != nil {
			return nil, err
		}
	}
	errs := make([]error, len(c.engines))
	var wg sync.WaitGroup
	for i, m := range c.engines {
		wg.Go(func() { errs[i] = c.launch(ctx, m) })
	}
	wg.Wait()
	return c, errors.Join(errs...)
}

// plan creates the network location of each process and sets its command line.
func (c *Cluster) plan() (err error) {
	s := &c.spec
	snic, cnic := s.SNICBits, s.CNICBits
	if s.Oracle {
		snic, cnic = 0, 0
	}
	member := func(kind Kind, name string, role placeRole) (*member, error) {
		p, err := c.net.place(name, role, nicRates{snic, cnic, s.Classes})
		return &member{kind: kind, place: p}, err
	}
	if c.storage, err = member("", "storage", storageNode); err != nil {
		return err
	}
	c.storage.args = []string{
		"serve", "--data", filepath.Join(s.Dir, "volume"), "--capacity", fmt.Sprint(s.CapacityBytes), "--arena", fmt.Sprint(s.ArenaBytes), "--free-floor", "64MiB", "--prewrite=false", "--segment", "64MiB",
		"--listen", at(c.storage.listen, grpcPort), "--data-listen", at(c.storage.listen, dataPort), "--http", "", "--insecure",
		"--node", "storage", "--log-format", "json",
	}
	if c.planner, err = member("", "planner", service); err != nil {
		return err
	}
	c.planner.args = []string{
		"planner", "--listen", at(c.planner.listen, plannerPort), "--http", "", "--insecure", "--log-format", "json",
		"--schedule-read-policy", policyOf(s).String(), "--schedule-block-tokens", fmt.Sprint(s.BlockTokens), "--schedule-min-part", fmt.Sprint(4 * s.BlockTokens),
		"--schedule-read-rate", fmt.Sprint(s.ReadTokens()), "--schedule-beta", fmt.Sprint(s.Beta), "--schedule-group-timeout", s.GroupTimeout.String(),
	}
	if c.gateway, err = member(KindGateway, "gateway", service); err != nil {
		return err
	}
	c.gateway.config = c.config(c.gateway, at(c.storage.control, grpcPort))
	for i := range s.Prefill + s.Decode {
		kind, name, window := KindPrefill, fmt.Sprintf("P%d", i), s.Window
		if i >= s.Prefill {
			kind, name, window = KindDecode, fmt.Sprintf("D%d", i-s.Prefill), s.Layers
		}
		m, err := member(kind, name, engineNode)
		if err != nil {
			return err
		}
		m.config = c.config(m, at(c.storage.storage, grpcPort))
		m.config.Compute, m.config.Token = at(m.compute, computePort), c.token
		m.config.BufferBytes, m.config.DeviceBlocks, m.config.Window = s.BufferBytes, s.blocks(window), window
		m.config.Classes = s.Classes
		if m.shapes != nil {
			m.config.Shaped, m.config.SNICBits, m.config.CNICBits = true, snic, cnic
			m.shapes.send = m.send
		}
		c.engines = append(c.engines, m)
	}
	return nil
}

// policyOf returns the policy that chooses whether prefill or decode nodes read. With Oracle almost
// nothing is read, so both kinds may read.
func policyOf(s *Spec) dualpath.ReadPolicy {
	if s.Oracle {
		return dualpath.Split
	}
	return s.Policy
}

// config returns the part of a node's configuration that every kind of node has.
func (c *Cluster) config(m *member, storage string) *NodeConfig {
	s := &c.spec
	return &NodeConfig{
		Kind: m.kind, Name: m.name, Planner: at(c.planner.control, plannerPort), Storage: storage,
		Namespace: namespace, Layers: s.Layers, TokenBytes: s.tokenBytes(), Tokens: s.BlockTokens, Model: s.Model, Deadline: s.Deadline,
	}
}

// launch starts a member's process.
func (c *Cluster) launch(ctx context.Context, m *member) error {
	o := ProcessOptions{Name: m.name, Args: m.args, Env: c.spec.Env, Start: m.place.start}
	if m.config != nil {
		o.Args = NodeArgs
		o.First = m.config
		o.Line = func(line []byte) { c.handleLine(m, line) }
	}
	p, err := StartProcess(ctx, o)
	if err != nil {
		return err
	}
	m.proc = p
	return nil
}

// NodeArgs are the arguments that make this binary call Node.
var NodeArgs = []string{"demo", "cluster-node"}

// handleLine handles a line that a node printed.
func (c *Cluster) handleLine(m *member, line []byte) {
	var e Event
	if json.Unmarshal(line, &e) != nil {
		return // ignore lines that are not events
	}
	if e.NICs != nil && m.shapes != nil {
		m.shapes.setCounters(e.NICs)
	}
	c.mu.Lock()
	switch {
	case e.Turn != nil:
		c.turns = append(c.turns, *e.Turn)
		c.changedLocked()
	case e.Started:
		c.starts++
		c.changedLocked()
	case e.Counts != nil:
		c.counts[m.name] = *e.Counts
	case e.Loaded != nil:
		c.loaded = append(c.loaded, *e.Loaded)
	case e.Flipped > 0:
		c.flipped[m.name] = e.Flipped
	}
	c.mu.Unlock()
	switch {
	case e.Replayed != nil:
		c.replayed <- *e.Replayed
	case e.Sink != nil:
		c.sinks <- e.Sink
	case e.Bursts != nil:
		c.bursts <- e.Bursts
	case e.Bumped != nil:
		c.bumped <- e.Bumped
	}
}

// changedLocked wakes all goroutines that wait in after.
func (c *Cluster) changedLocked() {
	close(c.changed)
	c.changed = make(chan struct{})
}

// Replay replays agents, at most parallel at a time. It returns the results of all turns and the
// planner's counters.
func (c *Cluster) Replay(ctx context.Context, agents []emulate.Session, parallel int) ([]Turn, PlannerStats, error) {
	c.mu.Lock()
	c.turns, c.loaded, c.starts = nil, nil, 0
	c.mu.Unlock()
	if err := c.gateway.send(Order{Replay: agents, Parallel: parallel}); err != nil {
		return nil, PlannerStats{}, err
	}
	select {
	case stats := <-c.replayed:
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.turns, stats, nil
	case <-c.gateway.proc.Over():
		return nil, PlannerStats{}, fmt.Errorf("cluster: the gateway ended in the middle of the replay:\n%s", c.gateway.proc.Log())
	case <-ctx.Done():
		return nil, PlannerStats{}, context.Cause(ctx)
	}
}

// Counts returns the last reported counters of each engine, by engine name.
func (c *Cluster) Counts() map[string]emulate.Counts {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := make(map[string]emulate.Counts, len(c.counts))
	for k, v := range c.counts {
		out[k] = v
	}
	return out
}

// Loads returns, for each request, the times at which the request's cached KV reached the prefill
// engine.
func (c *Cluster) Loads() []emulate.Loaded {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]emulate.Loaded(nil), c.loaded...)
}

// Close ends every process, the gateway first, and removes the networks.
func (c *Cluster) Close() error {
	var errs []error
	stop := func(m *member) {
		if m != nil && m.proc != nil {
			errs = append(errs, m.proc.Stop())
			c.ended += m.proc.CPU()
			m.proc = nil
		}
	}
	stop(c.gateway)
	for _, m := range c.engines {
		stop(m)
	}
	stop(c.planner)
	stop(c.storage)
	return errors.Join(append(errs, c.net.close())...)
}

// CPU returns the processor time of the processes that have ended: after Close, of all processes.
func (c *Cluster) CPU() time.Duration { return c.ended }
