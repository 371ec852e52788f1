package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/penstock-kv/penstock/client/leader"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/cluster"
	"github.com/penstock-kv/penstock/lab/netlab"
)

// datacenter is a network namespace with a storage node.
type datacenter struct {
	t    *testing.T
	name string
	ns   *netlab.Namespace
	ip   string
	dir  string
}

// start runs penstock in the datacenter until the test ends.
func (d *datacenter) start(args ...string) *cluster.Process {
	d.t.Helper()
	p, err := cluster.StartProcess(d.t.Context(), cluster.ProcessOptions{
		Name: d.name + "'s " + args[0], Args: append(args, "--log-format", "json"), Env: append(os.Environ(), childEnv), Start: d.ns.Start,
	})
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() {
		if err := p.Stop(); err != nil {
			d.t.Error(err)
		}
	})
	return p
}

// storage starts the storage node, and creates the namespace m.
func (d *datacenter) storage() {
	d.t.Helper()
	d.start("serve", "--data", filepath.Join(d.dir, "volume"), "--capacity", "256MiB", "--arena", "64MiB", "--free-floor", "1MiB",
		"--listen", d.ip+":7420", "--data-listen", d.ip+":7421", "--http", "", "--insecure")
	d.run("ns", "create", "m", "--layers", "2", "--block-tokens", "16", "--token-bytes", "2048", "--server", d.ip+":7420")
}

// run runs a command of penstock in the datacenter.
func (d *datacenter) run(args ...string) {
	d.t.Helper()
	var out strings.Builder
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), childEnv), &out, &out
	err := d.ns.Start(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		d.t.Errorf("%s: penstock %v: %v\n%s", d.name, args, err, &out)
	}
}

// engine starts an HTTP server in the datacenter until the test ends, and returns its URL.
func (d *datacenter) engine(answer http.HandlerFunc) string {
	d.t.Helper()
	e := &httptest.Server{Config: &http.Server{Handler: answer}}
	err := d.ns.Do(func() (err error) {
		e.Listener, err = net.Listen("tcp", d.ip+":0")
		return err
	})
	if err != nil {
		d.t.Fatal(err)
	}
	e.Start()
	d.t.Cleanup(e.Close)
	return e.URL
}

// dial connects from inside the datacenter.
func (d *datacenter) dial(ctx context.Context, address string) (c net.Conn, err error) {
	err = d.ns.Do(func() (err error) {
		c, err = new(net.Dialer).DialContext(ctx, "tcp", address)
		return err
	})
	return c, err
}

