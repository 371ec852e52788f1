package crash

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
)

// One of two drives fails while the node works on both:
//
//	node ─► file system (index, volume 0) ─► mapped device ─► drive 0   ◄─ "index": the fault is here
//	     └► file system (volume 1)        ─► mapped device ─► drive 1   ◄─ "data": or here
//
// During the test the mapped device gets a table that fails requests or completes them after 30 s.

const (
	// driveSlice is the bytes of each drive that one case uses.
	driveSlice = 320 << 20
	// faultTime is the duration of a fault.
	faultTime = 30 * time.Second
	// callTime is the deadline of each call to the node.
	callTime = 60 * time.Second
)

// driveFault is the device-mapper table of a failing device.
type driveFault struct {
	name string
	// table takes the device's length in sectors, its drive, and the sector of the drive at which the device begins.
	table func(length int64, drive string, from int64) string
	// errors is set if requests fail, so the file system may be shut down until it is mounted again. reads is set if
	// the node's reads fail or hang, so the node may have dropped the blocks that it could not read.
	errors, reads bool
}

// delays returns a table of dm-delay with separate delays for reads, writes and flushes.
func delays(read, write, flush time.Duration) func(int64, string, int64) string {
	return func(n int64, d string, from int64) string {
		return fmt.Sprintf("0 %d delay %s %d %d %s %d %d %s %d %d", n, d, from, read.Milliseconds(), d, from, write.Milliseconds(), d, from, flush.Milliseconds())
	}
}

var driveFaults = []driveFault{
	{"every request fails", func(n int64, _ string, _ int64) string { return fmt.Sprintf("0 %d error", n) }, true, true},
	{"writes and flushes fail", func(n int64, d string, from int64) string {
		return fmt.Sprintf("0 %d flakey %s %d 0 3600 1 error_writes", n, d, from)
	}, true, false},
	{"reads hang", delays(faultTime, 0, 0), false, true},
	{"writes hang", delays(0, faultTime, 0), false, false},
	{"flushes hang", delays(0, 0, faultTime), false, false},
}

// TestDriveFaults makes one of two drives fail for faultTime. Afterwards the blocks stored before are hits, except where
// the fault made reads fail. No byte may be wrong, and no call may last longer than its deadline. While the data drive
// fails, writes and epoch bumps must succeed.
func TestDriveFaults(t *testing.T) {
	drives := labDrives(t, 2)
	binary := buildBinary(t)
	slice := 0
	for _, on := range []string{"data", "index"} {
		for i, fault := range driveFaults {
			systems := [2]fileSystem{ext4, xfs}
			if i%2 == 1 {
				systems = [2]fileSystem{xfs, ext4}
			}
			c := &driveCase{number: slice, drives: drives, systems: systems, fault: fault, faulty: 1, binary: binary}
			if on == "index" {
				c.faulty = 0
			}
			slice++
			t.Run(fmt.Sprintf("%s drive %s", on, fault.name), func(t *testing.T) {
				t.Parallel()
				c.run(t)
			})
		}
	}
}

// driveCase is one node on two drives.
type driveCase struct {
	number  int
	drives  []string
	systems [2]fileSystem
	fault   driveFault
	faulty  int // index of the drive that fails
	binary  string

	devices [2]mapped
	mounts  []string
}

func (c *driveCase) linear(i int) string {
	return fmt.Sprintf("0 %d linear %s %d", driveSlice/sectorBytes, c.drives[i], int64(c.number)*driveSlice/sectorBytes)
}

