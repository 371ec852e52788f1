package sys

import (
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// pagemapScan is PAGEMAP_SCAN of linux/fs.h: _IOWR('f', 16, struct pm_scan_arg).
	pagemapScan = 3<<30 | unsafe.Sizeof(scanArg{})<<16 | 'f'<<8 | 16
	pageIsHuge  = 1 << 6
)

// scanArg is struct pm_scan_arg of linux/fs.h.
type scanArg struct {
	size, flags, start, end, walkEnd uint64
	vec, vecLen, maxPages            uint64
	inverted, mask, anyOf, returned  uint64
}

// pageRegion is struct page_region of linux/fs.h.
type pageRegion struct{ start, end, categories uint64 }

// scanHuge returns the bytes on huge pages in [start, end). Unlike reading smaps, its cost does not
// depend on the other memory of the process. It needs Linux 6.7; an older kernel returns ENOTTY.
func scanHuge(start, end uint64) (sum int64, err error) {
	pagemap, err := os.Open("/proc/self/pagemap")
	if err != nil {
		return 0, err
	}
	defer pagemap.Close()
	found := make([]pageRegion, 64)
	for start < end {
		arg := scanArg{
			size: uint64(unsafe.Sizeof(scanArg{})), start: start, end: end,
			vecLen: uint64(len(found)), mask: pageIsHuge, returned: pageIsHuge,
		}
		// Safety: the kernel writes at most vecLen elements, and found lives until KeepAlive.
		arg.vec = uint64(uintptr(unsafe.Pointer(unsafe.SliceData(found))))
		// Safety: the kernel reads and writes arg, of arg.size bytes, during the call.
		n, _, errno := unix.Syscall(unix.SYS_IOCTL, pagemap.Fd(), pagemapScan, uintptr(unsafe.Pointer(&arg)))
		runtime.KeepAlive(found)
		switch {
		case errno == unix.EINTR:
			continue
		case errno != 0:
			return 0, errno
		}
		for _, r := range found[:n] {
			sum += int64(r.end - r.start)
		}
		start = arg.walkEnd
	}
	return sum, nil
}
