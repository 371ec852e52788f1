package shm

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
	"github.com/penstock-kv/penstock/rdma/rdmatest"
)

// childEnv makes the test binary the other process. "arena" or "process" selects the location
// of its sources.
const childEnv = "PENSTOCK_SHM_TEST_CHILD"

func TestMain(m *testing.M) {
	if kind := os.Getenv(childEnv); kind != "" {
		if err := runChild(kind); err != nil {
			fmt.Fprintln(os.Stderr, "child:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	testkit.Main(m)
}

// Constants shared by a case and its child.
const (
	slotBytes = 1 << 20
	slots     = 96
	testToken = "a token for two processes"
)

// fill returns the contents of slot i in the source of a flood.
func fill(i int, b []byte) {
	for k := range b {
		b[k] = byte(k>>3) ^ byte(k>>11) ^ byte(i*7+1)
	}
}

// runChild listens, registers memory, and answers messages. A message contains the Desc of the
// parent's memory, to which the child writes its own memory back as one write ('b'), or slot by
// slot with the slot's number as immediate ('f'). It ends when its standard input closes.
func runChild(kind string) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	mem := make([]byte, slots*slotBytes)
	o := Options{Listen: os.Args[len(os.Args)-1], Group: group.Options{Token: rdma.Token(testToken)}}
	if kind == "arena" {
		a, err := arena.New(arena.Options{SizeBytes: slots * slotBytes, Shared: true})
		if err != nil {
			return err
		}
		o.Arenas, mem = []*arena.Arena{a}, a.Bytes()[:len(mem)]
	}
	e, err := New(ctx, o)
	if err != nil {
		return err
	}
	r, err := e.Register(mem, rdma.RegisterOptions{})
	if err != nil {
		return err
	}
	err = e.Recv(4, 4096, func(_ rdma.EngineID, msg []byte) {
		if err := answer(ctx, e, r, msg); err != nil {
			fmt.Fprintln(os.Stderr, "child:", err)
		}
	})
	if err != nil {
		return err
	}
	b, err := r.Desc().MarshalBinary()
	if err != nil {
		return err
	}
	fmt.Println(base64.StdEncoding.EncodeToString(b))
	_, _ = io.Copy(io.Discard, os.Stdin)
	return e.Close()
}

// answer performs the request of a message.
func answer(ctx context.Context, e *group.Engine, r rdma.Region, msg []byte) error {
	var to rdma.Desc
	if err := to.UnmarshalBinary(msg[1:]); err != nil {
		return err
	}
	if msg[0] == 'b' {
		return e.Write(ctx, rdma.Write{Src: r, Dst: to, Len: slots * slotBytes, Imm: rdma.ImmOf(1)})
	}
	for i := range slots {
		fill(i, r.Bytes()[i*slotBytes:(i+1)*slotBytes])
	}
	for i := range uint64(slots) {
		w := rdma.Write{Src: r, SrcOffset: i * slotBytes, Dst: to, DstOffset: i * slotBytes, Len: slotBytes, Imm: rdma.ImmOf(uint32(i))}
		if err := e.Write(ctx, w); err != nil {
			return err
		}
	}
	return nil
}

// startChild starts the other process and returns its memory.
func startChild(t testing.TB, kind string) (rdma.Desc, *os.Process) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, filepath.Join(t.TempDir(), "socket"))
	cmd.Env = append(os.Environ(), childEnv+"="+kind)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Wait() // it may have been killed
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("the child sends no line: %v", err)
	}
	b, err := base64.StdEncoding.DecodeString(line)
	var d rdma.Desc
	if err = errors.Join(err, d.UnmarshalBinary(b)); err != nil {
		t.Fatal(err)
	}
	return d, cmd.Process
}

// parent is this process's engine, connected to a child, with memory of the same size.
type parent struct {
	*group.Engine
	ctx    context.Context
	child  rdma.Desc
	mem    []byte
	region rdma.Region
	down   *rdma.Flag // the peer is gone
}

