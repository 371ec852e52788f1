package main

import (
	"strings"
	"testing"
)

// endless is an input that repeats its text for ever.
type endless string

func (e endless) Read(p []byte) (int, error) {
	n := 0
	for n+len(e) <= len(p) {
		n += copy(p[n:], e)
	}
	return n, nil
}

// TestEndlessInput: an input without an end is refused after a number of words, or within one long word.
func TestEndlessInput(t *testing.T) {
	for text, want := range map[string]string{
		"7 ":  "standard input:1:33554433: the input has more than 16777216 words, which no prompt has",
		"77 ": "standard input:1:50331649: the input has more than 16777216 words, which no prompt has",
		"7":   "standard input:1:1: a word of more than 4096 characters",
	} {
		tokens, err := readTokens("standard input", endless(text))
		if err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("input %q repeated: %d tokens, error %v; want %q", text, len(tokens), err, want)
		}
	}
}
