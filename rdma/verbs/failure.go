package verbs

import "fmt"

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
