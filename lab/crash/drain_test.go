package crash

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/testkit"
)

const (
	// ballastChains is the number of chains that are stored in the first life and never deleted, so that a drain has
	// several batches to move.
	ballastChains = 90
	// noiseChains is the number of chains of "noise" that each life reads, the newest ones.
	noiseChains = 60
	// drainShare is the number of rounds of the kill loop per kill of a drain.
	drainShare = 5
)

// TestKillDrain kills the node while it drains or removes each of three volumes in turn, during writes, deletions and epoch
// bumps. After each restart the node serves every acknowledged block with the right bytes, reports each deleted block as a
// miss, and continues each acknowledged drain. The test replaces a removed volume by an empty disk. The first volume also
// has the index, so the node rebuilds the index from the other volumes.
func TestKillDrain(t *testing.T) {
	testkit.Long(t, "a node is killed in the middle of drains many times")
	kills := max(6, rounds(t, 0)/drainShare)
	d := &drainLoop{binary: buildBinary(t), rng: rand.New(rand.NewPCG(5, 0xD5A1)), state: ledgerState{epoch: 1, blocks: map[int]int{}}}
	for i := range 3 {
		d.dirs = append(d.dirs, filepath.Join(t.TempDir(), fmt.Sprint("volume", i)))
	}
	for d.kills < kills && !t.Failed() {
		d.life(t, false)
	}
	// Even if kills interrupted all drains before, two drains and one removal are completed here.
	for d.removals = 0; d.removals == 0 && !t.Failed(); {
		d.life(t, true)
	}
	if !t.Failed() {
		d.life(t, true)
	}
	t.Logf("%d kills, %d of them during a drain; %d acknowledged blocks and %d blocks of noise read", d.kills, d.interrupted, d.acknowledged, d.noiseRead)
	if d.acknowledged == 0 {
		t.Error("the loop read no acknowledged block")
	}
}

// drainLoop is one node, which is killed and started again.
type drainLoop struct {
	binary string
	dirs   []string
	rng    *rand.Rand

	// state is the acknowledged content of namespace "kept". inFlight is the change that was not acknowledged when the
	// node was killed.
	state    ledgerState
	inFlight *change
	noise    int // number of chains written to "noise"

	// target is the index of the volume that is drained and removed, targetDir its directory. draining and removed are
	// set if the node has acknowledged that order.
	target            int
	targetDir         string
	draining, removed bool
	// fresh is set if the directory of a removed volume was emptied and the next start formats it.
	fresh bool

	kills, interrupted, removals, acknowledged, noiseRead int
}

// spaces are the namespaces of one life. "kept" is changed step by step. "ballast" does not change. "noise" always exceeds
// its quota, so its blocks may be missing, but no byte may be wrong.
type spaces struct{ kept, ballast, noise *space }

func (s *spaces) close() error {
	var errs []error
	for _, s := range []*space{s.kept, s.ballast, s.noise} {
		if s != nil {
			errs = append(errs, s.close())
		}
	}
	return errors.Join(errs...)
}

// life starts the node, checks its content, continues the drain under load, and kills the node: during a random change, or,
// if whole is set, after the volume was removed.
func (d *drainLoop) life(t *testing.T, whole bool) {
	var flags []string
	if d.fresh {
		flags = []string{"--add-volumes"}
	}
	v := &volume{name: "drain", dir: strings.Join(d.dirs, ","), durability: "sync", capacity: "192MiB", lives: d.kills}
	n, err := v.tryStart(d.binary, flags...)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	kill := sync.OnceFunc(func() { n.kill(t) })
	var s spaces
	defer func() {
		kill()
		if err := s.close(); err != nil {
			t.Errorf("close the clients: %v", err)
		}
		if t.Failed() {
			t.Logf("life %d, volume %d draining %v, removed %v; the node's log:\n%s", d.kills, d.target, d.draining, d.removed, n.log)
		}
		d.kills++
	}()
	if err := errors.Join(d.connect(ctx, n, &s), d.check(ctx, &s)); err != nil {
		t.Error(err)
		return
	}
	d.fresh = false
	if !d.removed {
		d.work(ctx, t, &s, kill, whole)
		return
	}
	kill()
	if err := os.RemoveAll(d.targetDir); err != nil {
		t.Error(err)
	}
	d.removed, d.draining, d.fresh = false, false, true
	d.removals++
	d.target = (d.target + 1) % len(d.dirs) // a new volume gets the index of the removed one
}

func (d *drainLoop) connect(ctx context.Context, n *node, s *spaces) (err error) {
	if s.kept, err = openSpace(n.listen, "kept", 0); err != nil {
		return err
	}
	if s.noise, err = openSpace(n.listen, "noise", noiseQuota); err != nil {
		return err
	}
	if s.ballast, err = openSpace(n.listen, "ballast", 0); err != nil || d.kills > 0 {
		return err
	}
	for seed := range ballastChains {
		if got, err := s.ballast.put(ctx, seed, keptBlocks); err != nil || got != keptBlocks {
			return fmt.Errorf("put stored %d blocks of chain %d of the ballast; want %d: %w", got, seed, keptBlocks, err)
		}
	}
	return nil
}

