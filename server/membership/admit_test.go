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

// renewedLease is a lease whose renewals succeed.
type renewedLease struct{ clientv3.Lease }

func (renewedLease) KeepAliveOnce(context.Context, clientv3.LeaseID) (*clientv3.LeaseKeepAliveResponse, error) {
	return &clientv3.LeaseKeepAliveResponse{}, nil
}

// TestSlowGrant: a node whose lease was granted late, as while etcd elects its leader, is renewed at once and
// serves without a pause.
func TestSlowGrant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ttl = 10 * time.Second
		c := &Cluster{opts: Options{TTL: ttl}, began: time.Now()}
		s := &session{Cluster: c, etcd: &clientv3.Client{Lease: renewedLease{}}, renewed: time.Now(), serving: true}
		time.Sleep(8 * time.Second) // virtual time: the duration of the grant
		s.serveUntilLocked()
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- s.renew(ctx) }()
		for range 200 {
			time.Sleep(ttl / 100) // virtual time
			if err := c.Admit(""); err != nil {
				t.Fatalf("%v after the grant: %v", time.Since(c.began), err)
			}
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("renew: %v", err)
		}
	})
}
