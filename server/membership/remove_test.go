package membership_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/membership"
)

// names returns the names of the members and of the removed nodes.
func (r *rig) names(n *node) string {
	r.Helper()
	list, err := n.List(r.ctx)
	r.must(err)
	var names []string
	for _, m := range list.Members {
		names = append(names, m.Name)
	}
	return fmt.Sprint(names, list.Removed)
}

// refused fails the test unless the error has the code and the text.
func (r *rig) refused(err error, code codes.Code, text string) {
	r.Helper()
	if err == nil || status.Code(err) != code || !strings.Contains(err.Error(), text) {
		r.Errorf("got %v; want %v with %q", err, code, text)
	}
}

// TestRemove: a node is removed when it is drained and down. Its volumes are not admitted until the node is
// readmitted. A node with other volumes may have the name. A dry run changes nothing.
func TestRemove(t *testing.T) {
	r := newRig(t, 1)
	a, b := r.join("a"), r.join("b")
	remove := func(name string, force, dry bool) (membership.Removed, error) {
		return a.RemoveMember(r.ctx, name, force, dry)
	}
	_, err := remove("x", true, false)
	r.refused(err, codes.NotFound, `no node "x"`)
	_, err = remove("b", false, false)
	r.refused(err, codes.FailedPrecondition, "not drained, and 5 blocks would be lost")
	order := membership.Drain{Since: time.Unix(1, 0).UTC()}
	r.must(a.DrainMember(r.ctx, "b", order))
	b.move.Store(&membership.Move{Order: order.ID(), Phase: membership.MoveDone, Blocks: 5, CopiedBlocks: 5})
	b.Moved()
	r.await("the drain is done", func() bool {
		_, err := remove("b", false, true)
		return err != nil && strings.Contains(err.Error(), "stop its process first")
	})
	b.move.Store(nil) // the copies end before the node does
	b.Moved()
	b.leave()
	lost, err := remove("b", false, true)
	r.must(err)
	if want := (membership.Removed{Leases: 2}); lost != want {
		t.Errorf("lost %+v; want %+v", lost, want)
	}
	if got := r.names(a); got != "[a] []" {
		t.Errorf("after a dry run: %s", got)
	}
	_, err = remove("b", false, false)
	r.must(err)
	if got := r.names(a); got != "[a] [b]" {
		t.Errorf("after the removal: %s", got)
	}
	_, err = remove("b", true, false)
	r.refused(err, codes.FailedPrecondition, "removed already")
	_, err = remove("a", true, false)
	r.refused(err, codes.FailedPrecondition, "no other node of the cluster serves")

	again := r.begin("b", "b.example:7420", b.store)
	r.await("the volumes are refused", func() bool {
		err := again.Admit("")
		return err != nil && strings.Contains(err.Error(), "penstock cluster readmit b")
	})
	again.leave()
	wiped := r.join("b")
	if got := r.names(a); got != "[a b] []" {
		t.Errorf("with other volumes: %s", got)
	}
	if all, err := a.Members(r.ctx); err != nil || all[1].State != membership.Serving {
		t.Errorf("the node with other volumes: %+v, %v", all, err)
	}
	wiped.leave()
	if got := r.names(a); got != "[a] []" {
		t.Errorf("the node with other volumes is down: %s", got)
	}
	again = r.begin("b", "b.example:7420", b.store)
	r.await("the volumes are refused again", func() bool {
		err := again.Admit("")
		return err != nil && strings.Contains(err.Error(), "readmit")
	})
	r.must(a.ReadmitMember(r.ctx, "b"))
	r.joined(again)
	r.must(again.Admit(""))
	r.refused(a.ReadmitMember(r.ctx, "b"), codes.NotFound, "was removed")
}

// TestRemoveServing: a node that serves and is removed by force serves nothing when the call returns, and no
// change of a namespace waits for it.
func TestRemoveServing(t *testing.T) {
	r := newRig(t, 1)
	a, b := r.join("a"), r.join("b")
	_, err := a.CreateNamespace(r.ctx, kv.Namespace{Name: "m", Geometry: geo, Index: kv.IndexTrie})
	r.must(err)
	lost, err := a.RemoveMember(r.ctx, "b", true, true)
	r.must(err)
	if want := (membership.Removed{Up: true, LostBlocks: 5, LostBytes: 1 << 20, Leases: 2}); lost != want {
		t.Errorf("the dry run lost %+v; want %+v", lost, want)
	}
	r.must(b.Admit("m"))
	lost, err = a.RemoveMember(r.ctx, "b", true, false)
	r.must(err)
	if !lost.Up {
		t.Errorf("lost %+v", lost)
	}
	if err := b.Admit("m"); err == nil {
		t.Error("the node serves after its removal")
	}
	if got := r.names(a); got != "[a] [b]" {
		t.Errorf("members and removed nodes %s", got)
	}
	bumped, err := a.BumpEpoch(r.ctx, "m", 0, 1)
	r.must(err)
	if !slices.Equal(bumped.Live, []kv.Epoch{2}) {
		t.Errorf("bumped %+v", bumped)
	}
	if e := b.epoch("m"); e != 1 {
		t.Errorf("the removed node has epoch %d", e)
	}
}

