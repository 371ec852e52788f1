package console

import (
	"fmt"
	"html/template"
	"math"
	"strconv"
	"time"

	"github.com/dustin/go-humanize"

	"github.com/penstock-kv/penstock/internal/top"
)

// functions are the functions of the templates.
var functions = template.FuncMap{
	"bytes":   bytesText,
	"count":   humanize.Comma,
	"plural":  plural,
	"counter": func(n uint64) string { return humanize.Comma(int64(n)) },
	"size": func(v top.Value) template.HTML {
		return valueText(v, func(f float64) string { return bytesText(int64(f)) })
	},
	"rate": func(v top.Value) template.HTML {
		return valueText(v, func(f float64) string { return bytesText(int64(f)) + "/s" })
	},
	"each": func(v top.Value) template.HTML {
		return valueText(v, func(f float64) string { return humanize.CommafWithDigits(f, 1) + "/s" })
	},
	"percent": func(v top.Value) template.HTML {
		return valueText(v, func(f float64) string { return strconv.FormatFloat(100*f, 'f', 1, 64) + " %" })
	},
	"number": func(v top.Value) template.HTML {
		return valueText(v, func(f float64) string { return humanize.CommafWithDigits(f, 1) })
	},
	"whole": func(v top.Value) template.HTML {
		return valueText(v, func(f float64) string { return humanize.Comma(int64(f)) })
	},
	"seconds": func(v top.Value) template.HTML {
		return valueText(v, func(f float64) string { return spanText(time.Duration(min(f*float64(time.Second), math.MaxInt64/2))) })
	},
	"span": spanText,
	"utc":  func(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05") + " UTC" },
	"iso":  func(t time.Time) string { return t.UTC().Format(time.RFC3339) },
	"age":  age,
	"fill": func(v top.Value) float64 { return min(max(v.Of, 0), 1) },
}

// valueText returns the text of a value. An unknown value is a dash, which screen readers announce as
// "unknown". The text that format returns must need no escaping.
func valueText(v top.Value, format func(float64) string) template.HTML {
	if !v.Known {
		return `<span aria-hidden="true">–</span><span class="hidden">unknown</span>`
	}
	return template.HTML(template.HTMLEscapeString(format(v.Of)))
}

// bytesText returns a size as 1.5 GiB.
func bytesText(n int64) string {
	if n < 0 {
		return "-" + humanize.IBytes(uint64(-n))
	}
	return humanize.IBytes(uint64(n))
}

// spanText returns a duration with three digits or fewer: 12.3ms, 4.56s, 2m3s.
func spanText(d time.Duration) string {
	unit := time.Duration(1)
	for d/unit >= 1000 && unit < time.Second {
		unit *= 10
	}
	return d.Round(unit).String()
}

// age returns the time from t to now in its largest unit.
func age(now, t time.Time) string {
	d := now.Sub(t)
	switch {
	case d < 2*time.Second:
		return "just now"
	case d < 2*time.Minute:
		return fmt.Sprintf("%d s ago", int(d.Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%d min ago", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h ago", int(d.Hours()))
	}
	return fmt.Sprintf("%d days ago", int(d.Hours()/24))
}

// plural returns a number with its noun.
func plural(n int64, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return humanize.Comma(n) + " " + noun + "s"
}
