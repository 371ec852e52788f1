//go:build cuda && cgo && linux

package binding

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testnode"
	"github.com/penstock-kv/penstock/rdma/copier"
	"github.com/penstock-kv/penstock/rdma/copier/copiertest"
)

// TestTransfersOnDevice is TestTransfers with device memory that neither CPU nor NIC may touch.
func TestTransfersOnDevice(t *testing.T) {
	newPairIn(t, func(p *pair) (TrafficOptions, []byte) {
		o, mem := p.trafficOptions()
		device := copiertest.Device(t, len(mem))
		library := copiertest.Driver(t)
		o.Address, o.Copier = device.Address, func() (copier.DeviceCopier, error) {
			return copier.NewCUDA(copier.CUDAOptions{Library: library})
		}
		return o, device.Bytes
	}).testTransfers()
}

// TestNoDevice: a device that cannot be opened fails OpenTraffic with the reason, and leaves nothing open.
func TestNoDevice(t *testing.T) {
	p := newPair(t)
	for library, want := range map[string]string{"libnosuch.so.1": "libnosuch.so.1", copiertest.Driver(t): "open GPU 3"} {
		o, _ := p.trafficOptions()
		o.Copier = func() (copier.DeviceCopier, error) {
			return copier.NewCUDA(copier.CUDAOptions{Library: library, Device: 3})
		}
		if _, err := p.ns.OpenTraffic(o); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want an invalid option and %q", err, want)
		}
	}
}

// deviceRig is a store with memory of a device that the CPU cannot access. A slot of the staging
// memory has slotBytes.
type deviceRig struct {
	*rig
	driver string
	device copiertest.Memory
	memory *Memory
}

const slotBytes = 2 << 20

func newDeviceRig(t *testing.T, deviceBytes int) *deviceRig {
	t.Helper()
	r := &deviceRig{driver: copiertest.Driver(t), device: copiertest.Device(t, deviceBytes)}
	r.rig = newRig(t, testnode.Start(t, testnode.Options{CapacityBytes: 64 << 20, SegmentBytes: 4 << 20}).Addr)
	h, err := r.store.RegisterDevice(r.options(), r.device.Address, uint64(deviceBytes))
	r.memory = valueOf(t, r.library.Memory, h, err)
	return r
}

func (r *deviceRig) options() DeviceOptions {
	return DeviceOptions{StagingBytes: 1, Open: func() (copier.DeviceCopier, error) {
		return copier.NewCUDA(copier.CUDAOptions{Library: r.driver})
	}}
}

func (r *deviceRig) ensure(def kv.Namespace) *Namespace {
	r.t.Helper()
	h, err := r.store.Ensure(def, false)
	return valueOf(r.t, r.library.Namespace, h, err)
}

// on returns a batch whose values have layers of layerBytes. The layers are apart: layer l of value v
// is in page order[v] of the layer's pages.
func (r *deviceRig) on(prefix string, order []int, layers, layerBytes int) *Batch {
	b := r.batch(prefix, len(order), 1)
	b.Addresses, b.Lengths, b.PieceFragments = nil, nil, []uint32{0}
	pages := len(r.device.Bytes) / layers / layerBytes
	for _, page := range order {
		for l := range layers {
			b.Addresses = append(b.Addresses, r.device.Address+uint64((l*pages+page)*layerBytes))
			b.Lengths = append(b.Lengths, uint64(layerBytes))
		}
		b.PieceFragments = append(b.PieceFragments, uint32(len(b.Addresses)))
	}
	return b
}

func fill(b []byte, seed uint64) {
	random := rand.New(rand.NewPCG(seed, 1))
	for i := range b {
		b[i] = byte(random.Uint32())
	}
}

