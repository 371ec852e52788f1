// Package roundtrip measures a transfer engine in the way that a routed query uses it: the
// requester sends a batch with one one-sided write, and after the batch has landed the holder sends
// the partials back with another (Move the Query, section 3.2: full_rt). Without payload it is the
// signal round trip, the paper's probe (sig_rt).
//
//	requester (Measure)                               holder (Answerer)
//	hello: its window, the shapes ──── message ────►  expects immediate base+i of each shape i
//	                               ◄── message ─────  its window, base
//	start ─ write There bytes, immediate base+i ═══►  landed, then counted: expect it again,
//	stop ◄═════════════════ write Back bytes, immediate i+1
//	  … shapes by turns, so that a drift of the machine is not one shape's …
//	bye ───────────────────────── message ─────────►  expects nothing
//
// The bytes have no meaning, and nothing is computed. It is not a bandwidth benchmark, because one
// trip at a time is in flight; lab/bench measures bandwidth. It fits no model;
// redistribute.Calibrate does.
//
// An Answerer serves up to MaxRequesters at a time, each with immediates of its own; further
// requesters get an error. A peer with the engine's token can write into the Answerer's scratch
// memory, which all requesters share, and into no other memory.
//
// Answerer has one lock, for its sessions and their expectations. No call is made under it.
package roundtrip
