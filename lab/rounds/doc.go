// Package rounds tests whole clusters under random faults: processes of penstock serve, two planners,
// three members of etcd, and clients that discover the nodes. It exports nothing.
//
// Each round makes one fault under load and repairs it: a node is killed, stopped for longer than its
// lease, cut off, drained, removed or replaced, a node joins or leaves, all nodes are restarted, the wall
// clock of a process jumps, the planner that leads is killed, or members of etcd are killed. The load goes
// on during all rounds.
//
//	engines    read a sequence, compare every byte, and write the blocks that are missing
//	latecomers request the epoch before the newest one, which no node may serve
//	bumper     begins a new epoch of one namespace through any node
//	callers    send requests to the planners, each of which must end
//
// A node is reached through wires only: listeners of the test's process at the addresses that the node
// advertises, and one for each member of etcd. A cut wire passes no byte in either direction.
//
//	engine ──► 127.0.0.1:P ──wire──► node at 127.0.1.1:P ──wire──► etcd
//
// The seed determines the faults and their victims. It does not determine the interleaving with the
// load, so a failure prints the events with their times too.
//
//	go test -count=1 -v ./lab/rounds -rounds.count=200 -rounds.seed=7 -rounds.out=DIR
package rounds
