package simrdma

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/penstock-kv/penstock/rdma/group"
)

// FabricOptions say how bad the network is. The zero value is a perfect one
// without delay.
type FabricOptions struct {
	// Delay of a packet, one way; every step of a Work is one packet. With
	// TailChance it is Tail instead.
	Delay      Span
	Tail       Span
	TailChance float64
	// Pieces is the largest number of parts, placed one by one, that a payload
	// is cut into: 1 to 64; default 1.
	Pieces int
	// RepeatChance is the probability that a piece is attempted twice.
	RepeatChance float64
	// GhostChance is the probability that a Work in flight lands although its
	// sender's endpoint has ended.
	GhostChance float64
	// RetryTimeout is how long a NIC tries to get an answer before the endpoint
	// breaks; default 20 ms. RetryEvery is the pause between attempts; default
	// an eighth of it.
	RetryTimeout, RetryEvery time.Duration
	// ControlDelay is the delay of a chunk on a control connection, one way.
	ControlDelay Span
	// ControlBuffer is how many bytes a control connection holds in each
	// direction before Write waits; default 64 KiB.
	ControlBuffer int
	// OnViolation, if set, is told of each breach of the rules of group.Domain
	// by its user, as it happens. It must not call the fabric.
	OnViolation func(string)
}

// ensureDefaults fills what is zero.
func (o *FabricOptions) ensureDefaults() {
	if o.Pieces == 0 {
		o.Pieces = 1
	}
	if o.RetryTimeout == 0 {
		o.RetryTimeout = 20 * time.Millisecond
	}
	if o.RetryEvery == 0 {
		o.RetryEvery = o.RetryTimeout / 8
	}
	if o.ControlBuffer == 0 {
		o.ControlBuffer = 64 << 10
	}
}

// RandomFabric draws a network from a seed: some are perfect, some reorder
// wildly, some repeat nearly everything. Every packet takes some time: where
// nothing does, virtual time does not pass while anyone is busy.
func RandomFabric(seed uint64) FabricOptions {
	d := drawsOf(seed, hash("fabric options"))
	pick := func(s ...time.Duration) time.Duration { return s[d.below(len(s))] }
	o := FabricOptions{
		Delay:        Span{Min: 100, Max: pick(100, time.Microsecond, 20*time.Microsecond, time.Millisecond)},
		Tail:         Span{Min: pick(100, time.Millisecond), Max: pick(time.Millisecond, 8*time.Millisecond)},
		TailChance:   []float64{0, 0.01, 0.2}[d.below(3)],
		Pieces:       []int{1, 2, 5, 64}[d.below(4)],
		RepeatChance: []float64{0, 0.1, 0.9}[d.below(3)],
		GhostChance:  []float64{0, 0.5, 0.95}[d.below(3)],
		ControlDelay: Span{Min: time.Microsecond, Max: pick(time.Microsecond, 10*time.Microsecond, 2*time.Millisecond)},
	}
	return o
}

// Fabric is a network that NICs are plugged into.
type Fabric struct {
	seed  uint64
	opts  FabricOptions
	start time.Time

	mu sync.Mutex
	// stepped is signalled after each step, for Await.
	stepped sync.Cond
	events  events
	order   uint64 // of the next event, so that equal times keep their order
	timer   *time.Timer
	// alarm is when timer goes off, or noAlarm.
	alarm time.Duration
	// running: what is due is being done, and the timer is set at the end of that.
	running bool

	nics  map[string]*Domain
	plugs map[string]uint64 // how often a NIC was opened under that name
	ids   uint32            // of the next domain
	byID  map[uint32]*Domain

	deadNICs  map[string]bool
	deadHosts map[string]bool
	cut       map[pair]bool // links, by the NICs' names
	parted    map[pair]bool // control connections, by the hosts' names

	listeners map[string]*listener
	held      []*pipe // that a parting stopped

	idle    []*flight // to be used again
	counts  Counts
	broken  []string // rules
	dropped int      // broken rules beyond the limit
}

// noAlarm: the timer is not running.
const noAlarm = time.Duration(-1)

// Counts are what the fabric did.
type Counts struct {
	// Works were posted; Delivered of them landed.
	Works, Delivered uint64
	// Placements are copies of pieces; Repeated of them were not the first of
	// their piece, Suppressed ones came after delivery and were dropped.
	Placements, Repeated, Suppressed uint64
	// Overtaken Works landed after one that was posted later on the same endpoint.
	Overtaken uint64
	// Ghosts landed after their sender's endpoint had ended. DeliveredBroken
	// Works landed and were reported StatusBroken.
	Ghosts, DeliveredBroken uint64
	// LatePieces were placed in memory closed before, where CloseIsFinal is false.
	LatePieces uint64
	// Accepted writes passed the check of their key at the target. Flying Works may still
	// change memory at their target.
	Accepted, Flying uint64
	// Refused Works; Breaks of endpoints, however caused.
	Refused, Breaks uint64
}

