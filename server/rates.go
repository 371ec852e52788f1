package server

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dustin/go-humanize"

	"github.com/penstock-kv/penstock/internal/fair"
	"github.com/penstock-kv/penstock/server/access"
	"github.com/penstock-kv/penstock/server/storage"
)

// rates counts the bytes that each principal reads and writes, and refuses calls of a principal that
// is above its rate in the roles file.
//
//	call ── spend.allow ── tokens > 0 ─► the call runs ── spend.take(bytes moved) ─► tokens may fall below 0
//	             └──────── tokens ≤ 0 ─► Busy
//
// A bucket gains the rate each second, up to the tokens of one second. The size of a read is known only after its
// match, so a call pays after it was admitted. So the average rate is the configured one for calls of any
// size. Calls that run concurrently may all have been admitted by the last token: their sum is bounded by
// the limits on calls in progress. (A limiter of golang.org/x/time/rate has no debt above its burst.)
type rates struct {
	mu  sync.Mutex
	all map[string]*spending // by the principal's name
}

// spending has the counters of one principal. They outlive changes of the roles file.
type spending struct{ read, write spend }

// spend is one direction of the spending of a principal.
type spend struct {
	bytes, limited atomic.Uint64

	mu sync.Mutex
	// perSecond is the rate in bytes; 0: no limit. The bucket had tokens bytes at the time at.
	perSecond int64
	tokens    float64
	at        time.Time
}

// of returns the spending of a principal. policy is the policy in use, or nil. When the table has twice
// as many names as a roles file may have, the names that policy does not have leave it.
func (r *rates) of(p *access.Principal, policy *access.Policy) *spending {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.all[p.Name()]; s != nil {
		return s
	}
	if len(r.all) >= 2*access.CredentialsMax {
		for name := range r.all {
			if policy == nil || policy.Named(name) == nil {
				delete(r.all, name)
			}
		}
	}
	if r.all == nil {
		r.all = make(map[string]*spending)
	}
	s := new(spending)
	r.all[p.Name()] = s
	return s
}

// snapshot returns the spending of all principals by name.
func (r *rates) snapshot() map[string]*spending {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.all)
}

// allow fails with storage.ErrBusy if the spender is above perSecond bytes a second. 0 is no limit.
func (s *spend) allow(now time.Time, name, what string, perSecond int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if perSecond != s.perSecond {
		s.perSecond, s.tokens, s.at = perSecond, float64(perSecond), now
	}
	if perSecond == 0 {
		return nil
	}
	s.fillLocked(now)
	if s.tokens > 0 {
		return nil
	}
	s.limited.Add(1)
	return fmt.Errorf("%w: principal %q is above its rate of %s of %s a second, for %v more; an administrator sets rates in auth.roles_file or auth.roles_etcd of the node",
		storage.ErrBusy, name, what, humanize.IBytes(uint64(perSecond)), time.Duration(-s.tokens/float64(perSecond)*float64(time.Second)).Round(time.Millisecond))
}

// take counts bytes that were moved.
func (s *spend) take(now time.Time, n int) {
	s.bytes.Add(uint64(n))
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.perSecond > 0 {
		s.fillLocked(now)
		s.tokens -= float64(n)
	}
}

// fillLocked adds the tokens of the time since the last call. The bucket has at most the tokens of one second.
func (s *spend) fillLocked(now time.Time) {
	if d := now.Sub(s.at); d > 0 {
		s.tokens = min(s.tokens+d.Seconds()*float64(s.perSecond), float64(s.perSecond))
		s.at = now
	}
}

// spender is the principal of one call. It is the zero spender if the node has no roles file, and for
// calls over the unix socket.
type spender struct {
	*spending
	principal *access.Principal
}

// spenderOf returns the principal of a call.
func (s *Server) spenderOf(ctx context.Context) spender {
	// A session of the data plane may be older than the policy in use.
	id, ok := identityOf(s.guard.refresh(ctx))
	if !ok {
		return spender{}
	}
	return spender{s.rates.of(id.Principal, s.guard.roles.current()), id.Principal}
}

// shareOf returns the share of the principal of a call: the zero Share if the node has no roles file, and for
// calls over the unix socket. Its weight is that of the principal in the policy in use when a read or memory is granted.
func (s *Server) shareOf(ctx context.Context) fair.Share {
	id, ok := identityOf(s.guard.refresh(ctx))
	if !ok {
		return fair.Share{}
	}
	name := id.Principal.Name()
	return fair.Share{Principal: name, Weight: func() int { return s.weightOf(name) }}
}

// weightOf returns the weight of a principal in the policy in use; 1 if the policy does not have the principal.
func (s *Server) weightOf(name string) int {
	policy := s.guard.roles.current()
	if policy == nil {
		return 1
	}
	p := policy.Named(name)
	if p == nil {
		return 1
	}
	return p.Weight()
}

// mayRead fails with storage.ErrBusy while the principal is above its rate.
func (s spender) mayRead() error {
	if s.spending == nil {
		return nil
	}
	return s.read.allow(time.Now(), s.principal.Name(), "reads", s.principal.Rates().Read)
}

// mayWrite fails with storage.ErrBusy while the principal is above its rate.
func (s spender) mayWrite() error {
	if s.spending == nil {
		return nil
	}
	return s.write.allow(time.Now(), s.principal.Name(), "writes", s.principal.Rates().Write)
}

// reads returns deliver, preceded by the count of the delivered bytes.
func (s spender) reads(deliver func(context.Context, []storage.Part)) func(context.Context, []storage.Part) {
	if s.spending == nil {
		return deliver
	}
	return func(ctx context.Context, parts []storage.Part) {
		n := 0
		for i := range parts {
			n += len(parts[i].Bytes)
		}
		s.read.take(time.Now(), n)
		deliver(ctx, parts)
	}
}

// wrote counts bytes that the principal may write.
func (s spender) wrote(n int) {
	if s.spending != nil {
		s.write.take(time.Now(), n)
	}
}
