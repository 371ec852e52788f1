package console_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/internal/top"
	"github.com/penstock-kv/penstock/server/console"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// start is the time of the tests.
var start = time.Date(2026, 11, 26, 20, 0, 0, 0, time.UTC)

// source supplies the state that a test sets, and counts the loads.
type source struct {
	mu         sync.Mutex
	overview   console.Overview
	namespaces []console.Namespace
	tenants    []console.Tenant
	prefixes   console.Prefixes
	pins       []console.Pin
	actions    []console.Action
	loads      atomic.Int64
}

func (s *source) Overview(context.Context) console.Overview {
	s.loads.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.overview
}

func (s *source) Namespaces(context.Context) []console.Namespace {
	s.loads.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.namespaces
}

func (s *source) Tenants(context.Context) []console.Tenant {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tenants
}

func (s *source) Prefixes(context.Context) console.Prefixes {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.prefixes
}

func (s *source) Pins(_ context.Context, sees func(string) bool, rows int) console.Pins {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := console.Pins{At: start}
	for _, p := range s.pins {
		if sees(p.Namespace) {
			all.Total++
			all.Blocks += p.Blocks
			all.Bytes += p.Bytes
			all.List = append(all.List, p)
		}
	}
	slices.SortFunc(all.List, func(a, b console.Pin) int { return a.Since.Compare(b.Since) })
	all.List = all.List[:min(len(all.List), rows)]
	return all
}

func (s *source) Actions(context.Context) []console.Action {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.actions
}

func (s *source) set(edit func(*source)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	edit(s)
}

// caller may open all pages but those in closed, and sees the namespaces that begin with prefix.
type caller struct {
	closed  string
	prefix  string
	refused atomic.Bool
}

func (c *caller) Admit(r *http.Request) (context.Context, error) {
	if c.refused.Load() {
		return r.Context(), errors.New("refused")
	}
	return r.Context(), nil
}
func (c *caller) Caller(ctx context.Context) string {
	name, _ := ctx.Value(nameKey{}).(string)
	return name
}

func (c *caller) Opens(_ context.Context, path string) bool { return path != c.closed }
func (c *caller) SeesNamespace(_ context.Context, name string) bool {
	return strings.HasPrefix(name, c.prefix)
}

func (c *caller) SeesTenant(ctx context.Context, prefix string) bool {
	return c.SeesNamespace(ctx, prefix)
}
func (c *caller) SeesPins(ctx context.Context, name string) bool { return c.SeesNamespace(ctx, name) }

// nameKey is the key of a caller's name, which serve takes from the query.
type nameKey struct{}

// serve serves a console, and returns its address.
func serve(t *testing.T, o console.Options) (*console.Console, string) {
	t.Helper()
	if o.Access == nil {
		o.Access = &caller{}
	}
	c := console.New(o)
	mux := http.NewServeMux()
	c.Register(mux)
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mux.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), nameKey{}, r.URL.Query().Get("caller"))))
	}))
	s.Listener = smallBuffers{s.Listener}
	s.Start()
	t.Cleanup(func() {
		c.Stop()
		s.CloseClientConnections()
		c.Close()
		s.Close()
		http.DefaultClient.CloseIdleConnections()
	})
	return c, s.URL
}

// smallBuffers is a listener whose connections keep few bytes that the client has not read.
type smallBuffers struct{ net.Listener }

func (l smallBuffers) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err == nil {
		err = c.(*net.TCPConn).SetWriteBuffer(4096)
	}
	return c, err
}

func get(t *testing.T, url string) (*http.Response, string) {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	if err = errors.Join(err, resp.Body.Close()); err != nil {
		t.Fatal(err)
	}
	return resp, string(body)
}

