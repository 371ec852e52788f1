package simrdma

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
	"github.com/penstock-kv/penstock/rdma/rdmatest"
)

// Parameters of a run of the ledger.
const (
	storyEngines = 3
	storyOps     = 60
	slotBytes    = 12_000 // of the target's memory, one for each operation
	storyTimeout = 10 * time.Minute
)

// entry is one operation in the ledger: the written bytes, its result, and the number of
// counted immediates. Its number is its immediate.
type entry struct {
	number   int
	from, to int // engines
	what     string
	slot     []byte // its destination at the target
	want     []byte
	revoked  bool // its window was revoked before its end: it may be refused
	keyless  bool // the target had no NIC when the Desc was made
	// lives of the target's NICs when the Desc was made. A NIC that has died since has other
	// keys, even if it has returned.
	lives    []uint64
	expected bool // expected before submission, so its counted immediates stay counted

	// The fields below are guarded by ledger.mu.
	submitted error
	ends      []error
	counted   int
	early     bool // counted before its bytes were in place
}

// ledger is the oracle. It records the written bytes and counted immediates, and does not model
// sessions, NICs or pieces.
type ledger struct {
	mu      sync.Mutex
	entries []*entry
	// down are the sessions that ended, as reported by the first engine about the second.
	down map[[2]int]bool
}

// ended is the OnPeerDown of engine i.
func (s *ledgerRun) ended(i int) func(rdma.EngineID, error) {
	return func(id rdma.EngineID, _ error) {
		s.ledger.mu.Lock()
		defer s.ledger.mu.Unlock()
		for k, known := range s.ids {
			if known == id {
				s.ledger.down[[2]int{i, k}] = true
			}
		}
	}
}

func (l *ledger) end(e *entry) func(error) {
	return func(err error) {
		l.mu.Lock()
		defer l.mu.Unlock()
		e.ends = append(e.ends, err)
	}
}

// keysLost reports whether every NIC for which a Desc has a key has died since, or was dead
// before its engine detected it.
func (s *ledgerRun) keysLost(e *entry) bool {
	for i, now := range s.lives(e.to) {
		if now != 0 && now == e.lives[i] {
			return false
		}
	}
	return true
}

// lives returns the current life of each NIC of an engine; 0 is dead.
func (s *ledgerRun) lives(i int) []uint64 {
	f := s.w.f
	f.mu.Lock()
	defer f.mu.Unlock()
	out := make([]uint64, s.w.nics)
	for n := range out {
		name := NICName(s.engines[i].(*engine).host, n)
		if d := f.nics[name]; d != nil && !d.dead {
			out[n] = f.opened[name]
		}
	}
	return out
}

// judge checks the ledger against the promises of package rdma.
func (s *ledgerRun) judge() {
	l, t := &s.ledger, s.T
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.entries {
		name := fmt.Sprintf("operation %d (%s, %d to %d)", e.number, e.what, e.from, e.to)
		if e.early {
			t.Errorf("%s: counted before its bytes were in place", name)
		}
		if e.counted > 1 {
			t.Errorf("%s: counted %d times", name, e.counted)
		}
		if e.submitted != nil {
			if len(e.ends) != 0 || e.counted != 0 {
				t.Errorf("%s: not submitted (%v), but ended %v and counted %d times", name, e.submitted, e.ends, e.counted)
			}
			continue
		}
		if len(e.ends) != 1 {
			t.Errorf("%s: ended %d times: %v", name, len(e.ends), e.ends)
			continue
		}
		switch err := e.ends[0]; {
		case err == nil:
			// Unexpected immediates are discarded when their session ends.
			if e.counted != 1 && (e.expected || !l.down[[2]int{e.to, e.from}]) {
				t.Errorf("%s: ended well, counted %d times", name, e.counted)
			}
			if !e.revoked && !bytes.Equal(e.slot[:len(e.want)], e.want) {
				t.Errorf("%s: succeeded, but its bytes are not in place", name)
			}
		case errors.Is(err, rdma.ErrRefused):
			if e.counted != 0 || (!e.revoked && !s.keysLost(e)) {
				t.Errorf("%s: refused (%v), counted %d times, window revoked: %v", name, err, e.counted, e.revoked)
			}
		case errors.Is(err, rdma.ErrPeerDied):
		default:
			t.Errorf("%s: ended with %v", name, err)
		}
	}
}

