package flow

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/penstock-kv/penstock/sim"
)

// LinkID names a link of a Network.
type LinkID int32

// ErrSpec is wrapped by every error about an invalid link or flow.
var ErrSpec = errors.New("not a possible network")

// Network is a set of links with the flows on them.
type Network struct {
	k     *sim.Kernel
	links []link
	flows int

	settle *sim.Timer
	dirty  []LinkID
	fill   filling
	began  uint64 // number of flows begun so far
}

// link is one direction of a cable, or the bandwidth of a memory.
type link struct {
	name string
	// rate is in bytes per second. background is the share of rate, 0 to 1, that other traffic
	// uses.
	rate, background float64
	// on lists the flows that cross the link.
	on    []crossing
	dirty bool
	// carried counts the transferred bytes of the flows, as of their last update.
	carried float64
	// mark is the number of the last filling pass that included the link. at is the link's index
	// in filling.links in that pass.
	at   int32
	mark uint64
}

// crossing is a flow that crosses a link. hop is the index of the link in Flow.hops.
type crossing struct {
	flow *Flow
	hop  int32
}

// hop is a link of a flow. times is how often the path names the link. place is the index of the
// flow in link.on.
type hop struct {
	link  LinkID
	times float64
	place int32
}

// Spec describes a transfer.
type Spec struct {
	// Path has the links in any order. A link that is named twice transfers every byte twice.
	Path []LinkID
	// Bytes is the size of the transfer; an infinite flow lasts until it is cancelled.
	Bytes float64
	// Cap bounds the rate in bytes per second; 0 means no bound.
	Cap float64
	// Weight is the flow's weight in the sharing of a link; 0 means 1.
	Weight float64
	// Latency is the delay between the last byte sent and Done.
	Latency time.Duration
	// Done, if not nil, is called when the last byte has arrived.
	Done func()
}

// Flow is a transfer.
type Flow struct {
	n      *Network
	number uint64
	hops   []hop
	cap    float64
	weight float64
	delay  time.Duration
	done   func()

	rate    float64
	left    float64
	updated time.Duration
	timer   *sim.Timer
	active  bool
	// mark is the number of the last filling pass that included the flow. at is the flow's index
	// in filling.flows in that pass.
	at   int32
	mark uint64
}

// New returns a network without links.
func New(k *sim.Kernel) *Network {
	n := &Network{k: k}
	n.settle = k.NewTimer(sim.Settle, n.reallocate)
	return n
}

// AddLink adds a link of rate bytes per second.
func (n *Network) AddLink(name string, rate float64) (LinkID, error) {
	if !(rate > 0) || math.IsInf(rate, 0) {
		return 0, fmt.Errorf("flow: link %s of %v bytes/s; a link's rate is positive and finite: %w", name, rate, ErrSpec)
	}
	n.links = append(n.links, link{name: name, rate: rate})
	return LinkID(len(n.links) - 1), nil
}

// Links returns the number of links; their ids are 0 to Links()-1.
func (n *Network) Links() int { return len(n.links) }

// Name returns a link's name.
func (n *Network) Name(l LinkID) string { return n.links[l].name }

// Capacity returns a link's rate in bytes per second, background included.
func (n *Network) Capacity(l LinkID) float64 { return n.links[l].rate }

// Flows returns the number of flows in progress.
func (n *Network) Flows() int { return n.flows }

// SetRate changes a link's rate, in bytes per second; flows on a link of rate 0 make no progress.
func (n *Network) SetRate(l LinkID, rate float64) error {
	if !(rate >= 0) || math.IsInf(rate, 0) {
		return fmt.Errorf("flow: link %s to %v bytes/s; a rate is 0 or more and finite: %w", n.links[l].name, rate, ErrSpec)
	}
	n.links[l].rate = rate
	n.touch(l)
	return nil
}

// SetBackground sets the share of a link's bandwidth, 0 to 1, that other traffic uses from now on.
func (n *Network) SetBackground(l LinkID, share float64) error {
	if !(share >= 0 && share <= 1) {
		return fmt.Errorf("flow: background of %v on link %s; a share is 0 to 1: %w", share, n.links[l].name, ErrSpec)
	}
	n.links[l].background = share
	n.touch(l)
	return nil
}

// Background returns the share of a link's bandwidth that other traffic uses.
func (n *Network) Background(l LinkID) float64 { return n.links[l].background }

// Load returns the current sum of the rates of the flows on a link, in bytes per second.
func (n *Network) Load(l LinkID) float64 {
	sum := 0.0
	for _, c := range n.links[l].on {
		sum += c.flow.rate * c.flow.hops[c.hop].times
	}
	return sum
}

// Utilization returns the share of a link's bandwidth that is currently in use, background
// included.
func (n *Network) Utilization(l LinkID) float64 {
	k := &n.links[l]
	if k.rate == 0 {
		return 1
	}
	return k.background + n.Load(l)/k.rate
}

// Crossing returns the number of flows that currently cross a link.
func (n *Network) Crossing(l LinkID) int { return len(n.links[l].on) }

// Carried returns the number of flow bytes that a link has transferred so far.
func (n *Network) Carried(l LinkID) float64 {
	for _, c := range n.links[l].on {
		c.flow.update()
	}
	return n.links[l].carried
}

