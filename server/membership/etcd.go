package membership

import (
	"crypto/tls"
	"fmt"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// etcdClient is a client of etcd that open opens at its first call: with a user name, a new client needs an
// answer of etcd. All methods may be called concurrently.
type etcdClient struct {
	config clientv3.Config
	client atomic.Pointer[clientv3.Client]
}

// newEtcdClient returns a client that is not open. ttl is the time to live of the client's leases, or the
// longest wait for an answer if it has no leases.
func newEtcdClient(endpoints []string, secure *tls.Config, username, password string, ttl time.Duration) *etcdClient {
	return &etcdClient{config: clientv3.Config{
		Endpoints: endpoints, TLS: secure, Username: username, Password: password,
		DialTimeout: ttl / 4, DialKeepAliveTime: ttl / 4, DialKeepAliveTimeout: ttl / 4,
		PermitWithoutStream: true,
		Logger:              zap.NewNop(), // this package logs what an operator can act on
	}}
}

// open returns the client. After an error the next call tries again.
func (e *etcdClient) open() (*clientv3.Client, error) {
	if c := e.opened(); c != nil {
		return c, nil
	}
	c, err := clientv3.New(e.config)
	if err != nil {
		return nil, fmt.Errorf("connect to etcd: %w", err)
	}
	if !e.client.CompareAndSwap(nil, c) { // a concurrent call was first
		return e.opened(), c.Close()
	}
	return c, nil
}

// opened returns the client, nil if no call of open has succeeded.
func (e *etcdClient) opened() *clientv3.Client { return e.client.Load() }

// close closes the client if it is open. No other call runs or follows.
func (e *etcdClient) close() error {
	if c := e.opened(); c != nil {
		return c.Close()
	}
	return nil
}
