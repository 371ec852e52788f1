package console_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/chromedp"

	"github.com/penstock-kv/penstock/internal/top"
	"github.com/penstock-kv/penstock/server/console"
)

// plannerSource is a planner whose state a test sets.
type plannerSource struct {
	mu       sync.Mutex
	dualPath console.DualPath
	requests console.Requests
}

func (s *plannerSource) DualPath(context.Context) console.DualPath {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.dualPath
}

func (s *plannerSource) Requests(context.Context) console.Requests {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.requests
}

func (s *plannerSource) set(edit func(*plannerSource)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	edit(s)
}

// plannerSample is a planner of one prefill group and one decode group, with three machines.
func plannerSample() *plannerSource {
	return &plannerSource{
		dualPath: console.DualPath{
			Waiting: 3, Loading: 2, Serving: 9, Submitted: 1200, Finished: 1180, Rejected: 8, Replanned: 4,
			SentMostOverMean: top.Known(1.5), ReceivedMostOverMean: top.Known(2),
			PrefillTokens: 30_000, DecodeTokens: 10_000, Splits: 700, Cuts: 5, Hedges: 6, Recomputes: 1,
			Groups: []console.Group{
				{
					Name: "P", Role: "prefill", Silent: 12 * time.Millisecond,
					Engines: []console.Engine{{Name: "P/0", Machine: "m0", Requests: 2, Tokens: 8192, NICs: []console.ComputeNIC{
						{Name: "mlx5_0", Sent: 30_000_000, Received: 7000, SentRate: top.Known(3 << 20), ReceivedRate: top.Known(1 << 10)}, {Name: "mlx5_1", Sent: 1234, Received: 1},
					}}, {Name: "P/1", Machine: "m1", Requests: 1, Tokens: 4096}},
					Machines: []console.Machine{{Name: "m0", Queue: 500, Rate: top.Known(1000), Assigned: 24_000}, {Name: "m1", Queue: 9000, Rate: top.Known(2000), Assigned: 6000}},
				},
				{
					Name: "D", Role: "decode", Queued: 4, Silent: 1500 * time.Millisecond,
					Engines: []console.Engine{{Name: "D/0", Machine: "m2", Requests: 6, Tokens: 52_000, FreeTokens: top.Known(48_000), NICs: []console.ComputeNIC{
						{Name: "mlx5_0", Sent: 9000, Received: 30_000_001, SentRate: top.Known(1 << 20), ReceivedRate: top.Known(3 << 20)},
					}}},
					Machines: []console.Machine{{Name: "m2", Assigned: 10_000}},
				},
			},
			Tenants: []console.Waiting{{Tenant: "team-a", Priority: 1, Weight: 2, Requests: 2, Tokens: 9000}, {Weight: 1, Requests: 1, Tokens: 100}}, MoreTenants: 3,
		},
		requests: console.Requests{List: []console.Request{
			{ID: "gw.2", InProgress: true, Since: 80 * time.Millisecond, Decisions: []console.Decision{
				{After: 0, Text: "submitted"}, {After: 5 * time.Millisecond, Text: "read [0, 640) by prefill"}, {After: 20 * time.Millisecond, Text: "started"},
			}},
			{ID: "gw.1", Since: 12 * time.Second, Lost: 2, Decisions: []console.Decision{{After: 3 * time.Second, Text: "rejected"}}},
		}},
	}
}

