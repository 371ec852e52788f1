package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client/planners"
	"github.com/penstock-kv/penstock/dualpath"
)

// drains maps the names of policies to their values in the API.
var drains = map[string]pb.Drain{
	dualpath.DrainRecompute.String(): pb.Drain_DRAIN_RECOMPUTE,
	dualpath.DrainFinish.String():    pb.Drain_DRAIN_FINISH,
	dualpath.DrainAbort.String():     pb.Drain_DRAIN_ABORT,
}

// pollEvery is the polling interval of a command that waits for the planner.
const pollEvery = 100 * time.Millisecond

// planBumped is the output of plan bump.
type planBumped struct {
	Namespace string `json:"namespace"`
	Epoch     uint64 `json:"epoch"`
	Policy    string `json:"policy"`
	DryRun    bool   `json:"dry_run"`
	// Queued, Prefilling and Decoding are the numbers of requests that used older weights before
	// the bump, by their progress. Exact is the number of further such requests, which demand these
	// weights (exact_epoch). Aborted, Replanned and GoingOn are numbers of started requests that
	// the planner rejected, planned again, and lets continue.
	Queued     uint32 `json:"queued"`
	Prefilling uint32 `json:"prefilling"`
	Decoding   uint32 `json:"decoding"`
	Exact      uint32 `json:"exact"`
	Aborted    uint32 `json:"aborted"`
	Replanned  uint32 `json:"replanned"`
	GoingOn    uint32 `json:"going_on"`
	// Left is the number of started requests with older weights that have not ended.
	Left uint32 `json:"left"`
}

func newPlanBump(w world) *cobra.Command {
	b := planBumped{}
	var wait bool
	cmd := &cobra.Command{
		Use:   "bump NAMESPACE --epoch N",
		Short: "Begin a new epoch of the weights in the planner, with a policy for running requests",
		Long: `Begin a new epoch of a namespace's weights in the planner, after ns bump-epoch has begun it
on the storage nodes. A request that waits for engines is planned with the new weights,
without its cached prefix. For requests that have been started, --policy is

  recompute  plans requests again that are not prefilled yet; decode continues
  finish     lets all requests end with the old weights and their prefix
  abort      rejects all requests; their gateways get the refusal that the weights changed

Under finish, storage must keep the old epoch (ns bump-epoch --keep 2, or a pin); otherwise
the engines compute the part of the prefix that they have not read. The engines need the
old weights until the requests have ended. Requests that name their epoch keep it under
each policy. With --wait the command ends when no started request of older weights is
left. The same epoch with another policy applies this policy to the remaining requests.
After a restart of a planner without cluster.etcd, give the epoch again.`,
		Example: `  penstock ns bump-epoch llama-3/70b --keep 2
  penstock plan bump llama-3/70b --epoch 8 --policy finish --wait --timeout 10m
  penstock plan bump llama-3/70b --epoch 8 --policy abort --dry-run`,
		Args: args(cobra.ExactArgs(1)),
	}
	c := addPlannerFlags(cmd, w)
	f := cmd.Flags()
	f.Uint64Var(&b.Epoch, "epoch", 0, "the new epoch, as ns bump-epoch printed it")
	f.StringVar(&b.Policy, "policy", dualpath.DrainRecompute.String(), "what happens to started requests of older weights: recompute, finish or abort")
	completeValues(cmd, "policy", "recompute", "finish", "abort")
	f.BoolVar(&b.DryRun, "dry-run", false, "print what the bump would do, and change nothing")
	f.BoolVar(&wait, "wait", false, "wait until no started request of older weights is left, at most --timeout")
	_ = cmd.MarkFlagRequired("epoch") // the flag was defined above
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		if b.Epoch == 0 {
			return usagef("--epoch 0: epochs begin at 1; ns show prints the newest")
		}
		if b.DryRun && wait {
			return usagef("--dry-run and --wait exclude each other")
		}
		b.Namespace = names[0]
		return c.planner(cmd, func(ctx context.Context, conn *planners.Conn) error {
			return b.run(ctx, cmd, pb.NewPlannerClient(conn), wait)
		})
	}
	return cmd
}

// run performs the command.
func (b *planBumped) run(ctx context.Context, cmd *cobra.Command, planner pb.PlannerClient, wait bool) error {
	ask := &pb.BumpWeightsRequest{Namespace: b.Namespace, Epoch: b.Epoch, Policy: drains[b.Policy], DryRun: b.DryRun}
	r, err := planner.BumpWeights(ctx, ask)
	if err != nil {
		return err
	}
	o := r.Older
	b.Queued, b.Prefilling, b.Decoding, b.Exact = o.GetQueued(), o.GetPrefilling(), o.GetDecoding(), o.GetExact()
	b.Aborted, b.Replanned, b.GoingOn, b.Left = r.Aborted, r.Replanned, r.GoingOn, r.GoingOn
	if wait {
		if err := b.wait(ctx, cmd, planner); err != nil {
			return err
		}
	}
	return outputOf(cmd).emit(b, b.print)
}

// wait polls until all started requests with older weights have ended. In text format it prints
// each change of their number.
func (b *planBumped) wait(ctx context.Context, cmd *cobra.Command, planner pb.PlannerClient) error {
	ask := &pb.BumpWeightsRequest{Namespace: b.Namespace, Epoch: b.Epoch, Policy: pb.Drain_DRAIN_FINISH, DryRun: true}
	for shown := uint32(0); ; {
		r, err := planner.BumpWeights(ctx, ask)
		if err == nil {
			b.Left = r.GoingOn
		}
		switch {
		case err != nil && !outOfTime(ctx, err):
			return err
		case b.Left == 0 && err == nil:
			return nil
		case b.Left != shown:
			shown = b.Left
			fmt.Fprintf(cmd.ErrOrStderr(), "%d requests of older weights are left\n", b.Left)
		}
		if !pause(ctx, pollEvery) {
			return fmt.Errorf("%d requests of weights older than epoch %d are left, and the planner continues after the end of this command: %w", b.Left, b.Epoch, context.Cause(ctx))
		}
	}
}

// print writes the bump as a table.
func (b *planBumped) print(t *table) {
	what := "namespace %s: weights of epoch %d\n"
	if b.DryRun {
		what = "namespace %s: with weights of epoch %d it would be\n"
	}
	fmt.Fprintf(t, what, b.Namespace, b.Epoch)
	t.pair("planned with the new weights", b.Queued)
	t.pair("planned again", b.Replanned)
	t.pair("rejected", b.Aborted)
	t.pair("going on with older weights", b.GoingOn)
	if b.Exact > 0 {
		t.pair("naming their weights", b.Exact)
	}
	if !b.DryRun {
		t.pair("left", b.Left)
	}
}
