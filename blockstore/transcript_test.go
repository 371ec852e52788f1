package blockstore

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
)

// TestTranscripts runs testdata/*.td. A transcript has memory volumes named a, b, c, …. The blocks
// that it puts are recorded as in an index, and adopted at the next open.
func TestTranscripts(t *testing.T) {
	paths, err := filepath.Glob("testdata/*.td")
	if err != nil || len(paths) == 0 {
		t.Fatalf("no transcripts: %v", err)
	}
	for _, path := range paths {
		t.Run(filepath.Base(path), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { runTranscript(t, path) })
		})
	}
}

func runTranscript(t *testing.T, path string) {
	w := &world{devs: make(map[string]*memio.Device), blocks: make(map[string]*block)}
	defer func() {
		if w.store != nil {
			if err := w.store.Close(context.Background()); err != nil {
				t.Errorf("close: %v", err)
			}
		}
		for _, d := range w.devs {
			if err := d.Close(); err != nil {
				t.Errorf("close device: %v", err)
			}
		}
	}()
	datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
		w.t, w.d = t, d
		out := w.run()
		synctest.Wait() // the keepers have done all work of the command
		return out
	})
}

// world is the state of one transcript.
type world struct {
	t      *testing.T
	d      *datadriven.TestData
	devs   map[string]*memio.Device
	store  *Store
	blocks map[string]*block
}

func (w *world) run() string {
	commands := map[string]func() string{
		"volume": w.volume, "open": w.open, "close": w.close, "crash": w.crash,
		"put": w.put, "reserve": w.reserve, "write": w.write, "commit": w.each(func(b *block) error { return w.store.Commit(b.ref) }),
		"abandon": w.each(func(b *block) error { return w.store.Abandon(b.ref) }),
		"free":    w.each(func(b *block) error { return w.store.Free(b.ref) }),
		"pin":     w.each(func(b *block) error { return w.store.Pin(b.ref) }),
		"unpin":   w.each(func(b *block) error { return w.store.Unpin(b.ref) }),
		"forget":  w.each(func(b *block) error { delete(w.blocks, b.name); return nil }),
		"read":    w.read, "sync": w.sync, "flip": w.flip, "copy": w.copyFile, "remove": w.removeFile,
		"stats": func() string { return w.store.Stats().String() },
		"check": w.check, "scan": w.scan, "scrub": w.scrub, "emptiable": w.emptiable,
		"inspect": w.inspect, "catalogue": w.catalogue, "sleep": w.sleep,
	}
	f, ok := commands[w.d.Cmd]
	if !ok {
		w.t.Fatalf("%s: unknown command %q", w.d.Pos, w.d.Cmd)
	}
	return f()
}

// names are the arguments without a value.
func (w *world) names() []string {
	var names []string
	for _, a := range w.d.CmdArgs {
		if len(a.Vals) == 0 {
			names = append(names, a.Key)
		}
	}
	return names
}

func (w *world) intArg(key string, otherwise int64) int64 {
	for _, a := range w.d.CmdArgs {
		if a.Key == key {
			var v int64
			if _, err := fmt.Sscan(a.Vals[0], &v); err != nil {
				w.t.Fatalf("%s: %s=%s: %v", w.d.Pos, key, a.Vals[0], err)
			}
			return v
		}
	}
	return otherwise
}

func (w *world) stringArg(key string) string {
	for _, a := range w.d.CmdArgs {
		if a.Key == key {
			return a.Vals[0]
		}
	}
	return ""
}

// outcome prints an error, or "ok".
func outcome(err error) string {
	if err != nil {
		return err.Error() + "\n"
	}
	return "ok\n"
}

// volume creates an empty memory volume: volume a [capacity=N].
func (w *world) volume() string {
	for _, n := range w.names() {
		w.devs[n] = memio.New(memio.Options{Path: n, CapacityBytes: w.intArg("capacity", 0)})
	}
	return "ok\n"
}

// open opens the store over the named volumes, adopts the recorded blocks, and calls Ready: open a b
// [capacity=N segment=N catalogue=N floor=N stripe=N] [add=1 prewrite=1 raw=1].
func (w *world) open() string {
	opts := Options{
		CapacityBytes: w.intArg("capacity", 0), SegmentBytes: w.intArg("segment", 0), CatalogueBytes: w.intArg("catalogue", 4096),
		FreeFloorBytes: w.intArg("floor", 0), StripeBytes: w.intArg("stripe", 0),
		AddVolumes: w.intArg("add", 0) == 1, Prewrite: w.intArg("prewrite", 0) == 1,
		Identity: "transcript",
	}
	var devs []*memio.Device
	for _, n := range w.names() {
		w.devs[n] = w.devs[n].Reopen()
		devs = append(devs, w.devs[n])
	}
	s, err := open(w.t, opts, devs...)
	if err != nil {
		for _, d := range devs {
			d.Close()
		}
		return outcome(err)
	}
	w.store = s
	if w.intArg("raw", 0) == 1 {
		return "ok\n"
	}
	var out strings.Builder
	for _, b := range w.sorted() {
		if err := s.Adopt(b.ref, b.key.PayloadBytes, b.key.Layers); err != nil {
			fmt.Fprintf(&out, "drop %s: %v\n", b.name, err)
			delete(w.blocks, b.name)
		}
	}
	if err := s.Ready(); err != nil {
		w.t.Fatal(err)
	}
	return out.String() + "ok\n"
}

