package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/server/config"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
)

// Suffixes of two directories next to the index: the new index, and the old index while the new
// index replaces it.
const (
	rebuildSuffix = ".rebuild"
	retiredSuffix = ".retired"
)

// rebuildIndex makes a new index for dir from the volumes. It makes the new index in a separate
// directory and replaces the old index only when the new index is complete, so that after a crash
// one of the two is complete. It sets opts.Store and opts.Index.
func rebuildIndex(ctx context.Context, cfg config.Config, dir string, store *blockstore.Store, grew func(int64), opts storage.RebuildOptions) (report storage.RebuildReport, err error) {
	fresh := dir + rebuildSuffix
	if err := os.RemoveAll(fresh); err != nil {
		return report, err
	}
	// The whole index is written at once, so its memtables may have the default size.
	indexOpts := indexOptions(cfg, fresh, store, 1<<30, slog.New(slog.DiscardHandler))
	indexOpts.Grew = grew
	index, err := trie.Open(indexOpts)
	if err != nil {
		return report, err
	}
	opts.Store, opts.Index = store, index
	report, err = storage.Rebuild(ctx, opts)
	if err = errors.Join(err, index.Close()); err != nil {
		return report, errors.Join(err, os.RemoveAll(fresh))
	}
	return report, swapDirs(dir, fresh)
}

// swapDirs replaces dir by fresh.
func swapDirs(dir, fresh string) error {
	retired := dir + retiredSuffix
	if err := os.RemoveAll(retired); err != nil {
		return err
	}
	if err := os.Rename(dir, retired); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := os.Rename(fresh, dir); err != nil {
		return fmt.Errorf("the new index is complete, but could not be moved from %s to %s: %w", fresh, dir, err)
	}
	return os.RemoveAll(retired)
}
