//go:build cgo && linux

package usrbio

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/penstock-kv/penstock/internal/sys"
	"github.com/penstock-kv/penstock/io/blockio"
)

// Probe reports whether 3FS's user-space I/O works in dir. It writes and reads a page of a file
// there through the rings. If that does not work, reason has the cause and a remedy.
func Probe(dir string, o Options) (ok bool, reason string) {
	if err := probe(dir, o); err != nil {
		return false, err.Error()
	}
	return true, "a page was written and read through 3FS's rings in " + dir
}

func probe(dir string, o Options) (err error) {
	// The name is in upper case, so List of a volume in dir does not return it.
	sub, err := os.MkdirTemp(dir, "PROBE.")
	if err != nil {
		return fmt.Errorf("usrbio: scratch directory: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(sub)) }()
	d, err := Open(sub, Options{Library: o.Library, Slots: 1, SlotBytes: blockio.Align})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	f, err := d.Create("page", blockio.Align)
	if err != nil {
		return err
	}
	page, err := sys.MapAnon(sys.HugePageSize, false)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sys.Unmap(page)) }()
	const mark = "penstock"
	copy(page, mark)
	for _, op := range [...]blockio.Op{blockio.Write, blockio.Read} {
		batch := []blockio.Request{{Op: op, File: f, Bufs: [][]byte{page[:blockio.Align]}}}
		if err := errors.Join(d.Do(context.Background(), batch), batch[0].Err); err != nil {
			return err
		}
		if op == blockio.Read && string(page[:len(mark)]) != mark {
			return fmt.Errorf("usrbio: a page read from %s through the ring is not what was written", dir)
		}
		clear(page[:len(mark)])
	}
	return nil
}
