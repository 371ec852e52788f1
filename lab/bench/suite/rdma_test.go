package suite

import (
	"bytes"
	"context"
	"regexp"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/bench"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// overTCP opens engines on loopback.
func overTCP(ctx context.Context, o EngineOptions) (rdma.Engine, error) {
	t := tcp.Options{Conns: o.Conns, OnPost: o.OnPost}
	if o.Listen {
		t.Listen, t.Token = "127.0.0.1:0", SinkToken()
	}
	return tcp.New(ctx, t)
}

// TestRDMACost: the cost of a call is measured at every point, and the engine
// over TCP allocates nothing.
func TestRDMACost(t *testing.T) {
	testkit.Long(t, "a benchmark in a short form")
	w := testWorld(t)
	w.Only = regexp.MustCompile("^cost")
	r, err := RDMA(t.Context(), w, RDMAOptions{
		Provider: "tcp", Open: overTCP, Conns: 2,
		Yardstick: func(context.Context) (Yardstick, error) {
			return Yardstick{Name: "none", Close: func() error { return nil }}, nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Results) != 1 || len(r.Results[0].Measures) != 3 || len(r.NotRun) != 0 {
		t.Fatalf("report %+v", r)
	}
	call, post := r.Results[0].Measures[0].Median, r.Results[0].Measures[1].Median
	if call <= 0 || post <= 0 {
		t.Errorf("a call takes %v ns, the first post comes after %v ns", call, post)
	}
}

// TestRDMANotRun: a provider that cannot run is named, with the reason, and
// nothing is started.
func TestRDMANotRun(t *testing.T) {
	r, err := RDMA(t.Context(), testWorld(t), RDMAOptions{Provider: "verbs", NotRun: "no card"})
	if err != nil || len(r.NotRun) != 1 || r.NotRun[0] != (bench.Missing{What: "verbs", Why: "no card"}) {
		t.Errorf("report %+v, %v", r, err)
	}
	if r.Suite != RDMASection("verbs") || r.Suite == RDMASection("tcp") {
		t.Errorf("suite %q: the table of a provider would replace another's", r.Suite)
	}
}

// TestRDMARows: each row writes what it says, to where it says.
func TestRDMARows(t *testing.T) {
	memory, err := newArena(landBytes)
	if err != nil {
		t.Fatal(err)
	}
	defer memory.Close()
	from := memory.Bytes()[:landBytes]
	for i := range from {
		from[i] = byte(i * 5 >> 8)
	}
	s := &rdmaSuite{suiteRun: newRun(testWorld(t), "rdma"), opts: RDMAOptions{Open: overTCP, Conns: 2}, land: memory}
	target, err := overTCP(t.Context(), EngineOptions{Listen: true})
	if err != nil {
		t.Fatal(err)
	}
	defer target.Close()
	to := make([]byte, landBytes)
	region, err := target.Register(to, rdma.RegisterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	stream, err := s.open(t.Context(), region.Desc(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer stream.close(t.Context())
	for _, row := range rdmaRows(false) {
		sample, err := stream.drive(t.Context(), s.suiteRun, row, nil)
		if err != nil || sample[bench.Rate] <= 0 || (row.page > 0) != (sample[pagesMetric] > 0) {
			t.Errorf("%v: %v, %v", row, sample, err)
		}
		clear(to)
		l := stream.lane(0, row)
		if err := l.write(t.Context()); err != nil {
			t.Fatalf("%v: %v", row, err)
		}
		want := bytes.Clone(from[:row.bytes])
		for i, at := range l.to {
			copy(want[int64(at)*row.page:][:row.page], from[int64(l.from[i])*row.page:])
		}
		if !bytes.Equal(to[:row.bytes], want) {
			t.Errorf("%v: wrong bytes", row)
		}
	}
}

// TestSpread: bare sockets use as many connections as the engine would find work
// for.
func TestSpread(t *testing.T) {
	for _, c := range []struct {
		bytes       int64
		depth, want int
	}{
		{64 << 10, 1, 1}, {mib, 1, 1}, {mib, 8, 4}, {64 << 10, 3, 3}, {32 * mib, 1, 4}, {2 * mib, 1, 2},
	} {
		l := Load{Bytes: c.bytes, Depth: c.depth}
		if got := l.spread(4); got != c.want {
			t.Errorf("%+v on %d of 4 connections, want %d", l, got, c.want)
		}
	}
}
