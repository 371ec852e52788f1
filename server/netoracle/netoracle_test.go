package netoracle

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-kv/penstock/dualpath/netcost"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/internal/yamlfile"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const example = `
tiers:
  - {bandwidth_gbps: 3600, latency: 1us}
  - {bandwidth_gbps: 100, latency: 3us}
  - {bandwidth_gbps: 50, latency: 8us}
  - {bandwidth_gbps: 25, latency: 15us}
congestion: [0, 0, 0.1, 0.2]
places:
  node-a: {pod: a, rack: a1}
  node-b: {pod: b, rack: b1, host: chassis-7}
`

func TestParseFile(t *testing.T) {
	r, err := ParseFile("net.yaml", []byte(example))
	if err != nil {
		t.Fatal(err)
	}
	if *r.Fabric != netcost.FatTree() {
		t.Errorf("fabric %+v", r.Fabric)
	}
	if r.Places["node-a"] != (netcost.Place{Pod: "a", Rack: "a1", Node: "node-a"}) || r.Places["node-b"].Node != "chassis-7" {
		t.Errorf("places %+v", r.Places)
	}
	if r.Congestion[netcost.CrossPod] != 0.2 {
		t.Errorf("congestion %v", r.Congestion)
	}
	for _, c := range []struct{ yaml, says string }{
		{"", "empty"},
		{"teirs: []", `net.yaml:1: unknown key "teirs"; did you mean "tiers"? known are tiers, congestion, places`},
		{"tiers:\n  - {bandwidth: 5}", `net.yaml:2: tiers.0: unknown key "bandwidth"`},
		{"tiers: [{bandwidth_gbps: 5}]", "net.yaml:1: tiers: has 1 entries; it must have 4"},
		{"tiers: [{bandwidth_gbps: 5}, {bandwidth_gbps: 5}, {bandwidth_gbps: 5}, {latency: 1us}]", "bandwidth of tier 3 (cross pod) is 0"},
		{"tiers: [{bandwidth_gbps: .nan}, {bandwidth_gbps: 5}, {bandwidth_gbps: 5}, {bandwidth_gbps: 5}]", "is .nan; write a finite number"},
		{"tiers: [{bandwidth_gbps: 5, latency: -1s}, {bandwidth_gbps: 5}, {bandwidth_gbps: 5}, {bandwidth_gbps: 5}]", "negative"},
		{"congestion: [0, 0, 0, 1]", "congestion of tier 3 (cross pod) is 1"},
		{"congestion: [0.1]", "1 entries"},
		{"places:\n  x: {rack: r}", `net.yaml:2: places.x: has no pod`},
		{"places: [x]", "net.yaml:1: places: is a list"},
		{"places: {x: {pod: a}}\n---\nplaces: {}", "more than one YAML document"},
		{"places: {x: {pod: a}}\nplaces: {}", "stands in line 1 already"},
		{"tiers: [{latency: 5}]", "without a unit"},
	} {
		if _, err := ParseFile("net.yaml", []byte(c.yaml)); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%q: %v, want %q", c.yaml, err, c.says)
		}
	}
}

// TestParseLargeFile: a file of many places, written by a program, may be longer than a file
// written by hand.
func TestParseLargeFile(t *testing.T) {
	var b strings.Builder
	b.WriteString("places:\n")
	count := 0
	for ; b.Len() <= 2*yamlfile.SizeMax; count++ {
		fmt.Fprintf(&b, "  node-%07d: {pod: p%d, rack: %01000d}\n", count, count/1000, count/40)
	}
	r, err := ParseFile("net.yaml", []byte(b.String()))
	if err != nil || len(r.Places) != count {
		t.Fatalf("%d places of %d: %v", len(r.Places), count, err)
	}
	if _, err := ParseFile("net.yaml", make([]byte, maxAnswerBytes+1)); err == nil || !strings.Contains(err.Error(), "at most 67108864 are read") {
		t.Errorf("too large: %v", err)
	}
}

func FuzzParseFile(f *testing.F) {
	f.Add([]byte(example))
	f.Add([]byte("tiers: [{bandwidth_gbps: 1e400}]"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		r, err := ParseFile("net.yaml", raw)
		if err != nil {
			return
		}
		if err := r.clean(); err != nil {
			t.Errorf("the parsed value is out of range: %v", err)
		}
	})
}

