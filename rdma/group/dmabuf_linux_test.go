package group_test

import (
	"bytes"
	"os"
	"testing"
	"testing/synctest"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/rdmatest/simrdma"
	"golang.org/x/sys/unix"
)

// TestDMABufClosed: the caller closes a dma-buf's descriptor after Register has returned, and
// the kernel gives its number to another buffer. Windows opened later, and windows on a NIC
// that replaces a dead one, use the first buffer. Closing the region leaves no descriptor open.
func TestDMABufClosed(t *testing.T) {
	const size = 8192
	file := func() *os.File {
		f, err := os.CreateTemp(t.TempDir(), "buffer")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		if err := f.Truncate(size); err != nil {
			t.Fatal(err)
		}
		return f
	}
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := fabricOf(t, 5, simrdma.FabricOptions{})
				server := start(t, f, "s", true, 1, k.nic, nil)
				client := start(t, f, "c", false, 1, k.nic, nil)
				connect(t, client, server)
				src, want := region(t, client, size, true)
				for i := range want {
					want[i] = byte(i*7 + 1)
				}
				first, second := file(), file()
				fd, err := unix.Dup(int(first.Fd()))
				if err != nil {
					t.Fatal(err)
				}
				before := descriptors(t)
				dst, err := server.Register(nil, rdma.RegisterOptions{Local: true, DMABuf: &rdma.DMABuf{FD: fd, Len: size, Addr: 3 << 40}})
				if err != nil {
					t.Fatal(err)
				}
				// From here on the number belongs to the second buffer.
				if err := unix.Dup3(int(second.Fd()), fd, unix.O_CLOEXEC); err != nil {
					t.Fatal(err)
				}
				for round := range 3 {
					if round == 2 {
						addr := server.NICs()[0].Addr
						f.KillNIC(simrdma.NICName("s", 0))
						f.RepairNIC(simrdma.NICName("s", 0))
						until(t, "the NIC's return", func() bool { n := server.NICs()[0]; return n.Up && n.Addr != addr })
					}
					win, err := dst.Window(0, size)
					if err != nil {
						t.Fatal(err)
					}
					if err := write(t, client, rdma.Write{Src: src, Dst: win.Desc(), Len: size}); err != nil {
						t.Fatal(err)
					}
					if err := win.Revoke(t.Context()); err != nil {
						t.Fatal(err)
					}
					got := make([]byte, size)
					if _, err := first.ReadAt(got, 0); err != nil || !bytes.Equal(got, want) {
						t.Errorf("the buffer that was registered was not written (%v)", err)
					}
					if _, err := second.ReadAt(got, 0); err != nil || !bytes.Equal(got, make([]byte, size)) {
						t.Errorf("another buffer was written (%v)", err)
					}
					if _, err := first.WriteAt(make([]byte, size), 0); err != nil {
						t.Fatal(err)
					}
				}
				if err := dst.Close(t.Context()); err != nil {
					t.Fatal(err)
				}
				if after := descriptors(t); after != before {
					t.Errorf("%d descriptors are open behind Close, %d were before Register", after, before)
				}
				_ = unix.Close(fd)
			})
		})
	}
}

// descriptors counts the open descriptors of this process that are regular files.
func descriptors(t *testing.T) (n int) {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		if info, err := os.Stat("/proc/self/fd/" + e.Name()); err == nil && info.Mode().IsRegular() {
			n++
		}
	}
	return n
}
