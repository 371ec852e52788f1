// Package roundtrip measures a transfer engine as a routed query uses it: a batch
// goes there with one one-sided write, and once it has landed the partials come
// back with another (Move the Query, section 3.2: full_rt). Without payload it is
// the signal round trip, the paper's probe (sig_rt).
//
//	requester (Measure)                               holder (Answerer)
//	hello: its window, the shapes ──── message ────►  expects immediate base+i of each shape i
//	                               ◄── message ─────  its window, base
//	start ─ write There bytes, immediate base+i ═══►  landed, then counted: expect it again,
//	stop ◄═════════════════ write Back bytes, immediate i+1
//	  … shapes by turns, so that a drift of the machine is not one shape's …
//	bye ───────────────────────── message ─────────►  expects nothing
//
// The bytes mean nothing and nobody computes on them. It is not a bandwidth
// benchmark (one trip is under way at a time; internal/bench measures the rest) and
// fits nothing (redistribute.Calibrate does).
//
// An Answerer serves MaxRequesters at a time, each with immediates of its own; one
// more is told so. Whoever proved the engine's token may write into its scratch
// memory, which all share, and nowhere else.
//
// Answerer has one lock, around its sessions and what they expect; no call is made
// under it.
package roundtrip
