package rdmatest

import (
	"bytes"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/rdma"
)

// several skips the case unless the provider supports engines with n NICs.
func (t *env) several(n int) {
	t.Helper()
	if t.p.NICs < n {
		t.Skipf("needs a provider whose engines can have %d NICs (Provider.NICs)", n)
	}
}

// A Desc has a key for each of several NICs. Each NIC carries its share of large writes, paged
// writes and many small writes.
func testNICs(t *env) {
	t.several(2)
	server, client := t.engine(Config{Listen: true, NICs: 2}), t.engine(Config{NICs: 2})
	t.connect(client, server)
	n := t.scaled(4<<20, 300_000)
	src, mem := t.random(server, n)
	dst, got := t.region(client, n)
	if d := dst.Desc(); len(d.NICs) != 2 || len(client.NICs()) != 2 {
		t.Fatalf("a Desc with %d keys, %d NICs", len(d.NICs), len(client.NICs()))
	}
	for i := range uint32(8) {
		clear(got)
		done := rdma.NewFlag()
		imm, _ := t.expect(client, i, 1)
		w := rdma.Write{Src: src, Dst: dst.Desc(), Len: uint64(n), Imm: rdma.ImmOf(i), Done: done.Set}
		t.must(server.Write(t.ctx, w))
		t.must(t.wait(imm))
		if !bytes.Equal(got, mem) {
			t.Fatal("wrong bytes")
		}
		t.must(t.wait(done))
	}
	page := uint64(1 << 10)
	var idx []uint32
	for _, i := range t.rng.Perm(n / int(page)) { // not in order, because adjacent pages would merge
		idx = append(idx, uint32(i))
	}
	clear(got)
	w := rdma.PagedWrite{PageLen: page, Src: src, Dst: dst.Desc(), SrcPages: rdma.Pages{Indices: idx, Stride: page}, DstPages: rdma.Pages{Indices: idx, Stride: page}}
	t.must(t.writePaged(server, w))
	if k := len(idx) * int(page); !bytes.Equal(got[:k], mem[:k]) {
		t.Fatal("wrong bytes of a paged write")
	}
	for range 50 {
		t.must(t.write(server, rdma.Write{Src: src, Dst: dst.Desc(), Len: 100}))
	}
	for name, e := range map[string]rdma.Engine{"sender": server, "target": client} {
		var out, in uint64
		names := make(map[string]bool)
		for _, nic := range e.NICs() {
			if !nic.Up || nic.Reason != "" || nic.Name == "" || names[nic.Name] {
				t.Errorf("%s: NIC %+v", name, nic)
			}
			names[nic.Name] = true
			out, in = out+nic.BytesOut, in+nic.BytesIn
			if all := e.Stats().WriteBytesOut; nic.BytesOut < all/10 {
				t.Errorf("%s: NIC %s carried %d of %d bytes", name, nic.Name, nic.BytesOut, all)
			}
		}
		if st := e.Stats(); out < st.WriteBytesOut || in < st.WriteBytesIn {
			t.Errorf("%s: the NICs carried %d bytes out, %d in; the engine counts %+v", name, out, in, st)
		}
	}
}

// Engines with different numbers of NICs write to each other.
func testUnevenNICs(t *env) {
	t.several(2)
	if !t.p.Uneven {
		t.Skip("needs a provider that joins engines with different numbers of NICs (Provider.Uneven)")
	}
	server, client := t.engine(Config{Listen: true, NICs: 2}), t.engine(Config{NICs: 1})
	t.connect(client, server)
	for _, dir := range [][2]rdma.Engine{{server, client}, {client, server}} {
		n := t.scaled(5<<20, 300_000)
		src, mem := t.random(dir[0], n)
		dst, got := t.region(dir[1], n)
		imm, _ := t.expect(dir[1], 1, 1)
		t.must(t.write(dir[0], rdma.Write{Src: src, Dst: t.sent(dst.Desc()), Len: uint64(n), Imm: rdma.ImmOf(1)}))
		t.must(t.wait(imm))
		if !bytes.Equal(got, mem) {
			t.Error("other bytes")
		}
	}
}

// killer returns e as a NICKiller.
func (t *env) killer(e rdma.Engine) NICKiller {
	t.Helper()
	k, ok := e.(NICKiller)
	if !ok {
		t.Skip("needs a provider whose engines are rdmatest.NICKillers")
	}
	return k
}

