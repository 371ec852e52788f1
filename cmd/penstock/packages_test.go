package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/cluster"
)

// TestPackages builds the program as packages have it, runs the commands of docs/install.md, and
// uses the installed files.
func TestPackages(t *testing.T) {
	testkit.Long(t, "builds the program and packages of it")
	if os.Geteuid() != 0 {
		t.Skip("needs root for chroot and mounts")
	}
	dir := t.TempDir()
	made := packages{program: dir + "/static/penstock", image: dir + "/image", deb: dir}
	make := exec.CommandContext(t.Context(), "make", "-s", "image", "deb")
	make.Dir, make.Env = testkit.RepositoryRoot(t), made.environ()
	if out, err := make.CombinedOutput(); err != nil {
		t.Fatalf("make image deb: %v\n%s", err, out)
	}
	commands := blocks(t, "install.md", "sh")
	if len(commands) != 3 {
		t.Fatalf("docs/install.md has %d blocks of commands", len(commands))
	}
	t.Run("deb", func(t *testing.T) { testDebianPackage(t, made, commands[0]) })
	t.Run("systemd", func(t *testing.T) { testUnderSystemd(t, made, commands[0]) })
	t.Run("image", func(t *testing.T) { testImage(t, made, commands[1]) })
	t.Run("units", func(t *testing.T) { testInstalledUnits(t, made, commands[2]) })
}

// packages are the outputs of the Makefile.
type packages struct{ program, image, deb string }

// environ makes a make command write the packages.
func (p packages) environ() []string {
	return append(os.Environ(), fmt.Sprintf("MAKEFLAGS=-- STATIC=%s IMAGE=%s DEB=%s VERSION=%s", p.program, p.image, p.deb, testVersion))
}

// testVersion is the version of the packages in the tests.
const testVersion = "9.8.7"

// machine is a directory that a process sees as its root.
type machine struct {
	t    *testing.T
	root string
}

// copyOfThisMachine returns a machine that has the files of the root file system of this one, and
// that keeps its own changes to them. It has the repository's deploy directory in /src, and does
// not have a user penstock.
func copyOfThisMachine(t *testing.T) *machine {
	t.Helper()
	dir := t.TempDir()
	m := &machine{t: t, root: filepath.Join(dir, "root")}
	m.mount("tmpfs", dir, "tmpfs", 0, "")
	for _, name := range []string{"changes", "work", "root"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	m.mount("overlay", m.root, "overlay", 0, fmt.Sprintf("lowerdir=/,upperdir=%[1]s/changes,workdir=%[1]s/work", dir))
	m.mount("/dev", m.root+"/dev", "", syscall.MS_BIND, "")
	m.mount("proc", m.root+"/proc", "proc", 0, "")
	m.mount("tmpfs", m.root+"/tmp", "tmpfs", 0, "")
	if err := os.CopyFS(m.root+"/src/deploy", os.DirFS(filepath.Join(testkit.RepositoryRoot(t), "deploy"))); err != nil {
		t.Fatal(err)
	}
	m.sh("! getent passwd penstock")
	return m
}

// mount mounts until the test ends.
func (m *machine) mount(source, target, kind string, flags uintptr, data string) {
	m.t.Helper()
	if err := syscall.Mount(source, target, kind, flags, data); err != nil {
		if kind == "overlay" && os.Getenv("CI") != "true" {
			m.t.Skipf("needs overlayfs over the root file system: %v", err)
		}
		m.t.Fatalf("mount %s: %v", target, err)
	}
	m.t.Cleanup(func() {
		if err := syscall.Unmount(target, syscall.MNT_DETACH); err != nil {
			m.t.Errorf("umount %s: %v", target, err)
		}
	})
}

// makeDir makes a directory unless it exists, and returns its path on this machine.
func (m *machine) makeDir(path string) string {
	m.t.Helper()
	if err := os.MkdirAll(m.root+path, 0o755); err != nil {
		m.t.Fatal(err)
	}
	return m.root + path
}

// put writes a file. Its directory is made.
func (m *machine) put(path, text string, mode fs.FileMode) {
	m.t.Helper()
	path = filepath.Join(m.root, path)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), mode)); err != nil {
		m.t.Fatal(err)
	}
}

