package membership_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/lab/testetcd"
	"github.com/penstock-kv/penstock/server/membership"
)

const rolesKey = "/penstock/roles"

// roles returns the roles document at etcd's endpoints. The test's cleanup closes it.
func (r *rig) roles(timeout time.Duration, endpoints ...string) *membership.Roles {
	r.Helper()
	d, err := membership.NewRoles(membership.RolesOptions{Endpoints: endpoints, Key: rolesKey, Timeout: timeout})
	r.must(err)
	r.Cleanup(func() { r.must(d.Close()) })
	return d
}

// TestRolesSet: a document is replaced only by a caller that has its revision. Of administrators that
// change one revision at the same time, one succeeds.
func TestRolesSet(t *testing.T) {
	r := newRig(t, 1)
	d := r.roles(time.Minute, r.etcd.Endpoints...)
	if got, err := d.Get(r.ctx); err != nil || got.Revision != 0 || len(got.Text) != 0 {
		t.Fatalf("before the first write: %+v, %v", got, err)
	}
	first, err := d.Set(r.ctx, []byte("one"), 0)
	r.must(err)
	if _, err := d.Set(r.ctx, []byte("two"), 0); !errors.Is(err, membership.ErrRolesChanged) || status.Code(err) != codes.Aborted {
		t.Errorf("a second first document: %v", err)
	}
	const admins = 8
	errs := make([]error, admins)
	var all sync.WaitGroup
	for i := range admins {
		all.Go(func() { _, errs[i] = d.Set(r.ctx, fmt.Appendf(nil, "of %d", i), first) })
	}
	all.Wait()
	won := -1
	for i, err := range errs {
		switch {
		case err == nil && won >= 0:
			t.Errorf("administrators %d and %d have replaced revision %d", won, i, first)
		case err == nil:
			won = i
		case !errors.Is(err, membership.ErrRolesChanged):
			t.Errorf("administrator %d: %v", i, err)
		}
	}
	if got, err := d.Get(r.ctx); err != nil || got.Revision <= first || string(got.Text) != fmt.Sprintf("of %d", won) {
		t.Errorf("the document is %q, revision %d, %v; administrator %d has written it", got.Text, got.Revision, err, won)
	}
}

// follower has the last document and the last failure of a Follow.
type follower struct {
	mu       sync.Mutex
	document membership.RolesDocument
	taken    int
	failed   error
}

func (f *follower) take(d membership.RolesDocument) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.document, f.failed = d, nil
	f.taken++
}

func (f *follower) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.failed = err
}

// has reports whether the follower's last document is text, and "" none, and whether reading it failed since.
func (f *follower) has(text string, failed bool) func() bool {
	return func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.taken > 0 && string(f.document.Text) == text && (f.document.Revision == 0) == (text == "") && (f.failed != nil) == failed
	}
}

// TestRolesFollow: a follower gets the first document, each change and a deletion. If a change or a deletion was made while
// the follower could not reach etcd, it gets the change afterwards. Meanwhile it gets the failure, although no connection has ended.
func TestRolesFollow(t *testing.T) {
	r := newRig(t, 1)
	gate := testetcd.NewGate(t, r.etcd.Endpoints[0])
	d, etcd := r.roles(2*time.Second, gate.Addr), r.client()
	f := &follower{}
	ctx, cancel := context.WithCancel(r.ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		d.Follow(ctx, f.take, f.fail)
	}()
	defer func() {
		cancel()
		<-ended
	}()
	put := func(text string) {
		t.Helper()
		_, err := etcd.Put(r.ctx, rolesKey, text)
		r.must(err)
	}
	r.await("no document", f.has("", false))
	put("one")
	r.await("the first document", f.has("one", false))
	put("two")
	r.await("the second document", f.has("two", false))
	gate.Cut()
	put("three")
	r.await("the failure", f.has("two", true))
	gate.Mend()
	r.await("the document that was written meanwhile", f.has("three", false))
	_, err := etcd.Delete(r.ctx, rolesKey)
	r.must(err)
	r.await("the deletion", f.has("", false))
	put("four")
	r.await("the document after the deletion", f.has("four", false))
}

// inTime makes tries until one returns true. A machine that stops this process may fail a few of them.
func (r *rig) inTime(what string, try func() bool) {
	r.Helper()
	for range 10 {
		if try() {
			return
		}
	}
	r.Errorf("%s: in none of 10 tries", what)
}

// TestRolesReadHangs: a read that etcd does not answer fails while the document is in use, early enough for another read.
func TestRolesReadHangs(t *testing.T) {
	const timeout = 2 * time.Second
	r := newRig(t, 1)
	_, err := r.client().Put(r.ctx, rolesKey, "one")
	r.must(err)
	r.inTime("a read that hangs leaves time for another", func() bool {
		gate := testetcd.NewGate(t, r.etcd.Endpoints[0])
		d := r.roles(timeout, gate.Addr)
		ctx, cancel := context.WithCancel(r.ctx)
		defer cancel()
		var until, failed time.Time
		d.Follow(ctx, func(d membership.RolesDocument) {
			until = d.Until
			gate.Cut()
		}, func(error) {
			if !until.IsZero() {
				failed = time.Now()
				cancel()
			}
		})
		return failed.Before(until.Add(-timeout / 4))
	})
}

// TestRolesAfterStall: a process that was stopped until the end of the use of a document reads the document at once afterwards.
func TestRolesAfterStall(t *testing.T) {
	const timeout = 2 * time.Second
	r := newRig(t, 1)
	_, err := r.client().Put(r.ctx, rolesKey, "one")
	r.must(err)
	d := r.roles(timeout, r.etcd.Endpoints[0])
	r.inTime("the next read begins at once", func() bool {
		ctx, cancel := context.WithCancel(r.ctx)
		defer cancel()
		var resumed, read time.Time
		d.Follow(ctx, func(d membership.RolesDocument) {
			if !resumed.IsZero() {
				read = d.Until.Add(-timeout)
				cancel()
				return
			}
			<-time.After(time.Until(d.Until))
			resumed = time.Now()
		}, func(error) {})
		return read.Sub(resumed) < timeout/6
	})
}