// sample returns an overview of a node in a cluster, whose second volume has failed.
func sample() console.Overview {
	return console.Overview{
		At: start, Version: "v1", Started: start.Add(-time.Hour), Blocks: 1200, Namespaces: 3, Leases: 12, CorruptBlocks: 1,
		Durability: "batch", EvictionPolicy: "s3fifo", RSSBytes: 900 << 20, MemoryBudget: 1200 << 20,
		Node: top.NodeRow{
			Name: "n1", State: "serving", UsedBytes: 3 << 30, CapacityBytes: 4 << 30, Fill: top.Known(0.75),
			Rates:        top.Rates{ReadBytes: top.Known(5 << 30), WrittenBytes: top.Known(300 << 20), EvictedBytes: top.Known(280 << 20), HitRate: top.Known(0.953)},
			RunningReads: top.Known(9), ReadsMax: top.Known(64), WaitingReads: top.Known(0), BusyCalls: top.Known(0),
		},
		Volumes: []console.Volume{
			{VolumeRow: top.VolumeRow{Path: "/v0", State: "ok", CapacityBytes: 2 << 30, UsedBytes: 3 << 29, Fill: top.Known(0.75), ReadBytes: top.Known(5 << 30), WrittenBytes: top.Known(300 << 20), InFlightBytes: 4 << 20, InFlightLimitBytes: 32 << 20}, Duty: "ok", IO: "uring", Blocks: 600, Key: "2026-11"},
			{VolumeRow: top.VolumeRow{Path: "/v1", State: "failed", Reason: "read: input/output error", CapacityBytes: 2 << 30, UsedBytes: 3 << 29, Fill: top.Known(0.75), ReadBytes: top.Known(0), WrittenBytes: top.Known(0), InFlightLimitBytes: 32 << 20}, Since: start.Add(-time.Minute), Duty: "ok", IO: "uring", Blocks: 600, FailedRequests: 4},
		},
		NICs: []top.NICRow{
			{Name: "eth0", Address: "10.0.0.1:7420", Up: true, Sent: top.Known(5 << 30), SentShare: top.Known(0.43), Received: top.Known(300 << 20), ReceivedShare: top.Known(0.025)},
			{Name: "eth1", Address: "10.1.0.1:7420", Reason: "no carrier", Sent: top.Known(0), Received: top.Known(0)},
		},
		Cluster: &console.Cluster{Members: []console.Member{
			{Name: "n1", Addr: "10.0.0.1:7421", Zone: "a", State: "serving", Version: "v1", CapacityBytes: 4 << 30, UsedBytes: 3 << 30, Fill: top.Known(0.75), Since: start, Applied: 17, Self: true, Blocks: 1200, HotPrefixes: 1, Volumes: []console.MemberVolume{{Path: "/v0", State: "ok"}, {Path: "/v1", State: "failed"}}, NICs: []console.MemberNIC{{Name: "eth0", Up: true, LinkBits: 400e9}, {Name: "eth1"}}},
			{Name: "n2", Addr: "10.0.0.2:7421", Zone: "b", State: "draining", Version: "v1", CapacityBytes: 4 << 30, UsedBytes: 2 << 30, Fill: top.Known(0.5), Since: start, Applied: 16, Blocks: 800, Volumes: []console.MemberVolume{
				{Path: "/v0", State: "ok", CapacityBytes: 2 << 30, UsedBytes: 1 << 30, Fill: top.Known(0.5), Blocks: 400}, {Path: "/v1", State: "suspect", Reason: "write: no space left on device", CapacityBytes: 2 << 30, UsedBytes: 1 << 30, Fill: top.Known(0.5), Blocks: 400},
			}, NICs: []console.MemberNIC{{Name: "eth0", Up: true, LinkBits: 400e9}, {Name: "eth1", Up: true, LinkBits: 400e9}}},
		}, Down: []console.Member{
			{Name: "n3", Addr: "10.0.0.3:7421", Zone: "b", State: "down", Version: "v1", CapacityBytes: 4 << 30, UsedBytes: 1 << 30, Fill: top.Known(0.25), Since: start, Left: start.Add(-2 * time.Minute), Applied: 12, Blocks: 300, Volumes: []console.MemberVolume{
				{Path: "/v0", State: "ok", CapacityBytes: 4 << 30, UsedBytes: 1 << 30, Fill: top.Known(0.25), Blocks: 300},
			}, NICs: []console.MemberNIC{{Name: "eth0", Up: true}}},
		}},
	}
}

var tags = regexp.MustCompile(`(?s)<[^>]*>`)

