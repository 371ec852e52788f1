// Package workload generates the load of the simulated clusters: agents with several rounds
// (DualPath), and requests of a recorded trace at a chosen rate (NetKV). The package has lengths
// and times, and no tokens, clock or cluster. lab/emulate, which moves real bytes, uses the agents
// too, at a smaller Scale.
//
//	Table2: turns, append, gen, total, MaxLen ─► Spec.Generate(500, seed) ─┐
//	dualpath_agentic_64k.jsonl.gz ─────────────► ReadTrajectories ─────────┴► []Trajectory
//	     Agents (more than the set has) ─ ScaleAppend, ScaleGen ─ Scale.Apply ─► a closed loop, or Poisson
//
//	mooncake, azure, agentic ─► ReadArrivals ─► Profile.Filter ─► Compress(to a rate) ─► Window ─► []Arrival
//
// A trajectory is a list of rounds. The prompt of round j consists of its context, which is
// everything appended and generated before, and the tokens that the round appends. A cache can hold
// the context, in whole blocks:
//
//	round 0   │append 3084│gen 156│
//	round 1   │ context 3240      │append 4718         │gen 2040│
//	round 2   │ context 9998                                    │append 404│gen 372│
//	           ◄── hit: whole blocks of it ─────────────────────►
//
// # Means
//
// Table 2 of the DualPath paper cannot consist of means over all rounds: 157 turns of 429+176
// tokens are 94 985, more than its total of 55 958. The table is consistent only if Append and Gen
// are means of each trajectory's own mean. Measure returns both kinds of means, and a report names
// the kind that it uses.
//
// All random numbers follow from a seed by math/rand/v2's PCG: the same seed gives the same
// workload on every machine. The package starts no goroutine and has no lock.
package workload
