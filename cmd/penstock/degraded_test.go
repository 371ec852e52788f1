package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
)

// TestDegradedStart: with the setting degraded, a node of eight disks starts without any one of
// them, also without the disk with the index. It does not write to an empty mount point. When the
// disk is back, the node serves all blocks of its index.
func TestDegradedStart(t *testing.T) {
	testkit.Long(t, "starts many nodes")
	for _, how := range []string{"not mounted", "gone", "holds the index"} {
		dir := t.TempDir()
		var dirs []string
		for i := range 8 {
			dirs = append(dirs, filepath.Join(dir, fmt.Sprint("disk", i)))
		}
		data := strings.Join(dirs, ",")
		tokensFile, dataFile := prompt2(t, dir)
		s := startServed(t, data)
		s.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "1024").must(t)
		s.run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
		s.stop()
		lost, aside := dirs[7], filepath.Join(dir, "aside")
		if how == "holds the index" {
			lost = dirs[0]
		}
		if err := os.Rename(lost, aside); err != nil {
			t.Fatal(err)
		}
		if how == "not mounted" {
			if err := os.Mkdir(lost, 0o700); err != nil {
				t.Fatal(err)
			}
		}
		if r := penstock(t, "", nil, small(data)...); r.code != exitFailed || how != "gone" && !strings.Contains(r.err, "set degraded") {
			t.Errorf("%s: without --degraded: exit %d\n%s", how, r.code, r.err)
		}
		if how != "not mounted" {
			if err := os.RemoveAll(lost); err != nil {
				t.Fatal(err)
			}
		} else if err := os.RemoveAll(lost); err != nil {
			t.Fatal(err)
		} else if err := os.Mkdir(lost, 0o700); err != nil {
			t.Fatal(err)
		}
		s = startServed(t, data, "--degraded")
		status := s.run("status").must(t)
		if !strings.Contains(status, "failed") || !strings.Contains(status, lost) {
			t.Errorf("%s: status does not name the missing volume:\n%s", how, status)
		}
		// 999999 is no sequence number of this run, so the node sends a gap and then all
		// events of this run.
		if events := s.run("events", "--after", "999999", "--count", "2").must(t); !strings.Contains(events, "volume_state "+lost+": failed (") || !strings.Contains(events, "), was ok\n") {
			t.Errorf("%s: events do not name the missing volume:\n%s", how, events)
		}
		events := s.run("events", "--after", "999999", "--count", "2", "--format", "json").must(t)
		if want := fmt.Sprintf(`"path":%q,"was":"ok","state":"failed"`, lost); !strings.Contains(events, want) || !strings.Contains(events, `"kind":"volume_state"`) {
			t.Errorf("%s: events as JSON do not have %s:\n%s", how, want, events)
		}
		s.run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
		s.run("block", "verify", "m", "--tokens-file", tokensFile).must(t)
		s.stop()
		if names, err := os.ReadDir(lost); how == "not mounted" && (err != nil || len(names) > 0) {
			t.Errorf("the node wrote into the mount point: %v, %v", names, err)
		}
		if err := os.RemoveAll(lost); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(aside, lost); err != nil {
			t.Fatal(err)
		}
		s = startServed(t, data)
		s.run("block", "verify", "m", "--tokens-file", tokensFile).must(t)
		if status := s.run("status").must(t); strings.Contains(status, "failed") {
			t.Errorf("%s: the volume is back, and status prints\n%s", how, status)
		}
		s.stop()
	}
}
