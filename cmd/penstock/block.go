package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"github.com/zeebo/xxh3"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/kv"
)

func newBlockCommand(w world) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "block",
		Short: "Store, fetch, list, verify and delete blocks",
		Long: `Store, fetch, list, verify and delete blocks. A data file holds Full Blocks in the
order of the prompt: all layers of the first block, then all layers of the second.
In a hybrid namespace each block holds its layer groups one behind the other; where
a prefix does not need a block's window or state, its place in the file is zero.`,
	}
	c := addConnectionFlags(cmd, w)
	return noun(cmd, newBlockPut(w, c), newBlockGet(w, c), newBlockStat(w, c), newBlockVerify(w, c), newBlockList(c), newBlockDelete(c))
}

// windowBytes is the maximum number of bytes of a data file that are in memory at a time.
const windowBytes = 64 << 20

// window is registered memory for whole blocks of one namespace.
type window struct {
	ns     kv.Namespace
	blocks int // capacity of the window
	mem    *client.Memory
	arena  *arena.Arena
}

// openWindow returns a window for at most total blocks. If whole is set, the window holds all of
// these blocks.
func openWindow(s *client.Store, ns kv.Namespace, total int, whole bool) (*window, error) {
	each := ns.Geometry.BlockBytes()
	w := &window{ns: ns, blocks: total}
	if !whole {
		w.blocks = int(min(int64(total), max(1, windowBytes/each)))
	}
	var err error
	if w.arena, err = arena.New(arena.Options{SizeBytes: int64(w.blocks) * each}); err != nil {
		return nil, err
	}
	if w.mem, err = s.Register(w.arena.Bytes()); err != nil {
		return nil, errors.Join(err, w.arena.Close())
	}
	return w, nil
}

func (w *window) close() error {
	return errors.Join(w.mem.Close(context.Background()), w.arena.Close())
}

// bytes returns the memory of the first n blocks.
func (w *window) bytes(n int) []byte {
	return w.arena.Bytes()[:int64(n)*w.ns.Geometry.BlockBytes()]
}

// pieces returns one piece for each block of [first, end) and each layer group. The pieces are
// placed in a window that begins with block first.
func (w *window) pieces(first, end int) []client.Piece {
	g := w.ns.Geometry
	var out []client.Piece
	for b := first; b < end; b++ {
		for group := range g.Groups {
			out = append(out, client.Piece{Block: b, Group: group, Offset: g.PieceOffset(b-first, group)})
		}
	}
	return out
}

// needed returns the pieces that a prefix of the given length needs: sliding-window and state
// groups do not need all blocks.
func needed(g kv.Geometry, blocks int, pieces []client.Piece) []client.Piece {
	var out []client.Piece
	for _, p := range pieces {
		if p.Block >= g.FirstNeeded(p.Group, blocks) {
			out = append(out, p)
		}
	}
	return out
}

// hybrid reports whether the layers are in several groups, or in one group that is not Full. A
// prefix then need not have the pieces of all groups of each block.
func hybrid(g kv.Geometry) bool { return len(g.Groups) > 1 || g.Groups[0].Kind != kv.Full }

// putResult is the output of block put.
type putResult struct {
	Namespace string `json:"namespace"`
	Epoch     uint64 `json:"epoch"`
	Blocks    int    `json:"blocks"`
	Stored    int    `json:"stored_blocks"`
	Existed   int    `json:"existed_blocks"`
	Bytes     int64  `json:"stored_bytes"`
	Last      string `json:"last_block"`
}

