package netlab

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/penstock-kv/penstock/internal/testkit"
)

// childEnv makes the test binary a child process that holds a lab and is killed.
const childEnv = "PENSTOCK_NETLAB_TEST_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		fmt.Println(hold())
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(1)
	}
	testkit.Main(m)
}

// hold creates two namespaces with a link and returns the path of the first namespace, and the name
// of the link's end in it.
func hold() string {
	l, err := Open()
	if err != nil {
		return err.Error()
	}
	a, err := l.Namespace("a")
	b, err2 := l.Namespace("b")
	if err := errors.Join(err, err2); err != nil {
		return err.Error()
	}
	k, err := l.Link(a, b, LinkOptions{})
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("/proc/%d/fd/%d %s", os.Getpid(), a.file.Fd(), k.A.Device)
}

// pair returns a lab with two namespaces.
func pair(t *testing.T) (l *Lab, a, b *Namespace) {
	t.Helper()
	l = ForTest(t)
	a, err := l.Namespace("a")
	b, err2 := l.Namespace("b")
	if err := errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
	return l, a, b
}

// TestLink: bytes pass through a link, from a process in one namespace to a listener in the other.
// While the link is down none pass. The network of this process is unchanged.
func TestLink(t *testing.T) {
	before, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	l, a, b := pair(t)
	k, err := l.Link(a, b, LinkOptions{RateBits: 100e6})
	if err != nil {
		t.Fatal(err)
	}
	var listener net.Listener
	if err := b.Do(func() (err error) { listener, err = net.Listen("tcp", k.B.IP().String()+":0"); return err }); err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	dial := func(within time.Duration) (nc net.Conn, err error) {
		err = a.Do(func() (err error) {
			nc, err = (&net.Dialer{Timeout: within}).Dial("tcp", listener.Addr().String())
			return err
		})
		return nc, err
	}
	out, err := dial(time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	in, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	const n = 1 << 20
	go func() { _, _ = out.Write(make([]byte, n)) }()
	if got, err := io.CopyN(io.Discard, in, n); err != nil {
		t.Fatalf("%d bytes: %v", got, err)
	}
	if nc, err := net.DialTimeout("tcp", listener.Addr().String(), time.Second); err == nil {
		nc.Close()
		t.Error("the listener can be reached from outside of the lab")
	}
	var text strings.Builder
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestInside$", "-test.v")
	cmd.Env = append(os.Environ(), insideEnv+"="+k.A.Device)
	cmd.Stdout = &text
	if err := errors.Join(a.Start(cmd), cmd.Wait()); err != nil {
		t.Errorf("inside of %v: %v\n%s", a, err, text.String())
	}
	if err := k.SetUp(false); err != nil {
		t.Fatal(err)
	}
	if nc, err := dial(time.Second); err == nil {
		nc.Close()
		t.Error("a link that is down carries a connection")
	}
	if err := k.SetUp(true); err != nil {
		t.Fatal(err)
	}
	again, err := dial(time.Minute)
	if err != nil {
		t.Fatalf("a link that is up again: %v", err)
	}
	again.Close()
	if after, err := net.Interfaces(); err != nil || len(after) != len(before) {
		t.Errorf("this process had %d interfaces and has %d (%v)", len(before), len(after), err)
	}
}

// insideEnv has the name of the interface that TestInside must find.
const insideEnv = "PENSTOCK_NETLAB_TEST_INSIDE"

// TestInside is TestLink's process in a namespace: it sees only loopback and the link.
func TestInside(t *testing.T) {
	want := os.Getenv(insideEnv)
	if want == "" {
		t.Skip("is run by TestLink, inside of a lab")
	}
	devs, err := net.Interfaces()
	if err != nil || len(devs) != 2 || devs[0].Name != "lo" || devs[1].Name != want {
		t.Errorf("interfaces %+v (%v), want lo and %s", devs, err, want)
	}
}

// TestKilled: after kill -9 of the process with a lab, no part of the lab is left. The other end of
// a link into a namespace that only the dead process used is gone.
func TestKilled(t *testing.T) {
	ForTest(t)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), childEnv+"=1")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	path, device, ok := strings.Cut(strings.TrimSpace(line), " ")
	if !ok || !strings.HasPrefix(path, "/proc/") {
		t.Fatalf("the child says %q", line)
	}
	ns, err := os.Open(path) // from here on this process uses a too, but not b
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	nl, err := netlink.NewHandleAt(netns.NsHandle(ns.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	defer nl.Close()
	if _, err := nl.LinkByName(device); err != nil {
		t.Fatalf("before the kill: %v", err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	// The kernel removes namespaces in the background.
	for deadline := time.Now().Add(30 * time.Second); ; {
		_, err := nl.LinkByName(device)
		if errors.As(err, &netlink.LinkNotFoundError{}) {
			return
		}
		if err != nil || time.Now().After(deadline) {
			t.Fatalf("%s is still there (%v)", device, err)
		}
		<-time.After(10 * time.Millisecond)
	}
}