// text returns the text of a page, with one space between words.
func text(html string) string {
	return strings.Join(strings.Fields(tags.ReplaceAllString(html, " ")), " ")
}

// wants fails the test if a text is not in the page.
func wants(t *testing.T, page string, want ...string) {
	t.Helper()
	for _, w := range want {
		if !strings.Contains(page, w) {
			t.Errorf("%q is not in the page:\n%s", w, page)
		}
	}
}

// TestOverview: the page has the node, the members, the volumes with the reason for their states, and
// the faults.
func TestOverview(t *testing.T) {
	src := &source{overview: sample()}
	_, url := serve(t, console.Options{Source: src, Node: "n1"})
	resp, page := get(t, url+"/")
	wants(t, text(page), "Node n1 is serving. 5 faults. 2 members. Down: 1 node.", "node n3 down its lease in etcd has ended 2026-11-26 19:58:00 UTC",
		"volume /v1 of node n2 suspect write: no space left on device", "n3 b down 2026-11-26 19:58:00 UTC 4.0 GiB 1.0 GiB 25.0 % 300 1 of 1 ok 1 of 1 up 0", "1,200 1 of 2 ok 1 of 2 up, 400 Gbit/s 1 17",
		"1 of 2 ok 2 of 2 up, 800 Gbit/s", "n3 /v0 down ok at the last record 4.0 GiB 1.0 GiB 25.0 % 300 n2 /v1 suspect write: no space left on device 2.0 GiB 1.0 GiB 50.0 % 400 n2 /v0 ok none",
		"volume /v1 failed read: input/output error 2026-11-26 19:59:00 UTC", "blocks corrupt 1 block failed a checksum", "NIC eth1 down no carrier",
		"n1 (this node) a serving", "n2 b draining", "50.0 %", "3.0 GiB of 4.0 GiB, 75.0 %", "/v0 ok none", "Lease of this node: valid")
	for header, want := range map[string]string{
		"Content-Type":            "text/html; charset=utf-8",
		"Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
		"X-Content-Type-Options":  "nosniff",
		"Cache-Control":           "no-store",
	} {
		if got := resp.Header.Get(header); got != want {
			t.Errorf("%s: %q, want %q", header, got, want)
		}
	}
	src.set(func(s *source) {
		s.overview.Cluster.LeaseFailure = "the lease ended"
		s.overview.Cluster.Failure = "etcd does not answer"
		s.overview.Cluster.RefusedNamespaces = 2
		s.overview.Erasures = []console.Erasure{{Volume: "/v2", Namespaces: 2, Since: start.Add(-time.Hour)}}
		s.overview.Node.State, s.overview.Node.Reason = "read_only", "the index failed"
	})
	_, url = serve(t, console.Options{Source: src, Node: "n1"})
	_, page = get(t, url+"/")
	wants(t, text(page), "Node n1 is read_only. 10 faults.", "volume /v2 erasure pending it may have the secrets of ended epochs of 2 namespaces: bring it back, or remove it and erase its disk 2026-11-26 19:00:00 UTC",
		"node n1 read_only the index failed", "lease in etcd not valid the lease ended",
		"list of members not read etcd does not answer", "namespaces refused the node could not apply the last change of 2 namespaces",
		"The list of members was not read: etcd does not answer")
}

// TestRowsOfActivity: of many pins the page shows the 100 oldest, and of many epochs the 100 in which most
// blocks were found.
func TestRowsOfActivity(t *testing.T) {
	src := &source{}
	for i := range 150 {
		k := (7*i + 3) % 150 // each number once, in another order
		src.pins = append(src.pins, console.Pin{Lease: uint64(k), Namespace: fmt.Sprintf("pin-%03d", k), Since: start.Add(time.Duration(k) * time.Second)})
		src.prefixes.Epochs = append(src.prefixes.Epochs, console.Epoch{Namespace: fmt.Sprintf("epoch-%03d", k), Hits: int64(1000 - k)})
	}
	_, url := serve(t, console.Options{Source: src})
	for path, of := range map[string]struct{ name, summary string }{"/pins": {"pin", "150 pins."}, "/prefixes": {"epoch", "150 live epochs."}} {
		_, page := get(t, url+path)
		wants(t, text(page), of.summary, "The page shows 100 of 150")
		_, rest, found := strings.Cut(page, of.name+"-000")
		for i := 1; i < 100 && found; i++ {
			_, rest, found = strings.Cut(rest, fmt.Sprintf("%s-%03d", of.name, i))
		}
		if !found || strings.Contains(page, of.name+"-100") {
			t.Errorf("%s does not have the first 100 in their order:\n%s", path, text(page))
		}
	}
}

