package handoff_test

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/api"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/internal/sys"
	"github.com/penstock-kv/penstock/server/handoff"
)

// stage requests staging memory and maps it. Without memory it returns the node's reason.
func (e *engine) stage(t testing.TB) (staging *arena.Staging, refusal string) {
	t.Helper()
	if _, err := e.conn.Write(api.AppendStage(nil)); err != nil {
		t.Fatal(err)
	}
	head := make([]byte, api.LocalFrameHeaderBytes)
	file, err := sys.ReceiveFile(e.conn, head)
	if err != nil {
		t.Fatal(err)
	}
	msg, err := api.ReadLocalFrame(bufio.NewReader(io.MultiReader(bytes.NewReader(head), e.conn)))
	if err != nil {
		t.Fatal(err)
	}
	reply, text, err := api.ParseReply(msg)
	if err != nil || reply.ID != 0 || (reply.Code == 0) != (file != nil) || (reply.Code == 0) != (len(text) == 0) {
		t.Fatalf("reply %+v %q, file %v, %v", reply, text, file, err)
	}
	if file == nil {
		return nil, string(text)
	}
	if staging, err = arena.MapStaging(file); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = staging.Close() })
	return staging, ""
}

// mappings returns the mappings of staging memory in this process.
func mappings(t testing.TB) (n int) {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(maps), "memfd:penstock-staging")
}

// TestStaging: a session gets memory once, within the bound of all sessions, and the node reads its
// bytes. A refusal does not end the session. The memory is freed after the session has ended.
func TestStaging(t *testing.T) {
	var n *node
	n = newNodeServing(t, func(o *handoff.Options) { o.StagingBytesMax = 5 << 20 }, func(_ context.Context, id api.LocalID, _, dst []byte) []byte {
		s, err := n.Session(id[:])
		if err != nil || s.Staging() == nil {
			return append(dst, "none"...)
		}
		return append(dst, s.Staging()[1<<20:][:5]...)
	})
	sees := func(e *engine) string {
		if _, err := e.conn.Write(frame(api.KindCall, "")); err != nil {
			t.Fatal(err)
		}
		msg, err := api.ReadLocalFrame(bufio.NewReader(e.conn))
		if err != nil {
			t.Fatal(err)
		}
		return string(msg)
	}
	if got := n.StagingBytes(); got != 2<<20 {
		t.Errorf("%d bytes for a session", got)
	}
	a, b, c := n.connect(), n.connect(), n.connect()
	staging, _ := a.stage(t)
	if staging == nil || len(staging.Bytes()) != 2<<20 {
		t.Fatal("no memory")
	}
	copy(staging.Bytes()[1<<20:], "bytes")
	if got := sees(a); got != "bytes" {
		t.Errorf("the node reads %q", got)
	}
	if _, refusal := a.stage(t); !strings.Contains(refusal, "already") {
		t.Errorf("a second time: %q", refusal)
	}
	if staging, refusal := b.stage(t); staging == nil {
		t.Errorf("another session: %q", refusal)
	}
	if _, refusal := c.stage(t); !strings.Contains(refusal, "limits.staging_bytes") || !strings.Contains(refusal, "1048576 of 5242880") {
		t.Errorf("more than the bound: %q", refusal)
	}
	if got := sees(c); got != "none" {
		t.Errorf("a session without memory: the node reads %q", got)
	}
	if s := n.Stats(); s.StagingBytes != 4<<20 || s.Sessions != 3 {
		t.Errorf("%+v", s)
	}
	before := mappings(t)
	a.hangUp()
	until(t, "the memory back", func() bool { return n.Stats().StagingBytes == 2<<20 })
	if got := mappings(t); got != before-1 {
		t.Errorf("%d mappings, %d before the session ended", got, before)
	}
	if staging, refusal := c.stage(t); staging == nil {
		t.Errorf("after another session's end: %q", refusal)
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
	if s := n.Stats(); s.StagingBytes != 0 {
		t.Errorf("after Close: %+v", s)
	}
}

// TestStagingShares: the size of a session's memory depends on the bound for all sessions.
func TestStagingShares(t *testing.T) {
	for limit, want := range map[int64]int64{1: 0, 2<<20 - 1: 0, 2 << 20: 2 << 20, 16 << 20: 2 << 20, 33 << 20: 4 << 20, 64 << 20: 8 << 20, 1 << 40: 8 << 20} {
		n := newNode(t, func(o *handoff.Options) { o.StagingBytesMax = limit })
		if got := n.StagingBytes(); got != want {
			t.Errorf("of %d bytes a session gets %d; want %d", limit, got, want)
		}
	}
}
