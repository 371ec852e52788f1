package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/blockstore/crypt"
	"github.com/penstock-kv/penstock/server/config"
)

// keysBytesMax is the maximum size of a text of keys. crypt.MaxKeys keys need less.
const keysBytesMax = 64 << 10

// volumeKeys are the keys of the volumes that a process serves: the volumes of its own node and of the nodes
// that it adopted.
type volumeKeys struct {
	current atomic.Pointer[keysInUse]
	// mu is held while current and the keys of the stores change, and while an adopted node is added to the
	// nodes of the process, so that each store has the current keys.
	mu sync.Mutex
}

// keysInUse are keys and the settings that name their source. ring is nil without encryption.
type keysInUse struct {
	ring *crypt.Keyring
	from config.Encryption
}

// setKeysWithin limits the time in which a store takes new keys. It is longer than the time after which a volume that
// hangs has failed.
func setKeysWithin(ctx context.Context, cfg config.Config) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, 3*cfg.Limits.HungAfter.Std())
}

// openVolumeKeys reads the keys of a process that starts.
func openVolumeKeys(ctx context.Context, c config.Encryption, log *slog.Logger) (*volumeKeys, error) {
	ring, err := readVolumeKeys(ctx, c, log)
	if err != nil {
		return nil, err
	}
	k := &volumeKeys{}
	k.current.Store(&keysInUse{ring, c})
	return k, nil
}

// setKeys replaces the keys of this node and of the nodes that it adopted. If one of them has blocks of a
// key that is missing, setKeys fails and changes nothing. An adopted node that fails after all checks
// is given up, so that it can be adopted again with the new keys.
func (n *node) setKeys(ctx context.Context, next keysInUse) error {
	n.keys.mu.Lock()
	defer n.keys.mu.Unlock()
	if was := n.keys.current.Load().ring; was != nil && next.ring != nil && !next.ring.Equal(was) {
		guests := n.adopter.serving()
		for _, g := range guests {
			if err := g.node.storage.CheckKeys(next.ring); err != nil && !errors.Is(err, blockstore.ErrClosed) {
				return fmt.Errorf("volumes adopted from node %s: %w", g.node.cfg.Node, err)
			}
		}
		if err := n.storage.SetKeys(ctx, next.ring); err != nil {
			return err
		}
		var all sync.WaitGroup
		for _, g := range guests {
			all.Go(func() {
				if err := g.node.storage.SetKeys(ctx, next.ring); err != nil && !errors.Is(err, blockstore.ErrClosed) {
					n.log.Error("an adopted node did not take the new encryption keys, and its volumes are given up: adopt them again", "of", g.node.cfg.Node, "err", err)
					g.giveUp()
				}
			})
		}
		all.Wait()
	}
	n.keys.current.Store(&next)
	return nil
}

// addGuest calls add when the store of an adopted node has the current keys, which a reload may have
// changed since the store was opened.
func (k *volumeKeys) addGuest(ctx context.Context, guest *node, add func()) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if ring := k.current.Load().ring; ring != nil && !ring.Equal(guest.openKeys) {
		ctx, cancel := setKeysWithin(ctx, guest.cfg)
		defer cancel()
		if err := guest.storage.SetKeys(ctx, ring); err != nil {
			return fmt.Errorf("encryption keys that a reload has changed: %w", err)
		}
	}
	add()
	return nil
}

// readVolumeKeys returns the keys that the settings name, nil if they name none. The text of the keys is
// neither logged nor part of an error.
func readVolumeKeys(ctx context.Context, c config.Encryption, log *slog.Logger) (*crypt.Keyring, error) {
	var text []byte
	var err error
	key := "encryption.keys_file"
	switch {
	case c.KeysFile != "":
		text, err = readKeysFile(c.KeysFile, log)
	case len(c.KeysCommand) > 0:
		key = "encryption.keys_command"
		text, err = runKeysCommand(ctx, c.KeysCommand, c.KeysTimeout.Std())
	default:
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("config: %s: %w", key, err)
	}
	defer clear(text)
	ring, err := crypt.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("config: %s: %w", key, err)
	}
	return ring, nil
}

