package blockio

import "fmt"

// NameMax is the longest file name, in bytes.
const NameMax = 64

// CheckName returns ErrRequest unless name has 1 to NameMax characters of [a-z0-9._-] and does not
// start with a dot. Names in upper case are reserved for files of the backends (LOCK), so List
// never returns them.
func CheckName(name string) error {
	if name == "" || len(name) > NameMax {
		return fmt.Errorf("blockio: file name %q has %d bytes, not 1 to %d: %w", name, len(name), NameMax, ErrRequest)
	}
	if name[0] == '.' {
		return fmt.Errorf("blockio: file name %q starts with a dot: %w", name, ErrRequest)
	}
	for i := range len(name) {
		if !nameByte(name[i]) {
			return fmt.Errorf("blockio: file name %q has %q at %d, outside [a-z0-9._-]: %w", name, name[i], i, ErrRequest)
		}
	}
	return nil
}

func nameByte(c byte) bool {
	return 'a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '.' || c == '_' || c == '-'
}

// CheckSize returns ErrAlign unless sizeBytes is a positive multiple of Align, as the size of a new
// file must be.
func CheckSize(name string, sizeBytes int64) error {
	if sizeBytes <= 0 || sizeBytes%Align != 0 {
		return fmt.Errorf("blockio: create %s with %d bytes, not a positive multiple of %d: %w", name, sizeBytes, Align, ErrAlign)
	}
	return nil
}

// CheckBatch returns an error for the first request that may not be submitted. The error contains
// the index of the request.
func CheckBatch(batch []Request) error {
	if len(batch) > MaxBatch {
		return fmt.Errorf("blockio: batch of %d requests (at most %d): %w", len(batch), MaxBatch, ErrRequest)
	}
	for i := range batch {
		if err := batch[i].Check(); err != nil {
			return fmt.Errorf("request %d of %d: %w", i, len(batch), err)
		}
	}
	return nil
}
