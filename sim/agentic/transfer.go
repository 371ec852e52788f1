package agentic

import (
	"math"
	"time"

	"github.com/penstock-kv/penstock/dualpath"
)

// computeNIC is an engine's compute NIC. Out moves KV from the node's memory or the
// engine's HBM, in moves KV into either.
type computeNIC struct{ out, in port }

// port is one direction of a NIC. It serves transfers in the order in which they come,
// so the end of each is known when it comes.
type port struct {
	free    time.Duration // when the last transfer so far has been served
	carried int64         // tokens of all transfers so far
}

// serve adds a transfer of tokens, which takes so long, and returns when it has been
// served.
func (p *port) serve(now, took time.Duration, tokens int) time.Duration {
	p.free = max(p.free, now) + took
	p.carried += int64(tokens)
	return p.free
}

// send moves tokens from one NIC to another and returns when all have come. Both ends
// serve the transfer at once, each in its own order at its full rate; the transfer is over
// when both have served it. From a NIC to itself it is a copy between the node's memory
// and the HBM.
//
// No transfer holds up a NIC that has other work, so this is the shortest time that the
// two NICs allow. Max-min rates would need all transfers of a cluster computed anew for
// each one that ends.
func (c *Cluster) send(from, to *computeNIC, tokens int) time.Duration {
	now := c.k.Now()
	took := time.Duration(math.Ceil(float64(tokens) * float64(c.opts.Model.KVBytes) / c.opts.CNIC * 1e9))
	return max(from.out.serve(now, took, tokens), to.in.serve(now, took, tokens))
}

// stream sends what one chunk of a layerwise step needs and makes, and returns when what
// it needs is in the prefill engine's HBM. The KV that the chunk attends to comes from the
// memory into which it was read; what the chunk adds goes to the decode engine's memory.
// Layer follows layer, so both run while the step computes. A chunk that continues a cut
// prompt loads everything before it again, for the HBM holds one layer at a time.
func (c *Cluster) stream(r *request, compute int) (loaded time.Duration) {
	pe, de := &r.pe.cnic, &r.de.cnic
	own, sent := r.computed, compute
	for _, p := range r.parts[:r.nparts] {
		n := p.Len()
		if p.Side == dualpath.Decode {
			loaded = max(loaded, c.send(de, pe, n))
			continue
		}
		own += n
		if r.computed == 0 {
			sent += n // the decode engine's memory does not have it yet
		}
	}
	loaded = max(loaded, c.send(pe, pe, own))
	r.sent = max(r.sent, c.send(pe, de, sent))
	return loaded
}
