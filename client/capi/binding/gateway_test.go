package binding

import (
	"errors"
	"strings"
	"testing"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client/gateway"
	"github.com/penstock-kv/penstock/client/leader"
	"github.com/penstock-kv/penstock/kv"
)

// TestGateway: the events of a request that runs to its end, and of one that is cancelled.
func TestGateway(t *testing.T) {
	f := newFleet(t)
	tokens := prompt(1)
	ids := f.fill(tokens, 8)
	p, d := f.lead(f.options(leader.Prefill)), f.lead(f.options(leader.Decode))
	r := f.submit(gateway.Request{ID: "r", Prompt: len(tokens), IDs: ids, Output: 3})
	if e := f.gateway.next(); e.Request != r || e.Kind != gateway.Matched || e.Hit != 8*geo.BlockTokens {
		t.Errorf("%+v; want Matched", e)
	}
	if e := f.gateway.next(); e.Kind != gateway.Accepted {
		t.Errorf("%+v; want Accepted", e)
	}
	if e := f.gateway.next(); e.Kind != gateway.Started || e.Prefill != "prefill-0" || e.Decode != "decode-0" || e.ReadByPrefill+e.ReadByDecode != 8*geo.BlockTokens {
		t.Errorf("%+v; want Started", e)
	}
	pa, da := want(p, ActionStart).Attempt, want(d, ActionStart).Attempt
	f.must(pa.Done("", 0))
	f.until(r, gateway.Prefilled)
	f.must(da.Done("", 0))
	f.until(r, gateway.Done)
	if _, err := f.library.Request(r); !errors.Is(err, ErrHandle) {
		t.Errorf("an ended request: %v", err)
	}

	r = f.submit(gateway.Request{ID: "given up", Tokens: tokens})
	pa, da = want(p, ActionStart).Attempt, want(d, ActionStart).Attempt
	f.must(valueOf(t, f.library.Request, r, nil).Cancel())
	if e := f.until(r, 0); CodeOf(e.Err) != Canceled {
		t.Errorf("a cancelled request: %v", e.Err)
	}
	want(p, ActionEnd)
	want(d, ActionEnd)
	f.must(pa.Done("given up", 0))
	f.must(da.Done("given up", 0))
}

// TestGatewayRefuses: requests that cannot be served, or that the planner refuses.
func TestGatewayRefuses(t *testing.T) {
	f := newFleet(t)
	g := f.gateway.of
	for word, r := range map[string]gateway.Request{
		"ID":       {Tokens: prompt(1)},
		"0 tokens": {ID: "r"},
		"JSON":     {ID: "r", Tokens: prompt(1), Extra: []byte("{")},
		"ids":      {ID: "r", Prompt: 161, IDs: make([]kv.BlockID, 9)},
	} {
		if _, err := g.Submit(r); CodeOf(err) != Invalid || !strings.Contains(err.Error(), word) {
			t.Errorf("%v; want Invalid with %q", err, word)
		}
	}
	// No engine takes the first request before its deadline.
	r := f.submit(gateway.Request{ID: "late", Tokens: prompt(1), Deadline: time.Millisecond})
	if e := f.until(r, 0); CodeOf(e.Err) != Refused {
		t.Errorf("a request after its deadline: %v", e.Err)
	}
	waits := f.submit(gateway.Request{ID: "waits", Tokens: prompt(1)})
	f.until(waits, gateway.Accepted)
	r = f.submit(gateway.Request{ID: "waits", Tokens: prompt(1)})
	if e := f.until(r, 0); CodeOf(e.Err) != Invalid || !strings.Contains(e.Err.Error(), "waits") {
		t.Errorf("a second request of one id: %v", e.Err)
	}
	h, err := f.ns.OpenGateway(GatewayOptions{Planner: PlannerOptions{Address: f.planner.Addr}, RequestsMax: 1})
	one := valueOf(t, f.library.Gateway, h, err)
	if _, err := one.Submit(gateway.Request{ID: "a", Tokens: prompt(1)}); err != nil {
		t.Error(err)
	}
	if _, err := one.Submit(gateway.Request{ID: "b", Tokens: prompt(1)}); CodeOf(err) != Busy {
		t.Errorf("a request beyond RequestsMax: %v", err)
	}
	f.must(one.Close())
	if _, err := one.Submit(gateway.Request{ID: "c", Tokens: prompt(1)}); CodeOf(err) != Closed {
		t.Errorf("a request of a closed gateway: %v", err)
	}
	if _, err := f.ns.OpenGateway(GatewayOptions{Planner: PlannerOptions{Address: "no port"}}); CodeOf(err) != Invalid {
		t.Errorf("a planner without a port: %v", err)
	}
	if _, err := f.namespace("flat", 1, 1024).OpenGateway(GatewayOptions{Planner: PlannerOptions{Address: f.planner.Addr}}); CodeOf(err) != Invalid {
		t.Errorf("a flat namespace: %v", err)
	}
}

// TestGatewayOverPlannerRestart: a request that waits for engines while the planner is
// restarted is submitted again.
func TestGatewayOverPlannerRestart(t *testing.T) {
	f := newFleet(t)
	r := f.submit(gateway.Request{ID: "r", Tokens: prompt(1)})
	f.until(r, gateway.Accepted)
	f.planner.Stop()
	if e := f.until(r, gateway.Waiting); e.Reason == "" {
		t.Error("Waiting without a reason")
	}
	f.planner.Start()
	f.until(r, gateway.Accepted)
	p, d := f.lead(f.options(leader.Prefill)), f.lead(f.options(leader.Decode))
	f.must(want(p, ActionStart).Attempt.Done("", 0))
	f.must(want(d, ActionStart).Attempt.Done("", 0))
	f.until(r, gateway.Done)
}

// TestUndrainedEvents: the events of a request that are not drained are bounded, however often
// the planner is restarted. The request continues when they are drained. Close does not wait for a
// drain.
func TestUndrainedEvents(t *testing.T) {
	f := newFleet(t)
	f.submit(gateway.Request{ID: "r", Tokens: prompt(1)})
	waits := func(top *pb.TopResponse) bool { return top.Waiting == 1 }
	f.await("the request", waits)
	for range eventsMax/2 - 1 { // each adds Waiting and Accepted to Matched and Accepted
		f.planner.Restart()
		f.await("the request again", waits)
	}
	f.planner.Restart()
	got := make([]Event, 4*eventsMax)
	n, err := f.gateway.of.Drain(got)
	if err != nil || n > eventsMax {
		t.Errorf("%d events, %v; want at most %d", n, err, eventsMax)
	}
	f.await("the request after a drain", waits)
	f.must(f.gateway.of.Close())
	f.await("no request", func(top *pb.TopResponse) bool { return top.Waiting == 0 })
}
