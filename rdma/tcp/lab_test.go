//go:build linux

package tcp

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/netlab"
	"github.com/penstock-kv/penstock/rdma"
)

// The tests here run two processes in two network namespaces, joined by two rate-limited links:
// a mover writes to a target. Both processes run this test binary. They read commands from
// standard input and answer each with one line.
//
//	test ──"two"──► mover lab0 ═══ 200 Mbit/s ═══ lab0 target ◄──"sum"── test
//	                      lab1 ═══ 200 Mbit/s ═══ lab1

// Environment of the two processes: labRole is target or mover, labNICs is "device,address" for
// each NIC, labDesc is the Desc of the target's memory.
const (
	labRole = "PENSTOCK_TCP_TEST_LAB_ROLE"
	labNICs = "PENSTOCK_TCP_TEST_LAB_NICS"
	labDesc = "PENSTOCK_TCP_TEST_LAB_DESC"
)

// Sizes of the lab's traffic.
const (
	labRateBits  = 200_000_000
	labBytes     = 32 << 20 // memory of each process
	labWrite     = 2 << 20
	labInFlight  = 8
	labFireBytes = 80 << 20
)

// runLab runs one of the two processes.
func runLab(role string) error {
	var nics []NIC
	for _, text := range strings.Fields(os.Getenv(labNICs)) {
		device, ip, _ := strings.Cut(text, ",")
		n := NIC{Device: device, Local: ip}
		if role == "target" {
			n.Listen = ip + ":0"
		}
		nics = append(nics, n)
	}
	mem := newArena(&sinkTB{}, labBytes)
	commands := map[string]func() (string, error){}
	switch role {
	case "target":
		e, err := New(context.Background(), Options{NICs: nics, Token: rdma.Token(testToken)})
		if err != nil {
			return err
		}
		defer e.Close()
		r, err := e.Register(mem, rdma.RegisterOptions{})
		if err != nil {
			return err
		}
		raw, err := r.Desc().MarshalBinary()
		if err != nil {
			return err
		}
		fmt.Println(base64.StdEncoding.EncodeToString(raw))
		commands["sum"] = func() (string, error) {
			st := e.Stats()
			return fmt.Sprintf("%x %d writes %d immediates", sha256.Sum256(mem), st.WritesIn, st.ImmediatesIn), nil
		}
	case "mover":
		m, err := newMover(nics, mem)
		if err != nil {
			return err
		}
		defer m.close()
		fmt.Println("ready")
		commands["one"] = func() (string, error) { return m.time(m.one, labBytes) }
		commands["two"] = func() (string, error) { return m.time(m.two, 2*labBytes) }
		commands["fire"] = m.fire
		commands["fired"] = m.fired
		commands["up"] = m.up
	}
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		do := commands[lines.Text()]
		if do == nil {
			return fmt.Errorf("no command %q", lines.Text())
		}
		answer, err := do()
		if err != nil {
			answer = "error: " + err.Error()
		}
		fmt.Println(answer)
	}
	return nil
}

// mover writes to the target, over one NIC or over two.
type mover struct {
	one, two *toTarget
	mem      []byte
	done     chan string
}

// toTarget is an engine that has a session with the target.
type toTarget struct {
	e   *Engine
	src rdma.Region
	dst rdma.Desc
}

func newMover(nics []NIC, mem []byte) (*mover, error) {
	for i := range mem {
		mem[i] = byte(i * 7 >> 3)
	}
	raw, err := base64.StdEncoding.DecodeString(os.Getenv(labDesc))
	if err != nil {
		return nil, err
	}
	var dst rdma.Desc
	if err := dst.UnmarshalBinary(raw); err != nil {
		return nil, err
	}
	m := &mover{mem: mem, done: make(chan string, 1)}
	for _, x := range []struct {
		session **toTarget
		n       int
	}{{&m.one, 1}, {&m.two, 2}} {
		e, err := New(context.Background(), Options{NICs: nics[:x.n], Conns: 2})
		if err != nil {
			return nil, err
		}
		addr := dst.Addr()
		addr.NICs = addr.NICs[:x.n]
		if _, err := e.Connect(context.Background(), addr, rdma.Token(testToken)); err != nil {
			return nil, err
		}
		src, err := e.Register(mem, rdma.RegisterOptions{Local: true})
		if err != nil {
			return nil, err
		}
		*x.session = &toTarget{e, src, dst}
	}
	return m, nil
}