// TestStaticFiles: the layout refers only to files that the console serves, and to no other host.
func TestStaticFiles(t *testing.T) {
	_, url := serve(t, console.Options{Source: &source{overview: sample()}})
	_, page := get(t, url+"/")
	found := regexp.MustCompile(`(?:src|href)="(/console/[^"]*)"`).FindAllStringSubmatch(page, -1)
	if len(found) != 3 {
		t.Errorf("the page refers to %v; want three files", found)
	}
	for _, f := range found {
		if resp, body := get(t, url+f[1]); resp.StatusCode != http.StatusOK || body == "" {
			t.Errorf("%s: %s", f[1], resp.Status)
		}
	}
	if strings.Contains(page, "http:") || strings.Contains(page, "https:") || strings.Contains(page, "style=") || regexp.MustCompile(`<script[^>]*>[^<]|\son[a-z]+=`).MatchString(page) {
		t.Errorf("the page has another host, or inline style or script:\n%s", page)
	}
	if resp, _ := get(t, url+"/other"); resp.StatusCode != http.StatusNotFound {
		t.Errorf("/other: %s", resp.Status)
	}
}

// TestEscaping: names and reasons with HTML are text in the pages and in the events.
func TestEscaping(t *testing.T) {
	const hostile = `"><script>alert(1)</script><img src=x onerror=alert(2)>` + "\r\n\r\nevent: live\ndata: forged"
	src := &source{overview: sample(), namespaces: []console.Namespace{{NamespaceRow: top.NamespaceRow{Name: hostile}, Tenant: hostile}}}
	src.overview.Volumes[1].Reason = hostile
	src.overview.Node.Name, src.overview.Node.State = hostile, hostile
	src.overview.Cluster.Members[1].Name, src.overview.Cluster.Members[1].State, src.overview.Cluster.Members[1].Zone = hostile, hostile, hostile
	src.overview.NICs[1].Reason = hostile
	_, url := serve(t, console.Options{Source: src, Node: hostile})
	for _, path := range []string{"/", "/namespaces", "/namespaces?q=%22%3E%3Cscript%3E&sort=%22%3E%3Cscript%3E&page=%3Cimg"} {
		_, page := get(t, url+path)
		if strings.Contains(page, "<script>") || strings.Contains(page, "<img") {
			t.Errorf("%s has the HTML of a name:\n%s", path, page)
		}
		if !strings.Contains(page, "&lt;script&gt;") {
			t.Errorf("%s does not have the name as text", path)
		}
	}
	for _, path := range []string{"/live/overview", "/live/namespaces"} {
		s := listen(t, url+path)
		for range 2 {
			e := s.event()
			if e.name == "live" && (strings.Contains(e.data, "<script>") || strings.Contains(e.data, "<img")) || strings.HasPrefix(e.data, "forged") {
				t.Errorf("%s has the HTML of a name: %+v", path, e)
			}
		}
		s.close()
	}
}

// many returns 10,000 namespaces.
func many() []console.Namespace {
	all := make([]console.Namespace, 10_000)
	for i := range all {
		ns := &all[i]
		ns.Name, ns.Tenant = fmt.Sprintf("model-%05d", i), fmt.Sprintf("tenant-%d", i%7)
		ns.Epoch, ns.LiveEpochs, ns.UsedBytes, ns.OldBytes = uint64(i%50), 1, int64(i)<<20, top.Known(float64(i%3)*(1<<20))
		if i%2 == 0 {
			ns.QuotaBytes, ns.QuotaUsed = 20_000<<20, top.Known(float64(i)/20_000)
			ns.EpochSince = start.Add(-time.Duration(i) * time.Second)
			ns.HitRateSince = top.Known(float64(i) / 10_000)
		}
		ns.Counters.ReadBlocks = uint64(10_000 - i)
	}
	return all
}

