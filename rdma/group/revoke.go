package group

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// withdrawalsMax is the largest number of withdrawals that a peer may have open at this engine,
// and that this engine has open at one peer. A withdrawal has up to maxKeys keys.
const withdrawalsMax = 1 << 14

// withdrawals holds the keys of a peer's memory that the peer has asked this engine not to use. A
// withdrawal (one request) is kept until the peer reports, with a forget frame, that its NICs
// refuse the keys.
type withdrawals struct {
	// some is len(byID), pending len(waiting). Both are read without mu.
	some, pending atomic.Int32

	mu   sync.RWMutex
	byID map[uint64][]remoteKey
	keys map[remoteKey]int
	// waiting are the withdrawals whose confirmation waits, because a posted Work may still use one
	// of the keys.
	waiting []withdraw
}

// has reports whether the peer has asked this engine not to use a key.
func (w *withdrawals) has(k remoteKey) bool {
	if w.some.Load() == 0 {
		return false
	}
	w.mu.RLock()
	defer w.mu.RUnlock()
	return w.keys[k] > 0
}

// add notes a withdrawal.
func (w *withdrawals) add(x withdraw) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.byID == nil {
		w.byID, w.keys = make(map[uint64][]remoteKey), make(map[remoteKey]int)
	}
	if w.byID[x.id] != nil || len(w.byID) == withdrawalsMax {
		return fmt.Errorf("withdrawal %d came twice or exceeds the limit of %d: %w", x.id, withdrawalsMax, errFrame)
	}
	w.byID[x.id] = x.keys
	for _, k := range x.keys {
		w.keys[k]++
	}
	w.waiting = append(w.waiting, x)
	w.some.Store(int32(len(w.byID)))
	w.pending.Store(int32(len(w.waiting)))
	return nil
}

// forget ends a withdrawal.
func (w *withdrawals) forget(id uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, k := range w.byID[id] {
		if w.keys[k]--; w.keys[k] == 0 {
			delete(w.keys, k)
		}
	}
	delete(w.byID, id)
	w.some.Store(int32(len(w.byID)))
}

// confirm sends the peer a confirmation of each waiting withdrawal whose keys no posted Work uses.
// No later Work uses a withdrawn key, so one check is enough.
func (s *session) confirm() {
	w := &s.withdrawn
	w.mu.RLock()
	waiting := append([]withdraw(nil), w.waiting...)
	w.mu.RUnlock()
	for _, x := range waiting {
		if !s.writes(x.keys) && w.leave(x.id) {
			s.ctl.send(func(b []byte) []byte { return appendID(b, frameWithdrawn, x.id) })
		}
	}
}

// leave removes the withdrawal with the number id from waiting. It returns false if waiting does
// not have it.
func (w *withdrawals) leave(id uint64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i, x := range w.waiting {
		if x.id == id {
			w.waiting = append(w.waiting[:i], w.waiting[i+1:]...)
			w.pending.Store(int32(len(w.waiting)))
			return true
		}
	}
	return false
}

// writes reports whether a Work with one of keys is posted, or was lost with its endpoint and may
// still land.
func (s *session) writes(keys []remoteKey) bool {
	for _, l := range s.lanes {
		if l.writes(keys) {
			return true
		}
	}
	return false
}

// writes reports whether a Work of the lane with one of keys is posted, or was lost with its
// endpoint and may still land.
func (l *lane) writes(keys []remoteKey) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cur == nil {
		return false
	}
	serial := l.remoteSerial.Load()
	uses := func(r *record) bool {
		key, ok := r.op.key(serial)
		for _, k := range keys {
			if ok && k == (remoteKey{serial, key}) {
				return true
			}
		}
		return false
	}
	for i := range l.cur.records {
		if r := &l.cur.records[i]; r.used && uses(r) {
			return true
		}
	}
	for i := range l.cur.broken {
		if uses(&l.cur.broken[i]) {
			return true
		}
	}
	return false
}

// withdrawalRequests holds the withdrawals that this engine has requested in a session and that
// the peer has not confirmed.
type withdrawalRequests struct {
	mu sync.Mutex
	by map[uint64]chan struct{}
}

// requestWithdrawal sends a withdrawal to the peer. The returned channel is closed when the peer
// confirms the withdrawal.
func (s *session) requestWithdrawal(w *withdraw) <-chan struct{} {
	done := make(chan struct{})
	s.requests.mu.Lock()
	if s.requests.by == nil {
		s.requests.by = make(map[uint64]chan struct{})
	}
	s.requests.by[w.id] = done
	s.requests.mu.Unlock()
	s.ctl.send(func(b []byte) []byte { return w.append(b) })
	return done
}

// confirmed handles the peer's confirmation of a withdrawal.
func (s *session) confirmed(id uint64) {
	s.requests.mu.Lock()
	defer s.requests.mu.Unlock()
	if done := s.requests.by[id]; done != nil {
		close(done)
		delete(s.requests.by, id)
	}
}