func (c *driveCase) run(t *testing.T) {
	root := t.TempDir()
	for i := range c.devices {
		c.devices[i] = mapDevice(t, fmt.Sprintf("case%d-%d", c.number, i), c.linear(i))
		c.systems[i].format(t, c.devices[i].path)
		c.mounts = append(c.mounts, filepath.Join(root, strconv.Itoa(i)))
		c.systems[i].mount(t, c.devices[i].path, c.mounts[i])
	}
	v := cutVolume(c.mounts, "sync")
	n := v.start(t, c.binary)
	defer func() { n.kill(t) }()
	s := c.connect(t, n)
	const before = 24
	for seed := range before {
		if got := s.store(t, seed); got != keptBlocks {
			t.Fatalf("chain %d: %d of %d blocks were stored before the fault\n%s", seed, got, keptBlocks, n.log)
		}
	}
	s.spread(t)

	c.devices[c.faulty].load(t, c.fault.table(driveSlice/sectorBytes, c.drives[c.faulty], int64(c.number)*driveSlice/sectorBytes))
	during, end := context.WithTimeout(context.Background(), faultTime)
	defer end()
	seed, hits, stored := before, 0, 0
	for ; during.Err() == nil && !t.Failed(); seed++ {
		stored += s.store(t, seed)
		hits += s.load(t, seed%before)
	}
	if c.faulty == 1 {
		s.bump(t)
		if last := s.store(t, seed); last != keptBlocks {
			t.Errorf("with a faulty data drive, %d of %d blocks were stored at the end of the fault\n%s", last, keptBlocks, n.log)
		}
	}
	t.Logf("during the fault: %d chains of %d blocks offered, %d blocks stored, %d blocks hit", seed-before, keptBlocks, stored, hits)
	c.devices[c.faulty].load(t, c.linear(c.faulty))

	if c.fault.errors {
		s.close(t)
		n.kill(t)
		for i, dir := range c.mounts {
			unmount(t, dir)
			if err := c.systems[i].tryMount(c.devices[i].path, dir); err != nil {
				t.Fatal(err)
			}
		}
		n = v.start(t, c.binary)
		s = c.connect(t, n)
	} else {
		s.recovers(t, n)
	}
	after := 0
	for seed := range before {
		after += s.load(t, seed)
	}
	if after != before*keptBlocks && !c.fault.reads {
		t.Errorf("%d of %d blocks stored before the fault are hits after it\n%s", after, before*keptBlocks, n.log)
	}
	if got := s.store(t, 5000); got != keptBlocks {
		t.Errorf("after the fault %d of %d new blocks are stored\n%s", got, keptBlocks, n.log)
	}
	s.close(t)
}

// engine is a client whose calls have the deadline callTime.
type engine struct {
	*space
	weights *space // the namespace whose epoch the test bumps
}

func (c *driveCase) connect(t *testing.T, n *node) *engine {
	t.Helper()
	s, err := openSpace(n.listen, "model", 0)
	if err != nil {
		t.Fatal(err)
	}
	w, err := openSpace(n.listen, "weights", 0)
	if err != nil {
		t.Fatal(err)
	}
	return &engine{s, w}
}

func (e *engine) close(t *testing.T) {
	for _, s := range []*space{e.space, e.weights} {
		if err := s.close(); err != nil {
			t.Errorf("close the client: %v", err)
		}
	}
}

// store writes a chain and returns the number of its blocks that are stored. The call may fail only by its deadline.
func (e *engine) store(t *testing.T, seed int) int {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	got, err := e.put(ctx, seed, keptBlocks)
	if err != nil && !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("store chain %d: %v", seed, err)
	}
	return got
}

// load reads a chain, compares the blocks that the node delivers, and returns their number. The call may fail only by its
// deadline.
func (e *engine) load(t *testing.T, seed int) int {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	ids := cutChain(e.ns, seed)
	clear(e.mem.Bytes())
	res, err := e.space.store.Read(ctx, client.ReadRequest{Namespace: e.ns, IDs: ids, Into: e.mem})
	if err != nil && !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("load chain %d: %v", seed, err)
	}
	size := cutGeometry.BlockBytes()
	want := make([]byte, size)
	for i := range res.Blocks {
		epochContent(ids[i], e.ns.Epoch, want)
		if !bytes.Equal(e.mem.Bytes()[int64(i)*size:][:size], want) {
			t.Errorf("WRONG BYTES in block %d of chain %d", i, seed)
		}
	}
	return res.Blocks
}

func (e *engine) bump(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	if _, err := e.admin.BumpEpoch(ctx, &pb.BumpEpochRequest{Name: e.weights.ns.Name}); err != nil {
		t.Errorf("bump the epoch while one of two drives is faulty: %v", err)
	}
}

// spread requires that both volumes hold blocks: a fault of an empty volume would test nothing.
func (e *engine) spread(t *testing.T) {
	t.Helper()
	for _, v := range e.status(t).Volumes {
		if v.UsedBytes == 0 {
			t.Errorf("volume %s holds nothing", v.Path)
		}
	}
}

