package posixio_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/blockiotest"
	"github.com/penstock-kv/penstock/io/posixio"
)

// childVolume is the environment variable with the volume that a child process locks.
const childVolume = "PENSTOCK_TEST_LOCK_VOLUME"

// TestLockChild is the child process of TestLockOfAnotherProcess.
func TestLockChild(t *testing.T) {
	dir := os.Getenv(childVolume)
	if dir == "" {
		t.Skip("runs only as the child of TestLockOfAnotherProcess")
	}
	d := open(t, dir, posixio.Options{})
	if err := d.Lock(blockio.Identity(time.Now())); err != nil {
		t.Fatal(err)
	}
	fmt.Println("locked")
	_, _ = bufio.NewReader(os.Stdin).ReadByte() // until the parent kills this process or ends
}

// TestLockOfAnotherProcess: the error for a living owner names the owner. After a kill the lock is
// free, although the file with the owner's name still exists.
func TestLockOfAnotherProcess(t *testing.T) {
	testkit.VerifyNone(t)
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0], "-test.run=^TestLockChild$", "-test.v")
	cmd.Env = append(os.Environ(), childVolume+"="+dir)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(stdout)
	for lines.Scan() && lines.Text() != "locked" {
	}
	d := open(t, dir, posixio.Options{})
	err = d.Lock("second")
	var owned *blockio.OwnedError
	if !errors.As(err, &owned) || owned.Volume != dir {
		t.Errorf("lock of a volume in use: %v", err)
	} else if !strings.Contains(owned.Owner, fmt.Sprintf("pid %d", cmd.Process.Pid)) || !strings.Contains(owned.Owner, filepath.Base(os.Args[0])) {
		t.Errorf("the owner is described as %q", owned.Owner)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // it was killed
	if _, err := os.Stat(filepath.Join(dir, "LOCK")); err != nil {
		t.Errorf("the dead owner's file: %v", err)
	}
	if err := d.Lock("second"); err != nil {
		t.Errorf("lock after the owner was killed: %v", err)
	}
}

// TestConformanceOnTmpfs runs where O_DIRECT has no effect or is refused.
func TestConformanceOnTmpfs(t *testing.T) {
	const shm = "/dev/shm"
	var st unix.Statfs_t
	if err := unix.Statfs(shm, &st); err != nil || st.Type != unix.TMPFS_MAGIC {
		t.Skipf("no tmpfs at %s", shm)
	}
	if !open(t, shm, posixio.Options{}).Info().Volatile {
		t.Errorf("%s does not count as volatile", shm)
	}
	blockiotest.Run(t, func(t *testing.T) blockiotest.Volume {
		dir, err := os.MkdirTemp(shm, "penstock-posixio-")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := os.RemoveAll(dir); err != nil {
				t.Error(err)
			}
		})
		return blockiotest.Volume{Open: func() (blockio.Device, error) { return posixio.Open(dir, posixio.Options{}) }}
	})
}

