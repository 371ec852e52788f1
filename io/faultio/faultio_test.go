package faultio_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/blockiotest"
	"github.com/penstock-kv/penstock/io/faultio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/io/posixio"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// TestConformance: without rules, or with rules that never apply, nothing changes.
func TestConformance(t *testing.T) {
	testkit.Long(t, "the whole suite of blockio")
	for name, rules := range map[string]*faultio.Rules{
		"no rules":    nil,
		"never":       faultio.MustParse(`(Err EIO (Count 0)) (Torn (Prob 0 1)) (Flip (File "no such file"))`),
		"only delays": faultio.MustParse(`(Delay 1us (Prob 0.1 1))`),
	} {
		t.Run(name, func(t *testing.T) {
			blockiotest.Run(t, func(*testing.T) blockiotest.Volume {
				d := memio.New(memio.Options{CapacityBytes: 1 << 30})
				return blockiotest.Volume{Open: func() (blockio.Device, error) { return faultio.Wrap(d.Reopen(), rules), nil }}
			})
		})
	}
}

// script is the state of one transcript.
type script struct {
	t     *testing.T
	inner *memio.Device
	dev   *faultio.Device
	files map[string]blockio.File
	buf   []byte
}

// TestTranscripts runs testdata/*.td. A page is written and shown as eight letters, one per sector.
func TestTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		inner := memio.New(memio.Options{})
		s := &script{t: t, inner: inner, dev: faultio.Wrap(inner, nil), files: map[string]blockio.File{}, buf: testkit.AlignedBuffer(t, 16*blockio.Align)}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			s.t = t
			return s.run(d)
		})
	})
}

func (s *script) run(d *datadriven.TestData) string {
	switch d.Cmd {
	case "parse":
		rules, err := faultio.Parse(d.Input)
		if err != nil {
			return err.Error() + "\n"
		}
		return rules.String()
	case "rules":
		s.dev.SetRules(faultio.MustParse(d.Input))
		return ""
	case "call":
		var out strings.Builder
		for line := range strings.Lines(d.Input) {
			line = strings.TrimSpace(line)
			fmt.Fprintf(&out, "%s: %s\n", line, s.call(strings.Fields(line)))
		}
		return out.String()
	case "pending":
		return s.pending()
	}
	d.Fatalf(s.t, "unknown command %s", d.Cmd)
	return ""
}

func (s *script) pending() string {
	var out strings.Builder
	for _, i := range s.dev.Counter().Pending() {
		fmt.Fprintln(&out, i)
		s.dev.Counter().Repaired(i.File, i.Offset, max(i.Bytes, 1))
	}
	return out.String()
}

// call makes one call: "create a 2", "write a 0 xxxxxxxx", "read a 0 1",
// "sync a", "open a", "remove a".
func (s *script) call(words []string) string {
	var err error
	shown := "ok"
	name := words[1]
	switch words[0] {
	case "create":
		var pages int64
		s.scan(words[2], &pages)
		s.files[name], err = s.dev.Create(name, pages*blockio.Align)
	case "open":
		_, err = s.dev.Open(name)
	case "close":
		err = s.files[name].Close()
	case "remove":
		err = s.dev.Remove(name)
	case "sync":
		err = s.dev.Sync(s.t.Context(), s.files[name])
	case "write":
		err = s.do(blockio.Write, name, words[2], s.page(words[3:]))
	case "read":
		var pages int
		s.scan(words[3], &pages)
		buf := s.buf[:pages*blockio.Align]
		if err = s.do(blockio.Read, name, words[2], buf); err == nil {
			shown = show(buf)
		}
	}
	if err != nil {
		if s.dev.Counter().Surfaced(err) > 0 {
			return "FAULT " + errors.Unwrap(err).Error()
		}
		return err.Error()
	}
	return shown
}

func (s *script) scan(word string, to any) {
	if _, err := fmt.Sscan(word, to); err != nil {
		s.t.Fatalf("%q: %v", word, err)
	}
}

func (s *script) do(op blockio.Op, name, page string, buf []byte) error {
	var at int64
	s.scan(page, &at)
	batch := []blockio.Request{{Op: op, File: s.files[name], Offset: at * blockio.Align, Bufs: [][]byte{buf}}}
	if err := s.dev.Do(s.t.Context(), batch); err != nil {
		return err
	}
	return batch[0].Err
}

func (s *script) page(words []string) []byte {
	letters := strings.Join(words, "")
	buf := s.buf[:len(letters)*512]
	for i := range buf {
		buf[i] = letters[i/512]
	}
	return buf
}

