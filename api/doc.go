// Package api converts between the nouns of kv and the messages of penstock.v1,
// for server and client alike. Every conversion from a message validates: what
// it returns can be used without another check. The messages themselves are in
// penstockv1. No I/O, no lock.
package api
