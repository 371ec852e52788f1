package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// packages are the Debian packages of the lab. Their dependencies, down to the C library, are
// downloaded too.
var packages = []string{
	"linux-image-amd64",
	"kmod", // depmod
	"qemu-system-x86",
	"busybox-static",
	"dash", // sh of the guest
	"iproute2",
	"ibverbs-providers",
	"perftest",
	"dmsetup",
	"e2fsprogs",
	"xfsprogs",
	"util-linux",     // blkdiscard
	"libibverbs-dev", // to build the programs that run in the guest
}

// root is a directory with the unpacked packages, from which the lab takes programs, libraries and
// kernels. command runs a program of the root with the root's libraries.
type root string

// ensureRoot returns the root that has the packages. The first call downloads and unpacks the
// packages under cache; later calls use the unpacked packages. ensureRoot changes nothing outside
// cache and needs no privileges.
func ensureRoot(ctx context.Context, cache string) (root, error) {
	if cache == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			return "", fmt.Errorf("no directory for the packages: %w: name one by -cache", err)
		}
		cache = filepath.Join(user, "penstock-rdmalab")
	}
	cache, err := filepath.Abs(cache)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(cache, 0o700); err != nil {
		return "", err
	}
	unlock, err := lockDir(cache)
	if err != nil {
		return "", err
	}
	defer unlock()
	release, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return "", err
	}
	// The name of the directory depends on the list of packages and on the distribution's release.
	name := fmt.Sprintf("%x", sha256.Sum256(append(release, strings.Join(packages, " ")...)))[:12]
	r := root(filepath.Join(cache, name))
	if _, err := os.Stat(string(r)); err == nil {
		return r, nil
	}
	part := root(string(r) + ".part")
	if err := os.RemoveAll(string(part)); err != nil {
		return "", err
	}
	if err := fill(ctx, part); err != nil {
		return "", fmt.Errorf("packages of the guest: %w", err)
	}
	// The rename is the last step, so a root that has its final name is complete.
	return r, os.Rename(string(part), string(r))
}

// lockDir waits until no other lab is filling the cache.
func lockDir(dir string) (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return func() { f.Close() }, nil
}

// fill downloads the packages and unpacks them into r.
func fill(ctx context.Context, r root) error {
	apt := filepath.Join(string(r), "apt")
	for _, d := range []string{"state/lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(apt, d), 0o700); err != nil {
			return err
		}
	}
	// With an empty list of installed packages apt downloads all dependencies, so the root works on
	// a machine with any packages.
	if err := os.WriteFile(filepath.Join(apt, "state/status"), nil, 0o600); err != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "rdmalab: downloading %s and their dependencies, about 150 MB, into %s; nothing is installed\n", strings.Join(packages, " "), r)
	aptGet := func(args ...string) (string, error) {
		return output(exec.CommandContext(ctx, "apt-get", append(aptOptions(apt), args...)...))
	}
	// apt-get update succeeds even if it reaches no source. The output of the update is kept,
	// because it has the reason if the install finds no package.
	updated, err := aptGet("update")
	if err == nil {
		_, err = aptGet(append([]string{"install", "--download-only", "-y", "--no-install-recommends"}, packages...)...)
	}
	if err != nil {
		return fmt.Errorf("apt-get did not download the packages; it needs a Debian system with reachable package sources: %w; apt-get update said: %s", err, lastOf(updated))
	}
	if err := unpackAll(ctx, r, filepath.Join(apt, "cache/archives")); err != nil {
		return err
	}
	if err := os.RemoveAll(apt); err != nil {
		return err
	}
	if err := rebaseLinks(r); err != nil {
		return err
	}
	return indexModules(ctx, r)
}

// aptOptions make apt-get write all its files under dir.
func aptOptions(dir string) []string {
	return []string{"-q",
		"-o", "Dir::State=" + dir + "/state", "-o", "Dir::State::status=" + dir + "/state/status", "-o", "Dir::Cache=" + dir + "/cache",
		"-o", "APT::Sandbox::User=", // the user _apt cannot read a private cache
		"-o", "APT::Keep-Downloaded-Packages=true"}
}