// sh runs commands in /src as root, in a shell that stops at the first failure, and returns the
// output. systemctl changes files only, because systemd does not run on the machine.
func (m *machine) sh(commands string) string {
	m.t.Helper()
	cmd := exec.CommandContext(m.t.Context(), "/bin/sh", "-e", "-c", commands)
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: m.root}
	cmd.Dir = "/src"
	cmd.Env = []string{"PATH=/src/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin", "SYSTEMD_OFFLINE=1", "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C.UTF-8"}
	out, err := cmd.CombinedOutput()
	if err != nil {
		m.t.Fatalf("%v\n%s\nof\n%s", err, out, commands)
	}
	return string(out)
}

// smallEnv has the settings of small for a process whose arguments are those of a unit or an image.
func smallEnv(command string) []string {
	environ := []string{"PENSTOCK_LISTEN=127.0.0.1:0", "PENSTOCK_HTTP=127.0.0.1:0", "PENSTOCK_LOG_FORMAT=json"}
	if command == "serve" {
		environ = append(environ, "PENSTOCK_DATA_LISTEN=127.0.0.1:0", "PENSTOCK_CAPACITY=64MiB", "PENSTOCK_ARENA=32MiB",
			"PENSTOCK_INDEX_CACHE=4MiB", "PENSTOCK_FREE_FLOOR=1MiB", "PENSTOCK_SCRUB_RATE=0B")
	}
	return environ
}

// start runs a program on the machine as another user, until the test stops it.
func (m *machine) start(user *syscall.Credential, environ []string, args ...string) *cluster.Process {
	m.t.Helper()
	p, err := cluster.StartProcess(m.t.Context(), cluster.ProcessOptions{Name: args[0], Env: environ, Start: func(cmd *exec.Cmd) error {
		cmd.Path, cmd.Args, cmd.Dir = args[0], args, "/"
		cmd.SysProcAttr.Chroot, cmd.SysProcAttr.Credential = m.root, user
		return cmd.Start()
	}})
	if err != nil {
		m.t.Fatal(err)
	}
	return p
}

// seal makes the file system read-only except for a directory of the user, which is empty, as
// ProtectSystem=strict and StateDirectory= of a unit do.
func (m *machine) seal(state string, user *syscall.Credential) {
	m.t.Helper()
	m.mount(m.root, m.root, "", syscall.MS_BIND|syscall.MS_REC, "")
	m.mount("tmpfs", m.makeDir(state), "tmpfs", 0, fmt.Sprintf("mode=0700,uid=%d,gid=%d", user.Uid, user.Gid))
	if err := syscall.Mount("", m.root, "", syscall.MS_REMOUNT|syscall.MS_BIND|syscall.MS_RDONLY, ""); err != nil {
		m.t.Fatal(err)
	}
}

// stores fails unless a node stores a prompt and returns it.
func stores(t *testing.T, p *cluster.Process) {
	t.Helper()
	node, dir := &served{t: t, ready: p.Ready}, t.TempDir()
	tokensFile, dataFile := prompt(t, node, dir, 4)
	node.run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
	fetchSame(t, node, dir, tokensFile, dataFile)
}

// runUnits starts the command of each unit that is installed in dir without systemd, as its user and
// on a read-only file system, and waits for the messages that systemd would get.
func (m *machine) runUnits(dir string) {
	m.t.Helper()
	fields := strings.Split(strings.TrimSpace(m.sh("getent passwd penstock")), ":")
	user := &syscall.Credential{Uid: uint32(number(m.t, fields[2])), Gid: uint32(number(m.t, fields[3]))}
	if got := strings.Join(fields[4:], ":"); got != "Penstock:/var/lib/penstock:/usr/sbin/nologin" {
		m.t.Errorf("the user penstock is %q", got)
	}
	m.seal("/var/lib/penstock", user)
	for _, s := range services() {
		unit := string(readAll(m.t, filepath.Join(m.root, dir, s.unit)))
		words := exampleWords(directives(unit, "ExecStart")[0])
		words[0] = strings.TrimSpace(m.sh("command -v " + words[0]))
		manager := newServiceManager(m.t, "@"+m.root+"/"+s.unit)
		p := m.start(user, append(smallEnv(s.command), "NOTIFY_SOCKET="+manager.socket), words...)
		manager.want("READY=1")
		if s.command == "serve" {
			stores(m.t, p)
		}
		if err := p.Stop(); err != nil {
			m.t.Error(err)
		}
		manager.wantDrain()
	}
}

func number(t *testing.T, text string) (n int) {
	t.Helper()
	if _, err := fmt.Sscan(text, &n); err != nil {
		t.Fatal(err)
	}
	return n
}

