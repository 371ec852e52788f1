package traffic

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma/copier"
)

// TestVerify: a block that changes in the DE buffer is detected at the hop that the setting names, and
// storage refuses it at every setting. The comparison of one block in a billion does not find it.
func TestVerify(t *testing.T) {
	for name, tc := range map[string]struct {
		verify Verify
		where  string // empty: not detected
		open   func(testing.TB) copier.Copier
	}{
		"every hop":        {VerifyEveryHop, "decode buffer", nil},
		"last hop":         {VerifyLastHop, "decode device", nil},
		"last hop, staged": {VerifyLastHop, "decode buffer", newApart},
		"sampled":          {VerifyOneIn(1 << 30), "", nil},
		"sampled, staged":  {VerifyOneIn(1 << 30), "", newApart},
		"one in one":       {VerifyOneIn(1), "decode device", nil},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.VerifyNone(t)
			s := newShelf()
			var c copier.Copier
			if tc.open != nil {
				c = tc.open(t)
			}
			pe, de := newEngine(t, s, 5, 64, 1<<20), newEngineCopying(t, s, 5, 64, 1<<20, c)
			de.opts.Verify = tc.verify
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			r := newRequest(t, pe, de, 1, 4, 0)
			p, d, _, _ := r.both(ctx, 0)
			r.spoilFirst(ctx, p, d)
			if err := p.Finish(ctx); err != nil && !errors.Is(err, ErrCancelled) {
				t.Errorf("prefill ended with %v", err)
			}
			err := d.Finish(ctx)
			var wrong *BlockError
			switch {
			case tc.where == "" && err != nil:
				t.Errorf("decode ended with %v", err)
			case tc.where != "" && (!errors.As(err, &wrong) || wrong.Block != 0 || wrong.Layer != 0 || wrong.Where != tc.where):
				t.Errorf("decode ended with %v", err)
			}
			if _, stored := s.blocks[blockName(1, 0)]; stored {
				t.Error("storage has the wrong block")
			}
		})
	}
}

// TestVerifyPrefill: a block that changes in the PE buffer is detected in the PE's device memory, unless
// the setting compares one block in a billion.
func TestVerifyPrefill(t *testing.T) {
	for name, tc := range map[string]struct {
		verify Verify
		wrong  bool
	}{
		"every hop": {VerifyEveryHop, true},
		"last hop":  {VerifyLastHop, true},
		"sampled":   {VerifyOneIn(1 << 30), false},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.VerifyNone(t)
			s := newShelf()
			s.put(1, 6)
			s.flip[blockName(1, 3)] = true // in the PE buffer, after storage's bytes were verified
			pe, de := newEngine(t, s, 5, 64, 1<<20), newEngine(t, s, 5, 64, 1<<20)
			pe.opts.Verify = tc.verify
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			r := newRequest(t, pe, de, 1, 8, 6)
			p, d, _, _ := r.both(ctx, 6)
			var err error
			for l := 0; l < 5 && err == nil; l++ {
				if err = p.Layer(ctx, l); err == nil {
					p.Computed(l)
				}
			}
			var wrong *BlockError
			if errors.As(err, &wrong) != tc.wrong || tc.wrong && (wrong.Block != 3 || wrong.Where != "prefill device") {
				t.Errorf("prefill got %v", err)
			}
			p.Cancel()
			d.Cancel()
			if err := errors.Join(p.Finish(ctx), d.Finish(ctx)); err == nil {
				t.Error("both sides ended in order")
			}
		})
	}
}

// spoilFirst computes all layers of a request without a hit, and changes a byte of block 0 in the DE
// buffer after layer 0 has arrived there.
func (r *request) spoilFirst(ctx context.Context, p *Prefill, d *Decode) {
	r.t.Helper()
	for l := range 5 {
		if err := p.Layer(ctx, l); err != nil {
			r.t.Fatal(err)
		}
		if err := r.compute(p, l); err != nil {
			r.t.Fatal(err)
		}
		if l < 4 {
			p.Computed(l)
		}
	}
	// Layer 0 has arrived before layer 4 is sent.
	if err := p.await(ctx, func() bool { return p.sent[0] }); err != nil {
		r.t.Fatal(err)
	}
	d.buf.Bytes()[5] ^= 0x40
	p.Computed(4)
}

// TestVerifyOneIn: about one block in n is compared.
func TestVerifyOneIn(t *testing.T) {
	blocks := make([]uint32, 100_000)
	for _, tc := range []struct {
		verify    Verify
		low, high int
	}{{VerifyEveryHop, 100_000, 100_000}, {VerifyLastHop, 100_000, 100_000}, {VerifyOneIn(10), 9_000, 11_000}} {
		if n := len(tc.verify.sample(blocks)); n < tc.low || n > tc.high {
			t.Errorf("%d: %d of %d blocks are compared; want %d to %d", tc.verify, n, len(blocks), tc.low, tc.high)
		}
	}
	o := Options{Namespace: kv.Namespace{Geometry: geo}, Verify: -1, BufferBytes: 1}
	o.Storage, o.Compute = newAt(newShelf()), newEngine(t, newShelf(), 5, 8, 1<<20).opts.Compute
	if err := o.Validate(); !errors.Is(err, ErrJob) {
		t.Errorf("Verify: -1: %v", err)
	}
}

// BenchmarkVerify: the CPU time of a request of 64 MiB, half of its hit read by either side, for each
// setting. cores/GBps is the CPU time of all threads per 10^9 bytes of the prompt's KV; the difference
// between two rows is the cost of the comparisons. The model takes no time and stores nothing.
func BenchmarkVerify(b *testing.B) {
	const blocks, hit, layers = 64, 63, 8
	for _, bc := range []struct {
		name   string
		verify Verify
	}{{"every-hop", VerifyEveryHop}, {"last-hop", VerifyLastHop}, {"one-in-16", VerifyOneIn(16)}} {
		b.Run(bc.name, func(b *testing.B) {
			s := newShelf()
			s.geo = kv.SingleGroup(layers, 16, 8<<10) // 128 KiB a Layer Block
			s.put(1, hit)
			pe, de := newEngine(b, s, layers, blocks, 160<<20), newEngine(b, s, layers, blocks, 160<<20)
			pe.opts.Verify, de.opts.Verify = bc.verify, bc.verify
			r := newRequest(b, pe, de, 1, blocks, hit)
			for i := range r.pages {
				r.pages[i] = uint32(i)
			}
			if err := r.bare(hit / 2); err != nil { // it touches the buffers' pages
				b.Fatal(err)
			}
			bytes := blocks * s.geo.PieceBytes(0)
			b.SetBytes(bytes)
			before := cpuTime(b)
			for i := 0; b.Loop(); i++ {
				r.name = fmt.Sprint(i)
				if err := r.bare(hit / 2); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric((cpuTime(b)-before).Seconds()*1e9/float64(bytes)/float64(b.N), "cores/GBps")
		})
	}
}

// cpuTime is the CPU time that this process has taken.
func cpuTime(t testing.TB) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
