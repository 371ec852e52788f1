package trace

import (
	"bytes"
	_ "embed" // for the sample
)

// SampleName is the name of the built-in sample's Reader.
const SampleName = "agentic sample (built in)"

//go:embed sample/agentic_sample.jsonl.gz
var sample []byte

// Sample reads the trace that is part of the program: 32 sessions of coding agents, 1118 requests
// (sample/README.md names their source).
func Sample(o Options) (*Reader, error) {
	o.Format = Agentic
	return NewReader(bytes.NewReader(sample), SampleName, o)
}

// SampleFile returns the built-in trace as the content of a gzip file, for programs in
// other languages.
func SampleFile() []byte { return bytes.Clone(sample) }
