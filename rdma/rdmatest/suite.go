package rdmatest

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
)

// Config describes the engine that a case needs. A zero value means the provider's default. An
// engine may ignore a setting if its Provider does not declare support for it.
type Config struct {
	// Listen makes the engine reachable. Its peers must then prove that they have Token.
	Listen bool
	Token  rdma.Token
	// InFlightOps and InFlightBytes are the largest number of writes in flight to one peer, and of
	// their bytes.
	InFlightOps   int
	InFlightBytes int64
	// EarlyImmediates is the number of unexpected immediates that are kept for each peer.
	EarlyImmediates int
	// OnPeerDown is called when a session has ended.
	OnPeerDown func(rdma.EngineID, error)

	// NICs is the number of NICs of the engine, at most Provider.NICs.
	NICs int
	// IdleTimeout is the time without any data after which a peer is declared dead. It is set only
	// if Provider.Vanishes is true.
	IdleTimeout time.Duration
	// Logger receives the engine's log. If it is nil, the engine does not log.
	Logger *slog.Logger
}

// Factory starts an engine. The case closes it.
type Factory func(t testing.TB, c Config) rdma.Engine

// Provider is the provider under test and the features that it supports.
type Provider struct {
	Open Factory
	// Alloc returns memory that the provider's engines can register. The memory is valid
	// until t has ended. Default: the Go heap.
	Alloc func(t testing.TB, bytes int) []byte
	// NICs is the largest Config.NICs that Open supports; 0 means 1. Engines with several NICs
	// should implement NICKiller.
	NICs int
	// Uneven: engines with different numbers of NICs can connect to each other.
	Uneven bool
	// Vanishes: Open supports Config.IdleTimeout, and its engines implement Vanisher.
	Vanishes bool
	// Device, if set, returns device memory and functions to access it.
	Device func(t testing.TB, e rdma.Engine, bytes int) Device
	// Quick makes every case small, for callers that run the suite many times.
	Quick bool
}

// NICKiller is implemented by an engine whose NICs can be made to fail, like a NIC that is removed
// from its bus.
type NICKiller interface {
	KillNIC(i int)
}

// Vanisher is implemented by an engine whose host can be made silent: no packet that it sends
// arrives any more, and its peers get no notice.
type Vanisher interface {
	Vanish()
}

// Device is memory that may have no address in the process.
type Device struct {
	Options rdma.RegisterOptions
	// Read and Write access the memory through the device.
	Read, Write func(off uint64, b []byte)
}

// Case tests one promise of package rdma.
type Case struct {
	Name string
	run  func(*env)
}

// caseTimeout is the longest duration of a case; a case that takes longer is assumed to hang.
const caseTimeout = 3 * time.Minute

// token is the secret of every server in the suite.
var token = rdma.Token("a token for the conformance suite")

// Cases returns all cases, for callers that do not use Run.
func Cases() []Case {
	return []Case{
		{"write", testWrite},
		{"payload before immediate", testPayloadBeforeImmediate},
		{"immediate before expectation", testEarlyImmediate},
		{"early immediates are bounded", testEarlyBound},
		{"expectation cancelled", testCancel},
		{"expectation ends with its peer", testExpectPeerDied},
		{"paged write", testPaged},
		{"paged write, overlapping", testPagedOverlap},
		{"paged write refused here", testPagedErrors},
		{"wrong key", testWrongKey},
		{"beyond the window", testBounds},
		{"refused among good ones", testRefusedAmongGood},
		{"refusals are logged", testRefusalsLogged},
		{"its own ends are no warning", testOwnEnds},
		{"window isolates", testWindow},
		{"window of some peers", testWindowPeers},
		{"window over spans", testWindowSpans},
		{"write refused here", testLocalErrors},
		{"revoke under fire", testRevokeUnderFire},
		{"revoke paged under fire", testRevokePagedUnderFire},
		{"region close", testRegionClose},
		{"region close given up", testRegionCloseGivenUp},
		{"device memory", testDevice},
		{"wrong token", testWrongToken},
		{"wrong engine", testWrongEngine},
		{"connect", testConnect},
		{"messages", testMessages},
		{"messages refused", testMessagesRefused},
		{"a message passes bulk", testMessagePassesBulk},
		{"traffic classes", testClasses},
		{"scatter and barrier", testScatter},
		{"peer group", testPeerGroup},
		{"peer group ends with a member", testPeerGroupEnds},
		{"many peers", testManyPeers},
		{"both ways at once", testBothWays},
		{"budget", testBudget},
		{"scope cancelled under fire", testScope},
		{"scope cancelled while it waits", testScopeWaits},
		{"watched word drives writes", testWatcher},
		{"several NICs", testNICs},
		{"uneven NICs", testUnevenNICs},
		{"target's NIC dies", testTargetNICDies},
		{"sender's NIC dies", testSenderNICDies},
		{"all NICs die", testAllNICsDie},
		{"peer vanishes", testVanish},
		{"close with operations in flight", testCloseInFlight},
		{"peer closes with operations in flight", testPeerCloses},
		{"sources overwritten as writes end", testPoisonedSources},
		{"disconnect and connect again", testReconnect},
		{"use after close", testAfterClose},
	}
}

