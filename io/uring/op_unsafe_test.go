//go:build uring

package uring

import (
	"bytes"
	"testing"
	"unsafe"
)

// FuzzRemaining compares the iovecs of the rest of a request with a slice of the concatenated
// buffers.
func FuzzRemaining(f *testing.F) {
	f.Add([]byte{4, 1, 9}, uint16(5), uint16(6))
	f.Add([]byte{1}, uint16(0), uint16(1))
	f.Add([]byte{255, 255, 1}, uint16(510), uint16(1))
	f.Fuzz(func(t *testing.T, lengths []byte, skip, n uint16) {
		var bufs [][]byte
		var all []byte
		for i, l := range lengths {
			if l == 0 {
				continue
			}
			b := bytes.Repeat([]byte{byte(i)}, int(l))
			for j := range b {
				b[j] += byte(j * 3)
			}
			bufs = append(bufs, b)
			all = append(all, b...)
		}
		if n == 0 || int(skip)+int(n) > len(all) {
			t.Skip("no such part of these buffers")
		}
		var got []byte
		for _, v := range remaining(nil, bufs, int64(skip), int64(n)) {
			if v.Len == 0 {
				t.Error("an empty iovec")
			}
			got = append(got, unsafe.Slice(v.Base, v.Len)...)
		}
		if want := all[skip:][:n]; !bytes.Equal(got, want) {
			t.Errorf("%d bytes after %d of %v: %v; want %v", n, skip, lengths, got, want)
		}
	})
}
