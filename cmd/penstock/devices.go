package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/posixio"
	"github.com/penstock-kv/penstock/io/uring"
	"github.com/penstock-kv/penstock/io/usrbio"
	"github.com/penstock-kv/penstock/server/config"
)

// device is a volume's device, with the reason for the choice of its backend.
type device struct {
	blockio.Device
	reason string
	// missing: the volume cannot be opened, and the device returns only errors.
	missing bool
}

// openDevices opens a device for each directory with the backend how, and makes missing
// directories. how is uring, posix, usrbio or auto (openDevice).
func openDevices(dirs []string, how string, memory []byte) (devices []device, err error) {
	for i, dir := range dirs {
		d, err := openDevice(dir, how, memory)
		if err == nil {
			devices = append(devices, d)
			err = notAmong(dirs[:i], dir)
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("volume %s: %w", dir, err), closeDevices(devices))
		}
	}
	return devices, nil
}

// openPresent opens the volumes of a node that may start degraded. A device that only returns
// errors stands for each missing volume. If some directories have a superblock, nothing is written
// to a directory without one, because that directory may be the mount point of a missing disk.
func openPresent(cfg config.Config, memory []byte, log *slog.Logger) (devices []device, err error) {
	if !cfg.Degraded || !slices.ContainsFunc(cfg.Dirs(), func(dir string) bool { return holdsVolume(dir) == nil }) {
		return openDevices(cfg.Dirs(), cfg.IO, memory)
	}
	var present []string
	for _, dir := range cfg.Dirs() {
		var cause error
		if !cfg.AddVolumes {
			cause = holdsVolume(dir)
		}
		var d device
		if cause == nil {
			d, cause = openDevice(dir, cfg.IO, memory)
		}
		if cause != nil {
			log.Error("volume is missing", "volume", dir, "err", cause)
			d = device{Device: blockstore.Absent(dir, cause), reason: "missing", missing: true}
		}
		devices = append(devices, d)
		if d.missing {
			continue
		}
		if err := notAmong(present, dir); err != nil {
			return nil, errors.Join(fmt.Errorf("volume %s: %w", dir, err), closeDevices(devices))
		}
		present = append(present, dir)
	}
	return devices, nil
}

// holdsVolume returns nil if the directory is a formatted volume.
func holdsVolume(dir string) error {
	_, err := os.Stat(filepath.Join(dir, ondisk.SuperblockName))
	return err
}

// notAmong returns an error if dir is the same directory as one of the others under another name.
// Without this check, the lock of dir would seem to be held by another process.
func notAmong(others []string, dir string) error {
	info, err := os.Stat(dir)
	if err != nil {
		return err
	}
	for _, other := range others {
		if same, err := os.Stat(other); err == nil && os.SameFile(info, same) {
			return fmt.Errorf("it is the same directory as %s; give each directory once", other)
		}
	}
	return nil
}

// openDevice makes the directory dir if it is missing, and opens it with the backend how. With auto
// it uses usrbio on a mount of 3FS and uring elsewhere if they work, and otherwise posix.
func openDevice(dir, how string, memory []byte) (device, error) {
	// 0700, because blocks contain users' prompts.
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return device{}, err
	}
	var d device
	why := "posix was asked for"
	switch {
	case how == "usrbio", how == "auto" && usrbio.Mounted(dir):
		if d, why = open3FS(dir); d.Device == nil && how == "usrbio" {
			return device{}, fmt.Errorf("io is usrbio, which does not work for this directory: %s (io auto uses posix)", why)
		}
	case how != "posix":
		if d, why = openRing(dir, memory); d.Device == nil && how == "uring" {
			return device{}, fmt.Errorf("io is uring, which does not work on this host: %s (io auto uses posix)", why)
		}
	}
	if d.Device != nil {
		return d, nil
	}
	p, err := posixio.Open(dir, posixio.Options{})
	if err != nil {
		return device{}, err
	}
	return device{Device: p, reason: why}, nil
}

// openRing opens a device of io_uring. If io_uring does not work, the device is empty, and why has
// the reason.
func openRing(dir string, memory []byte) (_ device, why string) {
	ok, why := uring.Probe(dir)
	if !ok {
		return device{}, why
	}
	d, err := uring.Open(dir, uring.Options{Regions: regions(memory)})
	if err != nil {
		return device{}, err.Error()
	}
	return device{Device: d, reason: why}, ""
}

