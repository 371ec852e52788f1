package blockstore_test

import (
	"context"
	"fmt"
	"log"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
)

// A piece of two layers is written and read back.
func Example() {
	ctx := context.Background()
	s, err := blockstore.Open(ctx, blockstore.Options{
		Devices: []blockio.Device{memio.New(memio.Options{})}, CapacityBytes: 64 << 20,
	})
	if err != nil {
		log.Fatal(err)
	}
	defer s.Close(ctx)
	// An engine would Adopt here every slot that its index refers to.
	if err := s.Ready(); err != nil {
		log.Fatal(err)
	}

	key := ondisk.SlotKey{Namespace: 1, Epoch: 1, ID: kv.BlockID{7}, PayloadBytes: 10, Layers: 2}
	layout, err := s.SlotLayout(key.PayloadBytes, key.Layers)
	if err != nil {
		log.Fatal(err)
	}
	refs, err := s.Reserve(ctx, key.PayloadBytes, key.Layers, 1, 0, false)
	if err != nil {
		log.Fatal(err)
	}

	buf := alignedPages(layout.SlotBytes())
	payload := buf[layout.HeaderBytes():][:layout.PayloadBytes]
	copy(payload, "helloworld")
	err = s.Write(ctx, []blockstore.Write{{Ref: refs[0], Buf: buf, Header: ondisk.SlotHeader{
		SlotKey: key, Class: ondisk.ClassPrefix, LayerSums: ondisk.AppendLayerSums(nil, payload, key.Layers),
	}}})
	if err != nil {
		log.Fatal(err)
	}
	if err := s.Commit(refs[0]); err != nil { // now the index may refer to the slot
		log.Fatal(err)
	}

	// Read the second layer alone.
	_, bytes, skip := layout.Range(1, 1)
	reads := []blockstore.Read{{Ref: refs[0], Want: key, FirstLayer: 1, Layers: 1, Buf: alignedPages(bytes)}}
	if err := s.Read(ctx, reads); err != nil {
		log.Fatal(err)
	}
	if reads[0].Err != nil {
		log.Fatal(reads[0].Err) // ErrStale and ErrCorrupt are misses
	}
	fmt.Printf("%v: %q\n", refs[0].Extent, reads[0].Buf[skip:][:layout.LayerBytes()])
	// Output: v0/s0/0: "world"
}

// alignedPages is a substitute for an arena.
func alignedPages(n int64) []byte {
	b := make([]byte, n+blockio.Align)
	for !blockio.Aligned(b) {
		b = b[1:]
	}
	return b[:n]
}
