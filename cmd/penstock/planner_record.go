package main

import (
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-kv/penstock/dualpath/record"
)

// openRecord creates the file for a planner's record. It renames an existing file to path.old,
// because that file may be the record of a planner that has just failed.
func openRecord(path string) (*os.File, error) {
	if err := os.Rename(path, path+".old"); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("--record: %w", err)
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("--record: %w", err)
	}
	return f, nil
}

func newPlannerReplay() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "replay FILE",
		Short: "Pass a recorded planner's events to this one, and compare the decisions",
		Long: `Read a record of penstock planner --record, plain or gzip, pass every event to a new
planner with the recorded options, and compare its decisions with the recorded ones. The
planner's decisions depend only on the events, so they are the same, unless this is
another version of the planner: the first decision that differs is shown, and the exit
code is 1.`,
		Example: `  penstock planner replay events.jsonl`,
		Args:    args(cobra.ExactArgs(1)),
	}
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		sum, err := replayRecord(names[0])
		if err != nil {
			return err
		}
		return outputOf(cmd).emit(replayedOf(sum), func(t *table) { printReplayed(t, sum) })
	}
	return cmd
}

// replayed is the JSON output.
type replayed struct {
	Events       map[string]int `json:"events"`
	Actions      int            `json:"actions"`
	SpanSeconds  float64        `json:"span_seconds"`
	Submitted    uint64         `json:"submitted"`
	Finished     uint64         `json:"finished"`
	Rejected     uint64         `json:"rejected"`
	Replanned    uint64         `json:"replanned"`
	PrefillSide  uint64         `json:"prefill_side_tokens"`
	DecodeSide   uint64         `json:"decode_side_tokens"`
	SameDecision bool           `json:"same_decisions"`
}

func replayedOf(s record.Summary) replayed {
	return replayed{
		Events: s.Kinds, Actions: s.Actions, SpanSeconds: s.Span.Seconds(), Submitted: s.Stats.Submitted, Finished: s.Stats.Finished,
		Rejected: s.Stats.Rejected, Replanned: s.Stats.Replanned, PrefillSide: s.Stats.TokensPrefill, DecodeSide: s.Stats.TokensDecode, SameDecision: true,
	}
}

// printReplayed prints the result of a replay as a table.
func printReplayed(t *table, s record.Summary) {
	for _, kind := range slices.Sorted(maps.Keys(s.Kinds)) {
		t.row(kind, count(s.Kinds[kind]))
	}
	t.row("time", s.Span.Round(time.Millisecond))
	t.row("requests", fmt.Sprintf("%s submitted, %s finished, %s rejected, %s planned again",
		count(s.Stats.Submitted), count(s.Stats.Finished), count(s.Stats.Rejected), count(s.Stats.Replanned)))
	t.row("read", fmt.Sprintf("%s tokens on the prefill side, %s on the decode side", count(s.Stats.TokensPrefill), count(s.Stats.TokensDecode)))
	t.row("decisions", fmt.Sprintf("all %s the same", count(s.Actions)))
}

// replayRecord replays a file.
func replayRecord(path string) (sum record.Summary, err error) {
	f, err := os.Open(path)
	if err != nil {
		return sum, err
	}
	defer f.Close()
	var in io.Reader = f
	if strings.HasSuffix(path, ".gz") {
		if in, err = gzip.NewReader(f); err != nil {
			return sum, fmt.Errorf("%s: %w", path, err)
		}
	}
	r, err := record.NewReader(in)
	if err != nil {
		return sum, fmt.Errorf("%s: %w", path, err)
	}
	if sum, err = record.Replay(r); err != nil {
		return sum, fmt.Errorf("%s: %w", path, err)
	}
	return sum, nil
}
