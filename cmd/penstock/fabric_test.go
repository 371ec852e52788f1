package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/dualpath/redistribute"
	"github.com/penstock-kv/penstock/lab/netlab"
)

// quickProbe returns the arguments of a short probe.
func quickProbe(more ...string) []string {
	return append([]string{"fabric", "probe", "--rows", "1,64,512,2048", "--warmup", "2", "--repeats", "20", "--format", "json"}, more...)
}

// checkProbe fails unless the result has the requested batches and is consistent.
func checkProbe(t *testing.T, r fabricResult) {
	t.Helper()
	if r.Samples != 80 || len(r.Batches) != 4 || r.Fabric.Validate() != nil {
		t.Fatalf("%+v", r)
	}
	for _, b := range r.Batches {
		if b.Bytes != b.Rows*2184 || b.Median <= 0 || b.P99 < b.Median {
			t.Errorf("%+v", b)
		}
	}
	if r.Signal <= 0 || r.Fabric.Probe <= 0 || r.Fabric.Probe > r.Signal || !(r.MAPE >= 0) {
		t.Errorf("signal %v, %+v, MAPE %v", r.Signal, r.Fabric, r.MAPE)
	}
}

// TestFabricProbe: with both ends in this process, the written file is a valid input of the plan.
func TestFabricProbe(t *testing.T) {
	for _, provider := range []string{"tcp", "shm"} {
		t.Run(provider, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "fabric.json")
			r := decode[fabricResult](t, penstock(t, "", nil, quickProbe("--provider", provider, "--name", "mine", "--write", path)...))
			checkProbe(t, r)
			if r.Provider != provider || r.Fabric.Name != "mine" {
				t.Errorf("%+v", r)
			}
			plan := decode[struct {
				Fabric redistribute.Fabric `json:"fabric"`
			}](t, penstock(t, "", nil, "plan", "redistribute", "--fabric", path, "--format", "json"))
			if plan.Fabric != r.Fabric {
				t.Errorf("the plan is of %+v, measured was %+v", plan.Fabric, r.Fabric)
			}
		})
	}
}

// TestFabricProbeFlows: the measurement is repeated for each number of concurrent flows, and the
// result is a valid input of the plan.
func TestFabricProbeFlows(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fabric.json")
	r := decode[fabricResult](t, penstock(t, "", nil, quickProbe("--flows", "2", "--write", path)...))
	checkProbe(t, r)
	if len(r.Beside) != 2 || r.Beside[1].Flows != 2 || r.Beside[0].Fabric.Validate() != nil || r.Beside[1].RoundTrip <= 0 {
		t.Errorf("%+v", r.Beside)
	}
	if c := r.Fabric.Contention; c != (redistribute.Contention{}) && c.Free > 1 {
		t.Errorf("%+v beside at most 2 flows", c)
	}
	penstock(t, "", nil, "plan", "redistribute", "--fabric", path, "--flows", "2").must(t)
}

// TestFabricProbePeer: one command listens, and another measures twice. A wrong secret is refused.
func TestFabricProbePeer(t *testing.T) {
	for _, provider := range []string{"tcp", "shm"} {
		t.Run(provider, func(t *testing.T) {
			dir := t.TempDir()
			token := writeFile(t, dir, "token", []byte(strings.Repeat("s", 32)))
			listen := "127.0.0.1:0"
			if provider == "shm" {
				listen = filepath.Join(dir, "probe.sock")
			}
			ctx, cancel := context.WithCancel(t.Context())
			pr, pw := io.Pipe()
			ended := make(chan int, 1)
			go func() {
				code := run(ctx, world{in: strings.NewReader(""), out: io.Discard, err: pw}, []string{"fabric", "probe", "--provider", provider, "--listen", listen, "--token-file", token})
				pw.Close()
				ended <- code
			}()
			line, err := bufio.NewReader(pr).ReadString('\n')
			if err != nil {
				t.Fatalf("%v after %q", err, line)
			}
			go io.Copy(io.Discard, pr)
			_, at, _ := strings.Cut(strings.TrimSuffix(strings.TrimSpace(line), " until interrupted"), " at ")
			for range 2 {
				checkProbe(t, decode[fabricResult](t, penstock(t, "", nil, quickProbe("--provider", provider, "--peer", at, "--token-file", token)...)))
			}
			wrong := writeFile(t, dir, "wrong", []byte(strings.Repeat("w", 32)))
			if r := penstock(t, "", nil, quickProbe("--provider", provider, "--peer", at, "--token-file", wrong)...); r.code != exitFailed || !strings.Contains(r.err, "token") {
				t.Errorf("with another secret: exit %d, %s", r.code, r.err)
			}
			cancel()
			if code := <-ended; code != exitOK {
				t.Errorf("the end that listened: exit %d", code)
			}
		})
	}
}

