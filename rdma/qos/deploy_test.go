//go:build linux

package qos

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
)

// script runs a script of deploy/qos.
func script(t *testing.T, name string, args ...string) string {
	t.Helper()
	path := filepath.Join(testkit.RepositoryRoot(t), "deploy", "qos", name)
	out, err := exec.Command("sh", append([]string{path}, args...)...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// TestRoCEScript: the settings that roce.sh prints pass Check with the default marks.
func TestRoCEScript(t *testing.T) {
	out := script(t, "roce.sh", "eth0")
	r, err := Check(out, Default())
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Deviations) != 0 || fmt.Sprintf("%.3f", r.HighShare) != "0.990" {
		t.Errorf("%+v\n%s", r, out)
	}
}

// TestTCScript: after tc.sh was applied to an interface of the test, packets with the cache's mark go
// to the low class, with any ECN bits, and the low class gets its small share while both classes
// are busy.
func TestTCScript(t *testing.T) {
	ns := namespace(t)
	path := filepath.Join(testkit.RepositoryRoot(t), "deploy", "qos", "tc.sh")
	inside(t, ns, "sh", path, "--apply", "v0", "8mbit")
	m := Default()
	kv := m.Lane(rdma.ClassKV).TOS()

	before := classPackets(t, ns)
	inside(t, ns, os.Args[0], "-test.run=TestSender", "-test.v", "send", "5", strconv.Itoa(kv), strconv.Itoa(kv|1))
	inside(t, ns, os.Args[0], "-test.run=TestSender", "-test.v", "send", "3", "0")
	after := classPackets(t, ns)
	if low := after["1:20"].packets - before["1:20"].packets; low != 10 {
		t.Errorf("%d packets of 10 in the low class\n%v\n%v", low, before, after)
	}
	if high := after["1:10"].packets - before["1:10"].packets; high < 3 {
		t.Errorf("%d packets of 3 in the high class\n%v\n%v", high, before, after)
	}

	flooded := floodLine.FindStringSubmatch(inside(t, ns, os.Args[0], "-test.run=TestSender", "-test.v", "flood", strconv.Itoa(kv), "0"))
	if flooded == nil {
		t.Fatal("the senders did not report")
	}
	high, _ := strconv.Atoi(flooded[1])
	low, _ := strconv.Atoi(flooded[2])
	share := float64(high) / float64(low+high)
	if share < 0.95 || low == 0 {
		t.Errorf("with both busy, the high class sent %d bytes, the low one %d: %.3f", high, low, share)
	}
	t.Logf("with both busy, the high class has %.3f", share)

	// Apply the script a second time, then remove the classes.
	inside(t, ns, "sh", path, "--apply", "v0", "25gbit")
	inside(t, ns, "sh", path, "--remove", "v0")
	if left := classPackets(t, ns); len(left) != 0 {
		t.Errorf("classes after --remove: %v", left)
	}
}

// namespace makes a network namespace with an interface v0, whose packets to 10.99.0.2 are dropped
// at v1.
func namespace(t *testing.T) string {
	ns := fmt.Sprintf("pst-qos-%d", os.Getpid())
	if missing := cannotShape(t, ns); missing != "" {
		if os.Getenv("CI") == "true" {
			t.Fatal(missing)
		}
		t.Skip(missing)
	}
	command(t, "ip", "-n", ns, "link", "add", "v0", "type", "veth", "peer", "name", "v1")
	command(t, "ip", "-n", ns, "link", "set", "v1", "up")
	command(t, "ip", "-n", ns, "link", "set", "v0", "up")
	command(t, "ip", "-n", ns, "addr", "add", "10.99.0.1/24", "dev", "v0")
	command(t, "ip", "-n", ns, "neigh", "add", "10.99.0.2", "lladdr", "02:00:00:00:00:02", "dev", "v0")
	return ns
}

// cannotShape makes the namespace. If this machine cannot do that, or cannot shape traffic in
// the namespace, it returns the reason.
func cannotShape(t *testing.T, ns string) string {
	for _, tool := range []string{"ip", "tc"} {
		if _, err := exec.LookPath(tool); err != nil {
			return "no " + tool + " in PATH (package iproute2)"
		}
	}
	if out, err := exec.Command("ip", "netns", "add", ns).CombinedOutput(); err != nil {
		return fmt.Sprintf("no network namespace can be made, which needs root and CAP_SYS_ADMIN: %v: %s", err, out)
	}
	t.Cleanup(func() { command(t, "ip", "netns", "del", ns) })
	if out, err := exec.Command("tc", "-n", ns, "qdisc", "add", "dev", "lo", "root", "htb").CombinedOutput(); err != nil {
		return fmt.Sprintf("the kernel has no HTB (CONFIG_NET_SCH_HTB): %v: %s", err, out)
	}
	return ""
}

func command(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

func inside(t *testing.T, ns string, args ...string) string {
	t.Helper()
	return command(t, "ip", append([]string{"netns", "exec", ns}, args...)...)
}

// class has the counters of tc for one class; backlog is in packets.
type class struct{ bytes, packets, backlog int }

var (
	classLine = regexp.MustCompile(`class htb (\S+) [^\n]*\n Sent (\d+) bytes (\d+) pkt[^\n]*\n backlog \S+ (\d+)p`)
	floodLine = regexp.MustCompile(`flood: high (\d+) bytes, low (\d+) bytes`)
)

// classPackets reads tc's counters by class.
func classPackets(t *testing.T, ns string) map[string]class {
	t.Helper()
	return classes(inside(t, ns, "tc", "-s", "class", "show", "dev", "v0"))
}

func classes(text string) map[string]class {
	out := make(map[string]class)
	for _, m := range classLine.FindAllStringSubmatch(text, -1) {
		b, _ := strconv.Atoi(m[2])
		p, _ := strconv.Atoi(m[3])
		waiting, _ := strconv.Atoi(m[4])
		out[m[1]] = class{b, p, waiting}
	}
	return out
}

// TestSender is the part of TestTCScript that runs in the namespace, with
// arguments after the flags: send COUNT TOS…, or flood TOS….
func TestSender(t *testing.T) {
	args := os.Args[len(os.Args)-1:]
	for i, a := range os.Args {
		if a == "send" || a == "flood" {
			args = os.Args[i:]
		}
	}
	switch args[0] {
	case "send":
		count, err := strconv.Atoi(args[1])
		if err != nil {
			t.Fatal(err)
		}
		for _, tos := range args[2:] {
			send(t, tos, func(i int) bool { return i < count }, 64)
		}
	case "flood":
		flood(t, args[1:])
	default:
		t.Skip("runs as a child of TestTCScript")
	}
}

// flood keeps every class busy, and prints the bytes that each class sent meanwhile.
func flood(t *testing.T, marks []string) {
	var stop atomic.Bool
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop.Store(true)
	for _, tos := range marks {
		wg.Go(func() { send(t, tos, func(int) bool { return !stop.Load() }, 1200) })
	}
	// A sender may have to wait for a processor, and its class is then not busy. So only
	// the intervals in which both classes always had packets are counted.
	const enough = 500 << 10
	var high, low int
	from := busy(t)
	for end := time.Now().Add(2 * time.Minute); time.Now().Before(end) && !t.Failed(); {
		to := busy(t)
		if waited(from, to, "1:10") && waited(from, to, "1:20") {
			high += to["1:10"].bytes - from["1:10"].bytes
			low += to["1:20"].bytes - from["1:20"].bytes
		}
		if high+low >= enough {
			t.Logf("flood: high %d bytes, low %d bytes", high, low)
			return
		}
		from = to
	}
	t.Errorf("the classes were both busy for %d bytes of %d", high+low, enough)
}

// waited reports whether a class always had packets between two readings: it sent fewer packets than
// were waiting at the first.
func waited(from, to map[string]class, id string) bool {
	return to[id].packets-from[id].packets < from[id].backlog
}

func busy(t *testing.T) map[string]class {
	return classes(command(t, "tc", "-s", "class", "show", "dev", "v0"))
}

// send sends datagrams of one mark. A socket that has filled its buffer waits for
// the interface, so its class always has packets waiting.
func send(t *testing.T, tos string, more func(sent int) bool, sizeBytes int) {
	mark, err := strconv.Atoi(tos)
	if err != nil {
		t.Error(err)
		return
	}
	d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error {
		var inner error
		err := c.Control(func(fd uintptr) {
			// The buffer has room for the bytes of one second of the shaped link.
			inner = errors.Join(unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_TOS, mark),
				unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 1<<20))
		})
		if err != nil {
			return err
		}
		return inner
	}}
	conn, err := d.Dial("udp4", "10.99.0.2:9")
	if err != nil {
		t.Error(err)
		return
	}
	defer conn.Close()
	for i := 0; more(i); i++ {
		if _, err := conn.Write(make([]byte, sizeBytes)); err != nil {
			t.Error(err)
			return
		}
	}
}
