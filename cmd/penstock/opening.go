package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"
)

// errStillOpening means that opening returned while open was running, because ctx ended. Until the
// process ends, open may hold files open, and a device may write to the arena.
var errStillOpening = errors.New("still being opened")

// opening calls open in a goroutine and returns its result. System calls on a drive that hangs do
// not return, so opening logs the directories periodically (interval every) until open returns. If
// ctx ends first, opening returns errStillOpening with the cause, and open continues in its
// goroutine.
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
