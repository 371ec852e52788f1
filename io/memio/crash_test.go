package memio_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/memio"
)

const (
	sectorBytes    = 512
	sectorsPerPage = blockio.Align / sectorBytes
	modelPages     = 4
)

// model is the simplest correct description of one volume: for each file, the values that each
// sector may have after a crash, and whether the file must or may exist.
type model struct {
	files map[string]*modelFile
	// mayReturn has the removed files that a crash may restore.
	mayReturn map[string][]*modelFile
}

type modelFile struct {
	settled bool
	present [modelPages * sectorsPerPage]byte
	// possible has every value that a crash may leave, the present value included.
	possible [modelPages * sectorsPerPage]map[byte]bool
}

func newModel() *model {
	return &model{files: map[string]*modelFile{}, mayReturn: map[string][]*modelFile{}}
}

func newModelFile() *modelFile {
	f := &modelFile{}
	f.settle()
	f.settled = false
	return f
}

func (f *modelFile) settle() {
	f.settled = true
	for i := range f.possible {
		f.possible[i] = map[byte]bool{f.present[i]: true}
	}
}

func (f *modelFile) write(page int, fill byte) {
	for i := page * sectorsPerPage; i < (page+1)*sectorsPerPage; i++ {
		f.present[i] = fill
		f.possible[i][fill] = true
	}
}

// admits returns an error if got, the file's sectors after a crash (fewer if it is shorter), cannot
// be a remainder of f.
func (f *modelFile) admits(got []byte) error {
	if f.settled && len(got) != len(f.present) {
		return fmt.Errorf("%d of %d synced sectors are left", len(got), len(f.present))
	}
	for i, v := range got {
		if !f.possible[i][v] {
			return fmt.Errorf("sector %d holds %d, possible are %v", i, v, f.possible[i])
		}
	}
	return nil
}

