package datacenters

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/penstock-kv/penstock/dualpath/prfaas"
	"github.com/penstock-kv/penstock/sim"
	"github.com/penstock-kv/penstock/sim/flow"
)

// session is a conversation and its cached blocks in each cluster.
type session struct {
	total         int // tokens of the last prompt and its answer
	local, remote *prfaas.Pool
}

// request is one prompt in flight.
type request struct {
	number  uint64
	session *session
	total   int
	route   prfaas.Route
	// egress is the size, in bytes, of the KV that a remote prefill sends over the link. A prefix
	// that is fetched is not included.
	egress                    float64
	arrived, delivered, ended time.Duration
	decoder                   *instance
}

// instance is one instance of the PD cluster.
type instance struct {
	prefill bool
	// turning is set if the instance takes no new requests and changes its role when it is idle.
	turning bool
	// running is the number of requests in progress: at most one in prefill, or the maximum decode
	// batch (BS_max in the PrfaaS paper).
	running int
}

// cluster is the state of one run.
type cluster struct {
	opts Options
	k    *sim.Kernel
	net  *flow.Network
	out  flow.LinkID // PrfaaS to PD
	back flow.LinkID
	path [2][]flow.LinkID // to PD, to PrfaaS

	arrivals, lengths, sessions *rand.Rand
	rate                        float64
	dist                        prfaas.Lengths
	numbers                     uint64

	router prfaas.Router
	short  *prfaas.Short
	long   *prfaas.Long

	remoteQueue, localQueue, decodeQueue queue
	remoteBusy                           int
	transfers                            int
	instances                            []*instance

	m meter
}

// queue is a FIFO that reuses its memory.
type queue struct {
	items []*request
	head  int
}

func (q *queue) len() int { return len(q.items) - q.head }

func (q *queue) push(r *request) {
	if q.head > 64 && 2*q.head > len(q.items) {
		q.items = slices.Delete(q.items, 0, q.head)
		q.head = 0
	}
	q.items = append(q.items, r)
}

func (q *queue) pop() *request {
	r := q.items[q.head]
	q.items[q.head] = nil
	q.head++
	return r
}

// Run simulates one system. It returns ctx's error if ctx ends first.
func Run(ctx context.Context, o Options, seed uint64) (*Result, error) {
	o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	c, err := newCluster(o, seed)
	if err != nil {
		return nil, err
	}
	c.begin()
	if err := c.k.RunUntil(ctx, o.Duration); err != nil {
		return nil, err
	}
	return c.result(), nil
}

