package main

import (
	"bytes"
	"testing"
	"time"
)

// TestProgressLines: where standard error is no terminal, the first line comes after the interval, and
// without an interval there is none.
func TestProgressLines(t *testing.T) {
	for every, want := range map[time.Duration]string{time.Minute: "get: 1.0 KiB of 1.0 MiB\n", 2 * time.Hour: "", 0: ""} {
		var lines bytes.Buffer
		p := newProgress(world{err: &lines, progressEvery: every}, "get", unitBytes)
		p.start, p.nextLine = p.start.Add(-time.Hour), p.nextLine.Add(-time.Hour)
		for range 2 {
			p.set(1<<10, 1<<20)
		}
		p.finish()
		if lines.String() != want {
			t.Errorf("lines every %v: %q; want %q", every, lines.String(), want)
		}
	}
}
