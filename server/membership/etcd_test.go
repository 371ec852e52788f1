package membership

import (
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/penstock-kv/penstock/internal/testkit"
)

// TestOneClient: concurrent calls of open return one client. The others that were made are closed; the goroutines of
// a client that is left open fail the test.
func TestOneClient(t *testing.T) {
	testkit.VerifyNone(t)
	const calls = 16
	e := newEtcdClient([]string{testkit.Port(t)}, nil, "", "", time.Minute) // without a user name, open needs no answer
	clients := make([]*clientv3.Client, calls)
	var wg sync.WaitGroup
	for i := range clients {
		wg.Go(func() {
			c, err := e.open()
			if err != nil {
				t.Error(err)
			}
			clients[i] = c
		})
	}
	wg.Wait()
	for i, c := range clients {
		if c == nil || c != clients[0] {
			t.Errorf("call %d returned another client", i)
		}
	}
	if err := e.close(); err != nil {
		t.Error(err)
	}
}
