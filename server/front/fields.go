package front

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
)

// maxFields is the largest number of members in the JSON object of a request. It is bounded because
// each member takes memory in addition to the body.
const maxFields = 1024

var errManyFields = fmt.Errorf("the object has more than %d members", maxFields)

// field is a member of a JSON object. Both slices are parts of the object's text.
type field struct {
	name  string
	whole []byte // name, colon and value
	value []byte
}

// fields are the members of a JSON object, in order. If several members have the same name, the
// last one is used, as in the decoders of Go and Python.
type fields []field

// parseFields returns the members of a request's body, and no members if the body is null. It
// returns an error if the body is not a JSON object or has more than maxFields members.
func parseFields(body []byte) (fields, error) {
	if err := json.Unmarshal(body, new(struct{})); err != nil {
		return nil, err
	}
	return membersOf(body)
}

// membersOf returns the members of an object in valid JSON, and no members for other values.
func membersOf(object []byte) (fields, error) {
	at := afterSpace(object, 0)
	if object[at] != '{' {
		return nil, nil
	}
	var f fields
	for at = afterSpace(object, at+1); object[at] != '}'; {
		if len(f) == maxFields {
			return nil, errManyFields
		}
		nameEnd := afterValue(object, at)
		value := afterSpace(object, afterSpace(object, nameEnd)+1)
		end := afterValue(object, value)
		m := field{whole: object[at:end], value: object[value:end]}
		if err := json.Unmarshal(object[at:nameEnd], &m.name); err != nil {
			return nil, err
		}
		f = append(f, m)
		if at = afterSpace(object, end); object[at] == ',' {
			at = afterSpace(object, at+1)
		}
	}
	return f, nil
}

// afterSpace returns the index of the first byte at or after from that is not white space.
func afterSpace(text []byte, from int) int {
	for text[from] == ' ' || text[from] == '\t' || text[from] == '\r' || text[from] == '\n' {
		from++
	}
	return from
}

// afterValue returns the index after the value that begins at from, in valid JSON.
func afterValue(text []byte, from int) int {
	depth := 0
	for i := from; ; i++ {
		switch text[i] {
		case '"':
			for i++; text[i] != '"'; i++ {
				if text[i] == '\\' {
					i++
				}
			}
		case '{', '[':
			depth++
			continue
		case '}', ']':
			depth--
		default:
			// A number, true, false or null ends before the next delimiter.
			if depth == 0 {
				if n := bytes.IndexAny(text[i:], ",]} \t\r\n"); n >= 0 {
					return i + n
				}
				return len(text)
			}
			continue
		}
		if depth == 0 {
			return i + 1
		}
	}
}

// get returns the value of the member with the given name, or nil if there is no such member or its
// value is null.
func (f fields) get(name string) json.RawMessage {
	for _, m := range slices.Backward(f) {
		if m.name == name {
			if string(m.value) == "null" {
				return nil
			}
			return json.RawMessage(m.value)
		}
	}
	return nil
}

// only returns the members that have these names.
func (f fields) only(names ...string) fields {
	var kept fields
	for _, m := range f {
		if slices.Contains(names, m.name) {
			kept = append(kept, m)
		}
	}
	return kept
}

// edit gives a member a value, or removes it if the value is nil.
type edit struct {
	name  string
	value []byte
}

// edited returns the object with the edits applied. The other members keep their spelling, and the
// edited members come after all others.
func (f fields) edited(edits ...edit) payload {
	var out payload
	add := func(parts ...[]byte) {
		separator := ","
		if out == nil {
			separator = "{"
		}
		out = append(append(out, []byte(separator)), parts...)
	}
	for _, m := range f {
		if !slices.ContainsFunc(edits, func(e edit) bool { return e.name == m.name }) {
			add(m.whole)
		}
	}
	for _, e := range edits {
		if e.value != nil {
			name, _ := json.Marshal(e.name) // every string can be encoded
			add(name, []byte(":"), e.value)
		}
	}
	if out == nil {
		return payload{[]byte("{}")}
	}
	return append(out, []byte("}"))
}

// payload is the body of a request to an engine, in parts that are sent in order. Most parts are
// slices of the client's body, so a payload takes little additional memory.
type payload [][]byte

// size returns the length in bytes.
func (p payload) size() (n int64) {
	for _, part := range p {
		n += int64(len(part))
	}
	return n
}

// open returns a reader of all parts.
func (p payload) open() io.ReadCloser {
	readers := make([]io.Reader, len(p))
	for i, part := range p {
		readers[i] = bytes.NewReader(part)
	}
	return io.NopCloser(io.MultiReader(readers...))
}
