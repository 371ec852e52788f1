// Package api converts between the nouns of kv and the messages of penstock.v1,
// for server and client alike. Every conversion from a message validates: what
// it returns can be used without another check. The messages themselves are in
// penstockv1. It also defines the calls over transports other than gRPC (Call,
// LocalHello), and the names that several programs derive alike (AttemptName). It does no
// I/O but on a given reader, and has no lock.
package api