func (m *mover) close() { _, _ = m.one.e.Close(), m.two.e.Close() }

// move writes n bytes with several writes in flight and returns how many writes failed. first,
// if set, is called when the first write has landed.
func (l *toTarget) move(n int, imm rdma.Imm, first func()) (writes, failed int, _ error) {
	slots := make(chan struct{}, labInFlight)
	var mu sync.Mutex
	for at := 0; at < n; at += labWrite {
		slots <- struct{}{}
		off := uint64(at % labBytes)
		writes++
		if err := l.e.Write(context.Background(), rdma.Write{Src: l.src, SrcOffset: off, Dst: l.dst, DstOffset: off, Len: labWrite, Imm: imm, Done: func(err error) {
			mu.Lock()
			if err != nil {
				failed++
			}
			if first != nil {
				first()
				first = nil
			}
			mu.Unlock()
			<-slots
		}}); err != nil {
			return writes, failed, err
		}
	}
	for range cap(slots) {
		slots <- struct{}{}
	}
	mu.Lock()
	defer mu.Unlock()
	return writes, failed, nil
}

// time moves n bytes and returns the rate in bytes per second.
func (m *mover) time(l *toTarget, n int) (string, error) {
	start := time.Now()
	if _, failed, err := l.move(n, rdma.Imm{}, nil); err != nil || failed > 0 {
		return "", fmt.Errorf("%d writes failed: %w", failed, err)
	}
	return fmt.Sprintf("%.0f", float64(n)/time.Since(start).Seconds()), nil
}

// fire starts to move labFireBytes over two NICs and returns when the first write has landed.
func (m *mover) fire() (string, error) {
	first := make(chan struct{})
	go func() {
		writes, failed, err := m.two.move(labFireBytes, rdma.ImmOf(1), func() { close(first) })
		nics := m.two.e.NICs()
		m.done <- fmt.Sprintf("%d writes, %d failed, %v; %d resent; NICs %v %v: %s", writes, failed, err,
			m.two.e.framesResent.Load(), nics[0].Up, nics[1].Up, nics[1].Reason)
	}()
	<-first
	return "firing", nil
}

// fired returns when all bytes have been moved.
func (m *mover) fired() (string, error) { return <-m.done, nil }

// up returns when both rails are up.
func (m *mover) up() (string, error) {
	for deadline := time.Now().Add(time.Minute); upRails(m.two.e) < 2; <-time.After(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			return "", errors.New("the second rail does not come up")
		}
	}
	return fmt.Sprintf("%x", sha256.Sum256(m.mem)), nil
}

// worker is one of the processes, driven by the test.
type worker struct {
	t     *testing.T
	in    io.WriteCloser
	lines *bufio.Scanner
	first string
}

// startWorker starts a process in a namespace.
func startWorker(t *testing.T, ns *netlab.Namespace, role, desc string, ends ...netlab.End) *worker {
	t.Helper()
	var nics []string
	for _, e := range ends {
		nics = append(nics, fmt.Sprintf("%s,%v", e.Device, e.IP()))
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), labRole+"="+role, labNICs+"="+strings.Join(nics, " "), labDesc+"="+desc)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := ns.Start(cmd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close()
		stuck := time.AfterFunc(30*time.Second, func() { _ = cmd.Process.Kill() })
		defer stuck.Stop()
		if err := cmd.Wait(); err != nil {
			t.Errorf("%s: %v", role, err)
		}
	})
	w := &worker{t: t, in: in, lines: bufio.NewScanner(out)}
	w.first = w.read()
	return w
}

// ask sends a command and returns the answer.
func (w *worker) ask(line string) string {
	w.t.Helper()
	if _, err := fmt.Fprintln(w.in, line); err != nil {
		w.t.Fatal(err)
	}
	return w.read()
}

