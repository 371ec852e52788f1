// Package peers is how an engine knows its peers: how their connections come in,
// who dials whom at a time, which session is whose, and groups of them. It is not
// a session, and proves nothing (rdma/internal/handshake).
//
//	listener ─► Accept ─► admit: handshake ─┐
//	Connect ─► Turns, by address ─► dial ───┴─► Table: Key ─► session ◄─ Find, by the engine's ID
//	                                                             ▲
//	                                     Group: several, resolved once
//
// Lock order: Table and Turns have a mutex each, both leaves.
package peers
