//go:build cgo && linux

package usrbio

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/usrbio/usrbiotest"
)

// FuzzModel compares a device with the simplest correct model of a volume, the bytes of each file
// by name, over random operations and faults that the device must repair.
func FuzzModel(f *testing.F) {
	for seed := range uint64(testkit.Rounds(12, 4)) {
		f.Add(seed, 60)
	}
	f.Fuzz(func(t *testing.T, seed uint64, steps int) {
		w := loaded(t)
		m := &modelRun{T: t, w: w, dir: w.volume(t), rng: rand.New(rand.NewPCG(seed, 0)), content: map[string][]byte{}, files: map[string]blockio.File{}}
		m.reopen()
		for range min(max(steps, 0), 400) {
			m.step()
			if t.Failed() {
				return
			}
		}
		m.reopen()
		for name := range m.content {
			m.compare(name)
		}
		if err := m.d.Close(); err != nil {
			t.Error(err)
		}
	})
}

// modelRun is one run of FuzzModel.
type modelRun struct {
	*testing.T
	w       standIn
	dir     string
	rng     *rand.Rand
	d       blockio.Device
	content map[string][]byte
	// files has the files that are open.
	files map[string]blockio.File
}

const modelPages = 24

// step performs one random operation on a random file.
func (m *modelRun) step() {
	name := fmt.Sprint("f", m.rng.IntN(3))
	_, exists := m.content[name]
	switch op := m.rng.IntN(10); {
	case op == 0:
		m.fault()
	case op == 1 && m.rng.IntN(4) == 0:
		m.reopen()
	case !exists:
		size := (1 + m.rng.IntN(modelPages)) * page
		f, err := m.d.Create(name, int64(size))
		m.check("create", err)
		m.content[name], m.files[name] = make([]byte, size), f
	case op == 2:
		if m.files[name] != nil {
			m.check("close", m.files[name].Close())
			delete(m.files, name)
		}
		m.check("remove", m.d.Remove(name))
		delete(m.content, name)
	case op == 3:
		m.check("sync", m.d.Sync(context.Background()))
	case op < 7:
		m.write(name)
	default:
		m.compare(name)
	}
}

func (m *modelRun) check(what string, err error) {
	m.Helper()
	if err != nil {
		m.Fatalf("%s: %v", what, err)
	}
}

// fault injects a fault that the device repairs, or ends all faults.
func (m *modelRun) fault() {
	m.w.control.SetHoles(m.rng.IntN(2) == 0)
	m.w.control.Set([]usrbiotest.Fault{
		{},
		{Kind: usrbiotest.Short, Count: always, Arg: int64(page + m.rng.IntN(2*page))},
		{Kind: usrbiotest.Short, Count: 5, Arg: int64(m.rng.IntN(page))}, // no whole page
		{Kind: usrbiotest.Errno, Count: 5, Arg: int64(unix.EAGAIN)},
		{Kind: usrbiotest.Full, Count: 5},
		{Kind: usrbiotest.RefusedWait, Count: 5, Arg: int64(unix.EINTR)},
		{Kind: usrbiotest.Slow, Count: 5, Arg: 100},
	}[m.rng.IntN(7)])
}

// reopen closes the device and opens it again.
func (m *modelRun) reopen() {
	if m.d != nil {
		m.check("close", m.d.Close())
	}
	clear(m.files)
	d, err := Open(m.dir, Options{Library: m.w.library, Slots: 1 + m.rng.IntN(4), SlotBytes: (1 + m.rng.IntN(3)) * page})
	m.check("open", err)
	m.d = d
	var want []string
	for name := range m.content {
		want = append(want, name)
	}
	slices.Sort(want)
	if names, err := d.List(); err != nil || !slices.Equal(names, want) {
		m.Fatalf("the files are %v (%v), want %v", names, err, want)
	}
}

func (m *modelRun) open(name string) blockio.File {
	if m.files[name] == nil {
		f, err := m.d.Open(name)
		m.check("open", err)
		m.files[name] = f
	}
	return m.files[name]
}

// batch divides the bytes of buf, at an offset of the file, into random requests with random
// buffers.
func (m *modelRun) batch(op blockio.Op, f blockio.File, offset int, buf []byte) (batch []blockio.Request) {
	for len(buf) > 0 {
		r := blockio.Request{Op: op, File: f, Offset: int64(offset)}
		for range 1 + m.rng.IntN(4) {
			n := min(len(buf), (1+m.rng.IntN(5))*page)
			if n == 0 {
				break
			}
			r.Bufs = append(r.Bufs, buf[:n])
			buf, offset = buf[n:], offset+n
		}
		batch = append(batch, r)
	}
	m.rng.Shuffle(len(batch), func(i, j int) { batch[i], batch[j] = batch[j], batch[i] })
	return batch
}

func (m *modelRun) do(batch []blockio.Request) {
	m.Helper()
	errs := []error{m.d.Do(context.Background(), batch)}
	for _, r := range batch {
		errs = append(errs, r.Err)
	}
	m.check("do", errors.Join(errs...))
}

// write writes random pages.
func (m *modelRun) write(name string) {
	want := m.content[name]
	from := m.rng.IntN(len(want)/page) * page
	to := from + (1+m.rng.IntN((len(want)-from)/page))*page
	buf := testkit.AlignedBuffer(m, to-from)
	for i := range buf {
		buf[i] = byte(m.rng.Uint32())
	}
	copy(want[from:to], buf)
	m.do(m.batch(blockio.Write, m.open(name), from, buf))
}

// compare reads the whole file.
func (m *modelRun) compare(name string) {
	m.Helper()
	want := m.content[name]
	buf := testkit.AlignedBuffer(m, len(want))
	m.do(m.batch(blockio.Read, m.open(name), 0, buf))
	if !bytes.Equal(buf, want) {
		m.Fatalf("the bytes of %s differ", name)
	}
}
