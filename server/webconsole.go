package server

import (
	"context"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/top"
	"github.com/penstock-kv/penstock/internal/top/fromapi"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/access"
	"github.com/penstock-kv/penstock/server/console"
	"github.com/penstock-kv/penstock/server/membership"
	"github.com/penstock-kv/penstock/server/metrics"
	"github.com/penstock-kv/penstock/trie"
)

// membersWait bounds the time that the console waits for the list of members from etcd.
const membersWait = time.Second

// ratesOver is the longest time over which the console computes a rate. After a longer time without
// a caller, rates are unknown until the second sample.
const ratesOver = 30 * time.Second

// consoleSource is the console.Source of a node. The console calls no method except Pins concurrently
// with itself, so the meters need no lock.
type consoleSource struct {
	*adminService
	overview, namespaces meter
}

// meter computes the rates of the one node.
type meter struct {
	top.Meter
	last time.Time
}

// add returns the rows of a sample that was taken at now.
func (m *meter) add(now time.Time, started time.Time, n top.Node) top.Frame {
	if now.Sub(m.last) > ratesOver {
		m.Meter = top.Meter{}
	}
	m.last = now
	return m.Add(top.Sample{At: now.Sub(started), Nodes: []top.Node{n}})
}

// Overview implements console.Source.
func (s *consoleSource) Overview(ctx context.Context) console.Overview {
	st := s.status()
	now := s.opts.Now()
	frame := s.overview.add(now, s.started, fromapi.Node(s.opts.Node, st))
	o := console.Overview{
		At: now, Version: st.GetVersion(), Started: s.started, Node: frame.Nodes[0], NICs: frame.NICs,
		Blocks: st.GetBlocks(), Namespaces: st.GetNamespaces(), Leases: st.GetLeases(), CorruptBlocks: st.GetCorruptBlocks(),
		Durability: st.GetDurability(), EvictionPolicy: st.GetEvictionPolicy(), RSSBytes: st.GetRssBytes(), MemoryBudget: st.GetMemoryBudgetBytes(),
	}
	for i, v := range st.GetVolumes() {
		volume := console.Volume{
			VolumeRow: frame.Volumes[i], IO: v.GetIo(), Duty: v.GetDuty(), Blocks: v.GetBlocks(),
			FailedRequests: v.GetReadFailures() + v.GetWriteFailures(), MoveStalled: v.GetMoveStalled(), Key: v.GetKey(),
		}
		if ms := v.GetStateSinceUnixMs(); ms != 0 {
			volume.Since = time.UnixMilli(ms)
		}
		o.Volumes = append(o.Volumes, volume)
	}
	erasures := s.erasuresByVolume()
	for _, path := range slices.Sorted(maps.Keys(erasures)) {
		if e := erasures[path]; e.namespaces > 0 {
			o.Erasures = append(o.Erasures, console.Erasure{Volume: path, Namespaces: e.namespaces, Since: e.since})
		}
	}
	if s.opts.Cluster != nil {
		o.Cluster = s.cluster(ctx)
	}
	return o
}

// cluster returns the state of the cluster.
func (s *consoleSource) cluster(ctx context.Context) *console.Cluster {
	c := &console.Cluster{RefusedNamespaces: s.opts.Cluster.Refused()}
	if err := s.opts.Cluster.Admit(""); err != nil {
		c.LeaseFailure = clip(err.Error())
	}
	within, cancel := context.WithTimeout(ctx, membersWait)
	defer cancel()
	resp, err := s.ListMembers(within, &pb.ListMembersRequest{Nodes: true})
	if err != nil {
		c.Failure = clip(err.Error())
	}
	for _, m := range resp.GetMembers() {
		row := memberRow(m)
		row.Self = m.GetName() == s.opts.Node
		c.Members = append(c.Members, row)
	}
	for _, m := range resp.GetDown() {
		c.Down = append(c.Down, memberRow(m))
	}
	return c
}

