package flow

import (
	"errors"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/sim"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// lab is a network under test.
type lab struct {
	*Network
	t *testing.T
	k *sim.Kernel
}

func newLab(t *testing.T) *lab {
	k := sim.New(1)
	return &lab{New(k), t, k}
}

func (l *lab) link(rate float64) LinkID {
	l.t.Helper()
	id, err := l.AddLink(fmt.Sprint("link ", l.Links()), rate)
	if err != nil {
		l.t.Fatal(err)
	}
	return id
}

func (l *lab) start(s Spec) *Flow {
	l.t.Helper()
	f, err := l.Start(s)
	if err != nil {
		l.t.Fatal(err)
	}
	return f
}

func (l *lab) until(t time.Duration) {
	l.t.Helper()
	if err := l.k.RunUntil(l.t.Context(), t); err != nil {
		l.t.Fatal(err)
	}
}

func near(t *testing.T, what string, got, want, tolerance float64) {
	t.Helper()
	if !(math.Abs(got-want) <= tolerance*math.Abs(want)) {
		t.Errorf("%s is %v; want %v within %v %%", what, got, want, 100*tolerance)
	}
}

// TestSingleFlow is NetKV's validation of its simulator (section VI-B; NK-A10): one flow on an idle
// path gets the bandwidth of its tier.
func TestSingleFlow(t *testing.T) {
	const gbps = 1e9 / 8
	tree := FatTree{
		Pods: 2, Racks: 2, Servers: 2, Endpoints: 2, Inside: 450e9, Out: 200 * gbps, In: 400 * gbps,
		SpineLinks: 32, SpineRate: 50 * gbps, CoreLinks: 128, CoreRate: 25 * gbps,
	}
	caps := []float64{450e9, 100 * gbps, 50 * gbps, 25 * gbps}
	for tier, to := range []int{1, 2, 4, 8} {
		l := newLab(t)
		net, err := tree.Build(l.Network)
		if err != nil {
			t.Fatal(err)
		}
		if got := tree.Tier(0, to); got != tier {
			t.Fatalf("endpoints 0 and %d are at tier %d; want %d", to, got, tier)
		}
		var landed time.Duration
		const size = 5e9
		f := l.start(Spec{Path: net.Path(0, to, l.k.Rand("ecmp")), Bytes: size, Cap: caps[tier], Latency: 15 * time.Microsecond, Done: func() { landed = l.k.Now() }})
		l.until(time.Millisecond)
		near(t, fmt.Sprintf("rate at tier %d", tier), f.Rate(), caps[tier], 1e-3)
		l.until(time.Minute)
		near(t, fmt.Sprintf("time at tier %d", tier), (landed - 15*time.Microsecond).Seconds(), size/caps[tier], 1e-3)
	}
}

// TestEqualShares: N flows on one link get 1/N each. When one leaves, the others get more in the
// same instant.
func TestEqualShares(t *testing.T) {
	for _, n := range []int{1, 2, 3, 7, 100} {
		l := newLab(t)
		link := l.link(10e9)
		var flows []*Flow
		for i := range n {
			flows = append(flows, l.start(Spec{Path: []LinkID{link}, Bytes: 1e9 * float64(i+1)}))
		}
		l.until(0)
		for i, f := range flows {
			near(t, fmt.Sprintf("rate of flow %d of %d", i, n), f.Rate(), 10e9/float64(n), 1e-3)
		}
		// The first flow completes when each has transferred its size; then n-1 share the link.
		first := time.Duration(float64(n) * 1e9 / 10e9 * 1e9)
		l.until(first + 1) // one nanosecond for rounding
		for i, f := range flows[1:] {
			near(t, fmt.Sprintf("rate of flow %d when %d of %d are left", i, n-1, n), f.Rate(), 10e9/float64(n-1), 1e-3)
		}
		l.until(time.Hour)
		near(t, "carried", l.Carried(link), 1e9*float64(n*(n+1)/2), 1e-9)
		near(t, "time of all", l.Carried(link)/10e9, float64(n*(n+1)/2)/10, 1e-9)
		if l.Flows() != 0 || l.Crossing(link) != 0 || l.k.Pending() != 0 {
			t.Errorf("%d flows, %d on the link, %d events are left", l.Flows(), l.Crossing(link), l.k.Pending())
		}
	}
}

func TestChanges(t *testing.T) {
	l := newLab(t)
	a, b := l.link(10), l.link(4)
	long := l.start(Spec{Path: []LinkID{a, b}, Bytes: math.Inf(1)})
	short := l.start(Spec{Path: []LinkID{a}, Bytes: math.Inf(1)})
	capped := l.start(Spec{Path: []LinkID{a}, Bytes: math.Inf(1), Cap: 1})
	twice := l.start(Spec{Path: []LinkID{b, b}, Bytes: math.Inf(1)})
	rates := func(want ...float64) {
		t.Helper()
		l.until(l.k.Now() + 1)
		for i, f := range []*Flow{long, short, capped, twice} {
			if math.Abs(f.Rate()-want[i]) > 1e-9 {
				t.Errorf("flow %d has %v; want %v", i, f.Rate(), want[i])
			}
		}
	}
	rates(4./3, 10-1-4./3, 1, 4./3)
	if err := l.SetBackground(b, 0.25); err != nil {
		t.Fatal(err)
	}
	rates(1, 8, 1, 1)
	if err := l.SetRate(b, 0); err != nil {
		t.Fatal(err)
	}
	rates(0, 9, 1, 0)
	if err := l.SetRate(b, 400); err != nil {
		t.Fatal(err)
	}
	rates(4.5, 4.5, 1, (300-4.5)/2)
	twice.Cancel()
	twice.Cancel()
	long.Cancel()
	rates(0, 9, 1, 0)
	near(t, "utilization", l.Utilization(a), 1, 1e-12)
	near(t, "load", l.Load(a), 10, 1e-12)
}

func TestRefusals(t *testing.T) {
	l := newLab(t)
	link := l.link(1)
	for what, err := range map[string]error{
		"negative rate":   second(l.AddLink("x", -1)),
		"rate of NaN":     second(l.AddLink("x", math.NaN())),
		"endless rate":    second(l.AddLink("x", math.Inf(1))),
		"background of 2": l.SetBackground(link, 2),
		"rate to NaN":     l.SetRate(link, math.NaN()),
		"bytes of NaN":    second(l.Start(Spec{Bytes: math.NaN()})),
		"negative cap":    second(l.Start(Spec{Bytes: 1, Cap: -1})),
		"negative weight": second(l.Start(Spec{Bytes: 1, Weight: -1})),
		"unknown link":    second(l.Start(Spec{Bytes: 1, Path: []LinkID{7}})),
		"negative delay":  second(l.Start(Spec{Bytes: 1, Latency: -1})),
		"endless nowhere": second(l.Start(Spec{Bytes: math.Inf(1)})),
		"fat-tree":        second(FatTree{Pods: 1}.Build(l.Network)),
		"nodes":           second(Nodes{}.Build(l.Network)),
		"nodes' rates":    second(Nodes{1, 1, 1, 1, math.NaN(), 1}.Build(l.Network)),
		"WAN":             second(WAN{}.Build(l.Network)),
		"WAN's row":       second(WAN{make([]WANCluster, 2), [][]float64{{1}, {}}}.Build(l.Network)),
		"FIFO":            second(NewFIFO(l.k, "x", 0)),
	} {
		if !errors.Is(err, ErrSpec) {
			t.Errorf("%s: %v; want a refusal", what, err)
		}
	}
	if l.Flows() != 0 {
		t.Errorf("%d flows were started", l.Flows())
	}
}

func second[T any](_ T, err error) error { return err }

// TestNothingToCarry: flows without bytes or without a path also end, once.
func TestNothingToCarry(t *testing.T) {
	l := newLab(t)
	link := l.link(1)
	ends := 0
	done := func() { ends++ }
	l.start(Spec{Path: []LinkID{link}, Done: done})
	l.start(Spec{Bytes: 10, Done: done})
	l.start(Spec{Bytes: 10, Cap: 5, Done: done})
	l.until(time.Second)
	if ends != 2 {
		t.Errorf("%d of the 2 that take no time have ended", ends)
	}
	l.until(2 * time.Second)
	if ends != 3 || l.Flows() != 0 {
		t.Errorf("%d of 3 have ended, %d are left", ends, l.Flows())
	}
}

// TestReachableStorage is DP-3: all of DualPath's paths at saturation, with the traffic of section
// 4.2 between each pair of engines as its weight. The reached share of the storage NICs' bandwidth
// shows whether another resource binds.
func TestReachableStorage(t *testing.T) {
	for _, c := range []struct {
		p, d int
		dram float64
		want float64
	}{{1, 7, 500e9, 1}, {7, 2, 500e9, 1}, {1, 8, 500e9, 8. / 9}, {4, 1, 500e9, 8. / 9}, {7, 2, 400e9, 0.8}, {2, 4, 500e9, 1}} {
		l := newLab(t)
		s := Nodes{Prefill: c.p, Decode: c.d, GPUs: 8, SNIC: 50e9, CNIC: 50e9, DRAM: c.dram}
		net, err := s.Build(l.Network)
		if err != nil {
			t.Fatal(err)
		}
		pe0, de0, end := s.Engines()
		for pe := pe0; pe < de0; pe++ {
			for de := de0; de < end; de++ {
				l.start(Spec{Path: net.PrefillPath(pe, de), Bytes: math.Inf(1), Weight: 1 / float64(c.d)})
				l.start(Spec{Path: net.DecodePath(pe, de), Bytes: math.Inf(1), Weight: 1 / float64(c.p)})
			}
		}
		l.until(time.Second)
		sum := 0.0
		for _, nic := range net.SNIC {
			sum += l.Carried(nic)
		}
		near(t, fmt.Sprintf("%dP%dD with %v GB/s of memory", c.p, c.d, c.dram/1e9), sum/float64(c.p+c.d)/50e9, c.want, 0.01)
	}
}

func TestFIFO(t *testing.T) {
	k := sim.New(1)
	q, err := NewFIFO(k, "nic", 10)
	if err != nil {
		t.Fatal(err)
	}
	var at []time.Duration
	var spans []time.Duration
	q.Observe(func(from, to time.Duration, size int64) { spans = append(spans, to-from) })
	land := func() { at = append(at, k.Now()) }
	q.Put(10, land)
	q.Put(20, land)
	k.At(5*time.Second, func() { q.Put(5, land) })
	k.At(time.Second/2, func() {
		if q.Queued() != 30 || q.Waiting() != 2 || q.Carried() != 0 {
			t.Errorf("at 0.5 s: %d queued in %d, %d carried", q.Queued(), q.Waiting(), q.Carried())
		}
	})
	if err := k.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if want := []time.Duration{1e9, 3e9, 55e8}; !slices.Equal(at, want) {
		t.Errorf("landed at %v; want %v", at, want)
	}
	if q.Carried() != 35 || q.Queued() != 0 || q.Busy() != 35e8 || len(spans) != 3 {
		t.Errorf("carried %d, queued %d, busy %v, %d observed", q.Carried(), q.Queued(), q.Busy(), len(spans))
	}
}

func TestECMPIsUniform(t *testing.T) {
	l := newLab(t)
	tree := FatTree{Pods: 2, Racks: 2, Servers: 1, Endpoints: 1, Inside: 1, Out: 1, In: 1, SpineLinks: 4, SpineRate: 1, CoreLinks: 8, CoreRate: 1}
	net, err := tree.Build(l.Network)
	if err != nil {
		t.Fatal(err)
	}
	counts := map[LinkID]int{}
	rng := l.k.Rand("ecmp")
	const n = 8000
	for range n {
		for _, link := range net.Path(0, 3, rng) {
			counts[link]++
		}
	}
	for what, links := range map[string][]LinkID{"rack 0 up": net.rackUp[0], "pod 0 up": net.podUp[0], "pod 1 down": net.podDn[1], "rack 3 down": net.rackDown[3]} {
		for i, link := range links {
			near(t, fmt.Sprintf("%s %d", what, i), float64(counts[link]), n/float64(len(links)), 0.15)
		}
	}
}

func TestWAN(t *testing.T) {
	l := newLab(t)
	w := WAN{Clusters: []WANCluster{{"a", 100, 100}, {"b", 50, 50}}, Links: [][]float64{{0, 10}, {0, 0}}}
	net, err := w.Build(l.Network)
	if err != nil {
		t.Fatal(err)
	}
	path, err := net.Path(0, 1)
	if err != nil {
		t.Fatal(err)
	}
	f := l.start(Spec{Path: path, Bytes: 100})
	l.until(time.Second)
	if f.Rate() != 10 || l.Utilization(net.Between(0, 1)) != 1 {
		t.Errorf("rate %v, utilization %v", f.Rate(), l.Utilization(net.Between(0, 1)))
	}
	if _, err := net.Path(1, 0); !errors.Is(err, ErrSpec) {
		t.Errorf("a path without a link: %v", err)
	}
}

// waterFill computes max-min fairness by its definition, in exact numbers: the level rises until
// the first link is full or the first flow reaches its cap. The flows concerned stop, and the level
// rises further.
func waterFill(capacity []*big.Rat, paths [][]LinkID, caps, weights []*big.Rat) []*big.Rat {
	rates := make([]*big.Rat, len(paths))
	for stopped := 0; stopped < len(paths); {
		// The use of each link is a + b level, summed over stopped and rising flows.
		a, b := make([]*big.Rat, len(capacity)), make([]*big.Rat, len(capacity))
		for i := range capacity {
			a[i], b[i] = new(big.Rat), new(big.Rat)
		}
		for f, path := range paths {
			for _, l := range path {
				if rates[f] != nil {
					a[l].Add(a[l], rates[f])
				} else {
					b[l].Add(b[l], weights[f])
				}
			}
		}
		var level *big.Rat
		lower := func(x *big.Rat) {
			if level == nil || x.Cmp(level) < 0 {
				level = x
			}
		}
		full := make([]*big.Rat, len(capacity))
		for l := range capacity {
			if b[l].Sign() > 0 {
				full[l] = new(big.Rat).Quo(new(big.Rat).Sub(capacity[l], a[l]), b[l])
				lower(full[l])
			}
		}
		for f := range paths {
			if rates[f] == nil && caps[f] != nil {
				lower(new(big.Rat).Quo(caps[f], weights[f]))
			}
		}
		for f, path := range paths {
			if rates[f] != nil {
				continue
			}
			stop := caps[f] != nil && new(big.Rat).Quo(caps[f], weights[f]).Cmp(level) == 0
			for _, l := range path {
				stop = stop || full[l].Cmp(level) == 0
			}
			if stop {
				rates[f] = new(big.Rat).Mul(weights[f], level)
				stopped++
			}
		}
	}
	return rates
}

// FuzzMaxMin compares the network's rates with waterFill's, while flows begin and end and links
// change.
func FuzzMaxMin(f *testing.F) {
	f.Add(uint64(1), uint8(4), uint8(10))
	f.Add(uint64(2), uint8(1), uint8(30))
	f.Add(uint64(3), uint8(12), uint8(40))
	f.Fuzz(func(t *testing.T, seed uint64, nLinks, nOps uint8) {
		rng := rand.New(rand.NewPCG(seed, 0))
		l := newLab(t)
		var capacity []*big.Rat
		for range 1 + int(nLinks)%16 {
			c := 1 + rng.IntN(1000)
			l.link(float64(c))
			capacity = append(capacity, big.NewRat(int64(c), 1))
		}
		type mirror struct {
			flow        *Flow
			path        []LinkID
			cap, weight *big.Rat
		}
		var live []mirror
		for range int(nOps) % 48 {
			switch rng.IntN(6) {
			case 0:
				if len(live) > 0 {
					i := rng.IntN(len(live))
					live[i].flow.Cancel()
					live = slices.Delete(live, i, i+1)
				}
			case 1:
				link, c := LinkID(rng.IntN(len(capacity))), rng.IntN(1000)
				if err := l.SetRate(link, float64(c)); err != nil {
					t.Fatal(err)
				}
				capacity[link] = big.NewRat(int64(c), 1)
			default:
				m := mirror{weight: big.NewRat(int64(1+rng.IntN(8)), 4)}
				for range 1 + rng.IntN(4) {
					m.path = append(m.path, LinkID(rng.IntN(len(capacity))))
				}
				s := Spec{Path: m.path, Bytes: math.Inf(1)}
				s.Weight, _ = m.weight.Float64()
				if rng.IntN(3) == 0 {
					c := 1 + rng.IntN(300)
					s.Cap, m.cap = float64(c), big.NewRat(int64(c), 1)
				}
				m.flow = l.start(s)
				live = append(live, m)
			}
			if rng.IntN(3) == 0 {
				l.until(l.k.Now() + 1)
			}
		}
		l.until(l.k.Now() + 1)
		var paths [][]LinkID
		var caps, weights []*big.Rat
		for _, m := range live {
			paths, caps, weights = append(paths, m.path), append(caps, m.cap), append(weights, m.weight)
		}
		for i, want := range waterFill(capacity, paths, caps, weights) {
			w, _ := want.Float64()
			if got := live[i].flow.Rate(); math.Abs(got-w) > 1e-6*(1+w) {
				t.Errorf("flow %d of %d over %v, weight %v, cap %v: rate %v; want %v", i, len(live), paths[i], weights[i], caps[i], got, w)
			}
		}
		for id := range capacity {
			c, _ := capacity[id].Float64()
			if load := l.Load(LinkID(id)); load > c*(1+1e-9)+1e-9 {
				t.Errorf("link %d of %v carries %v", id, c, load)
			}
		}
	})
}

// FuzzConservation: on every link of a path, all bytes of a flow arrive, and no earlier than the
// bandwidth allows.
func FuzzConservation(f *testing.F) {
	f.Add(uint64(1), uint8(20))
	f.Fuzz(func(t *testing.T, seed uint64, n uint8) {
		rng := rand.New(rand.NewPCG(seed, 0))
		l := newLab(t)
		links := make([]LinkID, 1+rng.IntN(6))
		want := make([]float64, len(links))
		for i := range links {
			links[i] = l.link(float64(1 + rng.IntN(100)))
		}
		ended := 0
		for range n {
			at := time.Duration(rng.IntN(20)) * time.Second
			size := float64(rng.IntN(200))
			var path []LinkID
			for range rng.IntN(4) {
				path = append(path, links[rng.IntN(len(links))])
			}
			for _, p := range path {
				want[p] += size
			}
			l.k.At(at, func() {
				slowest := math.Inf(1)
				for _, p := range path {
					slowest = min(slowest, l.Capacity(p))
				}
				l.start(Spec{Path: path, Bytes: size, Done: func() {
					ended++
					if took := (l.k.Now() - at).Seconds(); took < size/slowest*(1-1e-9) {
						t.Errorf("%v bytes in %v s over links of at least %v/s", size, took, slowest)
					}
				}})
			})
		}
		l.until(24 * time.Hour)
		if ended != int(n) || l.Flows() != 0 {
			t.Errorf("%d of %d flows have ended, %d are left", ended, n, l.Flows())
		}
		for i, link := range links {
			if got := l.Carried(link); math.Abs(got-want[i]) > 1e-6*(1+want[i]) {
				t.Errorf("link %d carried %v; want %v", i, got, want[i])
			}
		}
	})
}

// BenchmarkReallocate measures the begin or end of one flow among n others: all on one link, or
// only those of its rack.
func BenchmarkReallocate(b *testing.B) {
	for _, n := range []int{100, 1000} {
		for _, tied := range []bool{true, false} {
			b.Run(fmt.Sprintf("flows=%d/tied=%v", n, tied), func(b *testing.B) {
				k := sim.New(1)
				net := New(k)
				groups := n / 10
				shared, _ := net.AddLink("core", 1e9)
				var racks []LinkID
				for range groups {
					id, _ := net.AddLink("rack", 1e9)
					racks = append(racks, id)
				}
				path := func(i int) []LinkID {
					if tied {
						return []LinkID{racks[i%groups], shared}
					}
					return []LinkID{racks[i%groups]}
				}
				for i := range n {
					if _, err := net.Start(Spec{Path: path(i), Bytes: math.Inf(1)}); err != nil {
						b.Fatal(err)
					}
				}
				i := 0
				for b.Loop() {
					f, err := net.Start(Spec{Path: path(i), Bytes: math.Inf(1)})
					if err != nil {
						b.Fatal(err)
					}
					k.RunUntil(b.Context(), k.Now()+1)
					f.Cancel()
					k.RunUntil(b.Context(), k.Now()+1)
					i++
				}
			})
		}
	}
}
