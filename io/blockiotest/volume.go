package blockiotest

import (
	"errors"
	"sync"

	"github.com/penstock-kv/penstock/io/blockio"
)

var volumeCases = []testCase{
	{"synced data is there after reopening", func(b *rig) {
		d := b.open()
		f := b.create(d, "a", 16)
		g := b.create(d, "b", 4)
		data, more := b.filled(16, 1), b.filled(4, 2)
		b.write(d, f, 0, data)
		b.write(d, g, 0, more)
		b.sync(d, f)
		b.sync(d)
		b.closeDevice(d)
		d = b.open()
		b.names(d, "a", "b")
		b.reopened(d, "a", data)
		b.reopened(d, "b", more)
	}},
	{"removed files stay removed after reopening", func(b *rig) {
		d := b.open()
		b.close(b.create(d, "a", 1))
		b.create(d, "b", 1)
		b.sync(d)
		if err := d.Remove("a"); err != nil {
			b.Fatal(err)
		}
		b.sync(d)
		b.closeDevice(d)
		b.names(b.open(), "b")
	}},
	{"sync of many files, of none, concurrently", func(b *rig) {
		d := b.open()
		b.sync(d)
		var files []blockio.File
		for _, name := range []string{"a", "b", "c", "d", "e", "f", "g", "h"} {
			files = append(files, b.create(d, name, 4))
		}
		data := b.filled(4, 1)
		var wg sync.WaitGroup
		for _, f := range files {
			wg.Go(func() {
				if !b.doneOrClosed(d, pages(blockio.Write, f, data)) {
					return
				}
				if err := errors.Join(d.Sync(b.Context(), f), d.Sync(b.Context()), d.Sync(b.Context(), files...)); err != nil {
					b.Errorf("sync: %v", err)
				}
			})
		}
		wg.Wait()
	}},
	{"sync refuses a file of another device", func(b *rig) {
		d, e := b.open(), b.open()
		f := b.create(d, "a", 1)
		b.wantErr(blockio.ErrRequest, "sync", e.Sync(b.Context(), f))
	}},
	{"the lock has one owner, whom others can read", func(b *rig) {
		d, e := b.open(), b.open()
		if err := d.Lock("host penstock-7, pid 42"); err != nil {
			b.Fatalf("lock: %v", err)
		}
		if err := d.Lock("again"); err == nil {
			b.Fatal("a device took its lock twice")
		}
		err := e.Lock("the other")
		var owned *blockio.OwnedError
		if !errors.As(err, &owned) {
			b.Fatalf("second lock: %v, want *OwnedError", err)
		}
		if owned.Owner != "host penstock-7, pid 42" || owned.Volume == "" {
			b.Fatalf("the error of the second lock is %+v", owned)
		}
		b.names(d)
	}},
	{"close releases the lock", func(b *rig) {
		d, e := b.open(), b.open()
		if err := d.Lock("first"); err != nil {
			b.Fatal(err)
		}
		b.closeDevice(d)
		if err := e.Lock("second"); err != nil {
			b.Fatalf("lock after the owner's close: %v", err)
		}
		err := b.open().Lock("third")
		var owned *blockio.OwnedError
		if !errors.As(err, &owned) || owned.Owner != "second" {
			b.Fatalf("third lock: %v", err)
		}
	}},
	{"only one of many lockers wins", func(b *rig) {
		const n = 8
		devices := make([]blockio.Device, n)
		for i := range devices {
			devices[i] = b.open()
		}
		errs := make([]error, n)
		var wg sync.WaitGroup
		for i, d := range devices {
			wg.Go(func() { errs[i] = d.Lock("racer") })
		}
		wg.Wait()
		won := 0
		for _, err := range errs {
			if err == nil {
				won++
			}
		}
		if won != 1 {
			b.Fatalf("%d of %d took the lock: %v", won, n, errs)
		}
	}},
	{"stat and info describe the volume", func(b *rig) {
		d := b.open()
		s, err := d.Stat()
		if err != nil || s.TotalBytes <= 0 || s.FreeBytes < 0 || s.FreeBytes > s.TotalBytes {
			b.Fatalf("stat: %+v, %v", s, err)
		}
		if i := d.Info(); i.Backend == "" || i.Path == "" || i != d.Info() {
			b.Fatalf("info: %+v", d.Info())
		}
	}},
	{"a closed device refuses everything", func(b *rig) {
		d := b.open()
		f := b.create(d, "a", 1)
		b.closeDevice(d)
		b.closeDevice(d)
		b.close(f)
		batch := []blockio.Request{{Op: blockio.Read, File: f, Bufs: [][]byte{b.buffer(1)}}}
		b.wantErr(blockio.ErrClosed, "do", d.Do(b.Context(), batch))
		b.wantErr(blockio.ErrClosed, "do nothing", d.Do(b.Context(), nil))
		b.wantErr(blockio.ErrClosed, "create", second(d.Create("b", blockio.Align)))
		b.wantErr(blockio.ErrClosed, "open", second(d.Open("a")))
		b.wantErr(blockio.ErrClosed, "remove", d.Remove("a"))
		b.wantErr(blockio.ErrClosed, "list", second(d.List()))
		b.wantErr(blockio.ErrClosed, "sync", d.Sync(b.Context()))
		b.wantErr(blockio.ErrClosed, "lock", d.Lock("late"))
		b.wantErr(blockio.ErrClosed, "stat", second(d.Stat()))
		d.Stats()
	}},
	{"close waits for what is in flight", func(b *rig) {
		d := b.open()
		f := b.create(d, "a", 8*128)
		b.sync(d, f)
		started := make(chan struct{}, 8)
		var wg sync.WaitGroup
		for i := range 8 {
			data := b.filled(128, uint64(i))
			wg.Go(func() {
				for round := 0; ; round++ {
					batch := []blockio.Request{{Op: blockio.Write, File: f, Offset: int64(i*128) * blockio.Align, Bufs: [][]byte{data}}}
					if !b.doneOrClosed(d, batch) {
						return
					}
					if round == 0 {
						started <- struct{}{}
					}
				}
			})
		}
		for range 8 {
			<-started
		}
		b.closeDevice(d)
		wg.Wait()
		e := b.open()
		g, err := e.Open("a")
		if err != nil {
			b.Fatal(err)
		}
		for i := range 8 {
			b.expect(e, g, int64(i*128), b.filled(128, uint64(i)))
		}
	}},
	{"concurrent closes all wait", func(b *rig) {
		d := b.open()
		f := b.create(d, "a", 64)
		data := b.filled(64, 1)
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() { b.doneOrClosed(d, pages(blockio.Write, f, data)) })
			wg.Go(func() {
				if err := d.Close(); err != nil {
					b.Errorf("close: %v", err)
				}
			})
		}
		wg.Wait()
	}},
}

func (b *rig) sync(d blockio.Device, files ...blockio.File) {
	b.Helper()
	if err := d.Sync(b.Context(), files...); err != nil {
		b.Fatalf("sync: %v", err)
	}
}

func (b *rig) closeDevice(d blockio.Device) {
	b.Helper()
	if err := d.Close(); err != nil {
		b.Fatalf("close device: %v", err)
	}
}

func (b *rig) reopened(d blockio.Device, name string, want []byte) {
	b.Helper()
	f, err := d.Open(name)
	if err != nil {
		b.Fatalf("open %s: %v", name, err)
	}
	if f.Size() != int64(len(want)) {
		b.Fatalf("%s has %d bytes, want %d", name, f.Size(), len(want))
	}
	b.expect(d, f, 0, want)
}
