package sys

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// SinceBoot returns the time since the host's boot, by CLOCK_BOOTTIME. The time for which the host was suspended counts, unlike
// in the monotonic clock of package time, and changes of the wall clock do not. It is a system call.
func SinceBoot() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		panic(fmt.Sprintf("sys: clock_gettime CLOCK_BOOTTIME: %v", err)) // Linux has it since 2.6.39
	}
	return time.Duration(t.Nano())
}
