package memio

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"

	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/io/blockio"
)

// Options are the options of a memory volume. The zero value works.
type Options struct {
	// CapacityBytes is the maximum sum of the files' sizes; default 1 TiB. Pages of zeroes take no
	// memory.
	CapacityBytes int64
	// Path is the name of the volume in errors and in Info; default "mem".
	Path string
	// Seed determines the order in which the requests of each batch are performed, which the
	// contract leaves open. So Seed also determines which requests of a batch a power failure
	// prevents. Default 0.
	Seed uint64
	// VersionsMax is the maximum number of unsynced versions of a page that are kept for a crash,
	// in addition to the present one; default 8.
	VersionsMax int
}

// EnsureDefaults fills the fields that are zero.
func (o *Options) EnsureDefaults() {
	if o.CapacityBytes == 0 {
		o.CapacityBytes = 1 << 40
	}
	if o.Path == "" {
		o.Path = "mem"
	}
	if o.VersionsMax == 0 {
		o.VersionsMax = 8
	}
}

// Validate reports the first invalid field.
func (o *Options) Validate() error {
	if o.CapacityBytes < 0 || o.VersionsMax < 1 {
		return fmt.Errorf("memio: capacity of %d bytes and %d versions; both must be positive", o.CapacityBytes, o.VersionsMax)
	}
	return nil
}

// Device is one opening of a memory volume.
type Device struct {
	medium   *medium
	gate     blockio.Gate
	counters blockio.Counters

	mu    sync.Mutex
	files map[*file]struct{} // open here
	rng   *rand.Rand
}

var _ blockio.Device = (*Device)(nil)

// New creates an empty volume and opens it. It panics if opts are out of range, because they are
// constants in a test.
func New(opts Options) *Device {
	opts.EnsureDefaults()
	if err := opts.Validate(); err != nil {
		panic(err)
	}
	return attach(newMedium(opts))
}

func attach(m *medium) *Device {
	return &Device{medium: m, files: make(map[*file]struct{}), rng: rand.New(rand.NewPCG(m.opts.Seed, 1))}
}

// Reopen returns another Device over the same volume, as a second process would get by opening the
// same directory. Either Device may be closed first.
func (d *Device) Reopen() *Device { return attach(d.medium) }

// file is one opening of an inode.
type file struct {
	dev  *Device
	ino  *inode
	gate blockio.Gate
}

func (f *file) Name() string { return f.ino.name }
func (f *file) Size() int64  { return f.ino.size }

func (f *file) Close() error {
	if f.gate.Close() {
		f.dev.mu.Lock()
		defer f.dev.mu.Unlock()
		delete(f.dev.files, f)
	}
	return nil
}

// enter admits a call that uses no file.
func (d *Device) enter(doing, name string) error {
	if !d.gate.Enter() {
		return fmt.Errorf("memio: %s %s on %s: %w", doing, name, d.medium.opts.Path, blockio.ErrClosed)
	}
	return nil
}

// Create implements blockio.Device.
func (d *Device) Create(name string, sizeBytes int64) (blockio.File, error) {
	if err := d.enter("create", name); err != nil {
		return nil, err
	}
	defer d.gate.Leave()
	if err := blockio.CheckName(name); err != nil {
		return nil, err
	}
	if err := blockio.CheckSize(name, sizeBytes); err != nil {
		return nil, err
	}
	ino, err := d.medium.create(name, sizeBytes)
	if err != nil {
		return nil, fmt.Errorf("memio: create %s on %s: %w", name, d.medium.opts.Path, err)
	}
	return d.open(ino), nil
}

// Open implements blockio.Device.
func (d *Device) Open(name string) (blockio.File, error) {
	if err := d.enter("open", name); err != nil {
		return nil, err
	}
	defer d.gate.Leave()
	if err := blockio.CheckName(name); err != nil {
		return nil, err
	}
	ino, err := d.medium.lookup(name)
	if err != nil {
		return nil, fmt.Errorf("memio: open %s on %s: %w", name, d.medium.opts.Path, err)
	}
	return d.open(ino), nil
}

func (d *Device) open(ino *inode) *file {
	f := &file{dev: d, ino: ino}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.files[f] = struct{}{}
	return f
}

// Remove implements blockio.Device.
func (d *Device) Remove(name string) error {
	if err := d.enter("remove", name); err != nil {
		return err
	}
	defer d.gate.Leave()
	if err := blockio.CheckName(name); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for f := range d.files {
		if f.ino.name == name {
			return fmt.Errorf("memio: remove %s on %s: %w", name, d.medium.opts.Path, blockio.ErrOpen)
		}
	}
	if err := d.medium.remove(name); err != nil {
		return fmt.Errorf("memio: remove %s on %s: %w", name, d.medium.opts.Path, err)
	}
	return nil
}

// List implements blockio.Device.
func (d *Device) List() ([]string, error) {
	if err := d.enter("list", "files"); err != nil {
		return nil, err
	}
	defer d.gate.Leave()
	m := d.medium
	m.mu.RLock()
	defer m.mu.RUnlock()
	if err := m.aliveLocked(); err != nil {
		return nil, fmt.Errorf("memio: list %s: %w", m.opts.Path, err)
	}
	return slices.Sorted(maps.Keys(m.names)), nil
}

