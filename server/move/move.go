package move

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/client/relay"
	"github.com/penstock-kv/penstock/internal/options"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
)

// Target is the part of the cluster that gets the blocks. *client.Store implements it. Its Write and Exists
// are called with AllCopies.
type Target interface {
	relay.Store
	Exists(ctx context.Context, r client.KeysRequest, touch bool) ([]client.Presence, error)
	Placements() uint64
}

// inAll is a Target to which every replica is written.
type inAll struct{ Target }

// Write implements relay.Store.
func (t inAll) Write(ctx context.Context, r client.WriteRequest) (client.WriteResult, error) {
	r.AllCopies = true
	return t.Target.Write(ctx, r)
}

// Options of a Mover. Node and To are required.
type Options struct {
	// Node is the node whose blocks are copied.
	Node *storage.Node
	// To is a client of the cluster that has no draining members.
	To Target
	// BytesPerSecond is the largest rate of all copies together. Default 256 MiB/s.
	BytesPerSecond int64
	// ChunkBytes is the largest size of the blocks that are copied at a time. The node's limit of a
	// read must not be less. Default 4 MiB.
	ChunkBytes int64
	// Parallel is the number of sequences that are copied at a time. Default 4.
	Parallel int
	// RetryMin and RetryMax bound the time between two passes over the blocks. It doubles with each pass
	// that has copied nothing. Defaults 1 s and 30 s.
	RetryMin, RetryMax time.Duration
	// Changed is called, by one goroutine at a time, when Progress.Phase has changed. Nil: no call.
	Changed func()
	Logger  *slog.Logger
}

// EnsureDefaults fills the fields that are zero.
func (o *Options) EnsureDefaults() {
	options.SetDefault(&o.BytesPerSecond, 256<<20)
	options.SetDefault(&o.ChunkBytes, 4<<20)
	options.SetDefault(&o.Parallel, 4)
	options.SetDefault(&o.RetryMin, time.Second)
	options.SetDefault(&o.RetryMax, 30*time.Second)
	options.SetDefault(&o.Logger, slog.New(slog.DiscardHandler))
	if o.Changed == nil {
		o.Changed = func() {}
	}
}

// Validate returns an error for the first invalid field.
func (o *Options) Validate() error {
	switch {
	case o.Node == nil || o.To == nil:
		return errors.New("move: Node and To are required")
	case o.BytesPerSecond < 1 || o.Parallel < 1:
		return fmt.Errorf("move: BytesPerSecond %d and Parallel %d must be positive", o.BytesPerSecond, o.Parallel)
	case o.RetryMin <= 0 || o.RetryMax < o.RetryMin:
		return fmt.Errorf("move: RetryMin %v must be positive, and RetryMax %v not below it", o.RetryMin, o.RetryMax)
	}
	return nil
}

// Mover copies the blocks of one node. Progress may be called concurrently with Run; Run runs once at
// a time.
type Mover struct {
	opts Options
	node *storage.Node
	log  *slog.Logger

	mu       sync.Mutex
	progress Progress
	// seen has the numbers of the nodes of the index whose blocks count in progress.Copied*.
	seen bits
	rate meter
}

// New returns a Mover.
func New(o Options) (*Mover, error) {
	o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	return &Mover{opts: o, node: o.Node, log: o.Logger}, nil
}

// tipKey names the last block of a sequence.
type tipKey struct {
	namespace kv.NamespaceID
	epoch     kv.Epoch
	id        kv.BlockID
}

// work is a sequence, or some keys of a flat namespace, to be copied.
type work struct {
	ns    kv.Namespace
	epoch kv.Epoch
	heat  int
	tips  []trie.Tip
}

// chunkMin is the smallest size of a chunk that is copied at a time.
const chunkMin = 4 << 10

// flatBatch is the number of keys of a flat namespace in one work.
const flatBatch = 256

// busyTries is the number of times that a copy is begun again in one pass because a node was busy.
const busyTries = 5