func newParent(t testing.TB, kind string, child rdma.Desc) *parent {
	t.Helper()
	p := &parent{ctx: t.Context(), child: child, mem: make([]byte, slots*slotBytes), down: rdma.NewFlag()}
	down := sync.OnceFunc(func() { p.down.Set(nil) })
	o := Options{Group: group.Options{InFlightOps: 64, OnPeerDown: func(rdma.EngineID, error) { down() }}}
	if kind == "arena" {
		space := openArena(t, slots*slotBytes)
		o.Arenas, p.mem = []*arena.Arena{space}, space.Bytes()[:len(p.mem)]
	}
	var err error
	if p.Engine, err = New(p.ctx, o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	if _, err := p.Connect(p.ctx, child.Addr(), rdma.Token(testToken)); err != nil {
		t.Fatal(err)
	}
	if p.region, err = p.Register(p.mem, rdma.RegisterOptions{}); err != nil {
		t.Fatal(err)
	}
	return p
}

// ask sends the child a message with the Desc of our memory.
func (p *parent) ask(t *testing.T, what byte) {
	t.Helper()
	d, err := p.region.Desc().MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Send(p.ctx, p.child.Engine, append([]byte{what}, d...), nil); err != nil {
		t.Fatal(err)
	}
}

// each runs a case with sources in shared arenas, and with sources in the processes' memory.
func each(t *testing.T, f func(t *testing.T, kind string)) {
	for _, kind := range []string{"arena", "process"} {
		t.Run(kind, func(t *testing.T) {
			testkit.VerifyNone(t)
			f(t, kind)
		})
	}
}

// TestTwoProcesses: bytes that are written to another process and back are unchanged.
func TestTwoProcesses(t *testing.T) {
	each(t, func(t *testing.T, kind string) {
		child, _ := startChild(t, kind)
		p := newParent(t, kind, child)
		for i := range slots {
			fill(i, p.mem[i*slotBytes:(i+1)*slotBytes])
		}
		want := bytes.Clone(p.mem)
		there := rdma.NewFlag()
		err := p.Write(p.ctx, rdma.Write{Src: p.region, Dst: child, Len: slots * slotBytes, Done: there.Set})
		if err := errors.Join(err, there.Wait(p.ctx)); err != nil {
			t.Fatal(err)
		}
		clear(p.mem)
		back := rdma.NewFlag()
		if _, err := p.ExpectImm(rdma.Expect{Imm: 1, Count: 1, From: []rdma.EngineID{child.Engine}, Done: back.Set}); err != nil {
			t.Fatal(err)
		}
		p.ask(t, 'b')
		if err := back.Wait(p.ctx); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(p.mem, want) {
			t.Error("the returned bytes differ")
		}
	})
}

// TestKilledTarget: kill -9 of the target process ends each operation in flight to it once,
// with ErrPeerDied.
func TestKilledTarget(t *testing.T) {
	each(t, func(t *testing.T, kind string) {
		testkit.Repeat(t, "no write was in flight when the process was killed", func() bool { return killTarget(t, kind) > 0 })
	})
}

// killTarget returns how many writes were in flight to the process that it killed.
func killTarget(t *testing.T, kind string) int {
	t.Helper()
	child, process := startChild(t, kind)
	p := newParent(t, kind, child)
	died := rdmatest.KillTarget(p.ctx, t, p, p.region, child, process.Kill)
	// The end of the session is counted before OnPeerDown, and may follow the last Done.
	if err := p.down.Wait(p.ctx); err != nil {
		t.Fatal(err)
	}
	if st := p.Stats(); st.InFlightOps != 0 || st.InFlightBytes != 0 || st.SessionsClosed != 1 {
		t.Errorf("counters: %+v", st)
	}
	return died
}

// TestKilledSender: after kill -9 of a process during its writes, each counted write is
// complete, and nothing changes after OnPeerDown.
func TestKilledSender(t *testing.T) {
	testkit.Long(t, "starts and kills a process for each kind of engine")
	each(t, func(t *testing.T, kind string) {
		child, process := startChild(t, kind)
		p := newParent(t, kind, child)
		var counted, torn atomic.Int64
		some := make(chan struct{})
		for i := range slots {
			_, err := p.ExpectImm(rdma.Expect{Imm: uint32(i), Count: 1, From: []rdma.EngineID{child.Engine}, Done: func(err error) {
				if err != nil {
					return
				}
				want := make([]byte, slotBytes)
				fill(i, want)
				if !bytes.Equal(p.mem[i*slotBytes:(i+1)*slotBytes], want) {
					torn.Add(1)
				}
				if counted.Add(1) == slots/8 {
					close(some)
				}
			}})
			if err != nil {
				t.Fatal(err)
			}
		}
		p.ask(t, 'f')
		<-some
		if err := process.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := p.down.Wait(p.ctx); err != nil {
			t.Fatal(err)
		}
		if torn.Load() != 0 {
			t.Errorf("%d of %d slots were counted and are not whole", torn.Load(), counted.Load())
		}
		for i := 0; i < len(p.mem); i += 8 {
			binary.LittleEndian.PutUint64(p.mem[i:], 0xA5A5A5A5A5A5A5A5)
		}
		// The whole life of another peer passes in this time.
		other, _ := startChild(t, kind)
		if _, err := p.Connect(p.ctx, other.Addr(), rdma.Token(testToken)); err != nil {
			t.Fatal(err)
		}
		for i := 0; i < len(p.mem); i += 8 {
			if v := binary.LittleEndian.Uint64(p.mem[i:]); v != 0xA5A5A5A5A5A5A5A5 {
				t.Fatalf("byte %d was written after the peer was declared dead", i)
			}
		}
	})
}

// BenchmarkTwoProcesses alternates writes of 1 MiB to another process, eight in flight, with
// copy, a tenth of a second each, and reports the median of the ratios.
func BenchmarkTwoProcesses(b *testing.B) {
	for _, kind := range []string{"arena", "process"} {
		b.Run(kind, func(b *testing.B) {
			child, _ := startChild(b, kind)
			p := newParent(b, kind, child)
			room := make(chan struct{}, 8)
			done := func(err error) {
				if err != nil {
					b.Error(err)
				}
				<-room
			}
			var ratios []float64
			for b.Loop() {
				rate := func(one func(i uint64)) float64 {
					start, n := time.Now(), uint64(0)
					for ; time.Since(start) < 100*time.Millisecond; n++ {
						one(n % (slots / 2))
					}
					for len(room) > 0 {
						runtime.Gosched()
					}
					return float64(n) / time.Since(start).Seconds()
				}
				written := rate(func(i uint64) {
					room <- struct{}{}
					w := rdma.Write{Src: p.region, SrcOffset: i * slotBytes, Dst: child, DstOffset: i * slotBytes, Len: slotBytes, Done: done}
					if err := p.Write(p.ctx, w); err != nil {
						b.Fatal(err)
					}
				})
				copied := rate(func(i uint64) { copy(p.mem[(slots/2+i)*slotBytes:][:slotBytes], p.mem[i*slotBytes:]) })
				ratios = append(ratios, written/copied)
			}
			slices.Sort(ratios)
			b.ReportMetric(ratios[len(ratios)/2], "rate/copy")
			b.ReportMetric(0, "ns/op")
		})
	}
}
