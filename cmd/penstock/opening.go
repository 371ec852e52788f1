package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"
)

// errStillOpening: opening was interrupted while open ran. Until the process ends, files may be
// open and a device may be using the arena.
var errStillOpening = errors.New("still being opened")

// opening returns the result of open. System calls on a drive that hangs do not return, so opening
// logs the directories after each interval. When ctx ends first, it returns errStillOpening with
// the cause, and open continues in its goroutine.
func opening[T any](ctx context.Context, log *slog.Logger, every time.Duration, what string, dirs []string, open func() (T, error)) (T, error) {
	type opened struct {
		value T
		err   error
	}
	done := make(chan opened, 1)
	go func() {
		value, err := open()
		done <- opened{value, err}
	}()
	began := time.Now()
	late := time.NewTicker(every)
	defer late.Stop()
	for {
		select {
		case o := <-done:
			return o.value, o.err
		case <-late.C:
			log.Warn("the node waits until "+what+" is open; if the drive hangs, repair it or stop the node", "directories", commaList(dirs), "since", time.Since(began).Round(time.Second))
		case <-ctx.Done():
			var none T
			return none, fmt.Errorf("%s in %s is %w: %w", what, commaList(dirs), errStillOpening, context.Cause(ctx))
		}
	}
}
