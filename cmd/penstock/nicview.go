package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/penstock-kv/penstock/lab/cluster"
)

// nicView shows the rates of every NIC while a cluster runs. On a terminal it redraws one line for
// each NIC. Elsewhere it prints one line every few seconds.
type nicView struct {
	w        world
	what     string
	turns    int
	snic     float64 // rate of a storage NIC, in bytes per second
	cnic     float64 // rate of a compute NIC
	tty      bool
	last     cluster.Sample
	lines    int
	nextDraw time.Duration
}

// nicViewEvery is the drawing interval on a terminal.
const nicViewEvery = 500 * time.Millisecond

func newNICView(w world, spec cluster.Spec, mode string, turns int) *nicView {
	return &nicView{w: w, what: spec.Shape() + " " + mode, turns: turns, snic: float64(spec.SNICBits) / 8, cnic: float64(spec.CNICBits) / 8, tty: isTerminal(w.err)}
}

// show draws a sample.
func (v *nicView) show(nics []cluster.NIC, s cluster.Sample) {
	if s.At < v.nextDraw {
		return
	}
	seconds := (s.At - v.last.At).Seconds()
	rate := func(now, before []uint64, i int) float64 {
		n := float64(now[i])
		if len(before) > 0 {
			n -= float64(before[i])
		}
		return n / seconds
	}
	if !v.tty {
		v.nextDraw = s.At + progressLineEvery
		var busy []string
		for i, n := range nics {
			if n.Storage {
				busy = append(busy, fmt.Sprintf("%s %.0f%%", n.Node, 100*rate(s.Received, v.last.Received, i)/v.snic))
			}
		}
		fmt.Fprintf(v.w.err, "%s: %.0f s, %d of %d turns; storage NICs: %s\n", v.what, s.At.Seconds(), s.Turns, v.turns, strings.Join(busy, ", "))
		v.last = s
		return
	}
	v.nextDraw = s.At + nicViewEvery
	var b strings.Builder
	v.clear(&b)
	fmt.Fprintf(&b, "%s: %.0f s, %d of %d turns\n", v.what, s.At.Seconds(), s.Turns, v.turns)
	for i, n := range nics {
		full := v.snic
		if !n.Storage {
			full = v.cnic
		}
		in, out := rate(s.Received, v.last.Received, i), rate(s.Sent, v.last.Sent, i)
		fmt.Fprintf(&b, "  %-9s in %6.1f MB/s %-20s  out %6.1f MB/s %-20s\n", n, in/1e6, bar(in/full, 20), out/1e6, bar(out/full, 20))
	}
	v.lines = 1 + len(nics)
	v.last = s
	fmt.Fprint(v.w.err, b.String())
}

// clear moves the cursor back over the drawn lines.
func (v *nicView) clear(b *strings.Builder) {
	if v.lines > 0 {
		fmt.Fprintf(b, "\x1b[%dA\x1b[J", v.lines)
	}
}

// finish removes the view.
func (v *nicView) finish() {
	if v.lines > 0 {
		var b strings.Builder
		v.clear(&b)
		fmt.Fprint(v.w.err, b.String())
		v.lines = 0
	}
}