// TestFile: a file is read again when it has changed, and its last content is kept while it is
// malformed or missing.
func TestFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "network.yaml")
	write := func(text string) {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(example)
	var log bytes.Buffer
	calls := 0
	o, err := New(Options{Sources: []Source{NewFile(path, time.Hour)}, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	o.Watch(func(State) { calls++ })
	if s := o.State(); !s.Known || len(s.Places) != 2 || s.Congestion[netcost.CrossPod] != 0.2 || s.Sources[0].Err != nil || calls != 1 {
		t.Fatalf("%+v, %d calls of Watch", s, calls)
	}
	write("tiers: broken and longer than before, so that its size differs " + strings.Repeat("x", 400))
	for i := range 3 {
		o.ask(t.Context(), 0)
		s := o.State()
		if s.Fabric != netcost.FatTree() || len(s.Places) != 2 || s.Sources[0].Err == nil || s.Sources[0].Failures != i+1 || s.Sources[0].Answered.IsZero() || calls != 1 {
			t.Fatalf("broken: %+v, %d calls of Watch", s, calls)
		}
	}
	if n := strings.Count(log.String(), "last values stay"); n != 1 || !strings.Contains(log.String(), path+":1: tiers") {
		t.Errorf("logged %d times:\n%s", n, &log)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	o.ask(t.Context(), 0)
	if s := o.State(); !errors.Is(s.Sources[0].Err, os.ErrNotExist) || len(s.Places) != 2 {
		t.Errorf("gone: %+v", s)
	}
	write("places: {node-c: {pod: c}}")
	o.ask(t.Context(), 0)
	if s := o.State(); s.Known || len(s.Places) != 1 || s.Sources[0].Err != nil || s.Sources[0].Failures != 0 || calls != 2 {
		t.Errorf("mended: %+v, %d calls of Watch", s, calls)
	}
	if !strings.Contains(log.String(), "answers again") {
		t.Errorf("its recovery was not logged:\n%s", &log)
	}
}

// apiServer answers as a Kubernetes API server does, with two nodes per page.
type apiServer struct {
	*httptest.Server
	mu     sync.Mutex
	labels []map[string]string
	asked  []*http.Request
	status int
}

func newAPIServer(t *testing.T, labels ...map[string]string) *apiServer {
	s := &apiServer{labels: labels, status: http.StatusOK}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.asked = append(s.asked, r.Clone(context.Background()))
		if r.Header.Get("Authorization") != "Bearer secret" {
			http.Error(w, `{"reason":"Unauthorized"}`, http.StatusUnauthorized)
			return
		}
		if s.status != http.StatusOK {
			http.Error(w, "nodes is forbidden", s.status)
			return
		}
		var from int
		fmt.Sscan(r.URL.Query().Get("continue"), &from)
		to, next := min(from+2, len(s.labels)), ""
		if to < len(s.labels) {
			next = fmt.Sprint(to)
		}
		var items []string
		for i := from; i < to; i++ {
			var l []string
			for k, v := range s.labels[i] {
				l = append(l, fmt.Sprintf("%q:%q", k, v))
			}
			items = append(items, fmt.Sprintf(`{"metadata":{"name":"node-%d","labels":{%s}}}`, i, strings.Join(l, ",")))
		}
		fmt.Fprintf(w, `{"kind":"PartialObjectMetadataList","metadata":{"continue":%q},"items":[%s]}`, next, strings.Join(items, ","))
	}))
	t.Cleanup(s.Close)
	return s
}

// token writes a bearer token.
func token(t *testing.T, text string) string {
	path := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(path, []byte(text+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestKubernetes(t *testing.T) {
	zone, rack, host := "topology.kubernetes.io/zone", "topology.kubernetes.io/rack", "kubernetes.io/hostname"
	api := newAPIServer(t,
		map[string]string{zone: "a", rack: "1", host: "h0"}, map[string]string{zone: "a", rack: "2"},
		map[string]string{}, map[string]string{zone: "b"}, map[string]string{"other": "c"})
	tokenFile := token(t, "secret")
	k, err := NewKubernetes(KubernetesOptions{Server: api.URL, TokenFile: tokenFile})
	if err != nil {
		t.Fatal(err)
	}
	r, err := k.Read(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]netcost.Place{"node-0": {Pod: "a", Rack: "1", Node: "h0"}, "node-1": {Pod: "a", Rack: "2", Node: "node-1"}, "node-3": {Pod: "b", Node: "node-3"}}
	if fmt.Sprint(r.Places) != fmt.Sprint(want) {
		t.Errorf("places %v, want %v", r.Places, want)
	}
	if len(api.asked) != 3 {
		t.Errorf("%d requests for 5 nodes, two a page", len(api.asked))
	}
	if a := api.asked[0].Header.Get("Accept"); !strings.Contains(a, "PartialObjectMetadataList") {
		t.Errorf("whole nodes were requested: %s", a)
	}
	other, err := NewKubernetes(KubernetesOptions{Server: api.URL, TokenFile: tokenFile, Pod: "other"})
	if err != nil {
		t.Fatal(err)
	}
	if r, err := other.Read(t.Context()); err != nil || len(r.Places) != 1 {
		t.Errorf("by another label: %v, %v", r.Places, err)
	}

	// A replaced token is read again. Errors name the cause.
	if err := os.WriteFile(tokenFile, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := k.Read(t.Context()); err == nil || !strings.Contains(err.Error(), "401") {
		t.Errorf("with another token: %v", err)
	}
	if err := os.WriteFile(tokenFile, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		edit func()
		says string
	}{
		{func() { api.status = http.StatusForbidden }, "nodes is forbidden"},
		{func() { api.status = http.StatusOK; api.labels = nil }, "lists no node"},
		{func() { api.labels = []map[string]string{{}} }, "none of 1 nodes has the label topology.kubernetes.io/zone"},
	} {
		c.edit()
		if _, err := k.Read(t.Context()); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", c.says, err)
		}
	}
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	if _, err := NewKubernetes(KubernetesOptions{}); err == nil || !strings.Contains(err.Error(), "this process is not in a pod") {
		t.Errorf("outside a pod: %v", err)
	}
	if _, err := NewKubernetes(KubernetesOptions{Server: api.URL, CAFile: tokenFile}); err == nil || !strings.Contains(err.Error(), "no certificate") {
		t.Errorf("a CA that is none: %v", err)
	}
}

// promServer answers queries from a table.
func promServer(t *testing.T, answers map[string]string) *httptest.Server {
	var mu sync.Mutex
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		a, ok := answers[r.URL.Query().Get("query")]
		if r.URL.Path != "/prom/api/v1/query" || !ok {
			http.Error(w, `{"status":"error","error":"no such query"}`, http.StatusBadRequest)
			return
		}
		fmt.Fprint(w, a)
	}))
	t.Cleanup(s.Close)
	return s
}