// ledgerRun is one run: engines on a network, operations between them, and faults of the network.
type ledgerRun struct {
	*testing.T
	w       *world
	rng     *rand.Rand
	ctx     context.Context
	ledger  ledger
	engines []rdma.Engine
	ids     []rdma.EngineID // guarded by ledger.mu
	src     []rdma.Region
	bytes   []byte // of every source
	dst     []rdma.Region
	mem     [][]byte
	wg      sync.WaitGroup
}

// TestLedger: no immediate is lost, early or counted twice, and each operation ends exactly
// once, under faults of NICs, links, hosts and control connections.
func TestLedger(t *testing.T) {
	eachSeed(t, 20, func(t *testing.T, seed uint64) {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), storyTimeout)
			defer cancel()
			s := &ledgerRun{T: t, w: newWorld(t, seed), rng: rand.New(rand.NewPCG(seed, 3)), ctx: ctx}
			s.open()
			s.submitAll()
			s.end()
		})
	})
}

// open starts the engines and connects them all.
func (s *ledgerRun) open() {
	token := rdma.Token("the token of every test engine")
	s.bytes = make([]byte, 2*slotBytes)
	for i := range s.bytes {
		s.bytes[i] = byte(s.rng.Uint32())
	}
	s.ledger.down = make(map[[2]int]bool)
	for i := range storyEngines {
		e := s.w.open(s.T, rdmatest.Config{Listen: true, Token: token, IdleTimeout: time.Second, NICs: s.w.nics, OnPeerDown: s.ended(i)})
		s.ledger.mu.Lock()
		s.ids = append(s.ids, e.Addr().Engine)
		s.ledger.mu.Unlock()
		s.Cleanup(func() {
			if err := e.Close(); err != nil {
				s.Errorf("close: %v", err)
			}
		})
		src, err := e.Register(bytes.Clone(s.bytes), rdma.RegisterOptions{Local: true})
		s.must(err)
		mem := make([]byte, storyOps*slotBytes)
		dst, err := e.Register(mem, rdma.RegisterOptions{})
		s.must(err)
		for _, other := range s.engines {
			_, err := e.Connect(s.ctx, other.Addr(), token)
			s.must(err)
		}
		s.engines, s.src, s.dst, s.mem = append(s.engines, e), append(s.src, src), append(s.dst, dst), append(s.mem, mem)
	}
}

func (s *ledgerRun) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

// submitAll submits the operations at random times while faults occur.
func (s *ledgerRun) submitAll() {
	faults := s.rng.IntN(4)
	for range faults {
		at := time.Duration(s.rng.Int64N(int64(20 * time.Millisecond)))
		f := s.fault()
		s.wg.Go(func() {
			time.Sleep(at)
			f()
		})
	}
	for i := range storyOps {
		if s.rng.IntN(8) == 0 {
			time.Sleep(time.Duration(s.rng.Int64N(int64(4 * time.Millisecond))))
		}
		s.submit(i)
	}
	s.wg.Wait()
}

// fault draws one fault. Faults that a session survives are more frequent.
func (s *ledgerRun) fault() func() {
	f, nics := s.w.f, s.w.nics
	a := s.rng.IntN(storyEngines)
	b := (a + 1 + s.rng.IntN(storyEngines-1)) % storyEngines
	host := func(i int) string { return s.engines[i].(*engine).host }
	nic, other := NICName(host(a), s.rng.IntN(nics)), NICName(host(b), s.rng.IntN(nics))
	pause := time.Duration(s.rng.Int64N(int64(200 * time.Millisecond)))
	switch s.rng.IntN(8) {
	case 0, 1, 2:
		return func() {
			f.KillNIC(nic)
			time.Sleep(pause)
			f.RepairNIC(nic)
		}
	case 3, 4:
		return func() {
			f.CutLink(nic, other)
			time.Sleep(pause)
			f.HealLink(nic, other)
		}
	case 5:
		return func() {
			f.Part(host(a), host(b))
			time.Sleep(pause)
			f.Join(host(a), host(b))
		}
	case 6:
		return func() { s.engines[a].Disconnect(s.engines[b].Addr().Engine) }
	default:
		return func() { f.KillHost(host(a)) }
	}
}

