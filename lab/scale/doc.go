// Package scale measures how a cluster's list of members and namespaces grows: with a real etcd, with the code of
// server/membership for each member, and with a whole storage node and a client beside them. It has only tests.
//
//	etcd (Debian's) ◄── lease, record, watch ─┬─ seed: a whole storage node ◄── client with Discover
//	                                          ├─ watcher: a storage without a server, which joins last
//	                                          └─ crowd: N-2 members that share one storage
//
// The crowd's members are memberships as in a node, with their own leases, watches and connections. They share one
// storage.Node and the revisions of the namespaces that the node has applied (membership.Followed), because a thousand
// nodes do not fit into the memory of one machine. So a
// change costs the crowd's storage one change, and etcd the same as with N nodes. Only the first member of the crowd
// reads the namespaces that are there when it joins.
//
// docs/benchmarks/cluster-scale.md has the results, and the commands.
package scale
