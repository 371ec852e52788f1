package membership

import (
	"math"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/internal/sys"
)

// Clock returns the time since some fixed moment. It must advance while the host is suspended, as etcd's clock
// does on other hosts, and must not follow changes of the wall clock.
type Clock func() time.Duration

// validity is the time up to which a lease certainly exists in etcd: nine tenths of its TTL, from the moment before
// the last renewal was sent that etcd confirmed. A tenth is left because this clock and etcd's may run at different
// rates. All methods may be called concurrently.
type validity struct {
	now Clock
	ttl time.Duration
	// until is a time of now, in nanoseconds.
	until atomic.Int64
}

// newValidity returns a validity that has ended. A nil clock is sys.SinceBoot.
func newValidity(ttl time.Duration, clock Clock) *validity {
	if clock == nil {
		clock = sys.SinceBoot
	}
	v := &validity{now: clock, ttl: ttl}
	v.end()
	return v
}

// renewed is called when etcd has confirmed a grant or a renewal that was sent at a time of now.
func (v *validity) renewed(sent time.Duration) { v.until.Store(int64(sent + v.ttl - v.ttl/10)) }

// end makes holds return false until the next call of renewed.
func (v *validity) end() { v.until.Store(math.MinInt64) }

// holds reports whether the lease certainly exists.
func (v *validity) holds() bool { return v.left() > 0 }

// left returns the time until holds returns false, at most 0 if it does already.
func (v *validity) left() time.Duration {
	until := v.until.Load()
	if until == math.MinInt64 {
		return 0
	}
	return time.Duration(until) - v.now()
}