func memberRow(m *pb.Member) console.Member {
	row := console.Member{
		Name: m.GetName(), Addr: m.GetAddr(), Zone: m.GetZone(), State: m.GetState(), Version: m.GetVersion(),
		CapacityBytes: m.GetCapacityBytes(), UsedBytes: m.GetUsedBytes(), Fill: filled(m.GetUsedBytes(), m.GetCapacityBytes()),
		Since: time.UnixMilli(m.GetSinceUnixMs()), Applied: m.GetApplied(),
		Blocks: m.GetBlocks(), Leases: m.GetLeases(), HotPrefixes: m.GetHotPrefixes(), Drained: m.GetMove().GetPhase() == string(membership.MoveDone),
	}
	if ms := m.GetLeftUnixMs(); ms != 0 {
		row.Left = time.UnixMilli(ms)
	}
	if ms := m.GetWrittenUnixMs(); ms != 0 {
		row.Written = time.UnixMilli(ms)
	}
	for _, v := range m.GetVolumes() {
		row.Volumes = append(row.Volumes, console.MemberVolume{
			Path: v.GetPath(), State: v.GetState(), Reason: v.GetReason(), CapacityBytes: v.GetCapacityBytes(), UsedBytes: v.GetUsedBytes(), Blocks: v.GetBlocks(),
			Fill: filled(v.GetUsedBytes(), v.GetCapacityBytes()),
		})
	}
	for _, n := range m.GetNics() {
		row.NICs = append(row.NICs, console.MemberNIC{Name: n.GetName(), Address: n.GetAddress(), Up: n.GetUp(), LinkBits: n.GetLinkBitsPerSecond()})
	}
	return row
}

// filled returns the used part of a capacity.
func filled(used, capacity int64) top.Value {
	return top.Known(float64(used)).Over(top.Known(float64(capacity)))
}

// Namespaces implements console.Source.
func (s *consoleSource) Namespaces(context.Context) []console.Namespace {
	n := top.Node{Address: s.opts.Node, Name: s.opts.Node, Started: s.started, Listed: true}
	all := s.describeAll(s.node.Namespaces())
	for _, ns := range all {
		n.Namespaces = append(n.Namespaces, fromapi.Namespace(ns))
	}
	now := s.opts.Now()
	n.Up = now.Sub(s.started)
	rows := make(map[string]top.NamespaceRow, len(all))
	for _, row := range s.namespaces.add(now, s.started, n).Namespaces {
		rows[row.Name] = row
	}
	out := make([]console.Namespace, len(all))
	for i, ns := range all {
		counters := *n.Namespaces[i].Counters
		out[i] = console.Namespace{NamespaceRow: rows[ns.GetName()], Tenant: ns.GetTenant(), Counters: counters}
		start := s.node.EpochStart(kv.NamespaceID(ns.GetId()))
		if counters.QueriedTokens >= start.QueriedTokens && counters.HitTokens >= start.HitTokens {
			out[i].HitRateSince = top.Known(float64(counters.HitTokens - start.HitTokens)).Over(top.Known(float64(counters.QueriedTokens - start.QueriedTokens)))
		}
	}
	return out
}

// Tenants implements console.Source.
func (s *consoleSource) Tenants(context.Context) []console.Tenant {
	all := s.node.Tenants()
	out := make([]console.Tenant, len(all))
	for i, tn := range all {
		out[i] = console.Tenant{
			Prefix: tn.Prefix, QuotaBytes: tn.Bytes, UsedBytes: tn.UsedBytes, Fill: filled(tn.UsedBytes, tn.Bytes), Namespaces: tn.Namespaces,
			EvictedBlocks: tn.EvictedPieces, EvictedBytes: tn.EvictedBytes, RefusedBlocks: tn.RefusedPieces,
		}
	}
	return out
}

