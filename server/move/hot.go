package move

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/client/relay"
	"github.com/penstock-kv/penstock/internal/options"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
)

// HotTarget is the part of the cluster that gets copies of hot prefixes. *client.Store implements it.
type HotTarget interface {
	Target
	DemoteCopies(ctx context.Context, ns kv.Namespace, epoch kv.Epoch, ids []kv.BlockID, replicas int) error
}

// HotOptions are the options of a HotCopier. Node and To are required.
type HotOptions struct {
	// Node is the node whose hot prefixes are copied, and To a client of the cluster that has no draining members.
	Node *storage.Node
	To   HotTarget
	// Copies is the number of copies of a hot prefix, in addition to the replicas of its namespace. Default 1.
	Copies int
	// BytesPerSecond is the largest rate of all copies together. Default 256 MiB/s.
	BytesPerSecond int64
	// ChunkBytes is as in Options. Default 4 MiB.
	ChunkBytes int64
	// Every is the time between two comparisons of the hot prefixes with their copies. RetryMax bounds the time after which a
	// copy that failed is tried again; it begins with Every and doubles with each failure. Defaults 1 s and 30 s.
	Every, RetryMax time.Duration
	Logger          *slog.Logger
}

// EnsureDefaults fills the fields that are zero.
func (o *HotOptions) EnsureDefaults() {
	options.SetDefault(&o.Copies, 1)
	options.SetDefault(&o.BytesPerSecond, 256<<20)
	options.SetDefault(&o.ChunkBytes, 4<<20)
	options.SetDefault(&o.Every, time.Second)
	options.SetDefault(&o.RetryMax, 30*time.Second)
	options.SetDefault(&o.Logger, slog.New(slog.DiscardHandler))
}

// Validate returns an error for the first invalid field.
func (o *HotOptions) Validate() error {
	switch {
	case o.Node == nil || o.To == nil:
		return errors.New("move: Node and To are required")
	case o.Copies < 1 || o.BytesPerSecond < 1:
		return fmt.Errorf("move: Copies %d and BytesPerSecond %d must be positive", o.Copies, o.BytesPerSecond)
	case o.Every <= 0 || o.RetryMax < o.Every:
		return fmt.Errorf("move: Every %v must be positive, and RetryMax %v not below it", o.Every, o.RetryMax)
	}
	return nil
}

// HotCopier copies the hot prefixes of one node to further nodes, as if their namespaces had more replicas.
type HotCopier struct {
	opts HotOptions
	// spread are the prefixes with copies or with a failed copy, at most as many as the node has hot prefixes and the ones that
	// have just ended. Only Run uses it.
	spread map[hotKey]*spreading
	// seq is the number of the last event of the node whose deletion was repeated.
	seq uint64
}

// hotKey names a hot prefix.
type hotKey struct {
	namespace kv.NamespaceID
	epoch     kv.Epoch
	first     kv.BlockID
}

// spreading is a hot prefix of which other nodes may have blocks.
type spreading struct {
	ns       kv.Namespace
	epoch    kv.Epoch
	ids      []kv.BlockID
	replicas int
	// placed is the number of the first blocks that have all copies.
	placed int
	// wait is the time until the next try after a failure, and again the moment of it.
	wait  time.Duration
	again time.Time
}

// NewHot returns a HotCopier.
func NewHot(o HotOptions) (*HotCopier, error) {
	o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	return &HotCopier{opts: o, spread: make(map[hotKey]*spreading), seq: o.Node.Events().Last()}, nil
}

// Run copies hot prefixes until ctx ends, and returns the error of ctx, or an error of its memory.
func (h *HotCopier) Run(ctx context.Context) (err error) {
	link, err := relay.New(relay.Options{
		From: &local{node: h.opts.Node}, To: inAll{h.opts.To}, BytesPerSecond: float64(h.opts.BytesPerSecond), ChunkBytes: h.opts.ChunkBytes,
	})
	if err != nil {
		return fmt.Errorf("move: hot prefixes: %w", err)
	}
	defer h.opts.Node.SetHotCopies(0)
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		h.deleteAgain(closing) // ctx may have ended the last copy before its deletions were repeated
		err = errors.Join(err, link.Close(closing))
	}()
	for {
		turn, cancel := context.WithTimeout(ctx, h.opts.RetryMax) // a node that hangs does not stop the copies to others for good
		h.turn(turn, link)
		cancel()
		if !sleep(ctx, h.opts.Every) {
			return ctx.Err()
		}
	}
}

