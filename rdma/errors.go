package rdma

import (
	"errors"
	"fmt"
)

// Sentinels, by the caller's reaction.
var (
	// ErrClosed: the engine or region is closed. The caller should stop.
	ErrClosed = errors.New("closed")
	// ErrBusy: the peer's in-flight budget is used up and NoWait was set. The caller should drop
	// the work or retry later.
	ErrBusy = errors.New("in-flight budget of the peer is used up")
	// ErrNoPeer: there is no session with that engine. The caller should call Connect first, or
	// give the engine up.
	ErrNoPeer = errors.New("no session with that engine")
	// ErrPeerDied: the session ended while the operation was in flight. Whether
	// the bytes landed is unknown.
	ErrPeerDied = errors.New("peer died")
	// ErrRefused: the target refused the operation; a *RefusedError has the reason. The
	// session continues.
	ErrRefused = errors.New("refused by the peer")
	// ErrAuth: the token was rejected, or the peer could not prove that it has the token.
	ErrAuth = errors.New("token not accepted")
	// ErrRange: the operation reaches outside its source or its Desc, which is an error of the
	// caller. Nothing was sent.
	ErrRange = errors.New("out of range")
	// ErrForeign: the region belongs to another engine or provider.
	ErrForeign = errors.New("region was registered with another engine")
	// ErrExists: the immediate is already expected, or receive buffers have already been
	// posted.
	ErrExists = errors.New("exists already")
	// ErrUnsupported: this provider does not support the operation.
	ErrUnsupported = errors.New("not supported by this provider")
	// ErrCanceled: the expectation, or the Scope, was cancelled.
	ErrCanceled = errors.New("cancelled")
	// ErrVersion: the peer, a Desc or an Addr has another version of the protocol. Both engines
	// must run the same release of Penstock. The error text contains both versions.
	ErrVersion = errors.New("another version of the protocol")
	// ErrMalformed: the bytes do not decode as a Desc or an Addr.
	ErrMalformed = errors.New("malformed")
)

// Reason is the reason for which a target refused an operation. Its values are sent to the peer,
// so they must not change.
type Reason uint8

const (
	// ReasonNone: not refused.
	ReasonNone Reason = 0
	// ReasonKey: the key is not valid at the target. It never existed there, or it was revoked.
	ReasonKey Reason = 1
	// ReasonBounds: the key is valid, but the bytes are outside of the key's range.
	ReasonBounds Reason = 2
	// ReasonRevoked: the window was revoked while the payload was being placed. Part of the
	// payload may have been written before.
	ReasonRevoked Reason = 3
	// ReasonTooLarge: the message is longer than the receive buffers.
	ReasonTooLarge Reason = 4
	// ReasonNoBuffer: every receive buffer is in use, or none has been posted.
	ReasonNoBuffer Reason = 5
)

// String returns a description for logs.
func (r Reason) String() string {
	switch r {
	case ReasonNone:
		return "not refused"
	case ReasonKey:
		return "unknown or revoked key"
	case ReasonBounds:
		return "outside the bounds of the key"
	case ReasonRevoked:
		return "revoked while landing"
	case ReasonTooLarge:
		return "message larger than the receive buffers"
	case ReasonNoBuffer:
		return "no receive buffer free"
	}
	return fmt.Sprintf("reason %d", uint8(r))
}

// RefusedError is the error of an operation that its target refused. errors.Is reports it as
// ErrRefused.
type RefusedError struct {
	Peer EngineID
	// Reason is the target's reason. If a NIC refused the operation, and not the target, Reason is
	// ReasonNone and Err is the NIC's error.
	Reason Reason
	Err    error
}

// Error returns the peer and the reason.
func (e *RefusedError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("rdma: refused on the way to %v: %v", e.Peer, e.Err)
	}
	return fmt.Sprintf("rdma: refused by %v: %v", e.Peer, e.Reason)
}

// Unwrap returns the NIC's error.
func (e *RefusedError) Unwrap() error { return e.Err }

// Is makes errors.Is(err, ErrRefused) true.
func (e *RefusedError) Is(target error) bool { return target == ErrRefused }
