package blockiotest_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/blockiotest"
	"github.com/penstock-kv/penstock/io/memio"
)

// broken is a device with one defect. It tests the suite itself: the suite must detect each defect.
type broken struct {
	blockio.Device
	defect string
}

// defects maps each defect to the case that detects it.
var defects = [...]struct{ name, foundBy string }{
	{"none", ""},
	{"a short read is success", "large_transfers_are_whole"},
	{"vectored writes lose the last buffer", "one_request_fills_many_buffers_in_turn"},
	{"good requests of a refused batch are done", "misaligned_requests_are_refused_before_anything_is_submitted"},
	{"the context is not looked at", "a_done_context_is_refused_before_anything_is_submitted"},
	{"old outcomes stay", "outcomes_of_an_earlier_use_of_the_batch_are_cleared"},
	{"create takes the place of a file", "create_refuses_a_name_that_is_taken_and_keeps_the_file"},
	{"the list is not sorted", "list_is_sorted"},
	{"two may hold the lock", "the_lock_has_one_owner,_whom_others_can_read"},
	{"the second close fails", "a_closed_device_refuses_everything"},
	{"closing leaves a goroutine", "an_empty_batch_is_done"},
	{"stats stand still", "stats_count_requests,_bytes_and_syncs"},
}

func (d *broken) has(defect string) bool { return d.defect == defect }

func (d *broken) Do(ctx context.Context, batch []blockio.Request) error {
	checked := blockio.CheckBatch(batch)
	switch {
	case d.has("the context is not looked at"):
		ctx = context.WithoutCancel(ctx)
	case d.has("good requests of a refused batch are done") && checked != nil:
		_ = d.Device.Do(ctx, batch[:1])
	case d.has("a short read is success") && checked == nil:
		return d.bend(ctx, batch, func(r *blockio.Request) {
			if last := len(r.Bufs) - 1; r.Op == blockio.Read && len(r.Bufs[last]) > 1<<20 {
				r.Bufs[last] = r.Bufs[last][:1<<20]
			}
		})
	case d.has("vectored writes lose the last buffer") && checked == nil:
		return d.bend(ctx, batch, func(r *blockio.Request) {
			if last := len(r.Bufs) - 1; r.Op == blockio.Write && last > 0 {
				r.Bufs = r.Bufs[:last]
			}
		})
	case d.has("old outcomes stay"):
		return d.keepOutcomes(ctx, batch)
	}
	return d.Device.Do(ctx, batch)
}

// bend performs a changed copy of the batch.
func (d *broken) bend(ctx context.Context, batch []blockio.Request, change func(*blockio.Request)) error {
	inner := slices.Clone(batch)
	for i := range inner {
		inner[i].Bufs = slices.Clone(inner[i].Bufs)
		change(&inner[i])
	}
	err := d.Device.Do(ctx, inner)
	for i := range inner {
		batch[i].Err = inner[i].Err
	}
	return err
}

func (d *broken) keepOutcomes(ctx context.Context, batch []blockio.Request) error {
	inner := slices.Clone(batch)
	err := d.Device.Do(ctx, inner)
	for i := range inner {
		batch[i].Err = errors.Join(batch[i].Err, inner[i].Err)
	}
	return err
}

func (d *broken) Create(name string, sizeBytes int64) (blockio.File, error) {
	f, err := d.Device.Create(name, sizeBytes)
	if d.has("create takes the place of a file") && errors.Is(err, blockio.ErrExist) {
		return d.Device.Open(name)
	}
	return f, err
}

func (d *broken) List() ([]string, error) {
	names, err := d.Device.List()
	if d.has("the list is not sorted") {
		slices.Reverse(names)
	}
	return names, err
}

func (d *broken) Lock(identity string) error {
	err := d.Device.Lock(identity)
	var owned *blockio.OwnedError
	if d.has("two may hold the lock") && errors.As(err, &owned) {
		return nil
	}
	return err
}

func (d *broken) Stats() blockio.Stats {
	if d.has("stats stand still") {
		return blockio.Stats{}
	}
	return d.Device.Stats()
}

func (d *broken) Close() error {
	if _, err := d.List(); d.has("the second close fails") && err != nil {
		return err
	}
	if d.has("closing leaves a goroutine") {
		go func() { select {} }()
	}
	return d.Device.Close()
}

// brokenDefect is the environment variable that selects the defect of a child process.
const brokenDefect = "PENSTOCK_TEST_BROKEN_DEVICE"

// TestBrokenDevice is the child of TestSuiteFindsDefects.
func TestBrokenDevice(t *testing.T) {
	defect := os.Getenv(brokenDefect)
	if defect == "" {
		t.Skip("runs only as the child of TestSuiteFindsDefects")
	}
	blockiotest.Run(t, func(*testing.T) blockiotest.Volume {
		d := memio.New(memio.Options{CapacityBytes: 1 << 30})
		return blockiotest.Volume{Open: func() (blockio.Device, error) {
			return &broken{Device: d.Reopen(), defect: defect}, nil
		}}
	})
}

// TestSuiteFindsDefects runs the suite over a device with each defect, in a child process, because
// the suite is expected to fail.
func TestSuiteFindsDefects(t *testing.T) {
	testkit.Long(t, "the whole suite once for each defect")
	testkit.VerifyNone(t)
	for _, d := range defects {
		t.Run(d.name, func(t *testing.T) {
			pattern := "^TestBrokenDevice$"
			if d.foundBy != "" {
				pattern += "/^" + d.foundBy + "$"
			}
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run="+pattern)
			cmd.Env = append(os.Environ(), brokenDefect+"="+d.name)
			out, err := cmd.CombinedOutput()
			found := strings.Contains(string(out), "--- FAIL: TestBrokenDevice/"+d.foundBy)
			if d.foundBy == "" && err != nil || d.foundBy != "" && (err == nil || !found) {
				t.Errorf("the suite says %v:\n%s", err, out)
			}
		})
	}
}
