// Package membership makes a storage node a member of a cluster. etcd has the list of the members,
// and the namespaces with their epochs and quotas. The package keeps the namespaces of the node
// equal to those in etcd, and reports whether the node may serve.
//
// It does not choose the node of a block, which clients do (package client), and no KV passes
// through etcd. A node without etcd does not use the package.
//
//	PREFIX/members/NAME      a Member, under the node's lease; the node writes it
//	PREFIX/namespaces/NAME   a record: definition, epochs, quota; admin calls on any node write it
//	PREFIX/stores/ID/store   a StoreRecord: the newest fencing number of a store on shared volumes
//	PREFIX/stores/ID/owner   an OwnerRecord, under the owner's lease
//	PREFIX/stores/ID/claim   the store's own node waits for it; under a lease of that node
//	PREFIX/drains/NAME       a Drain, while a member is to be drained; admin calls on any node write it
//	PREFIX/fills/NAME        a fillRecord, while a member that has joined gets its sequences; admin calls write it
//	PREFIX/fill-end          a fillEndRecord, written at the end of an order of PREFIX/fills
//	PREFIX/nodes/STORE       the NodeRecord of a node, under no lease, by Member.Store; the node writes it with its Member
//	PREFIX/removed/STORE     the volumes were removed from the cluster; admin calls on any node write it
//	auth.roles_etcd          the roles document, the text of a roles file; it need not be under PREFIX
//
//	admin call ─► node A ── transaction ─► etcd ── watch ─► each node: storage.Node.Follow
//	                                                           │
//	                      member record with Applied ◄─────────┘
//	     reply ◄── A has read that no member serves with a lower Applied
//
//	join: grant a lease ─► Member{joining} ─► read all namespaces, at revision R ─► Follow each
//	      ─► transaction: if no namespace has changed after R, Member{serving, Applied: R}; otherwise
//	         read again
//
// # Guarantees
//
//   - A node serves (Admit returns nil) only while its lease exists in etcd. It counts the time of
//     the lease from the moment before it sent the last renewal that etcd confirmed, and stops a
//     tenth earlier, because its clock and etcd's may run at different rates. The clock is CLOCK_BOOTTIME
//     (validity), which also counts the time for which the host was suspended, and on which a changed wall clock has
//     no effect.
//   - When BumpEpoch has returned without an error, no node serves the retired epochs: each member
//     has applied the change, or its lease has ended. A member that cannot apply a change (for
//     example because its volumes take no catalogue) refuses the namespace until it can.
//   - A change that returned an error may have been made, as with every call over a network. If etcd
//     has it and a member has not applied it in time, the error names the member.
//   - The epoch of a name never decreases: the record of a deleted namespace stays in etcd, and a
//     new namespace of this name begins above its last epoch. So a node that was away during the
//     deletion drops its blocks.
//   - Pins of epochs stay local to the node on which they were made.
//   - A name belongs to the volumes of one node (Member.Store). A process that starts after a crash
//     takes its name over at once, because it holds the lock of the same volumes, so the process that
//     crashed has ended. With shared volumes it owns them by a lease (Owner), and the earlier process
//     is not admitted after the end of that lease (Options.Held). Another node gets the name when the
//     lease has ended.
//
// # Nodes that are down
//
// A node that is down has no Member, and its NodeRecord stays. The members watch the ends of leases, and one of them writes the
// time into the record (NodeRecord.Left). The node that joins again replaces the record. ListNodes has these records;
// List, from which clients choose the nodes of blocks, has not. The member that notes a leave deletes the records of nodes that
// were removed a day ago or earlier, and of volumes whose node has other volumes.
//
// # Removed nodes
//
// RemoveMember writes PREFIX/removed/STORE, and the node with these volumes is not admitted. A node that is up
// watches the key: it ends its session, serves nothing, and revokes its lease. RemoveMember waits for that,
// because until then a change of a namespace must wait for the node. A node with other volumes may have
// the name.
//
// A namespace that a joining node has and etcd does not have is added to etcd. So the first node of
// a cluster brings its namespaces along, and each node the last epochs of the namespaces that it has deleted.
//
// # Shared volumes
//
// An Owner is the ownership of one store on shared volumes (package blockstore, "Shared volumes"). It
// has a lease of its own, because a store is opened before its node joins.
//
//	Acquire   owner key is free ─► put it under the lease; otherwise the store's own node waits
//	Fence     the owner key is still of this lease ─► StoreRecord.Fence+1, in one transaction
//	Held      now < last confirmed renewal, as sent, + nine tenths of the TTL
//	          lease has ended ─► StoreRecord.Fence is still ours and no owner ─► owner again
//	                         └─► Fence is higher ─► Lost is closed: the process ends its use
//
// A process that got no fencing number has written nothing to the volumes, except that it formats empty
// ones. So an owner whose number is still the newest may continue after it was without a lease.
//
// A member that serves the volumes of another node (OwnerRecord.Adopted) sees the claim of that node
// when it renews its lease, closes the volumes, and gives the ownership up.
//
// # Election
//
// An Election chooses one leader among the planners with the same etcd and prefix, which need not be
// members of the cluster.
//
//	Campaign  leader key is free ─► put it under a new lease, and the term+1, in one transaction;
//	          otherwise wait until the key has changed
//	Held      now < last confirmed renewal, as sent, + nine tenths of the TTL
//	Lost      is closed when the term has ended; the next term needs a new Campaign
//
// # Roles
//
// Roles is the roles document, which nodes and planners follow whether or not they are members. The package does not parse it
// (package access does). Set compares the revision of the key, so two administrators cannot replace each other's
// change unseen.
//
// Lock order: Followed.mu while a record is applied, Cluster.mu, then appliedWatch.mu. session.mu, Owner.mu, Election.mu, Roles.mu
// and appliedWatch.mu are leaves. None is held across a call of etcd.
package membership
