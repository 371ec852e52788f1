package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/server/monitor"
)

// scraper is a running Prometheus.
type scraper struct {
	t      *testing.T
	addr   string
	client *http.Client
}

// startPrometheus runs Prometheus with deploy/monitoring until the test ends. It scrapes and evaluates
// the rules every second, and its targets are those of each job. It sends token to the nodes.
func startPrometheus(t *testing.T, token string, targets map[string][]string) *scraper {
	t.Helper()
	program := testkit.Program(t, "prometheus", "prometheus")
	deploy, dir := filepath.Join(testkit.RepositoryRoot(t), "deploy", "monitoring"), t.TempDir()
	config := map[string]string{}
	for _, name := range []string{"prometheus.yaml", "rules.yaml"} {
		text, err := os.ReadFile(filepath.Join(deploy, name))
		if err != nil {
			t.Fatal(err)
		}
		config[name] = strings.ReplaceAll(string(text), "_interval: 15s", "_interval: 1s")
	}
	replaced := 0
	job := regexp.MustCompile(`(?m)(job_name: (\S+)\n.*\n.*targets: )\[.*\]`)
	config["prometheus.yaml"] = job.ReplaceAllStringFunc(config["prometheus.yaml"], func(s string) string {
		m := job.FindStringSubmatch(s)
		list, err := json.Marshal(targets[m[2]])
		if err != nil {
			t.Fatal(err)
		}
		replaced++
		return m[1] + string(list)
	})
	if replaced != len(targets) {
		t.Fatalf("%d jobs were found in\n%s", replaced, config["prometheus.yaml"])
	}
	config["prometheus.yaml"] = strings.Replace(config["prometheus.yaml"], "job_name: "+monitor.NodeJob+"\n", "job_name: "+monitor.NodeJob+"\n    authorization: {credentials: "+token+"}\n", 1)
	for name, text := range config {
		writeFile(t, dir, name, []byte(text))
	}
	p := &scraper{t: t, addr: testkit.Port(t), client: gatewayClient(t, nil)}
	var log bytes.Buffer
	cmd := exec.Command(program, "--config.file="+filepath.Join(dir, "prometheus.yaml"), "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+p.addr, "--log.level=warn")
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() {
		p.client.CloseIdleConnections() // Prometheus waits for them
		_ = cmd.Process.Signal(syscall.SIGTERM)
		if err := <-ended; err != nil || t.Failed() {
			t.Logf("prometheus: %v\n%s", err, log.String())
		}
	})
	within(t, "Prometheus is ready", func() bool {
		select {
		case err := <-ended:
			ended <- err
			t.Fatalf("Prometheus has ended: %v", err)
		default:
		}
		resp, err := p.client.Get("http://" + p.addr + "/-/ready")
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	return p
}

// get decodes the data of an answer of Prometheus' API.
func (p *scraper) get(path string, data any) {
	p.t.Helper()
	status, text := call(p.t, p.client, "GET", "http://"+p.addr+path, "")
	answer := struct{ Data any }{data}
	if err := json.Unmarshal([]byte(text), &answer); err != nil || status != http.StatusOK {
		p.t.Fatalf("%s: %d, %v\n%s", path, status, err, text)
	}
}

// query returns the values of an expression that are numbers.
func (p *scraper) query(expr string) (values []string) {
	p.t.Helper()
	var data struct {
		Result []struct{ Value [2]any }
	}
	p.get("/api/v1/query?query="+url.QueryEscape(expr), &data)
	for _, r := range data.Result {
		if v, ok := r.Value[1].(string); ok && v != "NaN" {
			values = append(values, v)
		}
	}
	return values
}

// alert reports whether an alert is pending or firing.
func (p *scraper) alert(name string) bool {
	p.t.Helper()
	var data struct {
		Alerts []struct{ Labels map[string]string }
	}
	p.get("/api/v1/alerts", &data)
	for _, a := range data.Alerts {
		if a.Labels["alertname"] == name {
			return true
		}
	}
	return false
}

// checkRules fails the test unless Prometheus has evaluated each rule without an error.
func (p *scraper) checkRules() {
	p.t.Helper()
	var data struct {
		Groups []struct {
			Rules []struct{ Name, Health, LastError string }
		}
	}
	p.get("/api/v1/rules", &data)
	rules := 0
	for _, g := range data.Groups {
		for _, r := range g.Rules {
			rules++
			if r.Health != "ok" {
				p.t.Errorf("rule %s: %s %s", r.Name, r.Health, r.LastError)
			}
		}
	}
	if want := len(monitor.Records()) + len(monitor.Alerts()); rules != want {
		p.t.Errorf("Prometheus has %d rules; want %d", rules, want)
	}
}

// panelQueries returns the queries of a dashboard by their panels. The variables have the values
// with which the dashboard opens.
func panelQueries(t *testing.T, dashboard string) map[string]string {
	t.Helper()
	type panel struct {
		Title   string
		Targets []struct{ RefID, Expr string }
		Panels  []panel
	}
	var d struct{ Panels []panel }
	if err := json.Unmarshal([]byte(dashboard), &d); err != nil {
		t.Fatal(err)
	}
	variables := strings.NewReplacer("$job", "penstock-.*", "$instance", ".*", "$__rate_interval", "1m")
	queries := make(map[string]string)
	var add func(row string, panels []panel)
	add = func(row string, panels []panel) {
		for _, p := range panels {
			if len(p.Targets) == 0 {
				row = p.Title
			}
			for _, q := range p.Targets {
				queries[row+", "+p.Title+", "+q.RefID] = variables.Replace(q.Expr)
			}
			add(row, p.Panels)
		}
	}
	add("", d.Panels)
	return queries
}

// repeatedly calls f ten times a second, or as often as f lasts, until the test ends or stop is called.
func repeatedly(t *testing.T, f func(ctx context.Context, i int) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for i := 0; ; i++ {
			if err := f(ctx, i); err != nil && ctx.Err() == nil {
				t.Errorf("load: %v", err)
				return
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
		}
	})
	stop = sync.OnceFunc(func() {
		cancel()
		running.Wait()
	})
	t.Cleanup(stop)
	return stop
}

// complete sends a completion request to a gateway.
func complete(ctx context.Context, c *http.Client, gateway, prompt string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+gateway+"/v1/completions", strings.NewReader(`{"prompt":"`+prompt+`"}`))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if text, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %d %s %w", gateway, resp.StatusCode, text, err)
	}
	return nil
}

