package blockiotest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"

	"github.com/penstock-kv/penstock/io/blockio"
)

var doCases = []testCase{
	{"an empty batch is done", func(b *rig) { b.do(b.open()) }},
	{"misaligned requests are refused before anything is submitted", func(b *rig) {
		d := b.open()
		f := b.create(d, "a", 8)
		buf := b.buffer(4)
		for _, r := range []blockio.Request{
			{Op: blockio.Write, File: f, Offset: 512, Bufs: [][]byte{buf}},
			{Op: blockio.Write, File: f, Offset: -blockio.Align, Bufs: [][]byte{buf}},
			{Op: blockio.Write, File: f, Bufs: [][]byte{buf[:512]}},
			{Op: blockio.Write, File: f, Bufs: [][]byte{buf[512 : 512+blockio.Align]}},
			{Op: blockio.Write, File: f, Bufs: [][]byte{buf[:blockio.Align], {}}},
		} {
			b.refused(d, f, r, blockio.ErrAlign)
		}
	}},
	{"malformed requests are refused before anything is submitted", func(b *rig) {
		d := b.open()
		f := b.create(d, "a", 8)
		other := b.create(b.open(), "b", 8)
		page := b.buffer(1)
		many := make([][]byte, blockio.MaxVecs+1)
		for i := range many {
			many[i] = page
		}
		for _, r := range []blockio.Request{
			{File: f, Bufs: [][]byte{page}},
			{Op: 99, File: f, Bufs: [][]byte{page}},
			{Op: blockio.Write, Bufs: [][]byte{page}},
			{Op: blockio.Write, File: f},
			{Op: blockio.Write, File: f, Bufs: many},
			{Op: blockio.Write, File: other, Bufs: [][]byte{page}},
		} {
			b.refused(d, f, r, blockio.ErrRequest)
		}
	}},
	{"requests beyond the end are refused before anything is submitted", func(b *rig) {
		d := b.open()
		f := b.create(d, "a", 8)
		for _, at := range []int64{7, 8, 9, 1 << 40} {
			b.refused(d, f, blockio.Request{Op: blockio.Write, File: f, Offset: at * blockio.Align, Bufs: [][]byte{b.buffer(2)}}, blockio.ErrRange)
		}
		b.write(d, f, 6, b.filled(2, 1))
	}},
	{"a batch has at most MaxBatch requests", func(b *rig) {
		d := b.open()
		f := b.create(d, "a", blockio.MaxBatch+1)
		data := b.filled(blockio.MaxBatch+1, 1)
		batch := pages(blockio.Write, f, data)
		b.wantErr(blockio.ErrRequest, "do", d.Do(b.Context(), batch))
		b.expect(d, f, 0, make([]byte, len(data)))
		b.do(d, batch[:blockio.MaxBatch]...)
		b.expect(d, f, 0, data[:blockio.MaxBatch*blockio.Align])
	}},
	{"a batch reads and writes several files", func(b *rig) {
		d := b.open()
		f, g := b.create(d, "f", 16), b.create(d, "g", 16)
		was, want := b.filled(16, 1), b.filled(16, 2)
		b.write(d, f, 0, was)
		got := b.buffer(16)
		b.do(d, append(pages(blockio.Read, f, got), pages(blockio.Write, g, want)...)...)
		b.same(got, was)
		b.expect(d, g, 0, want)
	}},
	{"outcomes of an earlier use of the batch are cleared", func(b *rig) {
		d := b.open()
		f := b.create(d, "a", 1)
		batch := []blockio.Request{{Op: blockio.Write, File: f, Bufs: [][]byte{b.filled(1, 1)}, Err: errors.New("stale")}}
		b.do(d, batch...)
	}},
	{"one request fills many buffers in turn", func(b *rig) {
		d := b.open()
		f := b.create(d, "a", 4*64)
		data := b.filled(4*64, 1)
		var in, out [][]byte
		got := b.buffer(4 * 64)
		for i := range 64 {
			// The buffers have 1 to 7 pages, 256 pages in total.
			in = append(in, data[off(i):off(i+1)])
			out = append(out, got[off(i):off(i+1)])
		}
		b.write(d, f, 0, in...)
		b.read(d, f, 0, out...)
		b.same(got, data)
		b.expect(d, f, 0, data)
	}},
	{"one request takes MaxVecs buffers", func(b *rig) {
		d := b.open()
		f := b.create(d, "a", blockio.MaxVecs)
		data, got := b.filled(blockio.MaxVecs, 1), b.buffer(blockio.MaxVecs)
		b.write(d, f, 0, split(data)...)
		b.read(d, f, 0, split(got)...)
		b.same(got, data)
	}},
	{"large transfers are whole", func(b *rig) {
		d := b.open()
		f := b.create(d, "a", 4096)
		data := b.filled(4096, 1)
		b.write(d, f, 0, data)
		b.expect(d, f, 0, data)
	}},
	{"concurrent batches do not mix", func(b *rig) {
		d := b.open()
		f := b.create(d, "a", 8*64)
		var wg sync.WaitGroup
		for w := range 8 {
			data, got := b.buffer(64), b.buffer(64)
			wg.Go(func() { b.churn(d, f, w, data, got) })
		}
		wg.Wait()
	}},
	{"a done context is refused before anything is submitted", func(b *rig) {
		d := b.open()
		f := b.create(d, "a", 1)
		ctx, cancel := context.WithCancel(b.Context())
		cancel()
		batch := []blockio.Request{{Op: blockio.Write, File: f, Bufs: [][]byte{b.filled(1, 1)}}}
		b.wantErr(context.Canceled, "do", d.Do(ctx, batch))
		b.wantErr(context.Canceled, "sync", d.Sync(ctx))
		b.expect(d, f, 0, make([]byte, blockio.Align))
	}},
	{"an admitted batch completes although its context ends", func(b *rig) {
		d := b.open()
		f := b.create(d, "a", 512)
		data := b.filled(512, 1)
		for range 20 {
			ctx, cancel := context.WithCancel(b.Context())
			batch := pages(blockio.Write, f, data)
			var wg sync.WaitGroup
			wg.Go(cancel)
			err := d.Do(ctx, batch)
			wg.Wait()
			if err == nil {
				b.outcomes(batch)
				b.expect(d, f, 0, data)
			} else {
				b.wantErr(context.Canceled, "do", err)
			}
		}
	}},
	{"stats count requests, bytes and syncs", func(b *rig) {
		d := b.open()
		f := b.create(d, "a", 8)
		b.do(d, pages(blockio.Write, f, b.filled(8, 1))...)
		b.read(d, f, 2, b.buffer(3))
		b.sync(d, f)
		s := d.Stats()
		if s.WriteRequests != 8 || s.WriteBytes != 8*blockio.Align || s.ReadRequests != 1 || s.ReadBytes != 3*blockio.Align || s.Syncs != 1 {
			b.Fatalf("stats after 8 writes of a page, a read of 3 and a sync: %+v", s)
		}
		if s.ReadFailures != 0 || s.WriteFailures != 0 || s.SyncFailures != 0 || s.InFlightBytes != 0 {
			b.Fatalf("stats of an idle device that never failed: %+v", s)
		}
	}},
}

