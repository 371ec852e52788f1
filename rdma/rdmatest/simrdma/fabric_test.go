package simrdma

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// rig is two NICs without pollers, for tests that check every completion.
type rig struct {
	t      testing.TB
	f      *Fabric
	a, b   *Domain
	ea, eb *Endpoint
	am, bm group.Memory
	dst    []byte
}

// newRig connects an endpoint on each of two NICs and registers 1000 bytes.
func newRig(t testing.TB, seed uint64, fo FabricOptions, o NICOptions) *rig {
	t.Helper()
	r := &rig{t: t, f: NewFabric(seed, fo), dst: make([]byte, 1000)}
	o.Host, o.Name = "a", "a0"
	r.a = must(r.f.Open(o))(t)
	o.Host, o.Name = "b", "b0"
	r.b = must(r.f.Open(o))(t)
	src := make([]byte, 1000)
	for i := range src {
		src[i] = byte(i) | 1
	}
	r.am, r.bm = must(r.a.Register(src, rdma.RegisterOptions{}))(t), must(r.b.Register(r.dst, rdma.RegisterOptions{}))(t)
	r.ea, r.eb = r.join()
	return r
}

// join connects another pair of endpoints.
func (r *rig) join() (a, b *Endpoint) {
	r.t.Helper()
	a, b = must(r.a.NewEndpoint(1, 0))(r.t).(*Endpoint), must(r.b.NewEndpoint(2, 0))(r.t).(*Endpoint)
	if err := errors.Join(a.Connect(b.Local()), b.Connect(a.Local())); err != nil {
		r.t.Fatal(err)
	}
	return a, b
}

// must fails the test on an error.
func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// write returns a Work of n bytes to off with an immediate.
func (r *rig) write(cookie uint64, n, off uint64) group.Work {
	return group.Work{Cookie: cookie, Op: group.OpWriteImm, Imm: uint32(cookie), Src: r.am, Len: n, RemoteAddr: r.bm.Base() + off, RemoteKey: r.bm.Key()}
}

// poll returns the completions of a NIC.
func poll(t testing.TB, d *Domain) []group.Completion {
	t.Helper()
	out := make([]group.Completion, 1000)
	n, err := d.Poll(out)
	if err != nil && !errors.Is(err, group.ErrDead) {
		t.Fatal(err)
	}
	return out[:n]
}

// close closes everything in the required order.
func (r *rig) close() {
	r.t.Helper()
	for _, d := range []*Domain{r.a, r.b} {
		for _, e := range d.endpoints {
			e.Shut()
		}
		poll(r.t, d)
		for _, e := range d.endpoints {
			if err := e.Close(); err != nil {
				r.t.Error(err)
			}
		}
		for _, m := range d.memories {
			if m.parent == nil && m.windows == 0 {
				if err := m.Close(); err != nil {
					r.t.Error(err)
				}
			}
		}
		if err := d.Close(); err != nil {
			r.t.Error(err)
		}
	}
	for _, v := range r.f.Violations() {
		r.t.Errorf("rule broken: %s", v)
	}
}

// allFaults is a network with all faults.
var allFaults = FabricOptions{
	Delay: Span{Min: time.Microsecond, Max: time.Millisecond}, Tail: Span{Max: 5 * time.Millisecond}, TailChance: 0.1,
	Pieces: 8, RepeatChance: 0.5, GhostChance: 0.7,
}

// outcomes returns the results of 100 writes whose sender's endpoint ends half-way.
func outcomes(t *testing.T, seed uint64) (out []string) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, seed, allFaults, NICOptions{})
		start := time.Now()
		for i := range uint64(100) {
			if n, err := r.ea.Post([]group.Work{r.write(i, 9, i*9)}); n != 1 || err != nil {
				t.Fatalf("post: %d, %v", n, err)
			}
		}
		for i := range 200 {
			if i == 60 {
				r.ea.Shut()
			}
			time.Sleep(50 * time.Microsecond)
			for _, d := range []*Domain{r.a, r.b} {
				for _, c := range poll(t, d) {
					out = append(out, fmt.Sprintf("%v %s %d %d %d %d", time.Since(start), d.Name(), c.Kind, c.Status, c.Cookie, c.Imm))
				}
			}
		}
		r.close()
	})
	return out
}

