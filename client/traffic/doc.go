// Package traffic moves the KV of one engine: the traffic manager of the DualPath paper (sections
// 4.1 and 5). It reads cached prefixes from storage, through the engine's storage NIC, into a small
// buffer in DRAM. While the model computes, it transfers the prefixes layer by layer over the
// compute network. The two sides of a request are its prefill engine (PE) and its decode engine
// (DE).
//
// The planner, not this package, decides which side reads which blocks. The package does not
// compute KV. It holds only the KV of running requests, and blocks that are not stored yet.
//
//	            prefill engine (PE)                              decode engine (DE)
//	storage ─1─► PE buffer ─3,4─► device ══ 5,6,7 ══════════════► DE buffer ─8,9─► device
//	[0,x)        Full Blocks      layer l: hit and miss           Full Blocks        │
//	                              ▲                               ▲   │              │
//	                              ╚═══════ layer l of [x,hit) ════╬═══╝              │
//	                                       3,4,5 of Figure 4(b)   │                  ▼
//	                                                     storage ─1             persist each
//	                                                     [x,hit)                full block
//
// Storage is read in Full Blocks [layers, tokens, bytes]. All other transfers are in Layer Blocks
// [1, tokens, bytes]. A Full Block is the concatenation of its Layer Blocks, so a Layer Block is a
// page of the Full Block (kv.Geometry): no byte is ever converted, and each transfer is one paged
// write.
//
// One request on the PE:
//
//	p, err := m.Prefill(ctx, PrefillJob{…, Parts: …})     // reading begins
//	for l := range layers {
//		err := p.Layer(ctx, l)                             // its hit KV is in device memory, verified
//		… compute the layer; KV of p.Miss() goes to its pages …
//		p.Computed(l)                                      // on its way to the DE
//	}
//	err = p.Finish(ctx)
//
// and on the DE:
//
//	d, err := m.Decode(ctx, DecodeJob{…, Peer: pe})
//	err = d.Ready(ctx)                                     // the whole prompt is in device memory, verified
//	… decode; d.Append(ctx, ids, page) when a block is full …
//	err = d.Finish(ctx)
//
// # Copies between buffer and device
//
// Steps 3 and 9, and the copy from the device in Append, are batches of rdma/copier with one span
// for each Layer Block. A copier.NIC copies over the NIC of the GPU (CNIC-assisted copy, section
// 5.2 of the paper). A CUDA copier uses the GPU's copy engine. Without a copier the CPU copies. A
// job waits for its copies before it ends, so no other job gets the pages or the buffer of a
// running copy.
//
// # Buffers
//
// A manager maps and registers two buffers. The PE or DE buffer holds whole prompts, each from the
// beginning of its job to the end; jobs wait for room in order of arrival. A job takes memory on
// the decode side first: the PE waits for the DE's offer, then takes all its memory in one piece,
// and starts to read. A job that has memory on a PE therefore waits for no other memory, however
// fragmented the buffers are, so every job ends. If the planner later orders the PE to read another
// range and the buffer has no room for it at once, the PE calls Stopped with ErrBusy. The second,
// small buffer (Options.AppendBytes) holds only decoded blocks, so Append never waits for the
// memory of a prompt.
//
// # Resident blocks
//
// A DE with a prefix cache in device memory has leading blocks of some prompts already
// (DecodeJob.Resident). The PE needs these blocks too, and both sides read them from storage as the
// planner orders. The PE does not send them to the DE, and the DE does not copy them to its device:
//
//	PE  hit: read by both sides      [0 … resident)[resident … hit)[hit … blocks)
//	DE  pages                         unchanged     written         written, stored
//
// # New blocks
//
// The DE stores the prompt's new blocks while the output is decoded, and stores a decoded block
// when Append gets it. A block waits until its parent is stored. A long prompt is stored in several
// writes. Each write has a time limit of one minute from its own start, however long the
// computation of the prompt took.
//
// # Messages
//
// The two sides of a request start on their own, so the DE's first messages may come before the PE
// has begun the job. The PE keeps a bounded number of such messages (maxEarly) and returns the
// others to the DE (TrafficAgain), which repeats them after a pause. A message for which the peer
// has no free receive buffer is sent again too. No message is dropped while its job runs, and one
// slow peer delays no other.
//
// A message has a bounded size, however long the prompt is: lists of pages and blocks
// are split into several messages, which may arrive in any order. A manager ends a
// request whose peer uses another version of the messages (TrafficMessage.version).
//
// # Longest prompt
//
// A job has at most MaxBlocks blocks. A longer job is refused when it is submitted, and
// so is a job that needs more memory than the whole buffer. A leader reports both
// limits to the planner, which rejects at once a request that no engine can take. A
// layer of more than rdma.MaxPages blocks is sent in several writes.
//
// # Device memory
//
// A page holds one Layer Block. Page p of layer l is at Device.Bases[l] + p × Device.Stride:
//
//	layer-major, Stride = Layer Block      │l0 p0│l0 p1│l0 p2│…│l1 p0│l1 p1│l1 p2│…
//	block-major, Stride = all layers       │l0 p0│l1 p0│l2 p0│…│l0 p1│l1 p1│l2 p1│…
//
// The bytes between pages belong to the engine. Each side has its own layout: the PE sends its
// bases and its stride with its window, and the DE uses them for its writes.
//
// # Staged device memory
//
// With Device.Region the compute NIC reads and writes device memory (GPUDirect RDMA, or host memory).
// Without it only the copier reaches device memory, and each layer passes through staging memory of the
// job on the PE, which is a part of the PE buffer:
//
//	[x,hit) DE buffer ═══► staging ─copier─► device ─copier─► staging ═══► DE buffer   hit and miss
//	                       verified          computed         sums
//
// The staging memory holds two layers of the prompt. The DE may write a layer when the copier has
// copied the layer two before it. An incoming and an outgoing layer share a slot, because the
// incoming and the outgoing blocks of a layer are different blocks. Blocks are verified in host
// memory before they are copied, and the sums of computed blocks are made in host memory after the
// copy. So the copies of the copier are not verified. On the DE all blocks pass through the DE
// buffer in any case.
//
// An engine puts its computation into a stream of the device and does not wait for
// it. With a mark of this stream (copier.Mark) the copies wait on the device:
// copies to pages for the work before AddPagesAfter, PrefillJob.After and
// DecodeJob.After, and copies from pages for the work before ComputedAfter and
// AppendAfter. A copy that has been submitted is not cancelled, so a job may end
// only when the stream has reached the mark. Layer and Ready return when the
// copies have ended; work that the engine puts into a stream after that finds the
// KV.
//
// # Chunked prefill
//
// An engine may compute a prompt in chunks, each of which goes through all layers, and may
// allocate device pages late:
//
//	err := p.Loaded(ctx)                                       // storage has been read
//	p.AddPages(…)                                              // device pages of the hit blocks from buffers
//	for chunk := range chunks {
//		p.AddPages(…)                                      // device pages of the chunk's blocks
//		for l := range layers {
//			err := p.Layer(ctx, l)
//			… compute the layer of the chunk …
//			p.ComputedTo(l, end)                               // the chunk's blocks leave now
//		}
//	}
//
// The DE counts the same two immediates for each layer as without chunks. They are in the
// layer's last writes, which begin when all others of the layer have arrived, because transfers
// arrive in any order.
//
// # Layer groups
//
// The namespace has a group of full attention and may have groups with sliding windows and with
// recurrent state. A layer with a window needs only the last blocks of the cached prefix
// (kv.Geometry.FirstNeeded). The manager neither reads nor sends the blocks before them in this layer,
// does not verify them, and does not change their pages:
//
//	cached prefix, 8 blocks      new blocks
//	full    0 1 2 3 4 5 6 7      8 9
//	window            5 6 7      8 9        a window of 3 blocks
//
// All layers of the new blocks are sent and stored, because a later prompt may end its cached prefix
// at any of them. Both sides compute the needed blocks from the length of the cached prefix, so the
// messages have no lists for the groups.
//
// If a cached block is missing, the model computes all cached blocks (Prefill.Recompute). The
// windows at the end of a shorter prefix would need blocks that were not read.
//
// A layer with recurrent state has the state after the last token of a block in the block's page.
// The prefill engine needs the state at the end of the cached prefix, and the decode engine the state
// at the end of the prompt. No other state is read, sent or stored:
//
//	cached prefix, 8 blocks      new blocks
//	full    0 1 2 3 4 5 6 7      8 9
//	state                 7        9        7: to the PE; 9: to the DE and to storage
//
// If all blocks of a prompt are cached, the two are one, which the PE sends to the DE or the DE to
// the PE. A layer of which a side sends no block has its immediates alone.
//
// A Full Block has the layers of one group after the other, and the model computes them in another
// order (Options.Order). Layers arrive and leave in the order of computation.
//
// A block has one page number for all layers, or one in each page table (Device.Tables), also in the
// layers with a window that do not need the block. So an engine needs the device memory of full
// attention in these layers: if an engine freed the blocks before the window while a request runs, the
// pages could change before the layers have left. A block whose state is not needed has NoPage in the
// tables of such layers. The place of a block in the buffers has room for all layers, and Footprint
// counts a block with all its layers.
//
// # Layers in flight
//
// On the PE, device memory holds len(Device.Bases) layers of a request. Layer l may arrive once
// layer l - len(Bases) has been sent to the DE. The PE applies this rule to its own copies, and to
// the credit that it grants the DE. So the DE never writes faster than the engine can take layers,
// and a fast engine never waits for a round trip.
//
// The DE's window on device memory (rdma.Region.WindowSpans) covers the request's
// pages of the blocks that the DE sends. Over NICs that check one range for each key
// (rdma.Info.Spans is not set) it reaches from the first of these pages to the last.
//
// # What is verified
//
// The client verifies each block that it reads. The checksums (sums) of these blocks, one XXH3-64
// for each Layer Block, and the sums that the PE computes for computed blocks, are sent with the
// layers. Blocks are compared with their sums in the PE's device memory before Layer returns, in
// the DE buffer before any block is stored, and in the DE's device memory before Ready returns. A
// block that does not match is never used: it ends the job with a *BlockError. Options.Verify
// reduces the comparisons between engines. At every setting, storage refuses a block that does not
// match its sums.
//
// # Missing blocks and slow reads
//
// While a side reads, it reports which blocks have arrived and are verified (PrefillJob.Progress).
// From these reports the planner estimates when the side will finish, and it ends the read of a
// side that is too slow (Cut).
//
// A side that cannot read all of its part reports that (PrefillJob.Stopped, which goes to the
// planner) and waits. The planner then gives a range to this side or the other side (Read), or lets
// the model compute blocks (Recompute). Layer 0 is not given to the model until every hit block is
// in a buffer or is to be recomputed.
//
// # Several ranks
//
// An engine of several tensor-parallel ranks has a manager for each rank, and each manager handles
// its rank's shard of every block. A request is one job on each manager, and all jobs follow the
// same plan of the planner. Different ranks may find different blocks missing. So the engine waits
// until all jobs are Loaded. Then it calls Recompute on all jobs, from the lowest missing block on,
// before it adds the pages of the hit blocks.
//
// # Ends
//
// A job ends early on Cancel, at a deadline, when its peer dies, or when a block is wrong. First
// the job's windows are revoked, so that no later write of the peer changes the job's memory. Then
// the job waits for its own transfers, and then it releases its buffers. Finish does the same after
// a success.
//
// Lock order: Manager.mu, then Prefill.mu or Decode.mu; neither is held across a
// call of an engine, of storage or of the caller.
package traffic
