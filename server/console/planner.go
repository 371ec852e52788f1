package console

import (
	"cmp"
	"context"
	"fmt"
	"net/url"
	"slices"
	"time"

	"github.com/penstock-kv/penstock/internal/top"
)

// PlannerSource supplies the state of a planner. Its two methods may be called concurrently, but
// neither of them concurrently with itself.
type PlannerSource interface {
	// DualPath returns the load of the engines and of their storage and compute NICs.
	DualPath(context.Context) DualPath
	// Requests returns the last requests. The caller must not change the slice.
	Requests(context.Context) Requests
}

// DualPath is the load of a cluster of prefill and decode engines, as its planner finds it.
type DualPath struct {
	// Standby is the reason for which the planner does not serve, "" if it serves.
	Standby string
	// Waiting requests have no engine, Loading ones read their prefix, and Serving ones have not ended.
	Waiting, Loading, Serving int64
	// Submitted, Finished, Rejected and Replanned count requests since the planner began to serve.
	Submitted, Finished, Rejected, Replanned uint64
	// PrefillTokens and DecodeTokens are the tokens of prefixes that the storage NICs of the two
	// sides were ordered to read since the planner began to serve.
	PrefillTokens, DecodeTokens uint64
	// Splits counts the requests that both sides read, Cuts the reads that were stopped because
	// their side was slow, Hedges the tails that both sides read, and Recomputes the ranges that no
	// side could read.
	Splits, Cuts, Hedges, Recomputes uint64
	Groups                           []Group
	Tenants                          []Waiting
	// MoreTenants is the number of tenants that are not in Tenants.
	MoreTenants int64
	// SentMostOverMean and ReceivedMostOverMean are the highest rate of a compute NIC divided by the
	// mean of all. They are unknown while no NIC sends, or receives.
	SentMostOverMean, ReceivedMostOverMean top.Value
}

// Group is a group of engines with one leader.
type Group struct {
	Name, Role string
	// Queued counts the requests in the group's own queue.
	Queued int64
	// Silent is the time since the last message of its leader.
	Silent   time.Duration
	Engines  []Engine
	Machines []Machine
}

// Engine is the load of an engine.
type Engine struct {
	Name, Machine string
	// Tokens and Requests are its work in progress.
	Tokens, Requests int64
	// FreeTokens is the free device memory of a decode engine; unknown for a prefill engine.
	FreeTokens top.Value
	// NICs are the compute NICs, which its leader reports.
	NICs []ComputeNIC
}

// ComputeNIC is the load of a NIC over which an engine exchanges KV with engines of the other role.
type ComputeNIC struct {
	Name string
	// Sent and Received are its bytes since the engine's start.
	Sent, Received uint64
	// SentRate and ReceivedRate are in bytes per second.
	SentRate, ReceivedRate top.Value
}

// Machine is the load of the storage NIC of a machine.
type Machine struct {
	Name string
	// Queue is its reading queue, in tokens, and Rate the measured rate of its reads, in tokens per
	// second; unknown before the first read.
	Queue int64
	Rate  top.Value
	// Assigned counts the tokens that it was ordered to read since the planner began to serve.
	Assigned uint64
}

// Waiting has the waiting requests of a tenant and a priority.
type Waiting struct {
	Tenant   string
	Priority int64
	Weight   float64
	Requests int64
	// Tokens is their work: tokens to compute, and cached tokens weighted by the time of their read.
	Tokens uint64
}

// Requests are the last requests.
type Requests struct {
	// Standby is the reason for which the planner does not serve, "" if it serves.
	Standby string
	// List has the newest request first.
	List []Request
}

// Request is a request and its plan.
type Request struct {
	ID string
	// InProgress is set until the request has ended.
	InProgress bool
	// Since is the time since its submission.
	Since time.Duration
	// Decisions has the decisions of the planner, in order.
	Decisions []Decision
	// Lost counts later decisions, of which the planner has no record.
	Lost int
}

// Decision is a decision of the planner.
type Decision struct {
	// After is the time from the submission to the decision.
	After time.Duration
	Text  string
}

// last returns the time from the submission to the last decision.
func (r *Request) last() time.Duration {
	if len(r.Decisions) == 0 {
		return 0
	}
	return r.Decisions[len(r.Decisions)-1].After
}

// machineView is a row of the table of storage NICs.
type machineView struct {
	Machine
	Group, Role string
	// Wait is the time in which the NIC reads its queue at its rate.
	Wait top.Value
	// Load is the part of the largest number of assigned tokens.
	Load top.Value
}

// nicView is a row of the table of compute NICs.
type nicView struct {
	ComputeNIC
	Engine, Machine, Group, Role string
	// SentPart and ReceivedPart are the parts of the highest rates.
	SentPart, ReceivedPart top.Value
}

type dualPathView struct {
	DualPath
	// SideTokens are the tokens ordered to be read by both sides.
	SideTokens  uint64
	PrefillPart top.Value
	Machines    []machineView
	// MostOverMean is the largest number of assigned tokens divided by the mean of all machines.
	MostOverMean      top.Value
	Prefills, Decodes int
	// NICs are the first nicsShown compute NICs, MoreNICs is the number of the others. Sent and Received
	// are the sums of the bytes of all.
	NICs           []nicView
	MoreNICs       int64
	Sent, Received uint64
}

