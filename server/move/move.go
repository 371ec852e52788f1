package move

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/client/relay"
	"github.com/penstock-kv/penstock/internal/options"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
)

// Target is the part of the cluster that gets the blocks. *client.Store implements it. Its Write is called
// with AllCopies.
type Target interface {
	relay.Store
	ExistsGroups(ctx context.Context, r client.KeysRequest) ([][]client.Presence, error)
	Exists(ctx context.Context, r client.KeysRequest, touch bool) ([]client.Presence, error)
	Delete(ctx context.Context, r client.KeysRequest) ([]client.Presence, error)
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
	// Only returns whether a sequence, or a key of a flat namespace, is copied, by its first block. Nil: all
	// are.
	Only func(ns kv.Namespace, root kv.BlockID) bool
	// Yields returns whether this node is no home of a sequence, or of a key of a flat namespace, by its first
	// block, so that this node evicts the blocks first when their homes have them. Nil: none.
	Yields func(ns kv.Namespace, root kv.BlockID) bool
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
	// Totals are the counters of the copies. Nil: the Mover has its own.
	Totals *Totals
	Logger *slog.Logger
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
	if o.Totals == nil {
		o.Totals = new(Totals)
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
	// checkTook is the duration of the last check.
	checkTook time.Duration
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
	done := make(map[tipKey]chainSum)
	wait := m.opts.RetryMin
	placements := m.opts.To.Placements()
	for {
		if now := m.opts.To.Placements(); now != placements {
			placements = now
			m.forget(done) // sequences may have other nodes
		}
		change := m.changes()
		p := &pass{Mover: m, link: link, done: done, began: change[0]}
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
		if p.left == 0 && m.checkDue() {
			check := &pass{Mover: m, link: link, done: make(map[tipKey]chainSum), began: m.node.Events().Last(), compares: true}
			if err := m.check(ctx, check); err != nil {
				m.setPhase("")
				return err
			}
			if m.opts.To.Placements() != placements {
				continue
			}
			// Pieces that other nodes have evicted are not copied again: a full node would evict others for them, such as blocks that
			// it has read.
			if p.left, p.reason = check.left, check.reason; p.left > 0 {
				done = check.done // the next pass compares the others again
			}
		}
		m.endPass(p)
		for {
			if !sleep(ctx, wait) {
				m.setPhase("")
				return ctx.Err()
			}
			wait = min(2*wait, m.opts.RetryMax)
			if p.left > 0 || m.changes() != change || m.opts.To.Placements() != placements {
				break
			}
			wait = m.opts.RetryMin // a change of the index is found soon
		}
	}
}

// checkDue reports whether the other nodes are asked again for all blocks. While blocks are stored on this node all the time, there is
// a check after many passes, and the checks take at most a tenth of the time.
func (m *Mover) checkDue() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.progress.Phase != Done && time.Since(m.progress.Checked) >= 9*m.checkTook
}

// check asks the other nodes for all blocks, without copies, and counts anew the blocks that they have. It returns an error only if ctx
// has ended.
func (m *Mover) check(ctx context.Context, p *pass) error {
	began := time.Now()
	if err := p.run(ctx); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.seen, m.progress.CopiedBlocks, m.progress.CopiedBytes = p.found.seen, p.found.Blocks, p.found.Bytes
	m.progress.Checked, m.checkTook = time.Now(), time.Since(began)
	return nil
}

// changes counts the changes of the index. An event reports the change of a block, and a commit may only
// have stored pieces of other layer groups of a block.
func (m *Mover) changes() [2]uint64 { return [2]uint64{m.node.Events().Last(), m.node.Commits()} }

// forget makes the next pass compare all blocks again.
func (m *Mover) forget(done map[tipKey]chainSum) {
	clear(done)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.seen, m.progress.CopiedBlocks, m.progress.CopiedBytes = nil, 0, 0
	m.progress.Checked = time.Time{}
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
	done map[tipKey]chainSum
	// began is the number of the node's last event before the pass.
	began uint64
	// compares is set if the pass compares and does not copy. Its done has only the sequences that other nodes have or have lost.
	compares bool

	// The following fields are guarded by Mover.mu. copied is the number of bytes that were sent. In a pass that only compares, found
	// are the pieces that all of their new nodes have.
	copied int64
	left   int64
	reason string
	found  struct {
		storage.Removed
		seen bits
	}
}

