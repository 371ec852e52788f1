package peer

import (
	"bufio"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/penstock-kv/penstock/lab/bench"
)

// Copy copies blocks from one memory to the other for about d, repeatedly from the first block to
// the last. Its rate is the upper bound for a NIC that is emulated in this machine's memory. The
// sample has the processor time of this process.
func Copy(ctx context.Context, to, from []byte, blockBytes int, d time.Duration) (bench.Sample, error) {
	blocks := min(len(to), len(from)) / blockBytes
	if blocks == 0 {
		return nil, fmt.Errorf("copy blocks of %d bytes from %d bytes of memory to %d: at least one block must fit", blockBytes, len(from), len(to))
	}
	start, cpu, n := time.Now(), SelfCPU(), 0
	for ; (n < blocks || time.Since(start) < d) && ctx.Err() == nil; n++ {
		at := n % blocks * blockBytes
		copy(to[at:at+blockBytes], from[at:at+blockBytes])
	}
	gib := float64(n) * float64(blockBytes) / (1 << 30)
	return bench.Sample{bench.Rate: gib / time.Since(start).Seconds(), bench.CPU: (SelfCPU() - cpu).Seconds() * 1e3 / gib}, nil
}

// WriteLoad is the load of a benchmark of one-sided writes: Depth writes in flight, each of
// WriteBytes bytes. WriteBytes must not exceed the device's maximum message size.
type WriteLoad struct {
	WriteBytes int64
	Depth      int
}

// args returns the arguments of ib_write_bw for both the server and the client. device is
// "NAME[/PORT]"; "": the library's first device. By default ib_write_bw sends nothing inline and
// polls for completions.
func (l WriteLoad) args(device string) []string {
	args := []string{"-F", "--report_gbits", "-s", strconv.FormatInt(l.WriteBytes, 10), "-t", strconv.Itoa(l.Depth)}
	if name, port, ok := strings.Cut(device, "/"); device != "" {
		if args = append(args, "-d", name); ok {
			args = append(args, "-i", port)
		}
	}
	return args
}

// errNoRate: ib_write_bw printed no rate. ib_write_bw counts processor cycles, and first measures
// the duration of a cycle. This measurement fails on busy emulated CPUs.
var errNoRate = errors.New("ib_write_bw: its output has no rate")

// ibTries is how often ib_write_bw is run to get a rate.
const ibTries = 5

// ibFirst is the number of writes, in addition to twice the depth, of the first ib_write_bw run.
// The rate of this run determines how many writes fill a turn. ib_write_bw needs at least 5 writes.
const ibFirst = 16

// IBWrite runs ib_write_bw (perftest) for about d from a device to itself; "": the library's first
// device. It passes ib_write_bw a number of writes and not a duration. With a duration, ib_write_bw
// excludes the beginning and the end of the run; on a software device, these two parts are the
// whole run.
func IBWrite(ctx context.Context, device string, l WriteLoad, d time.Duration) (bench.Sample, error) {
	if l.WriteBytes < 1 || l.Depth < 1 {
		return nil, fmt.Errorf("ib_write_bw: %d writes of %d bytes in flight; at least 1 write of 1 byte is needed", l.Depth, l.WriteBytes)
	}
	first := 2*l.Depth + ibFirst
	s, err := l.write(ctx, device, first)
	if err != nil {
		return nil, err
	}
	n := int(min(s[bench.Rate]*(1<<30)/float64(l.WriteBytes)*d.Seconds(), 1<<20))
	if n <= first {
		return s, nil
	}
	return l.write(ctx, device, n)
}

// write runs n writes.
func (l WriteLoad) write(ctx context.Context, device string, n int) (s bench.Sample, err error) {
	args := append(l.args(device), "-n", strconv.Itoa(n))
	for range ibTries {
		var out string
		if out, err = clientServer(ctx, "ib_write_bw", args, "127.0.0.1"); err != nil {
			return nil, err
		}
		if s, err = parseIBWrite(out, l.WriteBytes); !errors.Is(err, errNoRate) {
			break
		}
	}
	return s, err
}

// parseIBWrite finds the row of figures for a size in ib_write_bw's table.
func parseIBWrite(out string, writeBytes int64) (bench.Sample, error) {
	// #bytes #iterations BW peak[Gb/sec] BW average[Gb/sec] MsgRate[Mpps]
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		if len(f) < 5 || f[0] != strconv.FormatInt(writeBytes, 10) {
			continue
		}
		gbits, err := strconv.ParseFloat(f[3], 64)
		if err != nil || !(gbits > 0) || math.IsInf(gbits, 0) {
			break
		}
		return bench.Sample{bench.Rate: gbits * 1e9 / 8 / (1 << 30)}, nil
	}
	return nil, fmt.Errorf("%w for writes of %d bytes: %.300s", errNoRate, writeBytes, out)
}

// FabricRMA runs fi_rma_bw (fabtests) over a libfabric provider, with server and client on this
// host.
func FabricRMA(ctx context.Context, provider string, load WriteLoad) (bench.Sample, error) {
	args := []string{"-e", "rdm", "-o", "write", "-p", provider, "-S", strconv.FormatInt(load.WriteBytes, 10), "-W", strconv.Itoa(load.Depth)}
	out, err := clientServer(ctx, "fi_rma_bw", args, "127.0.0.1")
	if err != nil {
		return nil, err
	}
	return parseFabtests(out, "fi_rma_bw")
}

// fabricLoop is the source code of a C program that writes over libfabric in a loop.
//
//go:embed fabricrma/fabric_rma.c
var fabricLoop []byte