// The same posts have the same results with the same seed, and other results with another.
func TestReplay(t *testing.T) {
	one, again, other := outcomes(t, 1), outcomes(t, 1), outcomes(t, 2)
	if !slices.Equal(one, again) {
		t.Error("the same seed gave another result")
	}
	if slices.Equal(one, other) {
		t.Error("another seed gave the same result")
	}
	if len(one) <= 100 {
		t.Errorf("%d completions of 100 writes with immediates", len(one))
	}
}

// Every fault of the fault model occurs.
func TestFaultsHappen(t *testing.T) {
	var sum Counts
	for seed := range uint64(20) {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, seed, allFaults, NICOptions{Windows: true})
			win := must(r.bm.Window(0, 500))(t)
			for i := range uint64(60) {
				w := r.write(i, 8, 0)
				w.RemoteAddr, w.RemoteKey = win.Base(), win.Key()
				if n, err := r.ea.Post([]group.Work{w}); n != 1 || err != nil {
					t.Fatalf("post: %d, %v", n, err)
				}
				if i == 30 {
					time.Sleep(1500 * time.Microsecond)
					if err := win.Close(); err != nil {
						t.Fatal(err)
					}
				}
			}
			time.Sleep(300 * time.Microsecond)
			r.ea.Shut()
			time.Sleep(20 * time.Millisecond)
			c := r.f.Counts()
			if c.Works != 60 {
				t.Errorf("counts %+v", c)
			}
			add(&sum, c)
			r.close()
		})
	}
	v := reflect.ValueOf(sum)
	for i := range v.NumField() {
		if name := v.Type().Field(i).Name; v.Field(i).Uint() == 0 && name != "Breaks" && name != "Flying" {
			t.Errorf("%s never happened", name)
		}
	}
}

// add adds counts.
func add(sum *Counts, c Counts) {
	s, v := reflect.ValueOf(sum).Elem(), reflect.ValueOf(c)
	for i := range v.NumField() {
		s.Field(i).SetUint(s.Field(i).Uint() + v.Field(i).Uint())
	}
}

// A cut link breaks the endpoint of a sender after RetryTimeout. A link that is healed before
// only costs time.
func TestCutLink(t *testing.T) {
	for _, heal := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, 1, FabricOptions{RetryTimeout: 20 * time.Millisecond}, NICOptions{}.LikeRC())
			r.f.CutLink("b0", "a0")
			if n, err := r.ea.Post([]group.Work{r.write(7, 10, 0)}); n != 1 || err != nil {
				t.Fatal(n, err)
			}
			time.Sleep(10 * time.Millisecond)
			if c := poll(t, r.a); len(c) != 0 {
				t.Errorf("too early: %+v", c)
			}
			if heal {
				r.f.HealLink("a0", "b0")
			}
			time.Sleep(30 * time.Millisecond)
			c, there := poll(t, r.a), poll(t, r.b)
			switch {
			case heal && (len(c) != 1 || c[0].Status != group.StatusOK || len(there) != 1):
				t.Errorf("healed: %+v, %+v", c, there)
			case !heal && (len(c) != 2 || len(there) != 0):
				t.Errorf("not healed: %+v, %+v", c, there)
			}
			if !heal {
				if _, err := r.ea.Post(nil); err == nil || !strings.Contains(err.Error(), "no answer") {
					t.Errorf("post to a broken endpoint: %v", err)
				}
			}
			r.close()
		})
	}
}

