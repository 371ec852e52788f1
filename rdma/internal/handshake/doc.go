// Package handshake makes two engines prove to each other that they have the acceptor's token,
// before any other data is sent on a stream. It is not a key exchange: later data is neither
// encrypted nor authenticated. On encrypted streams a TLS handshake comes first; DialTLS is the
// client's part of it.
//
// All integers little-endian, HMAC-SHA256 keyed with the token:
//
//	dialer   → hello      magic 4 | param 4 | dialer's engine ID 16 | session ID 16 | more | nonce 32     (72 bytes, and the protocol's more)
//	acceptor → challenge  magic 4 | zero 4 | acceptor's engine ID 16 | nonce 32                     (56 bytes)
//	dialer   → proof      HMAC( "penstock rdma dialer"   | hello | challenge )                      (32 bytes)
//	acceptor → verdict    status 1 | zero 7 | HMAC( "penstock rdma acceptor" | hello | challenge | status )  (40 bytes)
//
// The acceptor sends its proof only after it has received the dialer's proof. Each protocol has
// its own magics, so a transcript of one protocol proves nothing in another. The last byte of a
// magic is the protocol's version. If the hello has another version, the acceptor answers with a
// challenge that contains only its own magic and zeroes, so the dialer learns the acceptor's
// version. The acceptor then reads until the dialer closes the connection.
//
// No locks.
package handshake
