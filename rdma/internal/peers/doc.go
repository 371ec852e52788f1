// Package peers accepts connections of peers, serialises dials to one address, and holds the table
// of sessions and groups of peers. It does not implement sessions. It does not authenticate peers;
// rdma/internal/handshake does.
//
//	listener ─► Accept ─► admit: handshake ─┐
//	Connect ─► Turns, by address ─► dial ───┴─► Table: Key ─► session ◄─ Find, by the engine's ID
//	                                                             ▲
//	                                     Group: several, resolved once
//
// Lock order: Table and Turns have a mutex each, both leaves.
package peers
