//go:build verbs && cgo && linux

package verbs

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
	"golang.org/x/sys/unix"
)

// opened opens a port until the end of the test.
func opened(t *testing.T, o NICOptions) *domain {
	t.Helper()
	d, err := open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeDomain(t, d) })
	return d
}

// ended shuts and closes an endpoint.
func ended(t *testing.T, e group.Endpoint) {
	t.Helper()
	e.Shut()
	if err := e.Close(); err != nil {
		t.Error(err)
	}
}

// outcomeOf polls until the Work with that cookie has ended.
func outcomeOf(d *domain, cookie uint64) group.Status {
	dst := make([]group.Completion, 8)
	for {
		n, err := d.Poll(dst)
		if err != nil {
			return group.StatusBroken
		}
		for _, c := range dst[:n] {
			if c.Kind == group.KindDone && c.Cookie == cookie {
				return c.Status
			}
		}
		if n == 0 {
			d.Wait()
		}
	}
}

func TestOpenRefused(t *testing.T) {
	name := ports(t, 1)[0]
	testkit.VerifyNone(t)
	for _, c := range []struct{ device, want string }{
		{"none", name}, // the error names the existing device
		{name + "/9", "port 9"},
		{name + "@200", "GID index 200"},
	} {
		d, err := Open(NICOptions{Device: c.device})
		if err == nil {
			t.Errorf("%s: opened", c.device)
			_ = d.Close()
		} else if !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q in it", c.device, err, c.want)
		}
	}
	if _, err := Open(NICOptions{Device: name, QueueDepth: 4096, ReceiveEntries: 1 << 16}); err == nil {
		t.Error("more entries than a completion queue of rdma_rxe has")
	}
}

