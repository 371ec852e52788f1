package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client/planners"
	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/dualpath/prfaas"
)

// planRoles is the output of plan roles.
type planRoles struct {
	Groups   []planRole    `json:"groups"`
	Waiting  uint32        `json:"waiting"`
	Proposal planProposal  `json:"proposal"`
	Switch   *planSwitched `json:"switch,omitempty"`
}

// planRole is one group.
type planRole struct {
	Group    string  `json:"group"`
	Role     string  `json:"role"`
	Engines  uint32  `json:"engines"`
	Requests uint32  `json:"requests"`
	Queued   uint32  `json:"queued"`
	Use      float64 `json:"use"`
	// State describes the switch of the group's role that is in progress; "" if there is none. Kept
	// is the reason why the last switch failed, so that the group kept its role.
	State string `json:"state,omitempty"`
	Kept  string `json:"kept,omitempty"`
	Fixed bool   `json:"fixed"`
}

// planProposal names the group that should change its role. Group is empty if no group should.
type planProposal struct {
	Group string  `json:"group,omitempty"`
	Role  string  `json:"role,omitempty"`
	Gain  float64 `json:"gain,omitempty"`
	Why   string  `json:"why"`
	// Source is the method of the computation and its inputs.
	Source string `json:"source"`
}

// planSwitched is a requested switch and its result.
type planSwitched struct {
	Group    string `json:"group"`
	Role     string `json:"role"`
	Requests uint32 `json:"requests"`
	Applied  bool   `json:"applied"`
	Done     bool   `json:"done"`
}

// sides maps the names of roles to their values in the API.
var sides = map[string]pb.Side{"prefill": pb.Side_SIDE_PREFILL, "decode": pb.Side_SIDE_DECODE}

func newPlanRoles(w world) *cobra.Command {
	var apply, wait bool
	var policy string
	cmd := &cobra.Command{
		Use:   "roles [GROUP=ROLE]",
		Short: "Show the roles and the load of the engine groups, and change the role of a group",
		Long: `Print each group's role and load, and which group should change its role, if one should. The
proposal is that of PrfaaS's long-term controller (section 3.4.3), from the lengths, outputs
and decode steps of the last requests that finished, schedule.prefill_rate and the engines'
device memory. A group counts as one instance, of the mean size.

With GROUP=ROLE the command prints the number of requests that delay the switch. With
--apply the planner makes the switch, or the proposed switch if no group is named: it sends
the group no new request, lets the group's requests end (finish) or plans them on other
groups (recompute), and then orders the group's leader to change the role. No request is
lost. The group keeps its role if the leader refuses, or if no other group with this role
is left. The group's present role as ROLE cancels a switch, until the leader has the order.
The command succeeds when the group's leader has the switch. Then a planner that is restarted,
or elected, continues it.`,
		Example: `  penstock plan roles
  penstock plan roles rack7=prefill
  penstock plan roles rack7=prefill --apply --wait --timeout 10m`,
		Args: args(cobra.MaximumNArgs(1)),
	}
	c := addPlannerFlags(cmd, w)
	cmd.Flags().BoolVar(&apply, "apply", false, "change the role of the group, or make the proposed change without GROUP=ROLE")
	cmd.Flags().BoolVar(&wait, "wait", false, "with --apply: wait until the group has changed its role or keeps it, at most --timeout")
	cmd.Flags().StringVar(&policy, "policy", dualpath.DrainFinish.String(), "what happens to requests that the group has: finish or recompute")
	completeValues(cmd, "policy", "finish", "recompute")
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		if wait && !apply {
			return usagef("--wait needs --apply")
		}
		var want *planSwitched
		if len(names) == 1 {
			group, role, ok := strings.Cut(names[0], "=")
			if !ok || group == "" || sides[role] == 0 {
				return usagef("%q: want GROUP=prefill or GROUP=decode", names[0])
			}
			want = &planSwitched{Group: group, Role: role}
		}
		return c.planner(cmd, func(ctx context.Context, conn *planners.Conn) error {
			return runRoles(ctx, cmd, pb.NewPlannerClient(conn), want, drains[policy], apply, wait)
		})
	}
	return cmd
}

