package verbs

import (
	"fmt"

	"github.com/penstock-kv/penstock/rdma/group"
)

// wcStatus is how the card says a request ended: ibv_wc_status.
type wcStatus uint32

// The values that are told apart here; they are part of libibverbs' ABI.
const (
	wcSuccess      wcStatus = 0
	wcFlushed      wcStatus = 5
	wcRemoteInvReq wcStatus = 9
	wcRemoteAccess wcStatus = 10
	wcRemoteOp     wcStatus = 11
	wcRetries      wcStatus = 12
	wcRNRRetries   wcStatus = 13
)

// outcome says what a completion with that status means for the Work. A message
// that is longer than the buffer is an invalid request to the target's card, or
// (rdma_rxe) an operation that failed there; for a write the first of these says
// that the card does not take it.
func (s wcStatus) outcome(message bool) group.Status {
	switch {
	case s == wcSuccess:
		return group.StatusOK
	case s == wcRemoteAccess:
		return group.StatusRefused
	case message && (s == wcRemoteInvReq || s == wcRemoteOp || s == wcRNRRetries):
		return group.StatusNoBuffer
	case s == wcRemoteInvReq:
		return group.StatusRefused
	}
	return group.StatusBroken
}

// wcError is a completion that is not a success, for people.
type wcError struct {
	nic    string
	status wcStatus
	text   string // libibverbs' own
	vendor uint32
}

// Error says what the card said, and what that means where it is known.
func (e *wcError) Error() string {
	s := fmt.Sprintf("%s: %s (status %d, vendor %#x)", e.nic, e.text, uint32(e.status), e.vendor)
	switch e.status {
	case wcRetries:
		s += ": the peer's card does not answer"
	case wcRNRRetries:
		s += ": the peer has no receive buffer"
	case wcRemoteAccess:
		s += ": the peer's card refused key or bounds"
	}
	return s
}
