package domaintest

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// env is the environment of a case.
type env struct {
	*testing.T
	ctx  context.Context
	pair Pair
	a, b *nic
	rng  *rand.Rand
}

// nic is a Domain, its poller, and all completions that the poller has received.
type nic struct {
	t *env
	d group.Domain
	// name is a or b.
	name string

	mu      sync.Mutex
	changed sync.Cond
	// done holds the completions of local Works by cookie; a second completion of a Work fails the
	// case. gone holds the cookies of closed endpoints.
	done     map[uint64]group.Completion
	imms     map[uint64][]group.Completion // by endpoint
	messages []group.Completion
	broken   map[uint64]int // by endpoint
	gone     map[uint64]bool
	owner    map[uint64]*link // the links of Works in flight, by cookie
	dead     error            // of Poll
	stop     bool
	cookies  uint64
	emptied  int // number of polls after which no completion was left

	// calls are functions that the poller runs. over is closed when the poller ends.
	calls chan func()
	over  chan struct{}

	links    []*link
	memories []group.Memory
}

// newNIC starts the poller of d.
func newNIC(t *env, name string, d group.Domain) *nic {
	n := &nic{
		t: t, d: d, name: name, done: make(map[uint64]group.Completion), imms: make(map[uint64][]group.Completion),
		broken: make(map[uint64]int), gone: make(map[uint64]bool), owner: make(map[uint64]*link),
		calls: make(chan func(), 1), over: make(chan struct{}), cookies: uint64(name[0]) << 32,
	}
	n.changed.L = &n.mu
	go n.poll()
	return n
}

// poll is the poller goroutine. It runs until stop is set or the NIC has died.
func (n *nic) poll() {
	defer close(n.over)
	dst := make([]group.Completion, 7)
	for {
		select {
		case f := <-n.calls:
			f()
		default:
		}
		k, err := n.d.Poll(dst)
		n.mu.Lock()
		for _, c := range dst[:k] {
			n.takeLocked(c)
		}
		if err != nil && n.dead == nil {
			if !errors.Is(err, group.ErrDead) {
				n.t.Errorf("%s: Poll's error does not wrap ErrDead: %v", n.name, err)
			}
			n.dead = err
		}
		if k < len(dst) {
			n.emptied++
		}
		ends := n.stop || n.dead != nil
		n.changed.Broadcast()
		n.mu.Unlock()
		if ends {
			return
		}
		if k < len(dst) {
			n.d.Wait()
		}
	}
}

// takeLocked records a completion and checks it.
func (n *nic) takeLocked(c group.Completion) {
	switch c.Kind {
	case group.KindDone:
		if had, twice := n.done[c.Cookie]; twice {
			n.t.Errorf("%s: Work %#x completed twice: %+v, then %+v", n.name, c.Cookie, had, c)
		}
		n.done[c.Cookie] = c
		if l := n.owner[c.Cookie]; l != nil {
			l.inFlight--
			delete(n.owner, c.Cookie)
		} else {
			n.t.Errorf("%s: completion of Work %#x, which was not posted", n.name, c.Cookie)
		}
		return
	case group.KindImmediate:
		n.imms[c.Cookie] = append(n.imms[c.Cookie], c)
	case group.KindMessage:
		n.messages = append(n.messages, c)
	case group.KindBroken:
		if n.broken[c.Cookie]++; n.broken[c.Cookie] > 1 {
			n.t.Errorf("%s: endpoint %#x broke twice", n.name, c.Cookie)
		}
	default:
		n.t.Errorf("%s: completion of kind %d", n.name, c.Kind)
	}
	if n.gone[c.Cookie] {
		n.t.Errorf("%s: completion %+v names an endpoint that is closed", n.name, c)
	}
}

// await blocks until ok returns true. It fails the case after a timeout. It calls ok with mu held.
func (n *nic) await(what string, ok func() bool) {
	n.t.Helper()
	stop := context.AfterFunc(n.t.ctx, func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.changed.Broadcast()
	})
	defer stop()
	n.mu.Lock()
	defer n.mu.Unlock()
	for !ok() {
		if n.t.ctx.Err() != nil {
			n.t.Fatalf("%s: %s: it did not happen in time", n.name, what)
		}
		n.changed.Wait()
	}
}