// runRoles performs plan roles. want is the requested switch, or nil.
func runRoles(ctx context.Context, cmd *cobra.Command, planner pb.PlannerClient, want *planSwitched, policy pb.Drain, apply, wait bool) error {
	r, err := planner.Roles(ctx, &pb.RolesRequest{})
	if err != nil {
		return err
	}
	v := rolesOf(r)
	if want == nil && apply && v.Proposal.Group != "" {
		want = &planSwitched{Group: v.Proposal.Group, Role: v.Proposal.Role}
	}
	if want != nil {
		s, err := planner.SwitchRole(ctx, &pb.SwitchRoleRequest{Group: want.Group, Role: sides[want.Role], Policy: policy, DryRun: !apply})
		if err != nil {
			return err
		}
		want.Requests, want.Applied = s.Requests, apply
		v.Switch = want
	}
	if want != nil && wait {
		if r, err = awaitSwitch(ctx, cmd, planner, want); err != nil {
			return err
		}
		proposal := v.Proposal
		v = rolesOf(r)
		v.Proposal, v.Switch = proposal, want
	}
	return outputOf(cmd).emit(v, v.print)
}

// awaitSwitch polls until a group has changed its role. If the change fails, the error has the
// reason.
func awaitSwitch(ctx context.Context, cmd *cobra.Command, planner pb.PlannerClient, want *planSwitched) (*pb.RolesResponse, error) {
	shown := ""
	for {
		r, err := planner.Roles(ctx, &pb.RolesRequest{})
		// A planner that restarts is unavailable only for a short time, so polling continues.
		if err != nil && status.Code(err) != codes.Unavailable && !outOfTime(ctx, err) {
			return nil, err
		}
		for _, g := range r.GetGroups() {
			state := stateOf(g)
			switch {
			case g.Group != want.Group:
			case g.Switching == 0 && g.Role == sides[want.Role]:
				want.Done = true
				return r, nil
			case g.Switching == 0 && g.Kept != "":
				return nil, fmt.Errorf("group %q keeps its role: %s", g.Group, g.Kept)
			case g.Switching == 0:
				return nil, fmt.Errorf("group %q keeps its role: its leader was restarted, or is of an earlier release; repeat the command", g.Group)
			case state != shown:
				shown = state
				fmt.Fprintf(cmd.ErrOrStderr(), "group %s: %s\n", g.Group, state)
			}
		}
		if !pause(ctx, pollEvery) {
			return nil, fmt.Errorf("group %q has not changed its role, and the planner continues after the end of this command: %w", want.Group, context.Cause(ctx))
		}
	}
}

// stateOf returns the state of a group's switch in progress.
func stateOf(g *pb.RolesResponse_Group) string {
	switch {
	case g.Switching == 0:
		return ""
	case g.Ordered:
		return fmt.Sprintf("changing to %v", dualpath.Role(g.Switching))
	}
	return fmt.Sprintf("drained for %v, %d requests left", dualpath.Role(g.Switching), g.Requests)
}

// rolesOf converts the planner's response for output.
func rolesOf(r *pb.RolesResponse) *planRoles {
	v := &planRoles{Groups: []planRole{}, Waiting: r.Waiting, Proposal: propose(r)}
	for _, g := range r.Groups {
		v.Groups = append(v.Groups, planRole{
			Group: g.Group, Role: dualpath.Role(g.Role).String(), Engines: g.Engines, Requests: g.Requests, Queued: g.Queued, Use: g.Use,
			State: stateOf(g), Kept: g.Kept, Fixed: !g.Switches,
		})
	}
	return v
}

// leastFinished is the minimum number of finished requests for a proposal.
const leastFinished = 32

// propose computes which group should change its role, with the long-term controller of the PrfaaS
// paper.
func propose(r *pb.RolesResponse) planProposal {
	p := planProposal{Source: fmt.Sprintf("PrfaaS's long-term controller (section 3.4.3), from the last %d finished requests", len(r.UncachedTokens))}
	groups := map[pb.Side][]*pb.RolesResponse_Group{}
	engines, device := 0.0, 0.0
	for _, g := range r.Groups {
		if g.Switching != 0 {
			p.Why = fmt.Sprintf("group %s is changing its role", g.Group)
			return p
		}
		groups[g.Role] = append(groups[g.Role], g)
		engines += float64(g.Engines)
		device = max(device, float64(g.DeviceTokens)/float64(g.Engines))
	}
	prefill, decode := groups[pb.Side_SIDE_PREFILL], groups[pb.Side_SIDE_DECODE]
	switch {
	case len(prefill) == 0 || len(decode) == 0:
		p.Why = fmt.Sprintf("%d prefill and %d decode groups are up; a proposal takes both", len(prefill), len(decode))
		return p
	case len(r.UncachedTokens) < leastFinished || r.StepSeconds <= 0:
		p.Why = fmt.Sprintf("%d requests with an output have finished since the planner started; a proposal takes %d", len(r.UncachedTokens), leastFinished)
		return p
	}
	size := engines / float64(len(r.Groups))
	re, err := reallocate(r, prefill, decode, size, device)
	if err != nil {
		p.Why = err.Error()
		return p
	}
	p.Gain, p.Why = re.Gain, re.Why
	from, to := decode, "prefill"
	if re.ToPrefill < 0 {
		from, to = prefill, "decode"
	}
	if re.ToPrefill != 0 {
		p.choose(from, to)
	}
	return p
}

