package blockiotest

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/penstock-kv/penstock/io/blockio"
)

var fileCases = []testCase{
	{"fresh file reads as zeroes", func(b *rig) {
		d := b.open()
		f := b.create(d, "seg-0001", 64)
		if f.Name() != "seg-0001" || f.Size() != 64*blockio.Align {
			b.Fatalf("file is %s of %d bytes", f.Name(), f.Size())
		}
		b.expect(d, f, 0, make([]byte, 64*blockio.Align))
	}},
	{"written pages keep their neighbours", func(b *rig) {
		d := b.open()
		f := b.create(d, "a", 8)
		data := b.filled(3, 1)
		b.write(d, f, 2, data)
		want := make([]byte, 8*blockio.Align)
		copy(want[2*blockio.Align:], data)
		b.expect(d, f, 0, want)
	}},
	{"create takes names and sizes by the rule", func(b *rig) {
		d := b.open()
		for _, name := range []string{"", ".", "..", ".hidden", "a/b", "A", "LOCK", "a b", "ü", "a\x00", strings.Repeat("n", 65)} {
			b.wantErr(blockio.ErrRequest, "create "+name, second(d.Create(name, blockio.Align)))
			b.wantErr(blockio.ErrRequest, "open "+name, second(d.Open(name)))
			b.wantErr(blockio.ErrRequest, "remove "+name, d.Remove(name))
		}
		for _, size := range []int64{-blockio.Align, 0, 1, blockio.Align - 1, blockio.Align + 512} {
			b.wantErr(blockio.ErrAlign, fmt.Sprintf("create of %d bytes", size), second(d.Create("a", size)))
		}
		b.names(d)
		b.create(d, strings.Repeat("n", 64), 1)
		b.create(d, "a-z_0.9", 1)
		b.names(d, "a-z_0.9", strings.Repeat("n", 64))
	}},
	{"create refuses a name that is taken and keeps the file", func(b *rig) {
		d := b.open()
		f := b.create(d, "a", 2)
		data := b.filled(2, 1)
		b.write(d, f, 0, data)
		b.wantErr(blockio.ErrExist, "create a", second(d.Create("a", 4*blockio.Align)))
		b.expect(d, f, 0, data)
	}},
	{"create without space leaves nothing", func(b *rig) {
		d := b.open()
		before, err := d.Stat()
		if err != nil {
			b.Fatal(err)
		}
		// The size exceeds the whole file system and not just the free space, because other
		// processes may free space meanwhile.
		size := (before.TotalBytes + 1<<40) / blockio.Align * blockio.Align
		err = second(d.Create("big", size))
		b.wantErr(blockio.ErrNoSpace, "create big", err)
		b.wantText(err, "big")
		b.names(d)
		b.create(d, "small", 1)
	}},
	{"open finds only what create made", func(b *rig) {
		d := b.open()
		err := second(d.Open("nothing"))
		b.wantErr(blockio.ErrNotExist, "open", err)
		b.wantText(err, "nothing")
		b.wantErr(blockio.ErrNotExist, "remove", d.Remove("nothing"))
	}},
	{"a file may be open several times", func(b *rig) {
		d := b.open()
		f := b.create(d, "a", 2)
		g, err := d.Open("a")
		if err != nil || g.Size() != f.Size() {
			b.Fatalf("second open: %v", err)
		}
		data := b.filled(2, 1)
		b.write(d, f, 0, data)
		b.close(f)
		b.expect(d, g, 0, data)
	}},
	{"remove refuses an open file", func(b *rig) {
		d := b.open()
		f := b.create(d, "a", 1)
		g, err := d.Open("a")
		if err != nil {
			b.Fatal(err)
		}
		b.wantErr(blockio.ErrOpen, "remove", d.Remove("a"))
		b.close(f)
		b.wantErr(blockio.ErrOpen, "remove", d.Remove("a"))
		b.close(g)
		if err := d.Remove("a"); err != nil {
			b.Fatalf("remove: %v", err)
		}
		b.names(d)
	}},
	{"a name can be used again and starts with zeroes", func(b *rig) {
		d := b.open()
		f := b.create(d, "a", 4)
		b.write(d, f, 0, b.filled(4, 1))
		b.close(f)
		if err := d.Remove("a"); err != nil {
			b.Fatal(err)
		}
		f = b.create(d, "a", 2)
		b.expect(d, f, 0, make([]byte, 2*blockio.Align))
	}},
	{"list is sorted", func(b *rig) {
		d := b.open()
		for _, name := range []string{"seg-10", "seg-02", "super", "a", "seg-1"} {
			b.create(d, name, 1)
		}
		b.names(d, "a", "seg-02", "seg-1", "seg-10", "super")
	}},
	{"file close may be called twice and ends its use", func(b *rig) {
		d := b.open()
		f := b.create(d, "a", 1)
		b.close(f)
		b.close(f)
		batch := []blockio.Request{{Op: blockio.Read, File: f, Bufs: [][]byte{b.buffer(1)}}}
		b.wantErr(blockio.ErrClosed, "do", d.Do(b.Context(), batch))
		b.wantErr(blockio.ErrClosed, "sync", d.Sync(b.Context(), f))
	}},
	{"file close waits for its requests", func(b *rig) {
		d := b.open()
		f := b.create(d, "a", 256)
		buf := b.filled(256, 1)
		var wg sync.WaitGroup
		for i := range 8 {
			part := buf[i*32*blockio.Align : (i+1)*32*blockio.Align]
			wg.Go(func() {
				for {
					batch := []blockio.Request{{Op: blockio.Write, File: f, Offset: int64(i) * 32 * blockio.Align, Bufs: [][]byte{part}}}
					if !b.doneOrClosed(d, batch) {
						return
					}
				}
			})
		}
		b.close(f)
		wg.Wait()
	}},
}

// second returns the second result of a call, an error.
func second[T any](_ T, err error) error { return err }

func (b *rig) wantErr(want error, doing string, got error) {
	b.Helper()
	if !errors.Is(got, want) {
		b.Fatalf("%s: got error %v, want one that is %q", doing, got, want)
	}
}

// wantText checks that the text of an error contains text.
func (b *rig) wantText(err error, text string) {
	b.Helper()
	if !strings.Contains(err.Error(), text) {
		b.Fatalf("error %q does not contain %q", err, text)
	}
}

// names checks that List returns the names want.
func (b *rig) names(d blockio.Device, want ...string) {
	b.Helper()
	got, err := d.List()
	if err != nil {
		b.Fatalf("list: %v", err)
	}
	if !slices.Equal(got, want) {
		b.Fatalf("list is %q, want %q", got, want)
	}
}

func (b *rig) close(f blockio.File) {
	b.Helper()
	if err := f.Close(); err != nil {
		b.Fatalf("close %s: %v", f.Name(), err)
	}
}

// doneOrClosed runs a batch that may be refused because of a concurrent Close. It fails the case if
// the batch was admitted and did not complete.
func (b *rig) doneOrClosed(d blockio.Device, batch []blockio.Request) (done bool) {
	err := d.Do(b.Context(), batch)
	if errors.Is(err, blockio.ErrClosed) {
		for i := range batch {
			if batch[i].Err != nil {
				b.Errorf("the batch was refused, but request %d has the outcome %v", i, batch[i].Err)
			}
		}
		return false
	}
	if err != nil {
		b.Errorf("do: %v", err)
		return false
	}
	for i := range batch {
		if batch[i].Err != nil {
			b.Errorf("request %d of an admitted batch: %v", i, batch[i].Err)
			return false
		}
	}
	return true
}
