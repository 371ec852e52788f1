package main

import (
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/sys/unix"
)

// unit is the unit of a progress bar.
type unit uint8

const (
	unitBytes unit = iota
	unitBlocks
	unitRequests
	unitRuns
)

const (
	// progressAfter is the time from the start of a command until progress is first shown.
	progressAfter = time.Second
	// progressLineEvery is the interval between lines if standard error is not a terminal.
	progressLineEvery = 5 * time.Second
)

// progress shows the progress of a command: a bar on a terminal, elsewhere a line every few
// seconds, and nothing for the first second. It is written to standard error, so that results can
// be piped. Its methods may be called concurrently.
type progress struct {
	w     world
	what  string
	unit  unit
	tty   bool
	start time.Time

	mu       sync.Mutex
	bar      *progressbar.ProgressBar
	nextLine time.Time
	shown    bool
}

func newProgress(w world, what string, u unit) *progress {
	now := time.Now()
	return &progress{w: w, what: what, unit: u, tty: isTerminal(w.err), start: now, nextLine: now.Add(w.progressEvery)}
}

func isTerminal(v any) bool {
	f, ok := v.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// set sets the completed and the total amount. A total of 0 means that the total is unknown.
func (p *progress) set(done, total int64) { p.note(done, total, "") }

// note sets the completed and the total amount, and a text that is shown next to the bar.
func (p *progress) note(done, total int64, note string) {
	now := time.Now()
	if now.Sub(p.start) < progressAfter {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.tty {
		p.draw(done, total, note)
		return
	}
	if p.w.progressEvery == 0 || now.Before(p.nextLine) {
		return
	}
	p.nextLine = now.Add(p.w.progressEvery)
	if note != "" {
		note = ", " + note
	}
	fmt.Fprintf(p.w.err, "%s: %s%s\n", p.what, p.amounts(done, total), note)
}

func (p *progress) draw(done, total int64, note string) {
	if total <= 0 {
		total = -1 // a spinner
	}
	if p.bar == nil {
		opts := []progressbar.Option{
			progressbar.OptionSetWriter(p.w.err),
			progressbar.OptionSetDescription(p.what),
			progressbar.OptionThrottle(100 * time.Millisecond),
			progressbar.OptionClearOnFinish(),
			progressbar.OptionShowCount(),
			progressbar.OptionSetWidth(30),
			progressbar.OptionSetPredictTime(true),
		}
		if p.unit == unitBytes {
			opts = append(opts, progressbar.OptionShowBytes(true))
		}
		p.bar = progressbar.NewOptions64(total, opts...)
	}
	if total > 0 && p.bar.GetMax64() != total {
		p.bar.ChangeMax64(total)
	}
	if note != "" {
		p.bar.Describe(p.what + " (" + note + ")")
	}
	_ = p.bar.Set64(min(done, max(total, done))) // an error of the bar does not stop the command
	p.shown = true
}

// amounts returns the completed and the total amount as text.
func (p *progress) amounts(done, total int64) string {
	word := count[int64]
	noun := ""
	switch p.unit {
	case unitBytes:
		word = size
	case unitBlocks:
		noun = " blocks"
	case unitRequests:
		noun = " requests"
	case unitRuns:
		noun = " runs"
	}
	if total <= 0 {
		return word(done) + noun
	}
	return word(done) + " of " + word(total) + noun
}

// finish removes the bar.
func (p *progress) finish() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.shown {
		_ = p.bar.Clear()
	}
}
