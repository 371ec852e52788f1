package rounds

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/content"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

const (
	sequenceBlocks = 4
	engines        = 8
	latecomers     = 2
	// callEvery is the pause of an engine between two sequences, callWithin the deadline of a call, and
	// bumpEvery the pause between two epochs.
	callEvery  = 20 * time.Millisecond
	callWithin = 500 * time.Millisecond
	bumpEvery  = 700 * time.Millisecond
)

var geometry = kv.SingleGroup(2, 4, 1024) // 8 KiB a block

// An outcome is the result of one call.
type outcome int

const (
	hit     outcome = iota // every block
	absent                 // some blocks are not stored
	down                   // a node did not answer
	busy                   // a node refused
	lost                   // blocks that matched did not arrive
	late                   // the caller's deadline ended first
	refused                // a node did not store a block
	failed                 // an administrative call returned an error
	outcomes
)

var outcomeNames = [outcomes]string{"hits", "absent", "down", "busy", "lost", "late", "refused", "failed"}

// tally has the number of calls by their outcome.
type tally [outcomes]int64

// surfaced returns the number of calls in which a fault was visible.
func (c tally) surfaced() int64 {
	return c[down] + c[busy] + c[lost] + c[late] + c[refused] + c[failed]
}

func (c tally) minus(o tally) tally {
	for i := range c {
		c[i] -= o[i]
	}
	return c
}

// space is a namespace under load.
type space struct {
	name                string
	replicas, sequences int
	// given is the definition with the newest epoch that a client was given. bumped is the newest epoch
	// whose bump has succeeded.
	given  atomic.Pointer[kv.Namespace]
	bumped atomic.Uint64

	mu     sync.Mutex
	counts tally
	// found and wanted are the blocks that reads of the newest epoch found and requested, by interval.
	found, wanted []float64
}

func (s *space) count(o outcome) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts[o]++
}

func (s *space) tally() tally {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.counts
}

// load is the clients of the cluster.
type load struct {
	t      *testing.T
	began  time.Time
	spaces []*space
	// through returns the node for the next bump.
	through func() *node

	ctx     context.Context
	wg      sync.WaitGroup
	closers []func() error

	// The violations of the guarantees. wrong counts blocks whose bytes are not of the requested
	// epoch; old counts answers of an epoch before one whose bump had succeeded when the call began.
	wrong, old atomic.Int64
	blocks     atomic.Int64 // blocks compared
	bumps      atomic.Int64 // bumps that succeeded
	tooOld     atomic.Int64 // requests of latecomers

	mu      sync.Mutex
	reports []string
}

// report records a violation with its time.
func (l *load) report(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.reports) < 20 {
		l.reports = append(l.reports, fmt.Sprintf("%7.2f s  ", time.Since(l.began).Seconds())+fmt.Sprintf(format, args...))
	}
}

func (l *load) violations() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.reports
}

// open opens a client that discovers the nodes from some of their addresses.
func (l *load) open(seeds []string) *client.Store {
	l.t.Helper()
	engine, err := tcp.New(context.Background(), tcp.Options{})
	if err != nil {
		l.t.Fatal(err)
	}
	store, err := client.Open(context.Background(), client.Options{
		Servers: seeds, Discover: true, Engine: engine, NoLocal: true,
		MembersEvery: 100 * time.Millisecond, DeadFor: 200 * time.Millisecond, GoneFor: 4 * leaseTTL, DialTimeout: time.Second,
	})
	if err != nil {
		l.t.Fatal(errors.Join(err, engine.Close()))
	}
	l.closers = append(l.closers, func() error { return errors.Join(store.Close(), engine.Close()) })
	return store
}