// choose selects, of the given groups, the least used one that can change its role.
func (p *planProposal) choose(from []*pb.RolesResponse_Group, to string) {
	var best *pb.RolesResponse_Group
	for _, g := range from {
		if g.Switches && (best == nil || g.Use < best.Use) {
			best = g
		}
	}
	if best == nil {
		p.Why += "; but all groups that could change have a fixed role"
		return
	}
	p.Group, p.Role = best.Group, to
}

// reallocate divides the groups between prefill and decode with the controller of the PrfaaS paper.
// size is the mean number of engines of a group. device is the number of tokens that the memory of
// one engine holds.
func reallocate(r *pb.RolesResponse, prefill, decode []*pb.RolesResponse_Group, size, device float64) (prfaas.Reallocation, error) {
	lengths := make([]float64, len(r.UncachedTokens))
	for i, n := range r.UncachedTokens {
		lengths[i] = float64(n)
	}
	sample, err := prfaas.NewSample(lengths)
	if err != nil {
		return prfaas.Reallocation{}, err
	}
	sys := prfaas.System{
		Lengths: sample, OutputTokens: r.MeanOutputTokens, LocalInstances: len(prefill) + len(decode),
		LocalPrefill: prfaas.Polynomial(0, 1/(r.PrefillTokensPerSecond*size), 0),
		DecodeBatch:  max(1, size*device/r.MeanTokens), StepSeconds: r.StepSeconds,
	}
	long, err := prfaas.NewLong(sys, prfaas.Plan{Prefill: len(prefill), Decode: len(decode)}, prfaas.LongOptions{})
	if err != nil {
		return prfaas.Reallocation{}, err
	}
	load := prfaas.Load{Prefill: meanUse(prefill), Decode: meanUse(decode)}
	// A request waits for both of its engines. It counts as waiting for the role with the higher
	// use.
	if load.Prefill >= load.Decode {
		load.PrefillQueue = int(r.Waiting)
	} else {
		load.DecodeQueue = int(r.Waiting)
	}
	return long.Observe(load)
}

// meanUse returns the mean use of groups.
func meanUse(groups []*pb.RolesResponse_Group) (mean float64) {
	for _, g := range groups {
		mean += g.Use / float64(len(groups))
	}
	return mean
}

// print writes the roles as a table.
func (v *planRoles) print(t *table) {
	t.row("group", "role", "engines", "requests", "queued", "used", "")
	for _, g := range v.Groups {
		remarks := g.State
		switch {
		case remarks == "" && g.Kept != "":
			remarks = "the last switch failed: " + g.Kept
		case remarks == "" && g.Fixed:
			remarks = "fixed role"
		}
		t.row(g.Group, g.Role, count(g.Engines), count(g.Requests), count(g.Queued), fmt.Sprintf("%.0f %%", 100*g.Use), remarks)
	}
	t.row()
	t.row("waiting", count(v.Waiting))
	if p := v.Proposal; p.Group != "" {
		t.row("proposal", fmt.Sprintf("%s to %s, for %.1f %% more requests", p.Group, p.Role, 100*p.Gain))
	} else {
		t.row("proposal", "none")
	}
	t.row("why", v.Proposal.Why)
	t.row("source", v.Proposal.Source)
	s := v.Switch
	switch {
	case s == nil:
	case s.Done:
		t.row("switch", fmt.Sprintf("%s has changed to %s", s.Group, s.Role))
	case s.Applied:
		t.row("switch", fmt.Sprintf("%s changes to %s when its %d requests have ended", s.Group, s.Role, s.Requests))
	default:
		t.row("switch", fmt.Sprintf("%s would change to %s when its %d requests have ended; --apply does it", s.Group, s.Role, s.Requests))
	}
}
