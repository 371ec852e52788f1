package membership

import (
	"context"
	"errors"
	"sync"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// appliedWatch follows the records of the members for all changes of this node that wait for them. So n changes at the
// same time cost etcd one watch and the node one decoding of each record, and not n.
type appliedWatch struct {
	mu      sync.Mutex
	waiting map[*waiter]bool
	// closed: the watch has ended, and takes no more waiters.
	closed bool

	cancel context.CancelFunc
	ended  chan struct{}
}

// waiter is one change that waits until the members have applied it. appliedWatch.mu guards the fields.
type waiter struct {
	// rev is the revision of the change.
	rev int64
	// read is the revision at which the list of members was read; 0: it is not read yet. behind has
	// the keys of the members that have not applied the change, as of the last event.
	read   int64
	behind map[string]bool
	// early are the events that arrived before the list was read.
	early []*clientv3.Event
	// done is closed when behind is empty, or err is set.
	done chan struct{}
	err  error
}

// enterApplied adds a waiter for the change of revision rev, and begins the watch if there is none. A change that joins a
// watch may have a lower revision than the one with which the watch began. But it reads the list of members afterwards, so
// at a revision at or above that one, and the watch has each later event.
func (c *Cluster) enterApplied(rev int64) (*appliedWatch, *waiter) {
	c.mu.Lock()
	defer c.mu.Unlock()
	w := &waiter{rev: rev, done: make(chan struct{})}
	if a := c.applied; a != nil && a.add(w) {
		return a, w
	}
	ctx, cancel := context.WithCancel(context.Background())
	a := &appliedWatch{waiting: map[*waiter]bool{w: true}, cancel: cancel, ended: make(chan struct{})}
	c.applied = a
	go func() {
		defer close(a.ended)
		a.run(c.etcd.opened().Watch(ctx, c.membersPrefix(), clientv3.WithPrefix(), clientv3.WithRev(rev+1)))
	}()
	return a, w
}

// add adds a waiter, unless the watch has ended.
func (a *appliedWatch) add(w *waiter) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.closed {
		a.waiting[w] = true
	}
	return !a.closed
}

// leave removes a waiter. The last one ends the watch.
func (a *appliedWatch) leave(w *waiter) {
	a.mu.Lock()
	delete(a.waiting, w)
	last := len(a.waiting) == 0
	a.closed = a.closed || last
	a.mu.Unlock()
	if last {
		a.cancel()
		<-a.ended
	}
}

// run passes the events to the waiters until the watch ends.
func (a *appliedWatch) run(changes clientv3.WatchChan) {
	err := errors.New("the watch of the members has ended")
	for resp := range changes {
		if e := resp.Err(); e != nil {
			err = e
			break
		}
		a.mu.Lock()
		for _, e := range resp.Events {
			a.passLocked(e)
		}
		a.mu.Unlock()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.closed = true
	for w := range a.waiting {
		w.endLocked(err)
	}
}

// passLocked passes an event to each waiter. It decodes the record once.
func (a *appliedWatch) passLocked(e *clientv3.Event) {
	var m Member
	var err error
	if e.Type != clientv3.EventTypeDelete {
		m, err = decodeMember(e.Kv.Key, e.Kv.Value)
	}
	key := string(e.Kv.Key)
	for w := range a.waiting {
		switch {
		case w.read == 0:
			w.early = append(w.early, e)
		case err != nil && w.behind[key]:
			w.endLocked(err)
		case e.Kv.ModRevision > w.read && w.has(m, e.Type == clientv3.EventTypeDelete):
			w.arrivedLocked(key)
		}
	}
}

// has reports whether a member with this record serves no namespace as it was before the change. A member that joins has
// read the namespaces at a revision at or above rev, because otherwise its transaction fails.
func (w *waiter) has(m Member, deleted bool) bool {
	return deleted || !m.serves() || m.Applied >= w.rev
}

func (w *waiter) arrivedLocked(key string) {
	if delete(w.behind, key); len(w.behind) == 0 {
		w.endLocked(nil)
	}
}

func (w *waiter) endLocked(err error) {
	select {
	case <-w.done:
	default:
		w.err = err
		close(w.done)
	}
}

// list takes over the list of members as of the revision read, and the events that came before it.
func (a *appliedWatch) list(w *waiter, behind map[string]bool, read int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	w.behind, w.read = behind, read
	if len(behind) == 0 {
		w.endLocked(nil)
	}
	for _, e := range w.early {
		if e.Kv.ModRevision <= read {
			continue
		}
		deleted, m, err := e.Type == clientv3.EventTypeDelete, Member{}, error(nil)
		if !deleted {
			if m, err = decodeMember(e.Kv.Key, e.Kv.Value); err != nil {
				w.endLocked(err)
				break
			}
		}
		if w.has(m, deleted) {
			w.arrivedLocked(string(e.Kv.Key))
		}
	}
	w.early = nil
}

// awaitApplied waits until each member that serves has applied the changes up to the revision rev.
// It waits for at most twice the TTL: a member that has stopped leaves the list within one TTL.
func (c *Cluster) awaitApplied(ctx context.Context, rev int64) error {
	ctx, cancel := context.WithTimeout(ctx, 2*c.opts.TTL)
	defer cancel()
	a, w := c.enterApplied(rev)
	defer a.leave(w)
	all, read, err := c.members(ctx)
	if err != nil {
		return err
	}
	behind := make(map[string]bool)
	for _, m := range all {
		if !w.has(m, false) {
			behind[c.membersPrefix()+m.Name] = true
		}
	}
	a.list(w, behind, read)
	select {
	case <-w.done:
		if w.err != nil && ctx.Err() == nil {
			return c.failed(w.err)
		}
		if w.err == nil {
			return nil
		}
	case <-ctx.Done():
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return c.notApplied(w.behind)
}
