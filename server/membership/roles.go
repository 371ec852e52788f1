package membership

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"

	"github.com/penstock-kv/penstock/internal/options"
)

// RolesOptions configures Roles. Endpoints and Key are required.
type RolesOptions struct {
	// Endpoints, TLS, Username and Password are as in Options.
	Endpoints          []string
	TLS                *tls.Config
	Username, Password string
	// Key is the key of the document.
	Key string
	// Timeout is the longest wait for an answer of etcd, and the time for which a document may be used after
	// a read of it began. A document that is followed is read readsPerTimeout times in it. Default 10 s.
	Timeout time.Duration
}

// RolesDocument is the content of the key.
type RolesDocument struct {
	Text []byte
	// Revision is that of the last change of the key; 0: the key does not exist.
	Revision int64
	// Until ends the use of the document: Timeout after the read of it began. So a document that another one has
	// replaced is used for at most Timeout after that, also if etcd does not answer. A document that a watch has
	// returned has the zero time: the time of the read before it goes on to apply.
	Until time.Time
}

// readsPerTimeout is the number of reads of a followed document within RolesOptions.Timeout. A read fails after a
// readTimeouts-th part of Timeout, and the next one begins a retriesPerTimeout-th part later: 1/3 + 1/4 + 1/8 + 1/4 is less
// than 1, so the use of the document does not end if one read hangs, and the next one succeeds.
const (
	readsPerTimeout   = 3
	readTimeouts      = 4
	retriesPerTimeout = 8
)

// ErrRolesChanged: the document has another revision than the caller has read. Read it again.
var ErrRolesChanged = errors.New("the roles document was changed meanwhile")

// Roles is the roles document in etcd, which the nodes and planners with the same key have in common. All
// methods may be called concurrently.
type Roles struct {
	opts RolesOptions
	etcd *etcdClient
}

// NewRoles returns the document. It does not connect to etcd.
func NewRoles(o RolesOptions) (*Roles, error) {
	options.SetDefault(&o.Timeout, 10*time.Second)
	if len(o.Endpoints) == 0 || o.Key == "" {
		return nil, errors.New("membership: the roles document needs Endpoints and a Key")
	}
	return &Roles{opts: o, etcd: newEtcdClient(o.Endpoints, o.TLS, o.Username, o.Password, o.Timeout)}, nil
}

// Key returns the key of the document.
func (r *Roles) Key() string { return r.opts.Key }

// Get returns the document.
func (r *Roles) Get(ctx context.Context) (RolesDocument, error) {
	d, _, err := r.read(ctx, RolesDocument{})
	return d, err
}

// Set replaces the document that has the given revision, and returns the revision of the new one. It
// returns ErrRolesChanged if the document has another revision.
func (r *Roles) Set(ctx context.Context, text []byte, revision int64) (int64, error) {
	resp, err := r.do(ctx, clientv3.OpTxn(
		[]clientv3.Cmp{clientv3.Compare(clientv3.ModRevision(r.opts.Key), "=", revision)}, // 0 for a key that does not exist
		[]clientv3.Op{clientv3.OpPut(r.opts.Key, string(text))}, nil))
	if err != nil {
		return 0, err
	}
	if !resp.Txn().Succeeded {
		return 0, refusal{fmt.Errorf("%w: it does not have revision %d; read it again, and make the change there", ErrRolesChanged, revision), codes.Aborted}
	}
	return resp.Txn().Header.Revision, nil
}

func (r *Roles) do(ctx context.Context, op clientv3.Op) (clientv3.OpResponse, error) {
	etcd, err := r.etcd.open()
	if err != nil {
		return clientv3.OpResponse{}, r.failed(err)
	}
	ctx, cancel := context.WithTimeout(ctx, r.opts.Timeout)
	defer cancel()
	resp, err := etcd.Do(ctx, op)
	if err != nil {
		return resp, r.failed(err)
	}
	return resp, nil
}

func (r *Roles) failed(err error) error {
	return refusal{fmt.Errorf("etcd at %s, key %s: %w", strings.Join(r.opts.Endpoints, ","), r.opts.Key, err), codes.Unavailable}
}

// Follow calls take with the document, at first and after each change, and may call it again with an
// unchanged one. It calls failed for each attempt to read the document that fails. It returns when ctx ends.
func (r *Roles) Follow(ctx context.Context, take func(RolesDocument), failed func(error)) {
	var last RolesDocument
	keep := func(d RolesDocument) {
		last = d
		take(d)
	}
	for ctx.Err() == nil {
		began := time.Now()
		limited, cancel := context.WithTimeout(ctx, r.opts.Timeout/readTimeouts)
		d, rev, err := r.read(limited, last)
		cancel()
		if err == nil {
			keep(d)
			r.watch(ctx, rev+1, began.Add(r.opts.Timeout/readsPerTimeout), keep)
			continue
		}
		if ctx.Err() != nil {
			return
		}
		failed(err)
		select {
		case <-time.After(r.opts.Timeout / retriesPerTimeout):
		case <-ctx.Done():
		}
	}
}

// read returns the document, and the revision of etcd at which it was read. last is a document that was read before, or the
// zero document: etcd does not send the text if it is unchanged, because each node reads up to 1 MiB several times in Timeout.
func (r *Roles) read(ctx context.Context, last RolesDocument) (d RolesDocument, rev int64, err error) {
	until := time.Now().Add(r.opts.Timeout)
	resp, err := r.do(ctx, clientv3.OpTxn(
		[]clientv3.Cmp{clientv3.Compare(clientv3.ModRevision(r.opts.Key), "=", last.Revision)}, // 0 for a key that does not exist
		nil, []clientv3.Op{clientv3.OpGet(r.opts.Key)}))
	if err != nil {
		return d, 0, err
	}
	txn := resp.Txn()
	if txn.Succeeded {
		d = last
	} else {
		for _, kv := range txn.Responses[0].GetResponseRange().Kvs {
			d.Text, d.Revision = kv.Value, kv.ModRevision
		}
	}
	d.Until = until
	return d, txn.Header.Revision, nil
}

// watch calls take after each change, until the given time: a watch reports no error while etcd does not answer, so
// Follow reads the document between two watches.
func (r *Roles) watch(ctx context.Context, rev int64, until time.Time, take func(RolesDocument)) {
	etcd, err := r.etcd.open()
	if err != nil {
		return
	}
	ctx, end := context.WithDeadline(clientv3.WithRequireLeader(ctx), until)
	defer end()
	for resp := range etcd.Watch(ctx, r.opts.Key, clientv3.WithRev(rev)) {
		if resp.Err() != nil {
			return // Follow reads the document, which fails too if etcd has no leader
		}
		for _, e := range resp.Events {
			if e.Type == clientv3.EventTypeDelete {
				take(RolesDocument{})
				continue
			}
			take(RolesDocument{Text: e.Kv.Value, Revision: e.Kv.ModRevision})
		}
	}
}

// Close closes the connection to etcd. No other method runs, or is called afterwards.
func (r *Roles) Close() error { return r.etcd.close() }
