package fabric

import (
	"bytes"
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// frames returns a frame of each kind.
var frames = []frame{
	{kind: frameMessage, tag: 7, ref: 1<<40 | 3, payload: []byte("payload")},
	{kind: frameMessage, tag: 7, ref: 2},
	{kind: frameKeyQuery, tag: 2, ref: 11, targets: []target{{1, 2, 3}, {1 << 63, 5, 0}}},
	{kind: frameKeyReply, tag: 3, ref: 11, refused: []bool{true, false}},
	{kind: frameReceipts, tag: 4, receipts: []receipt{{1, group.StatusOK}, {2, group.StatusNoBuffer}}},
	{kind: frameClosed, tag: 5},
}

func TestFrame(t *testing.T) {
	for _, f := range frames {
		b := f.append(nil)
		got, err := parseFrame(b)
		if err != nil {
			t.Fatalf("kind %d: %v", f.kind, err)
		}
		if len(got.payload) == 0 {
			got.payload = nil
		}
		if !reflect.DeepEqual(got, f) {
			t.Errorf("kind %d: %+v decoded as %+v", f.kind, f, got)
		}
		for n := range b {
			if g, err := parseFrame(b[:n]); err == nil && !(f.kind == frameMessage && n >= headLen) {
				t.Errorf("kind %d: the first %d of %d bytes are %+v", f.kind, n, len(b), g)
			}
		}
	}
}

// A key query for every work of an endpoint fits into a frame, and so do its receipts.
func TestFrameRoom(t *testing.T) {
	if maxKeyQuery < maxQueueDepth || maxReceipts < maxQueueDepth {
		t.Errorf("%d asks and %d receipts fit, a queue has %d", maxKeyQuery, maxReceipts, maxQueueDepth)
	}
	q := frame{kind: frameKeyQuery, targets: make([]target, maxKeyQuery)}
	r := frame{kind: frameReceipts, receipts: make([]receipt, maxReceipts)}
	for _, f := range []frame{q, r} {
		if n := len(f.append(nil)); n > maxControl {
			t.Errorf("the largest frame of kind %d has %d bytes, a buffer %d", f.kind, n, maxControl)
		}
	}
}

func FuzzFrame(f *testing.F) {
	for _, x := range frames {
		f.Add(x.append(nil))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		x, err := parseFrame(b)
		if err != nil {
			if !errors.Is(err, errFrame) {
				t.Fatalf("an error of another kind: %v", err)
			}
			return
		}
		if got := x.append(nil); !bytes.Equal(got, b) {
			t.Errorf("%x decodes to the value encoded as %x", b, got)
		}
	})
}

// someLocal is the Local of an endpoint over IPv4.
var someLocal = local{
	format: 2, tag: 77, handshake: target{key: 3, addr: 1 << 40, size: handshakeSize},
	provider: "net", endpoint: bytes.Repeat([]byte{2}, 16), hub: []byte{},
}

func TestLocal(t *testing.T) {
	b := someLocal.append(nil)
	got, err := parseLocal(b)
	if err != nil {
		t.Fatal(err)
	}
	if got.hub == nil {
		got.hub = []byte{}
	}
	if !reflect.DeepEqual(got, someLocal) {
		t.Errorf("%+v came back as %+v", someLocal, got)
	}
	for n := range b {
		if _, err := parseLocal(b[:n]); err == nil {
			t.Errorf("the first %d of %d bytes are an address", n, len(b))
		}
	}
	longest := local{provider: strings.Repeat("p", maxName), endpoint: make([]byte, maxName), hub: make([]byte, maxName)}
	if n := len(longest.append(nil)); n > group.MaxEndpointAddr {
		t.Errorf("the longest address has %d bytes, at most %d are carried", n, group.MaxEndpointAddr)
	}
}

func FuzzLocal(f *testing.F) {
	f.Add(someLocal.append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		l, err := parseLocal(b)
		if err != nil {
			if !errors.Is(err, errLocal) {
				t.Fatalf("an error of another kind: %v", err)
			}
			return
		}
		if got := l.append(nil); !bytes.Equal(got, b) {
			t.Errorf("%x decodes to the value encoded as %x", b, got)
		}
	})
}

func TestOptions(t *testing.T) {
	for _, c := range []struct {
		o    DomainOptions
		want string
	}{
		{DomainOptions{}, ""},
		{DomainOptions{QueueDepth: maxQueueDepth + 1}, "QueueDepth is 129"},
		{DomainOptions{QueueDepth: -1}, "QueueDepth is -1"},
		{DomainOptions{MaxMessage: 255}, "MaxMessage is 255"},
		{DomainOptions{MaxMessage: 2 << 20}, "MaxMessage is 2097152"},
		{DomainOptions{Provider: "shm"}, "use rdma/shm (data_plane.provider: shm)"},
	} {
		c.o.EnsureDefaults()
		err := c.o.Validate()
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%+v: %v", c.o, err)
		}
	}
}

// TestSeparate: classes with different marks use different endpoints.
func TestSeparate(t *testing.T) {
	for _, c := range []struct {
		o    Options
		want bool
	}{
		{Options{}, false},
		{Options{Domain: DomainOptions{TrafficClass: [rdma.Classes]uint32{0x108, 0x108}}}, false},
		{Options{Domain: DomainOptions{TrafficClass: [rdma.Classes]uint32{0x108, 0x11a}}}, true},
		{Options{Group: group.Options{SeparateClasses: true}}, true},
	} {
		if got := c.o.separate(); got != c.want {
			t.Errorf("marks %#x, asked %v: separate %v", c.o.Domain.TrafficClass, c.o.Group.SeparateClasses, got)
		}
	}
}

// The error of a program without libfabric names the build options.
func TestNotBuilt(t *testing.T) {
	if Built {
		t.Skip("this program has libfabric: the plain build runs this test")
	}
	for _, err := range []error{
		func() error { _, err := New(t.Context(), Options{}); return err }(),
		func() error { _, err := Open(DomainOptions{}); return err }(),
		func() error { _, err := List("tcp"); return err }(),
	} {
		if !errors.Is(err, rdma.ErrUnsupported) || !strings.Contains(err.Error(), "-tags fabric") {
			t.Errorf("%v", err)
		}
	}
}