// nicDies is the common part of the cases in which one of two NICs dies during many writes. All
// writes succeed. When the immediate of a write is counted, the write's bytes have been placed,
// and each immediate is counted once.
func (t *env) nicDies(kill func(server, client rdma.Engine), dead func(server, client rdma.Engine) rdma.Engine) {
	t.several(2)
	server, client := t.engine(Config{Listen: true, NICs: 2, InFlightOps: 16}), t.engine(Config{NICs: 2})
	t.killer(server)
	t.connect(client, server)
	size, count := t.scaled(1<<20, 20_000), t.scaled(120, 40)
	src, mem := t.random(server, size+count)
	dst, got := t.region(client, size*count)
	d := t.sent(dst.Desc())
	var early, failed atomic.Int64
	var flags []*rdma.Flag
	for i := range count {
		f := rdma.NewFlag()
		flags = append(flags, f)
		_, err := client.ExpectImm(rdma.Expect{Imm: uint32(i), Count: 1, From: []rdma.EngineID{server.Addr().Engine}, Done: func(err error) {
			if err == nil && !bytes.Equal(got[i*size:(i+1)*size], mem[i:i+size]) {
				early.Add(1)
			}
			f.Set(err)
		}})
		t.must(err)
	}
	var wg sync.WaitGroup
	for i := range count {
		if i == count/3 {
			kill(server, client)
		}
		wg.Add(1)
		done := func(err error) {
			if err != nil {
				t.Errorf("write %d: %v", i, err)
				failed.Add(1)
			}
			wg.Done()
		}
		var err error
		if i%3 == 2 { // in pages that are not in order
			const pages = 10
			page := uint64(size / pages)
			var idx []uint32
			for p := range uint32(pages) {
				idx = append(idx, (p*7+3)%pages)
			}
			copy(got[i*size+int(page)*pages:(i+1)*size], mem[i+int(page)*pages:]) // bytes that no page covers
			err = server.WritePaged(t.ctx, rdma.PagedWrite{
				PageLen: page, Src: src, Dst: d, Imm: rdma.ImmOf(uint32(i)), Done: done,
				SrcPages: rdma.Pages{Indices: idx, Stride: page, Offset: uint64(i)},
				DstPages: rdma.Pages{Indices: idx, Stride: page, Offset: uint64(i * size)},
			})
		} else {
			err = server.Write(t.ctx, rdma.Write{Src: src, SrcOffset: uint64(i), Dst: d, DstOffset: uint64(i * size), Len: uint64(size), Imm: rdma.ImmOf(uint32(i)), Done: done})
		}
		if err != nil {
			t.Fatalf("submit %d: %v", i, err)
		}
	}
	for i, f := range flags {
		if err := t.wait(f); err != nil {
			t.Fatalf("immediate %d: %v", i, err)
		}
	}
	wg.Wait()
	if early.Load()+failed.Load() != 0 {
		t.Fatalf("%d immediates came before their payload, %d writes failed", early.Load(), failed.Load())
	}
	t.roundTrip(server, client)
	t.roundTrip(client, server)
	if n := client.Stats().ImmediatesIn; n != uint64(count) {
		t.Errorf("%d immediates counted for %d writes", n, count)
	}
	up, reasons := 0, 0
	for _, nic := range dead(server, client).NICs() {
		if nic.Up {
			up++
		} else if nic.Reason != "" {
			reasons++
		}
	}
	if up != 1 || reasons != 1 {
		t.Errorf("the NICs are %+v; want one up, one down with a reason", dead(server, client).NICs())
	}
}

// Writes in flight when a NIC of the target dies land through the other NIC.
func testTargetNICDies(t *env) {
	t.nicDies(func(_, client rdma.Engine) { t.killer(client).KillNIC(0) }, func(_, client rdma.Engine) rdma.Engine { return client })
}

// Writes in flight when a NIC of the sender dies land through the other NIC.
func testSenderNICDies(t *env) {
	t.nicDies(func(server, _ rdma.Engine) { t.killer(server).KillNIC(1) }, func(server, _ rdma.Engine) rdma.Engine { return server })
}

// When the last NIC dies, operations in flight end with ErrPeerDied, once.
func testAllNICsDie(t *env) {
	t.several(2)
	const idle = time.Second // the time within which the operations must end
	server, client := t.engine(Config{Listen: true, NICs: 2, InFlightOps: floodOps, IdleTimeout: idle}), t.engine(Config{NICs: 2, IdleTimeout: idle})
	k := t.killer(client)
	t.connect(client, server)
	start, wait := t.flood(server, client, rdma.ErrPeerDied)
	<-start
	k.KillNIC(1)
	k.KillNIC(0)
	wait()
}