// NewFabric returns a network without NICs.
func NewFabric(seed uint64, o FabricOptions) *Fabric {
	o.ensureDefaults()
	f := &Fabric{
		seed: seed, opts: o, start: time.Now(), alarm: noAlarm,
		nics: make(map[string]*Domain), plugs: make(map[string]uint64), byID: make(map[uint32]*Domain),
		deadNICs: make(map[string]bool), deadHosts: make(map[string]bool),
		cut: make(map[pair]bool), parted: make(map[pair]bool), listeners: make(map[string]*listener),
	}
	f.stepped.L = &f.mu
	return f
}

// Seed returns what the fabric was made with.
func (f *Fabric) Seed() uint64 { return f.seed }

// Counts returns what the fabric did until now.
func (f *Fabric) Counts() Counts {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.counts
}

// Await returns when ok reports true for the counts, or when ctx ends. It calls ok after each
// step of the fabric; ok must not call the fabric.
func (f *Fabric) Await(ctx context.Context, ok func(Counts) bool) {
	defer context.AfterFunc(ctx, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.stepped.Broadcast()
	})()
	f.mu.Lock()
	defer f.mu.Unlock()
	for ctx.Err() == nil && !ok(f.counts) {
		f.stepped.Wait()
	}
}

// maxViolations is how many are kept word for word.
const maxViolations = 50

// Violations returns the breaches of the rules of group.Domain by its user, in
// the order they happened.
func (f *Fabric) Violations() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := append([]string(nil), f.broken...)
	if f.dropped > 0 {
		out = append(out, fmt.Sprintf("and %d more", f.dropped))
	}
	return out
}

// violationLocked notes that a rule was broken.
func (f *Fabric) violationLocked(format string, args ...any) {
	text := fmt.Sprintf("at %v: ", f.now()) + fmt.Sprintf(format, args...)
	if len(f.broken) < maxViolations {
		f.broken = append(f.broken, text)
	} else {
		f.dropped++
	}
	if f.opts.OnViolation != nil {
		f.opts.OnViolation(text)
	}
}

// violation is violationLocked for those who do not hold the lock.
func (f *Fabric) violation(format string, args ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.violationLocked(format, args...)
}

// pair names two ends, the smaller name first.
type pair [2]string

func pairOf(a, b string) pair {
	if b < a {
		a, b = b, a
	}
	return pair{a, b}
}

// KillNIC ends a NIC: its domain is dead, and Open of that name fails until
// RepairNIC.
func (f *Fabric) KillNIC(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.deadNICs[name] = true
	if d := f.nics[name]; d != nil {
		d.dieLocked(fmt.Errorf("simrdma: %s was killed: %w", name, group.ErrDead))
	}
}

// RepairNIC lets the name be opened again. A domain that died stays dead.
func (f *Fabric) RepairNIC(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.deadNICs, name)
}

// CutLink loses all packets between two NICs until HealLink.
func (f *Fabric) CutLink(a, b string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cut[pairOf(a, b)] = true
}

// HealLink ends a CutLink.
func (f *Fabric) HealLink(a, b string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.cut, pairOf(a, b))
}

// KillHost ends all NICs of a host and silences its control connections for
// good: nobody is told.
func (f *Fabric) KillHost(host string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.deadHosts[host] = true
	for _, d := range f.nics {
		if d.opts.Host == host {
			d.dieLocked(fmt.Errorf("simrdma: host %s was killed: %w", host, group.ErrDead))
		}
	}
}

// Part holds back what two hosts say on control connections until Join.
func (f *Fabric) Part(a, b string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.parted[pairOf(a, b)] = true
}

// Join ends a Part: what was held back arrives.
func (f *Fabric) Join(a, b string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.parted, pairOf(a, b))
	held := f.held
	f.held = nil
	for _, p := range held {
		p.held = false
		p.pumpLocked()
	}
}

// upLocked reports whether a packet gets from one NIC to another.
func (f *Fabric) upLocked(from, to *Domain, ghost bool) bool {
	if to.dead || (from.dead && !ghost) {
		return false
	}
	return len(f.cut) == 0 || !f.cut[pairOf(from.opts.Name, to.opts.Name)]
}

// delay draws the delay of one packet.
func (f *Fabric) delay(d *draws) time.Duration {
	if f.opts.TailChance > 0 && d.chance(f.opts.TailChance) {
		return d.within(f.opts.Tail)
	}
	return d.within(f.opts.Delay)
}