// submit draws an operation and submits it.
func (s *ledgerRun) submit(i int) {
	from := s.rng.IntN(storyEngines)
	to := (from + 1 + s.rng.IntN(storyEngines-1)) % storyEngines
	e := &entry{number: i, from: from, to: to, lives: s.lives(to), slot: s.mem[to][i*slotBytes : (i+1)*slotBytes]}
	desc, off := s.dst[to].Desc(), uint64(i*slotBytes)
	s.ledger.mu.Lock()
	s.ledger.entries = append(s.ledger.entries, e)
	s.ledger.mu.Unlock()
	if s.rng.IntN(5) == 0 {
		win, err := s.dst[to].Window(off, slotBytes)
		s.must(err)
		desc, off = win.Desc(), 0
		s.revokeLater(e, win)
	}
	e.keyless = len(desc.NICs) == 0
	n := []uint64{0, 1, 100, 5000, slotBytes}[s.rng.IntN(5)]
	at := s.rng.Uint64N(slotBytes)
	imm := rdma.ImmOf(uint32(i))
	class := rdma.Class(s.rng.IntN(rdma.Classes))
	var submit func() error
	switch s.rng.IntN(4) {
	case 0:
		pages, page := 1+s.rng.IntN(20), uint64(500)
		w := rdma.PagedWrite{PageLen: page, Src: s.src[from], Dst: desc, Imm: imm, Class: class, Done: s.ledger.end(e)}
		w.SrcPages, w.DstPages = rdma.Pages{Stride: page}, rdma.Pages{Stride: page, Offset: off}
		e.what, e.want = fmt.Sprintf("%d pages", pages), make([]byte, uint64(pages)*page)
		for _, p := range s.rng.Perm(pages) {
			src := s.rng.IntN(40)
			w.SrcPages.Indices, w.DstPages.Indices = append(w.SrcPages.Indices, uint32(src)), append(w.DstPages.Indices, uint32(p))
			copy(e.want[p*500:(p+1)*500], s.bytes[src*500:])
		}
		submit = func() error { return s.engines[from].WritePaged(s.ctx, w) }
	case 1:
		e.what, e.want = "scatter", s.bytes[at:at+n]
		x := rdma.Scatter{Src: s.src[from], Dsts: []rdma.ScatterDst{{SrcOffset: at, Dst: desc, DstOffset: off, Len: n}}, Imm: imm, Class: class, Done: s.ledger.end(e)}
		submit = func() error { return s.engines[from].Scatter(s.ctx, x) }
	default:
		e.what, e.want = fmt.Sprintf("%d bytes", n), s.bytes[at:at+n]
		w := rdma.Write{Src: s.src[from], SrcOffset: at, Dst: desc, DstOffset: off, Len: n, Imm: imm, Class: class, Done: s.ledger.end(e)}
		submit = func() error { return s.engines[from].Write(s.ctx, w) }
	}
	if s.rng.IntN(2) == 0 {
		e.expected = true
		s.expect(e)
	}
	err := submit()
	s.ledger.mu.Lock()
	e.submitted = err
	s.ledger.mu.Unlock()
	if err != nil && !errors.Is(err, rdma.ErrNoPeer) && !errors.Is(err, rdma.ErrPeerDied) && (!e.keyless || !errors.Is(err, rdma.ErrMalformed)) {
		s.Errorf("submit operation %d: %v", i, err)
	}
}

