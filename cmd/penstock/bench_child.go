package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/lab/bench/peer"
	"github.com/penstock-kv/penstock/lab/bench/suite"
	"github.com/penstock-kv/penstock/rdma/tcp"
	"github.com/penstock-kv/penstock/server/config"
)

// newBenchChild returns the commands that suites run in child processes. A child prints one line
// when it is ready, and ends at the end of its standard input.
func newBenchChild(w world) *cobra.Command {
	cmd := &cobra.Command{Use: "child", Short: "The other side of a benchmark", Hidden: true}
	return noun(cmd, newBenchFill(w), newBenchStream(w), newBenchSink(w), newBenchRDMASink(w), newBenchSockets(w))
}

// ready prints the line for the parent, and waits until standard input ends.
func (w world) ready(ctx context.Context, line string) error {
	if _, err := fmt.Fprintln(w.out, line); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() {
		_, err := io.Copy(io.Discard, w.in)
		ended <- err
	}()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		return nil
	}
}

// newBenchFill returns the command that stores many small blocks in a node and keeps the node open
// until the parent kills the process.
func newBenchFill(w world) *cobra.Command {
	var capacity int64
	var blocks int
	cmd := &cobra.Command{Use: "fill", Short: "Fill a node with small blocks", Args: args(cobra.NoArgs)}
	cmd.Flags().Var(sizeFlag{&capacity}, "capacity", "of the node")
	cmd.Flags().IntVar(&blocks, "blocks", 0, "to store")
	cmd.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		cfg := config.Default()
		cfg.Data = []string{cmd.Flag("data").Value.String()}
		cfg.Capacity = config.Size(capacity)
		cfg.Listen, cfg.DataListen, cfg.HTTP = "127.0.0.1:0", "127.0.0.1:0", ""
		if err := cfg.Validate(); err != nil {
			return err
		}
		n, err := startNode(cmd.Context(), source[config.Config]{cfg: cfg, read: func() (config.Config, error) { return cfg, nil }}, new(slog.LevelVar), slog.New(slog.DiscardHandler))
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, n.closeParts(context.WithoutCancel(cmd.Context()))) }()
		if err := suite.FillNode(cmd.Context(), n.storage, blocks); err != nil {
			return err
		}
		return w.ready(cmd.Context(), "filled")
	}
	return cmd
}

// newBenchStream returns the command that serves blocks over a gRPC stream.
func newBenchStream(w world) *cobra.Command {
	var blockBytes, bytes int
	cmd := &cobra.Command{Use: "stream", Short: "Serve bytes through a gRPC stream", Args: args(cobra.NoArgs)}
	cmd.Flags().IntVar(&blockBytes, "block-bytes", 1<<20, "of an answer")
	cmd.Flags().IntVar(&bytes, "bytes", 64<<20, "of all blocks")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return w.serveMemory(cmd.Context(), bytes, func(ctx context.Context, memory []byte, ready func(string)) error {
			return peer.ServeStream(ctx, memory, blockBytes, ready)
		})
	}
	return cmd
}

// newBenchSockets returns the command that receives bytes from plain sockets into memory.
func newBenchSockets(w world) *cobra.Command {
	cmd := &cobra.Command{Use: "sockets", Short: "Let bare sockets fill memory", Args: args(cobra.NoArgs)}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return w.serveMemory(cmd.Context(), suite.SinkBytes, peer.ServeSockets)
	}
	return cmd
}

// serveMemory calls serve with memory of the given number of bytes. It returns when the parent ends
// this process or serve fails.
func (w world) serveMemory(ctx context.Context, bytes int, serve func(ctx context.Context, memory []byte, ready func(addr string)) error) (err error) {
	memory, err := arena.New(arena.Options{SizeBytes: int64(bytes)})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, memory.Close()) }()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan error, 1)
	done <- nil // the result if ready is never called
	err = serve(ctx, memory.Bytes()[:bytes], func(addr string) {
		<-done
		go func() {
			defer cancel()
			done <- w.ready(ctx, addr)
		}()
	})
	cancel()
	return errors.Join(err, <-done)
}

// newBenchSink returns the command that registers memory for writes from the parent's transfer
// engine.
func newBenchSink(w world) *cobra.Command {
	cmd := &cobra.Command{Use: "sink", Short: "Offer memory to be written to", Args: args(cobra.NoArgs)}
	cmd.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		memory, err := arena.New(arena.Options{SizeBytes: suite.SinkBytes})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, memory.Close()) }()
		e, err := tcp.New(cmd.Context(), tcp.Options{Listen: "127.0.0.1:0", Token: suite.SinkToken(), ZeroCopy: true})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, e.Close()) }()
		line, _, err := suite.Sink(cmd.Context(), e, memory)
		if err != nil {
			return err
		}
		return w.ready(cmd.Context(), line)
	}
	return cmd
}