// start starts the load. stop ends it.
func (l *load) start(ctx context.Context, seed uint64, seeds []string, await func(what string, ok func() bool)) {
	l.t.Helper()
	l.ctx, l.began = ctx, time.Now()
	// Each role has a client of its own, as processes do.
	readers, late, admin := l.open(seeds), l.open(seeds), l.open(seeds)
	for _, s := range l.spaces {
		var ns kv.Namespace
		await("namespace "+s.name+" is served", func() bool {
			var err error
			ns, err = admin.Namespace(ctx, s.name)
			return err == nil
		})
		s.given.Store(&ns)
		s.bumped.Store(uint64(ns.Epoch))
	}
	run := func(role uint64, store *client.Store, every time.Duration, act func(*rand.Rand, *caller)) {
		memory, err := store.Register(make([]byte, sequenceBlocks*geometry.BlockBytes()))
		if err != nil {
			l.t.Fatal(err)
		}
		l.wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, role))
			tick := time.NewTicker(every)
			defer tick.Stop()
			for {
				select {
				case <-tick.C:
					act(rng, &caller{l, store, memory})
				case <-ctx.Done():
					if err := memory.Close(context.Background()); err != nil {
						l.t.Error(err)
					}
					return
				}
			}
		})
	}
	for i := range engines {
		run(uint64(i), readers, callEvery, l.engine)
	}
	for i := range latecomers {
		run(uint64(100+i), late, callEvery, l.latecomer)
	}
	run(200, admin, bumpEvery, l.bump)
}

// close ends the clients after the end of the context of start.
func (l *load) close() {
	l.wg.Wait()
	for _, c := range l.closers {
		if err := c(); err != nil {
			l.t.Error(err)
		}
	}
}

// caller is a client with memory for one sequence.
type caller struct {
	*load
	store  *client.Store
	memory *client.Memory
}

// tokens returns the tokens of a sequence. All sequences begin with different blocks.
func tokens(i int) []kv.Token {
	out := make([]kv.Token, sequenceBlocks*geometry.BlockTokens)
	for k := range out {
		out[k] = kv.Token(i*1000 + k)
	}
	return out
}

func chain(ns kv.Namespace, i int) []kv.BlockID {
	c, err := ns.Chain()
	if err != nil {
		panic(err)
	}
	ids, _ := c.Append(nil, tokens(i))
	return ids
}

// block returns the bytes of a block in the caller's memory.
func (c *caller) block(b int) []byte {
	size := geometry.BlockBytes()
	return c.memory.Bytes()[int64(b)*size:][:size]
}

// unexpected reports an error of a data call in an epoch that is not the end of its deadline: a fault of
// a node or of the network must be an outcome. An epoch above bumped, the newest whose bump had succeeded
// before the call, is one whose bump has failed, so a node may not have it yet.
func (c *caller) unexpected(ctx context.Context, s *space, epoch kv.Epoch, bumped uint64, what string, err error) {
	// On a busy machine gRPC may compare the deadline with the clock before the timer of ctx fires.
	deadline, _ := ctx.Deadline()
	switch {
	case c.ctx.Err() != nil:
	case ctx.Err() != nil || !time.Now().Before(deadline):
		s.count(late)
	case errors.Is(err, client.ErrMismatch) && uint64(epoch) > bumped:
		s.count(refused)
	default:
		s.count(failed)
		c.report("%s of epoch %d in %s: %v", what, epoch, s.name, err)
	}
}

// read reads a sequence in the epoch of ns, compares the bytes, and returns the number of blocks.
func (c *caller) read(s *space, ns kv.Namespace, i int) (blocks int, o outcome, ok bool) {
	ctx, cancel := context.WithTimeout(c.ctx, callWithin)
	defer cancel()
	ids, bumped := chain(ns, i), s.bumped.Load()
	for k := range c.memory.Bytes() {
		c.memory.Bytes()[k] = 0xEE // bytes that did not arrive must not pass the comparison
	}
	res, err := c.store.Read(ctx, client.ReadRequest{Namespace: ns, IDs: ids, Into: c.memory})
	if err != nil {
		c.unexpected(ctx, s, ns.Epoch, bumped, "read", err)
		return 0, 0, false
	}
	for b := range res.Blocks {
		if content.Of(ids[b], ns.Epoch).Differs(c.block(b)) >= 0 {
			c.wrong.Add(1)
			c.report("WRONG BYTES in block %d of sequence %d of %s in epoch %d", b, i, s.name, ns.Epoch)
		}
	}
	c.blocks.Add(int64(res.Blocks))
	switch {
	case res.Blocks == sequenceBlocks:
		return res.Blocks, hit, true
	case res.Outcome == client.Busy || res.Cut == client.CutBusy:
		return res.Blocks, busy, true
	case res.Cut == client.CutNodeDown:
		return res.Blocks, down, true
	case res.Cut == client.CutLost:
		return res.Blocks, lost, true
	}
	return res.Blocks, absent, true
}