// sorted returns the blocks by name.
func (w *world) sorted() []*block {
	var all []*block
	for _, b := range w.blocks {
		all = append(all, b)
	}
	slices.SortFunc(all, func(a, b *block) int { return strings.Compare(a.name, b.name) })
	return all
}

func (w *world) close() string {
	err := w.store.Close(w.t.Context())
	w.store = nil
	return outcome(err)
}

// crash fails the power of every volume and ends the store: crash seed=N.
func (w *world) crash() string {
	for n, d := range w.devs {
		w.devs[n] = d.Crash(uint64(w.intArg("seed", 1)))
	}
	if w.store != nil {
		if err := w.store.Close(w.t.Context()); !errors.Is(err, memio.ErrPowerLost) {
			w.t.Fatalf("close without power: %v", err)
		}
		w.store = nil
	}
	return "ok\n"
}

// made returns the named blocks, and creates each that does not exist, with [piece=N layers=N].
func (w *world) made() []*block {
	var all []*block
	for _, n := range w.names() {
		if w.blocks[n] == nil {
			w.blocks[n] = newBlock(n, w.intArg("piece", 12000), int(w.intArg("layers", 3)))
		}
		all = append(all, w.blocks[n])
	}
	return all
}

// put reserves, writes and commits a sequence: put x y z [after=w piece=N layers=N].
func (w *world) put() string {
	blocks := w.made()
	err := put(w.t, w.store, w.blocks[w.stringArg("after")], blocks...)
	for _, b := range blocks {
		if b.ref.Generation == 0 {
			delete(w.blocks, b.name)
		}
	}
	if err != nil {
		return outcome(err)
	}
	return places(blocks)
}

func places(blocks []*block) string {
	var out []string
	for _, b := range blocks {
		out = append(out, b.ref.Extent.String())
	}
	return strings.Join(out, " ") + "\n"
}

func (w *world) reserve() string {
	blocks := w.made()
	refs, err := reserve(w.t.Context(), w.store, w.blocks[w.stringArg("after")], blocks...)
	if err != nil {
		for _, b := range blocks {
			delete(w.blocks, b.name)
		}
		return outcome(err)
	}
	for i, b := range blocks {
		b.ref = refs[i]
		b.fill()
	}
	return places(blocks)
}

func (w *world) write() string {
	var ws []Write
	for _, b := range w.made() {
		ws = append(ws, b.write(w.t))
	}
	err := w.store.Write(w.t.Context(), ws)
	return outcome(err)
}

// each runs f for each named block.
func (w *world) each(f func(b *block) error) func() string {
	return func() string {
		for _, b := range w.made() {
			if err := f(b); err != nil {
				return outcome(err)
			}
		}
		return "ok\n"
	}
}

// read reads and compares each block: read x y [layers=first+count].
func (w *world) read() string {
	var first, count int
	if r := w.stringArg("layers"); r != "" {
		if _, err := fmt.Sscanf(r, "%d+%d", &first, &count); err != nil {
			w.t.Fatalf("layers=%s: %v", r, err)
		}
	}
	var out strings.Builder
	for _, b := range w.made() {
		err := get(w.t, w.store, b, first, count)
		switch {
		case err == nil:
			fmt.Fprintf(&out, "%s: exact\n", b.name)
		case errors.Is(err, ErrStale), errors.Is(err, ErrCorrupt):
			fmt.Fprintf(&out, "%s: miss: %v\n", b.name, err)
		default:
			fmt.Fprintf(&out, "%s: %v\n", b.name, err)
		}
	}
	return out.String()
}

func (w *world) sync() string { return outcome(w.store.Sync(w.t.Context())) }

// flip flips a bit: flip x byte=N in a block's slot, or flip file=NAME of=VOLUME byte=N.
func (w *world) flip() string {
	at := w.intArg("byte", 0)
	if name := w.stringArg("file"); name != "" {
		w.flipAt(w.devs[w.stringArg("of")], name, at)
		return "ok\n"
	}
	for _, b := range w.made() {
		v := w.store.volume(b.ref.Extent)
		g := v.space.segment(b.ref.Extent.Segment())
		w.flipAt(v.dev.Device.(*memio.Device), g.file.Name(), g.header.SlotOffset(b.ref.Extent.Slot())+at)
	}
	return "ok\n"
}

func (w *world) flipAt(d *memio.Device, name string, at int64) {
	d = d.Reopen()
	defer d.Close()
	f, err := d.Open(name)
	if err != nil {
		w.t.Fatal(err)
	}
	page := at / ondisk.Page * ondisk.Page
	buf, err := readPages(w.t.Context(), d, f, page, ondisk.Page)
	if err != nil {
		w.t.Fatal(err)
	}
	buf[at-page] ^= 1
	if err := doOne(w.t.Context(), d, blockio.Request{Op: blockio.Write, File: f, Offset: page, Bufs: [][]byte{buf}}); err != nil {
		w.t.Fatal(err)
	}
}