// TestDeviceMemory: device memory is registered as a dma-buf only. The error names a driver
// that does not support it. A real registration needs a card and a GPU.
func TestDeviceMemory(t *testing.T) {
	name := ports(t, 1)[0]
	testkit.VerifyNone(t)
	d := opened(t, NICOptions{Device: name})
	fd, err := unix.MemfdCreate("no dma-buf", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	for what, opts := range map[string]rdma.RegisterOptions{
		"a device without a dma-buf": {Device: "cuda:0"},
		"a descriptor of no dma-buf": {Device: "cuda:0", DMABuf: &rdma.DMABuf{FD: fd, Len: 4096, Addr: 1 << 30}},
		"an empty dma-buf":           {Device: "cuda:0", DMABuf: &rdma.DMABuf{FD: fd}},
	} {
		m, err := d.Register(nil, opts)
		if err == nil {
			t.Errorf("%s was registered", what)
			_ = m.Close()
		}
		t.Logf("%s: %v", what, err)
	}
	if _, err := d.Register(nil, rdma.RegisterOptions{Device: "cuda:0"}); !errors.Is(err, rdma.ErrUnsupported) {
		t.Errorf("a device without a dma-buf: %v; want ErrUnsupported", err)
	}
}

// TestWindowsAreBound: windows are bound, give access to their range, and are closed
// individually. The engine uses no windows of rdma_rxe because it does not confine writes to
// them (probeWindows). The other steps are the same on every card.
func TestWindowsAreBound(t *testing.T) {
	names := ports(t, 2)
	testkit.VerifyNone(t)
	a, b := opened(t, NICOptions{Device: names[0]}), opened(t, NICOptions{Device: names[1]})
	if !b.dev.windows {
		if os.Getenv(envLab) != "" {
			t.Fatal("in the lab, and rdma_rxe has no memory windows of type 1")
		}
		t.Skip("needs a device with memory windows of type 1")
	}
	if os.Getenv(envLab) != "" && b.limits.Windows {
		t.Error("rdma_rxe of the lab keeps writes inside of a window now: let it have windows, and drop this line")
	}
	b.windows = true
	src, err := a.Register(make([]byte, 100), rdma.RegisterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	mem := make([]byte, 8192)
	whole, err := b.Register(mem, rdma.RegisterOptions{Local: true})
	if err != nil {
		t.Fatal(err)
	}
	defer whole.Close()
	one, err := whole.Window(5000, 100)
	if err != nil {
		t.Fatal(err)
	}
	two, err := whole.Window(6000, 100)
	if err != nil {
		t.Fatal(err)
	}
	defer two.Close()
	if one.Key() == two.Key() || one.Key() == whole.Key() {
		t.Errorf("keys %#x, %#x of memory %#x", one.Key(), two.Key(), whole.Key())
	}
	// write performs one write and returns its status. A refusal breaks the endpoints.
	write := func(to group.Memory) group.Status {
		la, lb := joined(t, a, b, rdma.ClassKV)
		defer ended(t, lb)
		defer ended(t, la)
		if n, err := la.Post([]group.Work{{Cookie: 9, Op: group.OpWrite, Src: src, Len: 100, RemoteAddr: to.Base(), RemoteKey: to.Key()}}); n != 1 {
			t.Fatal(err)
		}
		return outcomeOf(a, 9)
	}
	if s := write(one); s != group.StatusOK {
		t.Errorf("into a window: status %d", s)
	}
	if s := write(whole); s != group.StatusRefused {
		t.Errorf("into local memory: status %d", s)
	}
	if err := one.Close(); err != nil {
		t.Fatal(err)
	}
	if s := write(one); s != group.StatusRefused {
		t.Errorf("into a closed window: status %d", s)
	}
	if s := write(two); s != group.StatusOK {
		t.Errorf("into the other window: status %d", s)
	}
	if _, err := two.Window(0, 1); !errors.Is(err, rdma.ErrUnsupported) {
		t.Errorf("a window of a window: %v", err)
	}
}

// TestLendRefused: PostRecv refuses buffers outside the domain's memory.
func TestLendRefused(t *testing.T) {
	name := ports(t, 1)[0]
	testkit.VerifyNone(t)
	d, other := opened(t, NICOptions{Device: name, ReceiveEntries: 64}), opened(t, NICOptions{Device: name})
	mem := make([]byte, 1000)
	m, err := d.Register(mem, rdma.RegisterOptions{Local: true})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	foreign, err := other.Register(mem, rdma.RegisterOptions{Local: true})
	if err != nil {
		t.Fatal(err)
	}
	defer foreign.Close()
	for _, c := range []struct {
		what string
		mem  group.Memory
		buf  []byte
		want error
	}{
		{"memory of another domain", foreign, mem[:10], rdma.ErrForeign},
		{"bytes elsewhere", m, make([]byte, 10), rdma.ErrRange},
		{"no bytes", m, mem[:0], rdma.ErrRange},
	} {
		if err := d.PostRecv(1, c.mem, c.buf); !errors.Is(err, c.want) {
			t.Errorf("%s: %v; want %v", c.what, err, c.want)
		}
	}
	for slot := range uint32(64) {
		if err := d.PostRecv(slot, m, mem[:10]); err != nil {
			t.Fatalf("buffer %d: %v", slot, err)
		}
	}
	if err := d.PostRecv(3, m, mem[:10]); !errors.Is(err, rdma.ErrExists) {
		t.Errorf("a buffer that is lent: %v", err)
	}
	if err := d.PostRecv(64, m, mem[:10]); !errors.Is(err, rdma.ErrRange) || !strings.Contains(err.Error(), "ReceiveEntries") {
		t.Errorf("one buffer too many: %v", err)
	}
}

// TestEndpointsAreBounded: the completion queue grows with the endpoints, up to the device's
// limit. Closed endpoints release their entries.
func TestEndpointsAreBounded(t *testing.T) {
	name := ports(t, 1)[0]
	testkit.VerifyNone(t)
	d := opened(t, NICOptions{Device: name, QueueDepth: 1024, ReceiveEntries: 256})
	start := d.cqEntries
	for round := range 2 {
		var all []group.Endpoint
		for {
			e, err := d.NewEndpoint(uint64(len(all)), rdma.ClassKV)
			if err != nil {
				if !strings.Contains(err.Error(), "QueueDepth") {
					t.Errorf("the last endpoint: %v; want what to do", err)
				}
				break
			}
			if all = append(all, e); len(all) > d.dev.maxCQE/1024 {
				t.Fatal("more endpoints than the completion queue has room for")
			}
		}
		if len(all) < 3 || d.cqEntries <= start {
			t.Errorf("round %d: %d endpoints, a completion queue of %d entries after %d", round, len(all), d.cqEntries, start)
		}
		for _, e := range all {
			ended(t, e)
		}
	}
	if d.cqUsed != 2*256 || len(d.byQPN) != 0 {
		t.Errorf("%d entries in use and %d queue pairs after the last endpoint", d.cqUsed, len(d.byQPN))
	}
}