// Run copies blocks until ctx ends, and returns the error of ctx, or an error of its memory.
func (m *Mover) Run(ctx context.Context) (err error) {
	// A slow copy takes its bytes in small chunks, and so about as evenly as a fast one.
	chunk := max(chunkMin, min(m.opts.ChunkBytes, m.opts.BytesPerSecond/4))
	link, err := relay.New(relay.Options{From: &local{node: m.node}, To: inAll{m.opts.To}, BytesPerSecond: float64(m.opts.BytesPerSecond), ChunkBytes: chunk})
	if err != nil {
		return fmt.Errorf("move: %w", err)
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		err = errors.Join(err, link.Close(closing))
	}()
	done := make(map[tipKey]bool)
	wait := m.opts.RetryMin
	placements := m.opts.To.Placements()
	for {
		if now := m.opts.To.Placements(); now != placements {
			placements = now
			m.forget(done) // sequences may have other nodes
		}
		change := m.node.Events().Last()
		p := &pass{Mover: m, link: link, done: done}
		if err := p.run(ctx); err != nil {
			m.setPhase("")
			return err
		}
		if p.copied > 0 {
			wait = m.opts.RetryMin
		}
		if m.opts.To.Placements() != placements {
			continue
		}
		m.endPass(p)
		for {
			if !sleep(ctx, wait) {
				m.setPhase("")
				return ctx.Err()
			}
			wait = min(2*wait, m.opts.RetryMax)
			if p.left > 0 || m.node.Events().Last() != change || m.opts.To.Placements() != placements {
				break
			}
			wait = m.opts.RetryMin // a change of the index is found soon
		}
	}
}