func (e *engine) status(t *testing.T) *pb.StatusResponse {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	status, err := e.admin.Status(ctx, &pb.StatusRequest{})
	if err != nil {
		t.Fatalf("status: %v", err)
	}
	return status
}

// recovers writes blocks until every volume is ok again, without a restart of the node.
func (e *engine) recovers(t *testing.T, n *node) {
	t.Helper()
	deadline, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	for seed := 6000; ; seed++ {
		e.store(t, seed)
		var states []string
		for _, v := range e.status(t).Volumes {
			if v.State != "ok" {
				states = append(states, fmt.Sprintf("%s is %s: %s", v.Path, v.State, v.StateReason))
			}
		}
		if len(states) == 0 || t.Failed() {
			return
		}
		if deadline.Err() != nil {
			t.Fatalf("the fault has ended, but %s\n%s", strings.Join(states, "; "), n.log)
		}
	}
}

// TestDiscards: when the node frees segments on a file system mounted with discard, the drive gets discards for their
// space.
func TestDiscards(t *testing.T) {
	drives := labDrives(t, 2)
	binary := buildBinary(t)
	for i, fs := range []fileSystem{ext4, xfs} {
		t.Run(fs.name, func(t *testing.T) {
			t.Parallel()
			device := mapDevice(t, "discards-"+fs.name, fmt.Sprintf("0 %d linear %s %d", driveSlice/sectorBytes, drives[1], int64(10+i)*driveSlice/sectorBytes))
			fs.format(t, device.path)
			mount := filepath.Join(t.TempDir(), "mount")
			fs.mount(t, device.path, mount)
			v := cutVolume([]string{mount}, "sync")
			v.capacity = "96MiB"
			n := v.start(t, binary)
			s := (&driveCase{}).connect(t, n)
			for seed := range 220 {
				s.store(t, seed)
			}
			s.close(t)
			n.kill(t)
			// Count discards from here on: mkfs has discarded the whole device, and the index removes files too.
			before, large := discarded(t, device), segmentBytes(t, mount)
			const small = 16 << 20
			v.capacity = strconv.Itoa(small)
			n = v.start(t, binary)
			look := time.NewTicker(100 * time.Millisecond)
			defer look.Stop()
			for began := time.Now(); segmentBytes(t, mount) > small && time.Since(began) < 4*time.Minute; {
				<-look.C
			}
			freed := large - segmentBytes(t, mount)
			n.kill(t)
			// A file system issues discards in the background once its journal has been committed. ext4 drops the discards
			// that it has not issued when it is unmounted, so wait for them here.
			var got int64
			for began := time.Now(); got < freed && time.Since(began) < 2*time.Minute; <-look.C {
				unix.Sync()
				got = discarded(t, device) - before
			}
			t.Logf("%s: segments of %d bytes freed, %d bytes discarded", fs.name, freed, got)
			if freed < 4<<20 || got < freed {
				t.Errorf("the node freed segments of %d bytes; the drive got discards of %d bytes", freed, got)
			}
		})
	}
}

// segmentBytes returns the space that the segments of the volume on a file system occupy.
func segmentBytes(t *testing.T, mount string) (sum int64) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dataDirs([]string{mount})[0], "segment-*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		var st syscall.Stat_t
		if err := syscall.Stat(f, &st); err == nil {
			sum += st.Blocks * sectorBytes
		} else if !errors.Is(err, syscall.ENOENT) { // the node may remove a segment after Glob
			t.Fatal(err)
		}
	}
	return sum
}

// discarded returns the number of discarded bytes of the device (Linux, Documentation/block/stat.rst).
func discarded(t *testing.T, m mapped) int64 {
	t.Helper()
	var st syscall.Stat_t
	if err := syscall.Stat(m.path, &st); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(fmt.Sprintf("/sys/dev/block/%d:%d/stat", unix.Major(st.Rdev), unix.Minor(st.Rdev)))
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(string(text))
	const discardSectors = 13
	if len(fields) <= discardSectors {
		t.Fatalf("%s: %q has no discards", m.path, text)
	}
	n, err := strconv.ParseInt(fields[discardSectors], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n * sectorBytes
}
