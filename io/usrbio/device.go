//go:build cgo && linux

package usrbio

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/posixio"
)

// Device is a volume on 3FS whose bytes move through 3FS's rings.
type Device struct {
	*posixio.Dir
	engine  *engine
	closing sync.Once
}

var _ blockio.Device = (*Device)(nil)

// Open opens the existing directory dir, on a mount of 3FS, as a volume. blockio.ErrUnsupported
// means that 3FS's user-space I/O cannot be used; the text of the error has the reason. posixio
// then works instead, through the mount.
func Open(dir string, o Options) (blockio.Device, error) {
	o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	d, err := posixio.OpenDir(dir, false)
	if err != nil {
		return nil, err
	}
	e, err := newEngine(dir, o, d.Counters())
	if err != nil {
		return nil, errors.Join(fmt.Errorf("usrbio: open %s: %w", dir, err), d.Close())
	}
	d.Follow(registrar{e.lib})
	return &Device{Dir: d, engine: e}, nil
}

// registrar registers each open file with the library.
type registrar struct{ lib *library }

// Opened implements posixio.Descriptors.
func (r registrar) Opened(fd int) error { return r.lib.register(fd) }

// Closing implements posixio.Descriptors. If a descriptor were closed first, a new file with the
// same number could not be registered.
func (r registrar) Closing(fd int) { r.lib.deregister(fd) }

// Do implements blockio.Device.
func (d *Device) Do(ctx context.Context, batch []blockio.Request) error {
	if err := d.Admit(batch); err != nil {
		return err
	}
	err := d.engine.do(ctx, batch)
	d.Done(batch, err == nil)
	return err
}

// Info implements blockio.Device.
func (d *Device) Info() blockio.Info {
	return blockio.Info{Backend: "usrbio", Path: d.Path(), Direct: true, Detail: d.engine.detail()}
}

// Stats implements blockio.Device.
func (d *Device) Stats() blockio.Stats {
	s := d.Counters().Stats()
	s.InFlightBytes, s.InFlightLimitBytes = d.engine.budget.InFlightBytes(), d.engine.budget.LimitBytes()
	return s
}

// Close implements blockio.Device.
func (d *Device) Close() error {
	// Dir.Close waits for the batches in flight; afterwards the rings are idle.
	err := d.Dir.Close()
	d.closing.Do(d.engine.close)
	return err
}