// Do implements blockio.Device.
func (d *Device) Do(ctx context.Context, batch []blockio.Request) error {
	if err := d.enter("do", "a batch"); err != nil {
		return err
	}
	defer d.gate.Leave()
	if err := d.admit(ctx, batch); err != nil {
		return err
	}
	defer blockio.LeaveFiles(batch, d.gateOf)
	if len(batch) == 1 {
		d.transfer(&batch[0])
		return nil
	}
	for _, i := range d.order(len(batch)) {
		d.transfer(&batch[i])
	}
	return nil
}

// admit checks the batch and enters the gates of its files.
func (d *Device) admit(ctx context.Context, batch []blockio.Request) error {
	if err := blockio.CheckBatch(batch); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("memio: batch of %d not admitted: %w", len(batch), err)
	}
	d.medium.mu.RLock()
	err := d.medium.aliveLocked()
	d.medium.mu.RUnlock()
	if err != nil {
		return fmt.Errorf("memio: batch of %d on %s: %w", len(batch), d.medium.opts.Path, err)
	}
	return blockio.EnterFiles(batch, d.gateOf)
}

// gateOf returns the gate of a file of this device, else nil.
func (d *Device) gateOf(f blockio.File) *blockio.Gate {
	if f, ok := f.(*file); ok && f.dev == d {
		return &f.gate
	}
	return nil
}

func (d *Device) order(n int) []int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.rng.Perm(n)
}

func (d *Device) transfer(r *blockio.Request) {
	f := r.File.(*file)
	r.Err = nil
	if err := d.medium.transfer(f.ino, r); err != nil {
		r.Err = fmt.Errorf("memio: %v %d bytes at %d of %s: %w", r.Op, r.Len(), r.Offset, f.ino.name, err)
		if r.Op == blockio.Read {
			for _, b := range r.Bufs {
				invariants.Mangle(b)
			}
		}
	}
	d.counters.Done(r)
}

// Sync implements blockio.Device.
func (d *Device) Sync(ctx context.Context, files ...blockio.File) error {
	if err := d.enter("sync", "files"); err != nil {
		return err
	}
	defer d.gate.Leave()
	err := d.sync(ctx, files)
	d.counters.Synced(err)
	return err
}

func (d *Device) sync(ctx context.Context, files []blockio.File) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("memio: sync %s: %w", d.medium.opts.Path, err)
	}
	inodes, err := d.inodes(files)
	if err != nil {
		return err
	}
	if err := d.medium.sync(inodes); err != nil {
		return fmt.Errorf("memio: sync %d files of %s: %w", len(inodes), d.medium.opts.Path, err)
	}
	return nil
}

// inodes returns the inodes of the given files or, if none are given, of all open files.
func (d *Device) inodes(files []blockio.File) ([]*inode, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var inodes []*inode
	if len(files) == 0 {
		for f := range d.files {
			inodes = append(inodes, f.ino)
		}
		return inodes, nil
	}
	for _, bf := range files {
		f, ok := bf.(*file)
		if !ok || f.dev != d {
			return nil, fmt.Errorf("memio: sync of a file (%T) of another device: %w", bf, blockio.ErrRequest)
		}
		if f.gate.Closed() {
			return nil, fmt.Errorf("memio: sync %s: %w", f.Name(), blockio.ErrClosed)
		}
		inodes = append(inodes, f.ino)
	}
	return inodes, nil
}

// Lock implements blockio.Device.
func (d *Device) Lock(identity string) error {
	if err := d.enter("lock", "volume"); err != nil {
		return err
	}
	defer d.gate.Leave()
	return d.medium.lock(d, identity)
}

// Stat implements blockio.Device.
func (d *Device) Stat() (blockio.SpaceStat, error) {
	if err := d.enter("stat", "volume"); err != nil {
		return blockio.SpaceStat{}, err
	}
	defer d.gate.Leave()
	m := d.medium
	m.mu.RLock()
	defer m.mu.RUnlock()
	if err := m.aliveLocked(); err != nil {
		return blockio.SpaceStat{}, fmt.Errorf("memio: stat %s: %w", m.opts.Path, err)
	}
	return blockio.SpaceStat{TotalBytes: m.opts.CapacityBytes, FreeBytes: m.opts.CapacityBytes - m.usedBytes}, nil
}

// Info implements blockio.Device.
func (d *Device) Info() blockio.Info {
	return blockio.Info{Backend: "mem", Path: d.medium.opts.Path, Detail: "in memory; ends with the process"}
}

// Stats implements blockio.Device. InFlightBytes and InFlightLimitBytes are zero: no request stays in
// flight, and there is no budget.
func (d *Device) Stats() blockio.Stats { return d.counters.Stats() }

// Close implements blockio.Device. The volume remains: see Reopen.
func (d *Device) Close() error {
	if !d.gate.Close() {
		return nil
	}
	d.mu.Lock()
	files := slices.Collect(maps.Keys(d.files))
	d.mu.Unlock()
	for _, f := range files {
		f.Close()
	}
	d.medium.unlock(d)
	return nil
}