// TestValuesOnDevice: values in scattered pages of a device are stored and loaded, in batches of
// several slots, whole and by layers.
func TestValuesOnDevice(t *testing.T) {
	const layers, layerBytes, values = 4, 32 << 10, 60 // 7.5 MiB: four slots
	const all = layers * layerBytes * values
	for _, index := range []kv.IndexKind{kv.IndexFlat, kv.IndexTrie} {
		t.Run(fmt.Sprint(index), func(t *testing.T) {
			r := newDeviceRig(t, all)
			ns := r.ensure(kv.Namespace{Name: "device", Index: index, Geometry: kv.SingleGroup(layers, 1, layerBytes)})
			fill(r.device.Bytes, 1)
			want := slices.Clone(r.device.Bytes)
			order := rand.New(rand.NewPCG(2, 2)).Perm(values)
			if got := ns.Do(OpPut, r.on("k", order, layers, layerBytes)); got.Err != nil || got.OK != values || got.Bytes != all {
				t.Fatalf("put: %+v", got)
			}
			clear(r.device.Bytes)
			if got := ns.Do(OpGet, r.on("k", order, layers, layerBytes)); got.Err != nil || got.OK != values || got.Prefix != values || got.Bytes != all {
				t.Fatalf("get: %+v", got)
			}
			if !bytes.Equal(r.device.Bytes, want) {
				t.Error("other bytes came back")
			}
			if got := ns.Do(OpPut, r.on("k", order, layers, layerBytes)); got.Err != nil || got.OK != values || got.Bytes != 0 {
				t.Errorf("a put of values that are stored: %+v", got)
			}
			clear(r.device.Bytes)
			part := r.on("k", order, layers, layerBytes)
			part.FirstLayer, part.Layers = 1, 2
			part.Addresses, part.Lengths, part.PieceFragments = middle(part.Addresses), middle(part.Lengths), nil
			for i := range values + 1 {
				part.PieceFragments = append(part.PieceFragments, uint32(2*i))
			}
			if got := ns.Do(OpGet, part); got.Err != nil || got.OK != values || got.Bytes != all/2 {
				t.Fatalf("get of layers: %+v", got)
			}
			if half := all / layers; !bytes.Equal(r.device.Bytes[half:3*half], want[half:3*half]) ||
				len(bytes.Trim(r.device.Bytes[:half], "\x00"))+len(bytes.Trim(r.device.Bytes[3*half:], "\x00")) != 0 {
				t.Error("the get of two layers wrote other bytes")
			}
		})
	}
}

// middle returns the second and the third element of each four.
func middle(all []uint64) (out []uint64) {
	for ; len(all) > 0; all = all[4:] {
		out = append(out, all[1:3]...)
	}
	return out
}

// TestMissesOnDevice: a get ends at the first absent key of a chain, and finds all other keys of a
// flat namespace. Pages of absent keys do not change.
func TestMissesOnDevice(t *testing.T) {
	const layers, layerBytes, values, absent = 2, 64 << 10, 40, 25
	for index, found := range map[kv.IndexKind]int{kv.IndexFlat: values - 1, kv.IndexTrie: absent} {
		t.Run(fmt.Sprint(index), func(t *testing.T) {
			r := newDeviceRig(t, layers*layerBytes*values)
			ns := r.ensure(kv.Namespace{Name: "device", Index: index, Geometry: kv.SingleGroup(layers, 1, layerBytes)})
			fill(r.device.Bytes, 3)
			order := rand.New(rand.NewPCG(4, 2)).Perm(values)
			if got := ns.Do(OpPut, r.on("k", order, layers, layerBytes)); got.Err != nil || got.OK != values {
				t.Fatalf("put: %+v", got)
			}
			gone := r.on("k", order, layers, layerBytes)
			gone.Keys, gone.KeyOffsets, gone.Results = gone.Keys[gone.KeyOffsets[absent]:gone.KeyOffsets[absent+1]], []uint32{0, gone.KeyOffsets[1]}, nil
			if index == kv.IndexTrie {
				gone = r.on("k", order[:absent+1], layers, layerBytes)
			}
			if got := ns.Do(OpDelete, gone); got.Err != nil {
				t.Fatalf("delete: %+v", got)
			}
			if index == kv.IndexTrie { // the blocks before it were deleted too
				if got := ns.Do(OpPut, r.on("k", order[:absent], layers, layerBytes)); got.Err != nil || got.OK != absent {
					t.Fatalf("put: %+v", got)
				}
			}
			fill(r.device.Bytes, 9)
			before := slices.Clone(r.device.Bytes)
			b := r.on("k", order, layers, layerBytes)
			if got := ns.Do(OpGet, b); got.Err != nil || got.OK != found || got.Prefix != absent || b.Results[absent] != KeyMiss {
				t.Errorf("get: %+v, results %v", got, b.Results)
			}
			for v, page := range order {
				at := page * layerBytes
				if same := bytes.Equal(r.device.Bytes[at:at+layerBytes], before[at:at+layerBytes]); same == (b.Results[v] == KeyOK) {
					t.Errorf("value %d has result %d, and its page is the same as before: %v", v, b.Results[v], same)
				}
			}
		})
	}
}