// FabricLoop is a compiled C program that transfers bytes through libfabric alone, for comparison.
type FabricLoop struct{ dir, provider string }

// StartFabricLoop compiles the program and selects the first name in providers that works.
// providers are the names of one provider in different versions of libfabric.
func StartFabricLoop(ctx context.Context, providers ...string) (_ *FabricLoop, err error) {
	for _, need := range [][2]string{{"cc", "gcc"}, {"pkg-config", "pkg-config"}} {
		if why := Installed(need[0], need[1]); why != "" {
			return nil, fmt.Errorf("fi_rma_bw (fabtests) is not installed and its replacement must be compiled: %s", why)
		}
	}
	l := &FabricLoop{}
	if l.dir, err = os.MkdirTemp("", "penstock-bench-fabric-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.Close())
		}
	}()
	source := filepath.Join(l.dir, "fabric_rma.c")
	if err := os.WriteFile(source, fabricLoop, 0o600); err != nil {
		return nil, err
	}
	out, err := exec.CommandContext(ctx, "cc", "-O2", "-o", l.program(), source, "-lfabric").CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("compile a loop of writes (needs libfabric-dev): %w: %.300s", err, out)
	}
	for _, l.provider = range providers {
		if _, err = l.Run(ctx, WriteLoad{WriteBytes: 1 << 20, Depth: 1}, 50*time.Millisecond); err == nil {
			return l, nil
		}
	}
	return nil, err
}

func (l *FabricLoop) program() string { return filepath.Join(l.dir, "fabric_rma") }

// Run writes for the duration d and returns the rate. load has at most 64 MiB per write and at most
// 1,024 writes in flight.
func (l *FabricLoop) Run(ctx context.Context, load WriteLoad, d time.Duration) (bench.Sample, error) {
	cmd := exec.CommandContext(ctx, l.program(), l.provider, fmt.Sprint(d.Seconds()), strconv.FormatInt(load.WriteBytes, 10), strconv.Itoa(load.Depth))
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			err = fmt.Errorf("%w: %.300s", err, exit.Stderr)
		}
		return nil, fmt.Errorf("a loop of writes over libfabric's %s: %w", l.provider, err)
	}
	var bytes, seconds float64
	if _, err := fmt.Sscan(string(out), &bytes, &seconds); err != nil || bytes <= 0 || seconds <= 0 {
		return nil, fmt.Errorf("a loop of writes over libfabric's %s printed %q (%v)", l.provider, out, err)
	}
	return bench.Sample{bench.Rate: bytes / (1 << 30) / seconds}, nil
}

// Close removes the program.
func (l *FabricLoop) Close() error { return os.RemoveAll(l.dir) }

// parseFabtests returns the rate in the last row of the output of a libfabric benchmark. The
// rate is in the column MB/sec (10^6 bytes).
func parseFabtests(out, program string) (bench.Sample, error) {
	column, rate := -1, 0.0
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		if column < 0 {
			for i, name := range f {
				if name == "MB/sec" {
					column = i
				}
			}
			continue
		}
		if len(f) > column {
			if v, err := strconv.ParseFloat(f[column], 64); err == nil {
				rate = v
			}
		}
	}
	if rate <= 0 {
		return nil, fmt.Errorf("%s: its output has no column MB/sec: %.300s", program, out)
	}
	return bench.Sample{bench.Rate: rate * 1e6 / (1 << 30)}, nil
}

// wholeSeconds returns d in whole seconds, at least 1.
func wholeSeconds(d time.Duration) int { return max(1, int(d.Round(time.Second)/time.Second)) }

// clientServer runs a program as server and, once the server listens, as client. It
// returns the client's output. The port of the control connection is passed as -p
// (ib_write_bw) or as -B and -P (libfabric's programs).
func clientServer(ctx context.Context, program string, args []string, server string) (string, error) {
	port, err := freePort()
	if err != nil {
		return "", err
	}
	serverPort, clientPort := []string{"-p", strconv.Itoa(port)}, []string{"-p", strconv.Itoa(port)}
	if strings.HasPrefix(program, "fi_") {
		serverPort, clientPort = []string{"-B", strconv.Itoa(port)}, []string{"-P", strconv.Itoa(port)}
	}
	p, err := start(exec.Command(program, append(args[:len(args):len(args)], serverPort...)...))
	if err != nil {
		return "", err
	}
	defer p.Kill()
	if err := p.waitListening(port); err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, program, append(append(args[:len(args):len(args)], clientPort...), server)...)
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			err = fmt.Errorf("%w: %.300s", err, exit.Stderr)
		}
		return "", fmt.Errorf("%s: %w: %.300s", program, err, out)
	}
	return string(out), nil
}

// waitListening waits until a process listens on the TCP port. It does not connect to the
// port, because these programs serve one client and then end.
func (p *Process) waitListening(port int) error {
	want := fmt.Sprintf(":%04X", port)
	for {
		for _, table := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
			if listening(table, want) {
				return nil
			}
		}
		select {
		case <-p.exited:
			return fmt.Errorf("%s ended before it listened: %w: %s", p.cmd.Path, p.err, strings.TrimSpace(p.stderr.String()))
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// listening reports whether a table of TCP sockets (/proc/net/tcp or tcp6) has a listener on a
// port. port is in the table's notation, ":" and four hexadecimal digits.
func listening(table, port string) bool {
	f, err := os.Open(table)
	if err != nil {
		return false
	}
	defer f.Close()
	const stateListen = "0A"
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		c := strings.Fields(lines.Text())
		if len(c) > 3 && strings.HasSuffix(c[1], port) && c[3] == stateListen {
			return true
		}
	}
	return false
}