func newBlockPut(w world, c *connection) *cobra.Command {
	p := &putCommand{world: w, connection: c}
	cmd := &cobra.Command{
		Use:   "put NS --tokens-file F --data-file F",
		Short: "Store the blocks of a prompt",
		Long: `Store the blocks of a prompt. The data file holds as many Full Blocks as the tokens
make; a shorter or longer file is refused. Blocks that are stored already are not
sent again, and if the node has them with other bytes nothing is stored: an id names
one content.`,
		Args:              args(cobra.ExactArgs(1)),
		ValidArgsFunction: c.completeNamespaces,
	}
	c.addDiscoverFlag(cmd, w)
	p.chain = addChainFlags(cmd)
	cmd.Flags().StringVar(&p.dataFile, "data-file", "", "file with the Full Blocks (- reads standard input)")
	cmd.Flags().IntVar(&p.first, "first-block", 0, "the data file starts with this block of the prompt; those before it are stored already")
	cmd.Flags().Uint64Var(&p.epoch, "epoch", 0, "version of the weights that made the blocks; 0: the newest")
	cmd.Flags().BoolVar(&p.transfer, "transfer", false, "drop the blocks once they have been delivered")
	_ = cmd.MarkFlagRequired("data-file") // the flag was defined above
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		return c.data(cmd, func(ctx context.Context, s *client.Store) error {
			r, err := p.run(ctx, s, names[0])
			if err != nil {
				return err
			}
			return outputOf(cmd).emit(r, func(t *table) {
				fmt.Fprintf(t, "stored %d blocks (%s), %d were there already, last block %s\n", r.Stored, size(r.Bytes), r.Existed, r.Last)
			})
		})
	}
	return cmd
}

// putCommand is one run of block put.
type putCommand struct {
	world      world
	connection *connection
	chain      *chainFlags
	dataFile   string
	first      int
	epoch      uint64
	transfer   bool
}

func (p *putCommand) run(ctx context.Context, s *client.Store, name string) (r putResult, err error) {
	if p.dataFile == "-" && (p.chain.tokensFile == "-" || p.chain.idsFile == "-") {
		return r, usagef("only one of --tokens-file and --data-file can be standard input")
	}
	ns, err := s.Namespace(ctx, name)
	if err != nil {
		return r, err
	}
	ch, err := p.chain.load(p.world, ns)
	if err != nil {
		return r, err
	}
	if p.first < 0 || p.first >= len(ch.ids) {
		return r, usagef("--first-block %d: the prompt has blocks 0 to %d", p.first, len(ch.ids)-1)
	}
	dataName, in, err := openInput(p.world, p.dataFile)
	if err != nil {
		return r, fmt.Errorf("--data-file: %w", err)
	}
	defer in.Close()
	want := int64(len(ch.ids)-p.first) * ns.Geometry.BlockBytes()
	if err := checkLength(dataName, in, want, ns, len(ch.ids)-p.first); err != nil {
		return r, err
	}
	win, err := openWindow(s, ns, len(ch.ids)-p.first, false)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, win.close()) }()
	r = putResult{Namespace: name, Epoch: uint64(ns.Epoch), Blocks: len(ch.ids) - p.first, Last: ch.ids[len(ch.ids)-1].String()}
	bar := newProgress(p.world, "put", unitBytes)
	defer bar.finish()
	for at := p.first; at < len(ch.ids); at += win.blocks {
		end := min(at+win.blocks, len(ch.ids))
		if _, err := io.ReadFull(in, win.bytes(end-at)); err != nil {
			return r, fmt.Errorf("%s ends before block %d: %w", dataName, end, err)
		}
		if err := p.putWindow(ctx, s, win, ch.ids, at, end, &r); err != nil {
			return r, err
		}
		bar.set(int64(end-p.first)*ns.Geometry.BlockBytes(), want)
	}
	return r, p.atEnd(dataName, in)
}

// checkLength returns an error if the input is a regular file whose length differs from want. It
// runs before the first block is stored.
func checkLength(name string, in io.Reader, want int64, ns kv.Namespace, blocks int) error {
	f, ok := in.(*os.File)
	if !ok {
		return nil
	}
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() || info.Size() == want {
		return err
	}
	each := ns.Geometry.BlockBytes()
	if info.Size()%each != 0 {
		return fmt.Errorf("%s has %d bytes, which is not a multiple of the Full Block of namespace %q (%d bytes); want %d for %d blocks", name, info.Size(), ns.Name, each, want, blocks)
	}
	return fmt.Errorf("%s has %d bytes, %d Full Blocks of %d; the prompt has %d whole blocks, which are %d bytes", name, info.Size(), info.Size()/each, each, blocks, want)
}

// atEnd returns an error if the stream has bytes after the last block.
func (p *putCommand) atEnd(name string, in io.Reader) error {
	if n, err := in.Read(make([]byte, 1)); n > 0 {
		return fmt.Errorf("%s has bytes after the last block of the prompt; the blocks before these bytes have been stored", name)
	} else if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}

