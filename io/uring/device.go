//go:build uring

package uring

import (
	"context"
	"errors"
	"fmt"

	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/posixio"
)

// Device is a volume whose bytes move through io_uring.
type Device struct {
	*posixio.Dir
	engine *engine
}

var _ blockio.Device = (*Device)(nil)

// Open opens the existing directory dir as a volume. blockio.ErrUnsupported means that io_uring
// cannot be used on this system; the text of the error has the reason. posixio then works instead.
func Open(dir string, o Options) (blockio.Device, error) {
	o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	d, err := posixio.OpenDir(dir, false)
	if err != nil {
		return nil, err
	}
	e, err := newEngine(o, d.Counters())
	if err != nil {
		return nil, errors.Join(fmt.Errorf("uring: open %s: %w", dir, explain(err)), d.Close())
	}
	return &Device{Dir: d, engine: e}, nil
}

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
	return blockio.Info{
		Backend: "uring", Path: d.Path(), Direct: d.Direct(), Volatile: d.Volatile(),
		Detail: d.Detail() + ", " + d.engine.detail(),
	}
}

// Stats implements blockio.Device.
func (d *Device) Stats() blockio.Stats {
	s := d.Counters().Stats()
	s.InFlightBytes = d.engine.env.budget.InFlightBytes()
	s.InFlightLimitBytes = d.engine.env.budget.LimitBytes()
	return s
}

// Close implements blockio.Device.
func (d *Device) Close() error {
	// Dir.Close waits for the batches in flight; afterwards the rings are idle.
	err := d.Dir.Close()
	return errors.Join(err, d.engine.close())
}