// beginRevoke counts a revocation. It returns false if the engine is closed.
func (e *Engine) beginRevoke() bool {
	e.core.Mu.Lock()
	defer e.core.Mu.Unlock()
	if e.core.Closing {
		return false
	}
	e.revokes.Add(1)
	return true
}

// revoke ends access to a window. When it returns, no Work of a peer changes the window's memory
// or is counted as a write to the window.
//
// If Memory.Close is final on every NIC, closing the memory is enough. Otherwise revoke asks the
// peers that may write to the window to stop writing with its keys, and to confirm once their
// posted Works have ended. It shuts the endpoints of a peer that does not confirm in time. It also
// waits for sessions that are ending, until their endpoints are shut, because payload can land
// through them.
func (e *Engine) revoke(w *window, keys []remoteKey) {
	var peers map[*session]bool
	id := uint64(0)
	if !e.final && len(keys) > 0 {
		e.withdrawSlots <- struct{}{}
		defer func() { <-e.withdrawSlots }()
		id = e.revocations.Add(1)
		peers = make(map[*session]bool)
		e.withdraw(w, &withdraw{id, keys}, peers)
	}
	e.regMu.RLock()
	for i := range w.mems {
		if err := closeMemory(&w.mems[i]); err != nil {
			e.core.Log.Warn(sessions.LogNIC, "a revoked window did not close", "err", err)
		}
	}
	e.regMu.RUnlock()
	if peers != nil {
		// Send the withdrawal also to sessions that began during the first round: the peer may have
		// received the key in an earlier session.
		e.withdraw(w, &withdraw{id, keys}, peers)
		for s, late := range peers {
			if late {
				s.cutOff(fmt.Errorf("revocation not confirmed in %v", e.opts.RevokeTimeout))
			}
			s.ctl.send(func(b []byte) []byte { return appendID(b, frameForget, id) })
		}
	}
	e.drainAll()
	r := w.region
	r.mu.Lock()
	delete(r.windows, w)
	r.mu.Unlock()
	close(w.done)
}

// withdraw sends the withdrawal to the sessions of the window's peers that are not in peers, and
// adds these sessions to peers. It waits until each session has confirmed, has ended, or is late.
// The value of a late session in peers is true.
func (e *Engine) withdraw(w *window, x *withdraw, peers map[*session]bool) {
	waiting := make(map[*session]<-chan struct{})
	for _, s := range e.core.Unremoved() {
		if _, ok := peers[s]; !ok && w.admits(s.Peer) {
			peers[s] = false
			waiting[s] = s.requestWithdrawal(x)
		}
	}
	if len(waiting) == 0 {
		return
	}
	late := time.NewTimer(e.opts.RevokeTimeout)
	defer late.Stop()
	expired := false
	for s, done := range waiting {
		if expired {
			select {
			case <-done:
			default:
				peers[s] = true
			}
			continue
		}
		select {
		case <-done:
		case <-s.Removed:
		case <-late.C:
			expired = true
			peers[s] = true
		}
	}
	for s := range waiting {
		s.confirmed(x.id) // stop waiting for late sessions
	}
}

// cutOff shuts the endpoints of a session. It returns when nothing more can arrive on these
// endpoints. The session continues with new endpoints.
func (s *session) cutOff(why error) {
	if !s.Dead() {
		s.e.core.Log.Warn(sessions.LogSession, "endpoints of a peer shut", "peer", s.Peer.String(), "why", why)
	}
	for _, l := range s.lanes {
		l.mu.Lock()
		en := l.cur
		l.mu.Unlock()
		if en == nil {
			continue
		}
		l.breakEnd(en, why)
		select {
		case <-en.closed:
		case <-s.Removed:
		}
	}
}

// drainAll returns when every completion that has arrived so far has been polled.
func (e *Engine) drainAll() {
	var wg sync.WaitGroup
	for i := range e.nics {
		wg.Add(1)
		e.nics[i].Load().drain(wg.Done)
	}
	wg.Wait()
}

// explain sends a peer the reason of a refusal. It also counts the refusal here, because the NIC
// reports a refusal only to the sender.
func (s *session) explain(w reasonQuery) {
	reason := s.e.check(s.Peer, remoteKey{w.serial, w.key}, w.addr, w.n)
	if reason != rdma.ReasonNone {
		s.refused(reason, w.addr, w.n)
	}
	a := reasonReply{w.op, reason}
	s.ctl.send(func(b []byte) []byte { return a.append(b) })
	if reason != rdma.ReasonNone {
		s.retryNow()
	}
}

// refused counts and logs a refused operation of the peer.
func (s *session) refused(reason rdma.Reason, addr, n uint64) {
	s.e.core.RefusedIn[reason].Add(1)
	s.e.core.Log.Warn(sessions.LogRefused, "data-plane operation refused", "peer", s.Peer.String(), "remote", s.Remote, "reason", reason.String(), "address", addr, "length", n)
}
