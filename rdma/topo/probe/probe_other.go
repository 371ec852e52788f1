//go:build !linux

package probe

func kernel() string { return "" }

func memlock() (uint64, error) { return 0, ErrUnsupported }

func openable(string) error { return nil }

// Counters returns ErrUnsupported.
func Counters(string) (map[string]uint64, error) { return nil, ErrUnsupported }
