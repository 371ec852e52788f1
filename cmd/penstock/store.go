package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/blockstore/crypt"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/posixio"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/config"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
)

func newStoreCommand(w world) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "store",
		Short: "Check, inspect and repair volumes that no node serves",
	}
	return noun(cmd, newStoreCheck(w), newStoreInspect(w), newStoreRebuild(w))
}

// offlineFlags are the flags that name the volumes of an offline command.
type offlineFlags struct {
	data       []string
	io         string
	encryption config.Encryption
}

func addOfflineFlags(cmd *cobra.Command) *offlineFlags {
	f := &offlineFlags{}
	f.addData(cmd)
	cmd.Flags().StringVar(&f.io, "io", "auto", "I/O backend: auto, uring, posix or usrbio (3FS)")
	completeValues(cmd, "io", "auto", "uring", "posix", "usrbio")
	return f
}

func (f *offlineFlags) addData(cmd *cobra.Command) {
	cmd.Flags().StringSliceVar(&f.data, "data", nil, "directories of the volumes, as given to serve")
	_ = cmd.MarkFlagRequired("data") // the flag was defined above
	_ = cmd.MarkFlagDirname("data")
	keyFlags(cmd, &f.encryption)
}

// exist returns an error if a directory does not exist. An offline command must not make
// directories.
func (f *offlineFlags) exist() error {
	for _, dir := range f.data {
		if info, err := os.Stat(dir); err != nil {
			return fmt.Errorf("--data: %w", err)
		} else if !info.IsDir() {
			return fmt.Errorf("--data: %s is not a directory", dir)
		}
		if _, err := os.Stat(filepath.Join(dir, ondisk.SuperblockName)); err != nil {
			return fmt.Errorf("--data: %s is not a volume: %w", dir, err)
		}
	}
	return nil
}

// open locks and opens the volumes without changing them: the capacity is the present size of the
// volumes, and no space is allocated in advance.
func (f *offlineFlags) open(ctx context.Context, w world, memory *arena.Arena) (_ *blockstore.Store, cfg config.Config, err error) {
	cfg = config.Default()
	cfg.Data = f.data
	if err := f.exist(); err != nil {
		return nil, cfg, err
	}
	cfg.Encryption = f.encryption
	keys, err := readVolumeKeys(ctx, cfg.Encryption, offlineLogger(w))
	if err != nil {
		return nil, cfg, err
	}
	devices, err := openDevices(f.data, f.io, memory.Bytes())
	if err != nil {
		return nil, cfg, err
	}
	var total int64
	for _, d := range devices {
		space, err := d.Stat()
		if err != nil {
			return nil, cfg, errors.Join(err, closeDevices(devices))
		}
		total += space.TotalBytes
	}
	store, err := blockstore.Open(ctx, blockstore.Options{
		Devices:       plainDevices(devices),
		Identity:      blockio.Identity(time.Now()),
		CapacityBytes: total,
		Keys:          keys,
		Alloc:         scratchFrom(memory),
		Logger:        offlineLogger(w),
	})
	if err != nil {
		return nil, cfg, errors.Join(err, closeDevices(devices))
	}
	return store, cfg, nil
}

// offlineLogger returns a logger that prints warnings and errors, because only these need an
// operator's action.
func offlineLogger(w world) *slog.Logger {
	return slog.New(slog.NewTextHandler(w.err, &slog.HandlerOptions{Level: slog.LevelWarn}))
}

// offlineArena is the memory of an offline command. It is large enough for every slot size.
func offlineArena() (*arena.Arena, error) {
	return arena.New(arena.Options{SizeBytes: offlineArenaBytes})
}

const offlineArenaBytes = 128 << 20

func newStoreRebuild(w world) *cobra.Command {
	var dryRun, verify bool
	cmd := &cobra.Command{
		Use:   "rebuild-index --data DIR[,DIR…]",
		Short: "Rebuild the index from the volumes' slot headers",
		Long: `Rebuild the index from the volumes alone: every slot's header has its
block, parent, namespace, epoch and checksums. The old index is replaced only when
the new one is complete. It refuses to run while a node serves the volumes.

If several slots hold a block, their payloads are read, and the newest intact slot is
indexed.

Leases and pins are not on the volumes. An evicted block may be matchable again, with the
bytes that were written for it. Deleted blocks stay deleted.`,
		Args: args(cobra.NoArgs),
	}
	f := addOfflineFlags(cmd)
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "read the volumes and print what would be indexed, and change nothing")
	cmd.Flags().BoolVar(&verify, "verify", false, "also read every block, and leave out damaged blocks")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		report, err := f.rebuild(cmd.Context(), w, dryRun, verify)
		if err != nil {
			return err
		}
		return emitRebuild(cmd, report, dryRun)
	}
	return cmd
}

