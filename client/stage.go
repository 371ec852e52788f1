package client

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"syscall"
	"time"

	"github.com/zeebo/xxh3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/internal/sys"
)

// stage returns the connection's staging memory. The first call requests the memory from the node.
// usable reports whether the connection can be used afterwards. Error: errNotLocal.
func (c *localConn) stage(up func() bool) (mem []byte, usable bool, _ error) {
	if c.staging != nil {
		return c.staging.Bytes(), true, nil
	}
	l := c.owner
	if !l.mayStage() {
		return nil, true, errNotLocal
	}
	c.up = up
	refusal, err := c.askStaging()
	if err == nil && refusal == "" {
		return c.staging.Bytes(), true, nil
	}
	l.stagingRefused(refusal, err)
	return nil, err == nil, errNotLocal
}

// askStaging requests staging memory from the node. If the node refuses, it returns the node's
// reason. After an error the connection is unusable.
func (c *localConn) askStaging() (refusal string, err error) {
	var frames []byte
	if c.owed != 0 {
		frames = api.AppendReturn(frames, []uint64{c.owed})
	}
	c.owed = 0
	if _, err := c.file.Write(api.AppendStage(frames)); err != nil {
		return "", err
	}
	// The file descriptor arrives with the first byte of the answer.
	head := make([]byte, api.LocalFrameHeaderBytes)
	file, err := sys.ReceiveFileBlocking(c.file, head)
	for errors.Is(err, syscall.EAGAIN) && c.up() {
		file, err = sys.ReceiveFileBlocking(c.file, head)
	}
	if err != nil {
		return "", err
	}
	msg, err := api.ReadLocalFrame(bufio.NewReader(io.MultiReader(bytes.NewReader(head), c.in)))
	var reply api.Reply
	var text []byte
	if err == nil {
		reply, text, err = api.ParseReply(msg)
	}
	switch {
	case err == nil && reply.Code == 0 && file != nil:
		c.staging, err = arena.MapStaging(file)
		return "", err
	case err == nil && reply.Code == 0:
		err = errors.New("the node sent no descriptor of staging memory")
	}
	if file != nil {
		err = errors.Join(err, file.Close())
	}
	return cmp.Or(string(text), "no reason given"), err
}

// mayStage reports whether staging memory may be requested from the node now.
func (l *localConns) mayStage() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !time.Now().Before(l.stageAfter)
}

// stagingRefused stops requests for staging memory for DeadFor.
func (l *localConns) stagingRefused(refusal string, err error) {
	l.mu.Lock()
	first := l.stageAfter.IsZero()
	l.stageAfter = time.Now().Add(l.store.opts.DeadFor)
	l.mu.Unlock()
	if first {
		l.store.opts.Logger.Info("writes do not use the node's unix socket", "refusal", refusal, "err", err)
	}
}

// runLocal does the work of runChunk with one call over the unix socket of a node on this host.
// Errors: errNotLocal and the errors of runChunk.
func (w *writing) runLocal(ctx context.Context, n *node, sess *session, c writeChunk) error {
	size := w.chunkBytes(c)
	if size > sess.stagingBytes {
		return errNotLocal
	}
	conn, err := n.local.takeStaging(sess)
	if err != nil {
		return err
	}
	up := func() bool { return n.dataConnected(sess) }
	mem, usable, err := conn.stage(up)
	if err != nil || size > int64(len(mem)) {
		n.local.put(conn, usable)
		return errNotLocal
	}
	req := &pb.WriteRequest{Reserve: w.reserveRequest(c), Sums: w.stage(c, mem)}
	resp := new(pb.WriteResponse)
	err = conn.call(ctx, api.MethodWrite, req, resp, up)
	lost := errors.Is(err, errLinkLost) || status.Code(err) == codes.Aborted
	n.local.put(conn, !lost && ctx.Err() == nil)
	switch {
	case err != nil && ctx.Err() != nil:
		return fmt.Errorf("client: write: %w", ctx.Err())
	case lost:
		// If the node has stored pieces of the chunk before the failure, they count as stored
		// before (WriteResult.Existed) when they are offered again.
		return errNotLocal
	case err != nil:
		return callError(ctx, "reserve", n.target, err)
	}
	w.store.stats.localWrites.Add(1)
	if err := w.checkReserved(n, c, resp.GetReserve()); err != nil {
		return err
	}
	granted := w.settleGrants(c, resp.GetReserve())
	switch {
	case len(granted) == 0:
		return nil
	case resp.GetCommitCode() != 0:
		return w.commitFailed(ctx, n, c, granted, status.Error(codes.Code(resp.GetCommitCode()), resp.GetCommitError()))
	}
	return w.settleCommit(n, c, granted, resp.GetCommit())
}

// chunkBytes returns the size of all pieces of a chunk.
func (w *writing) chunkBytes(c writeChunk) (total int64) {
	for _, i := range c.pieces {
		total += w.req.Namespace.Geometry.PieceBytes(w.pieces[i].Group)
	}
	return total
}

// stagedLayer is the copy of one layer into staging memory.
type stagedLayer struct {
	from, to []byte
	// sum receives the checksum; nil: the caller has given the checksum.
	sum *uint64
}

// stage copies the pieces of a chunk into mem, one after the other, and returns their checksums. It
// hashes each layer in the caller's memory while the layer is in the CPU cache.
func (w *writing) stage(c writeChunk, mem []byte) []*pb.PieceSums {
	g := w.req.Namespace.Geometry
	all := make([]*pb.PieceSums, len(c.pieces))
	var layers []stagedLayer
	var one [1]Fragment
	at := int64(0)
	for k, i := range c.pieces {
		p := w.pieces[i]
		sums := &pb.PieceSums{Block: uint32(c.local[k]), Group: uint32(p.Group)}
		if w.given != nil {
			sums.LayerSums = w.given[pieceName{p.Block, p.Group}]
		} else {
			sums.LayerSums = make([]uint64, g.Groups[p.Group].Layers)
		}
		all[k] = sums
		n, layer := g.LayerBytes(p.Group), 0
		for _, f := range w.runs(p, &one) {
			from := f.Memory.Bytes()[f.Offset:]
			for range f.Layers {
				l := stagedLayer{from: from[:n], to: mem[at : at+n]}
				if w.given == nil {
					l.sum = &sums.LayerSums[layer]
				}
				layers = append(layers, l)
				from, at, layer = from[n:], at+n, layer+1
			}
		}
	}
	w.store.workers.Do(len(layers), at, func(from, to int) {
		for _, l := range layers[from:to] {
			copy(l.to, l.from)
			if l.sum != nil {
				*l.sum = xxh3.Hash(l.from)
			}
		}
	})
	return all
}
