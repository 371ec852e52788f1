package health

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// TestTranscripts runs testdata/*.td. A transcript is the life of one volume; the
// clock starts at 0 and "at=" moves it. Each command prints the state after it.
func TestTranscripts(t *testing.T) {
	paths, err := filepath.Glob("testdata/*.td")
	if err != nil || len(paths) == 0 {
		t.Fatalf("no transcripts: %v", err)
	}
	for _, path := range paths {
		t.Run(filepath.Base(path), func(t *testing.T) {
			w := &world{start: time.Unix(1_000_000, 0)}
			w.m = New(Options{})
			datadriven.RunTest(t, path, w.run)
		})
	}
}

// TestHungBeforeSlow: if HungAfter is less than the default of SlowAfter, the default of
// SlowAfter is HungAfter.
func TestHungBeforeSlow(t *testing.T) {
	o := Options{HungAfter: 2 * time.Second}
	o.EnsureDefaults()
	if err := o.Validate(); err != nil || o.SlowAfter != 2*time.Second {
		t.Errorf("slow after %v, %v", o.SlowAfter, err)
	}
}

type world struct {
	m     *Machine
	start time.Time
	now   time.Duration
}

func (w *world) run(t *testing.T, d *datadriven.TestData) string {
	var out strings.Builder
	for line := range strings.Lines(d.Input) {
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		args := make(map[string]string)
		for _, f := range fields[1:] {
			k, v, _ := strings.Cut(f, "=")
			args[k] = v
		}
		duration := func(key string) time.Duration {
			if args[key] == "" {
				return 0
			}
			v, err := time.ParseDuration(args[key])
			if err != nil {
				d.Fatalf(t, "%s: %v", key, err)
			}
			return v
		}
		if args["at"] != "" {
			w.now = duration("at")
		}
		now := w.start.Add(w.now)
		var fault error
		if args["err"] != "" {
			fault = errors.New(args["err"])
		}
		var changed bool
		note := ""
		switch fields[0] {
		case "read", "write", "sync":
			op := map[string]Op{"read": Read, "write": Write, "sync": Sync}[fields[0]]
			n := 1
			if args["times"] != "" {
				if _, err := fmt.Sscan(args["times"], &n); err != nil {
					d.Fatalf(t, "times: %v", err)
				}
			}
			for range n {
				changed = w.m.Done(now, op, duration("took"), fault) || changed
			}
		case "tick":
			var oldest Outstanding
			if args["oldest"] != "" {
				oldest.Any = w.start.Add(duration("oldest"))
			}
			if args["read"] != "" {
				oldest.Read = w.start.Add(duration("read"))
			}
			others := Others{Mean: duration("others")}
			for _, s := range States() {
				if s.String() == args["suffice"] {
					others.Suffice = s
				}
			}
			changed = w.m.Tick(now, oldest, others)
		case "due":
			note = fmt.Sprintf(" probe due: %v", w.m.ProbeDue(now))
		case "probed":
			changed = w.m.Probed(now, Probe{Took: duration("took"), Late: args["late"] != "", Err: fault})
		case "order":
			for _, s := range States() {
				if s.String() == args["to"] {
					changed = w.m.Order(now, s)
				}
			}
		default:
			d.Fatalf(t, "unknown command %q", fields[0])
		}
		s := w.m.Status()
		mark := " "
		if changed {
			mark = "*"
		}
		cause := ""
		if s.Cause != nil {
			cause = s.Cause.Error()
		}
		since := "always"
		if !s.Since.IsZero() {
			since = s.Since.Sub(w.start).String()
		}
		fmt.Fprintf(&out, "%s %v since %s [places %v, syncs %v, reads %v] %s%s\n", mark, s.State, since, s.Places(), s.Syncs(), s.Reads(), cause, note)
	}
	return out.String()
}
