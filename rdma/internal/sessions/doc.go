// Package sessions is the part of an engine that does not depend on how its provider moves bytes:
// the table of sessions, their begin and end, and the operations in flight with their limits. It
// moves no bytes and makes no connections; rdma/tcp does both with sockets, rdma/group with
// endpoints.
//
//	Connect ─► dial (provider) ─► Activate ─► live: Session, Sessions, Peers
//	                                            │ Fail (provider): FailLocked, Drop
//	                                            ▼
//	                              ending ─► operations end ─► Remove ─► OnPeerDown
//
//	Reserve ─► room in slots and budget? ─ yes ─► op ─► BeginLocked ─► … ─► EndLocked ─► CallAll: Done
//	             │ no                              ▲
//	             └─► waiters, in order ────────────┘ when another operation ends
//
// A provider's engine has an Engine, its session embeds a Session, and its op embeds an Op.
// State.Mu guards the fields of Session and the provider's fields of a session, so it is exported.
//
// Lock order: Engine.Mu → State.Mu. Fail and the rdma callbacks (Done, OnPeerUp, OnPeerDown) are
// called without locks; the functions in Rules are called under State.Mu. Counters are atomic.
package sessions
