package agentic

import (
	"fmt"

	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/sim/flow"
)

// computeNIC is an engine's compute NIC, in tokens a second in each direction. Out
// moves KV from the node's memory or the engine's HBM, in moves KV into either.
type computeNIC struct {
	out, in *flow.FIFO
}

// newComputeNIC returns an idle NIC.
func newComputeNIC(c *Cluster, engine int) (computeNIC, error) {
	rate := c.opts.CNIC / float64(c.opts.Model.KVBytes)
	out, err := flow.NewFIFO(c.k, fmt.Sprintf("engine %d compute NIC, out", engine), rate)
	if err != nil {
		return computeNIC{}, err
	}
	in, err := flow.NewFIFO(c.k, fmt.Sprintf("engine %d compute NIC, in", engine), rate)
	return computeNIC{out, in}, err
}

// send moves tokens, at least one, from one NIC to another and then calls done. The
// two ends serve the transfer at the same time, each in the order in which its own
// transfers came, at its full rate; the transfer is over when both have served it.
// From a NIC to itself it is a copy between the node's memory and the HBM.
//
// No transfer holds up a NIC that has other work, so this is the shortest time that the
// two NICs allow. Max-min rates would need all transfers of a cluster computed anew
// for each one that ends.
func send(from, to *computeNIC, tokens int, done func()) {
	ends := 2
	served := func() {
		if ends--; ends == 0 {
			done()
		}
	}
	from.out.Put(int64(tokens), served)
	to.in.Put(int64(tokens), served)
}

// stream starts the transfers of one chunk of a layerwise step: the KV that the chunk
// attends to comes into the prefill engine's HBM, from the memory where it was read,
// and what the chunk adds goes to the decode engine's memory. Layer follows layer, so
// both run while the step computes. A chunk that continues a cut prompt loads
// everything before it again, for the HBM holds one layer at a time.
func (g *prefillGroup) stream(r *request, compute int) {
	pe, de := &r.pe.cnic, &r.de.cnic
	own, sent := r.computed, compute
	for _, p := range r.parts[:r.nparts] {
		n := p.Len()
		switch {
		case n == 0:
		case p.Side == dualpath.Decode:
			g.await++
			send(de, pe, n, g.streamed)
		default:
			own += n
			if r.computed == 0 {
				sent += n // the decode engine's memory does not have it yet
			}
		}
	}
	if own > 0 {
		g.await++
		send(pe, pe, own, g.streamed)
	}
	r.unsent++
	send(pe, de, sent, func() {
		if r.unsent--; r.unsent == 0 && r.computed == r.compute {
			r.de.await(r)
		}
	})
}
