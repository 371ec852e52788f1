// Package api converts between the types of kv and the messages of penstock.v1, for server and
// client alike. Every conversion from a message validates its result, so the result needs no
// further check. The messages themselves are in penstockv1. Package api also defines the calls over
// transports other than gRPC (Call, LocalHello), and the names that several programs must derive in
// the same way (AttemptName). It does no I/O except on a given reader, and has no lock.
package api