// TestStreams: a put takes the bytes that the engine's stream has computed, and a get writes to pages
// when the stream has read them. Submit does not wait for the stream, and a get does not wait for a
// put that does.
func TestStreams(t *testing.T) {
	const page = 64 << 10
	r := newDeviceRig(t, 3*page)
	other := copiertest.Device(t, page)
	ns := r.ensure(kv.Namespace{Name: "device", Index: kv.IndexFlat, Geometry: kv.SingleGroup(1, 1, page)})
	at := func(i int) copiertest.Memory {
		return copiertest.Memory{Address: r.device.Address + uint64(i*page), Bytes: r.device.Bytes[i*page : (i+1)*page]}
	}
	engine := copiertest.NewStream(t, r.driver)
	onStream := func(key string, i int) *Batch {
		b := r.on(key, []int{i}, 1, page)
		b.OnStream, b.Stream, b.Timeout = true, engine.Handle(), time.Minute
		return b
	}
	wait := func(h Handle, err error) {
		t.Helper()
		var got Result
		if err == nil {
			got, err = r.store.Wait(h, time.Minute)
		}
		if err != nil || got.Err != nil || got.OK != 1 {
			t.Fatalf("%+v, %v", got, err)
		}
	}
	fill(other.Bytes, 5)
	fill(at(2).Bytes, 6)
	wait(ns.Submit(OpPut, r.on("stored", []int{2}, 1, page)))

	open := engine.Gate(t)
	engine.Copy(at(0), other) // the engine computes page 0
	put, err := ns.Submit(OpPut, onStream("computed", 0))
	if err != nil {
		t.Fatal(err)
	}
	wait(ns.Submit(OpGet, r.on("stored", []int{1}, 1, page)))
	if !bytes.Equal(at(1).Bytes, at(2).Bytes) {
		t.Error("the get during a put has other bytes")
	}
	open()
	wait(put, nil)
	wait(ns.Submit(OpGet, r.on("computed", []int{1}, 1, page)))
	if !bytes.Equal(at(1).Bytes, other.Bytes) {
		t.Error("the put did not wait for the engine's stream")
	}

	open = engine.Gate(t)
	want := slices.Clone(at(1).Bytes)
	engine.Copy(other, at(1)) // the engine reads page 1
	clear(other.Bytes)
	get, err := ns.Submit(OpGet, onStream("stored", 1))
	if err != nil {
		t.Fatal(err)
	}
	open()
	wait(get, nil)
	if !bytes.Equal(other.Bytes, want) || !bytes.Equal(at(1).Bytes, at(2).Bytes) {
		t.Error("the get did not wait for the engine's stream")
	}
}

// TestFaultsOnDevice: a copy that the driver refuses fails its values alone.
func TestFaultsOnDevice(t *testing.T) {
	const bytesOf, values = 512 << 10, 12 // three slots
	for op, nth := range map[Op]int{OpPut: 6, OpGet: values + 6} {
		t.Run(fmt.Sprint(op), func(t *testing.T) {
			t.Setenv("FAKE_CUDA_FAIL", fmt.Sprintf("cuMemcpyAsync %d", nth))
			r := newDeviceRig(t, bytesOf*values)
			ns := r.namespace("device", 1, bytesOf)
			order := rand.New(rand.NewPCG(8, 2)).Perm(values)
			b := r.on("k", order, 1, bytesOf)
			got := ns.Do(OpPut, b)
			if op == OpGet {
				if got.Err != nil || got.OK != values {
					t.Fatalf("put: %+v", got)
				}
				got = ns.Do(OpGet, b)
			}
			if got.Err == nil || !strings.Contains(got.Err.Error(), "made to fail") || got.OK >= values || got.OK == 0 {
				t.Errorf("%+v, results %v", got, b.Results)
			}
			if op == OpGet && (got.OK != values-4 || b.Results[4] != KeyLost || b.Results[7] != KeyLost) {
				t.Errorf("results %v; want the values of the second slot lost", b.Results)
			}
			b = r.on("k", order, 1, bytesOf)
			if got := ns.Do(op, b); got.Err != nil || got.OK != values {
				t.Errorf("the batch after the fault: %+v", got)
			}
		})
	}
}