var rowNames = regexp.MustCompile(`<th scope="row">([^<]*)</th>`)

func names(page string) (out []string) {
	for _, m := range rowNames.FindAllStringSubmatch(page, -1) {
		out = append(out, m[1])
	}
	return out
}

// TestManyNamespaces: the server filters, sorts and divides 10,000 namespaces, and a page has 100.
func TestManyNamespaces(t *testing.T) {
	src := &source{namespaces: many()}
	_, url := serve(t, console.Options{Source: src, Now: func() time.Time { return start }})
	for _, c := range []struct {
		query       string
		first, last string
		rows        int
		text        string
	}{
		{"", "model-00000", "model-00099", 100, "Rows 1 to 100 of 10000."},
		{"?page=2", "model-00100", "model-00199", 100, "Rows 101 to 200 of 10000. The 10000 namespaces"},
		{"?page=100", "model-09900", "model-09999", 100, "Page 100 of 100"},
		{"?page=101", "model-09900", "model-09999", 100, "Page 100 of 100"},
		{"?page=-1", "model-00000", "model-00099", 100, "Page 1 of 100"},
		{"?order=desc", "model-09999", "model-09900", 100, ""},
		{"?sort=used&order=desc", "model-09999", "model-09900", 100, "9.8 GiB"},
		{"?sort=reads", "model-09999", "model-09900", 100, ""},
		{"?sort=hits&order=desc", "model-09998", "model-09800", 100, "100.0 %"},
		{"?sort=hits", "model-00001", "model-00199", 100, "unknown"},
		{"?sort=quota&order=desc", "model-09998", "model-09800", 100, "50.0 % of 20 GiB"},
		{"?sort=since&order=desc", "model-00000", "model-00198", 100, "2 min ago"},
		{"?sort=epoch&order=desc&page=2", "model-05049", "model-09999", 100, ""},
		{"?sort=tenant&order=desc", "model-00006", "model-00699", 100, ""},
		{"?q=TENANT-3&sort=name", "model-00003", "model-00696", 100, "1429 of 10,000 namespaces match the filter."},
		{"?q=model-0123", "model-01230", "model-01239", 10, "Page 1 of 1"},
		{"?q=nothing", "", "", 0, "No namespace matches."},
		{"?q=" + strings.Repeat("x", 200), "", "", 0, "No namespace matches."},
		{"?sort=unknown&order=up&page=x", "model-00000", "model-00099", 100, ""},
	} {
		_, page := get(t, url+"/namespaces"+c.query)
		rows := names(page)
		if len(rows) != c.rows || c.rows > 0 && (rows[0] != c.first || rows[len(rows)-1] != c.last) {
			t.Errorf("%s: %d rows %v; want %d, from %s to %s", c.query, len(rows), rows, c.rows, c.first, c.last)
		}
		wants(t, text(page), c.text)
		if len(page) > 128<<10 {
			t.Errorf("%s: the page has %d bytes", c.query, len(page))
		}
	}
	_, page := get(t, url+"/namespaces?q=tenant&sort=used&order=desc&page=3")
	wants(t, page, `href="/namespaces?order=desc&amp;page=2&amp;q=tenant&amp;sort=used" rel="prev"`, `href="/namespaces?order=desc&amp;page=4&amp;q=tenant&amp;sort=used" rel="next"`,
		`aria-sort="descending" class="number"><a href="/namespaces?q=tenant&amp;sort=used">`, `data-live="/live/namespaces?order=desc&amp;page=3&amp;q=tenant&amp;sort=used"`, `value="tenant"`)
	if _, page := get(t, url+"/namespaces?q="+strings.Repeat("x", 4000)); len(page) > 24<<10 {
		t.Errorf("with a filter of 4000 bytes the page has %d bytes", len(page))
	}
	if n := src.loads.Load(); n != 1 {
		t.Errorf("the namespaces were loaded %d times at one moment", n)
	}
}

