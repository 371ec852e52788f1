package usrbio

import (
	"bufio"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// mountinfo is the kernel's list of the mounts of this process (proc(5)).
const mountinfo = "/proc/self/mountinfo"

// fsType is the type of a mount of 3FS's FUSE daemon.
const fsType = "fuse.hf3fs"

// Mounted reports whether the directory dir is on a mount of 3FS. It does not need 3FS's library.
func Mounted(dir string) bool {
	path, err := filepath.Abs(dir)
	if err == nil {
		path, err = filepath.EvalSymlinks(path)
	}
	if err != nil {
		return false
	}
	f, err := os.Open(mountinfo)
	if err != nil {
		return false
	}
	defer f.Close()
	return typeOf(f, path) == fsType
}

// typeOf returns the type of the file system that the absolute path is on. If several mounts are at
// the same place, the last one hides the others.
func typeOf(mounts io.Reader, path string) (kind string) {
	longest := -1
	for lines := bufio.NewScanner(mounts); lines.Scan(); {
		// The fields after " - " are the type, the source and the options.
		place, rest, ok := strings.Cut(lines.Text(), " - ")
		fields := strings.Fields(place)
		if !ok || len(fields) < 6 {
			continue
		}
		at := unescape.Replace(fields[4])
		if len(at) >= longest && within(path, at) {
			longest = len(at)
			kind, _, _ = strings.Cut(rest, " ")
		}
	}
	return kind
}

// unescape decodes the characters that the kernel writes in octal.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

// within reports whether path is dir or below it.
func within(path, dir string) bool {
	rest, ok := strings.CutPrefix(path, strings.TrimSuffix(dir, "/"))
	return ok && (rest == "" || rest[0] == '/')
}
