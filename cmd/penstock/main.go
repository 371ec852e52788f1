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
	ctx, cancel := context.WithCancel(context.Background())
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	first := make(chan os.Signal, 1)
	go func() {
		s := <-signals
		first <- s
		cancel() // a command ends well from here: a node drains, a demo cleans up
		s = <-signals
		fmt.Fprintln(os.Stderr, "penstock: second signal: ending at once")
		os.Exit(exitOfSignal(s))
	}()
	w := world{in: os.Stdin, out: os.Stdout, err: os.Stderr, environ: os.Environ(), startWithin: 5 * time.Second}
	code := run(ctx, w, os.Args[1:])
	select {
	case s := <-first:
		if code != exitOK { // a node that has drained did what it was told
			code = exitOfSignal(s)
		}
	default:
	}
	os.Exit(code)
}

// exitOfSignal is the exit code of a process that a signal ended, as shells have
// it: 128 and the signal's number.
func exitOfSignal(s os.Signal) int {
	if n, ok := s.(syscall.Signal); ok {
		return 128 + int(n)
	}
	return exitFailed
}