// down returns the nodes that are down, as a node lists them.
func (r *rig) down(n *node) []membership.NodeRecord {
	r.Helper()
	list, err := n.ListNodes(r.ctx)
	r.must(err)
	return list.Down
}

// TestDown: a node that leaves, or whose lease ends, is down with its last record and the time of the end. It is no
// member, and not in the list from which clients choose nodes. When it has joined again, or is removed, it is not down.
func TestDown(t *testing.T) {
	r := newRig(t, 1)
	a, b, c := r.join("a"), r.join("b"), r.join("c")
	if list, err := a.ListNodes(r.ctx); err != nil || len(list.Down) > 0 || len(list.Details) != 3 || len(list.Details["b"].Volumes) != 1 || list.Details["b"].NICs[0].BitsPerSecond != 400e9 {
		t.Fatalf("all are up: %+v, %v", list, err)
	}
	before := time.Now()
	b.leave()
	c.cut() // the lease ends by itself
	r.await("the ends of both leases are noted", func() bool {
		all := r.down(a)
		return len(all) == 2 && !all[0].Left.IsZero() && !all[1].Left.IsZero()
	})
	for i, name := range []string{"b", "c"} {
		d := r.down(a)[i]
		if d.Name != name || d.Zone != "rack-"+name || d.CapacityBytes != 64<<20 || d.Blocks != 5 || d.Leases != 2 || len(d.Volumes) != 1 || d.Volumes[0].Path != "/"+name || d.Left.Before(before) || d.Written.IsZero() || d.Written.After(d.Left) {
			t.Errorf("down is %+v", d)
		}
	}
	if got := r.names(a); got != "[a] []" {
		t.Errorf("the members are %s", got)
	}
	if list, err := a.List(r.ctx); err != nil || list.Down != nil || list.Details != nil {
		t.Errorf("the list of the clients has %+v, %v", list, err)
	}
	c.mend()
	r.await("the node that was cut off is back", func() bool { return r.names(a) == "[a c] []" })
	if all := r.down(a); len(all) != 1 || all[0].Name != "b" {
		t.Errorf("after the return of c down are %+v", all)
	}
	_, err := a.RemoveMember(r.ctx, "b", true, false)
	r.must(err)
	if all := r.down(a); len(all) > 0 {
		t.Errorf("after the removal of b down are %+v", all)
	}
	r.must(a.ReadmitMember(r.ctx, "b"))
	if all := r.down(a); len(all) != 1 || all[0].Name != "b" {
		t.Errorf("after the readmission of b down are %+v", all)
	}
}

// TestRecordsEnd: the record of a node that was removed long ago, and that of the volumes of a node that has others, are
// deleted when another node leaves. A record of a recent removal stays, and so does that of a node that is down.
func TestRecordsEnd(t *testing.T) {
	r := newRig(t, 1)
	a := r.join("a")
	var gone []*node
	for _, name := range []string{"old", "recent", "down", "other"} {
		n := r.join(name)
		n.leave()
		gone = append(gone, n)
	}
	key := func(n *node) string { return fmt.Sprintf("/penstock/nodes/%p", n.store) }
	for _, name := range []string{"old", "recent"} {
		_, err := a.RemoveMember(r.ctx, name, true, false)
		r.must(err)
	}
	etcd := r.client()
	_, err := etcd.Put(r.ctx, fmt.Sprintf("/penstock/removed/%p", gone[0].store), fmt.Sprintf(`{"version":1,"name":"old","since":%q}`, time.Now().Add(-25*time.Hour).Format(time.RFC3339)))
	r.must(err)
	other := r.join("other") // with other volumes
	// The record of older volumes of the last node has the highest key, so it is deleted after all others.
	const end = "/penstock/nodes/~"
	_, err = etcd.Put(r.ctx, end, `{"name":"last","store":"~","state":"serving"}`)
	r.must(err)
	last := r.join("last")
	last.leave()
	has := func(n *node) bool {
		resp, err := etcd.Get(r.ctx, key(n))
		r.must(err)
		return len(resp.Kvs) == 1
	}
	r.await("the records are deleted", func() bool {
		resp, err := etcd.Get(r.ctx, end)
		r.must(err)
		return len(resp.Kvs) == 0 && !has(gone[0]) && !has(gone[3])
	})
	for _, n := range []*node{a, gone[1], gone[2], other, last} {
		if !has(n) {
			t.Errorf("the record %s is deleted", key(n))
		}
	}
	again := r.begin("old", "old.example:7420", gone[0].store)
	r.await("the volumes are refused", func() bool {
		err := again.Admit("")
		return err != nil && strings.Contains(err.Error(), "readmit")
	})
}
