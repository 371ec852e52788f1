package move

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/client/relay"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testnode"
	"github.com/penstock-kv/penstock/server/storage"
)

// hotSite is a node on which two matches in a window make a prefix hot, and a HotCopier whose turns the test makes.
type hotSite struct {
	*site
	copier *HotCopier
	link   *relay.Relay
}

func newHotSite(t *testing.T, to HotTarget) *hotSite {
	t.Helper()
	hot := storage.HotOptions{MatchesPerSecond: 1e-3, KeptFor: time.Hour}
	h := &hotSite{site: newSiteOf(t, kv.IndexTrie, testnode.Options{HotPrefix: hot})}
	var err error
	h.copier, err = NewHot(HotOptions{Node: h.node.Storage, To: to})
	h.must(err)
	h.link, err = relay.New(relay.Options{From: &local{node: h.node.Storage}, To: inAll{to}, BytesPerSecond: 1 << 30})
	h.must(err)
	t.Cleanup(func() { h.must(h.link.Close(context.Background())) })
	return h
}

// heat matches a sequence until it is hot.
func (h *hotSite) heat(ids []kv.BlockID) {
	h.t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for limit := time.After(time.Minute); len(h.node.Storage.HotPrefixes()) == 0; {
		if _, err := h.Match(h.t.Context(), client.MatchRequest{Namespace: h.ns, IDs: ids}); err != nil {
			h.t.Fatal(err)
		}
		select {
		case <-tick.C:
		case <-limit:
			h.t.Fatal("the sequence is not hot")
		}
	}
}

func (h *hotSite) turn() { h.copier.turn(h.t.Context(), h.link) }

// hint returns the number of the blocks that a reply names.
func (h *hotSite) hint(ids []kv.BlockID) int {
	hint, _ := h.node.Storage.HotHint(h.ns.ID, h.ns.Epoch, ids)
	return hint.Blocks
}

// TestHotDeleted: a block of a hot prefix that is deleted while it is copied is not on the other node after the turn, whichever
// of the nodes deletes it first. A block that only the home deletes later is deleted on the other node by the next turn.
func TestHotDeleted(t *testing.T) {
	testkit.VerifyNone(t)
	for _, late := range []bool{false, true} { // the home deletes it after the copy
		to := newSite(t, kv.IndexTrie)
		w := &target{Store: to.Store}
		from := newHotSite(t, w)
		ids := from.ids(1, 8)
		from.put(ids, 1)
		from.heat(ids)
		remove := func(s *site, id kv.BlockID) {
			if _, err := s.Delete(t.Context(), client.KeysRequest{Namespace: s.ns, IDs: []kv.BlockID{id}}); err != nil {
				t.Error(err)
			}
		}
		var before, after sync.Once
		w.before = func(client.WriteRequest) {
			before.Do(func() {
				remove(to, ids[5])
				if !late {
					remove(from.site, ids[5])
				}
			})
		}
		w.after = func(client.WriteRequest) {
			after.Do(func() {
				if n := to.has(ids, 1); n != 8 {
					t.Errorf("late %t: %d blocks are copied before the deletion is repeated; want 8", late, n)
				}
				if late {
					remove(from.site, ids[5])
				}
			})
		}
		from.turn()
		if n := to.has(ids, 1); n != 5 {
			t.Errorf("late %t: after the turn the other node has %d blocks; want 5", late, n)
		}
		from.turn()
		if n := from.hint(ids); n != 5 {
			t.Errorf("late %t: a reply names %d blocks; want 5", late, n)
		}
		remove(from.site, ids[3])
		from.turn()
		if n := to.has(ids, 1); n != 3 {
			t.Errorf("late %t: after a deletion on the home the other node has %d blocks; want 3", late, n)
		}
		if n := from.hint(ids); n != 3 {
			t.Errorf("late %t: after a deletion on the home a reply names %d blocks; want 3", late, n)
		}
	}
}

// TestHotEpochEnds: when the epoch of a hot prefix has ended on the home, no block is copied, and no prefix has copies.
func TestHotEpochEnds(t *testing.T) {
	testkit.VerifyNone(t)
	to := newSite(t, kv.IndexTrie)
	w := &target{Store: to.Store}
	from := newHotSite(t, w)
	ids := from.ids(1, 8)
	from.put(ids[:4], 1)
	from.heat(ids[:4])
	from.turn()
	from.turn()
	if n := to.has(ids, 1); n != 4 || from.hint(ids) != 4 || from.node.Storage.HotCopies() != 1 {
		t.Fatalf("the other node has %d blocks, a reply names %d, and %d prefixes have copies", n, from.hint(ids), from.node.Storage.HotCopies())
	}
	copies := len(w.roots)
	_, err := from.node.Storage.BumpEpoch(t.Context(), "m", 0, 0)
	from.must(err)
	from.turn()
	if len(w.roots) != copies || from.node.Storage.HotCopies() != 0 {
		t.Errorf("after the end of the epoch there are %d writes more, and %d prefixes have copies", len(w.roots)-copies, from.node.Storage.HotCopies())
	}
	if n := to.has(ids, 1); n != 4 {
		t.Errorf("the other node, where the epoch is live, has %d blocks", n)
	}
}

// TestHotDeletedAtStop: a block that is deleted while it is copied is deleted on the other node when the HotCopier ends during the copy.
func TestHotDeletedAtStop(t *testing.T) {
	testkit.VerifyNone(t)
	to := newSite(t, kv.IndexTrie)
	w := &target{Store: to.Store}
	from := newHotSite(t, w)
	ids := from.ids(1, 8)
	from.put(ids, 1)
	from.heat(ids)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	w.after = func(client.WriteRequest) {
		for _, s := range []*site{to, from.site} {
			if _, err := s.Delete(t.Context(), client.KeysRequest{Namespace: s.ns, IDs: ids[5:6]}); err != nil {
				t.Error(err)
			}
		}
		to.put(ids, 1) // as if the copy had reached the node after the deletion
		stop()
	}
	if err := from.copier.Run(ctx); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if n := to.has(ids, 1); n != 5 {
		t.Errorf("the other node has %d blocks; want 5", n)
	}
}

// hanging is a target whose first Delete does not return before its context ends.
type hanging struct {
	*target
	once sync.Once
	stop context.CancelFunc
}

func (h *hanging) Delete(ctx context.Context, r client.KeysRequest) (_ []client.Presence, err error) {
	h.once.Do(func() {
		h.stop()
		<-ctx.Done()
		err = ctx.Err()
	})
	if err != nil {
		return nil, err
	}
	return h.target.Delete(ctx, r)
}

// TestHotDeletedLate: a turn that ends during the repetition of a deletion leaves it to the next turn.
func TestHotDeletedLate(t *testing.T) {
	testkit.VerifyNone(t)
	to := newSite(t, kv.IndexTrie)
	ctx, stop := context.WithCancel(t.Context())
	w := &hanging{target: &target{Store: to.Store}, stop: stop}
	from := newHotSite(t, w)
	ids := from.ids(1, 8)
	from.put(ids, 1)
	from.heat(ids)
	from.turn()
	if _, err := from.Delete(t.Context(), client.KeysRequest{Namespace: from.ns, IDs: ids[5:6]}); err != nil {
		t.Fatal(err)
	}
	from.copier.turn(ctx, from.link)
	if n := to.has(ids, 1); n != 8 {
		t.Fatalf("the other node has %d blocks; the deletion has not reached it", n)
	}
	from.turn()
	if n := to.has(ids, 1); n != 5 {
		t.Errorf("after the next turn the other node has %d blocks; want 5", n)
	}
}
