package main

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/penstock-kv/penstock/trie"
)

// lineWriter sends each line that a logger writes.
type lineWriter chan string

func (w lineWriter) Write(line []byte) (int, error) {
	w <- string(line)
	return len(line), nil
}

// TestHungIndexDrive opens an index on a drive that completes no request. The log names the
// directory, a signal ends the wait, and the index is opened when the drive works again.
func TestHungIndexDrive(t *testing.T) {
	for _, interrupted := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(t.Context())
			works := make(chan struct{})
			drive := errorfs.Wrap(vfs.NewMem(), errorfs.InjectorFunc(func(errorfs.Op) error { <-works; return nil }))
			waits := make(lineWriter, 100)
			type opened struct {
				index *trie.Trie
				err   error
			}
			done := make(chan opened, 1)
			inner := make(chan *trie.Trie, 1)
			go func() {
				index, err := opening(ctx, slog.New(slog.NewTextHandler(waits, nil)), 10*time.Second, "the index", []string{"/drive/index"}, func() (*trie.Trie, error) {
					index, err := trie.Open(trie.Options{Dir: "index", FS: drive})
					inner <- index
					return index, err
				})
				done <- opened{index, err}
			}()
			for begin, i := time.Now(), 1; i <= 2; i++ {
				if line := <-waits; !strings.Contains(line, "directories=/drive/index") || time.Since(begin) != time.Duration(i)*10*time.Second {
					t.Errorf("after %v: %s", time.Since(begin), line)
				}
			}
			if interrupted {
				cancel(signalError{syscall.SIGTERM})
				o := <-done
				if !errors.Is(o.err, errStillOpening) || !errors.As(o.err, new(signalError)) || !strings.Contains(o.err.Error(), "/drive/index") {
					t.Errorf("after SIGTERM: %v", o.err)
				}
			}
			close(works)
			index := <-inner
			if index == nil {
				t.Fatal("the index does not open on a drive that works")
			}
			if !interrupted {
				if o := <-done; o.err != nil || o.index != index {
					t.Errorf("when the drive works: %v", o.err)
				}
			}
			if err := index.Close(); err != nil {
				t.Error(err)
			}
			cancel(nil)
		})
	}
}
