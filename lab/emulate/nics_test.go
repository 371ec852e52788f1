package emulate

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
)

// countingEngine counts the bytes of its writes.
type countingEngine struct {
	rdma.Engine
	bytes *atomic.Uint64
}

func (e countingEngine) Write(ctx context.Context, w rdma.Write) error {
	err := e.Engine.Write(ctx, w)
	if err == nil {
		e.bytes.Add(w.Len)
	}
	return err
}

func (e countingEngine) WritePaged(ctx context.Context, w rdma.PagedWrite) error {
	n := w.PageLen * uint64(len(w.SrcPages.Indices))
	err := e.Engine.WritePaged(ctx, w)
	if err == nil {
		e.bytes.Add(n)
	}
	return err
}

// TestComputeNICs: the bytes of the compute NICs that the planner shows are the bytes that the engines
// have written to each other. A NIC also sends the engines' messages.
func TestComputeNICs(t *testing.T) {
	testkit.VerifyNone(t)
	var written atomic.Uint64
	c := (&cluster{t: t, compute: func(e rdma.Engine) rdma.Engine { return countingEngine{e, &written} }}).start(1, 2)
	results := c.gateway.Run(t.Context(), sessions(3, 3), 2)
	c.check(results, 9)
	least := uint64(0) // each block of a prompt goes from one side to the other, once
	for _, r := range results {
		least += uint64(r.Prompt / geo.BlockTokens * int(geo.PieceBytes(0)))
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	poll := time.NewTicker(10 * time.Millisecond)
	defer poll.Stop()
	for {
		top, err := pb.NewPlannerClient(c.conn).Top(ctx, &pb.TopRequest{})
		c.must(err)
		out, in, nics := uint64(0), uint64(0), 0
		for _, g := range top.Groups {
			for _, e := range g.Engines {
				for _, n := range e.ComputeNics {
					out, in, nics = out+n.Counters.BytesOut, in+n.Counters.BytesIn, nics+1
				}
			}
		}
		all := written.Load()
		if all < least || in > all || out > all+all/100 {
			t.Fatalf("the NICs have sent %d bytes and received %d; the engines wrote %d, and at least %d were needed", out, in, all, least)
		}
		if nics == 3 && in == all && out >= all {
			return
		}
		<-poll.C
	}
}
