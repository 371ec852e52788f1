package server_test

import (
	"bytes"
	"io"
	"net"
	"runtime"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/penstock-kv/penstock/api"
)

// TestWriterFailsAtEachByte: an engine disconnects after each byte of a write's messages, from the
// request for staging memory to the end of the call. The node ends the session, keeps no
// reservation and no staging memory, and has stored the whole block or none of it.
func TestWriterFailsAtEachByte(t *testing.T) {
	e, h := newNeighbour(t)
	ns := h.namespace()
	content := bytes.Repeat([]byte{0}, int(ns.Geometry.BlockBytes())) // the content of fresh staging memory
	request, err := proto.Marshal(writeOf(ns, 0, 1, content))
	if err != nil {
		t.Fatal(err)
	}
	call, err := api.Call{Method: api.MethodWrite, ID: 7, ReplyMax: 1 << 20}.Append(make([]byte, api.LocalFrameHeaderBytes), api.MethodWrite.Request())
	if err != nil {
		t.Fatal(err)
	}
	call = append(call, request...)
	api.PutLocalFrame(call)
	messages := append(api.AppendStage(nil), call...)
	for cut := range len(messages) + 1 {
		conn, err := net.DialUnix("unix", nil, e.conn.RemoteAddr().(*net.UnixAddr))
		if err != nil {
			t.Fatal(err)
		}
		// The session exists once the hello has arrived.
		if _, err := io.ReadFull(conn, make([]byte, api.LocalHelloBytes)); err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Write(messages[:cut]); err != nil {
			t.Fatal(err)
		}
		if cut == len(messages) {
			for h.node.Stats().Index.Pieces == 0 && t.Context().Err() == nil {
				runtime.Gosched()
			}
		}
		if err := conn.Close(); err != nil {
			t.Fatal(err)
		}
		for s := e.local.Stats(); s.Sessions != 1 || s.StagingBytes != 0 || s.Connections != uint64(cut)+2; s = e.local.Stats() {
			if t.Context().Err() != nil {
				t.Fatalf("after %d of %d bytes: %+v", cut, len(messages), s)
			}
			runtime.Gosched()
		}
		if s := h.node.Stats(); s.Reservations != 0 || (s.Index.Pieces != 0) != (cut == len(messages)) {
			t.Fatalf("after %d of %d bytes: %d reservations, %d blocks", cut, len(messages), s.Reservations, s.Index.Pieces)
		}
	}
	h.readsAs(e, ns, content)
}
