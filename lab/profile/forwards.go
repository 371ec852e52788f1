package profile

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
)

// Forward is one forward pass of a prefill engine over one request, from the engine's log.
type Forward struct {
	// Tokens is the number of computed tokens, Context the number of earlier tokens whose KV
	// existed before the pass.
	Tokens, Context int
	// Seconds is the duration of the whole pass. Attention is the part of this time in attention
	// layers; 0 means not logged.
	Seconds, Attention float64
}

// MaxForwards is the maximum number of forward passes in a log, MaxLogBytes the maximum size of a
// log.
const (
	MaxForwards = 1 << 20
	MaxLogBytes = 256 << 20
)

// columns are the columns of a CSV log; the last one is optional.
var columns = [...]string{"tokens", "context", "seconds", "attention_seconds"}

// ReadForwards reads a log. A log is CSV or JSON. The header line of CSV has the columns tokens,
// context, seconds and optionally attention_seconds, in any order; other columns are ignored. JSON
// has objects with these keys, in a list or one after the other; other keys are ignored. An error
// names file and line.
func ReadForwards(name string, r io.Reader) ([]Forward, error) {
	raw, err := io.ReadAll(io.LimitReader(r, MaxLogBytes+1))
	if err != nil {
		return nil, err
	}
	if len(raw) > MaxLogBytes {
		return nil, fmt.Errorf("%s: longer than %d bytes; give a part of the log", name, MaxLogBytes)
	}
	var out []Forward
	switch trimmed := bytes.TrimSpace(raw); {
	case len(trimmed) > 0 && (trimmed[0] == '[' || trimmed[0] == '{'):
		out, err = readJSON(name, raw)
	default:
		out, err = readCSV(name, raw)
	}
	if err == nil && len(out) == 0 {
		err = fmt.Errorf("%s: the log has no forward pass", name)
	}
	return out, err
}

// check returns an error for an impossible pass.
func (f Forward) check() error {
	switch {
	case f.Tokens < 1 || f.Context < 0 || f.Tokens > 1<<40 || f.Context > 1<<40:
		return fmt.Errorf("%d tokens after %d: at least one is computed, and the context is not negative", f.Tokens, f.Context)
	case !(f.Seconds > 0) || f.Seconds > 1e6:
		return fmt.Errorf("%v seconds: a pass takes more than none, and less than 1e6", f.Seconds)
	case !(f.Attention >= 0) || f.Attention > f.Seconds:
		return fmt.Errorf("%v of %v seconds in attention: it is a part of them", f.Attention, f.Seconds)
	}
	return nil
}

func readCSV(name string, raw []byte) ([]Forward, error) {
	rd := csv.NewReader(bytes.NewReader(raw))
	rd.Comment, rd.TrimLeadingSpace = '#', true
	head, err := rd.Read()
	if errors.Is(err, io.EOF) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	at := make([]int, len(columns))
	for i, c := range columns {
		at[i] = slices.IndexFunc(head, func(h string) bool { return strings.TrimSpace(h) == c })
		if at[i] < 0 && i < len(columns)-1 {
			return nil, fmt.Errorf("%s:1: there is no column %q; the header names %s (attention_seconds may be missing)", name, c, strings.Join(columns[:], ", "))
		}
	}
	var out []Forward
	for {
		row, err := rd.Read()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		line, _ := rd.FieldPos(0)
		f, err := parseRow(row, at)
		if err == nil {
			err = f.check()
		}
		if err != nil {
			return nil, fmt.Errorf("%s:%d: %w", name, line, err)
		}
		if out = append(out, f); len(out) > MaxForwards {
			return nil, tooMany(name)
		}
	}
}

func parseRow(row []string, at []int) (f Forward, err error) {
	if f.Tokens, err = strconv.Atoi(strings.TrimSpace(row[at[0]])); err != nil {
		return f, fmt.Errorf("tokens: %q is not a whole number", row[at[0]])
	}
	if f.Context, err = strconv.Atoi(strings.TrimSpace(row[at[1]])); err != nil {
		return f, fmt.Errorf("context: %q is not a whole number", row[at[1]])
	}
	if f.Seconds, err = strconv.ParseFloat(strings.TrimSpace(row[at[2]]), 64); err != nil {
		return f, fmt.Errorf("seconds: %q is not a number", row[at[2]])
	}
	if at[3] >= 0 && strings.TrimSpace(row[at[3]]) != "" {
		if f.Attention, err = strconv.ParseFloat(strings.TrimSpace(row[at[3]]), 64); err != nil {
			return f, fmt.Errorf("attention_seconds: %q is not a number", row[at[3]])
		}
	}
	return f, nil
}

// readJSON reads a list, or one object after the other.
func readJSON(name string, raw []byte) (out []Forward, err error) {
	dec := json.NewDecoder(bytes.NewReader(raw))
	fail := func(err error) error {
		return fmt.Errorf("%s:%d: %w", name, 1+bytes.Count(raw[:min(dec.InputOffset(), int64(len(raw)))], []byte("\n")), err)
	}
	list := bytes.TrimSpace(raw)[0] == '['
	if list {
		if _, err := dec.Token(); err != nil {
			return nil, fail(err)
		}
	}
	for dec.More() {
		var o struct {
			Tokens    *int     `json:"tokens"`
			Context   *int     `json:"context"`
			Seconds   *float64 `json:"seconds"`
			Attention float64  `json:"attention_seconds"`
		}
		if err := dec.Decode(&o); err != nil {
			return nil, fail(err)
		}
		if o.Tokens == nil || o.Context == nil || o.Seconds == nil {
			return nil, fail(fmt.Errorf("an object without %s; each has tokens, context and seconds", missing(o.Tokens == nil, o.Context == nil)))
		}
		f := Forward{*o.Tokens, *o.Context, *o.Seconds, o.Attention}
		if err := f.check(); err != nil {
			return nil, fail(err)
		}
		if out = append(out, f); len(out) > MaxForwards {
			return nil, tooMany(name)
		}
	}
	// A list must have an end, and nothing may follow the list.
	if list {
		if _, err := dec.Token(); errors.Is(err, io.EOF) {
			return nil, fail(errors.New("the list has no end"))
		} else if err != nil {
			return nil, fail(err)
		}
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, fail(errors.New("something follows the list"))
	}
	return out, nil
}

// missing returns the name of the first missing key.
func missing(tokens, context bool) string {
	switch {
	case tokens:
		return "tokens"
	case context:
		return "context"
	}
	return "seconds"
}

func tooMany(name string) error {
	return fmt.Errorf("%s: more than %d forward passes; give a part of the log", name, MaxForwards)
}
