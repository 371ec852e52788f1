package rdmatest

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"

	"github.com/penstock-kv/penstock/rdma"
)

// A peer group lists its members in order. Scatter and Barrier have the same effect with a group
// as without a group.
func testPeerGroup(t *env) {
	server := t.engine(Config{Listen: true})
	const peers, n = 3, 1000
	src, mem := t.random(server, peers*n)
	var ids []rdma.EngineID
	var clients []rdma.Engine
	var dsts []rdma.ScatterDst
	var descs []rdma.Desc
	var bufs [][]byte
	for i := range uint64(peers) {
		c := t.engine(Config{})
		t.connect(c, server)
		r, buf := t.region(c, n)
		d := t.sent(r.Desc())
		ids, clients, bufs, descs = append(ids, c.Addr().Engine), append(clients, c), append(bufs, buf), append(descs, d)
		dsts = append(dsts, rdma.ScatterDst{SrcOffset: i * n, Dst: d, Len: n})
	}
	slices.Reverse(ids)
	g, err := server.AddPeerGroup(ids)
	t.must(err)
	if !slices.Equal(g.Peers(), ids) {
		t.Errorf("the group has %v, want %v", g.Peers(), ids)
	}
	if _, err := server.AddPeerGroup(append(slices.Clone(ids), rdma.EngineID{7})); !errors.Is(err, rdma.ErrNoPeer) {
		t.Errorf("a group with an engine without a session: %v", err)
	}
	const rounds = 5
	var flags []*rdma.Flag
	for _, c := range clients {
		s, _ := t.expect(c, 1, rounds)
		b, _ := t.expect(c, 2, rounds)
		flags = append(flags, s, b)
	}
	for range rounds {
		for _, b := range bufs {
			clear(b)
		}
		f, b := rdma.NewFlag(), rdma.NewFlag()
		t.must(server.Scatter(t.ctx, rdma.Scatter{Group: g, Src: src, Dsts: dsts, Imm: rdma.ImmOf(1), Done: f.Set}))
		t.must(t.wait(f))
		t.must(server.Barrier(t.ctx, rdma.Barrier{Group: g, Imm: 2, Dsts: descs, Class: rdma.ClassCollective, Done: b.Set}))
		t.must(t.wait(b))
	}
	for _, f := range flags {
		t.must(t.wait(f))
	}
	for i, b := range bufs {
		if !bytes.Equal(b, mem[i*n:(i+1)*n]) {
			t.Errorf("destination %d has wrong bytes", i)
		}
	}
	// Only the engine that made a group accepts it.
	foreign, _ := t.random(clients[0], n)
	t.wantErr(clients[0].Scatter(t.ctx, rdma.Scatter{Group: g, Src: foreign, Dsts: dsts[1:2]}), rdma.ErrForeign)
	t.wantErr(clients[0].Barrier(t.ctx, rdma.Barrier{Group: g, Imm: 1, Dsts: descs[1:2]}), rdma.ErrForeign)
	g.Close()
}

// When the session of a member ends, the group is broken. The remaining members can form another
// group.
func testPeerGroupEnds(t *env) {
	down := make(chan rdma.EngineID, 1)
	server := t.engine(Config{Listen: true, OnPeerDown: func(id rdma.EngineID, _ error) { down <- id }})
	var ids []rdma.EngineID
	var descs []rdma.Desc
	var clients []rdma.Engine
	for range 2 {
		c := t.engine(Config{})
		t.connect(c, server)
		r, _ := t.region(c, 100)
		clients, ids, descs = append(clients, c), append(ids, c.Addr().Engine), append(descs, t.sent(r.Desc()))
	}
	g, err := server.AddPeerGroup(ids)
	t.must(err)
	defer g.Close()
	t.must(clients[1].Close())
	select {
	case <-down:
	case <-t.ctx.Done():
		t.Fatal("OnPeerDown was not called in time")
	}
	never := func(error) { t.Error("done was called for what was not submitted") }
	t.wantErr(server.Barrier(t.ctx, rdma.Barrier{Group: g, Imm: 1, Dsts: descs[:1], Done: never}), rdma.ErrPeerDied)
	src, _ := t.random(server, 100)
	t.wantErr(server.Scatter(t.ctx, rdma.Scatter{Group: g, Src: src, Dsts: []rdma.ScatterDst{{Dst: descs[0], Len: 1}}, Done: never}), rdma.ErrPeerDied)
	h, err := server.AddPeerGroup(ids[:1])
	t.must(err)
	f := rdma.NewFlag()
	imm, _ := t.expect(clients[0], 1, 1)
	t.must(server.Barrier(t.ctx, rdma.Barrier{Group: h, Imm: 1, Dsts: descs[:1], Done: f.Set}))
	t.must(t.wait(f))
	t.must(t.wait(imm))
	h.Close()
}