// nicsShown is the number of compute NICs on the page, which is sent again at each change.
const nicsShown = 256

// viewDualPath shows the storage NICs with the longest reading queues first.
func (c *Console) viewDualPath(ctx context.Context, _ url.Values) (any, string) {
	d := c.dualPath.get(ctx, c.opts.Now(), c.opts.Interval)
	v := dualPathView{DualPath: d, SideTokens: d.PrefillTokens + d.DecodeTokens}
	v.PrefillPart = top.Known(float64(d.PrefillTokens)).Over(top.Known(float64(v.SideTokens)))
	var sum, most uint64
	for _, g := range d.Groups {
		if g.Role == "prefill" {
			v.Prefills++
		} else {
			v.Decodes++
		}
		for _, m := range g.Machines {
			v.Machines = append(v.Machines, machineView{Machine: m, Group: g.Name, Role: g.Role, Wait: top.Known(float64(m.Queue)).Over(m.Rate)})
			sum, most = sum+m.Assigned, max(most, m.Assigned)
		}
	}
	v.NICs, v.Sent, v.Received = viewNICs(d.Groups)
	if n := len(v.NICs); n > nicsShown {
		v.NICs, v.MoreNICs = v.NICs[:nicsShown], int64(n-nicsShown)
	}
	for i := range v.Machines {
		v.Machines[i].Load = top.Known(float64(v.Machines[i].Assigned)).Over(top.Known(float64(most)))
	}
	v.MostOverMean = top.Known(float64(most) * float64(len(v.Machines))).Over(top.Known(float64(sum)))
	slices.SortFunc(v.Machines, func(a, b machineView) int {
		return cmp.Or(cmp.Compare(b.Queue, a.Queue), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Group, b.Group))
	})
	return v, fmt.Sprintf("%s for prefill and %d for decode are registered.", plural(int64(v.Prefills), "group"), v.Decodes)
}

// viewNICs returns the compute NICs in descending order of the rate of both directions, and the sums of the
// bytes sent and received.
func viewNICs(groups []Group) (nics []nicView, sent, received uint64) {
	var mostSent, mostReceived float64
	for _, g := range groups {
		for _, e := range g.Engines {
			for _, n := range e.NICs {
				nics = append(nics, nicView{ComputeNIC: n, Engine: e.Name, Machine: e.Machine, Group: g.Name, Role: g.Role})
				sent, received = sent+n.Sent, received+n.Received
				mostSent, mostReceived = max(mostSent, n.SentRate.Of), max(mostReceived, n.ReceivedRate.Of)
			}
		}
	}
	for i := range nics {
		nics[i].SentPart, nics[i].ReceivedPart = nics[i].SentRate.Over(top.Known(mostSent)), nics[i].ReceivedRate.Over(top.Known(mostReceived))
	}
	slices.SortFunc(nics, func(a, b nicView) int {
		return cmp.Or(cmp.Compare(b.SentRate.Of+b.ReceivedRate.Of, a.SentRate.Of+a.ReceivedRate.Of), cmp.Compare(a.Engine, b.Engine), cmp.Compare(a.Name, b.Name))
	})
	return nics, sent, received
}

// requestView is a row of the list of requests.
type requestView struct {
	Request
	// Planned is the time from the submission to the last decision, and Last its text.
	Planned time.Duration
	Last    string
	Path    string
}

// stepView is a row of the time line of a request.
type stepView struct {
	Decision
	// Pause is the time since the decision before it.
	Pause time.Duration
	// Part is the part of the time line at which the decision is.
	Part top.Value
}

type requestsView struct {
	Standby string
	// Of is the request whose time line is shown; "" in the list.
	Of string
	// Found is nil if the planner does not have the request.
	Found *Request
	Steps []stepView
	List  []requestView
}

// viewRequests shows the last requests, or the time line of the one that the query names.
func (c *Console) viewRequests(ctx context.Context, query url.Values) (any, string) {
	all := c.requests.get(ctx, c.opts.Now(), c.opts.Interval)
	v := requestsView{Standby: all.Standby, Of: query.Get("id")}
	last := "last " + plural(int64(len(all.List)), "request") + "."
	switch {
	case v.Standby != "":
		return v, "This planner has no requests."
	case v.Of == "":
		for _, r := range all.List {
			row := requestView{Request: r, Planned: r.last(), Path: (&url.URL{Path: "/requests", RawQuery: url.Values{"id": {r.ID}}.Encode()}).String()}
			if n := len(r.Decisions); n > 0 {
				row.Last = r.Decisions[n-1].Text
			}
			v.List = append(v.List, row)
		}
		return v, "The " + last
	}
	i := slices.IndexFunc(all.List, func(r Request) bool { return r.ID == v.Of })
	if i < 0 {
		return v, "The request is not among the " + last
	}
	v.Found = &all.List[i]
	var before time.Duration
	for _, d := range v.Found.Decisions {
		v.Steps = append(v.Steps, stepView{Decision: d, Pause: d.After - before, Part: top.Known(d.After.Seconds()).Over(top.Known(v.Found.last().Seconds()))})
		before = d.After
	}
	state := "has ended"
	if v.Found.InProgress {
		state = "is in progress"
	}
	return v, fmt.Sprintf("The request %s, %s.", state, plural(int64(len(v.Steps)), "decision"))
}
