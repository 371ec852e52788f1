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
	go func() {
		<-signals
		cancel() // a command ends well from here: a node drains, a demo cleans up
		<-signals
		fmt.Fprintln(os.Stderr, "penstock: second signal: ending at once")
		os.Exit(exitFailed)
	}()
	w := world{in: os.Stdin, out: os.Stdout, err: os.Stderr, environ: os.Environ(), startWithin: 5 * time.Second}
	os.Exit(run(ctx, w, os.Args[1:]))
}
