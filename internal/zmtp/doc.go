// Package zmtp is the serving end of ZeroMQ's wire protocol, ZMTP 3.0 (RFC 23),
// with the NULL mechanism, over TCP and unix sockets: what a PUB and a ROUTER
// socket need. It is not a ZeroMQ library: it has no queues, no patterns and no
// reconnecting, since its user decides what a slow peer loses, and ZeroMQ peers
// reconnect by themselves.
//
//	peer (SUB)                                    this end (PUB)
//	  │◄── greeting, 64 B: FF 0…0 7F, 3.0, "NULL", 0…0 ──►│
//	  │◄── command READY: Socket-Type=PUB ────────────────│
//	  │─── command READY: Socket-Type=SUB ───────────────►│
//	  │─── message [01 topic]: subscribe ────────────────►│ Conn.Receive
//	  │◄── message [topic] [sequence] [payload] ──────────│ Conn.Send, Conn.Flush
//
// A frame is its flags, its size and its bytes; a message is one or more frames:
//
//	╭───────┬────────────────────┬──────╮   bit 0: more frames of this message follow
//	│ flags │ size, 1 B or 8 B   │ body │   bit 1: the size has 8 bytes, big-endian
//	╰───────┴────────────────────┴──────╯   bit 2: a command, not a message
//
// Peers of version 3.1 announce subscriptions and heartbeats by commands; Receive
// returns the former as the messages of 3.0 and answers the latter.
//
// Why not a module: of the two kinds that Go has, the bindings of libzmq need cgo,
// and the one written in Go, github.com/go-zeromq/zmq4 v0.17.0 (2024), writes each
// message to its subscribers one after the other, under one lock: a subscriber
// that stops reading stops all others, and keeps new ones from joining, while the
// queue in front of them has no bound unless one is set.
//
// A peer is not trusted: Options bound the time of a handshake and the bytes of
// one message.
package zmtp