// A peer from which nothing arrives for IdleTimeout is declared dead. Operations in flight to that
// peer, and expectations from it, end with ErrPeerDied, once.
func testVanish(t *env) {
	if !t.p.Vanishes {
		t.Skip("needs a provider whose engines can vanish (Provider.Vanishes)")
	}
	const idle = time.Second
	down := make(chan error, 1)
	server := t.engine(Config{Listen: true, InFlightOps: floodOps, IdleTimeout: idle, OnPeerDown: func(_ rdma.EngineID, err error) { down <- err }})
	client := t.engine(Config{IdleTimeout: idle})
	v, ok := client.(Vanisher)
	if !ok {
		t.Fatal("the provider declares Vanishes, but its engine is not a Vanisher")
	}
	t.connect(client, server)
	expected, _ := t.expect(server, 1, 1, client.Addr().Engine)
	start, wait := t.flood(server, client, rdma.ErrPeerDied)
	<-start
	v.Vanish()
	select {
	case err := <-down:
		t.wantErr(err, rdma.ErrPeerDied)
	case <-t.ctx.Done():
		t.Fatal("OnPeerDown was not called in time")
	}
	t.wantErr(t.wait(expected), rdma.ErrPeerDied)
	if len(server.Peers()) != 0 {
		t.Error("the peer is still there")
	}
	wait()
}

// Writes of both traffic classes arrive.
func testClasses(t *env) {
	server, client := t.pair()
	const n = 10_000
	src, mem := t.random(server, n)
	dst, got := t.region(client, n*rdma.Classes)
	for c := range rdma.Class(rdma.Classes) {
		imm, _ := t.expect(client, uint32(c), 2)
		off := uint64(c) * n
		t.must(t.write(server, rdma.Write{Src: src, Dst: dst.Desc(), DstOffset: off, Len: n, Class: c, Imm: rdma.ImmOf(uint32(c))}))
		t.must(t.writePaged(server, rdma.PagedWrite{
			PageLen: n / 4, Src: src, Dst: dst.Desc(), Class: c, Imm: rdma.ImmOf(uint32(c)),
			SrcPages: rdma.Pages{Indices: []uint32{3, 1}, Stride: n / 4}, DstPages: rdma.Pages{Indices: []uint32{3, 1}, Stride: n / 4, Offset: off},
		}))
		t.must(t.wait(imm))
		if !bytes.Equal(got[off:off+n], mem) {
			t.Errorf("class %v: wrong bytes", c)
		}
	}
}

// A refused operation does not affect other operations that are in flight at the same time.
func testRefusedAmongGood(t *env) {
	server, client := t.engine(Config{Listen: true, NICs: t.p.NICs}), t.engine(Config{NICs: t.p.NICs})
	t.connect(client, server)
	size, count := uint64(t.scaled(100_000, 3000)), t.scaled(300, 40)
	src, mem := t.random(server, int(size))
	dst, got := t.region(client, int(size)*count)
	good, bad := t.sent(dst.Desc()), t.forged(dst.Desc())
	all, _ := t.expect(client, 1, uint32(count-count/10))
	var wg sync.WaitGroup
	for i := range count {
		wg.Add(1)
		w := rdma.Write{Src: src, Dst: good, DstOffset: uint64(i) * size, Len: size, Imm: rdma.ImmOf(1)}
		wrong := i%10 == 9
		if wrong {
			w.Dst = bad
		}
		w.Done = func(err error) {
			defer wg.Done()
			if wrong != errors.Is(err, rdma.ErrRefused) || (!wrong && err != nil) {
				t.Errorf("write %d (to be refused: %v) ended with %v", i, wrong, err)
			}
		}
		if err := server.Write(t.ctx, w); err != nil {
			t.Fatalf("submit %d: %v", i, err)
		}
	}
	wg.Wait()
	t.must(t.wait(all))
	t.roundTrip(server, client)
	if n := client.Stats().ImmediatesIn; n != uint64(count-count/10) {
		t.Errorf("%d immediates counted", n)
	}
	for i := range count {
		want := mem
		if i%10 == 9 {
			want = make([]byte, size)
		}
		if !bytes.Equal(got[i*int(size):(i+1)*int(size)], want) {
			t.Fatalf("write %d: wrong bytes", i)
		}
	}
}
