package trace

import (
	"bytes"
	_ "embed" // for the sample
)

// SampleName is the name that the Reader of the built-in sample has.
const SampleName = "agentic sample (built in)"

//go:embed sample/agentic_sample.jsonl.gz
var sample []byte

// Sample reads the trace that is built into the program: 32 sessions of coding agents with 1118
// requests. sample/README.md names the source of the sessions.
func Sample(o Options) (*Reader, error) {
	o.Format = Agentic
	return NewReader(bytes.NewReader(sample), SampleName, o)
}

// SampleFile returns the built-in trace as the content of a gzip file, for programs in
// other languages.
func SampleFile() []byte { return bytes.Clone(sample) }
