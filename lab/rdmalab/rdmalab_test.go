package main

import (
	"archive/tar"
	"bytes"
	"errors"
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

// TestArchive: another implementation of the format reads the archive.
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
		t.Error("a relative name was accepted")
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

// TestNothingIsInstalled runs a stand-in for apt-get that rejects any call that would write
// outside the cache, and unpacks a real package.
func TestNothingIsInstalled(t *testing.T) {
	if _, err := exec.LookPath("dpkg-deb"); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal("CI without dpkg-deb (package dpkg)")
		}
		t.Skip("no dpkg-deb in PATH (package dpkg)")
	}
	dir := t.TempDir()
	cache, bin, pkg := filepath.Join(dir, "cache"), filepath.Join(dir, "bin"), filepath.Join(dir, "pkg")
	for _, d := range []string{bin, pkg + "/DEBIAN", pkg + "/sbin", pkg + "/usr/bin"} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, text := range map[string]string{
		"DEBIAN/control": "Package: lab-test\nVersion: 1\nArchitecture: all\nMaintainer: none <none@localhost>\nDescription: test\n",
		"usr/bin/tool":   "#!/bin/sh\n",
	} {
		if err := os.WriteFile(filepath.Join(pkg, name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("/bin/tool", pkg+"/sbin/tool-link"); err != nil {
		t.Fatal(err)
	}
	deb := filepath.Join(dir, "lab-test.deb")
	if out, err := exec.Command("dpkg-deb", "--build", "--root-owner-group", pkg, deb).CombinedOutput(); err != nil {
		t.Fatalf("dpkg-deb: %v\n%s", err, out)
	}
	const standIn = `#!/bin/sh
echo "$*" >>"$LAB_TEST/calls"
for key in State State::status Cache; do
	case "$*" in *"-o Dir::$key=$LAB_TEST/cache/"*) ;; *) echo "Dir::$key leads outside the cache"; exit 1 ;; esac
done
case "$*" in
*" update") ;;
*" install "*"--download-only "*) cp "$LAB_TEST/lab-test.deb" "$LAB_TEST"/cache/*.part/apt/cache/archives/ ;;
*) echo "a call that installs"; exit 1 ;;
esac
`
	if err := os.WriteFile(filepath.Join(bin, "apt-get"), []byte(standIn), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("LAB_TEST", dir)
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	for range 2 {
		r, err := ensureRoot(t.Context(), cache)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"tool", "tool-link"} {
			if f, err := r.program(name); err != nil || !strings.HasPrefix(f, cache) {
				t.Errorf("program %s: %q, %v; want one of the cache", name, f, err)
			}
		}
		if _, err := os.Stat(r.file("apt")); err == nil {
			t.Error("the archives were left in the cache")
		}
	}
	calls, err := os.ReadFile(filepath.Join(dir, "calls"))
	if n := bytes.Count(calls, []byte("\n")); err != nil || n != 2 {
		t.Errorf("apt-get ran %d times, %v; want 2, all of them for the first call:\n%s", n, err, calls)
	}
}

// TestNoPackages: the error states that apt-get is missing, or that it reaches no source of
// packages.
func TestNoPackages(t *testing.T) {
	for name, c := range map[string]struct{ aptGet, want string }{
		"no apt-get": {"", `"apt-get": executable file not found`},
		"no source": {`#!/bin/sh
case "$*" in
*" update") echo "W: Failed to fetch http://mirror.example: could not connect" ;;
*) echo "E: Unable to locate package kmod"; exit 100 ;;
esac
`, "could not connect"},
	} {
		t.Run(name, func(t *testing.T) {
			bin, cache := t.TempDir(), t.TempDir()
			if c.aptGet != "" {
				if err := os.WriteFile(filepath.Join(bin, "apt-get"), []byte(c.aptGet), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			t.Setenv("PATH", bin)
			if r, err := ensureRoot(t.Context(), cache); err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "did not download") {
				t.Errorf("%q, %v; want an error with %q", r, err, c.want)
			}
		})
	}
}

func TestLinkedTo(t *testing.T) {
	sh, err := exec.LookPath("sh")
	if err != nil {
		t.Fatal(err)
	}
	loader, libs, err := linkedTo(sh)
	if err != nil || !strings.Contains(loader, "ld-linux") || !slices.Contains(libs, "libc.so.6") {
		t.Errorf("sh: loader %q, libraries %q, %v", loader, libs, err)
	}
	if _, _, err := linkedTo("rdmalab_test.go"); err == nil {
		t.Error("a text was accepted as a program")
	}
	if _, err := root(t.TempDir()).library("libnothing.so.9"); err == nil || !strings.Contains(err.Error(), "libnothing.so.9") {
		t.Errorf("a missing library: %v; want an error that names it", err)
	}
}

func TestParseReport(t *testing.T) {
	for _, c := range []struct {
		name, text string
		code       int
		err        string // empty means no error
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
	if o, err := parse([]string{"-equipment", "disks", "-drive", "512M", "-drive", "2G", "--", "one"}); err != nil || len(o.Drives) != 2 || !slices.Contains(o.Equipment.programs, "dmsetup") {
		t.Errorf("a guest with two drives: %+v, %v", o, err)
	}
	for _, args := range [][]string{{}, {"--", "a\nb"}, {"-env", "X", "--", "a"}, {"-equipment", "tape", "--", "a"}, {"-drive", "2", "--", "a"}, {"-drive", "0G", "--", "a"}} {
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
		t.Error("a name outside of the directory was accepted")
	}
}

// TestModuleParameters: a module's parameters are passed to insmod, but not to its dependencies.
func TestModuleParameters(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"modules.dep": "kernel/brd.ko: kernel/blk.ko\nkernel/blk.ko:\n", "modules.builtin": "", "kernel/brd.ko": "brd", "kernel/blk.ko": "blk",
	} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var image bytes.Buffer
	a := newArchive(&image)
	if err := errors.Join(addModules(a, kernel{modules: dir}, []string{"brd rd_nr=4 rd_size=100"}), a.close()); err != nil {
		t.Fatal(err)
	}
	if want := "blk.ko\nbrd.ko rd_nr=4 rd_size=100\n"; !bytes.Contains(image.Bytes(), []byte(want)) {
		t.Errorf("the archive does not hold the list %q", want)
	}
}

// TestDrives: makeDrives creates files of the given sizes and returns QEMU's arguments for
// them.
func TestDrives(t *testing.T) {
	dir := t.TempDir()
	args, err := makeDrives(dir, []string{"512M", "2G"})
	if err != nil || len(args) != 8 || !strings.Contains(args[3], "nvme,serial=penstock0,") {
		t.Fatalf("%q, %v", args, err)
	}
	info, err := os.Stat(filepath.Join(dir, "drive1"))
	if err != nil || info.Size() != 2<<30 {
		t.Errorf("the second drive: %v, %v; want a file of 2 GiB", info, err)
	}
}