// survived checks the outcome of one crash; got maps file names to sectors.
func (m *model) survived(got map[string][]byte) error {
	for name, f := range m.files {
		if _, ok := got[name]; f.settled && !ok {
			return fmt.Errorf("%s was synced and is gone", name)
		}
	}
	for name, sectors := range got {
		candidates := m.mayReturn[name]
		if f := m.files[name]; f != nil && f.settled {
			candidates = []*modelFile{f}
		} else if f != nil {
			candidates = append(candidates, f)
		}
		if err := anyAdmits(candidates, sectors); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

func anyAdmits(candidates []*modelFile, sectors []byte) error {
	err := errors.New("it was removed for good, or never there")
	for _, f := range candidates {
		if err = f.admits(sectors); err == nil {
			return nil
		}
	}
	return err
}

// driver applies the same steps to a Device and to the model.
type driver struct {
	*testing.T
	dev   *memio.Device
	model *model
	open  map[string]blockio.File
	buf   []byte
}

func newDriver(t *testing.T, dev *memio.Device) *driver {
	return &driver{T: t, dev: dev, model: newModel(), open: map[string]blockio.File{}, buf: testkit.AlignedBuffer(t, modelPages*blockio.Align)}
}

// step makes one random mutation. A mutation during which the power fails may have happened or not.
func (d *driver) step(rng *rand.Rand) {
	name := string(rune('a' + rng.IntN(3)))
	f := d.open[name]
	switch {
	case f == nil:
		d.create(name)
	case rng.IntN(12) == 0:
		d.remove(name)
	case rng.IntN(5) == 0:
		d.sync(name)
	default:
		d.write(name, rng.IntN(modelPages), byte(rng.IntN(5)))
	}
}

func (d *driver) create(name string) {
	f, err := d.dev.Create(name, modelPages*blockio.Align)
	d.model.files[name] = newModelFile()
	d.check(err)
	if err == nil {
		d.open[name] = f
	}
}

func (d *driver) remove(name string) {
	if err := d.open[name].Close(); err != nil {
		d.Fatal(err)
	}
	delete(d.open, name)
	err := d.dev.Remove(name)
	d.model.mayReturn[name] = append(d.model.mayReturn[name], d.model.files[name])
	delete(d.model.files, name)
	d.check(err)
}

func (d *driver) sync(name string) {
	err := d.dev.Sync(context.Background(), d.open[name])
	d.check(err)
	if err == nil {
		d.model.files[name].settle()
		clear(d.model.mayReturn)
	}
}

func (d *driver) write(name string, page int, fill byte) {
	b := d.buf[:blockio.Align]
	for i := range b {
		b[i] = fill
	}
	batch := []blockio.Request{{Op: blockio.Write, File: d.open[name], Offset: int64(page) * blockio.Align, Bufs: [][]byte{b}}}
	err := d.dev.Do(context.Background(), batch)
	if err == nil {
		err = batch[0].Err
	}
	d.model.files[name].write(page, fill)
	d.check(err)
}

func (d *driver) check(err error) {
	if err != nil && !errors.Is(err, memio.ErrPowerLost) {
		d.Fatal(err)
	}
}

// sectors reads a whole volume: one byte per sector, all of whose bytes must be equal.
func (d *driver) sectors(dev *memio.Device) map[string][]byte {
	out := map[string][]byte{}
	names, err := dev.List()
	if err != nil {
		d.Fatal(err)
	}
	for _, name := range names {
		f, err := dev.Open(name)
		if err != nil {
			d.Fatal(err)
		}
		out[name] = d.fileSectors(dev, f)
	}
	return out
}

func (d *driver) fileSectors(dev *memio.Device, f blockio.File) []byte {
	out := []byte{}
	if f.Size() == 0 {
		return out
	}
	buf := d.buf[:f.Size()]
	batch := []blockio.Request{{Op: blockio.Read, File: f, Bufs: [][]byte{buf}}}
	if err := dev.Do(context.Background(), batch); err != nil || batch[0].Err != nil {
		d.Fatal(err, batch[0].Err)
	}
	for at := 0; at < len(buf); at += sectorBytes {
		for _, b := range buf[at : at+sectorBytes] {
			if b != buf[at] {
				d.Fatalf("%s: the sector at %d is torn inside", f.Name(), at)
			}
		}
		out = append(out, buf[at])
	}
	return out
}

func runCrash(t *testing.T, seed uint64, steps int) {
	rng := rand.New(rand.NewPCG(seed, 2))
	d := newDriver(t, memio.New(memio.Options{Seed: seed}))
	if rng.IntN(2) == 0 {
		d.dev.PowerOffAfter(rng.Int64N(int64(steps)))
	}
	for i := 0; i < steps && !d.off(); i++ {
		d.step(rng)
	}
	for c := range uint64(3) {
		left := d.dev.Clone().Crash(seed + c)
		got := d.sectors(left)
		if err := d.model.survived(got); err != nil {
			t.Fatalf("seed %d, crash %d: %v", seed, c, err)
		}
		again := d.sectors(left.Crash(99))
		if fmt.Sprint(again) != fmt.Sprint(got) {
			t.Fatalf("seed %d: a second crash without a write between changed\n%v to\n%v", seed, got, again)
		}
	}
}

func (d *driver) off() bool {
	_, err := d.dev.List()
	return errors.Is(err, memio.ErrPowerLost)
}

// TestCrashModel tries ten thousand crashes of short random histories.
func TestCrashModel(t *testing.T) {
	testkit.Long(t, "many random crashes")
	for seed := range uint64(3400) {
		runCrash(t, seed, 30)
	}
}

func FuzzCrash(f *testing.F) {
	f.Add(uint64(1), uint8(10))
	f.Add(uint64(2), uint8(200))
	f.Fuzz(func(t *testing.T, seed uint64, steps uint8) { runCrash(t, seed, int(steps)+1) })
}

// TestCrashReachesEveryOutcome: each outcome that the model allows occurs sometimes.
func TestCrashReachesEveryOutcome(t *testing.T) {
	base := newDriver(t, memio.New(memio.Options{}))
	base.create("a")
	base.write("a", 0, 1)
	base.sync("a")
	base.write("a", 0, 2)
	base.write("a", 0, 3)
	base.create("b")
	base.write("b", 1, 4)
	base.remove("a")
	seen := map[string]bool{}
	for seed := range uint64(400) {
		got := base.sectors(base.dev.Clone().Crash(seed))
		seen[outcomeOfA(got)] = true
		seen[outcomeOfB(got)] = true
	}
	for _, want := range []string{"a gone", "a old", "a first", "a last", "a torn", "b gone", "b empty", "b shorter", "b whole, lost", "b whole, kept"} {
		if !seen[want] {
			t.Errorf("in 400 crashes never: %s", want)
		}
	}
}

func outcomeOfA(got map[string][]byte) string {
	a, ok := got["a"]
	if !ok {
		return "a gone"
	}
	for _, v := range a[:sectorsPerPage] {
		if v != a[0] {
			return "a torn"
		}
	}
	return map[byte]string{1: "a old", 2: "a first", 3: "a last"}[a[0]]
}

func outcomeOfB(got map[string][]byte) string {
	b, ok := got["b"]
	switch {
	case !ok:
		return "b gone"
	case len(b) == 0:
		return "b empty"
	case len(b) < modelPages*sectorsPerPage:
		return "b shorter"
	case b[sectorsPerPage] == 4:
		return "b whole, kept"
	}
	return "b whole, lost"
}

// TestPowerOff fails the power at each mutation of one history.
func TestPowerOff(t *testing.T) {
	history := func(dev *memio.Device) *driver {
		d := newDriver(t, dev)
		rng := rand.New(rand.NewPCG(5, 5))
		for range 40 {
			if d.off() {
				break
			}
			d.step(rng)
		}
		return d
	}
	whole := history(memio.New(memio.Options{}))
	n := whole.dev.Mutations()
	if n != 40 {
		t.Fatalf("the history has %d mutations, want 40", n)
	}
	for at := range n {
		dev := memio.New(memio.Options{})
		dev.PowerOffAfter(at)
		d := history(dev)
		if !d.off() {
			t.Fatalf("the power is still on after mutation %d", at)
		}
		if err := d.model.survived(d.sectors(dev.Crash(uint64(at)))); err != nil {
			t.Fatalf("power failed at mutation %d: %v", at, err)
		}
	}
}

// TestPowerOffInBatch fails the power in the middle of a batch: completed requests have no error,
// the others have ErrPowerLost.
func TestPowerOffInBatch(t *testing.T) {
	dev := memio.New(memio.Options{})
	f, err := dev.Create("a", 8*blockio.Align)
	if err != nil {
		t.Fatal(err)
	}
	dev.PowerOffAfter(3)
	buf := testkit.AlignedBuffer(t, 8*blockio.Align)
	var batch []blockio.Request
	for i := range 8 {
		batch = append(batch, blockio.Request{Op: blockio.Write, File: f, Offset: int64(i) * blockio.Align, Bufs: [][]byte{buf[i*blockio.Align : (i+1)*blockio.Align]}})
	}
	if err := dev.Do(t.Context(), batch); err != nil {
		t.Fatal(err)
	}
	done := 0
	for i := range batch {
		if batch[i].Err == nil {
			done++
		} else if !errors.Is(batch[i].Err, memio.ErrPowerLost) {
			t.Fatalf("request %d: %v", i, batch[i].Err)
		}
	}
	if done != 3 {
		t.Fatalf("%d requests succeeded, want 3", done)
	}
	if s := dev.Stats(); s.WriteFailures != 5 {
		t.Fatalf("stats: %+v", s)
	}
}

// TestDeadDevice: after Crash every call on the old device fails, except Close.
func TestDeadDevice(t *testing.T) {
	dev := memio.New(memio.Options{})
	f, err := dev.Create("a", blockio.Align)
	if err != nil {
		t.Fatal(err)
	}
	if err := dev.Lock("dead"); err != nil {
		t.Fatal(err)
	}
	left := dev.Crash(1)
	buf := testkit.AlignedBuffer(t, blockio.Align)
	_, createErr := dev.Create("b", blockio.Align)
	_, openErr := dev.Open("a")
	_, listErr := dev.List()
	_, statErr := dev.Stat()
	for doing, err := range map[string]error{
		"create": createErr, "open": openErr, "list": listErr, "stat": statErr, "sync": dev.Sync(t.Context(), f), "lock": dev.Lock("x"),
		"do": dev.Do(t.Context(), []blockio.Request{{Op: blockio.Read, File: f, Bufs: [][]byte{buf}}}),
	} {
		if !errors.Is(err, memio.ErrPowerLost) {
			t.Errorf("%s: %v", doing, err)
		}
	}
	if err := dev.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
	if err := left.Lock("alive"); err != nil {
		t.Errorf("the dead owner's lock is still held: %v", err)
	}
}

// BenchmarkCrash measures one crash point: a clone of a 1 GiB volume with a thousand synced pages
// and a hundred unsynced ones, and the crash of the clone.
func BenchmarkCrash(b *testing.B) {
	dev := memio.New(memio.Options{})
	f, err := dev.Create("a", 1<<30)
	if err != nil {
		b.Fatal(err)
	}
	buf := testkit.AlignedBuffer(b, blockio.Align)
	buf[0] = 1
	for i := range 1100 {
		batch := []blockio.Request{{Op: blockio.Write, File: f, Offset: int64(i%1000) * blockio.Align, Bufs: [][]byte{buf}}}
		if err := errors.Join(dev.Do(b.Context(), batch), batch[0].Err); err != nil {
			b.Fatal(err)
		}
		if i == 999 {
			if err := dev.Sync(b.Context()); err != nil {
				b.Fatal(err)
			}
		}
	}
	for seed := uint64(0); b.Loop(); seed++ {
		dev.Clone().Crash(seed)
	}
}
