package topo

import (
	"io"
	"io/fs"
	"path"
	"regexp"
	"strconv"
	"strings"
)

// tree reads sysfs. The value of a file that cannot be read is the empty string, or unknown.
type tree struct{ fs fs.FS }

// valueMax is the largest number of bytes read from one file: sysfs returns at most a page.
const valueMax = 4096

// text returns the trimmed content of a file.
func (t tree) text(name string) string {
	f, err := t.fs.Open(name)
	if err != nil {
		return ""
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, valueMax))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// number returns the decimal or 0x-hexadecimal content of a file.
func (t tree) number(name string) (n int64, known bool) {
	n, err := strconv.ParseInt(t.text(name), 0, 64)
	return n, err == nil
}

// names returns the entries of a directory, sorted.
func (t tree) names(dir string) []string {
	entries, err := fs.ReadDir(t.fs, dir)
	if err != nil {
		return nil
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names
}

// exists reports whether the tree has an entry of that name.
func (t tree) exists(name string) bool {
	_, err := fs.Lstat(t.fs, name)
	return err == nil
}

// link returns the last element of a link's target: the driver's name for .../driver, the PCI
// address for .../physfn.
func (t tree) link(name string) string {
	target, err := fs.ReadLink(t.fs, name)
	if err != nil {
		return ""
	}
	return path.Base(target)
}

// real resolves the link name; no directory on the path to it may be a link. For class/net/eth0 it
// returns devices/pci0000:00/0000:00:03.0/virtio2/net/eth0.
func (t tree) real(name string) string {
	target, err := fs.ReadLink(t.fs, name)
	if err != nil {
		return name
	}
	return path.Join(path.Dir(name), target)
}

var (
	pciAddress  = regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`)
	pciRootName = regexp.MustCompile(`^pci[0-9a-f]{4,8}:[0-9a-f]{2}$`)
)

// pciPath returns the PCI part of a path below /sys: the host bridge, the bridges, and the device
// last. It returns nil if the path has no PCI device.
func pciPath(real string) []string {
	var out []string
	for part := range strings.SplitSeq(real, "/") {
		switch {
		case pciRootName.MatchString(part):
			out = []string{part}
		case pciAddress.MatchString(part) && out != nil:
			out = append(out, part)
		}
	}
	if len(out) < 2 {
		return nil
	}
	return out
}

// pciDir returns the directory of the last PCI device in a path below /sys.
func pciDir(real string) string {
	parts := strings.Split(real, "/")
	for i := len(parts) - 1; i >= 0; i-- {
		if pciAddress.MatchString(parts[i]) {
			return strings.Join(parts[:i+1], "/")
		}
	}
	return ""
}
