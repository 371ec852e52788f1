package main

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client/planners"
)

// errNoLeader is the error of plan status if all planners are standbys.
var errNoLeader = errors.New("no planner leads")

// planStatus is a planner in the output of plan status.
type planStatus struct {
	Address string `json:"address"`
	// State is leader, standby, alone (no election) or unreachable.
	State  string    `json:"state"`
	Term   uint64    `json:"term,omitempty"`
	Leader string    `json:"leader,omitempty"`
	Since  time.Time `json:"since,omitzero"`
	Error  string    `json:"error,omitempty"`
}

func newPlanStatus(w world) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show which planner leads, as each planner sees the election",
		Long: `Ask each planner of --planner for its part in the election: leader, standby, or alone
(without cluster.etcd). TERM counts the leaders that the planners have had. LEADER is the
address by which the leader is known to the planner. The exit code is 1 if no planner serves.`,
		Example: `  penstock plan status --planner a:7430,b:7430`,
		Args:    args(cobra.NoArgs),
	}
	c := addPlannerFlags(cmd, w)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := planners.Check(c.servers); err != nil {
			return usagef("--%s: %w", c.endpoint.flag, err)
		}
		ctx, cancel := c.limit(cmd.Context())
		defer cancel()
		list := c.list()
		states, errs := make([]planStatus, len(list)), make([]error, len(list))
		var wg sync.WaitGroup
		for i, addr := range list {
			wg.Go(func() { states[i], errs[i] = c.planStatus(ctx, addr) })
		}
		wg.Wait()
		err := outputOf(cmd).emit(states, func(t *table) {
			t.row("ADDRESS", "STATE", "TERM", "LEADER", "SINCE", "ERROR")
			for _, s := range states {
				term, since := "", ""
				if s.Term > 0 {
					term, since = strconv.FormatUint(s.Term, 10), s.Since.Format(time.RFC3339)
				}
				t.row(s.Address, s.State, term, s.Leader, since, dialWords(s.Error))
			}
		})
		if err != nil {
			return err
		}
		for i, s := range states {
			if s.State == "leader" || s.State == "alone" {
				return nil
			}
			err = errs[i]
		}
		if err == nil {
			err = errNoLeader
		}
		return c.hinted(err)
	}
	return cmd
}

// planStatus asks one planner.
func (c *connection) planStatus(ctx context.Context, addr string) (s planStatus, err error) {
	s.Address = addr
	defer func() {
		if err != nil {
			s.State, s.Error = "unreachable", status.Convert(err).Message()
		}
	}()
	conn, err := c.dial(addr)
	if err != nil {
		return s, err
	}
	defer conn.Close()
	r, err := pb.NewPlannerClient(conn).Election(ctx, &pb.ElectionRequest{})
	if err != nil {
		return s, err
	}
	s.Term, s.Leader = r.Term, r.Leader
	if r.SinceUnixMs != 0 {
		s.Since = time.UnixMilli(r.SinceUnixMs).UTC()
	}
	switch {
	case !r.Elected:
		s.State = "alone"
	case r.Leads:
		s.State = "leader"
	default:
		s.State = "standby"
	}
	return s, nil
}
