package handoff

import (
	"fmt"
	"sync"

	"github.com/penstock-kv/penstock/api"
	"github.com/penstock-kv/penstock/internal/arena"
)

// Session is the connection of one engine, with its loans. Its methods may be called concurrently.
type Session struct {
	id  api.LocalID
	max int
	// staging is the memory in which the engine puts the bytes of Write calls. It is nil until the
	// engine requests it. Only the goroutine that handles the calls of the connection uses it.
	staging *arena.Staging

	mu    sync.Mutex
	ended bool
	loans map[uint64]*Loan
}

// Staging returns the memory in which the engine puts the bytes of a Write call, or nil if the
// engine has requested none. The engine can change the bytes at any time. Only a Handler calls
// Staging, for the session of its call. The memory stays mapped until the Handler returns.
func (s *Session) Staging() []byte {
	if s.staging == nil {
		return nil
	}
	return s.staging.Bytes()
}

// Open begins a loan (of arena memory, for one Read) under a number that the engine chose. The
// engine ends the loan with ReturnLoans. If the call for which the loan was opened fails, the
// caller of Open calls End. Errors: ErrSession, ErrLoan, ErrFull.
func (s *Session) Open(number uint64) (*Loan, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch _, used := s.loans[number]; {
	case s.ended:
		return nil, fmt.Errorf("handoff: %w: the connection has ended", ErrSession)
	case used:
		return nil, fmt.Errorf("handoff: loan %d: %w", number, ErrLoan)
	case len(s.loans) >= s.max:
		return nil, fmt.Errorf("handoff: the session has %d loans: %w", s.max, ErrFull)
	}
	loan := &Loan{session: s, number: number}
	s.loans[number] = loan
	return loan, nil
}

// Return ends loans. It ignores numbers without a loan, so a repeated return is no error.
func (s *Session) Return(numbers []uint64) {
	for _, n := range numbers {
		s.mu.Lock()
		loan := s.loans[n]
		s.mu.Unlock()
		if loan != nil {
			loan.End()
		}
	}
}

// end returns all loans and refuses new ones.
func (s *Session) end() {
	s.mu.Lock()
	s.ended = true
	loans := s.loans
	s.loans = nil
	s.mu.Unlock()
	for _, loan := range loans {
		loan.End()
	}
}

func (s *Session) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.loans)
}

// Loan holds the memory that the node has lent for one Read.
type Loan struct {
	session *Session
	number  uint64

	// ended and held are guarded by session.mu. held has the functions that release the lent
	// memory; it stays empty once ended is set.
	ended bool
	held  []func()
}

// Add adds memory to the loan. release is called once: when the loan ends, or at once if the loan
// has ended already.
func (l *Loan) Add(release func()) {
	l.session.mu.Lock()
	ended := l.ended
	if !ended {
		l.held = append(l.held, release)
	}
	l.session.mu.Unlock()
	if ended {
		release()
	}
}

// End releases the memory of the loan. It may be called twice.
func (l *Loan) End() {
	s := l.session
	s.mu.Lock()
	held := l.held
	l.ended, l.held = true, nil
	if s.loans[l.number] == l {
		delete(s.loans, l.number)
	}
	s.mu.Unlock()
	for _, release := range held {
		release()
	}
}
