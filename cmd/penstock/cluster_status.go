package main

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/placement"
	"github.com/penstock-kv/penstock/server/membership"
)

// clusterState is the output of cluster status.
type clusterState struct {
	Members       int         `json:"members"`
	Serving       int         `json:"serving"`
	Down          int         `json:"down"`
	CapacityBytes int64       `json:"capacity_bytes"`
	UsedBytes     int64       `json:"used_bytes"`
	Zones         []zoneState `json:"zones"`
	// HotPrefixes is the number of hot prefixes that have copies on further nodes, and Hot has the nodes that copied them, one
	// line each.
	HotPrefixes int64    `json:"hot_prefixes"`
	Hot         []string `json:"hot"`
	// Moves are the copies of draining nodes, one line each.
	Moves []string `json:"moves"`
	// Erasures are the volumes that may still have secrets of ended epochs, one line each.
	Erasures []string `json:"erasures"`
	// Notes are facts that need no action. Faults are facts that need an action.
	Notes  []string `json:"notes"`
	Faults []string `json:"faults"`
}

// zoneState sums up the members of one zone.
type zoneState struct {
	Zone          string `json:"zone"`
	Members       int    `json:"members"`
	Serving       int    `json:"serving"`
	CapacityBytes int64  `json:"capacity_bytes"`
	UsedBytes     int64  `json:"used_bytes"`
}

func newClusterStatus(c *connection) *cobra.Command {
	var expect int
	var wait bool
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Sum the cluster up, and list its faults",
		Long: `Sum the cluster up: members and fill by zone, hot prefixes with copies, draining nodes, and
faults. The exit code is 1 if there is a fault. A node that is down is a fault until it
starts, or is removed, or is drained. A volume that may still have secrets of ended epochs is
listed and does not change the exit code, because it may need a restart of its node. With --expect, fewer nodes that serve are a fault, too. With
--wait, return when there is no fault; --timeout bounds the wait.`,
		Args: args(cobra.NoArgs),
	}
	cmd.Flags().IntVar(&expect, "expect", 0, "number of nodes that must serve; 0: any number")
	cmd.Flags().BoolVar(&wait, "wait", false, "return when there is no fault")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if expect < 0 {
			return usagef("--expect %d: give the number of nodes of the cluster", expect)
		}
		return c.admin(cmd, func(ctx context.Context, a admin) error {
			var s clusterState
			for {
				resp, err := a.ListMembers(ctx, &pb.ListMembersRequest{Nodes: true})
				if err != nil {
					return err
				}
				if s = clusterStateOf(resp, expect); len(s.Faults) == 0 || !wait || !pause(ctx, drainPoll) {
					break
				}
			}
			if err := outputOf(cmd).emit(s, s.print); err != nil {
				return err
			}
			if len(s.Faults) > 0 {
				return errReported
			}
			return nil
		})
	}
	return cmd
}

// serves reports whether a member serves reads.
func serves(m *pb.Member) bool {
	return m.GetState() == string(membership.Serving) || m.GetState() == string(membership.Draining)
}