// expect begins an expectation that checks the bytes in its Done. An expectation that failed is
// begun again at the end.
func (s *ledgerRun) expect(e *entry) {
	_, err := s.engines[e.to].ExpectImm(rdma.Expect{Imm: uint32(e.number), Count: 1, Done: func(err error) {
		if err != nil {
			return
		}
		same := bytes.Equal(e.slot[:len(e.want)], e.want)
		s.ledger.mu.Lock()
		defer s.ledger.mu.Unlock()
		e.counted++
		e.early = e.early || (!same && !e.revoked)
	}})
	s.must(err)
}

// revokeLater revokes the window of an operation after some time. Its bytes must not change
// afterwards.
func (s *ledgerRun) revokeLater(e *entry, win rdma.Window) {
	at := time.Duration(s.rng.Int64N(int64(3 * time.Millisecond)))
	s.wg.Go(func() {
		time.Sleep(at)
		s.ledger.mu.Lock()
		e.revoked = true
		s.ledger.mu.Unlock()
		if err := win.Revoke(s.ctx); err != nil {
			s.Errorf("revoke the window of operation %d: %v", e.number, err)
			return
		}
		for i := range e.slot {
			e.slot[i] = 0xA5
		}
		time.Sleep(100 * time.Millisecond)
		for i, b := range e.slot {
			if b != 0xA5 {
				s.Errorf("operation %d changed byte %d of a revoked window", e.number, i)
				return
			}
		}
	})
}

// end waits until every operation has ended, counts the immediates that were not expected, and
// judges.
func (s *ledgerRun) end() {
	for _, r := range s.src {
		if err := r.Close(s.ctx); err != nil { // every operation that reads from it has ended
			s.Fatalf("close a source: %v", err)
		}
	}
	for !s.allEnded() && s.ctx.Err() == nil { // an operation without payload reads from no source
		time.Sleep(100 * time.Millisecond)
	}
	time.Sleep(time.Second) // of the bubble's time, longer than any immediate takes to the target
	for _, e := range s.ledger.entries {
		s.recount(e)
	}
	s.judge()
	s.engage()
}

// allEnded reports whether no operation is in flight.
func (s *ledgerRun) allEnded() bool {
	s.ledger.mu.Lock()
	defer s.ledger.mu.Unlock()
	for _, e := range s.ledger.entries {
		if e.submitted == nil && len(e.ends) == 0 {
			return false
		}
	}
	return true
}

// recount counts the immediates of an operation that were not expected. If its session has
// ended they are discarded, and there are none.
func (s *ledgerRun) recount(e *entry) {
	for range 3 {
		before := e.counted
		x, err := s.engines[e.to].ExpectImm(rdma.Expect{Imm: uint32(e.number), Count: 1, Done: func(err error) {
			if err == nil {
				e.counted++
			}
		}})
		if errors.Is(err, rdma.ErrExists) {
			return // the first expectation is still waiting
		}
		s.must(err)
		if e.counted == before {
			x.Cancel()
			return
		}
	}
}

// engage checks that the remaining sessions work.
func (s *ledgerRun) engage() {
	for i, e := range s.engines {
		for _, p := range e.Peers() {
			for k, to := range s.engines {
				if to.Addr().Engine != p.ID || len(to.Peers()) == 0 {
					continue
				}
				src, err := e.Register(bytes.Clone(s.bytes), rdma.RegisterOptions{Local: true})
				s.must(err)
				f := rdma.NewFlag()
				err = e.Write(s.ctx, rdma.Write{Src: src, Dst: s.dst[k].Desc(), Len: 100, Done: f.Set})
				if err == nil {
					err = f.Wait(s.ctx)
				}
				if err != nil && !errors.Is(err, rdma.ErrPeerDied) && !errors.Is(err, rdma.ErrNoPeer) {
					s.Errorf("from %d to %d at the end: %v", i, k, err)
				}
			}
		}
	}
}

var _ rdma.Engine = (*group.Engine)(nil)