// Start begins a transfer. The rate is computed after all events of the current virtual time.
func (n *Network) Start(s Spec) (*Flow, error) {
	if s.Weight == 0 {
		s.Weight = 1
	}
	switch {
	case !(s.Bytes >= 0):
		return nil, fmt.Errorf("flow: a transfer of %v bytes; it must be 0 or more: %w", s.Bytes, ErrSpec)
	case !(s.Cap >= 0) || math.IsInf(s.Cap, 0):
		return nil, fmt.Errorf("flow: a transfer capped at %v bytes/s; a cap is positive and finite, or 0 for none: %w", s.Cap, ErrSpec)
	case !(s.Weight > 0) || math.IsInf(s.Weight, 0):
		return nil, fmt.Errorf("flow: a transfer of weight %v; a weight is positive and finite: %w", s.Weight, ErrSpec)
	case s.Latency < 0:
		return nil, fmt.Errorf("flow: a latency of %v; it must be 0 or more: %w", s.Latency, ErrSpec)
	case math.IsInf(s.Bytes, 1) && len(s.Path) == 0 && s.Cap == 0:
		return nil, fmt.Errorf("flow: an endless transfer over no link at no cap: %w", ErrSpec)
	}
	f := &Flow{n: n, cap: s.Cap, weight: s.Weight, delay: s.Latency, done: s.Done, left: s.Bytes, updated: n.k.Now(), active: true}
	for _, l := range s.Path {
		if l < 0 || int(l) >= len(n.links) {
			return nil, fmt.Errorf("flow: a path over link %d; there are links 0 to %d: %w", l, len(n.links)-1, ErrSpec)
		}
		f.cross(l)
	}
	n.began++
	f.number = n.began
	n.flows++
	f.timer = n.k.NewTimer(sim.Normal, f.landed)
	switch {
	case f.left == 0, len(f.hops) == 0 && f.cap == 0:
		f.timer.Set(n.k.Now())
	case len(f.hops) == 0:
		f.setRate(f.cap)
	}
	for i := range f.hops {
		h := &f.hops[i]
		l := &n.links[h.link]
		h.place = int32(len(l.on))
		l.on = append(l.on, crossing{f, int32(i)})
		n.touch(h.link)
	}
	return f, nil
}

// cross adds a link to the path.
func (f *Flow) cross(l LinkID) {
	for i := range f.hops {
		if f.hops[i].link == l {
			f.hops[i].times++
			return
		}
	}
	f.hops = append(f.hops, hop{link: l, times: 1})
}

// Rate returns the current rate of the flow, in bytes per second.
func (f *Flow) Rate() float64 { return f.rate }

// Left returns the number of bytes that remain to be transferred.
func (f *Flow) Left() float64 {
	f.update()
	return f.left
}

// Active reports whether the flow has neither completed nor been cancelled.
func (f *Flow) Active() bool { return f.active }

// Cancel ends a flow without calling Done. It has no effect on a flow that has ended.
func (f *Flow) Cancel() {
	if !f.active {
		return
	}
	f.update()
	f.leave()
}

// landed is called when the last byte has arrived.
func (f *Flow) landed() {
	f.count(f.left)
	f.left = 0
	f.leave()
	switch {
	case f.done == nil:
	case f.delay > 0:
		f.n.k.After(f.delay, f.done)
	default:
		f.done()
	}
}

// leave removes the flow from its links.
func (f *Flow) leave() {
	f.active = false
	f.rate = 0
	f.timer.Stop()
	f.n.flows--
	for i := range f.hops {
		h := &f.hops[i]
		l := &f.n.links[h.link]
		last := len(l.on) - 1
		moved := l.on[last]
		l.on[h.place] = moved
		moved.flow.hops[moved.hop].place = h.place
		l.on[last] = crossing{}
		l.on = l.on[:last]
		f.n.touch(h.link)
	}
}

// count adds transferred bytes to the flow's links.
func (f *Flow) count(bytes float64) {
	for _, h := range f.hops {
		f.n.links[h.link].carried += bytes * h.times
	}
}

// update brings the remaining bytes up to the current time.
func (f *Flow) update() {
	now := f.n.k.Now()
	if f.rate == 0 || now == f.updated {
		f.updated = now
		return
	}
	moved := min(f.left, f.rate*(now-f.updated).Seconds())
	f.left -= moved
	f.updated = now
	f.count(moved)
}

// setRate sets the flow's rate from now on, and schedules its end.
func (f *Flow) setRate(rate float64) {
	f.update()
	f.rate = rate
	if math.IsInf(f.left, 1) {
		return
	}
	ns := math.Ceil(f.left / rate * 1e9)
	if !(ns < float64(sim.Never-f.n.k.Now())) {
		f.timer.Stop() // the flow has no rate, or would end after the end of virtual time
		return
	}
	f.timer.Set(f.n.k.Now() + time.Duration(ns))
}

// touch schedules the recomputation of the flows on a link, after all events of the current virtual
// time.
func (n *Network) touch(l LinkID) {
	if n.links[l].dirty {
		return
	}
	n.links[l].dirty = true
	n.dirty = append(n.dirty, l)
	if n.settle.Due() == sim.Never {
		n.settle.Set(n.k.Now())
	}
}