// onPoller runs f on the poller's goroutine between two Polls. It does not run f if the NIC is
// dead.
func (n *nic) onPoller(f func()) {
	done := make(chan struct{})
	call := func() { defer close(done); f() }
	select {
	case n.calls <- call:
	case <-n.over:
		return
	}
	n.d.Wake()
	select {
	case <-done:
	case <-n.over:
	case <-n.t.ctx.Done():
		n.t.Errorf("%s: the poller does not return from Poll or Wait", n.name)
	}
}

// drained returns when a Poll that began after the call of drained has left no completion.
func (n *nic) drained() {
	n.t.Helper()
	before := 0
	n.onPoller(func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		before = n.emptied
	})
	n.await("a Poll after which no completion is left", func() bool { return n.emptied > before || n.dead != nil })
}

// cookie returns a number that is not in use as a cookie on this NIC.
func (n *nic) cookie() uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cookies++
	return n.cookies
}

// memory registers size bytes.
func (n *nic) memory(size int) ([]byte, group.Memory) {
	n.t.Helper()
	mem := n.t.alloc(size)
	m, err := n.d.Register(mem, rdma.RegisterOptions{})
	n.t.must(err)
	n.memories = append(n.memories, m)
	return mem, m
}

// random registers size random bytes.
func (n *nic) random(size int) ([]byte, group.Memory) {
	n.t.Helper()
	mem, m := n.memory(size)
	for i := range mem {
		mem[i] = byte(n.t.rng.Uint32())
	}
	return mem, m
}

// window makes a window of m.
func (n *nic) window(m group.Memory, off, size uint64) group.Memory {
	n.t.Helper()
	w, err := m.Window(off, size)
	n.t.must(err)
	n.memories = append(n.memories, w)
	return w
}

// closeMemory closes m and removes it from the memories that nic.close closes.
func (n *nic) closeMemory(m group.Memory) {
	n.t.Helper()
	n.t.must(m.Close())
	n.memories = slices.DeleteFunc(n.memories, func(x group.Memory) bool { return x == m })
}

// lend posts a receive buffer.
func (n *nic) lend(slot uint32, m group.Memory, buf []byte) {
	n.t.Helper()
	var err error
	n.onPoller(func() { err = n.d.PostRecv(slot, m, buf) })
	n.t.must(err)
}

// immediates returns the immediates that have been polled for an endpoint.
func (n *nic) immediates(cookie uint64) []group.Completion {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.imms[cookie])
}

// close closes all endpoints and memories of the NIC, and the NIC.
func (n *nic) close() {
	if n.t.Failed() { // the earlier failure is the better message
		n.abandon()
		return
	}
	for _, l := range n.links {
		l.close()
	}
	for _, m := range slices.Backward(n.memories) { // windows before their memory
		n.t.must(m.Close())
	}
	n.mu.Lock()
	n.stop = true
	n.mu.Unlock()
	n.d.Wake()
	<-n.over
	n.t.must(n.d.Close())
}

// abandon closes the NIC and ignores errors. It closes memory too: if memory that is pinned by
// runtime.Pinner leaked, the test binary would crash before it prints the failure of the case.
func (n *nic) abandon() {
	for _, l := range n.links {
		l.ep.Shut()
	}
	for _, m := range slices.Backward(n.memories) {
		_ = m.Close()
	}
	n.mu.Lock()
	n.stop = true
	n.mu.Unlock()
	n.d.Wake()
	<-n.over
	_ = n.d.Close()
}

// link is one end of a connection: an endpoint and its Works.
type link struct {
	n      *nic
	ep     group.Endpoint
	cookie uint64
	closed bool
	posted []uint64 // cookies of accepted Works, in order
	// inFlight is the number of Works without a completion. Guarded by nic.mu.
	inFlight int
}

// endpoint makes an endpoint that is not connected.
func (n *nic) endpoint(class rdma.Class) *link {
	n.t.Helper()
	l := &link{n: n, cookie: n.cookie()}
	ep, err := n.d.NewEndpoint(l.cookie, class)
	n.t.must(err)
	l.ep = ep
	n.links = append(n.links, l)
	return l
}

