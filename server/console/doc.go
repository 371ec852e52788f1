// Package console is the web console: pages in HTML about a node or a planner, served on its HTTP
// listener. It renders the state that a Source or a PlannerSource supplies, and changes nothing.
//
//	browser                         Console                                     Source (the node)
//	───────                         ───────                                     ─────────────────
//	GET /namespaces?sort=used ────► Access: may the caller? ─► feed ──────────► Namespaces
//	                                                            │ state, at most half an
//	    ◄──── the whole page ◄── template ◄── filter, sort, ◄───┘ interval old, shared by
//	                                          one page            all callers
//	GET /live/namespaces?… ───────► as above, once each interval:
//	    ◄──── event live: HTML of the part that changes, if it has changed
//	    ◄──── event summary: one line for screen readers, if it has changed
//
// The script of the pages replaces the part that changes, node by node, so that the focus stays.
// Without the script the pages work, and show the state at the time of the request.
//
// The console has no goroutine of its own. While no request is in progress, it does no work and
// reads no state. A stream of events is one request; there are at most Options.Streams,
// of one caller with a name at most Options.StreamsPerCaller, and a further one is refused with status 503. A stream writes to its connection only in the goroutine of
// its request. A client that does not read for Options.WriteTimeout is disconnected, and delays no
// other client. Stop ends the streams, and Close waits for their end.
//
// The pages are the overview with the cluster and the faults, the namespaces, the prefixes (reasons of
// cuts, and heat), the pins, and the recent actions of administrators. A planner has the load of its
// engines and storage NICs, and the time lines of its last requests. docs/console.md describes them.
//
// Access decides each request, and again each event of a stream. A namespace or a
// tenant that the caller may not see is in none of its pages, counts and sums.
//
// Texts from clients, such as names of namespaces, are escaped by html/template. The policy in the
// header Content-Security-Policy permits only the style sheet, the script and the images of the
// console itself, so an error in the escaping runs no script.
//
// Locks: feed.mu is held while Source is called. Console.mu is a leaf.
package console