// The name of a dead NIC cannot be opened until it is repaired, and that of a dead host's NIC
// never.
func TestDeadNames(t *testing.T) {
	f := NewFabric(1, FabricOptions{})
	o := NICOptions{Host: "h", Name: "n"}
	d := must(f.Open(o))(t)
	if _, err := f.Open(o); err == nil {
		t.Error("opened twice")
	}
	f.KillNIC("n")
	if _, err := d.Poll(make([]group.Completion, 1)); !errors.Is(err, group.ErrDead) {
		t.Errorf("poll: %v", err)
	}
	if _, err := f.Open(o); !errors.Is(err, group.ErrDead) {
		t.Errorf("open: %v", err)
	}
	f.RepairNIC("n")
	if err := must(f.Open(o))(t).Close(); err != nil {
		t.Error(err)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	f.KillHost("h")
	if _, err := f.Open(o); !errors.Is(err, group.ErrDead) {
		t.Errorf("open on a dead host: %v", err)
	}
	if v := f.Violations(); len(v) != 0 {
		t.Error(v)
	}
}

// Each violation by the user of a domain is detected.
func TestRules(t *testing.T) {
	for want, breach := range map[string]func(r *rig){
		"Post after Shut":                       func(r *rig) { r.ea.Shut(); _, _ = r.ea.Post([]group.Work{r.write(1, 1, 0)}) },
		"Close before Shut":                     func(r *rig) { _ = r.ea.Close() },
		"Close twice":                           func(r *rig) { r.ea.Shut(); _, _ = r.ea.Close(), r.ea.Close() },
		"have been polled":                      func(r *rig) { _, _ = r.ea.Post([]group.Work{r.write(1, 1, 0)}); r.ea.Shut(); _ = r.ea.Close() },
		"closed or connected":                   func(r *rig) { _ = r.ea.Connect(r.eb.Local()) },
		"which is closed":                       func(r *rig) { _, _ = r.bm.Close(), r.bm.Close() },
		"windows open":                          func(r *rig) { _, _ = r.bm.Window(0, 1); _ = r.bm.Close() },
		"Window of closed memory":               func(r *rig) { _ = r.bm.Close(); _, _ = r.bm.Window(0, 1) },
		"the source of 1 Works":                 func(r *rig) { _, _ = r.ea.Post([]group.Work{r.write(1, 1, 0)}); _ = r.am.Close() },
		"Close with endpoint 1 open":            func(r *rig) { _ = r.a.Close() },
		"Close with memory":                     func(r *rig) { _ = r.b.Close() },
		"new endpoint after Close":              func(r *rig) { r.close(); _, _ = r.a.NewEndpoint(1, 0) },
		"Poll after Close":                      func(r *rig) { r.close(); _, _ = r.a.Poll(nil) },
		"a0: Close twice":                       func(r *rig) { r.close(); _ = r.a.Close() },
		"op 9":                                  func(r *rig) { w := r.write(1, 1, 0); w.Op = 9; _, _ = r.ea.Post([]group.Work{w}) },
		"at most 1073741824":                    func(r *rig) { _, _ = r.ea.Post([]group.Work{r.write(1, 1<<40, 0)}) },
		"message of 1000000 bytes":              func(r *rig) { _, _ = r.ea.Post([]group.Work{{Op: group.OpSend, Src: r.am, Len: 1000000}}) },
		"source is not memory of a0":            func(r *rig) { w := r.write(1, 1, 0); w.Src = r.bm; _, _ = r.ea.Post([]group.Work{w}) },
		"is closed":                             func(r *rig) { _ = r.am.Close(); _, _ = r.ea.Post([]group.Work{r.write(1, 1, 0)}) },
		"source: 1001 bytes at offset 0":        func(r *rig) { _, _ = r.ea.Post([]group.Work{r.write(1, 1001, 0)}) },
		"key 0x0 is none":                       func(r *rig) { w := r.write(1, 1, 0); w.RemoteKey = 0; _, _ = r.ea.Post([]group.Work{w}) },
		"receive buffer 3 is not part":          func(r *rig) { _ = r.b.PostRecv(3, r.bm, make([]byte, 8)) },
		"before Connect has returned":           func(r *rig) { e, _ := r.a.NewEndpoint(1, 0); _, _ = e.Post([]group.Work{r.write(1, 1, 0)}) },
		"Poll beside another Poll or Wait":      func(r *rig) { r.a.polling.Store(true); _, _ = r.a.Poll(nil); r.a.polling.Store(false) },
		"Wait beside another Poll or Wait":      func(r *rig) { r.a.polling.Store(true); r.a.Wait(); r.a.polling.Store(false) },
		"Close while Poll or Wait is running":   func(r *rig) { r.a.polling.Store(true); _ = r.a.Close(); r.a.polling.Store(false) },
		"Post beside another Post":              func(r *rig) { r.ea.posting.Store(true); _, _ = r.ea.Post(nil); r.ea.posting.Store(false) },
		"register memory after Close":           func(r *rig) { r.close(); _, _ = r.a.Register(make([]byte, 1), rdma.RegisterOptions{}) },
		"open a window after Close":             func(r *rig) { r.close(); _, _ = r.am.Window(0, 1) },
		"post a receive buffer after Close":     func(r *rig) { r.close(); _ = r.b.PostRecv(3, r.bm, nil) },
		"connect after Close":                   func(r *rig) { e, _ := r.a.NewEndpoint(1, 0); _ = r.a.Close(); _ = e.Connect(r.eb.Local()) },
		"write of 1073741825 bytes, at most 10": func(r *rig) { _, _ = r.ea.Post([]group.Work{r.write(1, 1<<30+1, 0)}) },
	} {
		// In virtual time a Work stays in flight until the violation has been made.
		synctest.Test(t, func(t *testing.T) {
			calls := 0
			r := newRig(t, 1, FabricOptions{Delay: Span{Min: 1, Max: 100}, OnViolation: func(string) { calls++ }}, NICOptions{Windows: true})
			breach(r)
			v := r.f.Violations()
			if len(v) == 0 || !strings.Contains(strings.Join(v, "\n"), want) || calls < len(v) {
				t.Errorf("want a breach %q; got %d: %q", want, calls, v)
			}
		})
	}
	f := NewFabric(1, FabricOptions{})
	for range 3 * maxViolations {
		f.violation("again")
	}
	if v := f.Violations(); len(v) != maxViolations+1 || v[maxViolations] != fmt.Sprintf("and %d more", 2*maxViolations) {
		t.Errorf("%d violations kept", len(v))
	}
}

// A full completion queue delays arrivals, and nothing is lost.
func TestFullQueue(t *testing.T) {
	for _, ordered := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, 1, FabricOptions{Delay: Span{Min: 1, Max: 100}}, NICOptions{Ordered: ordered, CompletionDepth: 2})
			for i := range uint64(20) {
				if n, err := r.ea.Post([]group.Work{r.write(i, 10, 0)}); n != 1 || err != nil {
					t.Fatal(n, err)
				}
			}
			var imms []uint32
			for range 100 {
				time.Sleep(10 * time.Millisecond)
				got := poll(t, r.b)
				if len(got) > 2 {
					t.Fatalf("%d completions waited, CompletionDepth is 2", len(got))
				}
				for _, c := range got {
					imms = append(imms, c.Imm)
				}
			}
			if ordered && !slices.IsSorted(imms) {
				t.Errorf("out of order: %v", imms)
			}
			slices.Sort(imms)
			if imms = slices.Compact(imms); len(imms) != 20 || len(poll(t, r.a)) != 20 {
				t.Errorf("%d immediates of 20", len(imms))
			}
			r.close()
		})
	}
}