func newCluster(o Options, seed uint64) (*cluster, error) {
	k := sim.New(seed)
	c := &cluster{
		opts: o, k: k, net: flow.New(k), rate: o.Rate, dist: o.System.Lengths,
		arrivals: k.Rand("arrivals"), lengths: k.Rand("lengths"), sessions: k.Rand("sessions"),
		router: prfaas.Router{Threshold: o.Plan.Threshold, Abundant: o.Abundant},
	}
	for i := range o.System.LocalInstances {
		c.instances = append(c.instances, &instance{prefill: i < o.Plan.Prefill})
	}
	c.m.init(o)
	if o.System.RemoteInstances > 0 {
		if err := c.buildLink(); err != nil {
			return nil, err
		}
		if o.Short != nil {
			var err error
			if c.short, err = prfaas.NewShort(o.System, o.Plan, *o.Short); err != nil {
				return nil, err
			}
			c.router = c.short.Router()
		}
	}
	if o.Long != nil {
		var err error
		if c.long, err = prfaas.NewLong(o.System, o.Plan, *o.Long); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// accessFactor is the bandwidth of a cluster's egress and ingress divided by the bandwidth of the
// link between the clusters. The factor is large, so that only the link is a bottleneck.
const accessFactor = 16

func (c *cluster) buildLink() error {
	b := c.opts.System.EgressBytes
	access := flow.WANCluster{Egress: accessFactor * b, Ingress: accessFactor * b}
	prefill, pd := access, access
	prefill.Name, pd.Name = "prfaas", "pd"
	wan, err := flow.WAN{Clusters: []flow.WANCluster{prefill, pd}, Links: [][]float64{{0, b}, {b, 0}}}.Build(c.net)
	if err != nil {
		return err
	}
	c.out, c.back = wan.Between(0, 1), wan.Between(1, 0)
	for i, ends := range [2][2]int{{0, 1}, {1, 0}} {
		if c.path[i], err = wan.Path(ends[0], ends[1]); err != nil {
			return err
		}
	}
	return nil
}

// begin schedules arrivals, changes and observations.
func (c *cluster) begin() {
	for _, ch := range c.opts.Changes {
		c.k.At(ch.At, func() { c.change(ch) })
	}
	if c.opts.Concurrency > 0 {
		for range c.opts.Concurrency {
			c.k.At(0, c.fresh)
		}
	} else {
		c.nextArrival()
	}
	if c.short != nil {
		c.k.After(c.opts.Observe, c.observe)
	}
	if c.long != nil {
		c.k.After(c.period(), c.reallocate)
	}
	c.k.At(c.opts.Warmup, func() { c.m.start(c.k.Now(), c.carried()) })
	c.k.After(c.opts.Window, c.window)
}

func (c *cluster) change(ch Change) {
	if ch.EgressFactor > 0 {
		b := c.opts.System.EgressBytes * ch.EgressFactor
		_ = c.net.SetRate(c.out, b) // the factor was validated
		_ = c.net.SetRate(c.back, b)
	}
	if ch.Lengths != nil {
		c.dist = ch.Lengths
	}
	if ch.Rate > 0 {
		c.rate = ch.Rate
	}
	c.k.Note(math.Float64bits(ch.EgressFactor), math.Float64bits(ch.Rate))
}

// nextArrival schedules the next session of a Poisson process. A session has Turns requests on
// average.
func (c *cluster) nextArrival() {
	wait := c.arrivals.ExpFloat64() / (c.rate / c.opts.Turns)
	c.k.After(seconds(wait), func() {
		c.fresh()
		c.nextArrival()
	})
}

// fresh begins a session with its first request.
func (c *cluster) fresh() {
	c.arrive(&session{local: prfaas.NewPool(true), remote: prfaas.NewPool(true)})
}

// arrive handles the arrival of a session's request. The prompt consists of the session's tokens so
// far and of new tokens.
func (c *cluster) arrive(s *session) {
	appended := max(int(math.Round(c.dist.Quantile(1-c.lengths.Float64()))), 1)
	c.numbers++
	r := &request{number: c.numbers, session: s, total: s.total + appended, arrived: c.k.Now()}
	c.m.arrived(appended)
	block := c.opts.BlockTokens
	q := prfaas.Request{Total: r.total, Cached: s.local.Prefix().Reusable() * block}
	if c.opts.System.RemoteInstances > 0 {
		q.Remote = []prfaas.Cluster{{Cached: s.remote.Prefix().Reusable() * block}}
	}
	route, err := c.router.Route(q)
	if err != nil {
		panic("datacenters: " + err.Error()) // impossible lengths would be a bug
	}
	r.route = route
	c.k.Note(r.number, uint64(r.total), uint64(route.Side), uint64(route.Prefix))
	var ingress float64
	r.egress, ingress = q.DeliverBytes(c.opts.System.KVBytes, route)
	switch {
	case route.FetchFrom == prfaas.FetchLocal:
		c.fetch(r, c.path[1], ingress, s.remote)
	case route.FetchFrom >= 0: // a local prefill sends nothing else over the link
		fetch := r.egress
		r.egress = 0
		c.fetch(r, c.path[0], fetch, s.local)
	default:
		c.enqueue(r)
	}
}

// fetch transfers a cached prefix to the cluster that prefills, and then queues the request.
func (c *cluster) fetch(r *request, path []flow.LinkID, bytes float64, to *prfaas.Pool) {
	c.m.fetches++
	c.m.fetchedBytes += bytes
	c.send(path, bytes, 0, func() {
		to.Put(r.route.Prefix/c.opts.BlockTokens, prfaas.KeepPrefix)
		c.enqueue(r)
	})
}

// send starts a flow; a flow of 0 bytes ends at once.
func (c *cluster) send(path []flow.LinkID, bytes, limit float64, done func()) {
	if bytes <= 0 {
		done()
		return
	}
	if _, err := c.net.Start(flow.Spec{Path: path, Bytes: bytes, Cap: limit, Done: done}); err != nil {
		panic("datacenters: " + err.Error()) // impossible links or sizes would be a bug
	}
}

func (c *cluster) enqueue(r *request) {
	q := &c.localQueue
	if r.route.Side == prfaas.Remote {
		q = &c.remoteQueue
	}
	if q.len() >= c.opts.QueueMax {
		c.m.rejected++ // the session ends too
		return
	}
	q.push(r)
	if r.route.Side == prfaas.Remote {
		c.serveRemote()
	} else {
		c.serveLocal()
	}
}

// serveRemote starts prefills on idle PrfaaS instances.
func (c *cluster) serveRemote() {
	for c.remoteQueue.len() > 0 && c.remoteBusy < c.opts.System.RemoteInstances && c.transfers < c.opts.TransfersMax {
		c.prefillRemote(c.remoteQueue.pop())
	}
}

// prefillRemote occupies a PrfaaS instance for the prefill's duration, and the link for the
// transfer of the KV. The transfer may begin during the prefill.
func (c *cluster) prefillRemote(r *request) {
	c.remoteBusy++
	c.transfers++
	c.m.remote.add(c.k.Now(), 1)
	t := c.opts.System.RemotePrefill.At(float64(r.route.Prefill))
	n := float64(c.opts.Layers)
	parts := 2
	landed := func() {
		if parts--; parts == 0 {
			c.transfers--
			c.deliver(r)
			c.serveRemote()
		}
	}
	if c.opts.Layers > 1 {
		c.k.After(seconds(t/n), func() { c.send(c.path[0], r.egress*(1-1/n), r.egress/t, landed) })
	} else {
		parts = 1
	}
	c.k.After(seconds(t), func() {
		c.remoteBusy--
		c.m.remote.add(c.k.Now(), -1)
		r.session.remote.Put(r.total/c.opts.BlockTokens, prfaas.KeepPrefix)
		c.send(c.path[0], r.egress/n, 0, landed)
		c.serveRemote()
	})
}

// serveLocal starts prefills on idle prefill instances of the PD cluster.
func (c *cluster) serveLocal() {
	for c.localQueue.len() > 0 {
		i := slices.IndexFunc(c.instances, func(x *instance) bool { return x.prefill && !x.turning && x.running == 0 })
		if i < 0 {
			return
		}
		c.prefillLocal(c.localQueue.pop(), c.instances[i])
	}
}

func (c *cluster) prefillLocal(r *request, x *instance) {
	x.running = 1
	c.m.prefill.add(c.k.Now(), 1)
	c.k.After(seconds(c.opts.System.LocalPrefill.At(float64(r.route.Prefill))), func() {
		x.running = 0
		c.m.prefill.add(c.k.Now(), -1)
		r.session.local.Put(r.total/c.opts.BlockTokens, prfaas.KeepPrefix)
		c.deliver(r)
		c.turn(x)
		c.serveLocal()
	})
}

// deliver handles the arrival of the KV at the PD cluster. At that time the first token is
// complete.
func (c *cluster) deliver(r *request) {
	r.delivered = c.k.Now()
	if r.route.Side == prfaas.Remote {
		r.session.local.Put(r.total/c.opts.BlockTokens, prfaas.PassOn)
	}
	c.m.first(r, c.opts.SLO)
	c.decodeQueue.push(r)
	c.serveDecode()
}

// serveDecode assigns requests to the decode instance with the fewest requests.
func (c *cluster) serveDecode() {
	batch := int(c.opts.System.DecodeBatch)
	for c.decodeQueue.len() > 0 {
		var best *instance
		for _, x := range c.instances {
			if !x.prefill && !x.turning && x.running < batch && (best == nil || x.running < best.running) {
				best = x
			}
		}
		if best == nil {
			return
		}
		r := c.decodeQueue.pop()
		r.decoder = best
		best.running++
		c.m.decode.add(c.k.Now(), 1)
		c.k.After(seconds(c.opts.System.OutputTokens*c.opts.System.StepSeconds), func() { c.end(r) })
	}
}

// end handles the end of a request's answer.
func (c *cluster) end(r *request) {
	r.ended = c.k.Now()
	r.decoder.running--
	c.m.decode.add(c.k.Now(), -1)
	r.session.local.Delivered()
	c.m.done(r)
	c.k.Note(r.number, uint64(r.ended))
	c.turn(r.decoder)
	c.serveDecode()
	c.leave(r)
}

// leave schedules the request that follows the end of r: the next request of its session, or in a
// closed loop the first request of a new session.
func (c *cluster) leave(r *request) {
	s := r.session
	s.total = r.total + int(c.opts.System.OutputTokens)
	if again := c.opts.Turns > 1 && c.sessions.Float64() < 1-1/c.opts.Turns; again {
		think := c.sessions.ExpFloat64() * c.opts.Think.Seconds()
		c.k.After(seconds(think), func() { c.arrive(s) })
	} else if c.opts.Concurrency > 0 {
		c.k.After(0, c.fresh)
	}
}

// observe passes a sample of the link's load to the short-term controller.
func (c *cluster) observe() {
	carried := c.net.Carried(c.out)
	capacity := c.net.Capacity(c.out)
	a := c.short.Observe(prfaas.EgressSample{
		At: c.k.Now(), CapacityBytes: capacity,
		Utilization: min((carried-c.m.carriedSeen)/(capacity*c.opts.Observe.Seconds()), 1),
		Queue:       c.remoteQueue.len() + max(c.transfers-c.opts.System.RemoteInstances, 0), LocalQueue: c.localQueue.len(),
	})
	c.m.carriedSeen = carried
	if a.Changed {
		c.adjust(a)
	}
	c.k.After(c.opts.Observe, c.observe)
}

func (c *cluster) adjust(a prfaas.Adjustment) {
	c.router = a.Router
	c.m.adjusted(c.k.Now(), a)
	c.k.Note(math.Float64bits(a.Router.Threshold))
}

func (c *cluster) period() time.Duration {
	if c.opts.Long.Period > 0 {
		return c.opts.Long.Period
	}
	o := *c.opts.Long
	o.EnsureDefaults()
	return o.Period
}

// reallocate passes the traffic of the last period to the long-term controller.
func (c *cluster) reallocate() {
	load := c.m.load(c)
	if load.Lengths != nil {
		r, err := c.long.Observe(load)
		if err == nil {
			c.follow(r, load.Lengths)
		}
	}
	c.k.After(c.period(), c.reallocate)
}

// follow applies a new plan of the long-term controller: the roles of instances and, without a
// short-term controller, the threshold.
func (c *cluster) follow(r prfaas.Reallocation, lengths prfaas.Lengths) {
	c.m.reallocated(c.k.Now(), r)
	if c.short != nil {
		c.short.Adopt(r.Plan, lengths)
		c.router = c.short.Router()
	} else {
		c.router.Threshold = r.Plan.Threshold
	}
	c.k.Note(uint64(r.Plan.Prefill), math.Float64bits(r.Plan.Threshold))
	for range max(r.ToPrefill, -r.ToPrefill) {
		// The instance with the least remaining work changes its role.
		var best *instance
		for _, x := range c.instances {
			if x.prefill == (r.ToPrefill < 0) && !x.turning && (best == nil || x.running < best.running) {
				best = x
			}
		}
		if best != nil {
			best.turning = true
			c.turn(best)
		}
	}
}

// turn changes the role of an instance after SwitchTime, if the instance is turning and idle.
func (c *cluster) turn(x *instance) {
	if !x.turning || x.running > 0 {
		return
	}
	c.k.After(c.opts.SwitchTime, func() {
		x.turning, x.prefill = false, !x.prefill
		c.serveLocal()
		c.serveDecode()
	})
}

func (c *cluster) window() {
	c.m.sample(c)
	c.k.After(c.opts.Window, c.window)
}

func seconds(s float64) time.Duration { return time.Duration(math.Round(s * 1e9)) }