// reason3FS begins the reason for posix on a mount of 3FS.
const reason3FS = "3FS's user-space I/O does not work: "

// open3FS opens a device of 3FS's user-space I/O. If that does not work, the device is empty, and
// why has the reason.
func open3FS(dir string) (_ device, why string) {
	ok, why := usrbio.Probe(dir, usrbio.Options{})
	if !ok {
		return device{}, reason3FS + why
	}
	d, err := usrbio.Open(dir, usrbio.Options{})
	if err != nil {
		return device{}, reason3FS + err.Error()
	}
	return device{Device: d, reason: why}, ""
}

// regions returns the memory that io_uring registers as fixed buffers: none if memory is empty.
func regions(memory []byte) [][]byte {
	if len(memory) == 0 {
		return nil
	}
	return [][]byte{memory}
}

func plainDevices(devices []device) []blockio.Device {
	out := make([]blockio.Device, len(devices))
	for i, d := range devices {
		out[i] = d.Device
	}
	return out
}

func closeDevices(devices []device) error {
	var errs []error
	for _, d := range devices {
		errs = append(errs, d.Close())
	}
	return errors.Join(errs...)
}

// scratchFrom returns the function with which the store allocates arena memory for its internal
// work.
func scratchFrom(memory *arena.Arena) func(context.Context, int) ([]byte, func(), error) {
	return func(ctx context.Context, sizeBytes int) ([]byte, func(), error) {
		buf, err := memory.Alloc(ctx, sizeBytes)
		if err != nil {
			return nil, nil, err
		}
		return buf.Bytes()[:sizeBytes], buf.Release, nil
	}
}

// split is the division of the configured capacity between store and index, in bytes. The capacity
// limits all files in the data directories, so the store gets the capacity minus the share of the
// index.
type split struct{ capacityBytes, storeBytes, indexBytes int64 }

const (
	// indexShare is the divisor of the capacity that gives the index's share. The index takes at
	// most 160 bytes of disk per block (docs/benchmarks.md), and the smallest slot has 8 KiB, so
	// one fiftieth is enough.
	indexShare = 50
	// indexFloorBytes is the minimum share of the index, for the logs and memtables that an index
	// of any size needs.
	indexFloorBytes = 16 << 20
	// The default capacity is takeNumerator/takeDenominator of the free space.
	takeNumerator, takeDenominator = 9, 10
)

// splitCapacity determines the capacity and divides it between the store and the index.
func splitCapacity(cfg config.Config, devices []device) (split, error) {
	capacity := int64(cfg.Capacity)
	if capacity == 0 {
		var err error
		if capacity, err = reachable(cfg.Dirs(), devices); err != nil {
			return split{}, err
		}
		capacity = capacity / takeDenominator * takeNumerator
	}
	index := max(capacity/indexShare, min(indexFloorBytes, capacity/4))
	return split{capacityBytes: capacity, storeBytes: capacity - index, indexBytes: index}, nil
}

// reachable returns the number of free bytes of the file systems plus the bytes that the volumes
// take. The sum is the same before and after a node has filled its volumes, so a restart computes
// the same capacity as the first start. The free space of a file system with several volumes counts
// once.
func reachable(dirs []string, devices []device) (int64, error) {
	seen := make(map[uint64]bool)
	var total int64
	for i, dir := range dirs {
		if devices[i].missing {
			continue
		}
		own, err := treeBytes(dir)
		if err != nil {
			return 0, err
		}
		total += own
		info, err := os.Stat(dir)
		if err != nil {
			return 0, err
		}
		sys, ok := info.Sys().(*syscall.Stat_t)
		if ok && seen[sys.Dev] {
			continue
		}
		if ok {
			seen[sys.Dev] = true
		}
		space, err := devices[i].Stat()
		if err != nil {
			return 0, err
		}
		total += space.FreeBytes
	}
	return total, nil
}

// treeBytes returns the disk space that the files below dir take, in bytes.
func treeBytes(dir string) (int64, error) {
	var total int64
	err := filepath.WalkDir(dir, func(_ string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		if sys, ok := info.Sys().(*syscall.Stat_t); ok {
			total += sys.Blocks * 512 // POSIX counts st_blocks in 512 bytes
		}
		return nil
	})
	return total, err
}

func commaList(s []string) string { return strings.Join(s, ",") }