func TestPrometheus(t *testing.T) {
	vector := func(samples ...string) string {
		return fmt.Sprintf(`{"status":"success","data":{"resultType":"vector","result":[%s]}}`, strings.Join(samples, ","))
	}
	const one = `{"metric":{"tier":"2"},"value":[1700000000.5,"0.25"]}`
	s := promServer(t, map[string]string{
		"pod":    vector(one),
		"core":   `{"status":"success","data":{"resultType":"scalar","result":[1700000010,"1.2"]}}`,
		"none":   vector(),
		"two":    vector(one, one),
		"nan":    vector(`{"value":[1700000000,"NaN"]}`),
		"minus":  vector(`{"value":[1700000000,"-0.1"]}`),
		"matrix": `{"status":"success","data":{"resultType":"matrix","result":[]}}`,
		"error":  `{"status":"error","error":"too many samples"}`,
		"html":   "<html>login</html>",
		"odd":    vector(`{"value":["a",1]}`),
	})
	source := func(q map[netcost.Tier]string) *Prometheus {
		p, err := NewPrometheus(PrometheusOptions{URL: s.URL + "/prom/", Queries: q})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	o, err := New(Options{Sources: []Source{source(map[netcost.Tier]string{2: "pod", 3: "core"})}})
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	st := o.State()
	if st.Sources[0].Err != nil || st.Congestion[2] != 0.25 || st.Congestion[3] != CongestionMax || !st.Measured.Equal(time.Unix(1700000000, 5e8)) {
		t.Errorf("%+v", st)
	}
	for q, says := range map[string]string{
		"none": "0 series", "two": "2 series", "nan": "NaN", "minus": "-0.1", "matrix": `"matrix"`, "error": "too many samples", "html": "<html>", "odd": "a time and a number", "unknown": "no such query",
	} {
		if _, err := source(map[netcost.Tier]string{2: "pod", 3: q}).Read(t.Context()); err == nil || !strings.Contains(err.Error(), says) || !strings.Contains(err.Error(), "tier 3 (cross pod)") {
			t.Errorf("%s: %v", q, err)
		}
	}
	for _, bad := range []PrometheusOptions{{}, {URL: "prometheus:9090", Queries: map[netcost.Tier]string{2: "x"}}, {URL: s.URL}, {URL: s.URL, Queries: map[netcost.Tier]string{4: "x"}}, {URL: s.URL, Queries: map[netcost.Tier]string{2: " "}}} {
		if _, err := NewPrometheus(bad); err == nil {
			t.Errorf("%+v was taken", bad)
		}
	}
}

// fake is a source whose readings and errors the test sets.
type fake struct {
	name  string
	every time.Duration
	mu    sync.Mutex
	r     Reading
	err   error
	asked int
}

func (f *fake) Name() string         { return f.name }
func (f *fake) Every() time.Duration { return f.every }
func (f *fake) Read(ctx context.Context) (Reading, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked++
	return f.r, f.err
}

// TestJoin: of two sources with the same field, the later one is used.
func TestJoin(t *testing.T) {
	fabric := netcost.FatTree()
	a := &fake{name: "a", every: time.Hour, r: Reading{
		Fabric: &fabric, Places: map[string]netcost.Place{"x": {Pod: "1"}, "y": {Pod: "1"}}, Congestion: map[netcost.Tier]float64{1: 0.1, 2: 0.1}, Measured: time.Unix(100, 0)}}
	b := &fake{name: "b", every: time.Hour, r: Reading{Places: map[string]netcost.Place{"y": {Pod: "2"}}, Congestion: map[netcost.Tier]float64{2: 0.5}, Measured: time.Unix(200, 0)}}
	registry := prometheus.NewRegistry()
	o, err := New(Options{Sources: []Source{a, b}, Registry: registry})
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	s := o.State()
	if !s.Known || s.Fabric != fabric || s.Places["x"].Pod != "1" || s.Places["y"].Pod != "2" || s.Congestion != (netcost.Congestion{1: 0.1, 2: 0.5}) || !s.Measured.Equal(time.Unix(100, 0)) {
		t.Errorf("%+v", s)
	}
	// An answer that is out of range is not used, not even its valid part.
	b.mu.Lock()
	b.r = Reading{Places: map[string]netcost.Place{"z": {Pod: "3"}}, Congestion: map[netcost.Tier]float64{2: -1}}
	b.mu.Unlock()
	o.ask(t.Context(), 1)
	if s := o.State(); s.Sources[1].Err == nil || s.Places["z"].Pod != "" || s.Congestion[2] != 0.5 {
		t.Errorf("%+v", s)
	}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			found[f.GetName()+" "+m.GetLabel()[0].GetValue()] = m.GetGauge().GetValue()
		}
	}
	for k, v := range map[string]float64{"penstock_network_source_up a": 1, "penstock_network_source_up b": 0, "penstock_network_congestion_ratio same pod": 0.5, "penstock_network_bandwidth_bytes_per_second cross pod": 3.125e9} {
		if found[k] != v {
			t.Errorf("%s is %v, want %v", k, found[k], v)
		}
	}
	if _, ok := found["penstock_network_source_age_seconds b"]; !ok {
		t.Error("a source that failed has no age")
	}

	for _, bad := range []Options{{}, {Sources: []Source{&fake{}}}, {Sources: []Source{a}, Registry: registry}} {
		if _, err := New(bad); err == nil {
			t.Errorf("%+v was taken", bad)
		}
	}
}