// TestGatewayOffload: two datacenters, each a network namespace with a storage node, are joined by
// a link of 80 Mbit/s. A long prompt is prefilled remotely, and its KV crosses the link within the
// budget, which is half of the link's rate. A short prompt is prefilled locally, and so is a long
// one when the link is down.
func TestGatewayOffload(t *testing.T) {
	testkit.Long(t, "starts two datacenters")
	lab := netlab.ForTest(t)
	here, there := &datacenter{t: t, name: "here", dir: t.TempDir()}, &datacenter{t: t, name: "there", dir: t.TempDir()}
	for _, d := range []*datacenter{here, there} {
		var err error
		if d.ns, err = lab.Namespace(d.name); err != nil {
			t.Fatal(err)
		}
	}
	link, err := lab.Link(here.ns, there.ns, netlab.LinkOptions{RateBits: 80e6})
	if err != nil {
		t.Fatal(err)
	}
	here.ip, there.ip = link.A.IP().String(), link.B.IP().String()
	here.storage()
	there.storage()
	here.start("planner", "--listen", here.ip+":7430", "--http", "", "--insecure", "--schedule-block-tokens", "16", "--schedule-min-part", "16")

	// The remote engine computes KV and stores it.
	const blockBytes, budget = 2 * 16 * 2048, 5 << 20
	var prompts int
	far := there.engine(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/models" {
			fmt.Fprint(w, `{"data":[{"id":"tiny"}]}`)
			return
		}
		prompts++
		var ask struct{ Prompt []kv.Token }
		if err := json.NewDecoder(r.Body).Decode(&ask); err != nil {
			t.Error(err)
		}
		data := make([]byte, len(ask.Prompt)/16*blockBytes)
		for i := range data {
			data[i] = byte(i / 1000)
		}
		tokens := writeFile(t, there.dir, "tokens", []byte(strings.Trim(fmt.Sprint(ask.Prompt), "[]")))
		there.run("block", "put", "m", "--tokens-file", tokens, "--data-file", writeFile(t, there.dir, "data", data), "--server", there.ip+":7420")
		fmt.Fprint(w, `{"choices":[]}`)
	})

	conn, err := grpc.NewClient("passthrough:///"+here.ip+":7430", grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(here.dial))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithCancel(t.Context())
	var leaders sync.WaitGroup
	defer leaders.Wait()
	defer cancel()
	args := []string{
		"gateway", "--insecure", "--planner", here.ip + ":7430", "--namespace", "m", "--servers", here.ip + ":7420",
		"--queue-wait", "5m", "--offload-url", far, "--offload-servers", there.ip + ":7420", "--offload-threshold", "1000", "--offload-link-rate", strconv.Itoa(budget),
	}
	for role, name := range map[leader.Role]string{leader.Prefill: "p0", leader.Decode: "d0"} {
		args = append(args, "--engine", name+"="+here.engine(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, name) }))
		l, err := leader.New(leader.Options{
			Group: name, Node: name, Role: role, Geometry: kv.SingleGroup(2, 16, 1024), Planner: conn, FetchEvery: time.Millisecond,
			Members: []leader.Member{{Name: name, Engine: idle{}, DeviceBlocks: 1000}},
		})
		if err != nil {
			t.Fatal(err)
		}
		leaders.Go(func() { l.Run(ctx) })
	}
	here.start(append(args, "--listen", here.ip+":7440", "--http", here.ip+":7442", "--offload-timeout", "2m")...)
	here.start(append(args, "--listen", here.ip+":7450", "--http", here.ip+":7452", "--offload-timeout", "1s")...)
	web := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, address string) (net.Conn, error) { return here.dial(ctx, address) }}}
	defer web.CloseIdleConnections()
	ask := func(port, tokens, seed int) {
		t.Helper()
		prompt := make([]int, tokens)
		for i := range prompt {
			prompt[i] = seed + i
		}
		body, _ := json.Marshal(map[string]any{"prompt": prompt})
		resp, err := web.Post(fmt.Sprintf("http://%s:%d/v1/completions", here.ip, port), "application/json", strings.NewReader(string(body)))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if text, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != 200 || string(text) != "d0" {
			t.Errorf("a prompt of %d tokens: %v, %s, %v", tokens, resp.Status, text, err)
		}
	}
	metric := func(port int, name string) string {
		status, text := call(t, web, "GET", fmt.Sprintf("http://%s:%d/metrics", here.ip, port), "")
		found := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(name) + ` (\S+)$`).FindStringSubmatch(text)
		if status != 200 || found == nil {
			t.Fatalf("%d: no metric %s in\n%s", status, name, text)
		}
		return found[1]
	}
	for _, port := range []int{7442, 7452} {
		within(t, "the engines are healthy", func() bool {
			status, _ := call(t, web, "GET", fmt.Sprintf("http://%s:%d/readyz", here.ip, port), "")
			return status == http.StatusOK
		})
	}

	ask(7440, 900, 1)
	before, err := link.Counters()
	if err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	ask(7440, 1601, 100_000)
	took := time.Since(begin).Seconds()
	after, err := link.Counters()
	if err != nil {
		t.Fatal(err)
	}
	const copied = 100 * blockBytes
	if n := after.ReceivedBytes - before.ReceivedBytes; n < copied || n > copied*5/4 {
		t.Errorf("%d bytes of KV crossed the link in %d bytes", copied, n)
	}
	if least := float64(copied-4<<20) / budget; took < least {
		t.Errorf("%d bytes took %v s; the budget allows them in %v s", copied, took, least)
	}
	for name, want := range map[string]string{
		`penstock_offload_requests_total{outcome="local"}`: "1", `penstock_offload_requests_total{outcome="remote"}`: "1",
		"penstock_offload_copied_bytes_total": strconv.FormatFloat(copied, 'e', -1, 64), "penstock_gateway_hit_tokens_total": "1600",
	} {
		if got := metric(7442, name); got != want {
			t.Errorf("%s is %s, want %s", name, got, want)
		}
	}
	if prompts != 1 {
		t.Errorf("%d prompts went to the other datacenter, want 1", prompts)
	}

	if err := link.SetUp(false); err != nil {
		t.Fatal(err)
	}
	ask(7450, 1601, 200_000)
	ask(7450, 1601, 300_000)
	for outcome, want := range map[string]string{"failed": "1", "busy": "1", "remote": "0"} {
		if got := metric(7452, `penstock_offload_requests_total{outcome="`+outcome+`"}`); got != want {
			t.Errorf("with the link down: %s requests are %s, want %s", got, outcome, want)
		}
	}
}