// refused checks that a batch of two requests, a valid one and r, is refused, and that neither
// request is performed.
func (b *rig) refused(d blockio.Device, f blockio.File, r blockio.Request, want error) {
	b.Helper()
	good := blockio.Request{Op: blockio.Write, File: f, Bufs: [][]byte{b.filled(1, 1)}}
	batch := []blockio.Request{good, r}
	b.wantErr(want, fmt.Sprintf("do %v at %d with %d buffers", r.Op, r.Offset, len(r.Bufs)), d.Do(b.Context(), batch))
	for i := range batch {
		if batch[i].Err != nil {
			b.Fatalf("request %d of the refused batch has the outcome %v", i, batch[i].Err)
		}
	}
	b.expect(d, f, 0, make([]byte, f.Size()))
}

func (b *rig) outcomes(batch []blockio.Request) {
	b.Helper()
	for i := range batch {
		if batch[i].Err != nil {
			b.Fatalf("request %d: %v", i, batch[i].Err)
		}
	}
}

// churn writes and reads back the 64 pages of one worker, in batches of random requests.
func (b *rig) churn(d blockio.Device, f blockio.File, worker int, data, got []byte) {
	rng := rand.New(rand.NewPCG(uint64(worker), 0))
	base := int64(worker * len(data))
	for round := range 20 {
		fill(data, uint64(worker*1000+round))
		if !b.cutAndDo(d, f, blockio.Write, base, data, rng) || !b.cutAndDo(d, f, blockio.Read, base, got, rng) {
			return
		}
		if string(got) != string(data) {
			b.Errorf("worker %d, round %d: the bytes that were read differ from the written bytes", worker, round)
			return
		}
	}
}

func (b *rig) cutAndDo(d blockio.Device, f blockio.File, op blockio.Op, base int64, buf []byte, rng *rand.Rand) bool {
	var batch []blockio.Request
	for at := 0; at < len(buf); {
		n := min(len(buf)-at, (1+rng.IntN(8))*blockio.Align)
		batch = append(batch, blockio.Request{Op: op, File: f, Offset: base + int64(at), Bufs: split(buf[at : at+n])})
		at += n
	}
	return b.doneOrClosed(d, batch)
}

// pages returns one request per page of buf, for the file's first pages.
func pages(op blockio.Op, f blockio.File, buf []byte) []blockio.Request {
	var batch []blockio.Request
	for i, p := range split(buf) {
		batch = append(batch, blockio.Request{Op: op, File: f, Offset: int64(i) * blockio.Align, Bufs: [][]byte{p}})
	}
	return batch
}

// split cuts buf into pages.
func split(buf []byte) [][]byte {
	out := make([][]byte, len(buf)/blockio.Align)
	for i := range out {
		out[i] = buf[i*blockio.Align : (i+1)*blockio.Align]
	}
	return out
}

// off returns the offset of buffer i when 256 pages are divided into 64 buffers. Every four buffers
// have 1, 7, 2 and 6 pages, 16 in total.
func off(i int) int {
	within := [...]int{0, 1, 8, 10}
	return (i/4*16 + within[i%4]) * blockio.Align
}