// writeReadEvict stores, matches and reads a chain of two blocks in a namespace of a node, and
// evicts a block of the namespace.
func writeReadEvict(ctx context.Context, node *served, dir, namespace string, i int) error {
	toks, data := filepath.Join(dir, "tokens"), filepath.Join(dir, "data")
	if err := os.WriteFile(toks, tokens(8*i, 8), 0o600); err != nil {
		return err
	}
	if err := os.WriteFile(data, bytesOf(byte(i), 1024), 0o600); err != nil {
		return err
	}
	for _, args := range [][]string{
		{"block", "put", namespace, "--data-file", data, "--tokens-file", toks}, {"prefix", "match", namespace, "--tokens-file", toks},
		{"block", "get", namespace, "--out", filepath.Join(dir, "out"), "--tokens-file", toks}, {"evict", "--namespace", namespace, "--bytes", "1B"},
	} {
		args = append(args, "--server", node.ready.Listen)
		if r := penstockIn(ctx, "", nil, args...); r.code != exitOK {
			return fmt.Errorf("%v: exit %d\n%s", args, r.code, r.err)
		}
	}
	return nil
}

// checkExported fails the test if a process exports a metric of ours that package monitor does not have.
func checkExported(t *testing.T, c *http.Client, address string) {
	t.Helper()
	known, err := monitor.Metrics()
	if err != nil {
		t.Fatal(err)
	}
	_, text := call(t, c, "GET", "http://"+address+"/metrics", "")
	families := regexp.MustCompile(`(?m)^# TYPE (penstock_\S+) `).FindAllStringSubmatch(text, -1)
	for _, m := range families {
		if _, ok := known[m[1]]; !ok {
			t.Errorf("%s exports %s, which monitor.Metrics does not have", address, m[1])
		}
	}
	if len(families) == 0 {
		t.Errorf("%s exports none of our metrics", address)
	}
}

