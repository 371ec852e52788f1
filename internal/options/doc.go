// Package options is the code that Options structs have in common. It sets the default of a field
// that is zero, and returns an error that names a number outside of its limits. It holds no
// options, and reads no flags, files or variables: server/config does that.
//
//	Options{…} ─► EnsureDefaults ─ SetDefault ─► Validate ─ CheckRanges ─► New
//
// The package imports the standard library only, and every package of this repository may import
// it.
package options

import "fmt"

// SetDefault sets *p to v if it is zero.
func SetDefault[T comparable](p *T, v T) {
	var zero T
	if *p == zero {
		*p = v
	}
}

// Range is an option that is a number, and its limits.
type Range struct {
	Name            string
	Value, Min, Max int64
}

// CheckRanges returns an error that names the first option of the package pkg that is
// outside of its limits.
func CheckRanges(pkg string, ranges []Range) error {
	for _, r := range ranges {
		if r.Value < r.Min || r.Value > r.Max {
			return fmt.Errorf("%s: option %s is %d; it must be %d to %d", pkg, r.Name, r.Value, r.Min, r.Max)
		}
	}
	return nil
}
