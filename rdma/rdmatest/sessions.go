package rdmatest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/penstock-kv/penstock/rdma"
)

// A peer without the token cannot open a session, and the failure is counted.
func testWrongToken(t *env) {
	server, client := t.engine(Config{Listen: true}), t.engine(Config{})
	for range 3 {
		_, err := client.Connect(t.ctx, server.Addr(), rdma.Token("another token of good length"))
		t.wantErr(err, rdma.ErrAuth)
	}
	if _, err := client.Connect(t.ctx, server.Addr(), nil); err == nil {
		t.Error("connected without a token")
	}
	if len(server.Peers()) != 0 || len(client.Peers()) != 0 {
		t.Error("there is a session")
	}
	// The refused peer may receive the answer before the failure is counted.
	t.eventually("3 failures counted", func() bool { return server.Stats().AuthFailures >= 3 })
	t.connect(client, server)
	t.roundTrip(client, server)
}

// Connect fails for an ID that no engine has, and for an address without NICs.
func testWrongEngine(t *env) {
	server, client := t.engine(Config{Listen: true}), t.engine(Config{})
	a := server.Addr()
	a.Engine[3]++
	_, err := client.Connect(t.ctx, a, token)
	t.wantErr(err, rdma.ErrNoPeer)
	_, err = server.Connect(t.ctx, client.Addr(), token)
	t.wantErr(err, rdma.ErrNoPeer)
	_, err = server.Connect(t.ctx, server.Addr(), token)
	t.wantErr(err, rdma.ErrNoPeer)
	a.Engine = rdma.EngineID{} // any engine at this address
	id, err := client.Connect(t.ctx, a, token)
	t.must(err)
	if id != server.Addr().Engine {
		t.Errorf("connected to %v", id)
	}
}

// keepsSession checks that a second Connect, to an address without an engine ID, does not end the
// session.
func (t *env) keepsSession(client rdma.Engine, to rdma.Addr) {
	t.Helper()
	ends := make(chan error, 1)
	x, err := client.ExpectImm(rdma.Expect{Imm: 1, Count: 1, From: []rdma.EngineID{to.Engine}, Done: func(err error) { ends <- err }})
	t.must(err)
	_, err = client.Connect(t.ctx, rdma.Addr{NICs: to.NICs}, token)
	t.must(err)
	x.Cancel()
	t.wantErr(<-ends, rdma.ErrCanceled)
}

// Repeated and concurrent calls of Connect open one session, even if the address has no engine ID.
// Both engines list the session.
func testConnect(t *env) {
	server, client := t.engine(Config{Listen: true}), t.engine(Config{})
	var wg sync.WaitGroup
	for i := range 8 {
		to := server.Addr()
		if i%2 == 0 {
			to.Engine = rdma.EngineID{}
		}
		wg.Go(func() {
			if _, err := client.Connect(t.ctx, to, token); err != nil {
				t.Errorf("connect: %v", err)
			}
		})
	}
	wg.Wait()
	s, c := server.Peers(), client.Peers()
	if len(s) != 1 || len(c) != 1 || s[0].ID != client.Addr().Engine || c[0].ID != server.Addr().Engine || s[0].Dialed || !c[0].Dialed {
		t.Fatalf("peers of the server %+v, of the client %+v", s, c)
	}
	t.keepsSession(client, server.Addr())
	ctx, cancel := context.WithCancel(t.ctx)
	cancel()
	third := t.engine(Config{})
	if _, err := third.Connect(ctx, server.Addr(), token); !errors.Is(err, context.Canceled) {
		t.Errorf("connect with an ended context: %v", err)
	}
	// Both engines listen, and they connect to each other at the same time.
	a, b := t.engine(Config{Listen: true}), t.engine(Config{Listen: true})
	wg.Go(func() { t.connect(a, b) })
	wg.Go(func() { t.connect(b, a) })
	wg.Wait()
	t.roundTrip(a, b)
	t.roundTrip(b, a)
}

