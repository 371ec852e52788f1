package peer

import (
	"bytes"
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/bench"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestParseFio(t *testing.T) {
	const out = `note: something
{"jobs":[{"error":0,"usr_cpu":2.5,"sys_cpu":7.5,"job_runtime":1000,
"read":{"io_bytes":2147483648,"runtime":1000},"write":{"io_bytes":0,"runtime":0}}]}`
	s, err := parseFio([]byte(out))
	if err != nil || s[bench.Rate] != 2048 || s[bench.CPU] != 50 {
		t.Errorf("parseFio = %v, %v; want 2048 MiB/s and 50 ms/GiB", s, err)
	}
	for _, bad := range []string{"", "{", `{"jobs":[]}`, `{"jobs":[{"error":5}]}`, `{"jobs":[{"error":0}]}`} {
		if s, err := parseFio([]byte(bad)); err == nil {
			t.Errorf("parseFio(%q) = %v", bad, s)
		}
	}
}

func TestParseIperf(t *testing.T) {
	const out = `{"end":{"sum_received":{"bytes":4294967296,"seconds":2},"cpu_utilization_percent":{"host_total":50,"remote_total":30}}}`
	s, err := parseIperf([]byte(out))
	if err != nil || s[bench.Rate] != 2 || s[bench.CPU] != 400 {
		t.Errorf("parseIperf = %v, %v; want 2 GiB/s and 400 ms/GiB", s, err)
	}
	for _, bad := range []string{"", `{"error":"unable to connect"}`, `{"end":{}}`} {
		if s, err := parseIperf([]byte(bad)); err == nil {
			t.Errorf("parseIperf(%q) = %v", bad, s)
		}
	}
}

// TestProcessCPU: the processor time by process id matches this process's own.
func TestProcessCPU(t *testing.T) {
	before := SelfCPU()
	mid, err := ProcessCPU(os.Getpid())
	after := SelfCPU()
	// The kernel rounds the two clocks differently.
	const slack = 50e6
	if err != nil || mid < before-slack || mid > after+slack {
		t.Errorf("ProcessCPU(self) = %v, %v; want between %v and %v", mid, err, before, after)
	}
	if _, err := ProcessCPU(1 << 22); err == nil {
		t.Error("the processor time of no process is known")
	}
}

