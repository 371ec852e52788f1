package front

import (
	"cmp"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/penstock-kv/penstock/client/gateway"
)

// saltsOf returns the salts of the chain of a prompt with vLLM's field cache_salt, and with a LoRA
// adapter if its identity is not empty, as the vLLM connector computes them
// (python/src/penstock/vllm/_extra.py). Each block has the adapter. vLLM counts the cache salt as a key
// of the first block. The connector hashes adapter and keys of a block in front of the block if they
// differ from those of the block before.
func saltsOf(f fields, adapter string) ([]gateway.Salt, error) {
	rest := "None"
	if adapter != "" {
		rest = "(" + adapter + ",())"
	}
	raw := f.get("cache_salt")
	if raw == nil {
		if adapter == "" {
			return nil, nil
		}
		return []gateway.Salt{{Block: 0, Extra: []byte(rest)}}, nil
	}
	var salt string
	if json.Unmarshal(raw, &salt) != nil || salt == "" {
		return nil, invalid("cache_salt", "want a text that is not empty")
	}
	return []gateway.Salt{
		{Block: 0, Extra: []byte("(" + cmp.Or(adapter, "None") + ",(('cache_salt'," + pythonASCII(salt) + ")))")},
		{Block: 1, Extra: []byte(rest)},
	}, nil
}

// pythonASCII returns the result of Python's ascii() for a text.
func pythonASCII(text string) string {
	quote := byte('\'')
	if strings.Contains(text, "'") && !strings.Contains(text, `"`) {
		quote = '"'
	}
	var b strings.Builder
	b.WriteByte(quote)
	for _, c := range text {
		switch {
		case c == '\\' || c == rune(quote):
			b.WriteByte('\\')
			b.WriteRune(c)
		case c == '\t':
			b.WriteString(`\t`)
		case c == '\n':
			b.WriteString(`\n`)
		case c == '\r':
			b.WriteString(`\r`)
		case c >= ' ' && c < 0x7f:
			b.WriteRune(c)
		case c < 0x100:
			fmt.Fprintf(&b, `\x%02x`, c)
		case c < 0x10000:
			fmt.Fprintf(&b, `\u%04x`, c)
		default:
			fmt.Fprintf(&b, `\U%08x`, c)
		}
	}
	b.WriteByte(quote)
	return b.String()
}
