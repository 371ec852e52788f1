package membership

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// TestAdmitEnds: calls are admitted for nine tenths of the TTL after the last renewal was sent,
// whether or not the goroutine that renews the lease runs.
func TestAdmitEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &Cluster{opts: Options{TTL: 10 * time.Second}, began: time.Now()}
		s := &session{Cluster: c, renewed: time.Now()}
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
		c := &Cluster{opts: Options{TTL: ttl}, began: time.Now()}
		lease := renewedLease{asked: make(chan struct{}), answer: make(chan struct{})}
		granted := time.Now().Add(-8 * time.Second) // when the request for the lease was sent
		s := &session{Cluster: c, etcd: &clientv3.Client{Lease: lease}, renewed: granted, serving: true}
		s.serveUntilLocked()
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- s.renew(ctx) }()
		for range 8 {
			<-lease.asked // virtual time advances until the node sends a renewal
			if err := c.Admit(""); err != nil {
				t.Errorf("%v after the grant, before the answer of a renewal: %v", time.Since(c.began), err)
			}
			lease.answer <- struct{}{}
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("renew: %v", err)
		}
	})
}
