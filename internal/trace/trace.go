package trace

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"time"
)

// ErrFormat is wrapped by every error about a malformed trace. Correct or replace the file.
var ErrFormat = errors.New("malformed trace")

// Limits of the values on one line, so that a damaged file causes an error and does not exhaust the
// memory.
const (
	// MaxInputTokens is the maximum length of one prompt; the longest recorded prompt has 0.9
	// million tokens.
	MaxInputTokens = 1 << 26
	// MaxOutputTokens is the maximum length of one answer.
	MaxOutputTokens = 1 << 26
	// maxLineBytes is the maximum length of one line in bytes; the longest recorded session has 50
	// KiB.
	maxLineBytes = 64 << 20
	// maxTime is the maximum of one time stamp or pause.
	maxTime = 10 * 365 * 24 * time.Hour
)

// Format is the format of a trace file.
type Format uint8

const (
	// Detect recognises the format from the first line.
	Detect Format = iota
	// Mooncake is the format of kvcache-ai/Mooncake: one object per line with timestamp,
	// input_length, output_length and hash_ids of 512-token blocks.
	Mooncake
	// Agentic is the compact form of callanjfox/kv-cache-tester: one session per line, with
	// run-length encoded block ids of 64-token blocks.
	Agentic
	// DualPath has one generated trajectory per line: {"id", "rounds": [[append, gen]]}.
	DualPath
	// Azure is Azure/AzurePublicDataset's CSV of 2023: time, context and generated tokens. Its
	// requests share no prefix.
	Azure
)

// String returns the format's name in lower case.
func (f Format) String() string {
	switch f {
	case Detect:
		return "detect"
	case Mooncake:
		return "mooncake"
	case Agentic:
		return "agentic"
	case DualPath:
		return "dualpath"
	case Azure:
		return "azure"
	}
	return fmt.Sprintf("Format(%d)", uint8(f))
}

// Request is one call of an engine: a prompt and the length of its answer.
type Request struct {
	// Index is the number of the request in the stream, from 0.
	Index int
	// Time is the time of the request's arrival since the start of the trace.
	Time time.Duration
	// Session is the number of the conversation in the file, from 0. In formats without sessions
	// each request has its own number. Agent is the number of the agent within the session; 0 is
	// the main agent.
	Session uint64
	Agent   uint32
	// InputTokens is the length of the prompt in tokens, OutputTokens the length of the answer.
	InputTokens, OutputTokens int
	// BlockTokens is the length of every block in tokens, except possibly the last block.
	BlockTokens int
	// Blocks are the ids of the prompt's blocks: equal ids mean equal tokens. A last block shorter
	// than BlockTokens is listed in Mooncake traces and left out in the other formats. The slice is
	// valid until the next request is read.
	Blocks []uint64
}

// WholeBlocks returns how many of Blocks have the full length. A cache holds only such blocks.
func (r *Request) WholeBlocks() int {
	return min(len(r.Blocks), r.InputTokens/r.BlockTokens)
}

// Options are the options for reading a trace. The zero value reads all of it.
type Options struct {
	// Format is the file's format; Detect (the default) reads the first line to recognise it.
	Format Format
	// Concurrency is the maximum number of sessions of an Agentic or DualPath file that are open at
	// a time. When a session has ended, the next one starts. With 0 all sessions start at time 0,
	// which needs the whole file in memory (in compact form: about 30 MB for 37 thousand requests
	// of 118 thousand tokens).
	Concurrency int
	// MaxRequests is the number of requests after which the stream ends; 0 means no limit.
	MaxRequests int
}

// A Reader yields the requests of one trace, once. It is not safe for concurrent
// use.
type Reader struct {
	name   string
	format Format
	src    source
	limit  int
	used   bool
	close  func() error
}

// source is one format's decoder. next returns io.EOF after the last request.
type source interface {
	next() (Request, error)
}

// Open opens a trace file and reads its first line. The file is plain or gzip; Open recognises gzip
// by the first bytes.
func Open(path string, o Options) (*Reader, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("trace: %w", err)
	}
	r, err := NewReader(f, path, o)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	r.close = f.Close
	return r, nil
}

// NewReader reads a trace from in, plain or gzip; name is used in errors. The caller closes in.
func NewReader(in io.Reader, name string, o Options) (*Reader, error) {
	if o.Concurrency < 0 || o.MaxRequests < 0 {
		return nil, fmt.Errorf("trace: concurrency %d, max requests %d: neither can be negative", o.Concurrency, o.MaxRequests)
	}
	lines, err := newLines(in, name)
	if err != nil {
		return nil, err
	}
	r := &Reader{name: name, format: o.Format, limit: o.MaxRequests, close: func() error { return nil }}
	if r.format == Detect {
		if r.format, err = lines.detect(); err != nil {
			return nil, err
		}
	}
	switch r.format {
	case Mooncake:
		r.src = &mooncakeSource{lines: lines}
	case Azure:
		r.src = &azureSource{lines: lines}
	case Agentic:
		r.src = newSessions(lines, agenticBlockTokens, parseAgentic, o.Concurrency)
	case DualPath:
		r.src = newSessions(lines, dualPathBlockTokens, parseDualPath, o.Concurrency)
	default:
		return nil, fmt.Errorf("trace: %s: unknown format %v; want mooncake, agentic, dualpath or azure", name, o.Format)
	}
	return r, nil
}

