// Package handshake performs a mutual proof of the acceptor's token by two engines, before any
// other data crosses a stream. It is not a key exchange: it neither encrypts nor authenticates
// later data. DialTLS is the client's side of the TLS handshake, which precedes this one on
// encrypted streams.
//
// All integers little-endian, HMAC-SHA256 keyed with the token:
//
//	dialer   → hello      magic 4 | param 4 | dialer's engine ID 16 | session ID 16 | more | nonce 32     (72 bytes, and the protocol's more)
//	acceptor → challenge  magic 4 | zero 4 | acceptor's engine ID 16 | nonce 32                     (56 bytes)
//	dialer   → proof      HMAC( "penstock rdma dialer"   | hello | challenge )                      (32 bytes)
//	acceptor → verdict    status 1 | zero 7 | HMAC( "penstock rdma acceptor" | hello | challenge | status )  (40 bytes)
//
// The acceptor sends its proof only after it has received the dialer's. The magics are those of
// the protocol that follows, so a transcript of one protocol proves nothing in another. The
// last byte of a magic is the protocol's version. To a hello of another version the acceptor
// sends a challenge whose fields are zero, which shows its version, and reads until the dialer
// closes the connection.
//
// No locks.
package handshake
