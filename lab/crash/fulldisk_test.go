package crash

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/testkit"
)

// TestFullDisk: volume and index share a small ext4 that other files fill completely. The node
// refuses writes or evicts blocks for them, and serves reads. When there is room again, it starts
// over the same directory.
func TestFullDisk(t *testing.T) {
	testkit.Long(t, "fills a file system")
	mount := testkit.SmallExt4(t, 160)
	binary := buildBinary(t)
	// The capacity exceeds the disk, so that the disk is full first.
	v := &volume{name: "full", dir: filepath.Join(mount, "data"), durability: "sync", capacity: "1GiB", acked: map[int]int{}}
	totals := &counts{}
	ctx, cancel := context.WithTimeout(context.Background(), 8*time.Minute)
	defer cancel()

	n := v.start(t, binary)
	s := v.connect(t, n, totals)
	mem := s.memory()
	const before = 20
	for seed := range before {
		s.write(ctx, mem, seed, chainBlocks)
	}
	fillDisk(t, filepath.Join(mount, "others"))
	offered, stored := 0, 0
	for seed := before; seed < before+600; seed++ {
		ids := chain(s.ns, seed)
		size := geometry.BlockBytes()
		for i, id := range ids {
			content(id, mem.mem.Bytes()[int64(i)*size:][:size])
		}
		res, err := s.store.Write(ctx, client.WriteRequest{Namespace: s.ns, IDs: ids, From: mem.mem})
		if err != nil {
			t.Fatalf("write %d on a full disk: %v\n%s", seed, err, n.log)
		}
		offered, stored = offered+len(ids), stored+res.Stored
	}
	if stored >= offered {
		t.Errorf("%d blocks of %d KiB were stored on a full disk", stored, geometry.BlockBytes()>>10)
	}
	readable := 0
	for seed := range before + 600 {
		readable += s.read(ctx, mem, seed)
	}
	if readable == 0 {
		t.Error("nothing can be read on a full disk")
	}
	t.Logf("full disk: %d of %d blocks offered were stored, %d could be read", stored, offered, readable)
	mem.release()
	s.close()
	n.kill(t)

	if err := os.Remove(filepath.Join(mount, "others")); err != nil {
		t.Fatal(err)
	}
	n = v.start(t, binary)
	s = v.connect(t, n, totals)
	mem = s.memory()
	after := 0
	for seed := range before + 600 {
		after += s.read(ctx, mem, seed)
	}
	s.write(ctx, mem, 9999, chainBlocks)
	if got := s.read(ctx, mem, 9999); got != chainBlocks {
		t.Errorf("%d of %d blocks written after there was room again", got, chainBlocks)
	}
	t.Logf("after the restart: %d blocks", after)
	mem.release()
	s.close()
	n.kill(t)
}

// fillDisk writes a file until no block is free.
func fillDisk(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for size := 1 << 20; size >= 512; {
		if _, err := f.Write(make([]byte, size)); err != nil {
			if !errors.Is(err, syscall.ENOSPC) {
				t.Fatal(err)
			}
			size /= 2
		}
	}
	if err := f.Sync(); err != nil && !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
}
