package config

import (
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
)

// Size is a number of bytes, written like 512MiB, 2TiB, 1GB or 4096.
type Size int64

// ParseSize reads a Size. Suffixes with an i are powers of 1024, suffixes without it powers of
// 1000.
func ParseSize(s string) (Size, error) {
	n, err := humanize.ParseBytes(strings.TrimSpace(s))
	if err != nil || n > math.MaxInt64 {
		return 0, fmt.Errorf("%q is not a size; write it like 512MiB, 2TiB or 4096", s)
	}
	return Size(n), nil
}

// String prints the size rounded, in a suitable power of 1024, such as "1.5 GiB".
func (s Size) String() string {
	if s < 0 {
		return fmt.Sprintf("-%v", -s)
	}
	return humanize.IBytes(uint64(s))
}

// UnmarshalText parses text as ParseSize does.
func (s *Size) UnmarshalText(text []byte) (err error) {
	*s, err = ParseSize(string(text))
	return err
}

// Duration is a time.Duration that YAML writes like 30s or 10m.
type Duration time.Duration

// Std returns the value as a time.Duration.
func (d Duration) Std() time.Duration { return time.Duration(d) }

// String prints the duration like time.Duration.
func (d Duration) String() string { return time.Duration(d).String() }

// UnmarshalText parses text as time.ParseDuration does.
func (d *Duration) UnmarshalText(text []byte) error {
	v, err := time.ParseDuration(string(text))
	if err != nil {
		return fmt.Errorf("%q is not a duration; write it like 500ms, 30s or 10m", text)
	}
	*d = Duration(v)
	return nil
}