// Name returns the file's name as it was given.
func (r *Reader) Name() string { return r.name }

// Format returns the file's format.
func (r *Reader) Format() Format { return r.format }

// BlockTokens returns the number of tokens per block id of this format.
func (r *Reader) BlockTokens() int {
	switch r.format {
	case Mooncake:
		return mooncakeBlockTokens
	case DualPath:
		return dualPathBlockTokens
	case Azure:
		return azureBlockTokens
	}
	return agenticBlockTokens
}

// All yields every request in the order of Time. At the first error it yields the error with an
// empty Request and ends. It can be iterated over once.
func (r *Reader) All() iter.Seq2[Request, error] {
	return func(yield func(Request, error) bool) {
		if r.used {
			yield(Request{}, fmt.Errorf("trace: %s was read already; open it again", r.name))
			return
		}
		r.used = true
		for i := 0; r.limit == 0 || i < r.limit; i++ {
			req, err := r.src.next()
			if errors.Is(err, io.EOF) {
				return
			}
			if err != nil {
				yield(Request{}, err)
				return
			}
			req.Index = i
			if !yield(req, nil) {
				return
			}
		}
	}
}

// Close closes the file that Open opened. It may be called twice.
func (r *Reader) Close() error {
	f := r.close
	r.close = func() error { return nil }
	return f()
}

// lines reads a file line by line and counts the lines.
type lines struct {
	name   string
	in     *bufio.Reader
	number int // of the line that next returned last, from 1
	buf    []byte
}

func newLines(in io.Reader, name string) (*lines, error) {
	b := bufio.NewReaderSize(in, 64<<10)
	magic, err := b.Peek(2)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("trace: read %s: %w", name, err)
	}
	if bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		z, err := gzip.NewReader(b)
		if err != nil {
			return nil, fmt.Errorf("trace: %s begins like gzip but is not: %w (%w)", name, err, ErrFormat)
		}
		b = bufio.NewReaderSize(z, 64<<10)
	}
	return &lines{name: name, in: b}, nil
}

// next returns the next line that is not blank, without its line end. The line is valid until the
// next call. next returns io.EOF after the last line.
func (l *lines) next() ([]byte, error) {
	for {
		line, err := l.raw()
		if err != nil {
			return nil, err
		}
		if line = bytes.TrimSpace(line); len(line) > 0 {
			return line, nil
		}
	}
}

func (l *lines) raw() ([]byte, error) {
	l.buf = l.buf[:0]
	l.number++
	for {
		part, err := l.in.ReadSlice('\n')
		l.buf = append(l.buf, part...)
		switch {
		case len(l.buf) > maxLineBytes:
			return nil, l.errorf("line longer than %d bytes; is this a trace?", maxLineBytes)
		case err == nil:
			return l.buf, nil
		case errors.Is(err, bufio.ErrBufferFull):
		case errors.Is(err, io.EOF):
			if len(l.buf) == 0 {
				return nil, io.EOF
			}
			return l.buf, nil
		default:
			return nil, l.errorf("read: %w; the file is damaged or was cut short: fetch it again", err)
		}
	}
}

// errorf returns an error that names file and line and wraps ErrFormat.
func (l *lines) errorf(format string, args ...any) error {
	return fmt.Errorf("trace: %s:%d: "+format+" (%w)", append(append([]any{l.name, l.number}, args...), ErrFormat)...)
}

// detect recognises the format by the first line. The first line is then read again by next.
func (l *lines) detect() (Format, error) {
	first, err := l.next()
	if errors.Is(err, io.EOF) {
		return Detect, fmt.Errorf("trace: %s is empty (%w)", l.name, ErrFormat)
	}
	if err != nil {
		return Detect, err
	}
	f := formatOf(first)
	if f == Detect {
		return Detect, l.errorf("%.40q is the first line of no format known here; want an object with hash_ids (mooncake), reqs (agentic) or rounds (dualpath), or %q (azure)", first, azureHeader)
	}
	l.unread(first)
	return f, nil
}

// unread makes the next call of next return line again.
func (l *lines) unread(line []byte) {
	again := append(bytes.Clone(line), '\n')
	l.in = bufio.NewReaderSize(io.MultiReader(bytes.NewReader(again), l.in), 64<<10)
	l.number--
}

func formatOf(line []byte) Format {
	if bytes.Equal(line, []byte(azureHeader)) {
		return Azure
	}
	var keys struct {
		HashIDs json.RawMessage `json:"hash_ids"`
		Reqs    json.RawMessage `json:"reqs"`
		Rounds  json.RawMessage `json:"rounds"`
	}
	if json.Unmarshal(line, &keys) != nil {
		return Detect
	}
	switch {
	case keys.HashIDs != nil:
		return Mooncake
	case keys.Reqs != nil:
		return Agentic
	case keys.Rounds != nil:
		return DualPath
	}
	return Detect
}

// checkLengths returns a description of an impossible length, or "".
func checkLengths(input, output int64) string {
	if input < 0 || input > MaxInputTokens {
		return fmt.Sprintf("input of %d tokens; want 0 to %d", input, MaxInputTokens)
	}
	if output < 0 || output > MaxOutputTokens {
		return fmt.Sprintf("output of %d tokens; want 0 to %d", output, MaxOutputTokens)
	}
	return ""
}