// clusterStateOf sums up the nodes. expect is the number of nodes that must serve; 0: any number.
func clusterStateOf(list *pb.ListMembersResponse, expect int) clusterState {
	members := list.GetMembers()
	s := clusterState{Members: len(members), Down: len(list.GetDown()), Zones: []zoneState{}, Hot: []string{}, Moves: []string{}, Erasures: []string{}, Notes: []string{}, Faults: []string{}}
	zones := make(map[string]*zoneState)
	versions := make(map[string][]string)
	places := make([]placement.Place, len(members))
	for i, m := range members {
		z := zones[m.GetZone()]
		if z == nil {
			z = &zoneState{Zone: m.GetZone()}
			zones[m.GetZone()] = z
		}
		z.Members++
		if serves(m) {
			z.Serving++
			s.Serving++
		}
		z.CapacityBytes += m.GetCapacityBytes()
		z.UsedBytes += m.GetUsedBytes()
		s.CapacityBytes += m.GetCapacityBytes()
		s.UsedBytes += m.GetUsedBytes()
		versions[m.GetVersion()] = append(versions[m.GetVersion()], m.GetName())
		if n := m.GetHotPrefixes(); n > 0 {
			s.HotPrefixes += n
			s.Hot = append(s.Hot, fmt.Sprintf("node %s: %s", m.GetName(), count(n)))
		}
		places[i] = placement.Place{Capacity: max(1, m.GetCapacityBytes()), Used: m.GetUsedBytes()}
	}
	for _, z := range zones {
		s.Zones = append(s.Zones, *z)
	}
	slices.SortFunc(s.Zones, func(a, b zoneState) int { return strings.Compare(a.Zone, b.Zone) })
	if s.Serving < expect {
		s.fault("%d nodes serve; --expect has %d", s.Serving, expect)
	}
	overfull := placement.Overfull(places)
	for i, m := range members {
		if !serves(m) {
			s.fault("node %s is %s since %s: it serves nothing", m.GetName(), m.GetState(), time.UnixMilli(m.GetSinceUnixMs()).UTC().Format(time.RFC3339))
		}
		if move := m.GetMove(); move != nil {
			s.Moves = append(s.Moves, "node "+m.GetName()+": "+moveLine(m))
			if move.GetReason() != "" {
				if m.GetState() == string(membership.Draining) {
					s.fault("the draining of node %s does not advance: %s", m.GetName(), move.GetReason())
				} else {
					s.fault("the copies of node %s to nodes that have joined do not advance: %s", m.GetName(), move.GetReason())
				}
			}
		}
		if overfull[i] {
			s.Notes = append(s.Notes, fmt.Sprintf("node %s is %s full: new sequences pass it over", m.GetName(), percent(m.GetUsedBytes(), max(1, m.GetCapacityBytes()))))
		}
	}
	for _, m := range append(slices.Clone(members), list.GetDown()...) {
		for _, e := range m.GetErasures() {
			s.Erasures = append(s.Erasures, "node "+m.GetName()+", volume "+erasureWords(e))
		}
	}
	for _, m := range list.GetDown() {
		if isDrained(m) {
			s.Notes = append(s.Notes, fmt.Sprintf("node %s is drained and %s: start it, or take it out with penstock cluster remove %s%s", m.GetName(), downWords(m), m.GetName(), evictedWords(m.GetMove())))
			continue
		}
		s.fault("node %s is %s: start it, or take it out with penstock cluster remove %s --force", m.GetName(), downWords(m), m.GetName())
	}
	if len(versions) > 1 {
		var all []string
		for v, names := range versions {
			all = append(all, v+" on "+strings.Join(names, ", "))
		}
		slices.Sort(all)
		s.Notes = append(s.Notes, "the nodes have different versions: "+strings.Join(all, "; "))
	}
	return s
}

func (s *clusterState) fault(format string, args ...any) {
	s.Faults = append(s.Faults, fmt.Sprintf(format, args...))
}

func (s *clusterState) print(t *table) {
	fmt.Fprintf(t, "%d of %d nodes serve, %s of %s used\n", s.Serving, s.Members+s.Down, size(s.UsedBytes), size(s.CapacityBytes))
	t.row("ZONE", "NODES", "SERVING", "CAPACITY", "USED")
	for _, z := range s.Zones {
		t.row(cmp.Or(z.Zone, "-"), z.Members, z.Serving, size(z.CapacityBytes), size(z.UsedBytes))
	}
	fmt.Fprintf(t, "hot prefixes with copies on further nodes: %s\n", count(s.HotPrefixes))
	for _, l := range []struct {
		title string
		lines []string
	}{{"hot prefixes", s.Hot}, {"draining", s.Moves}, {"erasure pending", s.Erasures}, {"note", s.Notes}, {"fault", s.Faults}} {
		for _, line := range l.lines {
			fmt.Fprintf(t, "%s: %s\n", l.title, line)
		}
	}
	if len(s.Faults) == 0 {
		fmt.Fprintln(t, "no faults")
	}
}

// restartPlan is the output of cluster restart-plan.
type restartPlan struct {
	// Steps are the nodes that are left, in order.
	Steps []restartStep `json:"steps"`
	// Done are the nodes that have started after --since.
	Done []string `json:"done"`
	// Blocked are the reasons why no node may be restarted at the moment.
	Blocked []string `json:"blocked"`
}

type restartStep struct {
	Node string `json:"node"`
	Zone string `json:"zone"`
	Addr string `json:"addr"`
	// Share is the part of the cluster's capacity, from 0 to 1: without replicas, as much of the sequences
	// is a miss while the node is down.
	Share    float64  `json:"share"`
	Commands []string `json:"commands"`
}

