package verbs

import "github.com/penstock-kv/penstock/rdma/group"

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