func (f *offlineFlags) rebuild(ctx context.Context, w world, dryRun, verify bool) (report storage.RebuildReport, err error) {
	memory, err := offlineArena()
	if err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, memory.Close()) }()
	store, cfg, err := f.open(ctx, w, memory)
	if err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, store.Close(context.WithoutCancel(ctx))) }()
	bar := newProgress(w, "rebuild-index", unitBytes)
	defer bar.finish()
	opts := storage.RebuildOptions{
		Verify:   verify,
		Logger:   offlineLogger(w),
		Progress: func(done, total, found int64) { bar.note(done, total, count(found)+" blocks") },
	}
	if dryRun {
		opts.Store = store
		return storage.Rebuild(ctx, opts)
	}
	dir, err := indexDir(f.data)
	if err != nil {
		return report, err
	}
	return rebuildIndex(ctx, cfg, dir, store, nil, opts)
}

// rebuilt is the JSON output of store rebuild-index.
type rebuilt struct {
	DryRun     bool    `json:"dry_run"`
	Namespaces int     `json:"namespaces"`
	Indexed    int64   `json:"indexed_blocks"`
	Slots      int64   `json:"slots"`
	Blank      int64   `json:"blank_slots"`
	Damaged    int64   `json:"damaged_slots"`
	Unreadable int64   `json:"unreadable_slots"`
	DeletedNS  int64   `json:"of_deleted_namespaces"`
	OldEpoch   int64   `json:"of_old_epochs"`
	Geometry   int64   `json:"of_other_geometry"`
	Transfer   int64   `json:"transfer"`
	Copies     int64   `json:"older_copies"`
	Deleted    int64   `json:"deleted"`
	Orphans    int64   `json:"orphans"`
	Refused    int64   `json:"refused"`
	ReadBytes  int64   `json:"read_bytes"`
	Seconds    float64 `json:"seconds"`
}

func emitRebuild(cmd *cobra.Command, r storage.RebuildReport, dryRun bool) error {
	v := rebuilt{
		DryRun: dryRun, Namespaces: r.Namespaces, Indexed: r.Indexed,
		Slots: r.Scan.Slots, Blank: r.Scan.Blank, Damaged: r.Scan.Damaged, Unreadable: r.Scan.Unreadable,
		DeletedNS: r.DeletedNamespace, OldEpoch: r.OldEpoch, Geometry: r.Geometry, Transfer: r.Transfer, Copies: r.Copies, Deleted: r.Deleted, Orphans: r.Orphans, Refused: r.Refused,
		ReadBytes: r.Scan.Bytes, Seconds: r.Took.Seconds(),
	}
	return outputOf(cmd).emit(v, func(t *table) {
		verb := "indexed"
		if dryRun {
			verb = "would be indexed"
		}
		t.pair(verb, fmt.Sprintf("%s blocks of %d namespaces in %v", count(v.Indexed), v.Namespaces, r.Took.Round(time.Millisecond)))
		t.pair("slots", fmt.Sprintf("%s: %s blank, %s damaged, %s unreadable; %s read", count(v.Slots), count(v.Blank), count(v.Damaged), count(v.Unreadable), size(v.ReadBytes)))
		t.pair("left out", fmt.Sprintf("%s deleted, %s of deleted namespaces, %s of old epochs, %s of another geometry, %s transfers, %s older copies, %s orphans, %s refused",
			count(v.Deleted), count(v.DeletedNS), count(v.OldEpoch), count(v.Geometry), count(v.Transfer), count(v.Copies), count(v.Orphans), count(v.Refused)))
	})
}

func newStoreCheck(w world) *cobra.Command {
	var verify bool
	cmd := &cobra.Command{
		Use:   "check --data DIR[,DIR…]",
		Short: "Check the invariants of index and volumes",
		Long: `Compare the index with the volumes and name every invariant that is broken:
one-owner, prefix-closed, data-before-index, exact-or-miss (ARCHITECTURE.md).
The command fails while a node serves the volumes. The exit code is 1 if an
invariant is broken.`,
		Args: args(cobra.NoArgs),
	}
	f := addOfflineFlags(cmd)
	cmd.Flags().BoolVar(&verify, "verify", false, "read every block and compare header and layers with the index")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		report, err := f.check(cmd.Context(), w, verify)
		if err != nil {
			return err
		}
		if err := emitCheck(cmd, report, verify); err != nil {
			return err
		}
		if len(report.Findings) > 0 {
			return errReported
		}
		return nil
	}
	return cmd
}