// Run runs every case on engines that open starts, with only the features that every provider must
// support.
func Run(t *testing.T, open Factory) { Provider{Open: open}.Run(t) }

// Run runs every case.
func (p Provider) Run(t *testing.T) {
	for _, c := range Cases() {
		t.Run(c.Name, func(t *testing.T) {
			testkit.VerifyNone(t)
			c.Run(t, p)
		})
	}
}

// Run runs one case. It may run in a testing/synctest bubble.
func (c Case) Run(t *testing.T, p Provider) {
	ctx, cancel := context.WithTimeout(t.Context(), caseTimeout)
	defer cancel()
	c.run(&env{T: t, ctx: ctx, p: p, rng: rand.New(rand.NewPCG(1, 2))})
}

// env is the environment of a case.
type env struct {
	*testing.T
	ctx context.Context
	p   Provider
	rng *rand.Rand
}

// scaled returns full, or quick if Provider.Quick is set.
func (t *env) scaled(full, quick int) int {
	if t.p.Quick {
		return quick
	}
	return full
}

// sizes returns the lengths of writes to test.
func (t *env) sizes() []int {
	if t.p.Quick {
		return []int{0, 1, 63, 4096, 16<<10 - 1, 100_003}
	}
	return []int{0, 1, 63, 4096, 16<<10 - 1, 64 << 10, 1<<20 + 1, 5<<20 + 3}
}

// engine starts an engine that is closed when the case ends.
func (t *env) engine(c Config) rdma.Engine {
	t.Helper()
	if c.Listen {
		c.Token = token
	}
	e := t.p.Open(t.T, c)
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return e
}

// pair starts a server and a client that is connected to it.
func (t *env) pair() (server, client rdma.Engine) {
	t.Helper()
	server, client = t.engine(Config{Listen: true}), t.engine(Config{})
	t.connect(client, server)
	return server, client
}

// connect connects two engines and returns the ID of the second.
func (t *env) connect(from, to rdma.Engine) rdma.EngineID {
	t.Helper()
	id, err := from.Connect(t.ctx, to.Addr(), token)
	t.must(err)
	if id != to.Addr().Engine {
		t.Fatalf("connected to %v, want %v", id, to.Addr().Engine)
	}
	return id
}

// must fails the case on an error.
func (t *env) must(err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// wantErr fails the case unless err is want.
func (t *env) wantErr(err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("error %v, want %v", err, want)
	}
}

// wantRefused fails the case unless err is a refusal for one of the reasons.
func (t *env) wantRefused(err error, reasons ...rdma.Reason) {
	t.Helper()
	var r *rdma.RefusedError
	if !errors.As(err, &r) || !errors.Is(err, rdma.ErrRefused) {
		t.Fatalf("error %v, want a refusal", err)
	}
	for _, x := range reasons {
		if r.Reason == x {
			return
		}
	}
	t.Fatalf("refused with reason %v, want %v", r.Reason, reasons)
}

// wait returns the result of a flag. It fails the case if the flag is not set in time.
func (t *env) wait(f *rdma.Flag) error {
	t.Helper()
	select {
	case <-f.C():
		_, err := f.Poll()
		return err
	case <-t.ctx.Done():
		t.Fatal("the flag was not set in time")
		return nil
	}
}

