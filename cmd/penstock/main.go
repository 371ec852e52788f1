package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
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
	os.Exit(run(ctx, world{in: os.Stdin, out: os.Stdout, err: os.Stderr, environ: os.Environ()}, os.Args[1:]))
}
