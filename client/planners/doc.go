// Package planners is a connection to the planner that leads, among several planners that elect a
// leader (cluster.etcd of penstock planner). Packages leader and gateway, and the commands of the
// CLI, use it in place of a connection to one planner. It needs no access to etcd.
//
//	conn, err := planners.Dial("a:7430,b:7430", client.DialOptions{})
//	g, err := gateway.New(gateway.Options{Planner: conn, …})
//
//	Conn ── Election ──────────► each planner      the one with the highest term leads
//	  └──── calls and streams ─► the leader        until a planner with a higher term leads
//
// A Conn asks the planners which one leads when a call or a stream fails with Unavailable, and then
// until one leads. While one leads it asks each planner every 2 s in the mean, because the streams to
// a leader that hangs do not fail. When the leader does not answer this question within 1 s, the Conn asks
// as after a failed call, so it soon finds the planner that is elected next. A stream that fails while its
// planner leads does not end the other streams.
//
// When another planner leads, the streams to the earlier leader end with Unavailable. The leader of
// a group then registers again with its requests, and a gateway submits its requests again, as after
// a restart of one planner. While no planner leads, calls fail with Unavailable, and the error has
// the answer of each planner.
//
// # Terms
//
// Each term of a leader has a number that is higher than the numbers of all terms before it. A Conn
// remembers the highest term that it has seen. It refuses the responses of a leader of a lower term,
// so an earlier leader that has not noticed the end of its term cannot plan. It sends the highest
// term with its calls, by which such a planner notices the end of its term. If the only planner that
// leads has a lower term, because etcd has lost its data, the call Lead sends the highest term to it, and
// fails. That planner is then elected again, for a higher term.
//
// With one address a Conn asks no planner whether it leads: its calls go to that address, which may
// be that of a load balancer in front of several planners. The terms are compared all the same.
//
// Lock order: Conn.mu is the only lock. It is not held across a call.
package planners