// Posting and polling allocate nothing, so that they do not affect tests that count the
// allocations of the code above.
func TestAllocs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 1, FabricOptions{Delay: Span{Min: 1, Max: 100}, Pieces: 3, RepeatChance: 0.5}, NICOptions{})
		works, dst := []group.Work{r.write(1, 100, 0), r.write(2, 100, 0)}, make([]group.Completion, 10)
		once := func() {
			if n, err := r.ea.Post(works); n != 2 || err != nil {
				t.Fatal(n, err)
			}
			time.Sleep(time.Millisecond)
			for _, d := range []*Domain{r.a, r.b} {
				if n, err := d.Poll(dst); n != 2 || err != nil {
					t.Fatal(n, err)
				}
			}
		}
		for range 100 {
			once()
		}
		if n := testing.AllocsPerRun(100, once); n != 0 {
			t.Errorf("%v allocations", n)
		}
		r.close()
	})
}

// The picture shows the state of a Work.
func TestString(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 7, FabricOptions{Delay: Span{Min: time.Second, Max: time.Second}}, NICOptions{Ordered: true})
		if _, err := r.ea.Post([]group.Work{r.write(1, 100, 0)}); err != nil {
			t.Fatal(err)
		}
		picture := func(at time.Duration) string {
			time.Sleep(at)
			return r.f.String()
		}
		got := picture(0) + picture(1500*time.Millisecond) + picture(time.Second)
		r.eb.Shut()
		r.f.KillNIC("b0")
		got += picture(5 * time.Second)
		want := `seed 7 at 0s: 1 events to come, the next at 1s
a0  0 to poll, 0 buffers lent
  a0#1 → b0#1 kv  1 posted, 1 unpolled
    #0 writeImm 100 B  on its way
b0  0 to poll, 0 buffers lent
  b0#1 → a0#1 kv  0 posted, 0 unpolled
seed 7 at 1.5s: 1 events to come, the next at 2s
a0  0 to poll, 0 buffers lent
  a0#1 → b0#1 kv  1 posted, 1 unpolled
    #0 writeImm 100 B  landing, 0 of 1
b0  0 to poll, 0 buffers lent
  b0#1 → a0#1 kv  0 posted, 0 unpolled
seed 7 at 2.5s: 1 events to come, the next at 3s
a0  0 to poll, 0 buffers lent
  a0#1 → b0#1 kv  1 posted, 1 unpolled
    #0 writeImm 100 B  answered
b0  1 to poll, 0 buffers lent
  b0#1 → a0#1 kv  0 posted, 0 unpolled
seed 7 at 7.5s: 0 events to come
a0  2 to poll, 0 buffers lent
  a0#1 → b0#1 kv  1 posted, 1 unpolled, broken
b0  1 to poll, 0 buffers lent, dead: simrdma: b0 was killed: nic is dead
  b0#1 → a0#1 kv  0 posted, 0 unpolled, shut
`
		if got != want {
			t.Errorf("drawn as\n%s\nwant\n%s", got, want)
		}
		r.close()
	})
}

