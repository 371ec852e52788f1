// Package fair orders the calls that wait for a resource of which a principal may hold several units at
// a time: places, bytes of device reads, memory. Principals have shares by weight, and the tenants of a
// principal have equal shares. A Queue does not wait, has no lock, and does not
// depend on the resource.
//
//	          principal a, weight 3   tenant x  2 1 ─┐ in turn
//	                                  tenant y    1 ─┴─► head, start tag 40 MiB ─┐   the lowest start tag,
//	waiting                                                                      ├─► principals above their
//	          principal b, weight 1   tenant z  2 1 ───► head, start tag 44 MiB ─┘   share of units last
//
// The order among principals is start-time fair queueing (Goyal, Vin, Cheng, "Start-time Fair Queueing: A
// Scheduling Algorithm for Integrated Services Packet Switching Networks", SIGCOMM 1996, section 2). The
// call j of principal f has the tags
//
//	start(f,j)  = max(v, finish(f,j-1))
//	finish(f,j) = start(f,j) + bytes(f,j) / weight(f)
//
// where v, the virtual time at the arrival of the call, is the start tag of the call that was granted last.
// When nothing waits or is held, all tags begin again at 0. If that does not happen for long, all tags are
// reduced by v, which does not change the order. With several calls in progress at a time this is SFQ(D)
// (Jin, Chase, Kaur, "Interposed Proportional Sharing for a Storage Service Utility", SIGMETRICS 2004). While two
// principals both wait and neither is above its share, the bytes that they are granted, divided by their weights,
// differ by at most one call of each, divided by its weight. A principal gains nothing by its idle time. It also
// loses nothing by the bytes that it was granted while no other principal waited.
//
// Tags alone divide the grants, not the units: a principal that holds each unit for longer than the others
// would hold most units. So a principal f is granted units only while
//
//	held(f) / weight(f) <= (free units + sum of held(g)) / sum of weight(g)     over the g with waiting calls
//
// At least one principal with a waiting call fulfils this, so free units are granted, once they are enough for the
// next call. A principal that alone waits always fulfils it. A principal that is passed over does not get the bytes of that time later.
//
// Only the first call of each principal needs a tag, so a tag is computed with the weight at the time of
// the grant. A call that is cancelled costs nothing.
package fair