// TestHiddenNamespaces: a namespace that the caller may not see is neither in the rows nor in the
// sums, and the navigation has only pages that the caller may open.
func TestHiddenNamespaces(t *testing.T) {
	a := console.Namespace{NamespaceRow: top.NamespaceRow{Name: "team-a/m", UsedBytes: 1 << 20, OldBytes: top.Known(0)}}
	b := console.Namespace{NamespaceRow: top.NamespaceRow{Name: "team-b/m", UsedBytes: 1 << 30, OldBytes: top.Known(5 << 20)}, Tenant: "secret"}
	_, url := serve(t, console.Options{Source: &source{namespaces: []console.Namespace{a, b}}, Access: &caller{closed: "/", prefix: "team-a/"}})
	for _, query := range []string{"", "?q=team", "?sort=used&order=desc"} {
		_, page := get(t, url+"/namespaces"+query)
		wants(t, text(page), "team-a/m", "Rows 1 to 1 of 1. The 1 namespaces use 1.0 MiB, of which old epochs have 0 B.")
		if strings.Contains(page, "team-b") || strings.Contains(page, "secret") || strings.Contains(page, `href="/"`) {
			t.Errorf("the page shows a hidden namespace or page:\n%s", page)
		}
	}
	s := listen(t, url+"/live/namespaces")
	defer s.close()
	for range 2 {
		if e := s.event(); strings.Contains(e.data, "team-b") || strings.Contains(e.data, "2") && e.name == "summary" {
			t.Errorf("an event shows a hidden namespace: %+v", e)
		}
	}
}

// TestTenants: the page of namespaces has the tenants that the caller may see, the fullest first, and no
// table without one. A prefix is escaped, in the text and in the link.
func TestTenants(t *testing.T) {
	tenant := func(prefix string, used, quota int64) console.Tenant {
		return console.Tenant{Prefix: prefix, UsedBytes: used, QuotaBytes: quota, Fill: top.Known(float64(used)).Over(top.Known(float64(quota))), Namespaces: 2, EvictedBlocks: 1200, EvictedBytes: 3 << 20, RefusedBlocks: 7}
	}
	src := &source{tenants: []console.Tenant{tenant("team-a/", 1<<20, 4<<20), tenant("team-b/", 3<<20, 4<<20), tenant("team-c&</", 0, 1<<20)}}
	_, url := serve(t, console.Options{Source: src})
	_, page := get(t, url+"/namespaces")
	wants(t, text(page), "Tenants with a quota", "team-b/* 2 3.0 MiB 75.0 % of 4.0 MiB 1,200 3.0 MiB 7 team-a/* 2 1.0 MiB 25.0 % of 4.0 MiB 1,200 3.0 MiB 7 team-c&amp;&lt;/* 2 0 B 0.0 % of 1.0 MiB")
	wants(t, page, `<a href="/namespaces?q=team-a%2F&amp;sort=name">team-a/*</a>`, `<a href="/namespaces?q=team-c%26%3C%2F&amp;sort=name">`)
	_, url = serve(t, console.Options{Source: src, Access: &caller{prefix: "team-a/"}})
	if _, page = get(t, url+"/namespaces"); strings.Contains(page, "team-b") || strings.Contains(page, "team-c") || !strings.Contains(page, "team-a/*") {
		t.Errorf("a caller of one tenant gets\n%s", page)
	}
	_, url = serve(t, console.Options{Source: src, Access: &caller{prefix: "other"}})
	if _, page = get(t, url+"/namespaces"); strings.Contains(page, "enants") {
		t.Errorf("a caller of no tenant gets\n%s", page)
	}
	many := &source{}
	for i := range 25 {
		many.tenants = append(many.tenants, tenant(fmt.Sprintf("t%02d/", i), int64(i), 100))
	}
	_, url = serve(t, console.Options{Source: many})
	_, page = get(t, url+"/namespaces")
	wants(t, text(page), "t24/* 2 24 B", "5 more are not shown.")
	if strings.Contains(page, "t04/") || !strings.Contains(page, "t05/") {
		t.Errorf("of 25 tenants the page has not the 20 fullest:\n%s", text(page))
	}
}