func (f *offlineFlags) check(ctx context.Context, w world, verify bool) (report storage.CheckReport, err error) {
	memory, err := offlineArena()
	if err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, memory.Close()) }()
	store, cfg, err := f.open(ctx, w, memory)
	if err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, store.Close(context.WithoutCancel(ctx))) }()
	dir, err := indexDir(f.data)
	if err != nil {
		return report, err
	}
	if _, err := os.Stat(dir); err != nil {
		return report, fmt.Errorf("no index: %w\n(to rebuild it: penstock store rebuild-index --data %s)", err, commaList(f.data))
	}
	index, err := trie.Open(indexOptions(cfg, dir, store, 1<<30, offlineLogger(w)))
	if err != nil {
		return report, withRebuild(err, f.data)
	}
	defer func() { err = errors.Join(err, index.Close()) }()
	bar := newProgress(w, "check", unitBlocks)
	defer bar.finish()
	opts := storage.CheckOptions{Store: store, Index: index, Progress: bar.set}
	if verify {
		opts.Verify = memory
	}
	return storage.Check(ctx, opts)
}

// checked is the JSON output of store check.
type checked struct {
	Blocks        int64     `json:"blocks"`
	StaleEntries  int64     `json:"stale_entries"`
	Verified      int64     `json:"verified_blocks"`
	VerifiedBytes int64     `json:"verified_bytes"`
	Findings      []finding `json:"findings"`
}

type finding struct {
	Invariant string `json:"invariant"`
	Slot      string `json:"slot,omitempty"`
	Detail    string `json:"detail"`
}

func emitCheck(cmd *cobra.Command, r storage.CheckReport, verify bool) error {
	v := checked{Blocks: r.Pieces, StaleEntries: r.Stale, Verified: r.Verified, VerifiedBytes: r.VerifiedBytes, Findings: []finding{}}
	for _, f := range r.Findings {
		slot := ""
		if f.Ref != (kv.Ref{}) {
			slot = f.Ref.String()
		}
		v.Findings = append(v.Findings, finding{Invariant: f.Invariant, Slot: slot, Detail: f.Detail})
	}
	return outputOf(cmd).emit(v, func(t *table) {
		t.pair("blocks", count(v.Blocks))
		if v.StaleEntries > 0 {
			t.pair("stale", count(v.StaleEntries)+" entries lost their slot in a crash; the next start drops them")
		}
		if verify {
			t.pair("verified", fmt.Sprintf("%s blocks, %s", count(v.Verified), size(v.VerifiedBytes)))
		}
		for _, f := range v.Findings {
			t.row("BROKEN", strings.TrimSpace(f.Invariant+" "+f.Slot), f.Detail)
		}
		if len(v.Findings) == 0 {
			t.row("all invariants hold")
		}
	})
}

func newStoreInspect(w world) *cobra.Command {
	var segment, slot int64
	cmd := &cobra.Command{
		Use:   "inspect --data DIR[,DIR…]",
		Short: "Print the contents of a volume: superblock, catalogue, segments, slots",
		Long: `Print the raw contents of volumes, also of damaged volumes and of other versions,
and while a node serves them. Nothing is locked and nothing written,
so that the file system may be mounted read-only.`,
		Args: args(cobra.NoArgs),
	}
	f := &offlineFlags{}
	f.addData(cmd)
	cmd.Flags().Int64Var(&segment, "segment", -1, "print the slots of this segment")
	cmd.Flags().Int64Var(&slot, "slot", -1, "print this slot of --segment and verify its layers")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		for name, number := range map[string]int64{"segment": segment, "slot": slot} {
			if cmd.Flags().Changed(name) && number != int64(uint32(number)) {
				return usagef("--%s %d: want 0 to %d", name, number, uint32(math.MaxUint32))
			}
		}
		if slot >= 0 && segment < 0 {
			return usagef("--slot needs --segment")
		}
		keys, err := readVolumeKeys(cmd.Context(), f.encryption, offlineLogger(w))
		if err != nil {
			return err
		}
		for _, dir := range f.data {
			if err := f.inspect(cmd, dir, segment, slot, keys); err != nil {
				return err
			}
		}
		return nil
	}
	return cmd
}

func (f *offlineFlags) inspect(cmd *cobra.Command, dir string, segment, slot int64, keys *crypt.Keyring) (err error) {
	dev, err := posixio.Open(dir, posixio.Options{ReadOnly: true})
	if err != nil {
		return fmt.Errorf("--data: %w", err)
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	var text strings.Builder
	ctx := cmd.Context()
	switch {
	case slot >= 0:
		err = blockstore.InspectSlot(ctx, dev, uint32(segment), uint32(slot), keys, &text)
	case segment >= 0:
		err = blockstore.InspectSegment(ctx, dev, uint32(segment), &text)
	default:
		err = blockstore.InspectVolume(ctx, dev, &text)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	lines := strings.Split(strings.TrimRight(text.String(), "\n"), "\n")
	return outputOf(cmd).emit(map[string]any{"volume": dir, "lines": lines}, func(t *table) {
		fmt.Fprintf(outputOf(cmd).w, "%s\n%s\n", dir, text.String())
	})
}
