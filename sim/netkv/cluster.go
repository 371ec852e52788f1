package netkv

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/penstock-kv/penstock/dualpath/netcost"
	"github.com/penstock-kv/penstock/sim"
	"github.com/penstock-kv/penstock/sim/flow"
	"github.com/penstock-kv/penstock/sim/workload"
)

// cluster is the state of a run.
type cluster struct {
	o       Options
	k       *sim.Kernel
	net     *flow.FatTreeNet
	tree    flow.FatTree
	uplinks *rand.Rand
	chooser *chooser

	prefill    []int // endpoints
	decode     []*instance
	at         map[int]*instance // by endpoint
	candidates []netcost.Candidate[int]
	// waiting are the prefilled requests for which no decode instance had room, in order of the end
	// of their prefill.
	waiting []*request

	requests []*request
	unended  int
	err      error
}

// chooser is the production scheduler with its oracle.
type chooser struct {
	*netcost.Chooser[int]
	oracle *netcost.Oracle[int]
	model  *netcost.Model
}

// request is one request in flight.
type request struct {
	index         int
	input, output int
	group, shared int // group -1: none
	from          int
	memory        int64
	arrived       time.Duration
	// sent and landed are the virtual times at which the transfer begins and ends.
	sent, landed time.Duration
	intent       netcost.Intent[int]
	ttft, tbt    time.Duration
	tokens       int
}

// Run simulates the requests until the last one is decoded.
func Run(ctx context.Context, o Options, arrivals []workload.Arrival, seed uint64) (*Result, error) {
	c, err := newCluster(o, arrivals, seed)
	if err != nil {
		return nil, err
	}
	if err := c.k.Run(ctx); err != nil {
		return nil, err
	}
	if c.err != nil {
		return nil, c.err
	}
	return c.result()
}

// newCluster creates the instances and queues the arrivals.
func newCluster(o Options, arrivals []workload.Arrival, seed uint64) (*cluster, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	if len(arrivals) <= o.Warmup {
		return nil, fmt.Errorf("netkv: %d requests, of which %d are warm-up: none is measured; use more of the trace", len(arrivals), o.Warmup)
	}
	k := sim.New(seed)
	c := &cluster{o: o, k: k, tree: o.Tree(), uplinks: k.Rand("uplinks"), at: map[int]*instance{}}
	var err error
	if c.net, err = c.tree.Build(flow.New(k)); err != nil {
		return nil, err
	}
	for tier := 2; tier <= 3; tier++ {
		if err := c.net.SetBackground(tier, o.Background); err != nil {
			return nil, err
		}
	}
	c.place()
	if err := c.schedule(); err != nil {
		return nil, err
	}
	if err := c.admit(arrivals); err != nil {
		return nil, err
	}
	return c, nil
}

// place assigns a role to every endpoint. The endpoints in the first rack of pods 0, 2, 4 … do
// prefill, all other endpoints decode.
func (c *cluster) place() {
	for e := range c.tree.Size() {
		if c.tree.Rack(e)%(2*c.tree.Racks) == 0 {
			c.prefill = append(c.prefill, e)
			continue
		}
		d := &instance{c: c, id: e, cache: newPrefixes(c.o.Groups)}
		d.step = c.k.NewTimer(sim.Normal, d.endStep)
		c.decode = append(c.decode, d)
		c.at[e] = d
	}
	c.candidates = make([]netcost.Candidate[int], len(c.decode))
}

// schedule creates the oracle, with the location of every endpoint in the tree, and the chooser.
func (c *cluster) schedule() error {
	places := make(map[int]netcost.Place, c.tree.Size())
	for e := range c.tree.Size() {
		places[e] = netcost.Place{Pod: strconv.Itoa(c.tree.Pod(e)), Rack: strconv.Itoa(c.tree.Rack(e)), Node: strconv.Itoa(c.tree.Server(e))}
	}
	oracle, err := netcost.NewOracle(c.o.Model, netcost.Snapshot[int]{Fabric: c.o.fabric(), Places: places})
	if err != nil {
		return err
	}
	ch, err := netcost.NewChooser(c.o.Policy, c.o.Weights, oracle)
	if err != nil {
		return err
	}
	c.chooser = &chooser{ch, oracle, oracle.Model()}
	c.measure()
	if c.o.Swing > 0 {
		rng := c.k.Rand("background")
		for tier := 2; tier <= 3; tier++ {
			c.swing(tier, rng)
		}
	}
	return nil
}

