package membership

import (
	"testing"
	"testing/synctest"
	"time"
)

// TestAdmitEnds: calls are admitted for nine tenths of the TTL after the last renewal was sent,
// whether or not the goroutine that renews the lease runs.
func TestAdmitEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &Cluster{opts: Options{TTL: 10 * time.Second}, began: time.Now()}
		s := &session{Cluster: c, renewed: time.Now()}
		s.serveUntilLocked()
		if c.Admit("") == nil {
			t.Error("a node that joins was admitted")
		}
		s.serving = true
		s.serveUntilLocked()
		time.Sleep(9*time.Second - time.Nanosecond)
		if err := c.Admit(""); err != nil {
			t.Errorf("before the end: %v", err)
		}
		time.Sleep(time.Nanosecond)
		if c.Admit("") == nil {
			t.Error("admitted at the end")
		}
	})
}
