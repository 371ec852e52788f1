package front

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
)

func parse(t *testing.T, body string) prompt {
	t.Helper()
	f, err := parseFields([]byte(body))
	if err != nil {
		t.Fatalf("%.100s: %v", body, err)
	}
	return newPrompt(f)
}

func TestPromptChains(t *testing.T) {
	text := strings.Repeat("0123456789abcdef", 40) // 640 bytes: two whole blocks
	ids := strings.TrimSuffix(strings.Repeat("11, ", 300), ", ")
	for _, c := range []struct {
		name, body string
		chains     []int
	}{
		{"text", `{"prompt":"` + text + `"}`, []int{2}},
		{"a short text", `{"prompt":"hello"}`, nil},
		{"token ids", `{"prompt":[` + ids + `]}`, []int{3}}, // 899 bytes without blanks
		{"texts", `{"prompt":["` + text + `","x","` + text + `"]}`, []int{2, 2}},
		{"lists of token ids", `{"prompt":[[` + ids + `], [1]]}`, []int{3}},
		{"messages", `{"messages":[{"role":"user","content":"` + text + `"}]}`, []int{2}},
		{"no prompt", `{"model":"m"}`, nil},
		{"no tokens", `{"prompt":[]}`, nil},
		{"a prompt for the engine to refuse", `{"prompt":{"a":1}}`, nil},
		{"messages for the engine to refuse", `{"messages":"x"}`, nil},
		{"a list for the engine to refuse", `{"prompt":[[1],2,"x",[[3]]]}`, nil},
		{"null", `null`, nil},
	} {
		p := parse(t, c.body)
		var got []int
		sum := 0
		for _, chain := range p.chains {
			got = append(got, len(chain))
			sum += len(chain)
		}
		if !slices.Equal(got, c.chains) || sum != p.blocks {
			t.Errorf("%s: chains of %v blocks, %d in all; want %v", c.name, got, p.blocks, c.chains)
		}
	}
}

// TestPromptPrefixes: requests whose prompts share a prefix have chains that share a prefix.
func TestPromptPrefixes(t *testing.T) {
	turn := func(n int, extra string) string {
		var messages []string
		for i := range n {
			messages = append(messages, fmt.Sprintf(`{"role":"user", "content":"%d %s"}`, i, strings.Repeat("word ", 200)))
		}
		return `{"model":"m"` + extra + `,"messages":[` + strings.Join(messages, ",") + `]}`
	}
	first, second := parse(t, turn(2, "")).chains[0], parse(t, turn(3, "")).chains[0]
	if shared := common(first, second); shared != len(first) {
		t.Errorf("%d of %d blocks of the first turn are in the second", shared, len(first))
	}
	var compact strings.Builder
	for _, part := range strings.SplitAfter(turn(2, ""), ", ") {
		compact.WriteString(strings.TrimSuffix(part, " "))
	}
	if again := parse(t, compact.String()).chains[0]; common(first, again) != len(first) {
		t.Error("blanks between tokens of JSON change the chain")
	}
	for what, extra := range map[string]string{"cache salt": `,"cache_salt":"s"`, "tools": `,"tools":[{"type":"function"}]`} {
		if other := parse(t, turn(2, extra)).chains[0]; common(first, other) != 0 {
			t.Errorf("another %s: %d blocks are shared", what, common(first, other))
		}
	}
	a := parse(t, `{"model":"a","prompt":"`+strings.Repeat("x", 300)+`"}`).chains[0]
	b := parse(t, `{"model":"b","prompt":"`+strings.Repeat("x", 300)+`"}`).chains[0]
	if common(a, b) != 0 {
		t.Error("two models share a block")
	}
}

func common(a, b []uint64) (n int) {
	for n < min(len(a), len(b)) && a[n] == b[n] {
		n++
	}
	return n
}

func TestPromptIsBounded(t *testing.T) {
	long := strings.Repeat("x", (maxBlocks/2+10)*blockBytes)
	if p := parse(t, `{"prompt":["`+long+`","`+long+`","`+long+`"]}`); p.blocks != maxBlocks || len(p.chains) != 2 {
		t.Errorf("%d blocks in %d chains; want %d in 2", p.blocks, len(p.chains), maxBlocks)
	}
}

// FuzzPrompt: every JSON object has a prompt of bounded length, and no other text has one.
func FuzzPrompt(f *testing.F) {
	for _, seed := range []string{`{"prompt":[[1,2],["a"]]}`, `{"prompt":"\ud800"}`, `{"messages":[{}, 1, "x"],"tools":[]}`, `{"prompt":[ ]}`, `[]`, `{"prompt":[null]}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		var object map[string]json.RawMessage
		want := json.Unmarshal(body, &object)
		f, err := parseFields(body)
		if errors.Is(err, errManyFields) {
			return
		}
		if p := newPrompt(f); (err == nil) != (want == nil) || p.blocks > maxBlocks {
			t.Errorf("%q: %v, %d blocks; want error %v", body, err, p.blocks, want)
		}
	})
}