// copyFile copies a file: copy file=NAME of=VOLUME to=VOLUME [as=NAME].
func (w *world) copyFile() string {
	name, as := w.stringArg("file"), w.stringArg("as")
	if as == "" {
		as = name
	}
	from, to := w.devs[w.stringArg("of")].Reopen(), w.devs[w.stringArg("to")].Reopen()
	defer from.Close()
	defer to.Close()
	f, err := from.Open(name)
	if err != nil {
		w.t.Fatal(err)
	}
	buf, err := readPages(w.t.Context(), from, f, 0, int(f.Size()))
	if err != nil {
		w.t.Fatal(err)
	}
	g, err := to.Create(as, f.Size())
	if err != nil {
		return outcome(err)
	}
	return outcome(doOne(w.t.Context(), to, blockio.Request{Op: blockio.Write, File: g, Bufs: [][]byte{buf}}))
}

func (w *world) removeFile() string {
	d := w.devs[w.stringArg("of")].Reopen()
	defer d.Close()
	return outcome(d.Remove(w.stringArg("file")))
}

// check compares the store with the index.
func (w *world) check() string {
	var out strings.Builder
	for _, f := range w.store.Check(slices.Values(refs(w.blocks))) {
		fmt.Fprintln(&out, f)
	}
	return out.String() + "checked\n"
}

// nameOf returns the name of the block with an id.
func (w *world) nameOf(id kv.BlockID) string {
	for _, b := range w.blocks {
		if b.key.ID == id {
			return b.name
		}
	}
	return "?"
}

// scan prints the headers of all slots, or of the slots of some blocks: scan [NAME…] [verify=1].
func (w *world) scan() string {
	var lines []string
	opts := ScanOptions{Verify: w.intArg("verify", 0) == 1}
	for _, n := range w.names() {
		opts.Slots = append(opts.Slots, w.blocks[n].ref.Extent)
	}
	slices.Sort(opts.Slots)
	st, err := w.store.Scan(w.t.Context(), opts, func(ref kv.Ref, h *ondisk.SlotHeader) error {
		lines = append(lines, fmt.Sprintf("%v %s\n", ref, w.nameOf(h.ID)))
		return nil
	})
	if err != nil {
		return outcome(err)
	}
	slices.Sort(lines)
	return strings.Join(lines, "") + fmt.Sprintf("%+v\n", st)
}

// scrub verifies live slots: scrub [from=N max=N rate=N free=1].
func (w *world) scrub() string {
	var out strings.Builder
	start := time.Now()
	res, err := w.store.Scrub(w.t.Context(), ScrubOptions{
		From: kv.Extent(w.intArg("from", 0)), MaxBytes: w.intArg("max", 0), BytesPerSecond: w.intArg("rate", 0),
		Report: func(ref kv.Ref, err error) {
			fmt.Fprintf(&out, "%v\n", err)
			if w.intArg("free", 0) == 1 {
				out.WriteString("free: " + outcome(w.store.Free(ref)))
			}
		},
	})
	if err != nil {
		return outcome(err)
	}
	return fmt.Sprintf("%s%+v in %v\n", out.String(), res, time.Since(start).Round(time.Second))
}

// emptiable prints the segments that could be emptied, and drains the first.
func (w *world) emptiable() string {
	var out strings.Builder
	for i, e := range w.store.Emptiable(w.intArg("piece", 12000), int(w.intArg("layers", 3))) {
		fmt.Fprintf(&out, "%v to %v: %d bytes in use\n", e.First, e.End, e.UsedBytes)
		if i == 0 {
			w.store.DrainSegment(e.First)
		}
	}
	return out.String()
}

// inspect prints a volume, a segment or a slot: inspect a [segment=N [slot=N]].
func (w *world) inspect() string {
	var out strings.Builder
	d := w.devs[w.names()[0]].Reopen()
	defer d.Close()
	segment, slot := w.intArg("segment", -1), w.intArg("slot", -1)
	var err error
	switch {
	case segment < 0:
		err = InspectVolume(w.t.Context(), d, &out)
	case slot < 0:
		err = InspectSegment(w.t.Context(), d, uint32(segment), &out)
	default:
		err = InspectSlot(w.t.Context(), d, uint32(segment), uint32(slot), nil, &out)
	}
	if err != nil {
		out.WriteString(outcome(err))
	}
	return out.String()
}

// catalogue prints the blob, or sets it: catalogue [set=TEXT size=N].
func (w *world) catalogue() string {
	if n := w.intArg("size", 0); n > 0 {
		return outcome(w.store.SetCatalogue(w.t.Context(), make([]byte, n)))
	}
	if text := w.stringArg("set"); text != "" {
		return outcome(w.store.SetCatalogue(w.t.Context(), []byte(text)))
	}
	return fmt.Sprintf("%q\n", w.store.Catalogue())
}

// sleep advances the bubble's clock: sleep seconds=N.
func (w *world) sleep() string {
	time.Sleep(time.Duration(w.intArg("seconds", 1)) * time.Second)
	return "ok\n"
}
