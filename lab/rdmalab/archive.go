package main

import (
	"bufio"
	"fmt"
	"io"
	"path"
	"strings"
)

// archive writes the format that the kernel unpacks into its first root file
// system: cpio "newc" (Documentation/driver-api/early-userspace/buffer-format).
//
//	"070701" | 13 fields of 8 hex digits | name, NUL | pad to 4 | data | pad to 4
//	fields: inode mode uid gid links mtime size devmajor devminor rdevmajor rdevminor namelen check
//
// Of several files with the same name, only the first is written. Directories are created as
// needed.
type archive struct {
	w     *bufio.Writer
	off   int64
	inode int
	have  map[string]bool
	err   error
}

// The types of an entry, in the mode field.
const (
	modeDir  = 0o040000
	modeFile = 0o100000
	modeChar = 0o020000
)

func newArchive(w io.Writer) *archive {
	return &archive{w: bufio.NewWriterSize(w, 1<<20), have: map[string]bool{"/": true}}
}

// file adds a file. name is absolute.
func (a *archive) file(name string, perm int, data []byte) error {
	return a.entry(name, modeFile|perm, 0, 0, data)
}

// dir adds a directory and its parents.
func (a *archive) dir(name string) error { return a.entry(name, modeDir|0o755, 0, 0, nil) }

// device adds a character device.
func (a *archive) device(name string, major, minor int) error {
	return a.entry(name, modeChar|0o600, major, minor, nil)
}

// has reports whether the archive has an entry of that name.
func (a *archive) has(name string) bool { return a.have[path.Clean(name)] }

func (a *archive) entry(name string, mode, major, minor int, data []byte) error {
	name = path.Clean(name)
	if !path.IsAbs(name) {
		return fmt.Errorf("archive: name %q is not absolute", name)
	}
	if a.have[name] {
		return a.err
	}
	if err := a.dir(path.Dir(name)); err != nil {
		return err
	}
	a.have[name] = true
	a.put(strings.TrimPrefix(name, "/"), mode, major, minor, data)
	return a.err
}

// put writes one record.
func (a *archive) put(name string, mode, major, minor int, data []byte) {
	a.inode++
	fields := [...]int{a.inode, mode, 0, 0, 1, 0, len(data), 0, 0, major, minor, len(name) + 1, 0}
	a.write([]byte("070701"))
	for _, f := range fields {
		a.write(fmt.Appendf(nil, "%08X", f))
	}
	a.write([]byte(name + "\x00"))
	a.pad()
	a.write(data)
	a.pad()
}

func (a *archive) write(b []byte) {
	if a.err != nil {
		return
	}
	var n int
	n, a.err = a.w.Write(b)
	a.off += int64(n)
}

func (a *archive) pad() { a.write(make([]byte, -a.off&3)) }

// close writes the record that ends the archive.
func (a *archive) close() error {
	a.put("TRAILER!!!", 0, 0, 0, nil)
	if a.err != nil {
		return a.err
	}
	return a.w.Flush()
}