// forget makes the next pass compare all blocks again.
func (m *Mover) forget(done map[tipKey]bool) {
	clear(done)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.seen, m.progress.CopiedBlocks, m.progress.CopiedBytes = nil, 0, 0
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// pass is one pass over the blocks of the node.
type pass struct {
	*Mover
	link *relay.Relay
	done map[tipKey]bool

	// The following fields are guarded by Mover.mu. copied is the number of bytes that were sent.
	copied int64
	left   int64
	reason string
}

// run copies the blocks that are not copied yet. It returns an error only if ctx has ended.
func (p *pass) run(ctx context.Context) error {
	all := p.plan()
	p.begin(len(all) > 0)
	next := make(chan work)
	var wg sync.WaitGroup
	for range p.opts.Parallel {
		wg.Go(func() {
			for w := range next {
				p.copy(ctx, w)
			}
		})
	}
	for _, w := range all {
		select {
		case next <- w:
			continue
		case <-ctx.Done():
		}
		break
	}
	close(next)
	wg.Wait()
	return ctx.Err()
}

// plan returns the sequences that are not done, the hottest first.
func (p *pass) plan() (all []work) {
	blocks, bytes := int64(0), int64(0)
	for _, ns := range p.node.Namespaces() {
		for _, epoch := range ns.Live() {
			tips, total, err := p.node.Tips(ns.Name, epoch)
			if err != nil {
				continue // the epoch or the namespace has ended
			}
			blocks, bytes = blocks+total.Blocks, bytes+total.Bytes
			if len(ns.Geometry.Groups) > 1 {
				p.leave(total.Blocks, fmt.Sprintf("namespace %q has %d layer groups; only namespaces with one are copied", ns.Name, len(ns.Geometry.Groups)))
				continue
			}
			tips = slices.DeleteFunc(tips, func(t trie.Tip) bool { return p.done[tipKey{ns.ID, epoch, t.ID}] })
			size := 1
			if ns.Index == kv.IndexFlat {
				size = flatBatch
			}
			for some := range slices.Chunk(tips, size) {
				all = append(all, work{ns: ns, epoch: epoch, heat: some[0].Heat, tips: some})
			}
		}
	}
	p.mu.Lock()
	p.progress.Blocks, p.progress.Bytes = blocks, bytes
	p.mu.Unlock()
	slices.SortStableFunc(all, func(a, b work) int { return b.heat - a.heat })
	return all
}

// leave counts blocks that were not copied.
func (p *pass) leave(blocks int64, reason string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.left += blocks
	if p.reason == "" && blocks > 0 {
		p.reason = reason
	}
}

// copy copies one work, and records its result.
func (p *pass) copy(ctx context.Context, w work) {
	if ctx.Err() != nil {
		return
	}
	if w.ns.Index == kv.IndexFlat {
		p.copyKeys(ctx, w)
		return
	}
	tip := w.tips[0]
	ids, nodes, err := p.node.Chain(w.ns.Name, w.epoch, tip.ID)
	if err != nil {
		return // removed meanwhile
	}
	have, reason := p.present(ctx, w, ids)
	if reason != "" {
		p.settle(ctx, w, nil, nodes, reason)
		return
	}
	first := 0
	for first < len(have) && have[first] != client.Absent {
		first++
	}
	got := p.send(ctx, w, ids, first)
	if down := slices.Index(have[:first], client.Unknown); down >= 0 {
		got.Blocks, got.Reason = down, nodeDown
	}
	p.settle(ctx, w, nodes[:got.Blocks], nodes[got.Blocks:], got.Reason)
	if got.Blocks == len(ids) {
		p.finish(w, tip)
	}
}

// copyKeys copies keys of a flat namespace.
func (p *pass) copyKeys(ctx context.Context, w work) {
	var tips []trie.Tip
	var ids []kv.BlockID
	var nodes []uint32
	for _, t := range w.tips {
		if id, node, err := p.node.Chain(w.ns.Name, w.epoch, t.ID); err == nil {
			tips, ids, nodes = append(tips, t), append(ids, id...), append(nodes, node...)
		}
	}
	if len(ids) == 0 {
		return
	}
	have, reason := p.present(ctx, w, ids)
	if reason != "" {
		p.settle(ctx, w, nil, nodes, reason)
		return
	}
	var send []int // positions in ids
	for i := range ids {
		switch have[i] {
		case client.Absent:
			send = append(send, i)
		case client.Unknown:
			p.settle(ctx, w, nil, nodes[i:i+1], nodeDown)
		case client.Present:
			p.settle(ctx, w, nodes[i:i+1], nil, "")
			p.finish(w, tips[i])
		}
	}
	for len(send) > 0 && ctx.Err() == nil {
		keys := make([]kv.BlockID, len(send))
		for k, i := range send {
			keys[k] = ids[i]
		}
		got := p.send(ctx, w, keys, 0)
		for _, i := range send[:got.Blocks] {
			p.settle(ctx, w, nodes[i:i+1], nil, "")
			p.finish(w, tips[i])
		}
		if send = send[got.Blocks:]; len(send) > 0 {
			p.settle(ctx, w, nil, nodes[send[0]:send[0]+1], got.Reason)
			send = send[1:] // a key that is refused does not stop the next ones
		}
	}
}

// nodeDown is the reason for blocks of which it is unknown whether a new node has them.
const nodeDown = "node_down"

// present returns which of the blocks all their new nodes have, or an error as the reason why that is
// unknown. Blocks that are Unknown are on those of the nodes that answer.
func (p *pass) present(ctx context.Context, w work, ids []kv.BlockID) (have []client.Presence, reason string) {
	have, err := p.opts.To.Exists(ctx, client.KeysRequest{Namespace: w.ns, IDs: ids, Epoch: w.epoch, AllCopies: true}, false)
	if errors.Is(err, client.ErrMismatch) {
		return make([]client.Presence, len(ids)), "" // the other node refuses the blocks if it does not have the epoch
	}
	if err != nil {
		return nil, err.Error()
	}
	return have, ""
}

// send copies the blocks from first on.
func (p *pass) send(ctx context.Context, w work, ids []kv.BlockID, first int) relay.Copied {
	for try := 0; ; try++ {
		got, err := p.link.Copy(ctx, w.ns, w.epoch, ids, first)
		p.mu.Lock()
		p.copied += got.Bytes
		if got.Bytes > 0 {
			p.rate.add(time.Now(), got.Bytes)
		}
		p.mu.Unlock()
		if err != nil {
			got.Reason = err.Error()
			return got
		}
		if got.Reason != "busy" || try == busyTries || !sleep(ctx, p.opts.RetryMin/16<<try) {
			if got.Detail != "" {
				got.Reason += ": " + got.Detail
			}
			return got
		}
		first = got.Blocks
	}
}

// settle counts, for each node, the blocks that other members have and the blocks that were not copied.
func (p *pass) settle(ctx context.Context, w work, copied, left []uint32, reason string) {
	if len(left) > 0 && (ctx.Err() != nil || !p.live(w)) {
		left = nil
	}
	p.mu.Lock()
	size := w.ns.Geometry.PieceBytes(0)
	for _, n := range copied {
		if p.seen.add(n) {
			p.progress.CopiedBlocks++
			p.progress.CopiedBytes += size
		}
	}
	p.mu.Unlock()
	p.leave(int64(len(left)), reason)
}

// live reports whether the epoch of a work is live on this node: otherwise its blocks are no longer
// blocks to be copied.
func (p *pass) live(w work) bool {
	ns, err := p.node.Namespace(w.ns.Name)
	return err == nil && ns.ID == w.ns.ID && ns.IsLive(w.epoch)
}

// finish makes later passes leave out a sequence.
func (p *pass) finish(w work, tip trie.Tip) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done[tipKey{w.ns.ID, w.epoch, tip.ID}] = true
}
