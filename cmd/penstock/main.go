package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	ctx, cancel := context.WithCancelCause(context.Background())
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		cancel(signalError{<-signals}) // the command shuts down cleanly, for example a node drains
		second := signalError{<-signals}
		fmt.Fprintln(os.Stderr, "penstock: second signal: ending at once")
		os.Exit(second.exitCode())
	}()
	w := world{in: os.Stdin, out: os.Stdout, err: os.Stderr, environ: os.Environ(), startWithin: 5 * time.Second, progressEvery: progressLineEvery, hangups: hangups}
	os.Exit(run(ctx, w, os.Args[1:]))
}

// hangups delivers SIGHUP, of which one may be pending. Before hangups is called, SIGHUP ends the
// process, so that a client's command ends when its terminal is closed.
func hangups() (<-chan os.Signal, func()) {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGHUP)
	return signals, func() { signal.Stop(signals) }
}

// signalError is the cause of a context that a signal ended.
type signalError struct{ os.Signal }

func (e signalError) Error() string { return "interrupted" }

// exitCode returns 128 plus the signal's number, as shells report for a process that a
// signal ended.
func (e signalError) exitCode() int {
	if n, ok := e.Signal.(syscall.Signal); ok {
		return 128 + int(n)
	}
	return exitFailed
}