// FuzzConnect: no address causes a panic.
func FuzzConnect(f *testing.F) {
	f.Add([]byte{1, 0, 0, 0, 1, 0, 0, 0})
	f.Add([]byte{2, 0, 0, 0, 1, 0, 0, 0})
	f.Add([]byte{2, 0, 0, 0, 9, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, addr []byte) {
		r := newRig(t, 1, FabricOptions{}, NICOptions{})
		e := must(r.a.NewEndpoint(5, 0))(t)
		if err := e.Connect(addr); err == nil {
			t.Errorf("connected to % x, which is in use or does not exist", addr)
		}
		r.close()
	})
}

// pipePair is both ends of a control connection.
func pipePair(t testing.TB, f *Fabric) (dialed, accepted net.Conn, l net.Listener) {
	t.Helper()
	l = must(f.Listen("b"))(t)
	if _, err := f.Listen("b"); err == nil {
		t.Error("listens twice")
	}
	dialed = must(f.Dial(t.Context(), "a", "b"))(t)
	return dialed, must(l.Accept())(t), l
}

// A control connection is a stream: in order, delayed, bounded, with deadlines and
// an end.
func TestControl(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := NewFabric(3, FabricOptions{ControlDelay: Span{Min: time.Millisecond, Max: 20 * time.Millisecond}, ControlBuffer: 1000})
		a, b, l := pipePair(t, f)
		sent := make([]byte, 50_000)
		for i := range sent {
			sent[i] = byte(i * 7 >> 3)
		}
		start := time.Now()
		go func() {
			if n, err := a.Write(sent); n != len(sent) || err != nil {
				t.Errorf("write: %d, %v", n, err)
			}
			if err := a.Close(); err != nil {
				t.Error(err)
			}
		}()
		got, err := io.ReadAll(b)
		if err != nil || !slices.Equal(got, sent) {
			t.Fatalf("%d bytes arrived, %v", len(got), err)
		}
		if took := time.Since(start); took < 50*time.Millisecond {
			t.Errorf("50 chunks of at least 1 ms each took %v", took)
		}
		if _, err := b.Write([]byte("x")); err == nil {
			t.Error("wrote to a closed peer")
		}
		if err := b.Close(); err != nil {
			t.Error(err)
		}
		for _, err := range []error{second(a.Read(make([]byte, 1))), second(b.Write(sent)), a.Close(), a.SetDeadline(time.Time{})} {
			if !errors.Is(err, net.ErrClosed) {
				t.Errorf("closed connection: %v", err)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := f.Dial(ctx, "a", "b"); !errors.Is(err, context.Canceled) {
			t.Errorf("dial with an ended context: %v", err)
		}
		if _, err := f.Dial(t.Context(), "a", "nobody"); err == nil {
			t.Error("dialed without a listener")
		}
		waiting := must(f.Dial(t.Context(), "a", "b"))(t)
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) || !errors.Is(l.Close(), net.ErrClosed) {
			t.Errorf("accept: %v", err)
		}
		if _, err := waiting.Read(make([]byte, 1)); err != io.EOF {
			t.Errorf("read of a connection that was not accepted: %v", err)
		}
	})
}

