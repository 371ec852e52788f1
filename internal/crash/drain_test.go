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
	// ballastChains are stored in the first life and stay until the last, so that a drain has several batches to move.
	ballastChains = 90
	// noiseChains is how many chains of the noise, the newest, a life reads.
	noiseChains = 60
	// drainShare is how many rounds of the kill loop come to one kill of a drain.
	drainShare = 5
)

// TestKillDrain kills the node in the middle of draining and removing each of three volumes in turn, beside writes,
// deletions and epoch bumps. After each restart the node serves every acknowledged block with the right bytes, reports
// each deleted block as a miss, still follows each acknowledged drain order, and continues the drain. The test replaces a
// removed volume by an empty disk. The first volume also holds the index, so the node rebuilds it from the others.
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
	// Whatever the kills cut short, two drains end, and the removal after the first.
	for d.removals = 0; d.removals == 0 && !t.Failed(); {
		d.life(t, true)
	}
	if !t.Failed() {
		d.life(t, true)
	}
	t.Logf("%d kills, %d of them in the middle of a drain; %d blocks owed and read, %d blocks of the noise read", d.kills, d.cutShort, d.owed, d.noiseRead)
	if d.owed == 0 {
		t.Error("the loop read nothing")
	}
}

// drainLoop is one node over its lives.
type drainLoop struct {
	binary string
	dirs   []string
	rng    *rand.Rand

	// state is what namespace "kept" holds. inFlight is the change that was not acknowledged when the node was killed.
	state    ledgerState
	inFlight *change
	noise    int // chains of the noise that were written

	// victim is the index of the volume that is drained and removed, victimDir its directory. draining and removed are
	// the orders that are in force.
	victim            int
	victimDir         string
	draining, removed bool
	// fresh: the directory of a removed volume was emptied, and is to be formatted.
	fresh bool

	kills, cutShort, removals, owed, noiseRead int
}

// spaces are the namespaces of one life: "kept" is changed step by step, "ballast" stays as it is, and of "noise", which
// always exceeds its quota, only the bytes are judged.
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

// life starts the node, judges what is there, goes on with the drain beside load, and kills the node: at a random change,
// or, with whole set, when the volume was removed.
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
			t.Logf("life %d, volume %d draining %v, removed %v; the node's log:\n%s", d.kills, d.victim, d.draining, d.removed, n.log)
		}
		d.kills++
	}()
	if err := errors.Join(d.connect(ctx, n, &s), d.judge(ctx, &s)); err != nil {
		t.Error(err)
		return
	}
	d.fresh = false
	if !d.removed {
		d.work(ctx, t, &s, kill, whole)
		return
	}
	kill()
	if err := os.RemoveAll(d.victimDir); err != nil {
		t.Error(err)
	}
	d.removed, d.draining, d.fresh = false, false, true
	d.removals++
	d.victim = (d.victim + 1) % len(d.dirs) // a new volume gets the index of the removed one
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
			return fmt.Errorf("%d blocks of chain %d of the ballast are stored: %w", got, seed, err)
		}
	}
	return nil
}

// judge compares everything with what is owed, and takes over what became of the change in flight.
func (d *drainLoop) judge(ctx context.Context, s *spaces) error {
	next := ledgerState{epoch: d.state.epoch, blocks: maps.Clone(d.state.blocks)}
	if d.inFlight != nil {
		next.apply(*d.inFlight)
	}
	switch s.kept.ns.Epoch {
	case next.epoch: // of a change within an epoch either outcome is right
		if next.epoch != d.state.epoch {
			d.state = next
		}
	case d.state.epoch:
		next = d.state
	default:
		return fmt.Errorf("epoch %d; want %d or %d", s.kept.ns.Epoch, d.state.epoch, next.epoch)
	}
	d.inFlight = nil
	v, err := d.look(ctx, s)
	if err != nil {
		return err
	}
	if duty := v.GetDuty(); d.removed && duty != "removed" || d.draining && duty == "ok" {
		return fmt.Errorf("the order is forgotten: %v", v)
	}
	// An order that was not acknowledged may be in force.
	d.draining, d.removed = v.GetDuty() == "draining", v.GetDuty() == "removed"
	if d.draining && (v.GetMovedBlocks() > 0 || v.GetUsedBytes() > 0) {
		d.cutShort++ // what is moved in this life was left by the last
	}
	if !d.removed {
		d.victimDir = v.GetPath()
	}
	for seed := range keptChains {
		got, err := s.kept.get(ctx, seed)
		if err != nil {
			return err
		}
		least, most := min(d.state.blocks[seed], next.blocks[seed]), max(d.state.blocks[seed], next.blocks[seed])
		if got < least || got > most {
			return fmt.Errorf("chain %d has %d blocks, want %d to %d", seed, got, least, most)
		}
		d.owed += least
		d.state.blocks[seed] = got
	}
	for seed := range ballastChains {
		if got, err := s.ballast.get(ctx, seed); err != nil || got != keptBlocks {
			return fmt.Errorf("chain %d of the ballast has %d blocks: %w", seed, got, err)
		}
		d.owed += keptBlocks
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

// look returns the victim.
func (d *drainLoop) look(ctx context.Context, s *spaces) (*pb.VolumeStatus, error) {
	resp, err := s.kept.admin.ListVolumes(ctx, &pb.ListVolumesRequest{})
	if err != nil {
		return nil, err
	}
	return resp.GetVolumes()[d.victim], nil
}

// work writes, deletes and bumps beside the drain, until the node is killed.
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
	// order gives an order. acked is read in the next life.
	order := func(give func(name string) error, acked *bool) {
		done := make(chan struct{})
		others.Go(func() {
			defer close(done)
			if err := give(fmt.Sprint(d.victim)); err == nil {
				*acked = true
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
			t.Errorf("a change: %v", err)
			return
		}
		d.state.apply(c)
		v, err := d.look(ctx, s)
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
	// The kill comes while another change is made.
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

// get reads a chain and compares what is delivered. It returns how many blocks are.
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