// check compares the node's content with the acknowledged changes, and updates state, draining and removed from it. The
// change and the order that were in flight at the kill may have been applied or not.
func (d *drainLoop) check(ctx context.Context, s *spaces) error {
	next := ledgerState{epoch: d.state.epoch, blocks: maps.Clone(d.state.blocks)}
	if d.inFlight != nil {
		next.apply(*d.inFlight)
	}
	switch s.kept.ns.Epoch {
	case next.epoch: // if the change kept the epoch, it may have been applied or not
		if next.epoch != d.state.epoch {
			d.state = next
		}
	case d.state.epoch:
		next = d.state
	default:
		return fmt.Errorf("epoch %d; want %d or %d", s.kept.ns.Epoch, d.state.epoch, next.epoch)
	}
	d.inFlight = nil
	v, err := d.volume(ctx, s)
	if err != nil {
		return err
	}
	if duty := v.GetDuty(); d.removed && duty != "removed" || d.draining && duty == "ok" {
		return fmt.Errorf("the node has lost an acknowledged order: draining %v, removed %v, volume %v", d.draining, d.removed, v)
	}
	// The node may have performed an order without acknowledging it.
	d.draining, d.removed = v.GetDuty() == "draining", v.GetDuty() == "removed"
	if d.draining && (v.GetMovedBlocks() > 0 || v.GetUsedBytes() > 0) {
		d.interrupted++ // the kill interrupted the drain: blocks remain to be moved
	}
	if !d.removed {
		d.targetDir = v.GetPath()
	}
	for seed := range keptChains {
		got, err := s.kept.get(ctx, seed)
		if err != nil {
			return err
		}
		least, most := min(d.state.blocks[seed], next.blocks[seed]), max(d.state.blocks[seed], next.blocks[seed])
		if got < least || got > most {
			return fmt.Errorf("chain %d has %d blocks; want %d to %d", seed, got, least, most)
		}
		d.acknowledged += least
		d.state.blocks[seed] = got
	}
	for seed := range ballastChains {
		if got, err := s.ballast.get(ctx, seed); err != nil || got != keptBlocks {
			return fmt.Errorf("chain %d of the ballast has %d blocks; want %d: %w", seed, got, keptBlocks, err)
		}
		d.acknowledged += keptBlocks
	}
	for seed := max(0, d.noise-noiseChains); seed < d.noise; seed++ {
		got, err := s.noise.get(ctx, seed)
		if err != nil {
			return err
		}
		d.noiseRead += got
	}
	return nil
}

// volume returns the state of the target.
func (d *drainLoop) volume(ctx context.Context, s *spaces) (*pb.VolumeStatus, error) {
	resp, err := s.kept.admin.ListVolumes(ctx, &pb.ListVolumesRequest{})
	if err != nil {
		return nil, err
	}
	return resp.GetVolumes()[d.target], nil
}

// work writes, deletes and bumps the epoch during the drain, and kills the node.
func (d *drainLoop) work(ctx context.Context, t *testing.T, s *spaces, kill func(), whole bool) {
	var killed atomic.Bool
	var others sync.WaitGroup
	defer others.Wait()
	end := func() {
		killed.Store(true)
		kill()
	}
	defer end()
	others.Go(func() {
		for ; !killed.Load() && ctx.Err() == nil; d.noise++ {
			if _, err := s.noise.put(ctx, d.noise, keptBlocks); err != nil && !killed.Load() {
				t.Errorf("noise: %v", err)
				return
			}
		}
	})
	// order calls call with the name of the target, and sets acknowledged if the call succeeds. The next life reads
	// acknowledged.
	order := func(call func(name string) error, acknowledged *bool) {
		done := make(chan struct{})
		others.Go(func() {
			defer close(done)
			if err := call(fmt.Sprint(d.target)); err == nil {
				*acknowledged = true
			} else if !killed.Load() {
				t.Errorf("order: %v", err)
			}
		})
		if whole || d.rng.IntN(3) > 0 {
			<-done
		}
	}
	if !d.draining {
		order(func(name string) error {
			_, err := s.kept.admin.DrainVolume(ctx, &pb.DrainVolumeRequest{Volume: name})
			return err
		}, &d.draining)
	}
	removing := false
	for left := d.rng.IntN(5); whole || left > 0; left-- {
		c := nextChange(d.rng, &d.state)
		if err := s.kept.change(ctx, c); err != nil {
			t.Errorf("change %+v: %v", c, err)
			return
		}
		d.state.apply(c)
		v, err := d.volume(ctx, s)
		if err != nil {
			t.Error(err)
			return
		}
		if removing || v.GetDuty() != "draining" || v.GetUsedBytes() > 0 {
			continue
		}
		removing, left = true, min(left, 3)
		order(func(name string) error {
			_, err := s.kept.admin.RemoveVolume(ctx, &pb.RemoveVolumeRequest{Volume: name})
			return err
		}, &d.removed)
		if whole {
			return
		}
	}
	// Kill the node during another change.
	c := nextChange(d.rng, &d.state)
	d.inFlight = &c
	made := make(chan error, 1)
	go func() { made <- s.kept.change(ctx, c) }()
	end()
	if <-made == nil {
		d.state.apply(c)
		d.inFlight = nil
	}
}

// get reads a chain, compares the delivered blocks, and returns their number.
func (s *space) get(ctx context.Context, seed int) (int, error) {
	ids := cutChain(s.ns, seed)
	clear(s.mem.Bytes())
	res, err := s.store.Read(ctx, client.ReadRequest{Namespace: s.ns, IDs: ids, Into: s.mem})
	if err != nil {
		return 0, fmt.Errorf("read chain %d of %s: %w", seed, s.ns.Name, err)
	}
	size := cutGeometry.BlockBytes()
	want := make([]byte, size)
	for i := range res.Blocks {
		epochContent(ids[i], s.ns.Epoch, want)
		if !bytes.Equal(s.mem.Bytes()[int64(i)*size:][:size], want) {
			return 0, fmt.Errorf("WRONG BYTES in block %d of chain %d of %s", i, seed, s.ns.Name)
		}
	}
	return res.Blocks, nil
}
