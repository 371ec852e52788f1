package trace

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// read collects a stream, with copies of the blocks.
func read(t *testing.T, text string, o Options) ([]Request, error) {
	t.Helper()
	r, err := NewReader(strings.NewReader(text), "test.jsonl", o)
	if err != nil {
		return nil, err
	}
	var out []Request
	for req, err := range r.All() {
		if err != nil {
			return out, err
		}
		req.Blocks = slices.Clone(req.Blocks)
		out = append(out, req)
	}
	return out, nil
}

func sketch(reqs []Request) string {
	var b strings.Builder
	for _, r := range reqs {
		fmt.Fprintf(&b, "%d t=%v s%d/%d in=%d out=%d", r.Index, r.Time, r.Session, r.Agent, r.InputTokens, r.OutputTokens)
		for _, id := range r.Blocks {
			if id < 1<<32 {
				fmt.Fprintf(&b, " %d", id)
			} else {
				fmt.Fprintf(&b, " %d:%d", id>>32, id&(1<<32-1))
			}
		}
		b.WriteByte('\n')
	}
	return b.String()
}

func TestFormats(t *testing.T) {
	for _, c := range []struct {
		name, in string
		o        Options
		want     string
		format   Format
	}{
		{
			name: "mooncake", format: Mooncake,
			in: `{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 3000, "input_length": 512, "output_length": 7, "hash_ids": [0]}
`,
			want: "0 t=0s s0/0 in=600 out=5 0 1\n1 t=3s s1/0 in=512 out=7 0\n",
		},
		{
			name: "agentic: two sessions interleave by time, a sub-agent starts with the request before it", format: Agentic,
			in: `{"id":"a","block_size":64,"reqs":[["",0.0,130,1,-1,-1,[1,2]],["",9.5,200,1,0,0,[1,1,5,2]],["/1",1.0,64,1,0,0,[9,1]],["",20,64,1,0,0,[1,1]]]}
{"id":"b","block_size":64,"reqs":[["",0.0,64,1,0,0,[1,1]],["",10,64,1,0,0,[1,1]]]}`,
			want: "0 t=0s s0/0 in=130 out=1 1 2\n1 t=0s s1/0 in=64 out=1 1:1\n2 t=9.5s s0/0 in=200 out=1 1 5 6\n" +
				"3 t=10s s1/0 in=64 out=1 1:1\n4 t=10.5s s0/1 in=64 out=1 9\n5 t=20s s0/0 in=64 out=1 1\n",
		},
		{
			name: "agentic, one session at a time", format: Agentic, o: Options{Concurrency: 1},
			in: `{"id":"a","block_size":64,"reqs":[["",0,64,1,0,0,[1,1]],["",5,64,1,0,0,[1,1]]]}

{"id":"empty","block_size":64,"reqs":[]}
{"id":"b","block_size":64,"reqs":[["",1,64,1,0,0,[1,1]]]}`,
			want: "0 t=0s s0/0 in=64 out=1 1\n1 t=5s s0/0 in=64 out=1 1\n2 t=6s s2/0 in=64 out=1 2:1\n",
		},
		{
			name: "dualpath: the answer is part of the next context", format: DualPath,
			in:   `{"id":0,"rounds":[[100,30],[10,5]]}`,
			want: "0 t=0s s0/0 in=100 out=30 0\n1 t=1s s0/0 in=140 out=5 0 1\n",
		},
		{
			name: "azure", format: Azure,
			in: `TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,130,10
2023-11-16 18:17:04.0319600,64,8`,
			want: "0 t=0s s0/0 in=130 out=10 0 1\n1 t=52ms s1/0 in=64 out=8 1:0\n",
		},
		{
			name: "ends early", format: DualPath, o: Options{MaxRequests: 1},
			in:   `{"id":0,"rounds":[[100,30],[10,5]]}`,
			want: "0 t=0s s0/0 in=100 out=30 0\n",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			reqs, err := read(t, c.in, c.o)
			if got := sketch(reqs); err != nil || got != c.want {
				t.Fatalf("err %v, got\n%swant\n%s", err, got, c.want)
			}
			c.o.Format = c.format
			again, err := read(t, c.in, c.o)
			if err != nil || sketch(again) != c.want {
				t.Errorf("with the format named: err %v, got\n%s", err, sketch(again))
			}
			var z bytes.Buffer
			w := gzip.NewWriter(&z)
			io.WriteString(w, c.in)
			w.Close()
			zipped, err := read(t, z.String(), c.o)
			if err != nil || sketch(zipped) != c.want {
				t.Errorf("gzip: err %v, got\n%s", err, sketch(zipped))
			}
		})
	}
}