// testInstalledUnits runs the commands that install the units.
func testInstalledUnits(t *testing.T, made packages, commands string) {
	m := copyOfThisMachine(t)
	m.put("src/penstock", string(readAll(t, made.program)), 0o755)
	m.put("src/bin/make", "#!/bin/sh\ntest \"$*\" = install && exec install -D -m 0755 penstock /usr/local/bin/penstock\n", 0o755)
	m.sh(commands)
	m.sh("test -L /etc/systemd/system/multi-user.target.wants/penstock.service")
	if out := m.sh("penstock version"); !strings.Contains(out, "v"+testVersion+"\n") {
		t.Errorf("penstock version prints\n%s", out)
	}
	m.runUnits("etc/systemd/system")
}

// installDeb runs the commands that install the package. make gives them the package that was built.
func (m *machine) installDeb(made packages, commands string) {
	m.t.Helper()
	name := fmt.Sprintf("penstock_%s_%s.deb", testVersion, runtime.GOARCH)
	m.put("src/built.deb", string(readAll(m.t, filepath.Join(made.deb, name))), 0o644)
	m.put("src/bin/make", "#!/bin/sh\ntest \"$*\" = deb && exec install -D -m 0644 built.deb bin/"+name+"\n", 0o755)
	m.sh(commands)
}

// testDebianPackage runs the commands that install the package, and then an upgrade, a removal and a
// purge.
func testDebianPackage(t *testing.T, made packages, commands string) {
	testkit.Program(t, "apt", "apt")
	vet := exec.CommandContext(t.Context(), "go", "-C", filepath.Join(testkit.RepositoryRoot(t), "deploy", "deb"), "vet", ".") // a module of its own
	if out, err := vet.CombinedOutput(); err != nil {
		t.Errorf("go vet: %v\n%s", err, out)
	}
	m := copyOfThisMachine(t)
	m.installDeb(made, commands)
	for _, s := range services() {
		if out := m.sh("dpkg-query -S /etc/penstock/" + s.file + " /usr/lib/systemd/system/" + s.unit); strings.Count(out, "penstock: ") != 2 {
			t.Errorf("dpkg does not own the files of %s:\n%s", s.unit, out)
		}
	}
	wanted := "/etc/systemd/system/multi-user.target.wants/penstock.service"
	m.sh("test -L " + wanted + "; test ! -e /etc/systemd/system/multi-user.target.wants/penstock-planner.service")
	m.sh("echo '# changed' >> /etc/penstock/penstock.yaml; mkdir /var/lib/penstock; echo block > /var/lib/penstock/volume")
	m.sh("dpkg -i built.deb")
	m.sh("test -L " + wanted + "; tail -n 1 /etc/penstock/penstock.yaml | grep changed")
	m.sh("apt-get remove -qy penstock")
	m.sh("test ! -e /usr/bin/penstock; test ! -e /usr/lib/systemd/system/penstock.service; test ! -L " + wanted)
	m.sh("test -e /etc/penstock/penstock.yaml; test -e /var/lib/penstock/volume; getent passwd penstock")
	m.sh("apt-get purge -qy penstock")
	m.sh("test ! -e /etc/penstock; test -e /var/lib/penstock/volume")
	m.sh("! dpkg-query -s penstock")
}

