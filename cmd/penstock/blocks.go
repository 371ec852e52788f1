package main

import (
	"context"
	"encoding/hex"
	"fmt"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/kv"
)

// blockLine is one block in the output of block stat and block list.
type blockLine struct {
	Index      int    `json:"index"`
	ID         string `json:"id"`
	Present    bool   `json:"present"`
	Parent     string `json:"parent,omitempty"`
	Depth      uint32 `json:"depth"`
	Group      uint32 `json:"group"`
	Extent     string `json:"extent,omitempty"`
	Generation uint64 `json:"generation"`
	Children   uint32 `json:"children"`
	Leases     uint32 `json:"leases"`
	Class      string `json:"class,omitempty"`
	Epoch      uint64 `json:"epoch"`
}

func lineOf(i int, b *pb.Block) blockLine {
	return blockLine{
		Index: i, ID: hex.EncodeToString(b.GetId()), Present: true, Parent: hex.EncodeToString(b.GetParent()),
		Depth: b.GetDepth(), Group: b.GetGroup(), Extent: b.GetExtent(), Generation: b.GetGeneration(),
		Children: b.GetChildren(), Leases: b.GetLeases(), Epoch: b.GetEpoch(),
		Class: enumWord(b.GetBlockClass().Descriptor(), b.GetBlockClass().Number()),
	}
}

func printBlocks(t *table, lines []blockLine) {
	t.row("#", "ID", "DEPTH", "GROUP", "SLOT", "GENERATION", "CHILDREN", "LEASES", "CLASS")
	for _, l := range lines {
		if !l.Present {
			t.row(l.Index, l.ID, "absent")
			continue
		}
		t.row(l.Index, l.ID, l.Depth, l.Group, l.Extent, l.Generation, l.Children, l.Leases, l.Class)
	}
}

func newBlockStat(w world, c *connection) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "stat NS --tokens-file F",
		Short: "Show where each block of a prompt lies",
		Long:  `Show the location of each block of a prompt. The exit code is 3 if one is absent.`,
	}
	flags := addChainFlags(cmd)
	return c.onNamespace(cmd, func(ctx context.Context, a admin, name string) error {
		ch, err := a.chain(ctx, w, flags, name)
		if err != nil {
			return err
		}
		lines, absent, err := a.statBlocks(ctx, name, ch.ids)
		if err != nil {
			return err
		}
		if err := outputOf(cmd).emit(map[string]any{"blocks": lines}, func(t *table) { printBlocks(t, lines) }); err != nil {
			return err
		}
		if absent > 0 {
			return fmt.Errorf("%d of %d blocks: %w", absent, len(ch.ids), errMiss)
		}
		return nil
	})
}

func (a admin) statBlocks(ctx context.Context, ns string, ids []kv.BlockID) (lines []blockLine, absent int, err error) {
	for i, id := range ids {
		b, err := a.StatBlock(ctx, &pb.StatBlockRequest{Namespace: ns, BlockId: id[:]})
		switch {
		case status.Code(err) == codes.NotFound:
			absent++
			lines = append(lines, blockLine{Index: i, ID: id.String()})
		case err != nil:
			return nil, 0, err
		default:
			lines = append(lines, lineOf(i, b))
		}
	}
	return lines, absent, nil
}

// verifyResult is the output of block verify.
type verifyResult struct {
	Namespace string       `json:"namespace"`
	Intact    int          `json:"intact"`
	Absent    int          `json:"absent"`
	Corrupt   int          `json:"corrupt"`
	Failed    int          `json:"failed"`
	Bad       []verifyLine `json:"bad"`
}

type verifyLine struct {
	Block  int    `json:"block"`
	ID     string `json:"id"`
	Group  uint32 `json:"group"`
	State  string `json:"state"`
	Reason string `json:"reason"`
}

// verifyPage is the number of blocks in one Verify call.
const verifyPage = 256

func newBlockVerify(w world, c *connection) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "verify NS --tokens-file F",
		Short: "Read the blocks of a prompt from the disks and check every checksum",
		Long: `Read the blocks of a prompt from the disks, even if they are in memory, and check every
checksum. A broken block is dropped and becomes a miss. The exit code is 1 if one was
broken, 3 if one is absent.`,
	}
	flags := addChainFlags(cmd)
	return c.onNamespace(cmd, func(ctx context.Context, a admin, name string) error {
		ch, err := a.chain(ctx, w, flags, name)
		if err != nil {
			return err
		}
		r, err := a.verifyBlocks(ctx, w, name, ch.ids)
		if err != nil {
			return err
		}
		if err := outputOf(cmd).emit(r, func(t *table) { printVerify(t, r) }); err != nil {
			return err
		}
		switch {
		case r.Corrupt+r.Failed > 0:
			return fmt.Errorf("%d pieces are broken", r.Corrupt+r.Failed)
		case r.Absent > 0:
			return fmt.Errorf("%d of %d blocks: %w", r.Absent, len(ch.ids), errMiss)
		}
		return nil
	})
}

