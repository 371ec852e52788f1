package membership

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// virtual returns a clock of the virtual time of a synctest bubble.
func virtual() Clock {
	began := time.Now()
	return func() time.Duration { return time.Since(began) }
}

// TestAdmitEnds: calls are admitted for nine tenths of the TTL after the last renewal was sent,
// whether or not the goroutine that renews the lease runs.
func TestAdmitEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &Cluster{opts: Options{TTL: 10 * time.Second}, serves: newValidity(10*time.Second, virtual())}
		s := &session{Cluster: c, renewed: c.serves.now()}
		s.serveUntilLocked()
		if c.Admit("") == nil {
			t.Error("a node that joins was admitted")
		}
		s.serving = true
		s.serveUntilLocked()
		time.Sleep(9*time.Second - time.Nanosecond)
		if err := c.Admit(""); err != nil {
			t.Errorf("before the end: %v", err)
		}
		time.Sleep(time.Nanosecond)
		if c.Admit("") == nil {
			t.Error("admitted at the end")
		}
	})
}

// renewedLease is a lease whose renewals succeed. Each renewal sends to asked, and waits for answer.
type renewedLease struct {
	clientv3.Lease
	asked, answer chan struct{}
}

func (l renewedLease) KeepAliveOnce(ctx context.Context, _ clientv3.LeaseID) (*clientv3.LeaseKeepAliveResponse, error) {
	select {
	case l.asked <- struct{}{}:
		<-l.answer
		return &clientv3.LeaseKeepAliveResponse{}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// TestSlowGrant: a node whose lease was granted late, as while etcd elects its leader, is renewed at once and
// serves without a pause.
func TestSlowGrant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ttl = 10 * time.Second
		c := &Cluster{opts: Options{TTL: ttl}, serves: newValidity(ttl, virtual())}
		lease := renewedLease{asked: make(chan struct{}), answer: make(chan struct{})}
		granted := c.serves.now() - 8*time.Second // when the request for the lease was sent
		s := &session{Cluster: c, etcd: &clientv3.Client{Lease: lease}, renewed: granted, serving: true}
		s.serveUntilLocked()
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- s.renew(ctx) }()
		for range 8 {
			<-lease.asked // virtual time advances until the node sends a renewal
			if err := c.Admit(""); err != nil {
				t.Errorf("%v after the grant, before the answer of a renewal: %v", c.serves.now(), err)
			}
			lease.answer <- struct{}{}
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("renew: %v", err)
		}
	})
}

// TestRenewalAcrossSuspension: a renewal is under way when the host is suspended for an hour. Its answer does not make the
// node serve, because the time counts from the moment before the renewal was sent, and the session ends.
func TestRenewalAcrossSuspension(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ttl = 10 * time.Second
		awake := virtual()
		var suspended time.Duration
		c := &Cluster{opts: Options{TTL: ttl}, serves: newValidity(ttl, func() time.Duration { return awake() + suspended })}
		lease := renewedLease{asked: make(chan struct{}), answer: make(chan struct{})}
		s := &session{Cluster: c, etcd: &clientv3.Client{Lease: lease}, renewed: c.serves.now(), serving: true}
		s.serveUntilLocked()
		ended := make(chan error, 1)
		go func() { ended <- s.renew(t.Context()) }()
		<-lease.asked
		if err := c.Admit(""); err != nil {
			t.Errorf("before the suspension: %v", err)
		}
		synctest.Wait()
		suspended = time.Hour
		if c.Admit("") == nil {
			t.Error("admitted after the suspension")
		}
		lease.answer <- struct{}{}
		if err := <-ended; err == nil {
			t.Error("the session goes on without a lease")
		}
		if c.Admit("") == nil {
			t.Error("admitted after the answer to a renewal that was sent before the suspension")
		}
	})
}

// BenchmarkAdmit is the cost of the check that precedes each call.
func BenchmarkAdmit(b *testing.B) {
	const ttl = time.Hour
	for name, clock := range map[string]Clock{"boottime": nil, "monotonic": virtual()} {
		b.Run(name, func(b *testing.B) {
			c := &Cluster{opts: Options{TTL: ttl}, serves: newValidity(ttl, clock)}
			c.serves.renewed(c.serves.now())
			for b.Loop() {
				if err := c.Admit("m"); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
