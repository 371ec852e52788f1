// Package client is what an engine embeds to use storage nodes: find the longest
// cached prefix of a prompt, load it into the engine's own memory, store new
// blocks from there.
//
// It is not a scheduler, it does not place blocks, and it keeps no copy of
// anything: no byte of KV passes through a buffer of its own.
//
//	            ┌────────────────────────── Store ──────────────────────────┐
//	Match ─────►│ root of the sequence ─► its node (rendezvous hashing)     │── message ──► node
//	Read  ─────►│ pieces ─► tasks of some MiB ─► ReadParallel at a time     │── message ──► node
//	            │    window over the task's destination                     │                  │
//	Memory ◄════╪════════════════════════ one-sided writes ═════════════════╪══════════════════╡
//	            │    reply: what is under way, XXH3-64 of each layer        │◄─── message ─────┘
//	            │    hash layers as they land, count the immediates,        │
//	            │    revoke the window, hash the rest, compare              │
//	Write ─────►│ Reserve ─► one-sided writes ─► Commit, a chunk at a time  │══ messages, rdma ══► node
//	            └───────────────────────────────────────────────────────────┘
//
// An engine that uses it, with the transfer engine over TCP (rdma/tcp; this
// package itself knows the contract only). Errors are left out:
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
// A block has one place in the caller's memory, given by its index in the prompt:
// block b starts at Base + b × Geometry.BlockBytes, whichever blocks or layers a
// call moves. Read puts it there, Write takes it from there. With Base 0 the prompt
// starts where the Memory starts. Pieces name other places, one by one.
//
// Fragments give each layer of a piece, or each run of consecutive layers, its own place
// in any registered memory. Engines need them if K and V lie apart, or if each layer is a
// tensor of its own. Read scatters and Write gathers.
//
// # On the node's own host
//
// If the node has a unix socket (its setting local_socket) that this process can reach, Read
// copies the blocks from the node's arena, which is mapped here read-only, and
// verifies the copies. The request goes over the socket, in blocking calls of the
// caller's thread, and so do Match and Exists. Write copies its blocks, in chunks, into memory that the node
// lends each connection, and stores a chunk with one call. The transfer engine moves blocks that
// cannot be copied: while the first connection is being made, beyond 16 parts of Reads and
// Writes at a time, where the node has lent as much as it may, and pieces larger than that memory.
//
// ReadLocal borrows instead (Options.LocalSocket): it verifies the
// blocks where they lie in the node's memory, and Return gives them back. A call goes over the socket,
// or over gRPC while another is under way there.
//
// # Outcomes and errors
//
// Every data call returns Hit, Miss or Busy in its result, and an error only
// where a person or a program must act. A node that is down, draining or
// unreachable is a Miss, and a node of another version too. A bound that was reached is a Busy, at once, and is not
// tried again here. When ctx ends, its error is returned. What is left are
// refusals that trying again cannot mend: ErrAuth, ErrProvider, ErrVersion, ErrNotFound,
// ErrRequest, ErrMismatch, ErrClosed.
//
// # What a caller may rely on
//
//   - exact-or-miss: a block counts in ReadResult.Blocks only after the bytes in
//     the caller's memory hashed to the checksums of their writer, and are compared
//     when the window is closed. A layer that the engine placed once may have been
//     hashed as it landed (rdma.LandingRegion); one that was written to after that,
//     or partly, or by an engine that does not tell, is hashed then.
//   - When Read has returned, for whatever reason, no remote write touches the
//     caller's memory any more. When Write has returned, nothing reads it.
//   - Between the first and the last piece of one task a node can write, so the
//     bytes there must not hold anything else while Read runs. Tasks take pieces
//     in the order given, so sorted offsets make tight spans. Bytes of pieces
//     that were lost are undefined.
//   - What ReadLocal lends stays as it is until Return, whatever the node evicts
//     meanwhile, and also after Close.
//   - A call is for one epoch: the request's, or where that is 0 the Namespace
//     value's. An engine that still has old weights gets no KV of newer ones, and
//     none of its own is stored as theirs; it calls Namespace after it has loaded
//     the new weights. Where a bump keeps older epochs live, or PinEpoch does, that
//     engine goes on with KV of its own epoch. MatchRequest.Oldest tolerates older
//     epochs; the result names the one epoch that all of its blocks are of. With
//     MatchRequest.Mix the blocks may be of several, the result names the epoch of each
//     block, and ReadRequest.Epochs loads each block from its own.
//
// # Several nodes
//
// A sequence lives on the node that scores highest for the first block of its
// chain (rendezvous hashing), in a flat namespace each key on its own. All clients
// must be given the same Servers, spelled the same. There is no second copy: a
// dead node is a miss for its sequences, the others go on.
//
// # Two roads
//
// Match, Read, Reserve and Commit go as messages over the data-plane session: a
// call wakes fewer threads than over gRPC. They go over gRPC, with the same
// outcome, where the node does not take messages of this version (it says so in
// Describe; nodes that know nothing of messages say 0), where a request or its
// reply is longer than 64 KiB, where 64 replies are still to come, and where
// somebody else has posted the engine's receive buffers. Everything else goes over
// gRPC always. A message that the node has no buffer for was not read: that call
// goes over gRPC too. Deadline and trace context travel with either.
//
// A call by message whose ctx has ended is over for the caller; the node learns of
// it by the deadline, or when it writes to the window that is closed.
//
// # Retries
//
// Match and Read are tried again when the connection breaks, up to RetryMax,
// inside ctx. Reserve is not, Commit never. A node that failed is asked again
// after DeadFor, in the background: no call waits for a dead node, but the one
// that finds it dead.
//
// Lock order: localSocket.mu, then localLink.mu. Store.mu, node.mu, calls.mu and loan.mu are leaves; no lock is held across a call.
package client
