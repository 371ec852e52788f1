// Package handshake is how two engines prove to each other that they know the
// token of the one that accepts, before anything else crosses a stream. It is
// no key exchange: nothing after it is encrypted or authenticated by it. DialTLS is the
// client's side of the handshake that encrypts, where a stream has one before this one.
//
// All integers little-endian, HMAC-SHA256 keyed with the token:
//
//	dialer   → hello      magic 4 | param 4 | dialer's engine ID 16 | session ID 16 | more | nonce 32     (72 bytes, and the protocol's more)
//	acceptor → challenge  magic 4 | zero 4 | acceptor's engine ID 16 | nonce 32                     (56 bytes)
//	dialer   → proof      HMAC( "penstock rdma dialer"   | hello | challenge )                      (32 bytes)
//	acceptor → verdict    status 1 | zero 7 | HMAC( "penstock rdma acceptor" | hello | challenge | status )  (40 bytes)
//
// A peer that does not know the token learns nothing: the acceptor's proof is
// sent only after the dialer's. The magics are the protocol's that follows, so
// that a transcript of one protocol proves nothing in another. The last byte of a magic
// is the protocol's version. To a hello of another version the acceptor sends a challenge
// whose fields are zero, so that the dialer learns the acceptor's version, and reads on
// until the dialer closes the connection.
//
// No locks.
package handshake
