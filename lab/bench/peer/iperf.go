package peer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"time"

	"github.com/penstock-kv/penstock/lab/bench"
)

// Iperf is an iperf3 server on the loopback interface.
type Iperf struct {
	*Process
	port int
}

// StartIperf starts it.
func StartIperf() (*Iperf, error) {
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	p, err := start(exec.Command("iperf3", "-s", "-p", strconv.Itoa(port), "-B", "127.0.0.1"))
	if err != nil {
		return nil, err
	}
	if err := p.waitPort(loopback(port)); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return &Iperf{p, port}, nil
}

// IperfLoad is what iperf3 sends: over Conns connections, writes of WriteBytes,
// at most 1 MiB. WindowBytes, unless 0, bounds what a connection has in flight; the
// kernel makes it 64 KiB at least and takes up to twice of it.
type IperfLoad struct {
	Conns                   int
	WriteBytes, WindowBytes int64
}

// Run sends for about d (whole seconds), and returns the rate in GiB/s and the
// processor time of both ends.
func (i *Iperf) Run(ctx context.Context, l IperfLoad, d time.Duration) (bench.Sample, error) {
	args := []string{
		"-c", "127.0.0.1", "-p", strconv.Itoa(i.port), "-P", strconv.Itoa(l.Conns), "-C", Congestion,
		"-l", strconv.FormatInt(min(l.WriteBytes, 1<<20), 10), "-t", strconv.Itoa(wholeSeconds(d)), "-J",
	}
	if l.WindowBytes > 0 {
		args = append(args, "-w", strconv.FormatInt(max(l.WindowBytes, 64<<10), 10))
	}
	out, err := exec.CommandContext(ctx, "iperf3", args...).Output()
	if err != nil {
		return nil, fmt.Errorf("iperf3: %w: %.300s", err, out)
	}
	return parseIperf(out)
}

func parseIperf(out []byte) (bench.Sample, error) {
	var r struct {
		Error string
		End   struct {
			Received struct {
				Bytes   int64   `json:"bytes"`
				Seconds float64 `json:"seconds"`
			} `json:"sum_received"`
			CPU struct {
				Host   float64 `json:"host_total"`
				Remote float64 `json:"remote_total"`
			} `json:"cpu_utilization_percent"`
		}
	}
	if err := json.Unmarshal(out, &r); err != nil {
		return nil, fmt.Errorf("iperf3: its output is not what 3.x prints: %w", err)
	}
	got := r.End.Received
	if r.Error != "" || got.Bytes == 0 || got.Seconds == 0 {
		return nil, fmt.Errorf("iperf3: it moved no bytes: %s", r.Error)
	}
	gib := float64(got.Bytes) / (1 << 30)
	return bench.Sample{
		bench.Rate: gib / got.Seconds,
		bench.CPU:  (r.End.CPU.Host + r.End.CPU.Remote) / 100 * got.Seconds * 1e3 / gib,
	}, nil
}
