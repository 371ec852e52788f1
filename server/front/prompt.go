package front

import (
	"bytes"
	"encoding/json"

	"github.com/zeebo/xxh3"
)

const (
	// blockBytes is the size of a block of a prompt, about 64 tokens of text.
	blockBytes = 256
	// maxBlocks is the largest number of blocks of one request that are hashed. It bounds the time
	// to choose an engine.
	maxBlocks = 4096
)

// prompt is the input for the choice of an engine.
type prompt struct {
	// chains has, for each prompt of the request, a hash of the text up to the end of each whole
	// block. Except for collisions, equal hashes mean equal prefixes.
	chains [][]uint64
	blocks int // of all chains, at most maxBlocks
}

// newPrompt returns the prompt of a request. It returns no error for a malformed prompt, because the engine
// refuses it.
//
// Text is hashed as text, token ids and messages as compact JSON. So the same prompt in two
// spellings may have different hashes, and be sent to different engines.
func newPrompt(f fields) prompt {
	// Engines do not share KV between models or salts.
	seed := xxh3.HashSeed(f.get("cache_salt"), xxh3.Hash(f.get("model")))
	var p prompt
	p.addMessages(seed, f.get("tools"), f.get("messages"))
	p.addPrompts(seed, f.get("prompt"))
	return p
}

// addMessages adds a chat. Tools come before the messages, as in chat templates.
func (p *prompt) addMessages(seed uint64, tools, messages json.RawMessage) {
	var each []json.RawMessage
	if len(messages) == 0 || json.Unmarshal(messages, &each) != nil {
		return
	}
	var text bytes.Buffer
	for _, part := range append([]json.RawMessage{tools}, each...) {
		if len(part) > 0 && text.Len() < maxBlocks*blockBytes {
			_ = json.Compact(&text, part) // it was parsed before, so it is valid
		}
	}
	p.add(seed, text.Bytes())
}

// addPrompts adds the prompts of a completion: a text, a list of token ids, or a list of texts or
// of lists of token ids.
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