// write stores the blocks of a sequence from first on. It returns the number of blocks that were stored.
func (c *caller) write(s *space, ns kv.Namespace, i, first int) int {
	ctx, cancel := context.WithTimeout(c.ctx, callWithin)
	defer cancel()
	ids, bumped := chain(ns, i), s.bumped.Load()
	for b := first; b < len(ids); b++ {
		content.Of(ids[b], ns.Epoch).Fill(c.block(b))
	}
	res, err := c.store.Write(ctx, client.WriteRequest{Namespace: ns, IDs: ids, First: first, From: c.memory})
	switch {
	case err != nil:
		c.unexpected(ctx, s, ns.Epoch, bumped, "write", err)
	case res.Outcome == client.Busy:
		s.count(busy)
	case len(res.Refused) > 0 || res.Outcome == client.Miss:
		s.count(refused)
	}
	return res.Stored + res.Existed
}

// engine reads a sequence with the newest epoch that it was given, and stores the blocks that are missing.
func (l *load) engine(rng *rand.Rand, c *caller) {
	s := l.spaces[rng.IntN(len(l.spaces))]
	i := rng.IntN(s.sequences)
	ns := *s.given.Load()
	blocks, o, ok := c.read(s, ns, i)
	if ok {
		s.count(o)
	}
	if c.ctx.Err() != nil {
		return
	}
	s.sample(time.Since(l.began), blocks)
	if ok && blocks < sequenceBlocks {
		c.write(s, ns, i, blocks)
	}
}

// latecomer requests a retired epoch, or the newest one without naming it. A call that begins after a
// bump has succeeded must not get the old epoch.
func (l *load) latecomer(rng *rand.Rand, c *caller) {
	s := l.spaces[len(l.spaces)-1]
	i := rng.IntN(s.sequences)
	ns := *s.given.Load()
	newest := s.bumped.Load()
	if newest < 2 {
		return
	}
	ctx, cancel := context.WithTimeout(c.ctx, callWithin)
	defer cancel()
	l.tooOld.Add(1)
	switch rng.IntN(4) {
	case 0:
		m, err := c.store.Match(ctx, client.MatchRequest{Namespace: ns, IDs: chain(ns, i), Newest: true})
		if err != nil {
			c.unexpected(ctx, s, ns.Epoch, newest, "match", err)
		} else if m.Blocks > 0 && uint64(m.Epoch) < newest {
			l.old.Add(1)
			l.report("a match of the newest epoch returned %d blocks of epoch %d after the bump to %d", m.Blocks, m.Epoch, newest)
		}
	case 1:
		got, err := c.store.Namespace(ctx, s.name)
		if err == nil && uint64(got.Epoch) < newest {
			l.old.Add(1)
			l.report("the namespace has epoch %d after the bump to %d", got.Epoch, newest)
		}
	case 2:
		ns.Epoch = kv.Epoch(newest - 1)
		if n := c.write(s, ns, i, 0); n > 0 {
			l.old.Add(1)
			l.report("%d blocks were stored in epoch %d after the bump to %d", n, newest-1, newest)
		}
	default:
		ns.Epoch = kv.Epoch(newest - 1)
		if blocks, _, _ := c.read(s, ns, i); blocks > 0 {
			l.old.Add(1)
			l.report("%d blocks were read in epoch %d after the bump to %d", blocks, newest-1, newest)
		}
	}
}

// bump begins an epoch of the last namespace through any node, and gives it to the engines.
func (l *load) bump(_ *rand.Rand, c *caller) {
	s := l.spaces[len(l.spaces)-1]
	err := l.through().admin(l.ctx, 3*leaseTTL, func(ctx context.Context, admin pb.AdminClient) error {
		b, err := admin.BumpEpoch(ctx, &pb.BumpEpochRequest{Name: s.name})
		if err == nil {
			s.bumped.Store(max(s.bumped.Load(), b.GetNewEpoch()))
			l.bumps.Add(1)
		}
		return err
	})
	if l.ctx.Err() != nil {
		return
	}
	if err != nil {
		s.count(failed)
	}
	ctx, cancel := context.WithTimeout(l.ctx, callWithin)
	defer cancel()
	if ns, err := c.store.Namespace(ctx, s.name); err == nil && ns.Epoch > s.given.Load().Epoch {
		s.given.Store(&ns)
	}
}
