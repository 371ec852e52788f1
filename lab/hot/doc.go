// Package hot measures the throughput of one prefix that several clients read at a time, without copies and
// with copies on further nodes (cluster.hot_copies). It has only tests.
//
// Each storage node is in a network namespace of its own, whose link has a limited rate. So one node delivers at
// most the rate of its link, and several nodes together deliver a multiple.
//
//	Namespace "clients": etcd, clients ══ no limit ══╗
//	Namespace "node 1"                 ══ rate ══════╬ Switch
//	Namespace "node 2"                 ══ rate ══════╣
//	Namespace "node 3"                 ══ rate ══════╝
//
// Each namespace of a node has a process of each cluster. The clusters have the same etcd and differ in the number
// of copies. Clients use one cluster at a time, by turns.
//
// docs/benchmarks/hot-prefixes.md has the results and the command.
package hot
