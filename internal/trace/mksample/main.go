// Command mksample selects whole sessions of an Agentic trace for the sample in the repository, and
// writes them as gzip. Among the sessions within the bounds it selects sessions at even distances
// in the file. It adds the shortest sessions with sub-agents, so that the sample contains such
// sessions. The same input gives the same bytes.
//
// Run it from the repository's root:
//
//	go run ./internal/trace/mksample -in ../shared/traces/kv_cache_tester_agentic.jsonl.gz -out internal/trace/sample/agentic_sample.jsonl.gz
package main

import (
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
)

// maxSampleBytes is the maximum size of the sample in bytes. It keeps the repository small.
const maxSampleBytes = 200 << 10

type bounds struct {
	sessions, withAgents     int
	requestsMin, requestsMax int
	blocksMax                uint64
}

func main() {
	in := flag.String("in", "", "agentic trace, gzip")
	out := flag.String("out", "", "sample to write, gzip")
	var b bounds
	flag.IntVar(&b.sessions, "sessions", 32, "sessions to take")
	flag.IntVar(&b.withAgents, "with-agents", 2, "of these, sessions with sub-agents")
	flag.IntVar(&b.requestsMin, "requests-min", 12, "fewest requests of a session")
	flag.IntVar(&b.requestsMax, "requests-max", 80, "most requests of a session")
	flag.Uint64Var(&b.blocksMax, "blocks-max", 2000, "highest block id of a session")
	flag.Parse()
	if err := run(*in, *out, b); err != nil {
		fmt.Fprintln(os.Stderr, "mksample:", err)
		os.Exit(1)
	}
}

func run(in, out string, b bounds) error {
	all, err := load(in)
	if err != nil {
		return err
	}
	chosen := choose(all, b)
	var buf bytes.Buffer
	z, err := gzip.NewWriterLevel(&buf, gzip.BestCompression)
	if err != nil {
		return err
	}
	requests := 0
	for _, c := range chosen {
		requests += c.requests
		if _, err := z.Write(append(c.line, '\n')); err != nil {
			return err
		}
	}
	if err := z.Close(); err != nil {
		return err
	}
	if buf.Len() > maxSampleBytes {
		return fmt.Errorf("sample of %d bytes; want at most %d: choose fewer or shorter sessions", buf.Len(), maxSampleBytes)
	}
	fmt.Printf("%d of %d sessions, %d requests, %d bytes\n", len(chosen), len(all), requests, buf.Len())
	return os.WriteFile(out, buf.Bytes(), 0o644)
}

// candidate is one line of the trace with the properties for the selection.
type candidate struct {
	position, requests int
	blockMax           uint64
	agents             bool
	line               []byte
}

func load(path string) ([]candidate, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	var all []candidate
	lines := bufio.NewReader(z)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			c, err := measure(bytes.TrimSpace(line))
			if err != nil {
				return nil, fmt.Errorf("%s:%d: %w", path, len(all)+1, err)
			}
			c.position = len(all)
			all = append(all, c)
		}
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
	}
}

// measure reads the properties by which choose selects. Package trace checks the other fields.
func measure(line []byte) (candidate, error) {
	var v struct {
		Reqs [][]json.RawMessage `json:"reqs"`
	}
	if err := json.Unmarshal(line, &v); err != nil {
		return candidate{}, err
	}
	c := candidate{requests: len(v.Reqs), line: line}
	for _, r := range v.Reqs {
		if len(r) != 7 {
			return candidate{}, fmt.Errorf("a request of %d fields; want 7", len(r))
		}
		c.agents = c.agents || string(r[0]) != `""`
		var runs []uint64
		if err := json.Unmarshal(r[6], &runs); err != nil {
			return candidate{}, err
		}
		for i := 0; i+1 < len(runs); i += 2 {
			c.blockMax = max(c.blockMax, runs[i]+runs[i+1])
		}
	}
	return c, nil
}

func choose(all []candidate, b bounds) []candidate {
	var plain, agents []candidate
	for _, c := range all {
		switch {
		case c.agents:
			agents = append(agents, c)
		case c.requests >= b.requestsMin && c.requests <= b.requestsMax && c.blockMax <= b.blocksMax:
			plain = append(plain, c)
		}
	}
	slices.SortStableFunc(agents, func(x, y candidate) int { return cmp.Compare(x.requests, y.requests) })
	chosen := slices.Clone(agents[:min(b.withAgents, len(agents))])
	want := min(b.sessions-len(chosen), len(plain))
	for i := range max(want, 0) {
		chosen = append(chosen, plain[i*len(plain)/want])
	}
	slices.SortFunc(chosen, func(x, y candidate) int { return cmp.Compare(x.position, y.position) })
	return chosen
}