// activity returns the state of the pages of prefixes, pins and actions.
func activity() *source {
	return &source{
		prefixes: console.Prefixes{At: start, Cuts: map[string]uint64{"complete": 30, "absent": 10}, Epochs: []console.Epoch{
			{Namespace: "team-a/m", Epoch: 3, Newest: true, Matches: 2, Hits: 5, Blocks: 8, Bytes: 4096, Leases: 1, Pins: 2},
			{Namespace: "team-b/m", Epoch: 9, Matches: 4, Hits: 40},
		}, Top: []console.Prefix{
			{Namespace: "team-b/m", Epoch: 9, First: "bb01", Matches: 4, Tokens: 2560, Blocks: 12, Bytes: 12 << 20, Last: start.Add(-time.Minute), Cut: "absent"},
			{Namespace: "team-a/m", Epoch: 3, First: "aa01", Matches: 2, Tokens: 320, Blocks: 3, Bytes: 3 << 20, Last: start.Add(-time.Hour), Cut: "complete"},
		}},
		pins: []console.Pin{
			{Lease: 7, Namespace: "team-a/m", Epoch: 3, Owner: "10.0.0.7:1", Since: start.Add(-time.Hour), Blocks: 8, Bytes: 4096},
			{Lease: 5, Namespace: "team-b/m", Epoch: 9, Owner: "other", Since: start, Blocks: 1, Bytes: 512},
			{Lease: 8, Namespace: "team-a/m", Epoch: 2, OfEpoch: true, Owner: "trainer", Since: start.Add(-50 * time.Hour), Expires: start.Add(time.Minute)},
		},
		actions: []console.Action{
			{At: start, Call: "BumpEpoch", Peer: "10.0.0.7:2", Principal: "sre", Request: "name=m", Result: "OK"},
			{At: start.Add(-time.Minute), Call: "Evict", Peer: "10.0.0.7:3", Principal: "sre", Request: "namespace=m bytes=1073741824", Result: "Internal", Failure: "<b>"},
		},
	}
}

// TestActivity: the pages of prefixes, pins and actions have the figures of the source, in order,
// and only pins that the caller may see.
func TestActivity(t *testing.T) {
	src := activity()
	_, url := serve(t, console.Options{Source: src})
	_, page := get(t, url+"/prefixes")
	wants(t, text(page), "40 Match calls", "complete the whole chain was found 30 75.0 %", "absent the next block is not stored 10 25.0 %", "too_long the prefix has the length that the index permits 0 0.0 %",
		"most tokens were found: 2.", "bb01 team-b/m 9 2,560 4 12 12 MiB 60 s ago absent aa01 team-a/m 3 320 2 3 3.0 MiB 60 min ago complete",
		"team-b/m 9 no 4 40 10.0 0 0 B 0 0 team-a/m 3 yes 2 5 2.5 8 4.0 KiB 1 2")
	_, page = get(t, url+"/actions")
	wants(t, text(page), "The last action is BumpEpoch, OK.", "2026-11-26 20:00:00 UTC BumpEpoch sre 10.0.0.7:2 OK name=m none", "Evict sre 10.0.0.7:3 Internal namespace=m bytes=1073741824 &lt;b&gt;")
	_, page = get(t, url+"/pins")
	wants(t, text(page), "3 pins.", "hold 9 blocks with 4.5 KiB.",
		"8 team-a/m 2 the epoch trainer 2026-11-24 18:00:00 UTC 2 days ago 2026-11-26 20:01:00 UTC 0 B 7 team-a/m 3 8 blocks 10.0.0.7:1 2026-11-26 19:00:00 UTC 60 min ago by an administrator 4.0 KiB 5 team-b/m")
	_, url = serve(t, console.Options{Source: src, Access: &caller{prefix: "team-a/"}})
	for path, want := range map[string]string{"/pins": "hold 8 blocks with 4.0 KiB.", "/prefixes": "most tokens were found: 1."} {
		_, page = get(t, url+path)
		wants(t, text(page), want)
		if strings.Contains(page, "team-b") || strings.Contains(page, "bb01") {
			t.Errorf("the page %s shows the namespace of another tenant:\n%s", path, page)
		}
	}
}
