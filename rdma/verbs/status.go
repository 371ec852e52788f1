package verbs

import "github.com/penstock-kv/penstock/rdma/group"

// wcStatus is the status with which the card completes a request, with the values of
// ibv_wc_status.
type wcStatus uint32

// The values that this package distinguishes. They are part of libibverbs' ABI.
const (
	wcSuccess      wcStatus = 0
	wcFlushed      wcStatus = 5
	wcRemoteInvReq wcStatus = 9
	wcRemoteAccess wcStatus = 10
	wcRemoteOp     wcStatus = 11
	wcRetries      wcStatus = 12
	wcRNRRetries   wcStatus = 13
)

// outcome converts the status of a completion to the status of its Work. If a message is longer
// than the receiver's buffer, the target's card reports an invalid request or, with rdma_rxe, a
// failed operation. For a write, an invalid request means that the target's card does not accept
// the write.
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