// TestRefresh: each source is polled at its own interval, also a failing one, and none after Close.
func TestRefresh(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fast, slow := &fake{name: "fast", every: time.Second}, &fake{name: "slow", every: 10 * time.Second, err: errors.New("down")}
		o, err := New(Options{Sources: []Source{fast, slow}})
		if err != nil {
			t.Fatal(err)
		}
		asked := func() (int, int) {
			synctest.Wait()
			fast.mu.Lock()
			defer fast.mu.Unlock()
			slow.mu.Lock()
			defer slow.mu.Unlock()
			return fast.asked, slow.asked
		}
		if f, s := asked(); f != 1 || s != 1 {
			t.Errorf("at first %d and %d", f, s)
		}
		time.Sleep(30*time.Second + time.Millisecond) // virtual
		if f, s := asked(); f != 31 || s != 4 {
			t.Errorf("after 30 s %d and %d", f, s)
		}
		if st := o.State(); st.Sources[1].Failures != 4 || !st.Sources[1].Answered.IsZero() || st.Sources[0].Age(time.Now()) != time.Millisecond {
			t.Errorf("%+v", st.Sources)
		}
		o.Close()
		o.Close()
		f, s := asked()
		time.Sleep(time.Minute)
		if f2, s2 := asked(); f2 != f || s2 != s {
			t.Errorf("requests after Close: %d and %d more", f2-f, s2-s)
		}
	})
}

// TestMetricsPage compares docs/metrics.md with the registry's metrics of the network.
func TestMetricsPage(t *testing.T) {
	page, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	ch := make(chan *prometheus.Desc, 100)
	(&collector{}).Describe(ch)
	close(ch)
	described := regexp.MustCompile(`fqName: "([^"]+)", help: "([^"]+)"`)
	want := map[string]string{}
	for d := range ch {
		m := described.FindStringSubmatch(d.String())
		want[m[1]] = m[2]
	}
	got := map[string]string{}
	for _, m := range regexp.MustCompile("(?m)^\\| `(penstock_network_[a-z_]+)` \\|[^|]*\\| (.*) \\|$").FindAllStringSubmatch(string(page), -1) {
		got[m[1]] = m[2]
	}
	if !maps.Equal(got, want) || len(want) == 0 {
		t.Errorf("docs/metrics.md has %v; the registry %v", got, want)
	}
}