// TestFullFileSystem fills a small file system from several goroutines: every created file is whole
// and writable, every refusal is ErrNoSpace and leaves no file, and all data can still be read.
func TestFullFileSystem(t *testing.T) {
	testkit.VerifyNone(t)
	d := open(t, testkit.SmallExt4(t, 64), posixio.Options{})
	const filePages = 512 // 2 MiB
	data := random(t, filePages)
	var mu sync.Mutex
	var made []blockio.File
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := 0; ; i++ {
				f, err := d.Create(fmt.Sprintf("seg-%d-%d", w, i), filePages*blockio.Align)
				if err != nil {
					if !errors.Is(err, blockio.ErrNoSpace) {
						t.Errorf("create on a full file system: %v", err)
					}
					return
				}
				mu.Lock()
				made = append(made, f)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	names, err := d.List()
	if err != nil || len(names) != len(made) || len(made) < 10 {
		t.Fatalf("%d files are made, the list has %d (%v)", len(made), len(names), err)
	}
	got := testkit.AlignedBuffer(t, filePages*blockio.Align)
	for _, f := range made {
		if err := do(t, d, blockio.Write, f, data, filePages); err != nil {
			t.Fatalf("write to reserved space: %v", err)
		}
		if err := do(t, d, blockio.Read, f, got, filePages); err != nil || string(got) != string(data) {
			t.Fatalf("read on a full file system: %v", err)
		}
	}
	if err := d.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// TestStartOnAFullVolume: a volume without a free block still opens, takes its lock and can be
// read, and refuses new files.
func TestStartOnAFullVolume(t *testing.T) {
	testkit.VerifyNone(t)
	mount := testkit.SmallExt4(t, 32)
	data, got := random(t, 64), testkit.AlignedBuffer(t, 64*blockio.Align)
	before := open(t, mount, posixio.Options{})
	if err := do(t, before, blockio.Write, blockiotest.Create(t, before, "a", 64*blockio.Align), data, 64); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(before.Sync(t.Context()), before.Close()); err != nil {
		t.Fatal(err)
	}
	fill(t, filepath.Join(mount, "OTHERS"))
	d := open(t, mount, posixio.Options{})
	if !d.Info().Direct {
		t.Errorf("info: %+v", d.Info())
	}
	if err := d.Lock("first"); err != nil {
		t.Errorf("lock on a full volume: %v", err)
	}
	var owned *blockio.OwnedError
	if err := open(t, mount, posixio.Options{}).Lock("second"); !errors.As(err, &owned) || !strings.Contains(owned.Owner, "not named itself") {
		t.Errorf("second lock on a full volume: %v", err)
	}
	f, err := d.Open("a")
	if err != nil {
		t.Fatal(err)
	}
	if err := do(t, d, blockio.Read, f, got, 64); err != nil || string(got) != string(data) {
		t.Fatalf("read on a full volume: %v", err)
	}
	if _, err := d.Create("b", blockio.Align); !errors.Is(err, blockio.ErrNoSpace) {
		t.Errorf("create on a full volume: %v", err)
	}
	if names, err := d.List(); err != nil || len(names) != 1 {
		t.Errorf("list: %q, %v", names, err)
	}
}

// TestReadOnlyMount: a volume can be inspected on a file system that the kernel mounted read-only,
// as it does after an error.
func TestReadOnlyMount(t *testing.T) {
	mount := testkit.SmallExt4(t, 32)
	data, got := random(t, 4), testkit.AlignedBuffer(t, 4*blockio.Align)
	before := open(t, mount, posixio.Options{})
	if err := do(t, before, blockio.Write, blockiotest.Create(t, before, "a", 4*blockio.Align), data, 4); err != nil {
		t.Fatal(err)
	}
	if err := before.Close(); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("", mount, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	if d, err := posixio.Open(mount, posixio.Options{}); !errors.Is(err, unix.EROFS) {
		t.Errorf("opened for writing: %v, %v; want EROFS", d, err)
	}
	d := open(t, mount, posixio.Options{ReadOnly: true})
	f, err := d.Open("a")
	if err != nil {
		t.Fatal(err)
	}
	if err := do(t, d, blockio.Read, f, got, 4); err != nil || string(got) != string(data) {
		t.Errorf("read: %v; the bytes are right: %v", err, string(got) == string(data))
	}
}

// fill writes a file until there is no space, not even for small pieces.
func fill(t *testing.T, path string) {
	t.Helper()
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for piece := make([]byte, 1<<20); len(piece) >= 1024; {
		_, err := file.Write(piece)
		switch {
		case errors.Is(err, unix.ENOSPC):
			piece = piece[:len(piece)/2]
		case err != nil:
			t.Fatal(err)
		}
	}
	if err := file.Sync(); err != nil && !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
}

// TestAccessTime: a read does not change the access time of its file, because a file system may write a new one to
// its journal before the read ends. A file of another owner, for which the kernel refuses O_NOATIME, is opened too.
func TestAccessTime(t *testing.T) {
	for _, c := range []struct {
		name   string
		direct bool
		owner  int
	}{{"page cache", false, 0}, {"direct", true, 0}, {"another owner", true, 12345}} {
		t.Run(c.name, func(t *testing.T) {
			if c.owner != 0 && os.Geteuid() != 0 {
				if os.Getenv("CI") == "true" {
					t.Fatal("this test needs root, which continuous integration must have")
				}
				t.Skip("this test needs root, to make a file of another owner")
			}
			dir := t.TempDir()
			opts := posixio.Options{Buffered: !c.direct}
			want := random(t, 2)
			first := open(t, dir, opts)
			if err := do(t, first, blockio.Write, blockiotest.Create(t, first, "a", 2*blockio.Align), want, 1); err != nil {
				t.Fatal(err)
			}
			if err := first.Close(); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(dir, "a")
			if c.owner != 0 {
				if err := os.Chown(path, c.owner, -1); err != nil {
					t.Fatal(err)
				}
				dropOwnership(t)
			}
			// The option relatime, the default of mount(8), updates an access time that is older than a
			// day.
			old := []unix.Timespec{{Sec: time.Now().Unix() - 3*24*3600}, {Nsec: unix.UTIME_OMIT}}
			if err := unix.UtimesNanoAt(unix.AT_FDCWD, path, old, 0); err != nil && c.owner == 0 {
				t.Fatal(err)
			}
			d := open(t, dir, opts)
			f, err := d.Open("a")
			if err != nil {
				t.Fatal(err)
			}
			got := random(t, 2)
			if err := do(t, d, blockio.Read, f, got, 1); err != nil || !bytes.Equal(got, want) {
				t.Fatalf("read: %v, the same bytes %v", err, bytes.Equal(got, want))
			}
			var st unix.Stat_t
			if err := unix.Stat(path, &st); err != nil {
				t.Fatal(err)
			}
			if c.owner == 0 && st.Atim.Sec != old[0].Sec {
				t.Errorf("the read changed the access time from %d to %d", old[0].Sec, st.Atim.Sec)
			}
		})
	}
}

// dropOwnership removes the capability to act as the owner of any file from the thread of the test, which ends with
// the test.
func dropOwnership(t *testing.T) {
	t.Helper()
	runtime.LockOSThread() // never unlocked: the runtime ends the thread with the goroutine
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	if err := unix.Capget(&header, &sets[0]); err != nil {
		t.Fatal(err)
	}
	sets[0].Effective &^= 1 << unix.CAP_FOWNER
	if err := unix.Capset(&header, &sets[0]); err != nil {
		t.Fatal(err)
	}
}
