package main

import (
	"bytes"
	"strings"
	"testing"
)

// TestTextsOfOthersInTables: a text of another machine adds no row or column to a table, and no escape sequence reaches
// the terminal. In JSON the text is whole.
func TestTextsOfOthersInTables(t *testing.T) {
	evil := "me\x1b[2J\nnode\tfailed\u009b"
	var b bytes.Buffer
	if err := (output{w: &b}).emit(nil, func(t *table) {
		t.row("OWNER", "AGE")
		t.row(evil, "5s")
		t.pair("node", evil)
	}); err != nil {
		t.Fatal(err)
	}
	if got := b.String(); strings.Count(got, "\n") != 3 || strings.ContainsAny(got, "\x1b\t\u009b") || strings.Count(got, "me?[2J?node?failed?") != 2 {
		t.Errorf("%q", got)
	}
	b.Reset()
	if err := (output{w: &b, json: true}).emitLine(map[string]string{"owner": evil}); err != nil || !strings.Contains(b.String(), `me\u001b[2J\nnode\tfailed`) {
		t.Errorf("%q, %v", b.String(), err)
	}
}