// putWindow stores the blocks [at, end), whose bytes are in the window.
func (p *putCommand) putWindow(ctx context.Context, s *client.Store, win *window, ids []kv.BlockID, at, end int, r *putResult) error {
	if err := p.compareStored(ctx, win, ids[at:end], at); err != nil {
		return err
	}
	req := client.WriteRequest{
		Namespace: win.ns, IDs: ids[:end], First: at, Epoch: kv.Epoch(p.epoch),
		From: win.mem, Pieces: win.pieces(at, end),
	}
	if p.transfer {
		req.Class = client.Transfer
	}
	res, err := s.Write(ctx, req)
	if err != nil {
		return err
	}
	groups := len(win.ns.Geometry.Groups)
	r.Stored += res.Stored / groups
	r.Existed += res.Existed / groups
	r.Bytes += res.Bytes
	if len(res.Refused) > 0 {
		f := res.Refused[0]
		return refusedError(f, ids[f.Block], res.Outcome)
	}
	switch {
	case res.Outcome == client.Busy:
		return fmt.Errorf("block %d: %s: %w", at, res.Detail, errBusy)
	case res.Blocks < end:
		return fmt.Errorf("block %d was not stored: %s", res.Blocks, res.Detail)
	}
	return nil
}

// refusedError returns the error for a piece that the node refused.
func refusedError(f client.RefusedPiece, id kv.BlockID, outcome client.Outcome) error {
	what := fmt.Sprintf("block %d (%v) was refused: %s", f.Block, id, f.Reason)
	if f.Detail != "" && f.Detail != string(f.Reason) {
		what += ": " + f.Detail
	}
	switch f.Reason {
	case "parent_absent":
		what += " (the blocks before it are not stored; put the prompt from its first block)"
	case "parent_mismatch":
		what += " (this id is stored under another parent)"
	case "stale_epoch":
		what += " (the weights' epoch was bumped meanwhile)"
	case "over_quota":
		what += " (the quota of the namespace or of its tenant is used up; penstock ns show, penstock ns tenants)"
	}
	if outcome == client.Busy {
		return fmt.Errorf("%s: %w", what, errBusy)
	}
	return errors.New(what)
}

// compareStored returns an error if a node has one of the blocks, in the epoch of the put, with
// other bytes than the window has. It compares the window's layer checksums with those that the
// node reads from its disks.
func (p *putCommand) compareStored(ctx context.Context, win *window, ids []kv.BlockID, first int) error {
	for _, target := range p.connection.list() {
		conn, err := p.connection.dial(target)
		if err != nil {
			return err
		}
		resp, err := pb.NewAdminClient(conn).VerifyBlocks(ctx, &pb.VerifyBlocksRequest{Namespace: win.ns.Name, BlockIds: api.AppendIDs(nil, ids), Epoch: cmp.Or(p.epoch, uint64(win.ns.Epoch))})
		if err = errors.Join(err, conn.Close()); err != nil {
			return err
		}
		for _, piece := range resp.GetPieces() {
			if piece.GetState() != pb.PieceResult_STATE_DELIVERED {
				continue
			}
			block, group := int(piece.GetBlock()), int(piece.GetGroup())
			if layer := win.differs(block, group, piece.GetLayerSums()); layer >= 0 {
				return fmt.Errorf("block %d (%v) is stored with other bytes: layer %d of group %d differs. A block id must always have the same bytes, so nothing was stored; if the stored block is wrong, delete it first: penstock block delete %s %v", first+block, ids[block], layer, group, win.ns.Name, ids[block])
			}
		}
	}
	return nil
}

// differs returns the first layer of a piece in the window whose checksum differs from sums, or -1.
func (w *window) differs(block, group int, sums []uint64) int {
	g := w.ns.Geometry
	at := g.PieceOffset(block, group)
	layer := g.LayerBytes(group)
	for i, sum := range sums {
		if xxh3.Hash(w.arena.Bytes()[at+int64(i)*layer:][:layer]) != sum {
			return i
		}
	}
	return -1
}

// getResult is the output of block get.
type getResult struct {
	Namespace   string `json:"namespace"`
	Epoch       uint64 `json:"epoch"`
	AskedBlocks int    `json:"asked_blocks"`
	Blocks      int    `json:"blocks"`
	Tokens      int    `json:"tokens"`
	Bytes       int64  `json:"bytes"`
	Cut         string `json:"cut"`
	// Epochs are the epochs of the matched blocks, in order. It is set only with --mix.
	Epochs []epochRun `json:"epochs,omitempty"`
}