// TestDeviceErrors: the error of a wrong batch or registration has its reason, and nothing stays in use.
func TestDeviceErrors(t *testing.T) {
	r := newDeviceRig(t, 4*slotBytes)
	r.register()
	small, large := r.namespace("small", 1, 4096), r.namespace("large", 1, slotBytes+4096)
	host, device := r.batch("k", 2, 4096), r.on("k", []int{0, 1}, 1, 4096)
	mixed := func(a, b *Batch) *Batch {
		out := *a
		out.Addresses, out.Lengths = []uint64{a.Addresses[0], b.Addresses[1]}, []uint64{4096, 4096}
		out.PieceFragments = nil
		return &out
	}
	stream := *host
	stream.OnStream = true
	outside := *device
	outside.Addresses = []uint64{device.Addresses[0], r.device.Address + 4*slotBytes - 1}
	for _, c := range []struct {
		ns   *Namespace
		b    *Batch
		code Code
		want string
	}{
		{small, mixed(host, device), Invalid, "piece 1, fragment 0: it is not in the memory"},
		{small, mixed(device, host), Invalid, "piece 1, fragment 0: it is not in the memory"},
		{small, &stream, Invalid, "a stream is for values in device memory"},
		{small, &outside, Unregistered, "piece 1, fragment 0"},
		{large, r.on("k", []int{0}, 1, slotBytes+4096), Invalid, fmt.Sprintf("set staging_bytes to %d", (slotBytes+4096)*2*slots)},
	} {
		for _, op := range []Op{OpGet, OpPut} {
			if got := c.ns.Do(op, c.b); CodeOf(got.Err) != c.code || !strings.Contains(got.Err.Error(), c.want) {
				t.Errorf("%v; want code %d and %q", got.Err, c.code, c.want)
			}
		}
	}
	register := func(o DeviceOptions, addr, n uint64, want string) {
		t.Helper()
		if _, err := r.store.RegisterDevice(o, addr, n); CodeOf(err) != Invalid || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %q", err, want)
		}
	}
	register(r.options(), 0, 1, "memory of 1 bytes at address 0x0")
	register(r.options(), r.device.Address+4096, 4096, "overlaps")
	register(DeviceOptions{Device: 1, Open: r.options().Open, StagingBytes: 1 << 62}, 4096, 1, "staging memory")
	register(DeviceOptions{Device: 2, Open: func() (copier.DeviceCopier, error) {
		return copier.NewCUDA(copier.CUDAOptions{Library: "libnosuch.so.1"})
	}}, 4096, 1, "CUDA device 2: copier: load the CUDA driver: libnosuch.so.1")
	if err := r.memory.Unregister(); err != nil {
		t.Errorf("nothing uses the memory: %v", err)
	}
	if got := small.Do(OpPut, device); CodeOf(got.Err) != Unregistered {
		t.Errorf("a put from memory that was unregistered: %v", got.Err)
	}
}

// TestStagingIsBounded: batches that find no free slot wait for one, within their time limit, while
// others wait for the engine's stream. The memory is in use until the stream lets them end.
func TestStagingIsBounded(t *testing.T) {
	const page = 64 << 10
	r := newDeviceRig(t, page)
	ns := r.namespace("device", 1, page)
	engine := copiertest.NewStream(t, r.driver)
	open := engine.Gate(t)
	engine.Copy(r.device, r.device)
	var jobs []Handle
	for i := range slots {
		b := r.on(fmt.Sprint("k", i), []int{0}, 1, page)
		b.OnStream, b.Stream = true, engine.Handle()
		h, err := ns.Submit(OpPut, b)
		if err != nil {
			t.Fatal(err)
		}
		jobs = append(jobs, h)
	}
	for lane := r.memory.device.saves.free; len(lane) > 0; {
		runtime.Gosched()
	}
	late := r.on("late", []int{0}, 1, page)
	late.Timeout = time.Millisecond
	if got := ns.Do(OpPut, late); CodeOf(got.Err) != Timeout || late.Results[0] != KeyMiss {
		t.Errorf("a put without a slot: %+v", got)
	}
	if err := r.memory.Unregister(); CodeOf(err) != Busy {
		t.Errorf("unregister during the puts: %v", err)
	}
	open()
	for _, h := range jobs {
		if got, err := r.store.Wait(h, time.Minute); err != nil || got.Err != nil || got.OK != 1 {
			t.Errorf("%+v, %v", got, err)
		}
	}
	late.Timeout = time.Minute
	if got := ns.Do(OpPut, late); got.Err != nil || got.OK != 1 {
		t.Errorf("a put with free slots: %+v", got)
	}
}
