// Package api converts between the nouns of kv and the messages of penstock.v1,
// for server and client alike. Every conversion from a message validates: what
// it returns can be used without another check. The messages themselves are in
// penstockv1. It also draws what calls look like on the roads that are not gRPC
// (Call, LocalHello). No I/O beyond a reader that it is given, no lock.
package api