// TestStream: the gRPC stream delivers the requested block.
func TestStream(t *testing.T) {
	const blockBytes, blocks = 100_000, 5
	memory := make([]byte, blockBytes*blocks)
	for i := range memory {
		memory[i] = byte(i / blockBytes)
	}
	ctx, cancel := context.WithCancel(t.Context())
	addr := make(chan string, 1)
	served := make(chan error, 1)
	go func() { served <- ServeStream(ctx, memory, blockBytes, func(a string) { addr <- a }) }()
	s, err := DialStream(<-addr)
	if err != nil {
		t.Fatal(err)
	}
	get, err := s.Open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	dst := make([]byte, blockBytes)
	for _, n := range []int{3, 0, 4} {
		if err := get(n, dst); err != nil {
			t.Fatal(err)
		}
		if dst[0] != byte(n) || dst[blockBytes-1] != byte(n) {
			t.Errorf("block %d: got %d…%d", n, dst[0], dst[blockBytes-1])
		}
	}
	if err := get(1, dst[:10]); err == nil {
		t.Error("a block of another length was accepted")
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := <-served; err != nil {
		t.Errorf("ServeStream: %v", err)
	}
}

// TestSockets: each connection repeatedly fills its own part of the memory, from front to
// end. A connection that requests a place outside the memory is closed.
func TestSockets(t *testing.T) {
	const conns, unit = 3, 70_000
	source, target := make([]byte, 1_000_000), make([]byte, 1_000_000)
	for i := range source {
		source[i] = byte(1 + i%251)
	}
	ctx, cancel := context.WithCancel(t.Context())
	addr, served := make(chan string, 1), make(chan error, 1)
	go func() { served <- ServeSockets(ctx, target, func(a string) { addr <- a }) }()
	at := <-addr
	s, err := DialSockets(t.Context(), at, source, conns, unit)
	if err != nil {
		t.Fatal(err)
	}
	length := len(source) / conns
	written := length / unit * unit
	for i := range conns {
		for range length/unit + 1 { // one unit more than fits, so the last one is at the front again
			if n, err := s.Write(i); n != unit || err != nil {
				t.Fatalf("connection %d: wrote %d, %v", i, n, err)
			}
		}
	}
	for i := range conns {
		from := i * length
		if !bytes.Equal(target[from:from+written], source[from:from+written]) || target[from+written] != 0 {
			t.Errorf("connection %d: its part differs from the sent bytes, or is longer", i)
		}
	}
	big := make([]byte, 2*len(source))
	greedy, err := DialSockets(t.Context(), at, big, 1, unit)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := greedy.Write(0); err == nil {
		t.Error("a part larger than the memory was filled")
	}
	if _, err := DialSockets(t.Context(), at, source, conns, len(source)); err == nil {
		t.Error("units larger than a part were accepted")
	}
	cancel()
	if err := errors.Join(<-served, s.Close(), greedy.Close()); err != nil {
		t.Error(err)
	}
}

// TestHardwareOutput: the parsers find the rate in the programs' output. Output without a
// rate causes an error that quotes the output.
func TestHardwareOutput(t *testing.T) {
	const ib = `---------------------------------------------------------------------------------------
                    RDMA_Write BW Test
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 1048576    1234             0.00               8.589934592          0.001024
---------------------------------------------------------------------------------------
`
	const fi = `bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec
1m      20      =20      40m         1.78s     1073.741824   44421.15       0.00
`
	s, err := parseIBWrite(ib, 1<<20)
	if err != nil || s[bench.Rate] != 1 {
		t.Errorf("ib_write_bw: %v, %v; want 1 GiB/s", s, err)
	}
	s, err = parseFabtests(fi, "fi_rma_bw")
	if err != nil || s[bench.Rate] != 1 {
		t.Errorf("fi_rma_bw: %v, %v; want 1 GiB/s", s, err)
	}
	for _, bad := range []string{"", "Couldn't find device", "1048576 1 2", "bytes MB/sec\n1m x"} {
		if s, err := parseIBWrite(bad, 1<<20); err == nil {
			t.Errorf("%q: %v", bad, s)
		}
		if s, err := parseFabtests(bad, "fi_rma_bw"); err == nil {
			t.Errorf("%q: %v", bad, s)
		}
	}
}

// TestIBWriteLoad: ib_write_bw runs with the load of the comparison, and the rate of another
// size is rejected.
func TestIBWriteLoad(t *testing.T) {
	got := WriteLoad{WriteBytes: 64 << 10, Depth: 1}.args("rxe0/2")
	want := []string{"-F", "--report_gbits", "-s", "65536", "-t", "1", "-d", "rxe0", "-i", "2"}
	if !slices.Equal(got, want) {
		t.Errorf("arguments %q; want %q", got, want)
	}
	const table = " 65536    100    0.00    8.589934592    0.016384\n"
	if s, err := parseIBWrite(table, 64<<10); err != nil || s[bench.Rate] != 1 {
		t.Errorf("%v, %v; want 1 GiB/s", s, err)
	}
	if s, err := parseIBWrite(table, 1<<20); !errors.Is(err, errNoRate) || !strings.Contains(err.Error(), "1048576") {
		t.Errorf("the rate of another size: %v, %v", s, err)
	}
	for _, l := range []WriteLoad{{WriteBytes: 0, Depth: 1}, {WriteBytes: 1, Depth: 0}} {
		if s, err := IBWrite(t.Context(), "", l, time.Second); err == nil || !strings.Contains(err.Error(), "at least 1") {
			t.Errorf("%+v: %v, %v", l, s, err)
		}
	}
}

// TestCopy: as many blocks as fit are copied, and blocks that do not fit are rejected.
func TestCopy(t *testing.T) {
	from, to := []byte{1, 2, 3, 4, 5}, make([]byte, 5)
	if s, err := Copy(t.Context(), to, from, 2, time.Millisecond); err != nil || s[bench.Rate] <= 0 || !slices.Equal(to, []byte{1, 2, 3, 4, 0}) {
		t.Errorf("%v, %v; copied %v", s, err, to)
	}
	if _, err := Copy(t.Context(), to, from, 6, time.Millisecond); err == nil {
		t.Error("a block larger than the memory was copied")
	}
}