// show prints one letter per sector: '.' for zeroes, '!' for a sector with different bytes.
func show(buf []byte) string {
	var out strings.Builder
	for at := 0; at < len(buf); at += 512 {
		if at > 0 && at%blockio.Align == 0 {
			out.WriteByte(' ')
		}
		c := buf[at]
		switch {
		case !bytes.Equal(buf[at:at+512], bytes.Repeat([]byte{c}, 512)):
			c = '!'
		case c == 0:
			c = '.'
		}
		out.WriteByte(c)
	}
	return out.String()
}

// TestDelayTakesTime measures a Delay on a virtual clock.
func TestDelayTakesTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dev := faultio.Wrap(memio.New(memio.Options{}), faultio.MustParse("(Delay 3s Reads) (Delay 1h Creates) (Delay 4s (And Reads (After 1)))"))
		start := time.Now()
		f, err := dev.Create("a", blockio.Align)
		if err != nil || time.Since(start) != time.Hour {
			t.Fatalf("create took %v, %v", time.Since(start), err)
		}
		buf := testkit.AlignedBuffer(t, blockio.Align)
		for _, want := range []time.Duration{3 * time.Second, 7 * time.Second} {
			start = time.Now()
			if err := dev.Do(t.Context(), []blockio.Request{{Op: blockio.Read, File: f, Bufs: [][]byte{buf}}}); err != nil || time.Since(start) != want {
				t.Fatalf("read took %v, want %v, %v", time.Since(start), want, err)
			}
		}
		if n := dev.Counter().Count(faultio.Delay); n != 4 || len(dev.Counter().Pending()) != 0 {
			t.Fatalf("%d delays, pending %v", n, dev.Counter().Pending())
		}
	})
}

// TestStallUntilRulesChange: calls wait until the rules are replaced, and only the calls to which
// the rule applies.
func TestStallUntilRulesChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dev := faultio.Wrap(memio.New(memio.Options{}), nil)
		f, err := dev.Create("a", blockio.Align)
		if err != nil {
			t.Fatal(err)
		}
		dev.SetRules(faultio.MustParse("(Stall (Or Writes Syncs)) (Err EIO Syncs)"))
		buf, other := testkit.AlignedBuffer(t, blockio.Align), testkit.AlignedBuffer(t, blockio.Align)
		start := time.Now()
		var write, syncTook time.Duration
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := transfer(t, dev, f, blockio.Write, buf); err != nil {
				t.Errorf("write: %v", err)
			}
			write = time.Since(start)
		})
		wg.Go(func() {
			if err := dev.Sync(t.Context(), f); !errors.Is(err, syscall.EIO) || dev.Counter().Surfaced(err) != 1 {
				t.Errorf("sync: %v; want EIO of the later rule", err)
			}
			syncTook = time.Since(start)
		})
		if err := transfer(t, dev, f, blockio.Read, other); err != nil || time.Since(start) != 0 {
			t.Errorf("read: %v after %v", err, time.Since(start))
		}
		<-time.After(time.Minute) // of the bubble's time: the calls must take as long
		dev.SetRules(nil)
		wg.Wait()
		if write != time.Minute || syncTook != time.Minute {
			t.Errorf("the write took %v, the sync %v", write, syncTook)
		}
		if n := dev.Counter().Count(faultio.Stall); n != 2 || len(dev.Counter().Pending()) != 0 {
			t.Errorf("%d stalls, pending %v", n, dev.Counter().Pending())
		}
	})
}

