// Package replay repeats on a storage node the operations of a recorded trace's engines, with real
// bytes: for each request it matches the prompt, loads the cached prefix and stores the missing
// blocks. The content of a block is derived from its id, so every loaded byte is compared with the
// expected one. It is not a benchmark of a device or of a network, and it keeps no copy of the
// stored blocks. It does not wait for the recorded times: requests follow each other as fast as
// they are served.
//
//	trace.Request ─► by session ─► worker ─┬─ Match ─► lease
//	                                       ├─ Read a window ─► compare with content(id) ─► next window …
//	                                       └─ fill a window with content(id) ─► Write ─► next window …
//
// The requests of one session stay in the recorded order: one worker gets all of them. Each worker
// has the memory of one window, independent of the length of a prompt.
//
// A miss, a busy node and a refused write are counted and are no errors, because an engine would
// compute the blocks and continue. Wrong bytes are counted as well, and always indicate a bug.
//
// There is one lock, for the counts. No call is made under it.
package replay