func (w *worker) read() string {
	w.t.Helper()
	if !w.lines.Scan() {
		w.t.Fatalf("the process has ended: %v", w.lines.Err())
	}
	if strings.HasPrefix(w.lines.Text(), "error") {
		w.t.Fatal(w.lines.Text())
	}
	return w.lines.Text()
}

// twoLinks starts target and mover with two links between them.
func twoLinks(t *testing.T, rates ...uint64) (target, move *worker, links []*netlab.Link) {
	t.Helper()
	testkit.VerifyNone(t)
	lab := netlab.ForTest(t)
	a, err := lab.Namespace("mover")
	b, err2 := lab.Namespace("target")
	if err := errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
	for _, rate := range rates {
		k, err := lab.Link(a, b, netlab.LinkOptions{RateBits: rate})
		if err != nil {
			t.Fatal(err)
		}
		links = append(links, k)
	}
	target = startWorker(t, b, "target", "", links[0].B, links[1].B)
	move = startWorker(t, a, "mover", target.first, links[0].A, links[1].A)
	return target, move, links
}

// ratioRounds is the largest number of rounds of one NIC and two NICs.
const ratioRounds = 8

// ratio alternates transfers over one NIC and over two until two have at least want times the
// rate of one, and returns the best ratio. The best is used because other load on this machine
// can only lower the ratio.
func ratio(t *testing.T, move *worker, want float64) (best float64) {
	t.Helper()
	rate := func(line string) (v float64) {
		if _, err := fmt.Sscan(move.ask(line), &v); err != nil {
			t.Fatal(err)
		}
		return v
	}
	for round := 0; round < ratioRounds && best < want; round++ {
		one, two := rate("one"), rate("two")
		best = max(best, two/one)
		t.Logf("one NIC %.1f MB/s, two %.1f MB/s", one/1e6, two/1e6)
	}
	return best
}

// TestTwoNICs: two NICs with the same rate limit carry at least 1.9 times the rate of one.
func TestTwoNICs(t *testing.T) {
	testkit.Long(t, "fills links of set rates in network namespaces")
	skipRace(t)
	_, move, _ := twoLinks(t, labRateBits, labRateBits)
	if r := ratio(t, move, 1.9); r < 1.9 {
		t.Errorf("two NICs carry %.2f times what one does, want 1.9", r)
	}
}

// TestUnequalNICs: a second NIC with a third of the rate adds most of its rate and does not
// delay the first.
func TestUnequalNICs(t *testing.T) {
	testkit.Long(t, "fills links of set rates in network namespaces")
	skipRace(t)
	_, move, _ := twoLinks(t, labRateBits, labRateBits/3)
	if r := ratio(t, move, 1.25); r < 1.25 {
		t.Errorf("NICs of rate 1 and 1/3 carry %.2f times what the first does, want 4/3", r)
	}
}

// skipRace skips rate comparisons that would measure the race detector.
func skipRace(t *testing.T) {
	if raceEnabled {
		t.Skip("needs a build without the race detector, which is slower than the links")
	}
}

// TestLinkDown: a link that goes down during a transfer loses nothing: every write lands, and
// every immediate is counted once. The link is used again when it is up.
func TestLinkDown(t *testing.T) {
	testkit.Long(t, "fills links of set rates in network namespaces")
	target, move, links := twoLinks(t, labRateBits, labRateBits)
	move.ask("up")
	move.ask("fire")
	if err := links[1].SetUp(false); err != nil {
		t.Fatal(err)
	}
	const writes = labFireBytes / labWrite
	said := move.ask("fired")
	if want := fmt.Sprintf("%d writes, 0 failed, <nil>;", writes); !strings.HasPrefix(said, want) || !strings.Contains(said, "NICs true false: tcp: interface lab1 has no carrier") {
		t.Errorf("the mover answers %q, want %q, and NIC 1 without carrier", said, want)
	}
	t.Log(said)
	got := target.ask("sum")
	if err := links[1].SetUp(true); err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("%s %d writes %d immediates", move.ask("up"), writes, writes); got != want {
		t.Errorf("the target has %q, want %q", got, want)
	}
	if !raceEnabled {
		if r := ratio(t, move, 1.5); r < 1.5 {
			t.Errorf("after the link is up again two NICs carry %.2f times what one does", r)
		}
	}
}