// run copies the blocks that are not copied yet. It returns an error only if ctx has ended.
func (p *pass) run(ctx context.Context) error {
	all, total := p.plan()
	p.begin(len(all) > 0, total)
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
	p.deleteAgain(ctx, p.began, func(storage.Event) bool { return true })
	return ctx.Err()
}

// plan returns the sequences that are not done, the hottest first, and the number and the payload of the blocks of all.
func (p *pass) plan() (all []work, sum storage.Removed) {
	for _, ns := range p.node.Namespaces() {
		for _, epoch := range ns.Live() {
			tips, total, err := p.node.Tips(ns.Name, epoch)
			if err != nil {
				continue // the epoch or the namespace has ended
			}
			if p.opts.Only != nil {
				tips, total = p.only(ns, epoch, tips)
			}
			sum.Blocks, sum.Bytes = sum.Blocks+total.Blocks, sum.Bytes+total.Bytes
			if ns.Index != kv.IndexFlat && ns.Geometry.Groups[0].Kind != kv.Full {
				// The node of a sequence depends on its first block, and the index has no parents of blocks.
				p.leave(total.Blocks, fmt.Sprintf("namespace %q has no layer group of full attention, so the first blocks of its sequences are unknown", ns.Name))
				continue
			}
			tips = slices.DeleteFunc(tips, func(t trie.Tip) bool { return p.isDone(ns, epoch, t) })
			size := 1
			if ns.Index == kv.IndexFlat {
				size = flatBatch
			}
			for some := range slices.Chunk(tips, size) {
				all = append(all, work{ns: ns, epoch: epoch, heat: some[0].Heat, tips: some})
			}
		}
	}
	slices.SortStableFunc(all, func(a, b work) int { return b.heat - a.heat })
	return all, sum
}

// only returns the tips of the sequences that are copied, and the number and the payload of their pieces.
func (p *pass) only(ns kv.Namespace, epoch kv.Epoch, tips []trie.Tip) (some []trie.Tip, total storage.Removed) {
	var counted bits
	for _, tip := range tips {
		chain, err := p.node.Chain(ns.Name, epoch, tip.ID)
		if err != nil || !p.opts.Only(ns, chain[0].ID) {
			continue
		}
		some = append(some, tip)
		for _, link := range chain {
			for _, l := range link.Pieces {
				if counted.add(l.Node) {
					total.Blocks++
					total.Bytes += ns.Geometry.PieceBytes(l.Group)
				}
			}
		}
	}
	return some, total
}

// leave counts blocks that were not copied.
func (p *pass) leave(blocks int64, reason string) {
	p.opts.Totals.Failures.Add(blocks)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.left += blocks
	if p.reason == "" && blocks > 0 {
		p.reason = reason
	}
}

// chainSum identifies the pieces of a chain.
type chainSum uint64

// sumOf returns the sum of a chain. In a namespace of one layer group a chain with the same slot of the last
// block has the same pieces: a block is removed after the blocks that follow it. Otherwise pieces of more
// groups may be added.
func sumOf(ns kv.Namespace, tip trie.Tip, chain []trie.Link) chainSum {
	if len(ns.Geometry.Groups) == 1 {
		return chainSum(tip.Generation)
	}
	var b []byte
	for _, link := range chain {
		for _, piece := range link.Pieces {
			b = binary.LittleEndian.AppendUint64(b, uint64(piece.Generation))
		}
	}
	return chainSum(xxh3.Hash(b))
}

// isDone reports whether a sequence need not be compared again.
func (p *pass) isDone(ns kv.Namespace, epoch kv.Epoch, tip trie.Tip) bool {
	sum, ok := p.done[tipKey{ns.ID, epoch, tip.ID}]
	if !ok {
		return false
	}
	var chain []trie.Link
	if len(ns.Geometry.Groups) > 1 {
		var err error
		if chain, err = p.node.Chain(ns.Name, epoch, tip.ID); err != nil {
			return true // removed meanwhile
		}
	}
	return sumOf(ns, tip, chain) == sum
}

