package testkit

import (
	"encoding/json"
	"os"
	"testing"
)

// Vectors decodes the test vectors under key in a JSON file. The vectors are inputs and outputs of
// a reference implementation that was written independently of the code under test. Vectors fails
// the test if there are no vectors.
func Vectors[T any](t testing.TB, path, key string) []T {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var all map[string]json.RawMessage
	if err := json.Unmarshal(raw, &all); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	var out []T
	if err := json.Unmarshal(all[key], &out); err != nil || len(out) == 0 {
		t.Fatalf("%s: %s: %d vectors, %v", path, key, len(out), err)
	}
	return out
}
