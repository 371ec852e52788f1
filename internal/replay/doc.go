// Package replay does to a storage node what the engines of a recorded trace did,
// with real bytes: for each request it matches the prompt, loads the cached prefix
// and stores the blocks that were missing. What a block must hold follows from its
// id, so every byte that is loaded is compared with what must have been stored. It
// is not a benchmark of a device or of a network, it keeps no copy of what it
// stored, and it does not wait for the recorded times: requests follow each other
// as fast as they are served.
//
//	trace.Request ─► by session ─► worker ─┬─ Match ─► lease
//	                                       ├─ Read a window ─► compare with content(id) ─► next window …
//	                                       └─ fill a window with content(id) ─► Write ─► next window …
//
// The requests of one session stay in order, as in the recording: they go to the
// same worker. Memory is one window for each worker, however long a prompt is.
//
// A miss, a busy node and a refused write are counted, not errors: an engine would
// compute and go on. A byte that differs is counted as well, and is never right.
//
// There is one lock, around the counts; no call is made under it.
package replay