// measure passes the oracle, for each tier, the share of the uplinks' bandwidth that other traffic
// uses. The scheduler's own transfers are not included; in the paper, their packets are marked, so
// that switches can leave them out.
func (c *cluster) measure() {
	var m netcost.Congestion
	for tier := 2; tier <= 3; tier++ {
		links := c.net.Uplinks(tier)
		for _, l := range links {
			m[tier] += c.net.Net.Background(l) / float64(len(links))
		}
	}
	c.fail(c.chooser.oracle.Measured(m, c.k.Now()))
	// A constant background is measured only once.
	if c.o.Swing > 0 && (c.unended > 0 || c.k.Now() == 0) {
		c.k.After(c.o.Refresh, c.measure)
	}
}

// swing draws a tier's background, now and at later times.
func (c *cluster) swing(tier int, rng *rand.Rand) {
	c.fail(c.net.SetBackground(tier, 2*c.o.Background*rng.Float64()))
	if c.unended > 0 || c.k.Now() == 0 {
		c.k.After(time.Duration(rng.ExpFloat64()*float64(c.o.Swing)), func() { c.swing(tier, rng) })
	}
}

// fail ends the run with the first error of a call that the cluster makes.
func (c *cluster) fail(err error) {
	if err != nil && c.err == nil {
		c.err = err
		c.k.Stop()
	}
}

// admit schedules the arrivals. With probability Share, an arrival belongs to a random group of
// requests with a common prefix. The prefill instances get the arrivals in turn.
func (c *cluster) admit(arrivals []workload.Arrival) error {
	rng := c.k.Rand("groups")
	for i, a := range arrivals {
		// Two numbers are drawn for each request, so that Share does not affect the groups of other
		// requests.
		member, group := rng.Float64() < c.o.Share, rng.IntN(c.o.Groups)
		r := &request{index: i, input: a.Input, output: max(a.Output, 1), group: -1, from: c.prefill[i%len(c.prefill)], arrived: a.At}
		r.memory = int64(r.input+r.output) * c.o.KVToken
		if r.memory+c.chooser.model.Reserve > c.o.Memory {
			return fmt.Errorf("netkv: request %d has %d tokens of KV, %d bytes; an instance has %d: filter the trace, or scale its inputs", i, r.input+r.output, r.memory, c.o.Memory)
		}
		if member {
			r.group = group
			r.shared = int(c.o.SharedPart*float64(r.input)) / c.o.BlockTokens * c.o.BlockTokens
		}
		c.requests = append(c.requests, r)
		prefill := c.o.PrefillFixed + time.Duration(r.input)*c.o.PrefillToken
		c.k.At(a.At+prefill, func() { c.prefilled(r) })
	}
	c.unended = len(c.requests)
	return nil
}

// prefilled sends a request's KV to a decode instance, or queues the request behind the requests that wait
// for room.
func (c *cluster) prefilled(r *request) {
	if len(c.waiting) > 0 || !c.dispatch(r) {
		c.waiting = append(c.waiting, r)
	}
}

// dispatch assigns a request to a decode instance by the scheduler; it returns false if no instance
// has room.
func (c *cluster) dispatch(r *request) bool {
	for i, d := range c.decode {
		hit := d.cache.match(r.group, r.shared)
		// A request needs memory for all of its tokens, including the tokens to be generated, and
		// the cached tokens, because the cache may drop its copy.
		free := d.free() - int64(r.output+hit)*c.o.KVToken
		c.candidates[i] = netcost.Candidate[int]{ID: d.id, Hit: hit, Free: free, Queued: d.dispatched, Batch: len(d.batch)}
	}
	q := netcost.Request[int]{ID: uint64(r.index), From: r.from, Tokens: r.input, Bytes: int64(r.input) * c.o.KVToken}
	decision, err := c.chooser.Choose(&q, c.candidates)
	if errors.Is(err, netcost.ErrNoRoom) {
		return false
	}
	if err != nil {
		c.fail(err)
		return true
	}
	d := c.decode[decision.Index]
	r.intent, r.sent = decision.Intent, c.k.Now()
	c.k.Note(uint64(r.index), uint64(d.id))
	c.chooser.Begin(&r.intent)
	d.cache.touch(r.group)
	d.dispatched++
	d.reserve(r.memory)
	fabric := c.chooser.oracle.Snapshot().Fabric
	_, err = c.net.Net.Start(flow.Spec{
		Path: c.net.Path(r.from, d.id, c.uplinks), Bytes: decision.Cost.Bytes,
		Cap: fabric.Bandwidth[r.intent.Tier], Latency: fabric.Latency[r.intent.Tier],
		Done: func() {
			r.landed = c.k.Now()
			c.chooser.End(&r.intent)
			d.land(r)
		},
	})
	c.fail(err)
	return true
}

// finished ends a request, and dispatches requests that wait for room.
func (c *cluster) finished(*request) {
	c.unended--
	for len(c.waiting) > 0 && c.dispatch(c.waiting[0]) {
		c.waiting = c.waiting[1:]
	}
}