func newClusterRestartPlan(c *connection) *cobra.Command {
	var since string
	var expect int
	cmd := &cobra.Command{
		Use:   "restart-plan",
		Short: "Show in which order to restart the nodes of the cluster, and with which commands",
		Long: `Show in which order to restart all nodes of the cluster, for example for a new version, and
with which commands. The nodes of one zone come after each other, so that of replicas in
different zones at most one is away. Only one node is down at a time, and the next one
follows when all serve. A node keeps its blocks, so only the time of its restart costs hits.

With --since TIME, nodes that have started after TIME are done: repeat the command with the
time at which the restart began, and follow the first step. The exit code is 1 while the
cluster has a fault and no node may be restarted.`,
		Args: args(cobra.NoArgs),
	}
	cmd.Flags().StringVar(&since, "since", "", "time at which the restart began, as 2026-11-26T09:00:00Z: nodes that have started after it are done")
	cmd.Flags().IntVar(&expect, "expect", 0, "number of nodes of the cluster, of which all must serve before the next step; 0: the number of members, and of nodes that are down and not drained")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if expect < 0 {
			return usagef("--expect %d: give the number of nodes of the cluster", expect)
		}
		var began time.Time
		if since != "" {
			var err error
			if began, err = time.Parse(time.RFC3339, since); err != nil {
				return usagef("--since %q: write the time as 2026-11-26T09:00:00Z", since)
			}
		}
		return c.admin(cmd, func(ctx context.Context, a admin) error {
			resp, err := a.ListMembers(ctx, &pb.ListMembersRequest{Nodes: true})
			if err != nil {
				return err
			}
			p := restartPlanOf(resp, began, expect)
			if err := outputOf(cmd).emit(p, p.print); err != nil {
				return err
			}
			if len(p.Blocked) > 0 {
				return errReported
			}
			return nil
		})
	}
	return cmd
}

// restartPlanOf returns the plan for the nodes. began is zero if no node is done.
func restartPlanOf(list *pb.ListMembersResponse, began time.Time, expect int) restartPlan {
	members, s := list.GetMembers(), clusterStateOf(list, expect)
	p := restartPlan{Steps: []restartStep{}, Done: []string{}, Blocked: s.Faults}
	for _, m := range members {
		if m.GetState() == string(membership.Draining) {
			p.Blocked = append(p.Blocked, "node "+m.GetName()+" drains: wait until it is drained, or end that with penstock cluster undrain "+m.GetName())
		}
		if !began.IsZero() && time.UnixMilli(m.GetSinceUnixMs()).After(began) {
			p.Done = append(p.Done, m.GetName())
			continue
		}
		host, _, err := net.SplitHostPort(m.GetAddr())
		if err != nil {
			host = m.GetAddr()
		}
		p.Steps = append(p.Steps, restartStep{
			Node: m.GetName(), Zone: m.GetZone(), Addr: m.GetAddr(), Share: float64(m.GetCapacityBytes()) / float64(max(1, s.CapacityBytes)),
			Commands: []string{
				"ssh " + host + " systemctl restart penstock",
				"penstock --server " + m.GetAddr() + " status --wait",
				fmt.Sprintf("penstock --server %s cluster status --wait --expect %d", m.GetAddr(), max(expect, len(members)+undrained(list.GetDown()))),
			},
		})
	}
	slices.SortFunc(p.Steps, func(a, b restartStep) int {
		return cmp.Or(strings.Compare(a.Zone, b.Zone), strings.Compare(a.Node, b.Node))
	})
	slices.Sort(p.Done)
	return p
}

// undrained returns the number of nodes whose blocks the other nodes do not have.
func undrained(down []*pb.Member) (n int) {
	for _, m := range down {
		if !isDrained(m) {
			n++
		}
	}
	return n
}

func (p *restartPlan) print(t *table) {
	if len(p.Done) > 0 {
		fmt.Fprintf(t, "done: %s\n", strings.Join(p.Done, ", "))
	}
	for i, s := range p.Steps {
		zone := ""
		if s.Zone != "" {
			zone = ", zone " + s.Zone
		}
		fmt.Fprintf(t, "%d. node %s%s: %.0f %% of the sequences are misses while it is down, unless they have replicas\n", i+1, s.Node, zone, 100*s.Share)
		for _, command := range s.Commands {
			fmt.Fprintf(t, "   %s\n", command)
		}
	}
	for _, b := range p.Blocked {
		fmt.Fprintf(t, "not now: %s\n", b)
	}
	if len(p.Steps) == 0 {
		fmt.Fprintln(t, "all nodes are done")
	}
}
