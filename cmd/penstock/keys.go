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
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-kv/penstock/blockstore/crypt"
	"github.com/penstock-kv/penstock/server/config"
)

// keysBytesMax is the maximum size of a text of keys. crypt.MaxKeys keys need less.
const keysBytesMax = 64 << 10

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
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	// A child of the command may keep the pipes open after the command was killed.
	cmd.WaitDelay = time.Second
	out, problem := &limitedBuffer{max: keysBytesMax}, &limitedBuffer{max: keysBytesMax}
	cmd.Stdout, cmd.Stderr = out, problem
	err := cmd.Run()
	switch {
	case ctx.Err() != nil && errors.Is(context.Cause(ctx), context.DeadlineExceeded):
		err = fmt.Errorf("not finished within encryption.keys_timeout %v", timeout)
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
func keyChanges(was, is config.Encryption, old, next *crypt.Keyring) []config.Change {
	if old == nil || next == nil || old.Equal(next) {
		return nil
	}
	switch {
	case is.KeysFile != "" && is.KeysFile == was.KeysFile:
		return []config.Change{{Key: "encryption.keys_file", Old: fmt.Sprintf("%s (%s)", is.KeysFile, describeKeys(old)), New: fmt.Sprintf("%s (%s)", is.KeysFile, describeKeys(next))}}
	case is.KeysFile == "" && was.KeysFile == "":
		return []config.Change{{Key: "encryption.keys_command", Old: describeKeys(old), New: describeKeys(next)}}
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