func readKeysFile(path string, log *slog.Logger) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.Mode().IsRegular() && info.Mode().Perm()&0o007 != 0 {
		log.Warn("every user of this machine can access the file of encryption keys: chmod o-rwx", "file", path, "mode", info.Mode().Perm().String())
	}
	text, err := io.ReadAll(io.LimitReader(f, keysBytesMax+1))
	if err == nil && len(text) > keysBytesMax {
		err = fmt.Errorf("%s has more than %d bytes", path, keysBytesMax)
	}
	return text, err
}

// runKeysCommand returns what the command prints. The error has the end of the command's standard
// error, and nothing of its standard output.
func runKeysCommand(ctx context.Context, args []string, timeout time.Duration) ([]byte, error) {
	late := fmt.Errorf("not finished within encryption.keys_timeout %v", timeout)
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, late)
	defer cancel()
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	// A child of the command may keep the pipes open after the command was killed.
	cmd.WaitDelay = time.Second
	out, problem := &limitedBuffer{max: keysBytesMax}, &limitedBuffer{max: keysBytesMax}
	cmd.Stdout, cmd.Stderr = out, problem
	err := cmd.Run()
	switch {
	case errors.Is(context.Cause(ctx), late):
		err = late
	case ctx.Err() != nil:
		err = fmt.Errorf("ended because the caller no longer waits: %w", context.Cause(ctx))
	case err == nil && out.over:
		err = fmt.Errorf("printed more than %d bytes", keysBytesMax)
	}
	if err == nil {
		return out.kept.Bytes(), nil
	}
	clear(out.kept.Bytes())
	const tail = 1 << 10
	text := strings.TrimSpace(string(problem.kept.Bytes()[max(0, problem.kept.Len()-tail):]))
	if text != "" {
		err = fmt.Errorf("%w; standard error: %s", err, text)
	}
	return nil, fmt.Errorf("%s: %w", args[0], err)
}

// limitedBuffer keeps the first max bytes. It does not embed kept, whose ReadFrom has no limit.
type limitedBuffer struct {
	kept bytes.Buffer
	max  int
	over bool
}

func (b *limitedBuffer) Write(p []byte) (int, error) {
	n := min(len(p), b.max-b.kept.Len())
	b.over = b.over || n < len(p)
	b.kept.Write(p[:n])
	return len(p), nil
}

// describeKeys describes keys for people.
func describeKeys(r *crypt.Keyring) string {
	return fmt.Sprintf("keys %s; the newest is %s", strings.Join(r.IDs(), ", "), r.Newest().ID())
}

// keyChanges returns the change of the keys if the settings name the same source.
func keyChanges(was, next keysInUse) []config.Change {
	if was.ring == nil || next.ring == nil || was.ring.Equal(next.ring) {
		return nil
	}
	old, is := describeKeys(was.ring), describeKeys(next.ring)
	switch file := next.from.KeysFile; {
	case file != "" && file == was.from.KeysFile:
		return []config.Change{{Key: "encryption.keys_file", Old: fmt.Sprintf("%s (%s)", file, old), New: fmt.Sprintf("%s (%s)", file, is)}}
	case file == "" && was.from.KeysFile == "":
		return []config.Change{{Key: "encryption.keys_command", Old: old, New: is}}
	}
	return nil
}

// keyFlags are the flags of an offline command for the keys of encrypted volumes.
func keyFlags(cmd *cobra.Command, c *config.Encryption) {
	c.KeysTimeout = config.Default().Encryption.KeysTimeout
	cmd.Flags().StringVar(&c.KeysFile, "encryption-keys-file", "", "file with the keys of encrypted volumes, as given to serve")
	cmd.Flags().StringSliceVar(&c.KeysCommand, "encryption-keys-command", nil, "command that prints the keys of encrypted volumes, as given to serve")
	cmd.MarkFlagsMutuallyExclusive("encryption-keys-file", "encryption-keys-command")
}
