package traffic

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma/copier"
	"github.com/penstock-kv/penstock/rdma/rdmatest/simrdma"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

const layoutPages = 40

// layouts are device memories of layoutPages pages of each layer.
func layouts() map[string]Device {
	const gap = 64
	layers, lb := geo.Groups[0].Layers, uint64(geo.LayerBytes(0))
	all := map[string]Device{
		"layer-major":         layerMajor(layers, layoutPages, lb),
		"layer-major, padded": {Stride: lb + gap, Pages: layoutPages},
		"block-major":         {Stride: uint64(layers) * lb, Pages: layoutPages},
		"block-major, padded": {Stride: uint64(layers)*(lb+gap) + gap, Pages: layoutPages},
	}
	for l := range uint64(layers) {
		for name, base := range map[string]uint64{
			"layer-major, padded": gap + l*layoutPages*(lb+gap), "block-major": l * lb, "block-major, padded": gap + l*(lb+gap),
		} {
			d := all[name]
			d.Bases = append(d.Bases, base)
			all[name] = d
		}
	}
	return all
}

// TestLayouts: engines whose device memories have different layouts exchange a prompt of which
// each side has read a part. No byte between the pages changes. The NICs of one half of the
// cases have windows of several spans, those of the other half of one range.
func TestLayouts(t *testing.T) {
	testkit.VerifyNone(t)
	for prefillName, prefill := range layouts() {
		for decodeName, decode := range layouts() {
			t.Run(prefillName+" to "+decodeName, func(t *testing.T) {
				serveBetween(t, prefill, decode, func(s *shelf, _ int, d Device) *engine {
					r, err := tcp.New(t.Context(), tcp.Options{Listen: "127.0.0.1:0", Token: token})
					if err != nil {
						t.Fatal(err)
					}
					return newEngineIn(t, s, newAt(s), d, 4<<20, nil, r, r)
				})
			})
			t.Run(prefillName+" to "+decodeName+", staged", func(t *testing.T) {
				serveBetween(t, prefill, decode, func(s *shelf, host int, d Device) *engine {
					r, err := tcp.New(t.Context(), tcp.Options{Listen: "127.0.0.1:0", Token: token})
					if err != nil {
						t.Fatal(err)
					}
					var c copier.Copier
					if host == 0 {
						c = newApart(t)
					}
					return newEngineIn(t, s, newAt(s), d, 4<<20, c, r, r)
				})
			})
			t.Run(prefillName+" to "+decodeName+", one range", func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					f := newSimFabric(1)
					serveBetween(t, prefill, decode, func(s *shelf, host int, d Device) *engine {
						r := newSimNIC(t, f, host, simrdma.NICOptions{}.LikeRC())
						return newEngineIn(t, s, newAt(s), d, 4<<20, nil, r, r)
					})
				})
			})
		}
	}
}

// serveBetween serves a request between two engines with device memory of these layouts.
func serveBetween(t *testing.T, prefill, decode Device, open func(s *shelf, host int, d Device) *engine) {
	t.Helper()
	s := newShelf()
	s.put(1, 20)
	engines := []*engine{open(s, 0, prefill), open(s, 1, decode)}
	for _, e := range engines {
		for i := range e.device {
			e.device[i] = 0xEE
		}
	}
	r := newRequest(t, engines[0], engines[1], 1, 30, 20)
	if err := r.run(t.Context(), 12); err != nil {
		t.Fatal(err)
	}
	for _, e := range engines {
		rest := bytes.Clone(e.device)
		for l := range e.opts.Device.Bases {
			for _, page := range r.pages {
				off := e.opts.Device.offset(l, page)
				copy(rest[off:off+e.geo.maxBytes], bytes.Repeat([]byte{0xEE}, int(e.geo.maxBytes)))
			}
		}
		if i := slices.IndexFunc(rest, func(b byte) bool { return b != 0xEE }); i >= 0 {
			t.Errorf("byte %d of device memory, outside of the request's pages, has changed", i)
		}
	}
}

// TestBadLayouts: device memory whose pages overlap or are outside of it is refused, and so is a
// job with a page that the memory does not have.
func TestBadLayouts(t *testing.T) {
	testkit.VerifyNone(t)
	s := newShelf()
	e := newEngine(t, s, geo.Groups[0].Layers, 8, 1<<20)
	lb := e.geo.maxBytes
	for text, change := range map[string]func(*Device){
		"without a layer":       func(d *Device) { d.Bases = nil },
		"-1 pages":              func(d *Device) { d.Pages = -1 },
		"every 1 bytes":         func(d *Device) { d.Stride = 1 },
		"1000 device pages":     func(d *Device) { d.Pages = 1000 },
		"in memory of":          func(d *Device) { d.Bases[1] = d.Region.Len() },
		"layers 0 and 1 overla": func(d *Device) { d.Bases[1] = d.Bases[0] + lb - 1 },
		"pages of layers 0 and": func(d *Device) { d.Bases[1] = 2*lb + 1 },
	} {
		o := e.opts
		o.Device.Bases = append([]uint64(nil), o.Device.Bases...)
		change(&o.Device)
		if err := o.Validate(); !errors.Is(err, ErrJob) || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v", text, err)
		}
	}
	_, err := e.Prefill(t.Context(), PrefillJob{Request: "r", Blocks: 1, Pages: []uint32{8}})
	if !errors.Is(err, ErrJob) || !strings.Contains(err.Error(), "page 8; each layer has 8") {
		t.Errorf("%v", err)
	}
}
