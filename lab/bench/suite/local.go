package suite

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/bench"
	"github.com/penstock-kv/penstock/lab/bench/peer"
)

// localSuite is one run of the suite.
type localSuite struct {
	serverSuite
	socket string
}

// Local measures the time from the request for a block until a consumer in another process of this
// host has read every byte. The block is read in place in the node's arena, copied from the arena,
// or moved over loopback TCP. In each case the consumer verifies the block, which reads every byte.
func Local(ctx context.Context, w World) (_ bench.Report, err error) {
	s := &localSuite{serverSuite: serverSuite{suiteRun: newRun(w, "local")}}
	if err := s.needSpace(2 * gi); err != nil {
		return s.report, err
	}
	dir, remove, err := s.tempDir("local")
	if err != nil {
		return s.report, err
	}
	defer remove()
	s.dir, s.socket = dir, filepath.Join(dir, "sock")
	if s.land, err = arena.New(arena.Options{SizeBytes: landBytes}); err != nil {
		return s.report, err
	}
	defer func() { err = errors.Join(err, s.land.Close()) }()
	// A shared arena gets huge pages only from the reserved pool, or if shmem may use
	// transparent huge pages.
	const arenaPages = serveArenaBytes>>21 + 8
	memory, _, restore := peer.HugePages(arenaPages)
	defer func() { err = errors.Join(err, restore()) }()
	pages := "reserved huge pages"
	if memory != "mmaphuge" {
		pages = fmt.Sprintf("whatever pages there are, since %d huge pages could not be reserved", arenaPages)
	}
	s.setup("the node's arena is shared, of %s; blocks are in it already; time runs from the request until every byte was hashed", pages)
	if s.node, err = startServe(ctx, s.Exe, filepath.Join(dir, "node"), "--capacity", "1GiB", "--hugetlb", "--local-socket", s.socket); err != nil {
		return s.report, err
	}
	defer s.node.Kill()
	for _, m := range []model{oneMiB(), fourMiB()} {
		if err := s.handOff(ctx, m); err != nil {
			return s.report, err
		}
	}
	return s.report, nil
}

// handOff compares the three ways (in place, copied, over TCP) for blocks of one size.
func (s *localSuite) handOff(ctx context.Context, m model) error {
	name := fmt.Sprintf("hand over one %s block", sizeName(m.blockBytes))
	if !s.wants(name) {
		return nil
	}
	ns, err := s.stored(ctx, s.node, m, hotBytes)
	if err != nil {
		return err
	}
	const shared, copied, moved = "shared arena", "copied from the shared arena", "TCP, 4 connections"
	limit := 0.40
	if m.blockBytes > mib {
		limit = 0.25
	}
	return s.compare(ctx, bench.Comparison{
		Name: name, Unit: netUnit,
		Contenders: []bench.Contender{
			{Name: shared, Turn: s.latency(m, ns, false, (*remote).borrow)},
			{Name: copied, Turn: s.latency(m, ns, false, (*remote).timedRead)},
			{Name: moved, Turn: s.latency(m, ns, true, (*remote).timedRead)},
		},
		Measures: []bench.Measure{
			bench.Ratio("p50, shared arena / TCP", "p50 µs", shared, moved, bench.AtMost(limit)),
			bench.Ratio("p99, shared arena / TCP", "p99 µs", shared, moved, bench.Target{}),
			bench.Ratio("CPU of both sides, shared arena / TCP", bench.CPU, shared, moved, bench.Target{}),
			bench.Ratio("p50, copied / TCP", "p50 µs", copied, moved, bench.Target{}),
			bench.Ratio("CPU of both sides, copied / TCP", bench.CPU, copied, moved, bench.Target{}),
		},
		Notes: []string{"giving the loan back is not in the time, and is in rate and CPU"},
	})
}

// latency returns a turn (one measured run of a contender) that reads one block after another with
// read. read returns the time until the bytes were available.
func (s *localSuite) latency(m model, ns kv.Namespace, noLocal bool, read func(*remote, context.Context, kv.Namespace, int) (time.Duration, error)) func(context.Context) (bench.Sample, error) {
	return func(ctx context.Context) (_ bench.Sample, err error) {
		r, err := s.remoteLocal(ctx, noLocal)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, r.close(ctx)) }()
		blocks := int(hotBytes / m.blockBytes)
		for n := range blocks {
			if _, err := read(r, ctx, ns, n); err != nil {
				return nil, err
			}
		}
		var took []time.Duration
		n := 0
		sample, err := drive(ctx, s.Turn, 1, gi, []*peer.Process{s.node.Process}, func(int) (int64, error) {
			n++
			d, err := read(r, ctx, ns, n%blocks)
			took = append(took, d)
			return m.blockBytes, err
		})
		if err != nil {
			return nil, err
		}
		sample["p50 µs"] = micros(bench.Quantile(took, 0.5))
		sample["p99 µs"] = micros(bench.Quantile(took, 0.99))
		return sample, nil
	}
}

// remoteLocal returns a client of the node's unix socket. With noLocal the client moves blocks over
// four TCP connections.
func (s *localSuite) remoteLocal(ctx context.Context, noLocal bool) (*remote, error) {
	return s.remoteWith(ctx, client.Options{Servers: []string{s.node.listen}, LocalSocket: s.socket, NoLocal: noLocal}, 4)
}

// borrow reads block n in place, in the node's arena, and returns it.
func (r *remote) borrow(ctx context.Context, ns kv.Namespace, n int) (time.Duration, error) {
	start := time.Now()
	got, err := r.store.ReadLocal(ctx, client.ReadRequest{Namespace: ns, IDs: []kv.BlockID{blockID(n)}})
	took := time.Since(start)
	if err != nil {
		return 0, err
	}
	if got.Blocks != 1 {
		return 0, fmt.Errorf("bench: block %d was not handed off: %v, %s %s %v", n, got.Outcome, got.Cut, got.Detail, got.Lost)
	}
	return took, got.Return(ctx)
}

// timedRead reads block n into the client's memory.
func (r *remote) timedRead(ctx context.Context, ns kv.Namespace, n int) (time.Duration, error) {
	start := time.Now()
	err := r.read(ctx, ns, n, int64(n)*ns.Geometry.BlockBytes()%landBytes)
	return time.Since(start), err
}
