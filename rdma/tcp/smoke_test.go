package tcp

import (
	"bytes"
	"testing"

	"github.com/penstock-kv/penstock/rdma"
)

func TestSmoke(t *testing.T) {
	token := rdma.Token("0123456789abcdef")
	srv, err := New(t.Context(), Options{Listen: "127.0.0.1:0", Token: token})
	if err != nil {
		t.Fatal(err)
	}
	cli, err := New(t.Context(), Options{})
	if err != nil {
		t.Fatal(err)
	}
	id, err := cli.Connect(t.Context(), srv.Addr(), token)
	if err != nil {
		t.Fatal(err)
	}
	mem := make([]byte, 8<<20)
	dst, _ := cli.Register(mem, rdma.RegisterOptions{})
	srcmem := make([]byte, 8<<20)
	for i := range srcmem {
		srcmem[i] = byte(i * 7 >> 3)
	}
	src, _ := srv.Register(srcmem, rdma.RegisterOptions{Local: true})
	imm, done := rdma.NewFlag(), rdma.NewFlag()
	if _, err := cli.ExpectImm(rdma.Expect{Imm: 5, Count: 1, From: []rdma.EngineID{id}, Done: imm.Set}); err != nil {
		t.Fatal(err)
	}
	if err := srv.Write(t.Context(), rdma.Write{Src: src, Dst: dst.Desc(), Len: 8 << 20, Imm: rdma.ImmOf(5), Done: done.Set}); err != nil {
		t.Fatal(err)
	}
	if err := imm.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(mem, srcmem) {
		t.Fatal("bytes differ")
	}
	if err := done.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := dst.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := srv.Close(); err != nil {
		t.Fatal(err)
	}
	if err := cli.Close(); err != nil {
		t.Fatal(err)
	}
}