// memory returns n bytes of memory that can be registered.
func (t *env) memory(n int) []byte {
	t.Helper()
	if t.p.Alloc != nil {
		return t.p.Alloc(t.T, n)
	}
	return make([]byte, n)
}

// eventually polls a condition for which there is no event. It fails the case if the condition
// does not become true in time.
func (t *env) eventually(what string, ok func() bool) {
	t.Helper()
	for pause := 10 * time.Microsecond; !ok(); pause = min(2*pause, 10*time.Millisecond) {
		select {
		case <-time.After(pause):
		case <-t.ctx.Done():
			t.Fatalf("%s: not in time", what)
		}
	}
}

// region registers n bytes. It returns the region and the bytes.
func (t *env) region(e rdma.Engine, n int) (rdma.Region, []byte) {
	t.Helper()
	mem := t.memory(n)
	r, err := e.Register(mem, rdma.RegisterOptions{})
	t.must(err)
	return r, mem
}

// random registers n random bytes in a Local region.
func (t *env) random(e rdma.Engine, n int) (rdma.Region, []byte) {
	t.Helper()
	mem := t.memory(n)
	for i := 0; i+8 <= n; i += 8 {
		x := t.rng.Uint64()
		for j := range 8 {
			mem[i+j] = byte(x >> (8 * j))
		}
	}
	for i := n &^ 7; i < n; i++ {
		mem[i] = byte(t.rng.Uint32())
	}
	r, err := e.Register(mem, rdma.RegisterOptions{Local: true})
	t.must(err)
	return r, mem
}

// sent returns a Desc that was encoded and decoded, as if it had been sent to a peer.
func (t *env) sent(d rdma.Desc) rdma.Desc {
	t.Helper()
	b, err := d.MarshalBinary()
	t.must(err)
	var out rdma.Desc
	t.must(out.UnmarshalBinary(b))
	return out
}

// forged returns d with invalid keys.
func (t *env) forged(d rdma.Desc) rdma.Desc {
	t.Helper()
	d = t.sent(d)
	for i := range d.NICs {
		d.NICs[i].Key ^= 1 << 40
	}
	return d
}

// expect begins an expectation.
func (t *env) expect(e rdma.Engine, imm, count uint32, from ...rdma.EngineID) (*rdma.Flag, *rdma.Expectation) {
	t.Helper()
	f := rdma.NewFlag()
	x, err := e.ExpectImm(rdma.Expect{Imm: imm, Count: count, From: from, Done: f.Set})
	t.must(err)
	return f, x
}

// write submits w and returns the error with which it ended.
func (t *env) write(e rdma.Engine, w rdma.Write) error {
	t.Helper()
	f := rdma.NewFlag()
	w.Done = f.Set
	t.must(e.Write(t.ctx, w))
	return t.wait(f)
}

// writePaged submits w and returns the error with which it ended.
func (t *env) writePaged(e rdma.Engine, w rdma.PagedWrite) error {
	t.Helper()
	f := rdma.NewFlag()
	w.Done = f.Set
	t.must(e.WritePaged(t.ctx, w))
	return t.wait(f)
}

// slots holds free offsets in a region, so that writes in flight at the same time do not overlap.
// The contract allows overlaps, but the race detector reports them.
type slots chan uint64

// slotsOf returns the offsets of count ranges of n bytes.
func slotsOf(count int, n uint64) slots {
	s := make(slots, count)
	for i := range uint64(count) {
		s <- i * n
	}
	return s
}

// still fails the case if f is set.
func (t *env) still(f *rdma.Flag) {
	t.Helper()
	if set, err := f.Poll(); set {
		t.Fatalf("the immediate was counted (%v)", err)
	}
}

// roundTrip checks that e can write to target in its session. When it returns, the target has
// processed all operations that e submitted earlier and that have ended.
func (t *env) roundTrip(e, target rdma.Engine) {
	t.Helper()
	src, want := t.random(e, 100)
	dst, got := t.region(target, 100)
	if err := t.write(e, rdma.Write{Src: src, Dst: dst.Desc(), Len: 100}); err != nil {
		t.Fatalf("the session does not work any more: %v", err)
	}
	if !bytes.Equal(got, want) {
		t.Fatal("the session delivers wrong bytes")
	}
}