// Messages arrive complete, each in a separate buffer, and buffers are reused.
func testMessages(t *env) {
	server, client := t.pair()
	count := t.scaled(500, 60)
	got := make(chan string, count)
	t.must(server.Recv(4, 1000, func(from rdma.EngineID, msg []byte) {
		if from != client.Addr().Engine {
			t.Errorf("message from %v", from)
		}
		got <- string(msg)
	}))
	t.wantErr(server.Recv(1, 1, func(rdma.EngineID, []byte) {}), rdma.ErrExists)
	want := make(map[string]bool)
	for i := range count {
		msg := bytes.Repeat(fmt.Append(nil, i, " "), 1+i%200)
		msg = msg[:min(len(msg), 1000)]
		if i == 0 {
			msg = nil
		}
		want[string(msg)] = true
		for {
			f := rdma.NewFlag()
			t.must(client.Send(t.ctx, server.Addr().Engine, msg, f.Set))
			clear(msg) // Send has copied it
			err := t.wait(f)
			if err == nil {
				break
			}
			t.wantRefused(err, rdma.ReasonNoBuffer)
			msg = []byte(mustOne(want, got))
		}
		select {
		case m := <-got:
			if !want[m] {
				t.Fatalf("message %d arrived as %.40q", i, m)
			}
			delete(want, m)
		case <-t.ctx.Done():
			t.Fatal("no message")
		}
	}
}

// mustOne returns the message in want; the case has ensured that only one is left.
func mustOne(want map[string]bool, _ chan string) string {
	for m := range want {
		return m
	}
	return ""
}

// A message that fits no free buffer is refused, and the session continues.
func testMessagesRefused(t *env) {
	server, client := t.pair()
	id := server.Addr().Engine
	send := func(n int) error {
		f := rdma.NewFlag()
		t.must(client.Send(t.ctx, id, make([]byte, n), f.Set))
		return t.wait(f)
	}
	t.wantRefused(send(10), rdma.ReasonNoBuffer)
	release, entered := make(chan struct{}), make(chan struct{}, 10)
	t.must(server.Recv(2, 1000, func(rdma.EngineID, []byte) {
		entered <- struct{}{}
		<-release
	}))
	t.wantRefused(send(1001), rdma.ReasonTooLarge)
	t.must(send(1000))
	<-entered
	t.must(send(1))
	t.wantRefused(send(1), rdma.ReasonNoBuffer)
	close(release)
	<-entered
	t.wantErr(client.Send(t.ctx, rdma.EngineID{1}, []byte("x"), nil), rdma.ErrNoPeer)
	t.wantErr(client.Send(t.ctx, id, make([]byte, 10<<20), nil), rdma.ErrRange)
	t.roundTrip(client, server)
	if st := server.Stats(); st.RefusedIn[rdma.ReasonNoBuffer] != 2 || st.RefusedIn[rdma.ReasonTooLarge] != 1 {
		t.Errorf("counters: %+v", st)
	}
}

// A message does not wait for all writes that were submitted before it: it arrives when at most
// half of these writes have been placed. A round is inconclusive if the writes ended before the
// message was sent, or if the handler ran late. So the case repeats rounds until one succeeds.
func testMessagePassesBulk(t *env) {
	const writes, size, rounds = 64, 512 << 10, 200
	if t.p.Quick {
		return // too few bytes are submitted for a message to wait
	}
	server, client := t.pair()
	dst, _ := t.region(server, writes*size)
	src, _ := t.random(client, size)
	inPlace := make(chan uint64, 1)
	t.must(server.Recv(4, 100, func(rdma.EngineID, []byte) { inPlace <- server.Stats().ImmediatesIn }))
	least := uint64(writes)
	for range rounds {
		before := server.Stats().ImmediatesIn
		all, _ := t.expect(server, 1, writes)
		for i := range uint64(writes) {
			t.must(client.Write(t.ctx, rdma.Write{Src: src, Dst: dst.Desc(), DstOffset: i * size, Len: size, Imm: rdma.ImmOf(1)}))
		}
		t.must(client.Send(t.ctx, server.Addr().Engine, []byte("passes"), nil))
		select {
		case n := <-inPlace:
			least = min(least, n-before)
		case <-t.ctx.Done():
			t.Fatal("no message")
		}
		t.must(t.wait(all))
		if least <= writes/2 {
			return
		}
	}
	t.Errorf("in %d rounds the message never arrived before %d of %d writes were in place", rounds, least, writes)
}

