package trie

import (
	"bytes"
	"errors"
	"slices"
	"testing"

	"github.com/penstock-kv/penstock/kv"
)

// FuzzRecord: a record that decodes encodes to the same bytes, so each record has exactly one
// encoding. Any other input is refused with errRecord.
func FuzzRecord(f *testing.F) {
	id := blockID("a1a2a3a4")
	for _, r := range []record{
		{id: id, gen: 1, serial: 1},
		{id: id, gen: 1<<48 - 1, serial: 1<<64 - 1, depth: 1<<32 - 1, group: 7, flags: recTransfer},
		{id: id, gen: 7, serial: 3, depth: 200, flags: recParentPrev, parent: kv.BlockID{1, 2, 3, 4}},
		{id: id, gen: 7, serial: 300, depth: 200, flags: recParentID, parent: id},
	} {
		b := r.append(nil)
		if len(b) > recordMax {
			f.Errorf("%+v takes %d bytes; want at most %d", r, len(b), recordMax)
		}
		if got, err := decodeRecord(b); err != nil || got != r {
			f.Errorf("%+v came back as %+v: %v", r, got, err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := decodeRecord(b)
		if err != nil {
			if !errors.Is(err, errRecord) {
				t.Errorf("error %v is not errRecord", err)
			}
			return
		}
		if got := r.append(nil); !bytes.Equal(got, b) {
			t.Errorf("% x decodes to %+v, which encodes to % x", b, r, got)
		}
	})
}

func FuzzNamespaceRecord(f *testing.F) {
	def := kv.Namespace{
		ID: 7, Name: "glm", Tenant: "t", Salt: []byte{1}, Index: kv.IndexTrie, Epoch: 3, Older: []kv.Epoch{1}, Keep: 2, QuotaBytes: 9, Replicas: 2,
		Geometry: kv.Geometry{BlockTokens: 64, DType: "fp8", Layout: "tp1", Groups: []kv.Group{
			{Kind: kv.Full, Layers: 2, TokenBytes: 3}, {Kind: kv.Window, Layers: 1, TokenBytes: 1, WindowTokens: 100},
		}},
	}
	b, err := encodeNamespace(def, []*space{{epoch: 3, serial: 12}, {epoch: 1, serial: 4}})
	if err != nil {
		f.Fatal(err)
	}
	if got, _, err := decodeNamespace(b); err != nil || got.Replicas != def.Replicas || got.QuotaBytes != def.QuotaBytes {
		f.Errorf("%+v came back as %+v: %v", def, got, err)
	}
	f.Add(b)
	f.Add([]byte(`{"id":1}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		def, live, err := decodeNamespace(b)
		if err != nil {
			return
		}
		again, err := encodeNamespace(def, live)
		if err != nil {
			t.Fatal(err)
		}
		got, liveAgain, err := decodeNamespace(again)
		same := func(a, b *space) bool { return a.epoch == b.epoch && a.serial == b.serial }
		if err != nil || !slices.EqualFunc(live, liveAgain, same) || !slices.Equal(got.Live(), def.Live()) || got.Keep != def.Keep || got.Name != def.Name || got.ID != def.ID || !got.Geometry.Equal(def.Geometry) {
			t.Errorf("%s came back as %+v: %v", b, got, err)
		}
	})
}

func TestRecordSize(t *testing.T) {
	// Most records name their parent as the block in the previous slot.
	r := record{id: blockID("a1"), gen: 1 << 40, serial: 200, depth: 500, flags: recParentPrev}
	if n := blockKeyLen + len(r.append(nil)); n > 42 {
		t.Errorf("a block takes %d bytes of key and value; want at most 42", n)
	}
}