// turn compares each hot prefix with its copies, copies the absent blocks, and ends the copies of the prefixes that are
// not hot any more.
func (h *HotCopier) turn(ctx context.Context, link *relay.Relay) {
	h.deleteAgain(ctx)
	hot := make(map[hotKey]bool)
	for _, p := range h.opts.Node.HotPrefixes() {
		ns, ok := h.namespace(p)
		if !ok || ctx.Err() != nil {
			continue
		}
		key := hotKey{p.Namespace, p.Epoch, p.IDs[0]}
		hot[key] = true
		s := h.spread[key]
		if s == nil {
			s = new(spreading)
			h.spread[key] = s
		}
		s.ns, s.epoch, s.ids, s.replicas = ns, p.Epoch, p.IDs, min(ns.Copies()+h.opts.Copies, kv.MaxReplicas)
		if s.replicas > ns.Copies() && !time.Now().Before(s.again) {
			h.copy(ctx, link, p, s)
		}
	}
	for key, s := range h.spread {
		if hot[key] || ctx.Err() != nil {
			continue
		}
		delete(h.spread, key)
		if err := h.opts.To.DemoteCopies(ctx, s.ns, s.epoch, s.ids, s.replicas); err != nil && !errors.Is(err, client.ErrMismatch) && !errors.Is(err, client.ErrNotFound) {
			h.opts.Logger.Warn("the copies of a prefix that is not hot any more cannot be made the first to be evicted", "namespace", s.ns.Name, "blocks", len(s.ids), "err", err)
		}
	}
	copies := 0
	for _, s := range h.spread {
		if s.placed > 0 {
			copies++
		}
	}
	h.opts.Node.SetHotCopies(copies)
}

// namespace returns the namespace of a hot prefix if its epoch is live.
func (h *HotCopier) namespace(p storage.HotPrefix) (kv.Namespace, bool) {
	all := h.opts.Node.Namespaces()
	i := slices.IndexFunc(all, func(ns kv.Namespace) bool { return ns.ID == p.Namespace })
	if i < 0 || !all[i].IsLive(p.Epoch) {
		return kv.Namespace{}, false
	}
	return all[i], true
}

// copy compares a hot prefix with its copies and records the blocks that have all copies. Then it copies other blocks, as many
// as the rate allows in one second.
func (h *HotCopier) copy(ctx context.Context, link *relay.Relay, p storage.HotPrefix, s *spreading) {
	node, ids := h.opts.Node, p.IDs
	stored, _, err := node.Exists(s.ns.Name, s.epoch, ids, false)
	if err != nil {
		h.place(p, s, 0)
		return // the epoch or the namespace has ended
	}
	if i := slices.IndexFunc(stored, func(groups trie.GroupSet) bool { return groups == 0 }); i >= 0 {
		ids = ids[:i]
	}
	if len(ids) == 0 {
		h.place(p, s, 0)
		return
	}
	wide := s.ns
	wide.Replicas = s.replicas
	have, err := h.opts.To.ExistsGroups(ctx, client.KeysRequest{Namespace: wide, IDs: ids, Epoch: s.epoch})
	if err != nil {
		h.place(p, s, 0)
		h.failed(ctx, s, err.Error())
		return
	}
	placed := slices.Index(have[0], client.Absent)
	if placed < 0 {
		placed = len(ids)
	}
	h.place(p, s, placed)
	var absent []relay.Piece
	room := h.opts.BytesPerSecond
	for i := placed; i < len(ids) && (room >= s.ns.Geometry.PieceBytes(0) || len(absent) == 0); i++ {
		if have[0][i] == client.Absent {
			absent = append(absent, relay.Piece{Block: i})
			room -= s.ns.Geometry.PieceBytes(0)
		}
	}
	if len(absent) == 0 {
		s.wait = 0
		return
	}
	done, err := link.CopyPieces(ctx, wide, s.epoch, ids, absent)
	node.CountHotCopies(done.Pieces, done.Bytes)
	switch {
	case err != nil:
		h.failed(ctx, s, err.Error())
	case done.Reason != "":
		h.failed(ctx, s, done.Reason+": "+done.Detail)
	default:
		s.wait = 0
	}
	h.deleteAgain(ctx)
}

// place records the number of the first blocks of a hot prefix that have all copies.
func (h *HotCopier) place(p storage.HotPrefix, s *spreading, blocks int) {
	s.placed = blocks
	h.opts.Node.PlaceHot(p, blocks, s.replicas)
}

// failed makes the copies of a prefix wait, longer after each failure.
func (h *HotCopier) failed(ctx context.Context, s *spreading, reason string) {
	if ctx.Err() != nil {
		return
	}
	s.wait = min(max(2*s.wait, h.opts.Every), h.opts.RetryMax)
	s.again = time.Now().Add(s.wait)
	h.opts.Logger.Warn("a hot prefix cannot be copied to other nodes; it is tried again", "namespace", s.ns.Name, "blocks", len(s.ids), "after", s.wait, "reason", reason)
}

// deleteAgain repeats, on the other nodes, the deletions of blocks with copies on this node since the last call.
func (h *HotCopier) deleteAgain(ctx context.Context) {
	again := repeater{node: h.opts.Node, to: h.opts.To, log: h.opts.Logger}
	h.seq = again.since(ctx, h.seq, func(e storage.Event) bool {
		for _, s := range h.spread {
			if s.ns.Name == e.Namespace && s.epoch == e.Epoch && slices.ContainsFunc(e.IDs, func(id kv.BlockID) bool { return slices.Contains(s.ids, id) }) {
				return true
			}
		}
		return false
	})
}
