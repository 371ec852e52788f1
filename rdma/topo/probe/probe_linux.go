package probe

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"

	"golang.org/x/sys/unix"
)

// kernel returns the release of the kernel, or "".
func kernel() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}

// memlock returns the number of bytes that this process may lock in memory; math.MaxUint64: no
// limit. A process with CAP_IPC_LOCK has no limit (mlock(2)).
func memlock() (uint64, error) {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err == nil && data[0].Effective&(1<<unix.CAP_IPC_LOCK) != 0 {
		return math.MaxUint64, nil
	}
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &r); err != nil {
		return 0, err
	}
	return r.Cur, nil
}

// openable returns nil if the device can be opened for reading and writing, otherwise the reason
// why not.
func openable(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s is not there", path)
	}
	if err != nil {
		return err
	}
	return f.Close()
}
