package screen

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/dustin/go-humanize"

	"github.com/penstock-kv/penstock/internal/top"
)

// unknown is the text of an unknown value.
const unknown = "-"

// bytesText returns a number of bytes, like 1.5 GiB.
func bytesText(v top.Value) string {
	if !v.Known {
		return unknown
	}
	if v.Of < 0 {
		return "-" + humanize.IBytes(uint64(-v.Of))
	}
	return humanize.IBytes(uint64(v.Of))
}

// numberText returns a number with two to four digits: 0, 0.2, 12, 340, 12.5k, 3.4M.
func numberText(v top.Value) string {
	if !v.Known {
		return unknown
	}
	of, unit := v.Of, ""
	for _, larger := range []string{"k", "M", "G", "T"} {
		if of < 9999.5 && (unit == "" || of < 999.5) {
			break
		}
		of, unit = of/1000, larger
	}
	switch {
	case of == 0:
		return "0"
	case of < 0.05:
		return "<0.1"
	case of < 9.95 && of != float64(int64(of)), unit != "" && of < 99.95 && of != float64(int64(of)):
		return strconv.FormatFloat(of, 'f', 1, 64) + unit
	}
	return strconv.FormatFloat(of, 'f', 0, 64) + unit
}

// shareText returns a share in percent.
func shareText(v top.Value) string {
	if !v.Known {
		return unknown
	}
	return fmt.Sprintf("%.1f %%", 100*v.Of)
}

// bitsText returns a rate of a link: 400 Gb/s.
func bitsText(v top.Value) string {
	if !v.Known {
		return unknown
	}
	return strings.TrimSpace(humanize.SIWithDigits(v.Of, 1, "b/s"))
}

// ageText returns a time span in its two largest units: 3d 4h.
func ageText(d time.Duration) string {
	seconds := int64(max(0, d) / time.Second)
	units := []struct {
		name    string
		seconds int64
	}{{"d", 86400}, {"h", 3600}, {"m", 60}, {"s", 1}}
	for i, u := range units {
		n := seconds / u.seconds
		if n == 0 && u.seconds > 1 {
			continue
		}
		text := fmt.Sprintf("%d%s", n, u.name)
		if i+1 < len(units) {
			if rest := seconds % u.seconds / units[i+1].seconds; rest > 0 {
				text += fmt.Sprintf(" %d%s", rest, units[i+1].name)
			}
		}
		return text
	}
	return ""
}

func secondsText(v top.Value) string {
	if !v.Known {
		return unknown
	}
	return ageText(time.Duration(v.Of * float64(time.Second)))
}
