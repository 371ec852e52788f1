package memio

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/penstock-kv/penstock/io/blockio"
)

// ErrPowerLost is returned by every operation after the power has failed, and by operations in
// progress at that moment. Crash returns the volume as it is after the failure.
var ErrPowerLost = errors.New("the power of this memory device is off")

// medium is the disk that several Devices of one volume share.
type medium struct {
	opts Options

	// left is the number of mutations (writes, creates, removes, syncs) that may still happen
	// before the power fails. It is negative after the failure. If no failure is planned, it starts
	// at noFuse.
	left      atomic.Int64
	mutations atomic.Int64

	// mu is held for reading by operations on content, and for writing by operations on names, on
	// locks and on the power.
	mu        sync.RWMutex
	lost      bool
	names     map[string]*inode
	removed   []*inode // removed since the last Sync, oldest first
	usedBytes int64    // sum of the sizes in names
	owner     *Device  // the Device that holds the lock; identity is its text
	identity  string
}

// noFuse is larger than the number of mutations of any test.
const noFuse = int64(1) << 62

func newMedium(opts Options) *medium {
	m := &medium{opts: opts, names: make(map[string]*inode)}
	m.left.Store(noFuse)
	return m
}

// countMutation counts one mutation. It returns ErrPowerLost if the power fails at this mutation.
// The caller then performs the mutation only in part.
func (m *medium) countMutation() error {
	m.mutations.Add(1)
	if m.left.Add(-1) < 0 {
		return ErrPowerLost
	}
	return nil
}

// aliveLocked returns ErrPowerLost once the power has failed.
func (m *medium) aliveLocked() error {
	if m.lost || m.left.Load() < 0 {
		return ErrPowerLost
	}
	return nil
}

func (m *medium) create(name string, sizeBytes int64) (*inode, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.aliveLocked(); err != nil {
		return nil, err
	}
	if _, ok := m.names[name]; ok {
		return nil, blockio.ErrExist
	}
	if free := m.opts.CapacityBytes - m.usedBytes; sizeBytes > free {
		return nil, fmt.Errorf("%d bytes wanted, %d free: %w", sizeBytes, free, blockio.ErrNoSpace)
	}
	ino := newInode(name, sizeBytes)
	m.names[name] = ino
	m.usedBytes += sizeBytes
	if err := m.countMutation(); err != nil {
		return nil, err
	}
	return ino, nil
}

func (m *medium) lookup(name string) (*inode, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if err := m.aliveLocked(); err != nil {
		return nil, err
	}
	ino, ok := m.names[name]
	if !ok {
		return nil, blockio.ErrNotExist
	}
	return ino, nil
}

func (m *medium) remove(name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.aliveLocked(); err != nil {
		return err
	}
	ino, ok := m.names[name]
	if !ok {
		return blockio.ErrNotExist
	}
	delete(m.names, name)
	m.usedBytes -= ino.size
	m.removed = append(m.removed, ino)
	return m.countMutation()
}

// sync makes the creation and the present content of the inodes durable, and all removals so far.
func (m *medium) sync(inodes []*inode) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.aliveLocked(); err != nil {
		return err
	}
	if err := m.countMutation(); err != nil {
		return err
	}
	for _, ino := range inodes {
		ino.settle()
	}
	m.removed = nil
	return nil
}

// transfer moves one request's bytes.
func (m *medium) transfer(ino *inode, r *blockio.Request) error {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if err := m.aliveLocked(); err != nil {
		return err
	}
	if r.Op == blockio.Read {
		ino.read(r.Offset, r.Bufs)
		return nil
	}
	ino.write(r.Offset, r.Bufs, m.opts.VersionsMax)
	return m.countMutation()
}

func (m *medium) lock(d *Device, identity string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.aliveLocked(); err != nil {
		return err
	}
	switch m.owner {
	case nil:
		m.owner, m.identity = d, identity
		return nil
	case d:
		return fmt.Errorf("memio: volume %s is locked by this device already", m.opts.Path)
	}
	return &blockio.OwnedError{Volume: m.opts.Path, Owner: m.identity}
}

func (m *medium) unlock(d *Device) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.owner == d {
		m.owner, m.identity = nil, ""
	}
}

// clone copies the medium with its unsynced state. Pages are immutable, so both share them.
func (m *medium) clone() *medium {
	m.mu.Lock()
	defer m.mu.Unlock()
	c := newMedium(m.opts)
	c.usedBytes = m.usedBytes
	for name, ino := range m.names {
		c.names[name] = ino.clone()
	}
	for _, ino := range m.removed {
		c.removed = append(c.removed, ino.clone())
	}
	return c
}
