package main

import (
	"testing"

	"github.com/penstock-kv/penstock/lab/bench/peer"
	"github.com/penstock-kv/penstock/lab/bench/suite"
)

// TestWriteLoad: ib_write_bw is compared with the writes that the engine posts to the card, for
// each kind of row. For one write at a time it has one write in flight.
func TestWriteLoad(t *testing.T) {
	const kib, mib = 1 << 10, 1 << 20
	for _, c := range []struct {
		name string
		load suite.Load
		want peer.WriteLoad
	}{
		{"one small write", suite.Load{Bytes: 64 * kib, Depth: 1}, peer.WriteLoad{WriteBytes: 64 * kib, Depth: 1}},
		{"one write longer than a message", suite.Load{Bytes: 32 * mib, Depth: 1}, peer.WriteLoad{WriteBytes: 8 * mib, Depth: 4}},
		{"not a multiple of a message", suite.Load{Bytes: 9 * mib, Depth: 1}, peer.WriteLoad{WriteBytes: 8 * mib, Depth: 2}},
		{"some writes", suite.Load{Bytes: mib, Depth: 8}, peer.WriteLoad{WriteBytes: mib, Depth: 8}},
		{"pages that fit the queue", suite.Load{Bytes: mib, Depth: 4, Page: 64 * kib}, peer.WriteLoad{WriteBytes: 64 * kib, Depth: 64}},
		{"more pages than the queue takes", suite.Load{Bytes: 16 * mib, Depth: 4, Page: 16 * kib}, peer.WriteLoad{WriteBytes: 16 * kib, Depth: 256}},
	} {
		if got := writeLoad(c.load, 8*mib, 256); got != c.want {
			t.Errorf("%s: %+v; want %+v", c.name, got, c.want)
		}
	}
}
