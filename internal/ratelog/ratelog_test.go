package ratelog

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// TestLog: one event of each kind is logged per second, with the number of events left out.
func TestLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b bytes.Buffer
		l := New[int](slog.New(slog.NewTextHandler(&b, &slog.HandlerOptions{
			ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
				if a.Key == slog.TimeKey {
					return slog.Attr{}
				}
				return a
			},
		})))
		for i := range 3 {
			l.Warn(1, "one", "i", i)
			l.Info(2, "two", "i", i)
		}
		time.Sleep(interval)
		l.Warn(1, "one", "i", 9)
		l.Warn(3, "three")
		want := "level=WARN msg=one i=0\nlevel=INFO msg=two i=0\nlevel=WARN msg=one i=9 left_out=2\nlevel=WARN msg=three\n"
		if got := b.String(); got != want {
			t.Errorf("logged\n%swant\n%s", got, want)
		}
		if l.Debug("details"); strings.Contains(b.String(), "details") {
			t.Error("details are logged without being enabled")
		}
	})
}