// piece is a stored piece of the blocks of a work.
type piece struct {
	relay.Piece
	node uint32 // its number in the index
}

// sequence has the blocks of a work, in order of the chain, and their stored pieces by block and group.
type sequence struct {
	ids    []kv.BlockID
	pieces []piece
	// hot are the blocks that have been read and, in a chain, the blocks before them.
	hot []kv.BlockID
}

// add appends blocks.
func (s *sequence) add(chain []trie.Link) {
	for _, link := range chain {
		for _, l := range link.Pieces {
			s.pieces = append(s.pieces, piece{relay.Piece{Block: len(s.ids), Group: l.Group}, l.Node})
		}
		s.ids = append(s.ids, link.ID)
	}
	hot := len(chain)
	for hot > 0 && chain[hot-1].Heat == 0 {
		hot--
	}
	for _, link := range chain[:hot] {
		s.hot = append(s.hot, link.ID)
	}
}

// copy copies one work, and records its result.
func (p *pass) copy(ctx context.Context, w work) {
	if ctx.Err() != nil {
		return
	}
	before := p.node.Events().Last()
	var s sequence
	var tips []trie.Tip // that are stored
	var sums []chainSum
	for _, tip := range w.tips {
		if chain, err := p.node.Chain(w.ns.Name, w.epoch, tip.ID); err == nil {
			s.add(chain)
			tips, sums = append(tips, tip), append(sums, sumOf(w.ns, tip, chain))
		}
	}
	if len(tips) == 0 {
		return
	}
	have, reason := p.present(ctx, w, s.ids)
	if reason != "" {
		p.settle(ctx, w, nil, s.pieces, reason)
		return
	}
	var send, copied, unknown []piece
	for _, x := range s.pieces {
		switch have[x.Group][x.Block] {
		case client.Absent:
			send = append(send, x)
		case client.Unknown:
			unknown = append(unknown, x)
		case client.Present:
			copied = append(copied, x)
		}
	}
	p.settle(ctx, w, copied, unknown, nodeDown)
	left := unknown
	if p.compares {
		send = nil
	}
	defer p.keepHot(ctx, w, s.hot, len(send) > 0)
	for len(send) > 0 && ctx.Err() == nil {
		got := p.send(ctx, w, s.ids, send)
		p.settle(ctx, w, send[:got.Pieces], nil, "")
		if send = send[got.Pieces:]; len(send) == 0 {
			break
		}
		refused := send
		if w.ns.Index == kv.IndexFlat {
			refused = send[:1] // a key that is refused does not stop the next ones
		}
		p.settle(ctx, w, nil, refused, got.Reason)
		left, send = append(left, refused...), send[len(refused):]
	}
	p.deleteAgain(ctx, before, func(e storage.Event) bool {
		return e.Namespace == w.ns.Name && e.Epoch == w.epoch && slices.ContainsFunc(e.IDs, func(id kv.BlockID) bool { return slices.Contains(s.ids, id) })
	})
	if ctx.Err() != nil {
		return
	}
	if w.ns.Index != kv.IndexFlat {
		if len(left) == 0 {
			p.yield(w, s.ids[0], s.ids)
			p.finish(w, tips[0], sums[0])
		}
		return
	}
	refused := make(map[int]bool)
	for _, x := range left {
		refused[x.Block] = true
	}
	for i, tip := range tips {
		if !refused[i] {
			p.yield(w, tip.ID, []kv.BlockID{tip.ID})
			p.finish(w, tip, sums[i])
		}
	}
}

// keepHot makes the blocks of a work that have been read on this node count as read on their new nodes, if some of the work were
// sent. Otherwise the copies of blocks that were never read, which follow, would evict them first. A failure only makes
// the new nodes evict them as other new blocks.
func (p *pass) keepHot(ctx context.Context, w work, ids []kv.BlockID, sent bool) {
	if !sent || len(ids) == 0 || ctx.Err() != nil {
		return
	}
	_, _ = p.opts.To.Exists(ctx, client.KeysRequest{Namespace: w.ns, IDs: ids, Epoch: w.epoch, AllCopies: true}, true)
}

