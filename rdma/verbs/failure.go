package verbs

import "fmt"

// wcError is a failed completion as an error, with the card's text.
type wcError struct {
	nic    string
	status wcStatus
	text   string // libibverbs' text of the status
	vendor uint32
}

// Error returns the card's status and, for known statuses, an explanation.
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
