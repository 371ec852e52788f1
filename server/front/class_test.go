package front

import (
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client/gateway"
	"github.com/penstock-kv/penstock/client/leader"
	"github.com/penstock-kv/penstock/dualpath"
)

// with sends a completion with headers, given as alternating names and values.
func (c *cluster) with(body string, headers ...string) (*http.Response, string) {
	c.T.Helper()
	req, err := http.NewRequestWithContext(c.T.Context(), http.MethodPost, c.URL+"/v1/completions", strings.NewReader(body))
	c.must(err)
	req.Header.Set("Authorization", "Bearer sk-1")
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := c.Client().Do(req)
	c.must(err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	c.must(err)
	return resp, string(text)
}

// TestClass: tenant, priority and the deadline of the first token reach the planner, and a lower
// priority of the client is a higher one of the planner. A request whose first token would be late
// gets 429.
func TestClass(t *testing.T) {
	c := newCluster(t, Options{TenantHeader: "X-Tenant", FirstToken: time.Hour, FirstTokenHeader: "X-First-Token-Ms"}, dualpath.Options{Weights: map[string]float64{"team-7": 2.5}})
	goOn, arrived := make(chan struct{}), make(chan struct{}, 4)
	good := *c.d.work.Load()
	c.d.does(func(w http.ResponseWriter, r *http.Request, q *leader.Request) {
		arrived <- struct{}{}
		hold(t, goOn)
		good(w, r, q)
	})
	long := `"max_tokens":1,"prompt":"` + strings.Repeat("x", 60*16) + `"`
	first := c.ask(`{` + long + `}`) // it occupies the engines
	receive(t, arrived)
	second := make(chan int, 1)
	go func() {
		resp, _ := c.with(`{`+long+`,"priority":-5}`, "X-Tenant", "team-7", "X-First-Token-Ms", "0")
		second <- resp.StatusCode
	}()
	planner := pb.NewPlannerClient(c.Planner.Conn)
	c.await(func() bool {
		top, err := planner.Top(t.Context(), &pb.TopRequest{})
		if err != nil || len(top.Tenants) != 1 {
			return false
		}
		got := top.Tenants[0]
		if got.Tenant != "team-7" || got.Priority != 5 || got.Weight != 2.5 || got.Waiting != 1 || got.Tokens != 60*16 {
			t.Errorf("the planner has %v", got)
		}
		return true
	})
	resp, text := c.with(`{`+long+`}`, "X-First-Token-Ms", "1")
	if resp.StatusCode != http.StatusTooManyRequests || resp.Header.Get("Retry-After") != "3600" || !strings.Contains(text, "the first token cannot come by its deadline") {
		t.Errorf("%v, %s; want a 429 with the wait of the queue, because nothing was measured", resp, text)
	}
	checkError(t, text, "first_token_late")
	if n := c.value("rejected_total", rejectLate); n != 1 {
		t.Errorf("%v late requests are counted", n)
	}
	close(goOn)
	if a, b := receive(t, first), receive(t, second); a != 200 || b != 200 {
		t.Errorf("answered with %d and %d", a, b)
	}
	c.ended(outcomeDone, 2)
}

// TestRetryAfterEstimate: the planner's estimate, rounded up, is the client's Retry-After.
func TestRetryAfterEstimate(t *testing.T) {
	c := newCluster(t, Options{}, dualpath.Options{})
	w := httptest.NewRecorder()
	err := c.front.planned.refusalOf(&gateway.RefusedError{Refusal: gateway.Late, Reason: "late", RetryAfter: 2001 * time.Millisecond})
	c.front.explain(w, httptest.NewRequest(http.MethodPost, "/", nil), err)
	if w.Code != http.StatusTooManyRequests || w.Header().Get("Retry-After") != "3" {
		t.Errorf("%d, Retry-After %q; want 429 after 3 s", w.Code, w.Header().Get("Retry-After"))
	}
}

// TestBadClass: a 400 has the field or header, the value, and the valid values.
func TestBadClass(t *testing.T) {
	c := newCluster(t, Options{TenantHeader: "X-Tenant", FirstTokenHeader: "X-First-Token-Ms"}, dualpath.Options{})
	for _, v := range []struct{ body, header, value, want string }{
		{`{"prompt":"x","priority":1.5}`, "", "", "priority: it is 1.5; want an integer"},
		{`{"prompt":"x","priority":"high"}`, "", "", `priority: it is \"high\"; want an integer`},
		{`{"prompt":"x"}`, "X-Tenant", strings.Repeat("t", 257), "X-Tenant: the name has 257 bytes; the maximum is 256"},
		{`{"prompt":"x"}`, "X-Tenant", "t\xff", "X-Tenant: the name is not UTF-8"},
		{`{"prompt":"x"}`, "X-First-Token-Ms", "2s", `X-First-Token-Ms: it is \"2s\"; want a whole number of milliseconds from 0 to 86400000`},
		{`{"prompt":"x"}`, "X-First-Token-Ms", "86400001", "X-First-Token-Ms"},
		{`{"prompt":"x"}`, "X-First-Token-Ms", "-1", "X-First-Token-Ms"},
	} {
		resp, text := c.with(v.body, "X-None", "x", "Content-Type", "application/json")
		if v.header != "" {
			resp, text = c.with(v.body, v.header, v.value)
		}
		if resp.StatusCode != http.StatusBadRequest || !strings.Contains(text, v.want) {
			t.Errorf("%s with %s: %s: %d %s; want %q", v.body, v.header, v.value, resp.StatusCode, text, v.want)
		}
	}
}

// TestPriorityOf: vLLM serves lower values earlier, the planner higher values.
func TestPriorityOf(t *testing.T) {
	for given, want := range map[int64]int32{0: 0, 1: -1, -7: 7, math.MaxInt64: -math.MaxInt32, math.MinInt64: math.MaxInt32, math.MaxInt32: -math.MaxInt32} {
		f, err := parseFields([]byte(`{"priority":` + strconv.FormatInt(given, 10) + `}`))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := priorityOf(f); got != want || err != nil {
			t.Errorf("priority %d is the planner's %d, %v; want %d", given, got, err, want)
		}
	}
	for _, body := range []string{`{}`, `{"priority":null}`} {
		f, err := parseFields([]byte(body))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := priorityOf(f); got != 0 || err != nil {
			t.Error(fmt.Sprint(body, ": ", got, err))
		}
	}
}