// yield makes the blocks of a sequence, which their homes have, the first that this node evicts, if the sequence is
// not one of this node.
func (p *pass) yield(w work, root kv.BlockID, ids []kv.BlockID) {
	if p.compares || p.opts.Yields == nil || !p.opts.Yields(w.ns, root) {
		return
	}
	if err := p.node.Demote(w.ns.Name, w.epoch, ids); err != nil && p.live(w) {
		p.log.Warn("blocks that other nodes have cannot be made the first to be evicted", "namespace", w.ns.Name, "blocks", len(ids), "err", err)
	}
}

// nodeDown is the reason for blocks of which it is unknown whether a new node has them.
const nodeDown = "node_down"

// present returns, by layer group, which pieces of the blocks all their new nodes have, or an error as the
// reason why that is unknown. A piece that is Unknown is on each of its new nodes that has answered.
func (p *pass) present(ctx context.Context, w work, ids []kv.BlockID) (have [][]client.Presence, reason string) {
	have, err := p.opts.To.ExistsGroups(ctx, client.KeysRequest{Namespace: w.ns, IDs: ids, Epoch: w.epoch})
	if errors.Is(err, client.ErrMismatch) {
		// The other node refuses the blocks if it does not have the epoch.
		have = make([][]client.Presence, len(w.ns.Geometry.Groups))
		for g := range have {
			have[g] = make([]client.Presence, len(ids))
		}
		return have, ""
	}
	if err != nil {
		return nil, err.Error()
	}
	return have, ""
}

// send copies the pieces.
func (p *pass) send(ctx context.Context, w work, ids []kv.BlockID, pieces []piece) (sent relay.Copied) {
	some := make([]relay.Piece, len(pieces))
	for i, x := range pieces {
		some[i] = x.Piece
	}
	for try := 0; ; try++ {
		got, err := p.link.CopyPieces(ctx, w.ns, w.epoch, ids, some[sent.Pieces:])
		p.opts.Totals.Blocks.Add(int64(got.Pieces))
		p.opts.Totals.Bytes.Add(got.Bytes)
		p.mu.Lock()
		p.copied += got.Bytes
		if got.Bytes > 0 {
			p.rate.add(time.Now(), got.Bytes)
		}
		p.mu.Unlock()
		got.Pieces += sent.Pieces
		sent = got
		if err != nil {
			sent.Reason = err.Error()
			return sent
		}
		if sent.Reason != "busy" || try == busyTries || !sleep(ctx, p.opts.RetryMin/16<<try) {
			if sent.Detail != "" {
				sent.Reason += ": " + sent.Detail
			}
			return sent
		}
	}
}

// settle counts the pieces that other members have and the pieces that were not copied.
func (p *pass) settle(ctx context.Context, w work, copied, left []piece, reason string) {
	if len(left) > 0 && (ctx.Err() != nil || !p.live(w)) {
		left = nil
	}
	p.mu.Lock()
	for _, x := range copied {
		if p.compares && p.found.seen.add(x.node) {
			p.found.Blocks++
			p.found.Bytes += w.ns.Geometry.PieceBytes(x.Group)
		}
		if p.seen.add(x.node) {
			p.progress.CopiedBlocks++
			p.progress.CopiedBytes += w.ns.Geometry.PieceBytes(x.Group)
		}
	}
	p.mu.Unlock()
	p.leave(int64(len(left)), reason)
}

// deleteAgain repeats, on the other nodes, the deletions on this node after the event seq for which which
// returns true.
func (p *pass) deleteAgain(ctx context.Context, seq uint64, which func(storage.Event) bool) {
	again := repeater{node: p.node, to: p.opts.To, log: p.log}
	again.since(ctx, seq, which)
}

// live reports whether the epoch of a work is live on this node: otherwise its blocks are no longer
// blocks to be copied.
func (p *pass) live(w work) bool {
	ns, err := p.node.Namespace(w.ns.Name)
	return err == nil && ns.ID == w.ns.ID && ns.IsLive(w.epoch)
}

// finish makes later passes leave out a sequence as long as its chain has the same pieces.
func (p *pass) finish(w work, tip trie.Tip, sum chainSum) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done[tipKey{w.ns.ID, w.epoch, tip.ID}] = sum
}
