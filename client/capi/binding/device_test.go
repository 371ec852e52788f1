//go:build cuda && cgo && linux

package binding

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/client/traffic"
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
	r := openDeviceRig(t, testnode.Start(t, testnode.Options{CapacityBytes: 64 << 20, SegmentBytes: 4 << 20}).Addr, deviceBytes)
	h, err := r.store.RegisterDevice(r.options(), r.device.Address, uint64(deviceBytes))
	r.memory = valueOf(t, r.library.Memory, h, err)
	return r
}

// openDeviceRig is newDeviceRig without the registration.
func openDeviceRig(t *testing.T, servers string, deviceBytes int) *deviceRig {
	t.Helper()
	r := &deviceRig{driver: copiertest.Driver(t), device: copiertest.Device(t, deviceBytes)}
	r.rig = newRig(t, servers)
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

// TestDriverFaults: a registration, a put or a get in which a call of the driver fails has the driver's
// error. A value with result OK has its bytes on the device. Then all slots are free, the same calls
// succeed, and after Close nothing is left open in the driver.
func TestDriverFaults(t *testing.T) {
	const bytesOf, values = 512 << 10, 12 // three slots
	node := testnode.Start(t, testnode.Options{CapacityBytes: 256 << 20, SegmentBytes: 4 << 20}).Addr
	order := rand.New(rand.NewPCG(8, 2)).Perm(values)
	for op, faults := range map[string][]string{
		"register": {
			"cuInit 1", "cuInit 2", "cuDeviceGet 2", "cuDevicePrimaryCtxRetain 2", "cuStreamCreate 1", "cuStreamCreate 2",
			"cuEventCreate 3", "cuEventCreate 67", "cuMemHostRegister_v2 1", "cuMemHostRegister_v2 2",
		},
		// The first event of a batch is its mark. Two copiers have 64 events each.
		"put": {
			"cuEventCreate 129", "cuEventRecord 1", "cuEventRecord 2", "cuEventRecord 4", "cuStreamWaitEvent 1", "cuStreamWaitEvent 3",
			"cuMemcpyAsync 1", "cuMemcpyAsync 12", "cuEventSynchronize 1", "cuEventSynchronize 2", "cuEventSynchronize 3",
		},
		"get": {
			"cuEventCreate 130", "cuEventRecord 5", "cuEventRecord 6", "cuEventRecord 8", "cuStreamWaitEvent 4", "cuStreamWaitEvent 6",
			"cuMemcpyAsync 13", "cuMemcpyAsync 24", "cuEventSynchronize 4", "cuEventSynchronize 5", "cuEventSynchronize 6",
		},
	} {
		for _, fault := range faults {
			t.Run(op+"/"+fault, func(t *testing.T) {
				t.Setenv("FAKE_CUDA_FAIL", fault)
				report := filepath.Join(t.TempDir(), "report")
				t.Setenv("FAKE_CUDA_REPORT", report)
				r := openDeviceRig(t, node, bytesOf*values)
				check := func(call string, err error) (again bool) {
					t.Helper()
					if failed := err != nil; failed != (call == op) || failed && !strings.Contains(err.Error(), "made to fail") {
						t.Errorf("%s: %v", call, err)
					}
					return call == op
				}
				register := func() error {
					h, err := r.store.RegisterDevice(r.options(), r.device.Address, uint64(len(r.device.Bytes)))
					if err == nil {
						r.memory = valueOf(t, r.library.Memory, h, err)
					}
					return err
				}
				if check("register", register()) {
					t.Setenv("FAKE_CUDA_FAIL", "")
					if err := register(); err != nil {
						t.Fatal(err)
					}
				}
				ns := r.namespace(t.Name(), 1, bytesOf)
				fill(r.device.Bytes, 1)
				want := slices.Clone(r.device.Bytes)
				do := func(op Op) ([]byte, error) {
					b := r.on("k", order, 1, bytesOf)
					b.OnStream, b.Timeout = true, time.Minute
					got := ns.Do(op, b)
					if got.Err == nil && got.OK != values {
						t.Errorf("%+v", got)
					}
					return b.Results, got.Err
				}
				if _, err := do(OpPut); check("put", err) {
					if _, err := do(OpPut); err != nil {
						t.Fatal(err)
					}
				}
				get := func() error {
					clear(r.device.Bytes)
					results, err := do(OpGet)
					for v, page := range order {
						at := page * bytesOf
						if results[v] == KeyOK && !bytes.Equal(r.device.Bytes[at:at+bytesOf], want[at:at+bytesOf]) {
							t.Errorf("value %d has other bytes", v)
						}
					}
					return err
				}
				if check("get", get()) {
					if err := get(); err != nil {
						t.Fatal(err)
					}
				}
				if d := r.memory.device; len(d.loads.free) != slots || len(d.saves.free) != slots {
					t.Errorf("%d and %d slots are free; want %d", len(d.loads.free), len(d.saves.free), slots)
				}
				if err := r.store.Close(); err != nil {
					t.Error(err)
				}
				raw, err := os.ReadFile(report)
				if left := strings.ReplaceAll(string(raw), "0 left\n", ""); err != nil || len(raw) == 0 || left != "" {
					t.Errorf("%v; the driver reports %q", err, raw)
				}
			})
		}
	}
}

// TestEndsOnDevice: a get that is cancelled, or whose store is closed, while its copies wait for the
// stream, ends with them. Its values are on the device.
func TestEndsOnDevice(t *testing.T) {
	const page = 64 << 10
	for _, how := range []string{"cancel", "close"} {
		t.Run(how, func(t *testing.T) {
			r := newDeviceRig(t, 2*page)
			ns := r.namespace("device", 1, page)
			fill(r.device.Bytes[:page], 7)
			if got := ns.Do(OpPut, r.on("k", []int{0}, 1, page)); got.Err != nil {
				t.Fatal(got.Err)
			}
			engine := copiertest.NewStream(t, r.driver)
			open := engine.Gate(t)
			b := r.on("k", []int{1}, 1, page)
			b.OnStream, b.Stream, b.Timeout = true, engine.Handle(), time.Minute
			h, err := ns.Submit(OpGet, b)
			if err != nil {
				t.Fatal(err)
			}
			for r.store.client.Stats().ReadBytes == 0 {
				runtime.Gosched()
			}
			ended := make(chan error, 1)
			if how == "cancel" {
				if err := r.store.Cancel(h); err != nil {
					t.Fatal(err)
				}
				go func() {
					got, err := r.store.Wait(h, time.Minute)
					ended <- errors.Join(got.Err, err)
				}()
			} else {
				go func() { ended <- r.store.Close() }()
				<-r.store.ctx.Done()
			}
			select {
			case err := <-ended:
				t.Fatalf("the get has ended before its copies: %v", err)
			case <-time.After(20 * time.Millisecond): // a later end would be a defect too, and stay undetected
			}
			open()
			if err := <-ended; err != nil {
				t.Error(err)
			}
			if b.Results[0] != KeyOK || !bytes.Equal(r.device.Bytes[page:], r.device.Bytes[:page]) {
				t.Errorf("result %d; want the value on the device", b.Results[0])
			}
		})
	}
}

// TestCopyDevice: a copy to and from a device, and the codes of its errors.
func TestCopyDevice(t *testing.T) {
	const n = 4096
	device, driver := copiertest.Device(t, n), copiertest.Driver(t)
	host := make([]byte, n)
	do := func(toDevice bool) error {
		return CopyDevice(func() (copier.DeviceCopier, error) {
			return copier.NewCUDA(copier.CUDAOptions{Library: driver})
		}, device.Address, addressOf(host), n, toDevice)
	}
	fill(host, 1)
	if err := do(true); err != nil || !bytes.Equal(device.Bytes, host) {
		t.Errorf("to the device: %v", err)
	}
	fill(device.Bytes, 2)
	if err := do(false); err != nil || !bytes.Equal(device.Bytes, host) {
		t.Errorf("from the device: %v", err)
	}
	for fault, code := range map[string]Code{"cuInit 1": Invalid, "cuMemHostRegister_v2 1": Invalid, "cuMemcpyAsync 1": Internal} {
		t.Setenv("FAKE_CUDA_FAIL", fault)
		if err := do(true); CodeOf(err) != code || !strings.Contains(err.Error(), "made to fail") {
			t.Errorf("%s: code %d, %v; want code %d", fault, CodeOf(err), err, code)
		}
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
	unregistered := mixed(device, &Batch{Addresses: []uint64{0, addressOf(make([]byte, 4096))}})
	anyMemory := *unregistered
	anyMemory.AnyMemory = true
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
		{small, unregistered, Unregistered, "piece 0 begins on device 0, and the values of a batch are all in host memory, or all on one device"},
		{small, &anyMemory, Invalid, "piece 1, fragment 0: it is not in the memory"},
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
	shared := r.on("shared", []int{2, 2}, 1, 4096)
	if got := small.Do(OpPut, shared); got.Err != nil || got.OK != 2 {
		t.Errorf("a put of a page under two keys: %+v", got)
	}
	if got := small.Do(OpGet, shared); CodeOf(got.Err) != Invalid || !strings.Contains(got.Err.Error(), "pieces 0 and 1 share bytes") {
		t.Errorf("a get of two keys into a page: %+v", got)
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

// submitting signals when a batch has been submitted.
type submitting struct {
	copier.DeviceCopier
	submitted chan struct{}
}

func (c submitting) Submit(ctx context.Context, b copier.Batch) error {
	err := c.DeviceCopier.Submit(ctx, b)
	select {
	case c.submitted <- struct{}{}:
	default:
	}
	return err
}

// streamPair is a pair whose sides are on devices, and whose calls follow a stream of each engine.
type streamPair struct {
	*pair
	// source is memory of the engines beside the pages.
	source                      copiertest.Memory
	prefillDevice, decodeDevice copiertest.Memory
	// submitted gets a value after a batch was submitted, if it has none.
	submitted                   chan struct{}
	prefillStream, decodeStream *copiertest.Stream
}

func newStreamPair(t *testing.T) *streamPair {
	t.Helper()
	library := copiertest.Driver(t)
	var devices []copiertest.Memory
	submitted := make(chan struct{}, 1)
	p := &streamPair{pair: newPairIn(t, func(p *pair) (TrafficOptions, []byte) {
		o, mem := p.trafficOptions()
		device := copiertest.Device(t, len(mem))
		devices = append(devices, device)
		o.Address, o.Copier = device.Address, func() (copier.DeviceCopier, error) {
			c, err := copier.NewCUDA(copier.CUDAOptions{Library: library})
			return submitting{c, submitted}, err
		}
		return o, device.Bytes
	})}
	p.submitted = submitted
	p.source, p.prefillDevice, p.decodeDevice = copiertest.Device(t, len(devices[0].Bytes)), devices[0], devices[1]
	p.prefillStream, p.decodeStream = copiertest.NewStream(t, library), copiertest.NewStream(t, library)
	p.must(p.prefill.of.FollowStream(p.prefillStream.Handle()))
	p.must(p.decode.of.FollowStream(p.decodeStream.Handle()))
	return p
}

// pageOf returns a page of a layer.
func pageOf(m copiertest.Memory, layer, page int) copiertest.Memory {
	n := int(geo.LayerBytes(0))
	at := (layer*devicePages + page) * n
	return copiertest.Memory{Address: m.Address + uint64(at), Bytes: m.Bytes[at : at+n]}
}

// put puts the computation of block b of a layer into a stream, in page b.
func (p *streamPair) put(s *copiertest.Stream, device copiertest.Memory, layer, b int) {
	from := pageOf(p.source, layer, b)
	copy(from.Bytes, computed(layer, b))
	s.Copy(pageOf(device, layer, b), from)
}

// serve performs a request whose cached prefix of hit blocks both sides have found in storage, each
// of them the blocks of its parts. It compares all blocks on the decode side.
func (p *streamPair) serve(name string, ids []kv.BlockID, blocks, hit int, mine, theirs []traffic.Part) {
	p.t.Helper()
	pre, dec := p.transfers(name, ids, blocks, hit, mine, theirs)
	p.prefill.until(TransferLoaded)
	p.must(pre.AddPages(pagesFrom(0, blocks)))
	for layer := range 2 {
		p.must(pre.Layer(layer, time.Minute))
		for b := hit; b < blocks; b++ {
			p.put(p.prefillStream, p.prefillDevice, layer, b)
		}
		p.must(pre.Computed(layer, blocks))
	}
	p.must(pre.Finish())
	p.prefill.until(TransferFinished)
	p.decode.until(TransferReady)
	p.arrived(name, blocks)
	p.must(dec.Finish())
	p.decode.until(TransferFinished)
}

// arrived compares the blocks of a prompt on the decode side.
func (p *streamPair) arrived(name string, blocks int) {
	p.t.Helper()
	for layer := range 2 {
		for b := range blocks {
			if !bytes.Equal(p.decode.page(layer, uint32(devicePages-blocks+b)), computed(layer, b)) {
				p.t.Errorf("%s: block %d, layer %d: other bytes in decode", name, b, layer)
			}
		}
	}
}

// absent fails the test if an event of a kind comes although the gate of the engine's stream is closed. The time
// bounds only how early a wrong event must come to be found.
func (s *side) absent(kind TransferKind) {
	s.t.Helper()
	for until := time.Now().Add(100 * time.Millisecond); time.Now().Before(until); runtime.Gosched() {
		events := make([]TransferEvent, 8)
		n, err := s.of.Drain(events)
		if err != nil {
			s.t.Fatal(err)
		}
		for _, e := range events[:n] {
			if e.Kind == kind {
				s.t.Fatalf("event %+v, while the gate of the engine's stream is closed", e)
			}
		}
	}
}

// TestTransfersFollowTheStream: computed blocks leave when the engine's stream has computed them, and
// no thread of the engine waits for that. Loads of other requests pass them.
func TestTransfersFollowTheStream(t *testing.T) {
	p := newStreamPair(t)
	ids := p.chain(1, 4)
	p.serve("stored", ids[:3], 3, 0, nil, nil)
	clear(p.prefill.mem)
	clear(p.decode.mem)

	// The pages of the load were free before the gates close.
	h, err := p.prefill.of.Prefill(traffic.PrefillJob{Request: "load", IDs: ids, Blocks: 3, Hit: 3, Parts: []traffic.Part{{From: 0, To: 3}}, Pages: pagesFrom(10, 3)}, time.Minute)
	load := valueOf(t, p.library.Transfer, h, err)

	pre, dec := p.transfers("computed", p.chain(2, 4), 4, 0, nil, nil)
	p.prefill.until(TransferLoaded)
	p.must(pre.AddPages(pagesFrom(0, 4)))
	var gates []func()
	for _, chunk := range []traffic.Part{{From: 0, To: 2}, {From: 2, To: 4}} {
		for layer := range 2 {
			gates = append(gates, p.prefillStream.Gate(t))
			for b := chunk.From; b < chunk.To; b++ {
				p.put(p.prefillStream, p.prefillDevice, layer, b)
			}
			p.must(pre.Layer(layer, time.Minute))
			p.must(pre.Computed(layer, chunk.To))
		}
	}
	p.must(pre.Finish())

	h, err = p.decode.of.Decode(traffic.DecodeJob{Request: "load", IDs: ids[:3], Blocks: 3, Hit: 3, Pages: pagesFrom(10, 3), Peer: p.prefill.peer()}, time.Minute)
	other := valueOf(t, p.library.Transfer, h, err)
	for layer := range 2 {
		p.must(load.Layer(layer, time.Minute))
		for b := range 3 {
			if !bytes.Equal(p.prefill.page(layer, uint32(10+b)), computed(layer, b)) {
				t.Errorf("block %d, layer %d: other bytes in prefill", b, layer)
			}
		}
	}
	p.decode.absent(TransferReady)
	for _, open := range gates {
		open()
	}
	p.prefill.until(TransferLoaded) // of load
	p.prefill.until(TransferFinished)
	p.decode.until(TransferReady)
	p.arrived("computed", 4)
	p.must(dec.Finish())
	p.decode.until(TransferFinished)
	p.must(load.Cancel())
	p.prefill.failed(load, Canceled)
	p.decode.failed(other, Canceled)
}

// TestPagesInUse: nothing is written to pages that the engine's stream still uses.
func TestPagesInUse(t *testing.T) {
	p := newStreamPair(t)
	ids := p.chain(1, 3)
	p.serve("stored", ids, 3, 0, nil, nil)
	const first = devicePages - 3 // the first page on the decode side
	old := bytes.Repeat([]byte{0xab}, int(geo.LayerBytes(0)))
	for _, page := range []copiertest.Memory{pageOf(p.prefillDevice, 1, 0), pageOf(p.decodeDevice, 1, first)} {
		copy(page.Bytes, old)
	}
	results := []copiertest.Memory{pageOf(p.source, 0, 0), pageOf(p.source, 0, 1)}
	openPrefill, openDecode := p.prefillStream.Gate(t), p.decodeStream.Gate(t)
	p.prefillStream.Copy(results[0], pageOf(p.prefillDevice, 1, 0)) // the engines read the pages
	p.decodeStream.Copy(results[1], pageOf(p.decodeDevice, 1, first))

	pre, dec := p.transfers("next", ids, 3, 3, []traffic.Part{{From: 0, To: 3}}, nil)
	p.prefill.until(TransferLoaded)
	p.must(pre.AddPages(pagesFrom(0, 3)))
	if err := pre.Layer(1, 100*time.Millisecond); CodeOf(err) != Timeout {
		t.Errorf("a layer in pages that the stream uses: %v", err)
	}
	openPrefill()
	for layer := range 2 {
		p.must(pre.Layer(layer, time.Minute))
		p.must(pre.Computed(layer, 3))
	}
	p.must(pre.Finish())
	p.prefill.until(TransferFinished)
	p.decode.absent(TransferReady)
	openDecode()
	p.decode.until(TransferReady)
	p.arrived("next", 3)
	for i, result := range results {
		if !bytes.Equal(result.Bytes, old) {
			t.Errorf("the engine of side %d has read bytes of the next request", i)
		}
	}
	p.must(dec.Finish())
	p.decode.until(TransferFinished)
}

// TestAppendFollowsTheStream: a decoded block is stored as the engine's stream has filled it.
func TestAppendFollowsTheStream(t *testing.T) {
	p := newStreamPair(t)
	ids := p.chain(1, 4)
	p.serve("stored", ids[:3], 3, 0, nil, nil)
	open := p.decodeStream.Gate(t)
	for layer := range 2 {
		p.put(p.decodeStream, p.decodeDevice, layer, 3)
	}
	done := make(chan error, 1)
	go func() { done <- p.decode.of.Append("stored", ids, 0, time.Minute, 3) }()
	select {
	case err := <-done:
		t.Errorf("append has returned, while the gate of the engine's stream is closed: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	open()
	p.must(<-done)
	p.must(p.decode.of.Settle(ids[3], time.Minute))
	p.serve("next", ids, 5, 4, []traffic.Part{{From: 0, To: 2}}, []traffic.Part{{From: 2, To: 4}})
}

// TestCancelWaitsForTheStream: a transfer that has been cancelled has its last event when no copy from
// its pages can begin any more.
func TestCancelWaitsForTheStream(t *testing.T) {
	p := newStreamPair(t)
	pre, dec := p.transfers("r", p.chain(1, 3), 3, 0, nil, nil)
	p.prefill.until(TransferLoaded)
	p.must(pre.AddPages(pagesFrom(0, 3)))
	p.must(pre.Layer(0, time.Minute))
	open := p.prefillStream.Gate(t)
	p.put(p.prefillStream, p.prefillDevice, 0, 0)
	p.must(pre.Computed(0, 3))
	<-p.submitted // no copy was submitted before this one
	p.must(pre.Cancel())
	p.decode.failed(dec, Canceled)
	p.prefill.absent(TransferFailed)
	open()
	p.prefill.failed(pre, Canceled)
}

// TestStreamsOfTraffic: a stream is for device memory of all layers.
func TestStreamsOfTraffic(t *testing.T) {
	p := newPair(t)
	if err := p.prefill.of.FollowStream(0); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "host memory") {
		t.Errorf("a stream for host memory: %v", err)
	}
	device, library := copiertest.Device(t, len(p.prefill.mem)), copiertest.Driver(t)
	s := p.open(func(p *pair) (TrafficOptions, []byte) {
		o, _ := p.trafficOptions()
		o.Address, o.Bases, o.Copier = device.Address, o.Bases[:1], func() (copier.DeviceCopier, error) {
			return copier.NewCUDA(copier.CUDAOptions{Library: library})
		}
		return o, device.Bytes
	})
	h, err := s.of.Prefill(traffic.PrefillJob{Request: "r", Blocks: 1, Pages: []uint32{0}}, time.Minute)
	x := valueOf(t, p.library.Transfer, h, err)
	p.must(s.of.FollowStream(0))
	if err := x.Computed(0, 1); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "1 of 2 layers") {
		t.Errorf("a stream with one base: %v", err)
	}
	p.must(x.Cancel())
	s.failed(x, Canceled)
}