// connect makes an endpoint on each NIC and connects the two.
func (t *env) connect(class rdma.Class) (a, b *link) {
	t.Helper()
	a, b = t.a.endpoint(class), t.b.endpoint(class)
	t.join(a, b)
	return a, b
}

// join connects two endpoints, both ends concurrently, as two engines do.
func (t *env) join(a, b *link) {
	t.Helper()
	errs := make(chan error, 1)
	go func() { errs <- a.ep.Connect(b.ep.Local()) }()
	err := b.ep.Connect(a.ep.Local())
	t.must(errors.Join(err, <-errs))
}

// post submits works with new cookies, and waits while the endpoint's queue is full. It returns
// the number of Works that were accepted before the endpoint broke.
func (l *link) post(works ...group.Work) int {
	l.n.t.Helper()
	for i := range works {
		works[i].Cookie = l.n.cookie()
	}
	taken := 0
	for taken < len(works) {
		n, before, err := l.postOnce(works[taken:])
		taken += n
		if err != nil {
			return taken
		}
		if n == 0 {
			if before == 0 {
				l.n.t.Fatalf("%s: an endpoint with nothing in flight accepts no Work", l.n.name)
			}
			l.n.await("room in the queue", func() bool { return l.inFlight < before || l.n.dead != nil })
		}
	}
	return taken
}

// postOnce calls Post once. before is the number of Works in flight before the call.
func (l *link) postOnce(works []group.Work) (n, before int, err error) {
	l.n.mu.Lock()
	before = l.inFlight
	for _, w := range works {
		l.n.owner[w.Cookie] = l
	}
	l.inFlight += len(works)
	l.n.mu.Unlock()
	cookies := make([]uint64, len(works))
	for i, w := range works {
		cookies[i] = w.Cookie
	}
	n, err = l.ep.Post(works)
	l.n.mu.Lock()
	defer l.n.mu.Unlock()
	for _, c := range cookies[n:] {
		delete(l.n.owner, c)
	}
	l.inFlight -= len(cookies) - n
	l.posted = append(l.posted, cookies[:n]...)
	return n, before, err
}

// finish waits until every Work has completed.
func (l *link) finish() {
	l.n.t.Helper()
	l.n.await("the completion of every Work", func() bool { return l.inFlight == 0 || l.n.dead != nil })
}

// do posts one Work and returns its completion.
func (l *link) do(w group.Work) group.Completion {
	l.n.t.Helper()
	if l.post(w) == 0 {
		l.n.t.Fatalf("%s: the endpoint takes no Work", l.n.name)
	}
	l.finish()
	return l.outcome(l.posted[len(l.posted)-1])
}

// ok posts one Work that must succeed.
func (l *link) ok(w group.Work) {
	l.n.t.Helper()
	if c := l.do(w); c.Status != group.StatusOK {
		l.n.t.Fatalf("%s: the Work ended with status %d (%v)", l.n.name, c.Status, c.Err)
	}
}

// outcome returns the completion of a Work that has ended.
func (l *link) outcome(cookie uint64) group.Completion {
	l.n.mu.Lock()
	defer l.n.mu.Unlock()
	return l.n.done[cookie]
}

// immediatesAfter waits until count immediates of the endpoint have been polled.
func (l *link) immediatesAfter(count int) []group.Completion {
	l.n.t.Helper()
	l.n.await("the immediates", func() bool { return len(l.n.imms[l.cookie]) >= count })
	return l.n.immediates(l.cookie)
}

// close shuts the endpoint, waits for its Works, and closes it.
func (l *link) close() {
	l.n.t.Helper()
	if l.closed {
		return
	}
	l.closed = true
	l.ep.Shut()
	l.finish()
	l.n.t.must(l.ep.Close())
	l.n.onPoller(func() { // returns only after earlier completions have been recorded
		l.n.mu.Lock()
		defer l.n.mu.Unlock()
		l.n.gone[l.cookie] = true
	})
}

// alloc returns memory for Register.
func (t *env) alloc(n int) []byte {
	t.Helper()
	if t.pair.Alloc != nil {
		return t.pair.Alloc(t.T, n)
	}
	return make([]byte, n)
}

// must fails the case on an error.
func (t *env) must(err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
