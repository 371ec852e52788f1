package front

import (
	"cmp"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"github.com/penstock-kv/penstock/client/gateway"
)

// saltsOf returns the salts of the chain of a prompt with vLLM's field cache_salt, with a LoRA adapter if
// its identity is not empty, and with images, as the vLLM connector computes them
// (python/src/penstock/vllm/_extra.py). Each block has the adapter. vLLM's keys of a block are each of
// its images, with the image's offset from the beginning of the block, and in the first block the cache
// salt. The connector hashes adapter and keys of a block in front of the block if they differ from those
// of the block before.
func saltsOf(f fields, adapter string, images []image, blockTokens int) ([]gateway.Salt, error) {
	first := ""
	if raw := f.get("cache_salt"); raw != nil {
		var salt string
		if json.Unmarshal(raw, &salt) != nil || salt == "" {
			return nil, invalid("cache_salt", "want a text that is not empty")
		}
		first = "('cache_salt'," + pythonASCII(salt) + ")"
	}
	var salts []gateway.Salt
	before := ""
	for block := 0; ; block++ {
		start, end := block*blockTokens, (block+1)*blockTokens
		for len(images) > 0 && images[0].offset+images[0].length <= start {
			images = images[1:]
		}
		var keys []string
		for _, one := range images {
			if one.offset >= end {
				break
			}
			keys = append(keys, "('mm',"+pythonASCII(one.hash)+","+strconv.Itoa(one.offset-start)+")")
		}
		if block == 0 && first != "" {
			keys = append(keys, first)
		}
		extra := ""
		if adapter != "" || len(keys) > 0 {
			extra = "(" + cmp.Or(adapter, "None") + ",(" + strings.Join(keys, ",") + "))"
		}
		if extra != before {
			salts = append(salts, gateway.Salt{Block: block, Extra: []byte(cmp.Or(extra, "None"))})
			before = extra
		}
		if block > 0 && len(images) == 0 {
			return salts, nil
		}
	}
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
