// Package roundtrip measures a transfer engine with the operations of a routed query: a query that
// is sent to the node that holds the KV. The requester sends a batch with a one-sided write. After
// the batch has arrived, the holder sends the partial results back with another one-sided write.
// This is the full round trip (full_rt) in section 3.2 of the paper Move the Query. A round trip
// without payload is the signal round trip, the paper's probe (sig_rt).
//
//	requester (Measure)                               holder (Answerer)
//	hello: its window, the shapes ──── message ────►  expects immediate base+i of each shape i
//	                               ◄── message ─────  its window, base
//	start ─ write There bytes, immediate base+i ═══►  landed, then counted: expect it again,
//	stop ◄═════════════════ write Back bytes, immediate i+1
//	  … shapes in turn, so that a drift of the machine affects all shapes equally …
//	bye ───────────────────────── message ─────────►  expects nothing
//
// The bytes have no meaning, and nothing is computed. The package is not a bandwidth benchmark,
// because only one trip at a time is in flight; lab/bench measures bandwidth.
// redistribute.Calibrate fits a model to the measurements.
//
// An Answerer serves up to MaxRequesters requesters at a time, each with its own immediates;
// further requesters get an error. A peer with the engine's token can write into the Answerer's
// scratch memory, which all requesters share, and into no other memory.
//
// Answerer has one lock, for its sessions and their expectations. No call is made under it.
package roundtrip
