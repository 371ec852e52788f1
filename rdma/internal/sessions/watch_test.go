package sessions

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// TestWatchLate: rounds that are late by half of the idle timeout are logged. The clock is the
// bubble's, and a round that takes long stands for a process that does not run.
func TestWatchLate(t *testing.T) {
	const heartbeat, idle = 4 * time.Second, 10 * time.Second
	for _, c := range []struct {
		blocked time.Duration
		logged  bool
	}{{0, false}, {time.Second, false}, {idle/2 - time.Millisecond, false}, {idle / 2, true}, {3 * idle, true}} {
		synctest.Test(t, func(t *testing.T) {
			var log bytes.Buffer
			var e Engine[*fakeSession]
			e.Init(Options{Name: "fake", Logger: slog.New(slog.NewTextHandler(&log, nil))})
			rounds := 0
			e.Watch(heartbeat, idle, func(uint64) {
				if rounds++; rounds == 2 {
					<-time.After(WatchInterval(heartbeat) + c.blocked)
				}
				if rounds == 5 {
					e.Cancel()
				}
			})
			if got := strings.Contains(log.String(), "heartbeats were late"); got != c.logged || strings.Count(log.String(), "\n") > 1 {
				t.Errorf("late by %v: log %q", c.blocked, log.String())
			}
		})
	}
}
