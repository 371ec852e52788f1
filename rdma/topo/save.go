package topo

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// Save copies into dir the parts of a sysfs tree that Read reads, for a bug report or for a test.
// Read of the copy returns the same host. A nil tree is /sys. dir is created if necessary and must
// be empty.
func Save(dir string, sysfs fs.FS) error {
	if sysfs == nil {
		sysfs = os.DirFS("/sys")
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("topo: save: %w", err)
	}
	if left, err := os.ReadDir(dir); err != nil {
		return fmt.Errorf("topo: save: %w", err)
	} else if len(left) > 0 {
		return fmt.Errorf("topo: save: %s is not empty", dir)
	}
	s := &saver{tree: tree{sysfs}, dir: dir, dirs: make(map[string]string)}
	Read(Options{Sysfs: s})
	if s.err != nil {
		return fmt.Errorf("topo: save: %w", s.err)
	}
	return nil
}

// saver is a tree. Each file, link and directory that is read through the saver is copied into dir.
// Only one goroutine may use it.
type saver struct {
	tree tree
	dir  string
	err  error // error of writing
	// dirs holds the locations of the directories that have been created. The map saves time,
	// because a port has a file for each of up to 1024 GIDs.
	dirs map[string]string
}

var (
	_ fs.ReadDirFS  = (*saver)(nil)
	_ fs.ReadLinkFS = (*saver)(nil)
)

// place returns the path, below dir, of the copy of the file name. It resolves links by reading
// them in the tree and not in the copy, because the target of a link may not have been copied yet.
func (s *saver) place(name string) string {
	parts := strings.Split(name, "/")
	for n := 3; n <= 4 && n <= len(parts); n++ { // class/net/eth0, bus/pci/devices/0000:00:03.0
		at := strings.Join(parts[:n], "/")
		if target, err := fs.ReadLink(s.tree.fs, at); err == nil {
			s.link(at, target)
			if n < len(parts) {
				return s.place(path.Join(append([]string{path.Dir(at), target}, parts[n:]...)...))
			}
		}
	}
	return filepath.Join(s.dir, filepath.FromSlash(name))
}

// file returns the path, below dir, of the copy of the file name, and creates the directory of the
// copy.
func (s *saver) file(name string) string {
	dir := path.Dir(name)
	at, made := s.dirs[dir]
	if !made {
		at = filepath.Dir(s.place(name)) // a link at the end of dir is followed
		s.mkdir(at)
		s.dirs[dir] = at
	}
	return filepath.Join(at, path.Base(name))
}

func (s *saver) note(err error) {
	if s.err == nil {
		s.err = err
	}
}

func (s *saver) mkdir(dir string) { s.note(os.MkdirAll(dir, 0o755)) }

func (s *saver) link(name, target string) {
	at := filepath.Join(s.dir, filepath.FromSlash(name))
	s.mkdir(filepath.Dir(at))
	if err := os.Symlink(target, at); err != nil && !errors.Is(err, fs.ErrExist) {
		s.note(err)
	}
}

// Open implements fs.FS. The bytes that are read from the file are also written to its copy.
func (s *saver) Open(name string) (fs.File, error) {
	f, err := s.tree.fs.Open(name)
	if err != nil {
		return nil, err
	}
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return f, nil
	}
	to, err := os.Create(s.file(name))
	if err != nil {
		s.note(err)
		return f, nil
	}
	return &saved{File: f, saver: s, to: to}, nil
}

// saved is an open file of the tree, and its copy.
type saved struct {
	fs.File
	saver *saver
	to    *os.File
}

// Read implements fs.File.
func (f *saved) Read(b []byte) (int, error) {
	n, err := f.File.Read(b)
	if n > 0 {
		_, werr := f.to.Write(b[:n])
		f.saver.note(werr)
	}
	return n, err
}

// Close implements fs.File.
func (f *saved) Close() error {
	f.saver.note(f.to.Close())
	return f.File.Close()
}

// ReadDir implements fs.ReadDirFS. It copies links and directories; files are copied when they
// are read.
func (s *saver) ReadDir(name string) ([]fs.DirEntry, error) {
	entries, err := fs.ReadDir(s.tree.fs, name)
	if err != nil {
		return nil, err
	}
	at := s.place(name)
	s.mkdir(at)
	for _, e := range entries {
		switch {
		case e.IsDir():
			s.mkdir(filepath.Join(at, e.Name()))
		case e.Type() == fs.ModeSymlink:
			if _, err := s.ReadLink(name + "/" + e.Name()); err != nil {
				s.note(err)
			}
		}
	}
	return entries, nil
}

// ReadLink implements fs.ReadLinkFS.
func (s *saver) ReadLink(name string) (string, error) {
	target, err := fs.ReadLink(s.tree.fs, name)
	if err != nil {
		return "", err
	}
	// A directory such as class/net/eth0 is itself a link. So a link in it is copied to the
	// device's directory, to which class/net/eth0 points.
	at, err := filepath.Rel(s.dir, filepath.Join(s.place(path.Dir(name)), path.Base(name)))
	if err != nil {
		return "", err
	}
	s.link(filepath.ToSlash(at), target)
	return target, nil
}

// Lstat implements fs.ReadLinkFS.
func (s *saver) Lstat(name string) (fs.FileInfo, error) {
	info, err := fs.Lstat(s.tree.fs, name)
	if err == nil && info.IsDir() {
		s.mkdir(s.place(name))
	}
	return info, err
}
