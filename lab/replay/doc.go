// Package replay performs, on a storage node and with real bytes, the operations that engines would
// perform for the requests of a recorded trace. For each request it matches the prompt, loads the
// cached prefix and stores the missing blocks. The content of a block is derived from its id, so
// every loaded byte is compared with the expected one. A replay is not a benchmark of a device or
// of a network. It keeps no copy of the stored blocks, and ignores the recorded times: each worker
// sends its next request as soon as the last one is served.
//
//	trace.Request ─► by session ─► worker ─┬─ Match ─► lease
//	                                       ├─ Read a window ─► compare with content(id) ─► next window …
//	                                       └─ fill a window with content(id) ─► Write ─► next window …
//
// The requests of one session stay in the recorded order: one worker gets all of them. Each worker
// has the memory of one window, independent of the length of a prompt.
//
// A miss, a busy node and a refused write are counted and are not errors, because an engine would
// compute the blocks and continue. Wrong bytes are counted as well, and always indicate a bug.
//
// There is one lock, for the counts. No call is made under it.
package replay