// TestDualPath: the page has the storage NICs, the longest reading queue first, with the time of
// their queues and their imbalance, the compute NICs with their load, the sums of their bytes and their
// imbalance, the engines and the waiting tenants.
func TestDualPath(t *testing.T) {
	src := plannerSample()
	_, url := serve(t, console.Options{Planner: src, Node: "planner p", Interval: time.Nanosecond})
	_, page := get(t, url+"/")
	wants(t, text(page), "1 group for prefill and 1 for decode are registered.", "Dual path – planner p – Penstock",
		"Tokens read by the prefill side 30,000 of 40,000, 75.0 %", "Most loaded storage NIC over the mean 1.8", // 24000 / (40000 / 3)
		"m1 P prefill 9,000 2,000 4.5s 6,000 25.0 % m0 P prefill 500 1,000 500ms 24,000 100.0 % m2 D decode 0 – unknown – unknown 10,000",
		"Most loaded compute NIC over the mean, sent 1.5 Most loaded compute NIC over the mean, received 2",
		"Bytes sent by all compute NICs 30,010,234 Bytes received by all compute NICs 30,007,002",
		"mlx5_0 D/0 D decode m2 1.0 MiB/s 33.3 % 3.0 MiB/s 100.0 % 9,000 30,000,001 mlx5_0 P/0 P prefill m0 3.0 MiB/s 100.0 % 1.0 KiB/s 0.0 % 30,000,000 7,000 mlx5_1 P/0 P prefill m0 – unknown – unknown – unknown – unknown 1,234 1",
		"P/0 P prefill m0 2 8,192 – unknown 0 12ms ago", "D/0 D decode m2 6 52,000 48,000 4 1.5s ago",
		"team-a 1 2 2 9,000 none 0 1 1 100", "3 more are not shown.")
	if strings.Contains(page, "not ready") {
		t.Error("the page says that a role has no group")
	}
	src.set(func(s *plannerSource) { s.dualPath = console.DualPath{Groups: s.dualPath.Groups[1:]} })
	_, page = get(t, url+"/")
	wants(t, text(page), "not ready A request needs a group of each role. Registered: 0 for prefill, 1 for decode.", "Most loaded storage NIC over the mean 1.0")
	// The page has a bounded number of compute NICs, in descending order of their rates, and the sums of all.
	var many []console.ComputeNIC
	for i := range 1000 {
		many = append(many, console.ComputeNIC{Name: fmt.Sprintf("n%03d", i), Sent: 1, SentRate: top.Known(float64(i)), ReceivedRate: top.Known(0)})
	}
	src.set(func(s *plannerSource) { s.dualPath.Groups[0].Engines[0].NICs = many })
	_, page = get(t, url+"/")
	wants(t, text(page), "Bytes sent by all compute NICs 1,000", "744 more are not shown.")
	if !strings.Contains(page, ">n999<") || !strings.Contains(page, ">n744<") || strings.Contains(page, ">n743<") {
		t.Error("the page does not have the 256 compute NICs with the highest rates")
	}
	// Leaders of earlier versions report no compute NICs.
	src.set(func(s *plannerSource) { s.dualPath.Groups[0].Engines[0].NICs = nil })
	_, page = get(t, url+"/")
	if strings.Contains(strings.ToLower(text(page)), "compute nic") {
		t.Errorf("the page has compute NICs that were not reported: %s", text(page))
	}
	src.set(func(s *plannerSource) { s.dualPath = console.DualPath{Standby: "the planner at b:7430 leads"} })
	_, page = get(t, url+"/")
	wants(t, text(page), "standby the planner at b:7430 leads")
	if strings.Contains(page, "not ready") {
		t.Error("the page of a standby says that a role has no group")
	}
	for _, path := range []string{"/namespaces", "/pins", "/live/overview"} {
		if resp, _ := get(t, url+path); resp.StatusCode != 404 {
			t.Errorf("%s of a planner: %s", path, resp.Status)
		}
	}
}

// TestRequests: the page lists the last requests, and has a time line of each of them.
func TestRequests(t *testing.T) {
	src := plannerSample()
	_, url := serve(t, console.Options{Planner: src, Interval: time.Nanosecond})
	_, page := get(t, url+"/requests")
	wants(t, text(page), "The last 2 requests.", "gw.2 in progress 80ms ago 20ms started gw.1 ended 12s ago 3s rejected")
	_, page = get(t, url+"/requests?id=gw.2")
	wants(t, text(page), "The request is in progress, 3 decisions.", "0s 0s submitted 5ms 5ms read [0, 640) by prefill 20ms 15ms started")
	wants(t, page, `value="0"`, `value="0.25"`, `value="1"`)
	_, page = get(t, url+"/requests?id=gw.1")
	wants(t, text(page), "The request has ended, 1 decision.", "Of later decisions there is no record; their number is 2.")
	_, page = get(t, url+"/requests?id=%3Cscript%3E")
	wants(t, page, "&lt;script&gt;", "The planner has no record of this request", "The request is not among the last 2 requests.")
	if strings.Contains(page, "<script>") {
		t.Error("the HTML of an id is in the page")
	}
	s := listen(t, url+"/live/requests?id=gw.2")
	defer s.close()
	if e := s.event(); !strings.Contains(e.data, "read [0, 640) by prefill") || strings.Contains(e.data, "gw.1") {
		t.Errorf("the stream of one request sends %s", e.data)
	}
	src.set(func(s *plannerSource) { s.requests = console.Requests{Standby: "the planner at b:7430 leads"} })
	for _, path := range []string{"/requests", "/requests?id=gw.2"} {
		_, page = get(t, url+path)
		wants(t, text(page), "This planner has no requests.", "standby the planner at b:7430 leads")
		if strings.Contains(page, "no record") || strings.Contains(page, "<table") {
			t.Errorf("%s of a standby: %s", path, text(page))
		}
	}
}