// Prefixes implements console.Source.
func (s *consoleSource) Prefixes(context.Context) console.Prefixes {
	p := console.Prefixes{At: s.opts.Now(), Cuts: metrics.ByLabel(s.opts.Metrics.MatchCuts)}
	for _, ns := range s.node.Stats().Index.Namespaces {
		for _, e := range ns.Live {
			p.Epochs = append(p.Epochs, console.Epoch{
				Namespace: ns.Name, Epoch: uint64(e.Epoch), Newest: e.Epoch == ns.Epoch, Matches: e.Matches, Hits: e.Hits,
				Blocks: e.Blocks, Bytes: e.Bytes, Leases: e.Leases, Pins: e.Pins,
			})
		}
	}
	defs := make(map[kv.NamespaceID]kv.Namespace)
	for _, def := range s.node.Namespaces() {
		defs[def.ID] = def
	}
	for _, h := range s.node.TopPrefixes() {
		def, ok := defs[h.Namespace]
		if !ok {
			continue // it was deleted meanwhile
		}
		p.Top = append(p.Top, console.Prefix{
			Namespace: def.Name, Epoch: uint64(h.Epoch), First: h.First.String(), Matches: h.Matches, Tokens: h.Tokens,
			Blocks: int64(h.Blocks), Bytes: int64(h.Blocks) * def.Geometry.BlockBytes(), Last: h.Last, Cut: h.Cut.String(),
		})
	}
	return p
}

// Pins implements console.Source. It reads the pins in pages, and keeps twice the rows at most.
func (s *consoleSource) Pins(_ context.Context, sees func(namespace string) bool, rows int) console.Pins {
	all := console.Pins{At: s.opts.Now()}
	oldest := func() {
		slices.SortStableFunc(all.List, func(a, b console.Pin) int { return a.Since.Compare(b.Since) })
		all.List = all.List[:min(len(all.List), rows)]
	}
	seen := make(map[string]bool)
	var page []trie.Pin
	for cursor := uint32(0); ; {
		var err error
		if page, cursor, err = s.node.Pins(page[:0], "", false, cursor, pinsMax); err != nil {
			all.Failure = clip(err.Error())
		}
		for _, p := range page {
			see, ok := seen[p.Namespace]
			if !ok {
				see = sees(p.Namespace)
				seen[p.Namespace] = see
			}
			if !see {
				continue
			}
			all.Total++
			all.Blocks += int64(p.Blocks)
			all.Bytes += p.Bytes
			all.List = append(all.List, console.Pin{
				Lease: uint64(p.Lease), Namespace: p.Namespace, Epoch: uint64(p.Epoch), OfEpoch: p.OfEpoch, Owner: p.Owner,
				Since: p.Since, Expires: p.Expires, Blocks: int64(p.Blocks), Bytes: p.Bytes,
			})
			if len(all.List) >= 2*rows {
				oldest()
			}
		}
		if cursor == 0 {
			oldest()
			return all
		}
	}
}

// Actions implements console.Source.
func (s *consoleSource) Actions(context.Context) []console.Action { return s.audit.recent.list() }

// consoleAccess is the console.Access of a node: the roles of the paths, the namespaces on which the
// caller has any role, as in ListNamespaces, the pins of those on which it has the role admin, as in
// ListPins, and the tenants that ListTenants shows.
type consoleAccess struct{ guard }

// Admit implements console.Access.
func (a consoleAccess) Admit(r *http.Request) (context.Context, error) { return a.admitWeb(r) }

// Caller implements console.Access. It returns the name of the principal; "" without a roles file.
func (a consoleAccess) Caller(ctx context.Context) string {
	id, ok := identityOf(ctx)
	if !ok {
		return ""
	}
	return id.Principal.Name()
}

// Opens implements console.Access.
func (a consoleAccess) Opens(ctx context.Context, path string) bool {
	id, ok := identityOf(ctx)
	return !ok || id.Principal.HasAnywhere(webRule(path))
}

// SeesNamespace implements console.Access.
func (a consoleAccess) SeesNamespace(ctx context.Context, name string) bool {
	return sees(ctx, access.Any, name)
}

// SeesTenant implements console.Access.
func (a consoleAccess) SeesTenant(ctx context.Context, prefix string) bool {
	return seesAll(ctx, access.Any, prefix)
}

// SeesPins implements console.Access.
func (a consoleAccess) SeesPins(ctx context.Context, name string) bool {
	return sees(ctx, access.Admin, name)
}

// isConsole reports whether a path belongs to the console, which browsers open.
func isConsole(path string) bool {
	switch path {
	case "/", "/namespaces", "/prefixes", "/pins", "/actions", "/requests":
		return true
	}
	return strings.HasPrefix(path, "/live/")
}