func TestErrors(t *testing.T) {
	const good = `{"timestamp": 5, "input_length": 5, "output_length": 5, "hash_ids": [0]}` + "\n"
	agentic := func(reqs string) string { return `{"id":"a","block_size":64,"reqs":[` + reqs + `]}` }
	for _, c := range []struct{ name, in, want string }{
		{"empty", "", "test.jsonl is empty"},
		{"blank lines", "\n\n", "test.jsonl is empty"},
		{"text", "hello\n", `test.jsonl:1: "hello" is the first line of no format`},
		{"not gzip", "\x1f\x8bhello", "begins like gzip but is not"},
		{"cut json", good + `{"timestamp": 6`, "test.jsonl:2: unexpected end of JSON input"},
		{"back in time", good + `{"timestamp": 4, "input_length": 5, "output_length": 5, "hash_ids": [0]}`, "test.jsonl:2: timestamp 4 ms after 5 ms; sort the file"},
		{"field missing", good + `{"timestamp": 6, "output_length": 5, "hash_ids": [0]}`, "test.jsonl:2: timestamp, input_length or output_length is missing"},
		{"negative length", good + `{"timestamp": 6, "input_length": -5, "output_length": 5, "hash_ids": [0]}`, "input of -5 tokens; want 0 to"},
		{"huge length", good + `{"timestamp": 6, "input_length": 9000000000, "output_length": 5, "hash_ids": [0]}`, "input of 9000000000 tokens"},
		{"too few ids", good + `{"timestamp": 6, "input_length": 513, "output_length": 5, "hash_ids": [0]}`, "test.jsonl:2: 1 hash_ids for 513 tokens; want 2"},
		{"block size", `{"id":"a","block_size":16,"reqs":[]}`, "test.jsonl:1: block_size 16"},
		{"short request", agentic(`["",0]`), "a request of 2 fields; want 7"},
		{"odd runs", agentic(`["",0,64,1,0,0,[1]]`), "request 0: 1 numbers in runs"},
		{"runs and length differ", agentic(`["",0,64,1,0,0,[1,2]]`), "request 0: runs hold 2 blocks for 64 tokens; want 1"},
		{"hostile run", agentic(`["",0,64,1,0,0,[1,1000000000000]]`), "request 0: run of 1000000000000 blocks"},
		{"run of large ids", agentic(`["",0,64,1,0,0,[4294967296,1]]`), "ids go to 4294967295"},
		{"bad agent", agentic(`["x",0,64,1,0,0,[1,1]]`), `request 0: agent "x"`},
		{"negative time", agentic(`["",-1,64,1,0,0,[1,1]]`), "request 0: t = -1 s"},
		{"bad type", agentic(`["",0,"64",1,0,0,[1,1]]`), "in of a request"},
		{"round", `{"id":0,"rounds":[[1,2,3]]}`, "test.jsonl:1: round 0 has 3 numbers"},
		{"context too long", `{"id":0,"rounds":[[60000000,1],[60000000,1]]}`, "round 1 with its context: input of 120000001 tokens"},
		{"azure fields", azureHeader + "\nx,1", "test.jsonl:2: 2 fields; want 3"},
		{"azure time", azureHeader + "\nx,1,2", `test.jsonl:2: time "x"`},
		{"azure counts", azureHeader + "\n2023-11-16 18:17:03.97,1,x", `token counts "1" and "x"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := read(t, c.in, Options{})
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("error %v; want one with %q", err, c.want)
			}
			if !errors.Is(err, ErrFormat) {
				t.Errorf("%v is not ErrFormat", err)
			}
		})
	}
}

func TestTruncatedGzip(t *testing.T) {
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	for i := range 10_000 {
		fmt.Fprintf(w, `{"timestamp": %d, "input_length": 5, "output_length": 5, "hash_ids": [%d]}`+"\n", i, i*i)
	}
	w.Close()
	got, err := read(t, z.String()[:z.Len()/2], Options{})
	if err == nil || !strings.Contains(err.Error(), "cut short") {
		t.Errorf("error %v after %d requests; want one that reports a truncated file", err, len(got))
	}
}

func TestOpen(t *testing.T) {
	if _, err := Open(filepath.Join(t.TempDir(), "none"), Options{}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing file: %v", err)
	}
	path := filepath.Join(t.TempDir(), "t")
	if err := os.WriteFile(path, []byte(`{"id":0,"rounds":[[100,30]]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(path, Options{Concurrency: -1}); err == nil {
		t.Error("negative concurrency accepted")
	}
	r, err := Open(path, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if r.Name() != path || r.Format() != DualPath || r.BlockTokens() != 64 {
		t.Errorf("name %s, format %v, blocks of %d", r.Name(), r.Format(), r.BlockTokens())
	}
	for _, err := range r.All() {
		if err != nil {
			t.Error(err)
		}
	}
	for _, err := range r.All() {
		if err == nil {
			t.Error("second range yielded requests")
		}
	}
	if err := errors.Join(r.Close(), r.Close()); err != nil {
		t.Errorf("close: %v", err)
	}
}

func TestTokens(t *testing.T) {
	r := Request{Index: 3, InputTokens: 150, BlockTokens: 64, Blocks: []uint64{7, 8}}
	toks := r.AppendTokens(nil)
	if len(toks) != 150 || r.WholeBlocks() != 2 {
		t.Fatalf("%d tokens, %d whole blocks", len(toks), r.WholeBlocks())
	}
	if want := AppendBlock(nil, 8, 64); !slices.Equal(toks[64:128], want) {
		t.Error("second block's tokens are not those of its id")
	}
	other := Request{Index: 4, InputTokens: 150, BlockTokens: 64, Blocks: []uint64{7, 8}}
	if slices.Equal(toks[128:], other.AppendTokens(nil)[128:]) {
		t.Error("two requests have the same tail")
	}
	part := Request{InputTokens: 70, BlockTokens: 64, Blocks: []uint64{7, 8}}
	if got := part.AppendTokens(nil); len(got) != 70 || part.WholeBlocks() != 1 || !slices.Equal(got, toks[:70]) {
		t.Error("a partial last block is not the start of that block")
	}
	for _, tok := range toks {
		if tok >= Vocabulary {
			t.Fatalf("token %d outside the vocabulary", tok)
		}
	}
}

// TestChains: requests with a common prefix in the trace have a common chain of block ids.
func TestChains(t *testing.T) {
	ids := func(blocks ...uint64) []kv.BlockID {
		chain, err := kv.NewChain("t", "n", nil, 64)
		if err != nil {
			t.Fatal(err)
		}
		r := Request{InputTokens: 64 * len(blocks), BlockTokens: 64, Blocks: blocks}
		out, _ := chain.Append(nil, r.AppendTokens(nil))
		return out
	}
	a, b := ids(1, 2, 3), ids(1, 2, 4, 3)
	if !slices.Equal(a[:2], b[:2]) || a[2] == b[2] || a[2] == b[3] {
		t.Errorf("chains %v and %v; want two common ids and no more", a, b)
	}
}

// FuzzTokens: different ids differ in the first four tokens.
func FuzzTokens(f *testing.F) {
	f.Add(uint64(0), uint64(1))
	f.Add(uint64(1)<<32, uint64(1))
	f.Fuzz(func(t *testing.T, a, b uint64) {
		if eq := slices.Equal(AppendBlock(nil, a, 4), AppendBlock(nil, b, 4)); eq != (a == b) {
			t.Errorf("ids %d and %d: tokens equal = %v", a, b, eq)
		}
	})
}

// FuzzReader: no input causes a panic, and the yielded requests have the properties that Request
// promises.
func FuzzReader(f *testing.F) {
	f.Add([]byte(`{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}`), uint8(0))
	f.Add([]byte(`{"id":"a","block_size":64,"reqs":[["",0.0,130,1,-1,-1,[1,2]],["/1",1.0,64,1,0,0,[9,1]]]}`), uint8(1))
	f.Add([]byte(`{"id":0,"rounds":[[100,30],[10,5]]}`+"\n"+`{"id":1,"rounds":[[100,30],[10,5]]}`), uint8(2))
	f.Add([]byte(azureHeader+"\n2023-11-16 18:17:03.9799600,130,10\n"), uint8(0))
	f.Add([]byte("\x1f\x8b\x08\x00"), uint8(0))
	f.Fuzz(func(t *testing.T, data []byte, concurrency uint8) {
		r, err := NewReader(bytes.NewReader(data), "fuzz", Options{Concurrency: int(concurrency), MaxRequests: 100})
		if err != nil {
			return
		}
		var last time.Duration
		i := 0
		for req, err := range r.All() {
			if err != nil {
				if !errors.Is(err, ErrFormat) {
					t.Errorf("%v is not ErrFormat", err)
				}
				return
			}
			if req.Index != i || req.Time < last || req.BlockTokens != r.BlockTokens() {
				t.Fatalf("request %d: %+v after %v", i, req, last)
			}
			if n := len(req.Blocks); n < req.WholeBlocks() || n > (req.InputTokens+req.BlockTokens-1)/req.BlockTokens {
				t.Fatalf("%d blocks for %d tokens", n, req.InputTokens)
			}
			last = req.Time
			i++
		}
	})
}

// TestSharedTraces reads every shared trace and compares the counts with its README.
func TestSharedTraces(t *testing.T) {
	testkit.Long(t, "reads all of the shared traces")
	for _, c := range []struct {
		file     string
		format   Format
		requests int
		blocks   int
	}{
		{"mooncake_conversation_trace.jsonl.gz", Mooncake, 12_031, 288_500},
		{"mooncake_synthetic_trace.jsonl.gz", Mooncake, 3_993, 121_877},
		{"kv_cache_tester_agentic.jsonl.gz", Agentic, 36_877, 67_307_350},
		{"azure_llm_2023_code.csv.gz", Azure, 8_819, 0},
		{"azure_llm_2023_conv.csv.gz", Azure, 19_366, 0},
		{"dualpath_agentic_32k.jsonl.gz", DualPath, 0, 0},
	} {
		t.Run(c.file, func(t *testing.T) {
			r, err := Open(testkit.TraceFile(t, c.file), Options{})
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			requests, blocks := 0, 0
			for req, err := range r.All() {
				if err != nil {
					t.Fatal(err)
				}
				requests++
				blocks += len(req.Blocks)
			}
			if r.Format() != c.format {
				t.Errorf("format %v; want %v", r.Format(), c.format)
			}
			if c.requests != 0 && requests != c.requests || c.blocks != 0 && blocks != c.blocks {
				t.Errorf("%d requests and %d blocks; want %d and %d", requests, blocks, c.requests, c.blocks)
			}
		})
	}
}

// TestSample compares the sample with the numbers in sample/README.md.
func TestSample(t *testing.T) {
	r, err := Sample(Options{Concurrency: 4})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	sessions := make(map[uint64]bool)
	seen := make(map[uint64]bool)
	requests, blocks, agents := 0, 0, 0
	for req, err := range r.All() {
		if err != nil {
			t.Fatal(err)
		}
		requests++
		blocks += len(req.Blocks)
		sessions[req.Session] = true
		if req.Agent != 0 {
			agents++
		}
		for _, id := range req.Blocks {
			seen[id] = true
		}
	}
	if len(sessions) != 32 || requests != 1118 || blocks != 1_129_439 || len(seen) != 53_944 || agents == 0 {
		t.Errorf("%d sessions, %d requests (%d of sub-agents), %d blocks, %d distinct", len(sessions), requests, agents, blocks, len(seen))
	}
}

func BenchmarkSample(b *testing.B) {
	requests := 0
	for b.Loop() {
		r, err := Sample(Options{})
		if err != nil {
			b.Fatal(err)
		}
		for _, err := range r.All() {
			if err != nil {
				b.Fatal(err)
			}
			requests++
		}
	}
	b.ReportMetric(float64(requests)/b.Elapsed().Seconds(), "requests/s")
}

func BenchmarkAppendTokens(b *testing.B) {
	req := Request{InputTokens: 64 * 1024, BlockTokens: 64}
	for i := range uint64(1024) {
		req.Blocks = append(req.Blocks, i)
	}
	var toks []kv.Token
	b.SetBytes(4 * int64(req.InputTokens))
	for b.Loop() {
		toks = req.AppendTokens(toks[:0])
	}
}
