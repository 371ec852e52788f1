package agentic

import (
	"math"
	"time"

	"github.com/penstock-kv/penstock/dualpath"
)

// computeNIC is an engine's compute NIC. Its out port sends KV from the node's memory or
// the engine's HBM; its in port receives KV into either.
type computeNIC struct{ out, in port }

// port is one direction of a NIC. It serves transfers in order of arrival, so the end of a transfer
// can be computed on its arrival.
type port struct {
	free    time.Duration // the end of the last transfer
	carried int64         // tokens of all transfers
}

// serve adds a transfer that occupies the port for took, and returns its end.
func (p *port) serve(now, took time.Duration, tokens int) time.Duration {
	p.free = max(p.free, now) + took
	p.carried += int64(tokens)
	return p.free
}

// send moves tokens from one NIC to another and returns the time at which the transfer ends. Each
// of the two NICs serves the transfer in its own FIFO order at its full rate, and the transfer ends
// when both have served it. A transfer from a NIC to itself is a copy between the node's memory and
// the engine's HBM.
//
// A NIC never idles while it has transfers, so the returned time is the earliest that the two NICs
// allow. Max-min fair rates would be exact, but each end of a transfer would require new rates for
// all transfers of the cluster.
func (c *Cluster) send(from, to *computeNIC, tokens int) time.Duration {
	now := c.k.Now()
	took := time.Duration(math.Ceil(float64(tokens) * float64(c.opts.Model.KVBytes) / c.opts.CNIC * 1e9))
	return max(from.out.serve(now, took, tokens), to.in.serve(now, took, tokens))
}

// stream starts the transfers of one chunk of a layerwise step. It returns the time at which the KV
// that the chunk attends to is in the prefill engine's HBM. This KV is loaded from the memory into
// which it was read. The chunk's new KV is sent to the decode engine's memory. Both run layer by
// layer while the step computes. A later chunk of a cut prompt loads the KV of all tokens before it
// again, because the HBM holds one layer at a time.
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
			sent += n // the decode engine's memory does not have this KV yet
		}
	}
	loaded = max(loaded, c.send(pe, pe, own))
	r.sent = max(r.sent, c.send(pe, de, sent))
	return loaded
}
