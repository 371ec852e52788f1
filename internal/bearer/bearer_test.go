package bearer_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/internal/bearer"
)

func TestRead(t *testing.T) {
	many := make([]string, bearer.Max+1)
	for i := range many {
		many[i] = fmt.Sprintf("token-number-%08d", i)
	}
	for _, c := range []struct {
		name, content string
		want          []string
		fails         string
	}{
		{"one", "0123456789abcdef\n", []string{"0123456789abcdef"}, ""},
		{"no final newline", "0123456789abcdef", []string{"0123456789abcdef"}, ""},
		{"two, with blanks and empty lines", "\n new-0123456789abcdef \r\n\nold-0123456789abcdef\n", []string{"new-0123456789abcdef", "old-0123456789abcdef"}, ""},
		{"the most", strings.Join(many[1:], "\n"), many[1:], ""},
		{"too many", strings.Join(many, "\n"), nil, "it has 17 tokens"},
		{"empty", "", nil, "a token of 0 characters"},
		{"a short one after a long one", "0123456789abcdef\nsecret\n", nil, "a token of 6 characters"},
	} {
		path := filepath.Join(t.TempDir(), "token")
		if err := os.WriteFile(path, []byte(c.content), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := bearer.Read(path)
		if !slices.Equal(got, c.want) || (err == nil) != (c.fails == "") {
			t.Errorf("%s: %q, %v", c.name, got, err)
		}
		if err != nil && (!strings.Contains(err.Error(), c.fails) || strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "token-number")) {
			t.Errorf("%s: the error is %q, want %q without a token", c.name, err, c.fails)
		}
	}
	if got, err := bearer.Read(""); got != nil || err != nil {
		t.Errorf("no file: %q, %v", got, err)
	}
}

func TestAccepts(t *testing.T) {
	two := []string{"new", "old"}
	for _, c := range []struct {
		tokens, headers []string
		want            bool
	}{
		{nil, nil, true},
		{nil, []string{"Bearer any"}, true},
		{two, nil, false},
		{two, []string{"Bearer new"}, true},
		{two, []string{"Bearer old"}, true},
		{two, []string{"Bearer other", "Bearer old"}, true},
		{two, []string{"Bearer newer"}, false},
		{two, []string{"Bearer "}, false},
		{two, []string{"new"}, false},
		{two, []string{"Basic new"}, false},
	} {
		if got := bearer.Accepts(c.tokens, c.headers...); got != c.want {
			t.Errorf("tokens %q, headers %q: %v", c.tokens, c.headers, got)
		}
	}
}