// unpackAll unpacks each package in debs.
func unpackAll(ctx context.Context, r root, debs string) error {
	// Some packages have files in /lib and others in /usr/lib. A link makes both names one
	// directory.
	for _, d := range []string{"bin", "sbin", "lib", "lib64"} {
		if err := os.MkdirAll(filepath.Join(string(r), "usr", d), 0o755); err != nil {
			return err
		}
		if err := os.Symlink("usr/"+d, filepath.Join(string(r), d)); err != nil {
			return err
		}
	}
	files, err := filepath.Glob(filepath.Join(debs, "*.deb"))
	if err != nil {
		return err
	}
	for _, deb := range files {
		// Owners and set-user-ID bits are left out, because the files are only read and executed.
		content := exec.CommandContext(ctx, "dpkg-deb", "--fsys-tarfile", deb)
		tar := exec.CommandContext(ctx, "tar", "-x", "-C", string(r), "--keep-directory-symlink", "--no-same-owner", "--no-same-permissions", "--mode=u+rwX,go-s")
		if tar.Stdin, err = content.StdoutPipe(); err != nil {
			return err
		}
		if err := content.Start(); err != nil {
			return err
		}
		err := run(tar)
		if e := content.Wait(); e != nil {
			err = fmt.Errorf("dpkg-deb --fsys-tarfile: %w", e)
		}
		if err != nil {
			return fmt.Errorf("unpack %s: %w", filepath.Base(deb), err)
		}
	}
	return nil
}

// rebaseLinks redirects each symbolic link with an absolute target to the file of that name in the
// root.
func rebaseLinks(r root) error {
	return filepath.WalkDir(string(r), func(name string, d os.DirEntry, err error) error {
		if err != nil || d.Type() != os.ModeSymlink {
			return err
		}
		to, err := os.Readlink(name)
		if err != nil || !filepath.IsAbs(to) {
			return err
		}
		// The link is relative, because the root is renamed when it is complete.
		relative, err := filepath.Rel(filepath.Dir(name), r.file(to))
		if err != nil {
			return err
		}
		if err := os.Remove(name); err != nil {
			return err
		}
		return os.Symlink(relative, name)
	})
}

// indexModules writes modules.dep of each kernel, as an installation would.
func indexModules(ctx context.Context, r root) error {
	dirs, err := filepath.Glob(filepath.Join(string(r), "lib/modules/*"))
	if err != nil {
		return err
	}
	for _, d := range dirs {
		cmd, err := r.command(ctx, "depmod", "-b", string(r), filepath.Base(d))
		if err != nil {
			return err
		}
		if err := run(cmd); err != nil {
			return err
		}
	}
	return nil
}

// run runs the command.
func run(cmd *exec.Cmd) error {
	_, err := output(cmd)
	return err
}

// output runs the command and returns its output. An error quotes the end of the output.
func output(cmd *exec.Cmd) (string, error) {
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.Env = append(os.Environ(), "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive")
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, lastOf(out.String()))
	}
	return out.String(), nil
}

// lastOf returns the last 2,000 bytes of a text.
func lastOf(text string) string {
	return strings.TrimSpace(text[max(0, len(text)-2000):])
}

// file returns the path of a file of the root; name is absolute.
func (r root) file(name string) string { return filepath.Join(string(r), name) }

// binDirs and libDirs are where Debian's packages put programs and libraries.
var (
	binDirs = []string{"/usr/bin", "/usr/sbin"}
	libDirs = []string{"/usr/lib/x86_64-linux-gnu", "/usr/lib", "/usr/lib64"}
)

// program returns the file of the program: from the root if it has the program, else from this
// machine, where name may be a path.
func (r root) program(name string) (string, error) {
	if filepath.Base(name) == name {
		for _, d := range binDirs {
			if f := r.file(filepath.Join(d, name)); isFile(f) {
				return f, nil
			}
		}
	}
	return exec.LookPath(name)
}

// command returns a command that runs a program of the root on this machine, with the root's loader
// and libraries.
func (r root) command(ctx context.Context, name string, args ...string) (*exec.Cmd, error) {
	file, err := r.program(name)
	if err != nil {
		return nil, err
	}
	var dirs []string
	for _, d := range libDirs {
		dirs = append(dirs, r.file(d))
	}
	args = append([]string{"--library-path", strings.Join(dirs, ":"), "--argv0", name, file}, args...)
	return exec.CommandContext(ctx, r.file("/lib64/ld-linux-x86-64.so.2"), args...), nil
}

// isFile reports whether name is a file, after following links.
func isFile(name string) bool {
	info, err := os.Stat(name)
	return err == nil && info.Mode().IsRegular()
}
