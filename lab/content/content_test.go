package content

import (
	"bytes"
	"testing"

	"github.com/penstock-kv/penstock/kv"
)

// FuzzContent: for every length, Fill writes the words one after the other, and Differs finds
// exactly the first byte that was changed.
func FuzzContent(f *testing.F) {
	f.Add([]byte("0123456789abcdef"), uint64(3), uint16(1000), uint16(77), byte(1))
	f.Add([]byte("0123456789abcdef"), uint64(0), uint16(0), uint16(0), byte(0))
	f.Add([]byte("0123456789abcdef"), uint64(1), uint16(13), uint16(12), byte(0x80))
	f.Fuzz(func(t *testing.T, raw []byte, epoch uint64, length, at uint16, flip byte) {
		id, err := kv.BlockIDFromBytes(raw)
		if err != nil {
			return
		}
		c := Of(id, kv.Epoch(epoch))
		got := make([]byte, length)
		c.Fill(got)
		want := make([]byte, length)
		for i := range want {
			want[i] = byte(c.word(uint64(i/8)) >> (8 * (i % 8)))
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("Fill of %d bytes is not the words in order", length)
		}
		if i := c.Differs(got); i >= 0 {
			t.Fatalf("its own content differs at %d", i)
		}
		if from := int(at) / 8 * 8; from <= len(got) && c.From(int64(from)).Differs(got[from:]) >= 0 {
			t.Fatalf("From(%d) differs from the content at this offset", from)
		}
		if flip == 0 || int(at) >= len(got) {
			return
		}
		got[at] ^= flip
		if i := c.Differs(got); i != int(at) {
			t.Fatalf("byte %d was changed; Differs returns %d", at, i)
		}
	})
}

// TestContentsDiffer: for ids that differ in one bit, and for different epochs, the contents differ
// from the first word on.
func TestContentsDiffer(t *testing.T) {
	seen := map[uint64]string{}
	add := func(name string, c Content) {
		if other, ok := seen[c.word(0)]; ok {
			t.Errorf("%s begins like %s", name, other)
		}
		seen[c.word(0)] = name
	}
	var base kv.BlockID
	add("zero", Of(base, 0))
	for bit := range 8 * len(base) {
		id := base
		id[bit/8] ^= 1 << (bit % 8)
		add(id.String(), Of(id, 0))
	}
	for epoch := kv.Epoch(1); epoch < 100; epoch++ {
		add("epoch", Of(base, epoch))
	}
}

func BenchmarkContentDiffers(b *testing.B) {
	c := Of(kv.BlockID{1}, 0)
	block := make([]byte, 1<<20)
	c.Fill(block)
	b.SetBytes(int64(len(block)))
	for b.Loop() {
		if c.Differs(block) >= 0 {
			b.Fatal("differs")
		}
	}
}

func BenchmarkContentFill(b *testing.B) {
	c := Of(kv.BlockID{1}, 0)
	block := make([]byte, 1<<20)
	b.SetBytes(int64(len(block)))
	for b.Loop() {
		c.Fill(block)
	}
}