// TestFabricProbeFile: a file that cannot be written is an error.
func TestFabricProbeFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "no", "such", "directory.json")
	if r := penstock(t, "", nil, quickProbe("--write", path)...); r.code != exitFailed || !strings.Contains(r.err, path) {
		t.Errorf("exit %d, %s", r.code, r.err)
	}
	if _, err := os.Stat(path); err == nil {
		t.Error("it was written")
	}
}

// TestFabricProbeBetweenHosts: two processes on two hosts of a lab are joined by a link of known
// rate. The probe measures that rate.
func TestFabricProbeBetweenHosts(t *testing.T) {
	lab := netlab.ForTest(t)
	a, err := lab.Namespace("a")
	b, err2 := lab.Namespace("b")
	if err := errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
	token := writeFile(t, t.TempDir(), "token", []byte(strings.Repeat("s", 32)))
	for _, rate := range []uint64{200e6, 400e6} {
		k, err := lab.Link(a, b, netlab.LinkOptions{RateBits: rate})
		if err != nil {
			t.Fatal(err)
		}
		at := net.JoinHostPort(k.A.IP().String(), "7440")
		far := exec.Command("/proc/self/exe", "fabric", "probe", "--listen", at, "--token-file", token)
		far.Env = append(os.Environ(), childEnv)
		lines, err := far.StderrPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := a.Start(far); err != nil {
			t.Fatal(err)
		}
		if line, err := bufio.NewReader(lines).ReadString('\n'); err != nil || !strings.Contains(line, at) {
			t.Fatalf("the far end reports %q, %v", line, err)
		}
		// Other load on this machine can distort some of the tries, but not all.
		const tries = 8
		for try := 1; ; try++ {
			r := probeFrom(t, b, at, token)
			ratio := r.Fabric.Bandwidth / (float64(rate) / 8)
			t.Logf("a link of %d Mbit/s is %.2f of that", rate/1e6, ratio)
			if ratio > 0.8 && ratio < 1.2 {
				break
			}
			if try == tries {
				t.Errorf("a link of %d Mbit/s is %.2f of that after %d tries: %+v", rate/1e6, ratio, tries, r)
				break
			}
		}
		if err := errors.Join(far.Process.Signal(os.Interrupt), far.Wait()); err != nil {
			t.Errorf("the far end: %v", err)
		}
	}
}

// probeFrom probes the link to an address from a namespace.
func probeFrom(t *testing.T, ns *netlab.Namespace, at, token string) (r fabricResult) {
	t.Helper()
	var out, errs bytes.Buffer
	// With these batches the link's burst of 128 KiB is small in comparison.
	near := exec.Command("/proc/self/exe", "fabric", "probe", "--peer", at, "--token-file", token, "--rows", "1024,2048,4096", "--warmup", "1", "--repeats", "2", "--format", "json")
	near.Env, near.Stdout, near.Stderr = append(os.Environ(), childEnv), &out, &errs
	if err := ns.Start(near); err != nil {
		t.Fatal(err)
	}
	if err := near.Wait(); err != nil {
		t.Fatalf("%v: %s%s", err, out.String(), errs.String())
	}
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		t.Fatal(err)
	}
	return r
}