// Device memory is written and read like host memory, although it has no address in this process.
func testDevice(t *env) {
	if t.p.Device == nil {
		t.Skip("needs a provider with device memory (Provider.Device)")
	}
	server, client := t.pair()
	const n = 200_000
	there, here := t.p.Device(t.T, client, n), t.p.Device(t.T, server, n)
	var mem []byte
	if there.Options.DMABuf == nil {
		t.Fatal("device memory without a dma-buf")
	}
	dst, err := client.Register(mem, there.Options)
	t.must(err)
	src, err := server.Register(mem, here.Options)
	t.must(err)
	if dst.Bytes() != nil || dst.Len() != n || src.Len() != n {
		t.Fatalf("a region of %d bytes, %d of them addressable", dst.Len(), len(dst.Bytes()))
	}
	data := make([]byte, n)
	for i := range data {
		data[i] = byte(t.rng.Uint32())
	}
	here.Write(0, data)
	imm, _ := t.expect(client, 1, 1)
	t.must(t.write(server, rdma.Write{Src: src, SrcOffset: 1000, Dst: t.sent(dst.Desc()), DstOffset: 500, Len: n - 1000, Imm: rdma.ImmOf(1)}))
	t.must(t.wait(imm))
	got := make([]byte, n-1000)
	there.Read(500, got)
	if !bytes.Equal(got, data[1000:]) {
		t.Error("device to device: other bytes")
	}
	win, err := dst.Window(100, 50)
	t.must(err)
	if win.Bytes() != nil || win.Desc().Len != 50 {
		t.Errorf("window of %d bytes, %d of them addressable", win.Desc().Len, len(win.Bytes()))
	}
	host, from := t.random(server, 50)
	t.must(t.write(server, rdma.Write{Src: host, Dst: t.sent(win.Desc()), Len: 50}))
	there.Read(100, got[:50])
	if !bytes.Equal(got[:50], from) {
		t.Error("host to a window of a device: other bytes")
	}
	t.must(win.Revoke(t.ctx))
	t.wantRefused(t.write(server, rdma.Write{Src: host, Dst: win.Desc(), Len: 50}), rdma.ReasonKey)
	t.must(dst.Close(t.ctx))
	t.must(src.Close(t.ctx))
}

// records is a slog.Handler that keeps warnings and errors.
type records struct {
	mu   sync.Mutex
	text []string
	// more has an element if a record was added since the last element was received.
	more chan struct{}
}

func newRecords() *records { return &records{more: make(chan struct{}, 1)} }

func (r *records) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelWarn }
func (r *records) WithAttrs([]slog.Attr) slog.Handler           { return r }
func (r *records) WithGroup(string) slog.Handler                { return r }

func (r *records) Handle(_ context.Context, rec slog.Record) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.text = append(r.text, rec.Message)
	select {
	case r.more <- struct{}{}:
	default:
	}
	return nil
}

// An engine that refuses an operation logs the refusal, for a wrong token, a wrong key, an offset
// past the end, or a huge length.
func testRefusalsLogged(t *env) {
	for name, offend := range map[string]func(server, client rdma.Engine, src rdma.Region, d rdma.Desc){
		"wrong token": func(server, _ rdma.Engine, _ rdma.Region, _ rdma.Desc) {
			_, err := t.engine(Config{}).Connect(t.ctx, server.Addr(), rdma.Token("another token of good length"))
			t.wantErr(err, rdma.ErrAuth)
		},
		"wrong key": func(_, client rdma.Engine, src rdma.Region, d rdma.Desc) {
			t.wantRefused(t.write(client, rdma.Write{Src: src, Dst: t.forged(d), Len: 10}), rdma.ReasonKey)
		},
		"offset past the end": func(_, client rdma.Engine, src rdma.Region, d rdma.Desc) {
			d.Len = 1 << 50
			t.wantRefused(t.write(client, rdma.Write{Src: src, Dst: d, DstOffset: 1 << 49, Len: 10}), rdma.ReasonBounds)
		},
		"length past the end": func(_, client rdma.Engine, src rdma.Region, d rdma.Desc) {
			d.Len = 1 << 50
			t.wantRefused(t.write(client, rdma.Write{Src: src, Dst: d, Len: 1000}), rdma.ReasonBounds)
		},
	} {
		log := newRecords()
		server, client := t.engine(Config{Listen: true, Logger: slog.New(log)}), t.engine(Config{})
		t.connect(client, server)
		src, _ := t.random(client, 1000)
		dst, _ := t.region(server, 100)
		offend(server, client, src, t.sent(dst.Desc()))
		select {
		case <-log.more: // the record may be logged after the peer got its answer
		case <-t.ctx.Done():
			t.Errorf("%s: nothing was logged", name)
		}
		t.must(server.Close())
	}
}

// If the caller of an engine ends a session, that engine logs no warning about the end.
func testOwnEnds(t *env) {
	for name, end := range map[string]func(client rdma.Engine, server rdma.EngineID){
		"Disconnect": func(client rdma.Engine, server rdma.EngineID) { client.Disconnect(server) },
		"Close":      func(rdma.Engine, rdma.EngineID) {},
	} {
		log := newRecords()
		server, client := t.engine(Config{Listen: true}), t.engine(Config{Logger: slog.New(log)})
		t.connect(client, server)
		src, _ := t.random(client, 1000)
		dst, _ := t.region(server, 1000)
		t.must(t.write(client, rdma.Write{Src: src, Dst: t.sent(dst.Desc()), Len: 1000}))
		end(client, server.Addr().Engine)
		t.must(client.Close())
		log.mu.Lock()
		if len(log.text) > 0 {
			t.Errorf("%s: logged %q", name, log.text)
		}
		log.mu.Unlock()
	}
}