// TestEveryFaultIsAccountedFor: random faults are injected under a writer that checks its reads. A
// fault that did not surface as an error is found by comparing the data.
func TestEveryFaultIsAccountedFor(t *testing.T) {
	dev := faultio.Wrap(memio.New(memio.Options{}), nil)
	const pages = 8
	f, err := dev.Create("a", pages*blockio.Align)
	if err != nil {
		t.Fatal(err)
	}
	dev.SetRules(faultio.MustParse(`
		(Err EIO (Prob 0.05 1))
		(Short (Prob 0.05 2))
		(ENOSPC (And Writes (Prob 0.05 3)))
		(Torn (Prob 0.1 4))
		(Flip (Prob 0.1 5))`))
	data, got := testkit.AlignedBuffer(t, pages*blockio.Align), testkit.AlignedBuffer(t, pages*blockio.Align)
	counter := dev.Counter()
	for round := range 500 {
		for i := range data {
			data[i] = byte(round + i/512)
		}
		for !accounted(t, dev, f, blockio.Write, data) {
		}
		if accounted(t, dev, f, blockio.Read, got) && !bytes.Equal(got, data) {
			if counter.Repaired("a", 0, pages*blockio.Align) == 0 {
				t.Fatalf("round %d: wrong bytes without a fault", round)
			}
		} else if left := counter.Pending(); len(left) > 1 || len(left) == 1 && left[0].Kind == faultio.Read {
			t.Fatalf("round %d: unnoticed %v", round, left)
		}
		counter.Repaired("a", 0, pages*blockio.Align) // the next round overwrites the damage
	}
	for _, a := range []faultio.Action{faultio.Err, faultio.Short, faultio.Torn, faultio.Flip} {
		if counter.Count(a) == 0 {
			t.Errorf("no %v in 500 rounds", a)
		}
	}
	s := dev.Stats()
	if int(s.ReadFailures+s.WriteFailures) != counter.Count(faultio.Err)+counter.Count(faultio.Short) {
		t.Errorf("stats: %+v", s)
	}
}

// accounted makes one transfer. It fails the test on an error that is not an injected fault.
func accounted(t *testing.T, dev *faultio.Device, f blockio.File, op blockio.Op, buf []byte) bool {
	batch := []blockio.Request{{Op: op, File: f, Bufs: [][]byte{buf[:blockio.Align], buf[blockio.Align:]}}}
	err := errors.Join(dev.Do(t.Context(), batch), batch[0].Err)
	if err != nil && dev.Counter().Surfaced(err) != 1 {
		t.Fatalf("an error of other origin: %v", err)
	}
	return err == nil
}

// TestBatch: a fault of one request does not affect the other requests of its batch.
func TestBatch(t *testing.T) {
	dev := faultio.Wrap(memio.New(memio.Options{}), nil)
	f, err := dev.Create("a", 4*blockio.Align)
	if err != nil {
		t.Fatal(err)
	}
	dev.SetRules(faultio.MustParse("(Err EIO (Offset 0 1)) (Short (Offset 4096 4097)) (Flip 7 (Offset 8192 8193))"))
	data := testkit.AlignedBuffer(t, 4*blockio.Align)
	for i := range data {
		data[i] = 'x'
	}
	before := string(data)
	var batch []blockio.Request
	for i := range 4 {
		batch = append(batch, blockio.Request{Op: blockio.Write, File: f, Offset: int64(i) * blockio.Align, Bufs: [][]byte{data[i*blockio.Align : (i+1)*blockio.Align]}})
	}
	if err := dev.Do(t.Context(), batch); err != nil {
		t.Fatal(err)
	}
	if string(data) != before {
		t.Fatal("a fault changed the writer's buffer")
	}
	if !errors.Is(batch[0].Err, syscall.EIO) || !errors.Is(batch[1].Err, io.ErrUnexpectedEOF) || batch[2].Err != nil || batch[3].Err != nil {
		t.Fatalf("outcomes: %v, %v, %v, %v", batch[0].Err, batch[1].Err, batch[2].Err, batch[3].Err)
	}
	dev.SetRules(nil)
	if err := dev.Do(t.Context(), []blockio.Request{{Op: blockio.Read, File: f, Bufs: [][]byte{data}}}); err != nil {
		t.Fatal(err)
	}
	if data[2*blockio.Align] != 'x'^0x80 {
		t.Fatalf("bit 7 of the third page is not flipped: %#x", data[2*blockio.Align])
	}
	if got := show(data); got != "........ ........ !xxxxxxx xxxxxxxx" {
		t.Fatalf("the file holds %s", got)
	}
	if n := dev.Counter().Surfaced(errors.Join(batch[0].Err, fmt.Errorf("wrapped: %w", batch[1].Err), errors.New("other"))); n != 2 {
		t.Fatalf("%d faults surfaced", n)
	}
	if left := dev.Counter().Pending(); len(left) != 1 || left[0].Action != faultio.Flip || left[0].Offset != 2*blockio.Align || left[0].Bytes != 1 {
		t.Fatalf("pending: %v", left)
	}
}

