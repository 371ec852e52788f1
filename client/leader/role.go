package leader

import (
	"context"
	"fmt"

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
	members, err := l.membersIn(ctx, to)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.switching, l.announced = 0, 0
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

// membersIn waits until the engines hold no request, calls Options.SwitchRole, and returns the
// members in the new role.
func (l *Leader) membersIn(ctx context.Context, to Role) ([]Member, error) {
	for {
		l.mu.Lock()
		held, members := len(l.held)+l.running, append([]Member(nil), l.members...)
		l.mu.Unlock()
		if held == 0 {
			changed, err := l.opts.SwitchRole(ctx, to)
			if err != nil {
				return nil, err
			}
			if changed != nil {
				members = changed
			}
			for i, m := range members {
				members[i] = m.withDefaults()
			}
			return members, l.opts.checkAll(to, members)
		}
		select {
		case <-l.freed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// roleNow returns the role of the engines.
func (l *Leader) roleNow() Role {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.role
}
