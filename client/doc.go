// Package client is what an engine embeds to use storage nodes: find the longest
// cached prefix of a prompt, load it into the engine's own memory, store new
// blocks from there.
//
// The package is not a scheduler: ids decide the node of a block, and load only which of its replicas is
// read. It keeps no copy of a block: no byte of KV passes through a buffer of the package.
//
//	            ┌────────────────────────── Store ──────────────────────────┐
//	Match ─────►│ root of the sequence ─► its node (rendezvous hashing)     │── message ──► node
//	Read  ─────►│ pieces ─► tasks of some MiB ─► ReadParallel at a time     │── message ──► node
//	            │    window over the task's destination                     │                  │
//	Memory ◄════╪════════════════════════ one-sided writes ═════════════════╪══════════════════╡
//	            │    reply: state of each piece, XXH3-64 of each layer        │◄─── message ─────┘
//	            │    hash layers as they land, count the immediates,        │
//	            │    revoke the window, hash the rest, compare              │
//	Write ─────►│ Reserve ─► one-sided writes ─► Commit, a chunk at a time  │══ messages, rdma ══► node
//	            └───────────────────────────────────────────────────────────┘
//
// This example uses the transfer engine over TCP (rdma/tcp). The package itself depends only on the
// contract of package rdma. Errors are left out:
//
//	engine, err := tcp.New(ctx, tcp.Options{})          // opens sessions, listens on nothing
//	store, err := client.Open(ctx, client.Options{Servers: []string{"127.0.0.1:7420"}, Engine: engine})
//	pages, err := store.Register(arena)                 // once; outside the Go heap is best
//	ns, err := store.Namespace(ctx, "demo/llama")       // when the weights are loaded: geometry, epoch
//
//	m, err := store.Match(ctx, client.MatchRequest{Namespace: ns, Tokens: prompt, Lease: time.Minute})
//	r, err := store.Read(ctx, client.ReadRequest{Namespace: ns, IDs: m.IDs, Into: pages})
//	compute(prompt, r.Blocks) // the blocks before r.Blocks are in pages, verified; this fills in the rest
//	w, err := store.Write(ctx, client.WriteRequest{Namespace: ns, Tokens: prompt, First: r.Blocks, From: pages})
//
// # Where a block lies
//
// A block has one place in the caller's memory, given by its index in the prompt: block b starts at
// Base + b × Geometry.BlockBytes, whichever blocks or layers a call moves. Read puts the block
// there, and Write takes it from there. With Base 0 the prompt starts where the Memory starts.
// Pieces may give other places, one for each piece.
//
// Fragments give each layer of a piece, or each run of consecutive layers, its own place
// in any registered memory. Engines need them if K and V lie apart, or if each layer is a
// tensor of its own. Read scatters and Write gathers.
//
// # On the node's own host
//
// If the node has a unix socket (its setting local_socket) that this process can reach, Read copies
// the blocks from the node's arena, which is mapped here read-only, and verifies the copies. The
// request goes over the socket, in blocking calls of the caller's thread. Match and Exists go over
// the socket too. Write copies its blocks, in chunks, into memory that the node lends to each
// connection, and stores a chunk with one call. In the following cases the transfer engine moves
// the blocks instead: while the first connection is being made, when 16 parts of Reads and Writes
// are in progress on the socket, when the node has lent all the memory that it may lend, and for
// pieces that are larger than the lent memory.
//
// ReadLocal borrows instead (Options.LocalSocket): it verifies the blocks in place in the node's
// memory, and Return gives them back. A call goes over the socket, or over gRPC while another call
// is running on the socket.
//
// # Outcomes and errors
//
// Every data call returns Hit, Miss or Busy in its result, and an error only if a person or a
// program must act. A node that is down, draining, unreachable or of another version is a Miss. If
// a bound is reached, the outcome is Busy: the call returns at once and this package does not
// retry. When ctx ends, the call returns the error of ctx. The remaining errors are refusals that a
// retry cannot mend: ErrAuth, ErrProvider, ErrVersion, ErrNotFound, ErrRequest, ErrMismatch,
// ErrClosed.
//
// # Guarantees
//
//   - exact-or-miss: a block counts in ReadResult.Blocks only after the bytes in
//     the caller's memory hashed to the checksums of their writer. The checksums are
//     compared after the window is closed. A layer that the engine placed exactly once may
//     have been hashed as it landed (rdma.LandingRegion). A layer that was written to later,
//     or written in part, or placed by an engine that does not report landings, is hashed
//     after the window is closed.
//   - When Read has returned, with or without an error, no remote write touches the
//     caller's memory any more. When Write has returned, nothing reads it.
//   - The node can write anywhere between the first and the last piece of a task, so the bytes
//     between the pieces must not hold other data while Read runs. Tasks take pieces in the order
//     given, so the range of a task is small if the pieces are sorted by offset. The bytes of lost
//     pieces are undefined.
//   - Pieces that ReadLocal lends do not change until Return, even if the node evicts
//     them or the Store is closed meanwhile.
//   - A call is for one epoch: the request's epoch, or the epoch of the Namespace value
//     if the request's is 0. An engine that still has old weights gets no KV of newer
//     weights, and its own KV is never stored as KV of newer weights. The engine calls
//     Namespace after it has loaded the new weights. If a bump keeps older epochs live, or
//     PinEpoch pins one, an engine of such an epoch continues with KV of its own epoch.
//     MatchRequest.Oldest accepts older epochs; the result names the one epoch of all its
//     blocks. With MatchRequest.Mix the blocks may be of several epochs, the result names
//     the epoch of each block, and ReadRequest.Epochs loads each block from its own epoch.
//   - A namespace that is deleted and made again under its name begins above the last epoch of
//     the deleted one. So with a Namespace value of the deleted namespace, Match and Read are misses, and
//     Write stores nothing; while there is no namespace of the name, calls return ErrNotFound.
//
// # Several nodes
//
// A sequence lives on the node that scores highest for the first block of its chain (rendezvous
// hashing). In a flat namespace this holds for each key on its own. All clients must have the same
// Options.Servers, spelled the same. A sequence is stored only once: the sequences of a dead node are
// misses, and the sequences of other nodes are not affected.
//
// With Options.Discover the nodes are the members of a cluster. A member gets sequences in proportion
// to its capacity, whatever its address (placement.Homes). With Namespace.Replicas a sequence is stored on
// several members, and a Match or Read goes to the next one if a member has no part of the sequence or
// is down. After a member has let Match and Read calls wait until their deadlines, for Options.SilentAfter
// in all, it is asked last for DeadFor.
// A new sequence passes over a member that is overfull (placement.Overfull). docs/cluster.md has the rules.
//
// A node may have copied the first blocks of a sequence, a hot prefix, to members that would store the sequence with more replicas. Its replies
// to Match and Read name them, and for some seconds Read takes these blocks from the member with the fewest calls of the Store. A
// member without them costs the Read one call: it goes on to the next member, and at last to the home.
//
// The Store reads the list of members at intervals, from any member. While no node returns the list,
// the last one stays valid. A member that has left the list keeps its sequences, as misses, for
// GoneFor; then they belong to the other members.
// A draining member gets no new sequences, and its sequences are copied to the other members. Until it
// has left, a read asks both and takes the one that has more of the sequence. A Write goes to the
// draining member if the new one lacks the beginning of the sequence.
//
// # Two transports
//
// Match, Read, Reserve and Commit go as messages over the data-plane session, because such a call
// wakes fewer threads than one over gRPC. They go over gRPC, with the same outcome, in these cases:
// the node does not take messages of this version (Describe returns the version; nodes without
// messages return 0), a request or its reply is longer than 64 KiB, 64 replies are pending, or
// another user of the engine has posted its receive buffers. All other calls always go over gRPC.
// If the node has no receive buffer for a message, it does not read the message, and that call goes
// over gRPC too. Deadline and trace context are sent over both transports.
//
// When the ctx of a call by message ends, the call is over for the caller. The node notices the end
// by the deadline, or when its write to the closed window fails.
//
// # Retries
//
// Match and Read are retried when the connection breaks, up to RetryMax times, within ctx. Reserve
// is not retried, and Commit never is. After a node has failed, it is tried again after DeadFor, in
// the background: only the call that finds the node dead waits for an attempt to connect.
//
// Lock order: localSocket.mu, then localLink.mu. Store.mu, node.mu, calls.mu, hotHints.mu and loan.mu are
// leaves. No lock is held across a call.
package client
