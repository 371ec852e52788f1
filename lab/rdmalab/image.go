package main

import (
	"debug/elf"
	_ "embed"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// initScript is process 1 of the guest.
//
//go:embed init.sh
var initScript []byte

// writeImage writes the initramfs for the guest.
func writeImage(file string, r root, k kernel, o options) (err error) {
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
		func(a *archive) error { return addBase(a, r) },
		func(a *archive) error { return addModules(a, k, slices.Concat(o.Equipment.modules, o.Modules)) },
		func(a *archive) error {
			return addPrograms(a, r, slices.Concat([]string{"sh"}, o.Equipment.programs, o.Bins))
		},
		func(a *archive) error { return o.Equipment.add(a, r, o) },
		func(a *archive) error { return addFiles(a, o.Files) },
		func(a *archive) error { return addCommands(a, o) },
	} {
		if err := add(a); err != nil {
			return err
		}
	}
	return a.close()
}

// addBase adds the files that any guest needs: busybox, the init script, /dev/console for output
// before devtmpfs is mounted, and files in /etc that define root and localhost.
func addBase(a *archive, r root) error {
	busybox, err := os.ReadFile(r.file("/bin/busybox"))
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

// addPrograms adds programs as /bin/NAME, with the libraries to which they are linked.
func addPrograms(a *archive, r root, programs []string) error {
	for _, p := range programs {
		file, err := r.program(p)
		if err != nil {
			return fmt.Errorf("program %s: %w", p, err)
		}
		if err := addLinked(a, r, file, "/bin/"+filepath.Base(p)); err != nil {
			return err
		}
	}
	return nil
}

// addLinked adds a program or library, its loader, and all libraries to which it is linked,
// directly or indirectly.
func addLinked(a *archive, r root, file, as string) error {
	if a.has(as) {
		return nil
	}
	if err := addFiles(a, []string{file + ":" + as}); err != nil {
		return err
	}
	loader, libs, err := linkedTo(file)
	if err != nil {
		return err
	}
	if loader != "" {
		if err := addLinked(a, r, r.file(loader), loader); err != nil {
			return err
		}
	}
	for _, lib := range libs {
		found, err := r.library(lib)
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		if err := addLinked(a, r, found, filepath.Join(libDirs[0], lib)); err != nil {
			return err
		}
	}
	return nil
}

// linkedTo returns the loader and the libraries that an ELF file names. Both are empty for a static
// program.
func linkedTo(file string) (loader string, libs []string, err error) {
	f, err := elf.Open(file)
	if err != nil {
		return "", nil, fmt.Errorf("%s: %w", file, err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			text, err := io.ReadAll(p.Open())
			if err != nil {
				return "", nil, fmt.Errorf("%s: %w", file, err)
			}
			loader = strings.TrimRight(string(text), "\x00")
		}
	}
	libs, err = f.ImportedLibraries()
	return loader, libs, err
}

// library returns the file of a shared library: from the root, or from this machine if the root does
// not have the library.
func (r root) library(name string) (string, error) {
	for _, in := range []root{r, "/"} {
		for _, d := range libDirs {
			if f := in.file(filepath.Join(d, name)); isFile(f) {
				return f, nil
			}
		}
	}
	return "", fmt.Errorf("library %s is neither in %s nor on this machine (looked in %s)", name, r, strings.Join(libDirs, " "))
}

// addFiles copies files, each given as "HOST:GUEST". It follows symbolic links.
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
