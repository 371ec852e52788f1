package server

import (
	"context"
	"time"

	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/top"
	"github.com/penstock-kv/penstock/server/console"
)

// requestsMax is the number of requests on a page of a planner's console.
const requestsMax = 200

// plannerSource is the console.PlannerSource of a planner.
type plannerSource struct{ service PlannerService }

// DualPath implements console.PlannerSource.
func (s plannerSource) DualPath(ctx context.Context) console.DualPath {
	t, err := s.service.Top(ctx, &pb.TopRequest{})
	if err != nil {
		return console.DualPath{Standby: status.Convert(err).Message()}
	}
	d := console.DualPath{
		Waiting: int64(t.GetWaiting()), Loading: int64(t.GetLoading()), Serving: int64(t.GetServing()),
		Submitted: t.GetSubmitted(), Finished: t.GetFinished(), Rejected: t.GetRejected(), Replanned: t.GetReplanned(),
		PrefillTokens: t.GetPrefillSideTokens(), DecodeTokens: t.GetDecodeSideTokens(),
		Splits: t.GetSplits(), Cuts: t.GetCuts(), Hedges: t.GetHedges(), Recomputes: t.GetRecomputes(), MoreTenants: int64(t.GetMoreTenants()),
	}
	if most := t.GetComputeOutMostOverMean(); most > 0 {
		d.SentMostOverMean = top.Known(most)
	}
	if most := t.GetComputeInMostOverMean(); most > 0 {
		d.ReceivedMostOverMean = top.Known(most)
	}
	for _, v := range t.GetTenants() {
		d.Tenants = append(d.Tenants, console.Waiting{Tenant: v.GetTenant(), Priority: int64(v.GetPriority()), Weight: v.GetWeight(), Requests: int64(v.GetWaiting()), Tokens: v.GetTokens()})
	}
	for _, g := range t.GetGroups() {
		group := console.Group{Name: g.GetGroup(), Role: "prefill", Queued: int64(g.GetQueued()), Silent: time.Duration(g.GetSilentMilliseconds()) * time.Millisecond}
		decode := g.GetRole() == pb.Side_SIDE_DECODE
		if decode {
			group.Role = "decode"
		}
		for _, e := range g.GetEngines() {
			row := console.Engine{Name: e.GetEngine(), Machine: e.GetNode(), Tokens: int64(e.GetTokens()), Requests: int64(e.GetRequests())}
			for _, n := range e.GetComputeNics() {
				nic := console.ComputeNIC{Name: n.GetCounters().GetNic(), Sent: n.GetCounters().GetBytesOut(), Received: n.GetCounters().GetBytesIn()}
				if n.OutBytesPerSecond != nil && n.InBytesPerSecond != nil {
					nic.SentRate, nic.ReceivedRate = top.Known(n.GetOutBytesPerSecond()), top.Known(n.GetInBytesPerSecond())
				}
				row.NICs = append(row.NICs, nic)
			}
			if decode {
				row.FreeTokens = top.Known(float64(e.GetHbmFreeTokens()))
			}
			group.Engines = append(group.Engines, row)
		}
		for _, n := range g.GetNodes() {
			row := console.Machine{Name: n.GetNode(), Queue: int64(n.GetReadQueueTokens()), Assigned: n.GetAssignedTokens()}
			if rate := n.GetReadTokensPerSecond(); rate > 0 {
				row.Rate = top.Known(rate)
			}
			group.Machines = append(group.Machines, row)
		}
		d.Groups = append(d.Groups, group)
	}
	return d
}

// Requests implements console.PlannerSource.
func (s plannerSource) Requests(context.Context) console.Requests {
	recent, err := s.service.Recent(requestsMax)
	if err != nil {
		return console.Requests{Standby: status.Convert(err).Message()}
	}
	var list []console.Request
	for _, r := range recent {
		row := console.Request{ID: r.ID, InProgress: r.InProgress, Since: r.Since, Lost: r.Lost}
		for _, d := range r.Decisions {
			row.Decisions = append(row.Decisions, console.Decision(d))
		}
		list = append(list, row)
	}
	return console.Requests{List: list}
}
