package access

import (
	"fmt"
	"math"
	"strings"

	"github.com/dustin/go-humanize"
)

// Rates are the bytes per second that a principal may read from and write to a node; 0 is no limit.
type Rates struct{ Read, Write int64 }

// rate is the number of bytes per second in the YAML document, written like 512MiB.
type rate int64

// UnmarshalText parses a number of bytes with or without a unit.
func (r *rate) UnmarshalText(text []byte) error {
	n, err := humanize.ParseBytes(strings.TrimSpace(string(text)))
	if err != nil || n == 0 || n > math.MaxInt64 {
		return fmt.Errorf("%q is not a number of bytes per second; write it like 512MiB or 2GB, or leave the key out if there is no limit", text)
	}
	*r = rate(n)
	return nil
}

// Rates returns the limits of the principal.
func (p *Principal) Rates() Rates { return p.rates }