// TestLongQueue: the time of a queue of the lowest rate is a duration too.
func TestLongQueue(t *testing.T) {
	src := plannerSample()
	src.dualPath.Groups[0].Machines[1] = console.Machine{Name: "m1", Queue: 1 << 40, Rate: top.Known(1e-9)}
	_, url := serve(t, console.Options{Planner: src})
	_, page := get(t, url+"/")
	wants(t, text(page), "m1 P prefill 1,099,511,627,776 0 1281023h53m")
}

// TestPlannerBrowser opens the planner's pages in Chromium: they are complete for screen readers,
// show changes, and lead to the time line of a request.
func TestPlannerBrowser(t *testing.T) {
	src := plannerSample()
	_, url := serve(t, console.Options{Planner: src, Node: "planner 10.0.0.9:7430", Interval: 20 * time.Millisecond})
	b := openBrowser(t)
	b.theme("light")
	b.open(url + "/")
	if missing := b.text(structure); missing != "" {
		t.Errorf("the page has %s", missing)
	}
	if rows := b.text(`[...document.querySelectorAll("section[aria-labelledby=compute-title] tbody tr")].map(r => r.cells[1].innerText + " " + r.cells[5].innerText.split("\n")[0]).join(", ")`); rows != "D/0 1.0 MiB/s, P/0 3.0 MiB/s, P/0 –" {
		t.Errorf("the table of compute NICs has %q", rows)
	}
	b.shoot("console-dualpath")
	src.set(func(s *plannerSource) { s.dualPath.Waiting = 12_345 })
	b.await(`document.getElementById("live").innerText.includes("12,345")`)
	src.set(func(s *plannerSource) {
		s.dualPath.Groups = slices.Clone(s.dualPath.Groups) // a page may be rendered from the previous ones
		s.dualPath.Groups[1].Engines = []console.Engine{{Name: "D/0", Machine: "m2", NICs: []console.ComputeNIC{{Name: "mlx5_0", Sent: 10_000, SentRate: top.Known(5 << 20), ReceivedRate: top.Known(0)}}}}
	})
	b.await(`document.querySelector("section[aria-labelledby=compute-title] tbody tr").innerText.includes("5.0 MiB/s")`)
	b.do(chromedp.Focus(chromedp.CSS(`a[href="/requests"]`)))
	b.press(enter)
	b.await(`document.title.startsWith("Requests") && document.getElementById("connection").textContent === "Updated live"`)
	if missing := b.text(structure); missing != "" {
		t.Errorf("the list of requests has %s", missing)
	}
	b.do(chromedp.Focus(chromedp.CSS(`a[href="/requests?id=gw.2"]`)))
	b.press(enter)
	b.await(`location.search === "?id=gw.2" && document.getElementById("connection").textContent === "Updated live"`)
	if missing := b.text(structure); missing != "" {
		t.Errorf("the time line has %s", missing)
	}
	b.shoot("console-request")
	src.set(func(s *plannerSource) {
		r := s.requests.List[0]
		r.Decisions = append(r.Decisions[:3:3], console.Decision{After: time.Second, Text: fmt.Sprint("decode has ended after ", 64, " tokens")})
		s.requests.List = []console.Request{r}
	})
	b.await(`document.querySelectorAll("tbody tr").length === 4 && document.getElementById("live").innerText.includes("after 64 tokens")`)
	b.do(chromedp.Navigate("about:blank"))
}