// Scatter sends each slice to its destination and counts one immediate at each destination.
// Barrier counts an immediate without payload. If one destination refuses its write, the whole
// operation fails, but the other writes end normally.
func testScatter(t *env) {
	server := t.engine(Config{Listen: true})
	src, mem := t.random(server, 3000)
	var dsts []rdma.ScatterDst
	var descs []rdma.Desc
	var bufs [][]byte
	var flags []*rdma.Flag
	for i := range uint64(3) {
		c := t.engine(Config{})
		t.connect(c, server)
		r, buf := t.region(c, 1000)
		d := t.sent(r.Desc())
		bufs, descs = append(bufs, buf), append(descs, d)
		dsts = append(dsts, rdma.ScatterDst{SrcOffset: i * 1000, Dst: d, Len: 1000})
		f, _ := t.expect(c, 5, 1)
		g, _ := t.expect(c, 6, 1)
		flags = append(flags, f, g)
	}
	done := rdma.NewFlag()
	t.must(server.Scatter(t.ctx, rdma.Scatter{Src: src, Dsts: dsts, Imm: rdma.ImmOf(5), Done: done.Set}))
	t.must(t.wait(done))
	done = rdma.NewFlag()
	t.must(server.Barrier(t.ctx, rdma.Barrier{Imm: 6, Dsts: descs, Done: done.Set}))
	t.must(t.wait(done))
	for _, f := range flags {
		t.must(t.wait(f))
	}
	for i, b := range bufs {
		if !bytes.Equal(b, mem[i*1000:(i+1)*1000]) {
			t.Errorf("destination %d has wrong bytes", i)
		}
	}
	dsts[1].Dst = t.forged(dsts[1].Dst)
	done = rdma.NewFlag()
	t.must(server.Scatter(t.ctx, rdma.Scatter{Src: src, Dsts: dsts, Done: done.Set}))
	t.wantErr(t.wait(done), rdma.ErrRefused)
	t.wantErr(server.Scatter(t.ctx, rdma.Scatter{Src: src}), rdma.ErrRange)
	dsts[2].Len = 5000
	t.wantErr(server.Scatter(t.ctx, rdma.Scatter{Src: src, Dsts: dsts}), rdma.ErrRange)
}

// Each of many concurrent peers gets its own bytes.
func testManyPeers(t *env) {
	server := t.engine(Config{Listen: true})
	peers, rounds, n := uint64(t.scaled(24, 4)), uint32(t.scaled(10, 3)), uint64(t.scaled(200<<10, 5000))
	src, mem := t.random(server, int(n+peers))
	var wg sync.WaitGroup
	for i := range peers {
		c := t.engine(Config{})
		r, got := t.region(c, int(n))
		wg.Go(func() {
			if _, err := c.Connect(t.ctx, server.Addr(), token); err != nil {
				t.Errorf("connect: %v", err)
				return
			}
			for k := range rounds {
				clear(got)
				f := rdma.NewFlag()
				if _, err := c.ExpectImm(rdma.Expect{Imm: k, Count: 1, From: []rdma.EngineID{server.Addr().Engine}, Done: f.Set}); err != nil {
					t.Error(err)
					return
				}
				if err := server.Write(t.ctx, rdma.Write{Src: src, SrcOffset: i, Dst: r.Desc(), Len: n, Imm: rdma.ImmOf(k)}); err != nil {
					t.Error(err)
					return
				}
				if err := f.Wait(t.ctx); err != nil {
					t.Error(err)
					return
				}
				if !bytes.Equal(got, mem[i:i+n]) {
					t.Errorf("peer %d, round %d: wrong bytes", i, k)
				}
			}
		})
	}
	wg.Wait()
	if n := len(server.Peers()); n != int(peers) {
		t.Errorf("%d peers", n)
	}
}
