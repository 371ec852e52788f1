package main

import (
	"archive/tar"
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestLoadOrder(t *testing.T) {
	const dep = `kernel/core/ib_core.ko:
kernel/core/ib-uverbs.ko.xz: kernel/core/ib_core.ko
kernel/rxe/rdma_rxe.ko: kernel/core/ib-uverbs.ko.xz kernel/core/ib_core.ko kernel/net/udp_tunnel.ko
kernel/net/udp_tunnel.ko:
`
	const builtin = "kernel/crypto/crc32_generic.ko\n"
	got, err := loadOrder([]byte(dep), []byte(builtin), []string{"crc32_generic", "ib_uverbs", "rdma_rxe"})
	want := []string{"kernel/core/ib_core.ko", "kernel/core/ib-uverbs.ko.xz", "kernel/net/udp_tunnel.ko", "kernel/rxe/rdma_rxe.ko"}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("order %q, %v; want %q", got, err, want)
	}
	if _, err := loadOrder([]byte(dep), nil, []string{"siw"}); err == nil || !strings.Contains(err.Error(), "siw") {
		t.Errorf("a module that does not exist: %v; want an error that names it", err)
	}
}

func TestFindKernelTakesTheNewestThatIsWhole(t *testing.T) {
	root := t.TempDir()
	add := func(release string, image bool) {
		dir := filepath.Join(root, "lib/modules", release, "kernel/drivers/infiniband/sw/rxe")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		files := []string{filepath.Join(dir, "rdma_rxe.ko.xz")}
		if image {
			files = append(files, filepath.Join(root, "boot/vmlinuz-"+release))
		}
		for _, f := range files {
			if err := os.WriteFile(f, nil, 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := os.Mkdir(filepath.Join(root, "boot"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := findKernel(root); err == nil {
		t.Error("found a kernel where there is none")
	}
	add("6.1.0-9-amd64", true)
	add("6.1.0-56-amd64", true)
	add("6.12.0-1-amd64", false)
	k, err := findKernel(root)
	if err != nil || filepath.Base(k.image) != "vmlinuz-6.1.0-56-amd64" || filepath.Base(k.modules) != "6.1.0-56-amd64" {
		t.Errorf("kernel %+v, %v; want 6.1.0-56-amd64", k, err)
	}
}

// TestArchive: another implementation of the format reads what archive writes.
func TestArchive(t *testing.T) {
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal("CI without busybox (package busybox-static)")
		}
		t.Skip("no busybox in PATH (package busybox-static) to read the archive with")
	}
	var buf bytes.Buffer
	a := newArchive(&buf)
	for _, err := range []error{
		a.file("/lab/a", 0o640, []byte("12345")),
		a.file("/lab/a", 0o600, []byte("the second of a name is not written")),
		a.dir("/empty"),
		a.close(),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if a.file("relative", 0o600, nil) == nil {
		t.Error("a relative name was taken")
	}
	dir := t.TempDir()
	cmd := exec.Command(busybox, "cpio", "-idmv")
	cmd.Dir = dir
	cmd.Stdin = &buf
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("cpio: %v\n%s", err, out)
	}
	text, err := os.ReadFile(filepath.Join(dir, "lab/a"))
	if err != nil || string(text) != "12345" {
		t.Errorf("the first of two files of a name: %q, %v", text, err)
	}
	info, err := os.Stat(filepath.Join(dir, "lab/a"))
	if err != nil || info.Mode() != 0o640 {
		t.Errorf("mode: %v, %v; want 0640", info, err)
	}
	if info, err := os.Stat(filepath.Join(dir, "empty")); err != nil || !info.IsDir() {
		t.Errorf("empty: %v, %v; want a directory", info, err)
	}
}

func TestParseLdd(t *testing.T) {
	got, err := parseLdd("x", "\tlinux-vdso.so.1 (0x7f)\n\tlibc.so.6 => /lib/libc.so.6 (0x7f)\n\t/lib64/ld-linux-x86-64.so.2 (0x7f)\n")
	if want := []string{"/lib/libc.so.6", "/lib64/ld-linux-x86-64.so.2"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%q, %v; want %q", got, err, want)
	}
	if _, err := parseLdd("x", "\tlibibverbs.so.1 => not found\n"); err == nil || !strings.Contains(err.Error(), "libibverbs.so.1") {
		t.Errorf("a missing library: %v; want an error that names it", err)
	}
}

func TestParseReport(t *testing.T) {
	for _, c := range []struct {
		name, text string
		code       int
		err        string // "" is none
	}{
		{"passed", "exit 0\nend\n", 0, ""},
		{"failed", "exit 3\nend\n", 3, ""},
		{"with carriage returns", "exit 1\r\nend\r\n", 1, ""},
		{"nothing", "", 0, "without a report"},
		{"cut off", "exit 0\n", 0, "without a report"},
		{"setup", "broken setup failed: insmod x\nend\n", 0, "setup failed: insmod x"},
		{"kernel", "exit 0\ncomplaint WARNING: CPU: 0\nend\n", 0, "WARNING: CPU: 0"},
		{"nonsense", "exit many\nend\n", 0, "many"},
	} {
		code, err := parseReport(c.text)
		if c.err == "" && (err != nil || code != c.code) {
			t.Errorf("%s: %d, %v; want %d", c.name, code, err, c.code)
		}
		if c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) {
			t.Errorf("%s: %v; want %q in the error", c.name, err, c.err)
		}
	}
}

func TestParse(t *testing.T) {
	o, err := parse([]string{"-bin", "a", "-bin", "b", "-env", "X=1", "--", "one", "two words"})
	if err != nil || !reflect.DeepEqual([]string(o.Bins), []string{"a", "b"}) || !slices.Equal(o.Commands, []string{"one", "two words"}) {
		t.Errorf("%+v, %v", o, err)
	}
	for _, args := range [][]string{{}, {"--", "a\nb"}, {"-env", "X", "--", "a"}} {
		if _, err := parse(args); err == nil {
			t.Errorf("%q was taken", args)
		}
	}
}

func TestUnpackStaysInside(t *testing.T) {
	dir := t.TempDir()
	write := func(name string) string {
		var buf bytes.Buffer
		w := tar.NewWriter(&buf)
		if err := w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Size: 2, Mode: 0o644}); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, "ok"); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(dir, "x.tar")
		if err := os.WriteFile(file, buf.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
		return file
	}
	if err := unpack(write("sub/bench.json"), filepath.Join(dir, "to")); err != nil {
		t.Error(err)
	}
	if text, err := os.ReadFile(filepath.Join(dir, "to/sub/bench.json")); err != nil || string(text) != "ok" {
		t.Errorf("%q, %v", text, err)
	}
	if err := unpack(write("../escape"), filepath.Join(dir, "to")); err == nil {
		t.Error("a name that leads out was taken")
	}
}