func printVerify(t *table, r verifyResult) {
	t.row(fmt.Sprintf("intact %d, absent %d, corrupt %d, failed %d", r.Intact, r.Absent, r.Corrupt, r.Failed))
	for _, b := range r.Bad {
		t.row(fmt.Sprintf("block %d", b.Block), b.ID, fmt.Sprintf("group %d", b.Group), b.State, b.Reason)
	}
}

func (a admin) verifyBlocks(ctx context.Context, w world, ns string, ids []kv.BlockID) (verifyResult, error) {
	r := verifyResult{Namespace: ns, Bad: []verifyLine{}}
	bar := newProgress(w, "verify", unitBlocks)
	defer bar.finish()
	for at := 0; at < len(ids); at += verifyPage {
		page := ids[at:min(at+verifyPage, len(ids))]
		resp, err := a.VerifyBlocks(ctx, &pb.VerifyBlocksRequest{Namespace: ns, BlockIds: api.AppendIDs(nil, page)})
		if err != nil {
			return r, err
		}
		for _, p := range resp.GetPieces() {
			r.add(at, page, p)
		}
		bar.set(int64(at+len(page)), int64(len(ids)))
	}
	return r, nil
}

func (r *verifyResult) add(at int, page []kv.BlockID, p *pb.PieceResult) {
	switch p.GetState() {
	case pb.PieceResult_STATE_DELIVERED:
		r.Intact++
		return
	case pb.PieceResult_STATE_MISS:
		r.Absent++
	case pb.PieceResult_STATE_CORRUPT:
		r.Corrupt++
	default:
		r.Failed++
	}
	r.Bad = append(r.Bad, verifyLine{
		Block: at + int(p.GetBlock()), ID: page[p.GetBlock()].String(), Group: p.GetGroup(),
		State: enumWord(p.GetState().Descriptor(), p.GetState().Number()), Reason: p.GetReason(),
	})
}

func newBlockList(c *connection) *cobra.Command {
	var limit int
	cmd := &cobra.Command{
		Use:   "list NS",
		Short: "List the blocks of a namespace, in no particular order",
	}
	cmd.Flags().IntVar(&limit, "limit", 1000, "stop after this many blocks; 0: list all")
	return c.onNamespace(cmd, func(ctx context.Context, a admin, name string) error {
		lines := []blockLine{}
		var cursor []byte
		for {
			resp, err := a.ListBlocks(ctx, &pb.ListBlocksRequest{Namespace: name, Cursor: cursor, Limit: listPage})
			if err != nil {
				return err
			}
			for _, b := range resp.GetBlocks() {
				lines = append(lines, lineOf(len(lines), b))
			}
			if cursor = resp.GetCursor(); len(cursor) == 0 || limit > 0 && len(lines) >= limit {
				break
			}
		}
		more := len(cursor) > 0
		if limit > 0 && len(lines) > limit {
			lines, more = lines[:limit], true
		}
		return outputOf(cmd).emit(map[string]any{"blocks": lines, "more": more}, func(t *table) {
			printBlocks(t, lines)
			if more {
				t.row("… there are more: --limit 0 lists all")
			}
		})
	})
}

// listPage is the number of blocks in one ListBlocks call.
const listPage = 4096

func newBlockDelete(c *connection) *cobra.Command {
	var dryRun bool
	cmd := &cobra.Command{
		Use:               "delete NS ID…",
		Short:             "Delete blocks with everything below them",
		Args:              args(cobra.MinimumNArgs(2)),
		ValidArgsFunction: c.completeNamespaces,
	}
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "print what would be deleted, and change nothing")
	cmd.RunE = func(cmd *cobra.Command, given []string) error {
		ids := make([]kv.BlockID, len(given)-1)
		for i, text := range given[1:] {
			var err error
			if ids[i], err = kv.ParseBlockID(text); err != nil {
				return usageError{err}
			}
		}
		return c.admin(cmd, func(ctx context.Context, a admin) error {
			var blocks, bytes int64
			for _, id := range ids {
				resp, err := a.DeleteBlocks(ctx, &pb.DeleteBlocksRequest{Namespace: given[0], BlockId: id[:], DryRun: dryRun})
				if err != nil {
					return err
				}
				blocks, bytes = blocks+resp.GetBlocks(), bytes+resp.GetBytes()
			}
			return emitRemoved(cmd, "deleted", dryRun, blocks, bytes)
		})
	}
	return cmd
}
