// Package zmtp implements the serving end of ZeroMQ's wire protocol, ZMTP 3.0 (RFC 23), with the
// NULL mechanism, over TCP and unix sockets. It has the parts that PUB and ROUTER sockets need. It
// is not a ZeroMQ library: it has no queues and no socket patterns, because the caller decides
// which messages a slow peer loses. It does not reconnect, because ZeroMQ peers reconnect
// themselves.
//
//	peer (SUB)                                    this end (PUB)
//	  │◄── greeting, 64 B: FF 0…0 7F, 3.0, "NULL", 0…0 ──►│
//	  │◄── command READY: Socket-Type=PUB ────────────────│
//	  │─── command READY: Socket-Type=SUB ───────────────►│
//	  │─── message [01 topic]: subscribe ────────────────►│ Conn.Receive
//	  │◄── message [topic] [sequence] [payload] ──────────│ Conn.Send, Conn.Flush
//
// A frame has flags, a size and a body. A message is one or more frames:
//
//	╭───────┬────────────────────┬──────╮   bit 0: more frames of this message follow
//	│ flags │ size, 1 B or 8 B   │ body │   bit 1: the size has 8 bytes, big-endian
//	╰───────┴────────────────────┴──────╯   bit 2: a command, not a message
//
// Peers of version 3.1 send subscriptions and heartbeats as commands. Receive returns such
// a subscription as a message of version 3.0, and replies to heartbeats.
//
// The package exists because no existing Go module is suitable. Bindings of libzmq need cgo. The
// implementation in Go, github.com/go-zeromq/zmq4 v0.17.0 (2024), writes each message to one
// subscriber after the other under one lock. So a subscriber that stops reading blocks all other
// subscribers, and no new subscriber can join. Its queue has no limit by default.
//
// A peer is not trusted: Options limits the time of a handshake and the bytes of one message.
package zmtp
