package front

import (
	"bytes"
	"encoding/json"

	"github.com/zeebo/xxh3"
)

const (
	// blockBytes is the length of a block of a prompt: some 64 tokens of text.
	blockBytes = 256
	// maxBlocks bounds the blocks of one request, so that a choice takes a bounded time.
	maxBlocks = 4096
)

// prompt is what the choice of an engine depends on.
type prompt struct {
	// chains has, for each prompt of the request, a hash of everything up to the end of
	// each whole block. Equal hashes are equal prefixes, but for collisions.
	chains [][]uint64
	blocks int // of all chains; at most maxBlocks
}

// generation are the fields of a completion request that the choice depends on.
type generation struct {
	Model     json.RawMessage `json:"model"`
	CacheSalt json.RawMessage `json:"cache_salt"`
	Prompt    json.RawMessage `json:"prompt"`
	Tools     json.RawMessage `json:"tools"`
	Messages  json.RawMessage `json:"messages"`
}

// parsePrompt returns the prompt of a request's body. An error means that the body is no
// JSON object. Anything else that is wrong with the request is for the engine to refuse.
//
// Text is hashed as text, token ids and messages as compact JSON. Two spellings of one
// prompt may differ in their hashes: then they are routed apart.
func parsePrompt(body []byte) (prompt, error) {
	var g generation
	if err := json.Unmarshal(body, &g); err != nil {
		return prompt{}, err
	}
	// Engines share no KV between models and salts.
	seed := xxh3.HashSeed(g.CacheSalt, xxh3.Hash(g.Model))
	var p prompt
	p.addMessages(seed, g.Tools, g.Messages)
	p.addPrompts(seed, g.Prompt)
	return p, nil
}

// addMessages adds a chat. Tools stand before the messages, as in chat templates.
func (p *prompt) addMessages(seed uint64, tools, messages json.RawMessage) {
	var each []json.RawMessage
	if len(messages) == 0 || json.Unmarshal(messages, &each) != nil {
		return
	}
	var text bytes.Buffer
	for _, part := range append([]json.RawMessage{tools}, each...) {
		if len(part) > 0 && text.Len() < maxBlocks*blockBytes {
			_ = json.Compact(&text, part) // valid: it was parsed
		}
	}
	p.add(seed, text.Bytes())
}

// addPrompts adds a text, a list of token ids, or each element of a list of these.
func (p *prompt) addPrompts(seed uint64, raw json.RawMessage) {
	raw = bytes.TrimLeft(raw, " \t\r\n")
	if len(raw) == 0 {
		return
	}
	switch raw[0] {
	case '"':
		var text string
		if json.Unmarshal(raw, &text) == nil {
			p.add(seed, []byte(text))
		}
	case '[':
		inner := bytes.TrimLeft(raw[1:], " \t\r\n")
		if inner[0] != '"' && inner[0] != '[' {
			var ids bytes.Buffer
			if json.Compact(&ids, raw) == nil {
				p.add(seed, ids.Bytes()[1:ids.Len()-1])
			}
			return
		}
		var each []json.RawMessage
		if json.Unmarshal(raw, &each) != nil {
			return
		}
		for _, one := range each {
			if p.blocks >= maxBlocks {
				return
			}
			if one[0] == '"' || inner[0] == '[' && !bytes.HasPrefix(bytes.TrimLeft(one[1:], " \t\r\n"), []byte("[")) {
				p.addPrompts(seed, one)
			}
		}
	}
}

// add adds one prompt.
func (p *prompt) add(seed uint64, text []byte) {
	text = text[:min(len(text), (maxBlocks-p.blocks)*blockBytes)]
	if chain := appendChain(nil, seed, text); len(chain) > 0 {
		p.chains = append(p.chains, chain)
		p.blocks += len(chain)
	}
}

// appendChain appends the hashes of the whole blocks of text.
func appendChain(chain []uint64, seed uint64, text []byte) []uint64 {
	for ; len(text) >= blockBytes; text = text[blockBytes:] {
		seed = xxh3.HashSeed(text[:blockBytes], seed)
		chain = append(chain, seed)
	}
	return chain
}
