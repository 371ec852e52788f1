//go:build !race

package client_test

import (
	"bytes"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
)

// documented returns the Go code that the README and this package's documentation
// show an engine's author, each as a package engine with a function Prefill.
func documented(t *testing.T) map[string]string {
	t.Helper()
	readme, err := os.ReadFile(filepath.Join(testkit.RepositoryRoot(t), "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, code, ok := strings.Cut(string(readme), "\n```go\n")
	code, _, closed := strings.Cut(code, "\n```\n")
	if !ok || !closed {
		t.Fatal("README.md has no block of Go code")
	}
	doc, err := parser.ParseFile(token.NewFileSet(), "doc.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for line := range strings.Lines(doc.Doc.Text()) {
		if strings.HasPrefix(line, "\tengine, err :=") || len(lines) > 0 && !strings.HasPrefix(line, "# ") {
			lines = append(lines, line)
		} else if len(lines) > 0 {
			break
		}
	}
	if len(lines) == 0 {
		t.Fatal("doc.go has no example that begins with the engine")
	}
	return map[string]string{
		"README.md": code,
		// The example in doc.go omits the function around its lines.
		"client/doc.go": `package engine

import (
	"context"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

func Prefill(ctx context.Context, arena []byte, prompt []kv.Token, compute func(prompt []kv.Token, first int)) error {
` + strings.Join(lines, "") + `
	_ = w
	store.Close()
	engine.Close()
	return err
}
`,
	}
}

// engineProgram calls Prefill as an engine does whose model is a function of the
// tokens: compute writes, over memory that is full of something else, byte
// first-token-of-the-block + position. Its arguments are the blocks of the prompt,
// and the block at which it expects to have to begin.
const engineProgram = `package main

import (
	"context"
	"fmt"
	"os"
	"strconv"

	"github.com/penstock-kv/penstock/kv"

	"example.com/outside/engine"
)

const (
	blockTokens = 4
	blockBytes  = 8192
)

func main() {
	blocks, _ := strconv.Atoi(os.Args[1])
	want, _ := strconv.Atoi(os.Args[2])
	prompt := make([]kv.Token, blocks*blockTokens+1)
	for i := range prompt {
		prompt[i] = kv.Token(1000 + i)
	}
	arena := make([]byte, (blocks+3)*blockBytes)
	for i := range arena {
		arena[i] = 0xA5
	}
	began := -1
	err := engine.Prefill(context.Background(), arena, prompt, func(prompt []kv.Token, first int) {
		began = first
		for b := first; b < len(prompt)/blockTokens; b++ {
			for i := range blockBytes {
				arena[b*blockBytes+i] = byte(int(prompt[b*blockTokens]) + i)
			}
		}
	})
	if err != nil || began != want {
		fmt.Printf("error %v; compute began at block %d, want %d\n", err, began, want)
		os.Exit(1)
	}
	for b := range blocks {
		for i := range blockBytes {
			if got, want := arena[b*blockBytes+i], byte(1000+b*blockTokens+i); got != want {
				fmt.Printf("block %d, byte %d is %#x in the engine's memory; want %#x\n", b, i, got, want)
				os.Exit(1)
			}
		}
	}
}
`

// TestDocumentedCode compiles the documented code in a module of its own and runs
// it as several engines in turn: the first stores a prefix of the prompt, the
// second hits that and stores the rest, the third hits all of it. What another
// engine then reads is compared byte by byte.
//
// The programs are built without the race detector, so the plain build's run of this test
// is enough.
func TestDocumentedCode(t *testing.T) {
	testkit.Long(t, "compiles and runs a module of its own")
	for name, code := range documented(t) {
		t.Run(name, func(t *testing.T) {
			h := newHost(t, nil)
			r := newRig(t, nil, h)
			for _, literal := range []string{`"127.0.0.1:7420"`, `"demo/llama"`} {
				if strings.Count(code, literal) != 1 {
					t.Fatalf("the code names %s %d times; want once", literal, strings.Count(code, literal))
				}
			}
			code := strings.ReplaceAll(code, "127.0.0.1:7420", h.control)
			ns := r.namespace("demo/llama", geometry, kv.IndexTrie)
			m := testkit.OutsideModule(t, map[string]string{"engine/engine.go": code, "main.go": engineProgram})
			program := filepath.Join(m.Dir, "program")
			if out, err := m.Go(t.Context(), "build", "-o", program, ".").CombinedOutput(); err != nil {
				t.Fatalf("the code does not compile: %v\n%s", err, out)
			}
			for _, args := range [][]string{{"3", "0"}, {"7", "3"}, {"7", "7"}} {
				if out, err := exec.CommandContext(t.Context(), program, args...).CombinedOutput(); err != nil {
					t.Fatalf("the engine with %v: %v\n%s", args, err, out)
				}
			}

			prompt := make([]kv.Token, 7*geometry.BlockTokens)
			want := make([]byte, 7*geometry.BlockBytes())
			for i := range prompt {
				prompt[i] = kv.Token(1000 + i)
			}
			for i := range want {
				block := i / int(geometry.BlockBytes())
				want[i] = byte(1000 + block*geometry.BlockTokens + i%int(geometry.BlockBytes()))
			}
			mem := r.memory(int64(len(want)))
			got, err := r.store.Read(t.Context(), client.ReadRequest{Namespace: ns, Tokens: prompt, Into: mem})
			if err != nil || got.Blocks != 7 {
				t.Fatalf("read: %+v, %v", got, err)
			}
			if !bytes.Equal(mem.Bytes(), want) {
				t.Error("another engine reads other bytes than the engine computed")
			}
		})
	}
}