func newBlockGet(w world, c *connection) *cobra.Command {
	g := &getCommand{world: w}
	cmd := &cobra.Command{
		Use:   "get NS --tokens-file F --out F",
		Short: "Fetch the cached prefix of a prompt, verified",
		Long: `Fetch the longest cached prefix of a prompt and write its Full Blocks to a file. Every
layer is verified after it has arrived. The exit code is 3 if the prefix is shorter than
the prompt; the file then has the prefix. The file is replaced at the end, by a
rename: if nothing is cached, or the command fails, it does not change.`,
		Args:              args(cobra.ExactArgs(1)),
		ValidArgsFunction: c.completeNamespaces,
	}
	c.addDiscoverFlag(cmd, w)
	g.chain = addChainFlags(cmd)
	cmd.Flags().StringVar(&g.out, "out", "", "file to write the Full Blocks to (- writes standard output, and the summary to standard error)")
	cmd.Flags().Uint64Var(&g.epoch, "epoch", 0, "version of the weights; 0: the newest")
	cmd.Flags().Uint64Var(&g.oldest, "oldest-epoch", 0, oldestEpochHelp)
	cmd.Flags().BoolVar(&g.mix, "mix", false, mixHelp)
	_ = cmd.MarkFlagRequired("out") // the flag was defined above
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		return c.data(cmd, func(ctx context.Context, s *client.Store) error {
			r, err := g.run(ctx, s, names[0])
			if err != nil {
				return err
			}
			o := outputOf(cmd)
			if g.out == "-" {
				o.w = w.err
			}
			if err := o.emit(r, func(t *table) {
				fmt.Fprintf(t, "%d of %d blocks (%d tokens, %s), cut: %s\n", r.Blocks, r.AskedBlocks, r.Tokens, size(r.Bytes), r.Cut)
				printEpochs(t, r.Epochs)
			}); err != nil {
				return err
			}
			if r.Blocks < r.AskedBlocks {
				return fmt.Errorf("%d of %d blocks are cached (cut: %s): %w", r.Blocks, r.AskedBlocks, r.Cut, errMiss)
			}
			return nil
		})
	}
	return cmd
}

// getCommand is one run of block get.
type getCommand struct {
	world world
	chain *chainFlags
	out   string

	epoch, oldest uint64
	mix           bool
}

func (g *getCommand) run(ctx context.Context, s *client.Store, name string) (r getResult, err error) {
	ns, err := s.Namespace(ctx, name)
	if err != nil {
		return r, err
	}
	ch, err := g.chain.load(g.world, ns)
	if err != nil {
		return r, err
	}
	// The file is opened before the match, so that an invalid --out is an error even if
	// nothing is cached.
	out, err := g.open()
	if err != nil {
		return r, fmt.Errorf("--out: %w", err)
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	m, err := s.Match(ctx, client.MatchRequest{Namespace: ns, IDs: ch.ids, Epoch: kv.Epoch(g.epoch), Oldest: kv.Epoch(g.oldest), Mix: g.mix, Lease: getLease})
	if err != nil {
		return r, err
	}
	if m.Lease != nil {
		defer func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseWait)
			defer cancel()
			err = errors.Join(err, m.Lease.Release(ctx))
		}()
	}
	r = getResult{Namespace: name, Epoch: uint64(m.Epoch), AskedBlocks: len(ch.ids), Cut: string(m.Cut)}
	for _, run := range m.Epochs {
		r.Epochs = append(r.Epochs, epochRun{Epoch: uint64(run.Epoch), Blocks: uint32(run.Blocks)})
	}
	switch m.Cut {
	case client.CutNodeDown:
		return r, client.ErrUnavailable
	case client.CutBusy:
		return r, errBusy
	}
	if m.Blocks == 0 {
		return r, nil
	}
	if err := g.copy(ctx, s, ns, m, out, &r); err != nil || r.Blocks == 0 {
		return r, err
	}
	return r, out.commit()
}

// getLease is the duration of the lease that protects the prefix while block get fetches it.
const getLease = 5 * time.Minute

// releaseWait is the time limit for releasing the lease. A lease that is not released expires after
// getLease.
const releaseWait = 5 * time.Second