// TestMonitoring: Prometheus scrapes a storage node, a planner and two gateways that are in use.
// Then each query of the dashboard has a number, Prometheus evaluates each rule without an error,
// and a node that stops makes an alert pending.
func TestMonitoring(t *testing.T) {
	testkit.Long(t, "Prometheus scrapes for several seconds")
	testkit.VerifyNone(t)
	node := startServed(t, t.TempDir())
	node.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "1024").must(t)
	node.run("ns", "create", "load", "--layers", "2", "--block-tokens", "4", "--token-bytes", "64").must(t)
	planner, args := startPrefillDecode(t, node, "m", func(string) {})
	planned := startGateway(t, args...)
	plain := startGateway(t, gatewayArgs(textEngine(t, "an answer"))...)
	web := gatewayClient(t, nil)
	for _, s := range []*served{node, planner, planned, plain} {
		checkExported(t, web, s.ready.HTTP)
	}
	// The node of a tenant at its quota. It needs tokens.
	r := &rolesRig{T: t, dir: t.TempDir()}
	roles := r.principal("sre", `{roles: [operate, admin, read, write], namespaces: ["*"]}`)
	tenants := startServed(t, t.TempDir(), "--auth-roles-file", r.file("principals:\n"+roles+"tenants:\n  - {namespaces: a/*, quota: 16KiB}\n"))
	r.as(tenants, "sre", "ns", "create", "a/m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "64").must(t)
	p := startPrometheus(t, "0123456789abcdef-sre", map[string][]string{
		monitor.NodeJob: {node.ready.HTTP, tenants.ready.HTTP}, monitor.PlannerJob: {planner.ready.HTTP}, monitor.GatewayJob: {planned.ready.HTTP, plain.ready.HTTP},
	})
	dir, prompt := t.TempDir(), strings.Repeat("0123456789abcdef", 64)
	stopLoad := repeatedly(t, func(ctx context.Context, i int) error {
		r.as(tenants, "sre", "block", "put", "a/m", "--data-file", filepath.Join(dir, "data"), "--tokens-file", filepath.Join(dir, "tokens"))
		return errors.Join(writeReadEvict(ctx, node, dir, "load", i), complete(ctx, web, planned.ready.Listen, prompt), complete(ctx, web, plain.ready.Listen, prompt))
	})

	missing := panelQueries(t, penstock(t, "", nil, "metrics", "dashboard").must(t))
	t.Logf("%d queries", len(missing))
	allHaveNumbers := func() bool {
		for name, expr := range missing {
			if len(p.query(expr)) > 0 {
				delete(missing, name)
			}
		}
		return len(missing) == 0
	}
	tick, limit := time.NewTicker(time.Second), time.NewTimer(time.Minute)
	defer tick.Stop()
	defer limit.Stop()
	for !allHaveNumbers() {
		select {
		case <-tick.C:
		case <-limit.C:
			for _, name := range slices.Sorted(maps.Keys(missing)) {
				t.Errorf("%s has no number: %s", name, missing[name])
			}
			t.FailNow()
		}
	}
	p.checkRules()

	if down := p.query("sum(1 - up)"); !slices.Equal(down, []string{"0"}) || p.alert("PenstockNodeDown") {
		t.Errorf("%v processes are down while all run", down)
	}
	stopLoad()
	node.stop()
	within(t, "the alert for a node that is down is pending", func() bool { return p.alert("PenstockNodeDown") })
	if down := p.query("sum(1 - up)"); !slices.Equal(down, []string{"1"}) {
		t.Errorf("%v processes are down; one is", down)
	}
}