// TestRefusedBatchesAskNoRules: rules are not evaluated for a batch that is not submitted.
func TestRefusedBatchesAskNoRules(t *testing.T) {
	dev := faultio.Wrap(memio.New(memio.Options{}), nil)
	f, err := dev.Create("a", blockio.Align)
	if err != nil {
		t.Fatal(err)
	}
	dev.SetRules(faultio.MustParse("(Err EIO)"))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	buf := testkit.AlignedBuffer(t, 2*blockio.Align)
	if err := dev.Do(ctx, []blockio.Request{{Op: blockio.Read, File: f, Bufs: [][]byte{buf[:blockio.Align]}}}); !errors.Is(err, context.Canceled) {
		t.Errorf("done context: %v", err)
	}
	if err := dev.Do(t.Context(), []blockio.Request{{Op: blockio.Read, File: f, Bufs: [][]byte{buf}}}); !errors.Is(err, blockio.ErrRange) {
		t.Errorf("out of range: %v", err)
	}
	if n := dev.Counter().Injected(); len(n) != 0 {
		t.Errorf("injected %v", n)
	}
}

// TestHookBelowPosixio: the device repairs the faults that the contract requires it to repair, and
// reports the others.
func TestHookBelowPosixio(t *testing.T) {
	hook, counter, err := faultio.Hook(faultio.MustParse(`
		(Short (Prob 0.4 1))
		(Err EINTR (Prob 0.3 2))
		(Err EIO (And Reads (File "bad")))`))
	if err != nil {
		t.Fatal(err)
	}
	dev, err := posixio.Open(t.TempDir(), posixio.Options{Hook: hook})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	const pages = 32
	data, got := testkit.AlignedBuffer(t, pages*blockio.Align), testkit.AlignedBuffer(t, pages*blockio.Align)
	for i := range data {
		data[i] = byte(i / 100)
	}
	good, err := dev.Create("good", pages*blockio.Align)
	if err != nil {
		t.Fatal(err)
	}
	for round := range 20 {
		if err := errors.Join(transfer(t, dev, good, blockio.Write, data), transfer(t, dev, good, blockio.Read, got)); err != nil {
			t.Fatalf("round %d: a repairable fault was not repaired: %v", round, err)
		}
		if !bytes.Equal(got, data) {
			t.Fatalf("round %d: the bytes that were read differ from the written bytes", round)
		}
		clear(got)
	}
	counter.Repaired("good", 0, pages*blockio.Align)
	bad, err := dev.Create("bad", pages*blockio.Align)
	if err != nil {
		t.Fatal(err)
	}
	if err := transfer(t, dev, bad, blockio.Read, got); !errors.Is(err, syscall.EIO) || counter.Surfaced(err) != 1 {
		t.Fatalf("EIO from the kernel became %v", err)
	}
	counter.Repaired("bad", 0, pages*blockio.Align)
	if counter.Count(faultio.Short) == 0 || counter.Count(faultio.Err) < 2 || len(counter.Pending()) != 0 {
		t.Errorf("injected %v, pending %v", counter.Injected(), counter.Pending())
	}
	for _, text := range []string{"(Torn)", "(Flip Writes)", "(Err EIO) (Flip 3)"} {
		if _, _, err := faultio.Hook(faultio.MustParse(text)); err == nil {
			t.Errorf("%s was accepted below a device", text)
		}
	}
}

func transfer(t *testing.T, dev blockio.Device, f blockio.File, op blockio.Op, buf []byte) error {
	batch := []blockio.Request{{Op: op, File: f, Bufs: [][]byte{buf}}}
	if err := dev.Do(t.Context(), batch); err != nil {
		t.Fatal(err)
	}
	return batch[0].Err
}

// FuzzParse: no text causes a panic, and the rules of a valid text print as a text with the same
// rules.
func FuzzParse(f *testing.F) {
	for _, text := range []string{
		"", `(Err EIO (And Reads (File "seg-*") (Offset 0 1048576) (After 3) (Count 2)))`,
		"(ENOSPC)(Short Writes)(Torn Any)(Flip 12)(Flip Reads)(Delay 1h0m0s)(Stall Syncs)", "(Err EIO (Prob 0.25 18446744073709551615))",
		`(Flip (Not (Or Syncs Creates Opens Removes)))`, "((", `(Err "EIO`, "(Prob)", `(Torn (File "[a"))`, "(Flip -1)",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		rules, err := faultio.Parse(text)
		if err != nil {
			if !strings.HasPrefix(err.Error(), "faultio: at byte ") {
				t.Fatalf("the error %q does not name the place", err)
			}
			return
		}
		again, err := faultio.Parse(rules.String())
		if err != nil || again.String() != rules.String() {
			t.Fatalf("%q prints as %q, which parses as %v, %v", text, rules, again, err)
		}
	})
}
