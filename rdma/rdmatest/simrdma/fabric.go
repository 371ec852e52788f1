package simrdma

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/penstock-kv/penstock/rdma/group"
)

// FabricOptions are the properties of the network. The zero value is a perfect network without
// delay.
type FabricOptions struct {
	// Delay is the delay of a packet in one direction. Every step of a Work is one packet. With
	// probability TailChance the delay is drawn from Tail instead.
	Delay      Span
	Tail       Span
	TailChance float64
	// Pieces is the largest number of pieces into which a payload is cut. The pieces are placed
	// separately. 1 to 64; default 1.
	Pieces int
	// RepeatChance is the probability that a piece is placed twice.
	RepeatChance float64
	// GhostChance is the probability that a Work in flight lands although its
	// sender's endpoint has ended.
	GhostChance float64
	// RetryTimeout is the time without an answer after which an endpoint breaks; default 20 ms.
	// RetryEvery is the pause between attempts; default an eighth of RetryTimeout.
	RetryTimeout, RetryEvery time.Duration
	// ControlDelay is the delay of a chunk on a control connection, in one direction.
	ControlDelay Span
	// ControlBuffer is the number of bytes that a control connection holds in each direction
	// before Write blocks; default 64 KiB.
	ControlBuffer int
	// OnViolation, if set, is called for each violation of the rules of group.Domain by the caller
	// of a Domain. It must not call the fabric.
	OnViolation func(string)
}

// ensureDefaults sets each zero field to its default.
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

// RandomFabric returns random options for a network: some networks are perfect, some reorder
// strongly, some repeat nearly every piece. Every packet takes some time, because virtual time
// does not pass while any goroutine is busy.
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

// Fabric is a network of NICs.
type Fabric struct {
	seed  uint64
	opts  FabricOptions
	start time.Time

	mu sync.Mutex
	// stepped is signalled after each step, for Await.
	stepped sync.Cond
	events  events
	order   uint64 // number of the next event; events of equal time are performed in this order
	timer   *time.Timer
	// alarm is the time for which timer is set, or noAlarm.
	alarm time.Duration
	// running: due events are being performed. The timer is set after that.
	running bool

	nics   map[string]*Domain
	opened map[string]uint64 // number of times that a NIC was opened under that name
	ids    uint32            // number of the next domain
	byID   map[uint32]*Domain

	deadNICs  map[string]bool
	deadHosts map[string]bool
	cut       map[pair]bool // links, by the NICs' names
	parted    map[pair]bool // control connections, by the hosts' names

	listeners map[string]*listener
	held      []*pipe // pipes whose bytes Part holds back

	idle    []*flight // for reuse
	counts  Counts
	broken  []string // violations
	dropped int      // violations beyond maxViolations
}

// noAlarm: the timer is not running.
const noAlarm = time.Duration(-1)

// Counts are the fabric's counters.
type Counts struct {
	// Works is the number of posted Works, Delivered the number of Works that landed.
	Works, Delivered uint64
	// Placements is the number of copied pieces. Repeated is the number of copies of a piece that
	// had been copied before. Suppressed is the number of pieces that came after the delivery of
	// their Work and were dropped.
	Placements, Repeated, Suppressed uint64
	// Overtaken is the number of Works that landed after a Work that was posted later on the same
	// endpoint.
	Overtaken uint64
	// Ghosts is the number of Works that landed after their sender's endpoint had ended.
	// DeliveredBroken is the number of Works that landed although they were reported with
	// StatusBroken.
	Ghosts, DeliveredBroken uint64
	// LatePieces is the number of pieces that were placed in memory that had been closed (only if
	// CloseIsFinal is false).
	LatePieces uint64
	// Accepted is the number of writes whose key passed the check at the target. Flying is the
	// number of Works that may still change memory at their target.
	Accepted, Flying uint64
	// Refused is the number of refused Works, Breaks the number of endpoints that broke for any
	// reason.
	Refused, Breaks uint64
}

// NewFabric returns a network without NICs.
func NewFabric(seed uint64, o FabricOptions) *Fabric {
	o.ensureDefaults()
	f := &Fabric{
		seed: seed, opts: o, start: time.Now(), alarm: noAlarm,
		nics: make(map[string]*Domain), opened: make(map[string]uint64), byID: make(map[uint32]*Domain),
		deadNICs: make(map[string]bool), deadHosts: make(map[string]bool),
		cut: make(map[pair]bool), parted: make(map[pair]bool), listeners: make(map[string]*listener),
	}
	f.stepped.L = &f.mu
	return f
}

// Seed returns the fabric's seed.
func (f *Fabric) Seed() uint64 { return f.seed }

// Counts returns the current counters.
func (f *Fabric) Counts() Counts {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.counts
}

// Await returns when ok returns true for the counts, or when ctx ends. It calls ok after each step
// of the fabric; ok must not call the fabric.
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

// maxViolations is the largest number of violations whose text is kept.
const maxViolations = 50

// Violations returns the violations of the rules of group.Domain by callers of the domains, in
// order of time.
func (f *Fabric) Violations() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := append([]string(nil), f.broken...)
	if f.dropped > 0 {
		out = append(out, fmt.Sprintf("and %d more", f.dropped))
	}
	return out
}

// violationLocked records a violation.
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

// violation is violationLocked for callers without the lock.
func (f *Fabric) violation(format string, args ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.violationLocked(format, args...)
}

// pair holds the names of two NICs or hosts, the smaller name first.
type pair [2]string

func pairOf(a, b string) pair {
	if b < a {
		a, b = b, a
	}
	return pair{a, b}
}

// KillNIC makes a NIC fail: its domain is dead, and Open with that name fails until RepairNIC.
func (f *Fabric) KillNIC(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.deadNICs[name] = true
	if d := f.nics[name]; d != nil {
		d.dieLocked(fmt.Errorf("simrdma: %s was killed: %w", name, group.ErrDead))
	}
}

// RepairNIC permits Open with that name again. The dead domain stays dead.
func (f *Fabric) RepairNIC(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.deadNICs, name)
}

// CutLink makes the link between two NICs lose all packets until HealLink.
func (f *Fabric) CutLink(a, b string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cut[pairOf(a, b)] = true
}

// HealLink undoes CutLink.
func (f *Fabric) HealLink(a, b string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.cut, pairOf(a, b))
}

// KillHost makes all NICs of a host fail. No bytes arrive on the host's control connections any
// more, and their ends get no notice.
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

// Part holds back the bytes on control connections between two hosts until Join.
func (f *Fabric) Part(a, b string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.parted[pairOf(a, b)] = true
}

// Join undoes Part: the bytes that were held back arrive.
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

// upLocked reports whether a packet can reach the NIC to from the NIC from. A ghost (doc.go) can
// do so even if from is dead.
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
