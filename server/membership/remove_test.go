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