func second(_ int, err error) error { return err }

// Deadlines end calls that wait, and calls that begin later.
func TestControlDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := NewFabric(3, FabricOptions{ControlBuffer: 10})
		a, b, _ := pipePair(t, f)
		start := time.Now()
		for i := range 2 {
			if err := b.SetReadDeadline(start.Add(time.Second)); err != nil {
				t.Fatal(err)
			}
			if _, err := b.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(start) != time.Second {
				t.Errorf("read %d ended after %v with %v", i, time.Since(start), err)
			}
		}
		if err := a.SetDeadline(start.Add(3 * time.Second)); err != nil {
			t.Fatal(err)
		}
		if n, err := a.Write(make([]byte, 25)); n != 10 || !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(start) != 3*time.Second {
			t.Errorf("write ended after %v with %d bytes, %v", time.Since(start), n, err)
		}
		if err := errors.Join(a.SetDeadline(time.Time{}), b.SetDeadline(time.Time{})); err != nil {
			t.Fatal(err)
		}
		if n, err := io.ReadFull(b, make([]byte, 10)); err != nil {
			t.Errorf("after the deadline: %d bytes, %v", n, err)
		}
		if err := errors.Join(a.Close(), b.Close()); err != nil {
			t.Error(err)
		}
	})
}

// Bytes sent while hosts are parted arrive when they are joined. Bytes sent to or by a dead
// host never arrive.
func TestControlSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := NewFabric(3, FabricOptions{ControlDelay: Span{Max: time.Millisecond}})
		a, b, _ := pipePair(t, f)
		f.Part("b", "a")
		if _, err := a.Write([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 5)
		_ = b.SetReadDeadline(time.Now().Add(time.Hour))
		if _, err := b.Read(buf); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("read while parted: %v", err)
		}
		_ = b.SetReadDeadline(time.Time{})
		f.Join("a", "b")
		if _, err := io.ReadFull(b, buf); err != nil || string(buf) != "hello" {
			t.Errorf("read %q, %v", buf, err)
		}
		f.KillHost("a")
		if _, err := a.Write([]byte("x")); err != nil {
			t.Errorf("a dead host's own write: %v", err)
		}
		if err := a.Close(); err != nil {
			t.Error(err)
		}
		_ = b.SetReadDeadline(time.Now().Add(time.Hour))
		if _, err := b.Read(buf); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("read from a dead host: %v", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		if _, err := f.Dial(ctx, "b", "a"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("dial a dead host: %v", err)
		}
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
}