// testImage runs the commands that build the image, with a container storage of its own, and serves
// a node of the image in a chroot of its file system.
func testImage(t *testing.T, made packages, commands string) {
	testkit.Program(t, "buildah", "buildah")
	dir := t.TempDir()
	archive := dir + "/penstock.oci.tar"
	if !strings.Contains(commands, " bin/image ") || !strings.Contains(commands, ":bin/penstock.oci.tar ") {
		t.Fatalf("the commands have other files:\n%s", commands)
	}
	commands = strings.ReplaceAll(strings.ReplaceAll(commands, "bin/image ", made.image+" "), "bin/penstock.oci.tar", archive)
	storage := writeFile(t, dir, "storage.conf", fmt.Appendf(nil, "[storage]\ndriver = \"vfs\"\ngraphroot = %q\nrunroot = %q\n", dir+"/graph", dir+"/run"))
	cmd := exec.CommandContext(t.Context(), "sh", "-e", "-c", commands)
	cmd.Dir = testkit.RepositoryRoot(t)
	cmd.Env = append(made.environ(), "CONTAINERS_STORAGE_CONF="+storage, "BUILDAH_ISOLATION=chroot")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}

	// The archive is an OCI image layout: an index of manifests, each with a configuration and layers.
	layout := dir + "/layout"
	unpack(t, archive, layout)
	type descriptor struct{ Digest string }
	var index struct{ Manifests []descriptor }
	var manifest struct {
		Config descriptor
		Layers []descriptor
	}
	var image struct {
		Architecture, OS string
		Config           struct {
			User            string
			Entrypoint, Cmd []string
			Volumes         map[string]struct{}
			Labels          map[string]string
		}
	}
	blob := func(d descriptor) string { return layout + "/blobs/" + strings.Replace(d.Digest, ":", "/", 1) }
	parse := func(path string, v any) {
		t.Helper()
		if err := json.Unmarshal(readAll(t, path), v); err != nil {
			t.Fatal(err)
		}
	}
	parse(layout+"/index.json", &index)
	if len(index.Manifests) != 1 {
		t.Fatalf("the archive has %d images", len(index.Manifests))
	}
	parse(blob(index.Manifests[0]), &manifest)
	parse(blob(manifest.Config), &image)
	c := image.Config
	if image.OS != "linux" || image.Architecture != runtime.GOARCH || c.User != "65532:65532" || len(c.Volumes) != 1 || c.Labels["org.opencontainers.image.title"] != "penstock" {
		t.Errorf("the image's configuration is %+v", image)
	}
	m := &machine{t: t, root: dir + "/root"}
	for _, layer := range manifest.Layers {
		unpack(t, blob(layer), m.root)
	}
	user := &syscall.Credential{Uid: 65532, Gid: 65532}
	for _, path := range []string{"/usr/bin/penstock", "/var/lib/penstock"} {
		info, err := os.Stat(m.root + path)
		if err != nil {
			t.Fatal(err)
		}
		owner := info.Sys().(*syscall.Stat_t).Uid
		if owned := owner == user.Uid; owned != info.IsDir() || info.Mode().Perm()&0o755 != 0o755 {
			t.Errorf("%s belongs to user %d and has the mode %v", path, owner, info.Mode())
		}
	}
	m.mount("proc", m.makeDir("/proc"), "proc", 0, "")
	m.seal("/var/lib/penstock", user)
	version := exec.CommandContext(t.Context(), c.Entrypoint[0], "version")
	version.Dir, version.SysProcAttr = "/", &syscall.SysProcAttr{Chroot: m.root, Credential: user}
	if out, err := version.CombinedOutput(); err != nil || !strings.Contains(string(out), " v"+testVersion+"\n") {
		t.Errorf("penstock version: %v\n%s", err, out)
	}
	p := m.start(user, smallEnv("serve"), append(c.Entrypoint, c.Cmd...)...)
	stores(t, p)
	if err := p.Stop(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(m.root + "/var/lib/penstock/volume"); err != nil {
		t.Errorf("the node has no volume in the directory of the image: %v", err)
	}
}

// unpack extracts an archive, which may be compressed, into a new directory.
func unpack(t *testing.T, archive, dir string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("tar", "-x", "-p", "--numeric-owner", "-C", dir, "-f", archive).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", archive, err, out)
	}
}

// TestChangelog: the newest release in CHANGELOG.md is the version of the Python package, and the
// interfaces of the unreleased version are those of this build.
func TestChangelog(t *testing.T) {
	root := testkit.RepositoryRoot(t)
	changes := string(readAll(t, filepath.Join(root, "CHANGELOG.md")))
	newest := regexp.MustCompile(`(?m)^## (\d+\.\d+\.\d+), \d{4}-\d\d-\d\d$`).FindStringSubmatch(changes)
	project := regexp.MustCompile(`(?m)^version = "(.*)"$`).FindStringSubmatch(string(readAll(t, filepath.Join(root, "python", "pyproject.toml"))))
	if newest == nil || project == nil || newest[1] != project[1] {
		t.Errorf("CHANGELOG.md has the release %q, and python/pyproject.toml %q", newest, project)
	}
	abi := regexp.MustCompile(`(?m)^#define PENSTOCK_ABI_VERSION 0x(\w{4})(\w{4})u$`).FindStringSubmatch(string(readAll(t, filepath.Join(root, "client", "capi", "penstock.h"))))
	if abi == nil {
		t.Fatal("penstock.h has no version of the ABI")
	}
	var major, minor int
	if _, err := fmt.Sscanf(abi[1]+" "+abi[2], "%x %x", &major, &minor); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{fmt.Sprintf("disk format %d,", ondisk.Version), fmt.Sprintf("ABI of libpenstock is %d.%d.", major, minor)} {
		if first, _, _ := strings.Cut(changes, "\n## "+newest[1]); !strings.Contains(first, want) {
			t.Errorf("the newest part of CHANGELOG.md does not have %q", want)
		}
	}
}
