package main

import (
	"bytes"
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// initScript is process 1 of the guest.
//
//go:embed init.sh
var initScript []byte

// guestBins are the programs that the guest has in any case. The shell is not
// busybox's, which would run its own ip, and that knows no policy routes.
var guestBins = []string{"sh", "ip", "rdma", "ib_write_bw"}

// writeImage writes the initramfs for the guest.
func writeImage(file string, k kernel, o options) (err error) {
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	defer func() {
		if e := f.Close(); err == nil {
			err = e
		}
	}()
	a := newArchive(f)
	for _, add := range []func(*archive) error{
		addBase,
		func(a *archive) error { return addModules(a, k, append(slices.Clone(rxeModules), o.Modules...)) },
		func(a *archive) error { return addPrograms(a, append(slices.Clone(guestBins), o.Bins...)) },
		addProviders,
		func(a *archive) error { return addFiles(a, o.Files) },
		func(a *archive) error { return addCommands(a, o) },
	} {
		if err := add(a); err != nil {
			return err
		}
	}
	return a.close()
}

// addBase adds what any guest needs: a shell, device nodes for the first
// messages, names for localhost.
func addBase(a *archive) error {
	busybox, err := os.ReadFile("/bin/busybox")
	if err != nil {
		return err
	}
	for _, d := range []string{"/proc", "/sys", "/dev", "/tmp", "/out", "/root", "/run", "/bin", "/sbin", "/usr/bin", "/usr/sbin"} {
		if err := a.dir(d); err != nil {
			return err
		}
	}
	if err := a.device("/dev/console", 5, 1); err != nil {
		return err
	}
	for _, f := range []struct {
		name string
		perm int
		data []byte
	}{
		{"/init", 0o755, initScript},
		{"/lab/busybox", 0o755, busybox},
		{"/etc/passwd", 0o644, []byte("root:x:0:0:root:/root:/bin/sh\n")},
		{"/etc/group", 0o644, []byte("root:x:0:\n")},
		{"/etc/hosts", 0o644, []byte("127.0.0.1 localhost rdmalab\n")},
		{"/etc/nsswitch.conf", 0o644, []byte("hosts: files\n")},
	} {
		if err := a.file(f.name, f.perm, f.data); err != nil {
			return err
		}
	}
	return nil
}

// addPrograms adds programs as /bin/NAME, with the libraries they are linked to.
func addPrograms(a *archive, programs []string) error {
	for _, p := range programs {
		file, err := exec.LookPath(p)
		if err != nil {
			return fmt.Errorf("program %s: %w", p, err)
		}
		if err := addLinked(a, file, "/bin/"+filepath.Base(p)); err != nil {
			return err
		}
	}
	return nil
}

// addProviders adds libibverbs' driver for rxe, which is opened at run time and
// so is no dependency that a linker knows of.
func addProviders(a *archive) error {
	found, err := filepath.Glob("/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav*.so")
	if err != nil || len(found) == 0 {
		return fmt.Errorf("libibverbs' driver for rxe: not found (package ibverbs-providers): %v", err)
	}
	for _, lib := range found {
		if err := addLinked(a, lib, lib); err != nil {
			return err
		}
	}
	return addFiles(a, []string{"/etc/libibverbs.d/rxe.driver:/etc/libibverbs.d/rxe.driver"})
}

// addLinked adds a program or library, and the libraries it is linked to at the
// places where its loader found them here.
func addLinked(a *archive, file, as string) error {
	if err := addFiles(a, []string{file + ":" + as}); err != nil {
		return err
	}
	libs, err := linkedTo(file)
	if err != nil {
		return err
	}
	for _, lib := range libs {
		if err := addFiles(a, []string{lib + ":" + lib}); err != nil {
			return err
		}
	}
	return nil
}

// linkedTo asks the loader which libraries the program is linked to.
func linkedTo(file string) ([]string, error) {
	cmd := exec.Command("ldd", file)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	out, err := cmd.CombinedOutput()
	if bytes.Contains(out, []byte("not a dynamic executable")) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("ldd %s: %w: %s", file, err, bytes.TrimSpace(out))
	}
	return parseLdd(file, string(out))
}

// parseLdd reads lines "libc.so.6 => /lib/…/libc.so.6 (0x…)" and, for the
// loader, "/lib64/ld-linux-x86-64.so.2 (0x…)".
func parseLdd(file, text string) ([]string, error) {
	var libs []string
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		for _, f := range fields {
			if filepath.IsAbs(f) {
				libs = append(libs, f)
			}
		}
		if strings.Contains(line, "not found") {
			return nil, fmt.Errorf("%s needs a library that is not here: %s", file, strings.TrimSpace(line))
		}
	}
	return libs, nil
}

// addFiles adds copies, "HOST:GUEST" each; links are followed.
func addFiles(a *archive, pairs []string) error {
	for _, p := range pairs {
		host, guest, ok := strings.Cut(p, ":")
		if !ok || !filepath.IsAbs(guest) {
			return fmt.Errorf("-file %q: want HOST:GUEST with an absolute GUEST", p)
		}
		if a.has(guest) {
			continue
		}
		info, err := os.Stat(host)
		if err != nil {
			return err
		}
		data, err := os.ReadFile(host)
		if err != nil {
			return err
		}
		if err := a.file(guest, int(info.Mode().Perm()), data); err != nil {
			return err
		}
	}
	return nil
}

// addCommands adds the commands and their environment.
func addCommands(a *archive, o options) error {
	var env strings.Builder
	for _, e := range o.Env {
		name, value, _ := strings.Cut(e, "=")
		fmt.Fprintf(&env, "export %s='%s'\n", name, strings.ReplaceAll(value, "'", `'\''`))
	}
	if err := a.file("/lab/env", 0o644, []byte(env.String())); err != nil {
		return err
	}
	return a.file("/lab/commands", 0o644, []byte(strings.Join(o.Commands, "\n")+"\n"))
}
