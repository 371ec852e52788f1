package arena

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/penstock-kv/penstock/internal/sys"
)

// pair returns two ends of a unix socket.
func pair(t testing.TB) (a, b *net.UnixConn) {
	t.Helper()
	addr := &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s"), Net: "unix"}
	l, err := net.ListenUnix("unix", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if a, err = net.DialUnix("unix", nil, addr); err != nil {
		t.Fatal(err)
	}
	if b, err = l.AcceptUnix(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

// lines returns the modes of the mappings of the arena in this process.
func lines(t testing.TB) (modes []string) {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(maps)) {
		if strings.Contains(line, "memfd:penstock-arena") {
			modes = append(modes, strings.Fields(line)[1])
		}
	}
	return modes
}

func TestSendReceive(t *testing.T) {
	owner := newArena(t, Options{SizeBytes: 2 * sys.HugePageSize, Shared: true})
	buf := mustAlloc(t, owner, Granule)
	defer buf.Release()
	from, to := pair(t)
	if err := owner.Send(from, []byte("hello")); err != nil {
		t.Fatal(err)
	}
	msg := make([]byte, 5)
	view, err := Receive(to, msg)
	if err != nil || view == nil || string(msg) != "hello" {
		t.Fatalf("received %q, %v, %v", msg, view, err)
	}
	copy(buf.Bytes(), "from the owner")
	if got := view.Bytes()[buf.Offset():][:14]; string(got) != "from the owner" {
		t.Errorf("the view reads %q", got)
	}
	if got := fmt.Sprint(lines(t)); got != "[rw-s r--s]" && got != "[r--s rw-s]" {
		t.Errorf("mappings %s; want the owner's to be writable and the view's not", got)
	}
	if err := view.Close(); err != nil {
		t.Error(err)
	}
	if _, err := from.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if v, err := Receive(to, msg[:1]); err != nil || v != nil {
		t.Errorf("a message without a descriptor: %v, %v", v, err)
	}
	from.Close()
	if _, err := Receive(to, msg); err == nil {
		t.Error("received from a peer that hung up")
	}
	if err := newArena(t, Options{SizeBytes: 1}).Send(from, msg); err == nil {
		t.Error("a private arena was sent")
	}
}

// TestOwnerAloneWrites: a receiver cannot get write access through the descriptor that it received,
// nor through the file behind the descriptor.
func TestOwnerAloneWrites(t *testing.T) {
	pool, err := sys.ReadHugePages()
	if err != nil {
		t.Fatal(err)
	}
	for _, huge := range []bool{false, true} {
		if huge && pool.Free == 0 {
			t.Log("no reserved huge pages (vm.nr_hugepages): tried with small ones only")
			continue
		}
		owner := newArena(t, Options{SizeBytes: sys.HugePageSize, Shared: true, HugeTLB: huge})
		given, err := sys.Reopen(owner.region.file)
		if err != nil {
			t.Fatal(err)
		}
		defer given.Close()
		again, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", given.Fd()), os.O_RDWR, 0)
		if err != nil {
			t.Fatalf("huge %t: the file cannot be opened by its user: %v", huge, err)
		}
		defer again.Close()
		for name, f := range map[string]*os.File{"given": given, "opened again": again} {
			if m, err := syscall.Mmap(int(f.Fd()), 0, sys.HugePageSize, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED); err == nil {
				t.Errorf("huge %t, %s: mapped for writing", huge, name)
				_ = syscall.Munmap(m)
			}
			if _, err := f.WriteAt([]byte{1}, 0); err == nil {
				t.Errorf("huge %t, %s: written to", huge, name)
			}
			const punchHole = 0x3 // FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
			if err := syscall.Fallocate(int(f.Fd()), punchHole, 0, sys.HugePageSize); err == nil {
				t.Errorf("huge %t, %s: emptied", huge, name)
			}
			if f.Truncate(0) == nil {
				t.Errorf("huge %t, %s: truncated", huge, name)
			}
		}
		owner.Bytes()[0] = 7 // the owner can still write
	}
}

func TestMapRefuses(t *testing.T) {
	if _, err := Map(-1); err == nil {
		t.Error("mapped descriptor -1")
	}
	odd, err := sys.Memfd("odd", 4096, false)
	if err != nil {
		t.Fatal(err)
	}
	defer odd.Close()
	if _, err := Map(int(odd.Fd())); err == nil {
		t.Error("mapped a memfd that is no arena")
	}
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(sys.HugePageSize); err != nil {
		t.Fatal(err)
	}
	if _, err := Map(int(f.Fd())); err == nil {
		t.Error("mapped a file that its owner can truncate")
	}
}