// open makes the file that receives the result.
func (g *getCommand) open() (*outFile, error) {
	if g.out == "-" {
		return &outFile{Writer: g.world.out}, nil
	}
	// A regular file, also as the target of a link, is replaced and keeps its permissions. A device
	// or a pipe is written directly.
	path, mode := g.out, os.FileMode(0o666)
	info, err := os.Stat(path)
	switch {
	case err == nil && info.IsDir():
		return nil, fmt.Errorf("%s is a directory", g.out)
	case err == nil && !info.Mode().IsRegular():
		// The path may be a link of /proc to a pipe, which has no other path.
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return nil, err
		}
		return &outFile{Writer: f, file: f}, nil
	case err == nil:
		mode = info.Mode().Perm()
	}
	if _, err := os.Lstat(path); err == nil {
		if path, err = filepath.EvalSymlinks(path); err != nil {
			return nil, err
		}
	}
	for attempt := 0; ; attempt++ {
		// The temporary name does not contain the result's name, which may already have the maximum
		// length.
		beside := filepath.Join(filepath.Dir(path), fmt.Sprintf(".penstock-%d-%d", os.Getpid(), attempt))
		f, err := os.OpenFile(beside, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
		if errors.Is(err, fs.ErrExist) && attempt < 100 {
			continue
		}
		if err != nil {
			return nil, err
		}
		o := &outFile{Writer: f, file: f, path: path}
		if info != nil {
			if err := f.Chmod(mode); err != nil { // because of the umask
				return nil, errors.Join(err, o.Close())
			}
		}
		return o, nil
	}
}

// outFile receives a result in a temporary file beside path; commit renames the
// temporary file to path. Until commit, the file at path keeps its old content.
type outFile struct {
	io.Writer
	file *os.File // nil: standard output
	path string   // "": file is not a regular file and is written directly
}

// commit renames the temporary file to path.
func (o *outFile) commit() error {
	if o.path == "" {
		return nil
	}
	if err := o.file.Close(); err != nil {
		return fmt.Errorf("--out: %w", err)
	}
	if err := os.Rename(o.file.Name(), o.path); err != nil {
		return fmt.Errorf("--out: %w", err)
	}
	o.file = nil
	return nil
}

// Close removes the temporary file if it was not committed.
func (o *outFile) Close() error {
	if o.file == nil {
		return nil
	}
	err := o.file.Close()
	if errors.Is(err, fs.ErrClosed) { // commit has closed the file and could not rename it
		err = nil
	}
	if o.path == "" {
		return err
	}
	return errors.Join(err, os.Remove(o.file.Name()))
}

// copy fetches the matched prefix window by window and writes the bytes to out.
func (g *getCommand) copy(ctx context.Context, s *client.Store, ns kv.Namespace, m client.MatchResult, out io.Writer, r *getResult) (err error) {
	// A hybrid prefix is only valid as a whole.
	win, err := openWindow(s, ns, m.Blocks, hybrid(ns.Geometry))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, win.close()) }()
	bar := newProgress(g.world, "get", unitBytes)
	defer bar.finish()
	total := int64(m.Blocks) * ns.Geometry.BlockBytes()
	for at := 0; at < m.Blocks; at += win.blocks {
		end := min(at+win.blocks, m.Blocks)
		pieces := needed(ns.Geometry, m.Blocks, win.pieces(at, end))
		clear(win.bytes(end - at))
		req := client.ReadRequest{Namespace: ns, IDs: m.IDs[:end], Epoch: m.Epoch, Into: win.mem, Pieces: pieces}
		if g.mix {
			req.Epoch, req.Epochs = 0, m.Epochs
		}
		res, err := s.Read(ctx, req)
		if err != nil {
			return err
		}
		got := min(max(res.Blocks, at), end) - at
		if _, err := out.Write(win.bytes(got)); err != nil {
			return fmt.Errorf("--out: %w", err)
		}
		r.Blocks += got
		r.Bytes += int64(got) * ns.Geometry.BlockBytes()
		bar.set(r.Bytes, total)
		if got < end-at {
			r.Cut = string(res.Cut)
			if len(res.Lost) > 0 {
				r.Cut += " (" + string(res.Lost[0].Reason) + ")"
			}
			break
		}
	}
	r.Tokens = r.Blocks * ns.Geometry.BlockTokens
	return nil
}
