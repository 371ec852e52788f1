package leader

import (
	"context"
	"fmt"
	"slices"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
)

// announce takes the announcement of a switch. The leader lists it in registrations until the switch
// has ended. The present role withdraws it.
func (l *Leader) announce(to Role) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.announced = to; to == l.role {
		l.announced = 0
	}
}

// takeSwitch begins to change the engines' role, unless the change has begun in an earlier session.
func (l *Leader) takeSwitch(ctx context.Context, to Role) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.switching != 0: // the answer follows
	case l.opts.SwitchRole == nil:
		l.announced = 0
		l.sayLocked(refusal("the engines of the group have a fixed role"))
	case to != l.role.other():
		l.announced = 0
		l.sayLocked(refusal(fmt.Sprintf("the engines' role is %v, and the planner asks for %v", l.role, to)))
	default:
		l.switching = to
		l.changes.Go(func() { l.switchRole(ctx, to) })
	}
}

// refusal returns the report that the engines keep their role.
func refusal(reason string) report {
	return report{message: &pb.LeaderMessage{Message: &pb.LeaderMessage_RoleRefused{RoleRefused: &pb.RoleRefused{Reason: reason}}}}
}

// other returns the other role.
func (r Role) other() Role { return Prefill + Decode - r }

// switchRole changes the engines' role. After a change it ends the session, so that the next
// session registers the new role. Otherwise it reports why the engines keep their role.
func (l *Leader) switchRole(ctx context.Context, to Role) {
	before, returned, err := l.changeEngines(ctx, to)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.switching, l.announced = 0, 0
	members := l.membersAfterLocked(before, returned)
	if err == nil {
		err = l.opts.checkAll(to, members)
	}
	switch {
	case ctx.Err() != nil: // the group ends
	case err != nil:
		l.log.Warn("the group keeps its role", "group", l.opts.Group, "asked", to.String(), "err", err)
		l.sayLocked(refusal(err.Error()))
	default:
		l.log.Info("the group changes its role", "group", l.opts.Group, "role", to.String())
		l.role, l.members = to, members
		l.changedLocked()
	}
}

// changeEngines waits until the engines hold no request, and calls Options.SwitchRole. It returns the
// members at the time of this call, and the members that SwitchRole returned.
func (l *Leader) changeEngines(ctx context.Context, to Role) (before, returned []Member, err error) {
	for {
		l.mu.Lock()
		held := len(l.held) + l.running
		before = slices.Clone(l.members)
		l.mu.Unlock()
		if held == 0 {
			returned, err = l.opts.SwitchRole(ctx, to)
			return before, returned, err
		}
		select {
		case <-l.freed:
		case <-ctx.Done():
			return nil, nil, ctx.Err()
		}
	}
}

// membersAfterLocked returns the members after a call of Options.SwitchRole that returned the given
// members: without the members that Remove has removed since before, and with the members that Add has added since.
func (l *Leader) membersAfterLocked(before, returned []Member) []Member {
	if returned == nil {
		return l.members
	}
	has := func(list []Member, name string) bool {
		return slices.ContainsFunc(list, func(m Member) bool { return m.Name == name })
	}
	var members []Member
	for _, m := range returned {
		if !has(before, m.Name) || has(l.members, m.Name) {
			members = append(members, m.withDefaults())
		}
	}
	for _, m := range l.members {
		if !has(before, m.Name) && !has(returned, m.Name) {
			members = append(members, m)
		}
	}
	return members
}

// roleNow returns the role of the engines.
func (l *Leader) roleNow() Role {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.role
}
