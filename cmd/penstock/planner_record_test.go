package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/dualpath/record"
)

// TestPlannerReplay: a replay compares the decisions of a record, and detects a changed record.
func TestPlannerReplay(t *testing.T) {
	p, err := dualpath.New(dualpath.Options{})
	if err != nil {
		t.Fatal(err)
	}
	file, err := record.AppendHeader(nil, record.Header{})
	if err != nil {
		t.Fatal(err)
	}
	for _, ev := range []dualpath.Event{
		dualpath.GroupUp{Group: 1, Role: dualpath.Prefill, Engines: []dualpath.EngineSpec{{Engine: 1, Node: 1}}},
		dualpath.GroupUp{Group: 2, Role: dualpath.Decode, Engines: []dualpath.EngineSpec{{Engine: 2, Node: 2}}},
		dualpath.Submit{At: 5, Request: dualpath.Request{ID: 1, Prompt: 100, Hit: 64}},
		dualpath.Fetch{At: 1e9, Group: 1, Engines: []dualpath.EngineReport{{Engine: 1}}},
	} {
		if file, err = record.AppendStep(file, ev, p.Step(ev)); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(t.TempDir(), "events.jsonl")
	write := func(b []byte) {
		t.Helper()
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(file)
	sum, err := replayRecord(path)
	if err != nil || sum.Events != 4 || sum.Actions != 3 {
		t.Errorf("replayed %+v, %v", sum, err)
	}
	changed := strings.Replace(string(file), `"engine":1`, `"engine":2`, 1)
	write([]byte(changed))
	if _, err := replayRecord(path); err == nil || !strings.Contains(err.Error(), "line 5") {
		t.Errorf("a record with another decision: %v", err)
	}
	// The record of the next planner does not overwrite the previous one.
	f, err := openRecord(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if old, err := os.ReadFile(path + ".old"); err != nil || string(old) != changed {
		t.Errorf("the last record is %d bytes, %v", len(old), err)
	}
	if _, err := openRecord(filepath.Join(path, "below", "a", "file")); err == nil {
		t.Error("a record below a file was opened")
	}
}
