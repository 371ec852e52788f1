package bearer_test

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-kv/penstock/internal/bearer"
	"github.com/penstock-kv/penstock/internal/testkit"
)

// TestFile: a client uses the first token of its file, a second after a change at the latest, also if the file was
// replaced by a renamed one or by another link. While the file cannot be used, the last token stays, and
// the log has the reason once, without a token.
func TestFile(t *testing.T) {
	const first, second, third = "the-first-token-of-all", "the-second-token", "the-third-token-1"
	dir := t.TempDir()
	path := filepath.Join(dir, "token")
	write := func(name, content string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("token", first+"\n"+second+"\n")
	synctest.Test(t, func(t *testing.T) {
		var log testkit.Log
		f, err := bearer.Open(path, slog.New(slog.NewTextHandler(&log, nil)))
		if err != nil {
			t.Fatal(err)
		}
		want := func(token, logged string) {
			t.Helper()
			<-time.After(time.Second) // of the virtual clock: a File looks at its path once a second
			if got := f.Token(); got != token {
				t.Errorf("token %q; want %q", got, token)
			}
			if text := log.Take(); (text == "") != (logged == "") || !strings.Contains(text, logged) || strings.Contains(text, "-token") {
				t.Errorf("the log is %q; want %q", text, logged)
			}
		}
		want(first, "")
		write("token", second+"\n"+first+"\n") // of the same size
		if got := f.Token(); got != first {
			t.Errorf("%q is read again at once", got)
		}
		want(second, "")
		write("new", third)
		if err := os.Rename(filepath.Join(dir, "new"), path); err != nil {
			t.Fatal(err)
		}
		want(third, "")
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		want(third, "no such file")
		want(third, "")
		write("token", "short")
		want(third, "a token of 5 characters")
		write("secret", first)
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink("secret", path); err != nil {
			t.Fatal(err)
		}
		want(first, "")
		write("token", "short")
		want(first, "a token of 5 characters") // a new failure is logged again
	})
	for name, path := range map[string]string{"no path": "", "no file": filepath.Join(dir, "absent")} {
		if _, err := bearer.Open(path, slog.Default()); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
