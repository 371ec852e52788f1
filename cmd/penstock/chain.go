package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"

	"github.com/spf13/cobra"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/kv"
)

// chainFlags are the flags that name a chain of blocks.
type chainFlags struct {
	tokensFile, idsFile string
}

// addChainFlags adds both flags to cmd and requires exactly one of the two.
func addChainFlags(cmd *cobra.Command) *chainFlags {
	f := &chainFlags{}
	cmd.Flags().StringVar(&f.tokensFile, "tokens-file", "", "file with the prompt's token ids, decimal, separated by white space (- reads standard input)")
	cmd.Flags().StringVar(&f.idsFile, "ids-file", "", "file with block ids, 32 hexadecimal digits each, for keys that an engine made")
	cmd.MarkFlagsMutuallyExclusive("tokens-file", "ids-file")
	cmd.MarkFlagsOneRequired("tokens-file", "ids-file")
	return f
}

// chain has the ids of the chain that the flags name, and the length of its prompt.
type chain struct {
	ids []kv.BlockID
	// tokens is the length of the prompt in tokens. The tokens of a last partial block are not
	// cached.
	tokens int
}

// load reads the file and computes the chain, which must have at least one whole block.
func (f *chainFlags) load(w world, ns kv.Namespace) (chain, error) {
	if f.idsFile != "" {
		return f.loadIDs(w, ns)
	}
	name, in, err := openInput(w, f.tokensFile)
	if err != nil {
		return chain{}, fmt.Errorf("--tokens-file: %w", err)
	}
	defer in.Close()
	tokens, err := readTokens(name, in)
	if err != nil {
		return chain{}, err
	}
	hashed, err := ns.Chain()
	if err != nil {
		return chain{}, err
	}
	ids, _ := hashed.Append(nil, tokens)
	if len(ids) == 0 {
		return chain{}, fmt.Errorf("%s holds %d tokens; namespace %q has blocks of %d, so there is no whole block", name, len(tokens), ns.Name, ns.Geometry.BlockTokens)
	}
	return chain{ids: ids, tokens: len(tokens)}, nil
}

// chain computes the chain that the flags name, with the geometry that the node has for the
// namespace.
func (a admin) chain(ctx context.Context, w world, flags *chainFlags, namespace string) (chain, error) {
	ns, err := a.namespace(ctx, namespace)
	if err != nil {
		return chain{}, err
	}
	return flags.load(w, ns)
}

func (f *chainFlags) loadIDs(w world, ns kv.Namespace) (chain, error) {
	name, in, err := openInput(w, f.idsFile)
	if err != nil {
		return chain{}, fmt.Errorf("--ids-file: %w", err)
	}
	defer in.Close()
	var ids []kv.BlockID
	err = eachWord(name, in, func(word string) error {
		id, err := kv.ParseBlockID(word)
		ids = append(ids, id)
		return err
	})
	if err != nil {
		return chain{}, err
	}
	if len(ids) == 0 {
		return chain{}, fmt.Errorf("%s holds no block id", name)
	}
	return chain{ids: ids, tokens: len(ids) * ns.Geometry.BlockTokens}, nil
}

// openInput opens a file, or standard input for "-", and returns a name for errors. A read from a
// terminal or a pipe fails with context.Canceled when the command must end.
func openInput(w world, path string) (string, io.ReadCloser, error) {
	if path == "-" {
		return "standard input", io.NopCloser(&interruptible{ended: w.ended, in: w.in}), nil
	}
	f, err := os.Open(path)
	if err != nil {
		return path, nil, err
	}
	if info, err := f.Stat(); err == nil && !info.Mode().IsRegular() {
		in := &interruptible{ended: w.ended, in: f}
		return path, struct {
			io.Reader
			io.Closer
		}{in, f}, nil
	}
	return path, f, nil
}

// interruptible is an input that may wait for bytes for ever. It reads on a goroutine of its own, which
// it leaves behind when ended is closed: the process ends then.
type interruptible struct {
	ended  <-chan struct{}
	in     io.Reader
	reads  chan inputRead
	buffer []byte
	left   []byte // of buffer
	err    error
}

// inputRead is the result of one read into interruptible.buffer.
type inputRead struct {
	n   int
	err error
}

func (r *interruptible) Read(p []byte) (int, error) {
	for len(r.left) == 0 {
		if r.err != nil {
			return 0, r.err
		}
		if r.buffer == nil {
			r.buffer, r.reads = make([]byte, 64<<10), make(chan inputRead, 1)
		}
		go func() {
			n, err := r.in.Read(r.buffer)
			r.reads <- inputRead{n, err}
		}()
		select {
		case got := <-r.reads:
			r.left, r.err = r.buffer[:got.n], got.err
		case <-r.ended:
			r.err = context.Canceled
		}
	}
	n := copy(p, r.left)
	r.left = r.left[n:]
	return n, nil
}

// readTokens reads decimal token ids.
func readTokens(name string, in io.Reader) ([]kv.Token, error) {
	var tokens []kv.Token
	err := eachWord(name, in, func(word string) error {
		var v uint64
		for _, c := range []byte(word) {
			if c < '0' || c > '9' {
				return fmt.Errorf("%q is not a decimal token id", shorten(word))
			}
			if v = v*10 + uint64(c-'0'); v > math.MaxUint32 {
				return fmt.Errorf("token id %s is larger than %d", shorten(word), uint32(math.MaxUint32))
			}
		}
		tokens = append(tokens, kv.Token(v))
		return nil
	})
	return tokens, err
}

// maxWord is the maximum length of a word, in bytes. It is more than any token or block id needs.
// The limit makes a file without white space an error; otherwise the whole file would be read into
// memory.
const maxWord = 4096

// maxWords is the maximum number of words of an input. No node takes a chain as long as that, so that an input
// that never ends is an error before it fills the memory.
const maxWords = 1 << 24

// eachWord calls f for each word. It adds the line and column of the word to an error.
func eachWord(name string, in io.Reader, f func(word string) error) error {
	r := bufio.NewReaderSize(in, 1<<16)
	line, column, start := 1, 0, 1
	var word []byte
	words := 0
	end := func() error {
		if len(word) == 0 {
			return nil
		}
		err := f(string(word))
		word = word[:0]
		if words++; err == nil && words > maxWords {
			err = fmt.Errorf("the input has more than %d words, which no prompt has", maxWords)
		}
		if err != nil {
			return fmt.Errorf("%s:%d:%d: %w", name, line, start, err)
		}
		return nil
	}
	for {
		c, err := r.ReadByte()
		if errors.Is(err, io.EOF) {
			return end()
		}
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		column++
		switch c {
		case ' ', '\t', '\r', '\n', '\v', '\f':
			if err := end(); err != nil {
				return err
			}
			if c == '\n' {
				line, column = line+1, 0
			}
			continue
		}
		if len(word) == 0 {
			start = column
		}
		if len(word) == maxWord {
			return fmt.Errorf("%s:%d:%d: a word of more than %d characters; token ids are separated by white space", name, line, start, maxWord)
		}
		word = append(word, c)
	}
}

func shorten(s string) string {
	const most = 40
	if len(s) <= most {
		return s
	}
	return s[:most] + "…"
}

// namespace fetches a namespace from the node.
func (a admin) namespace(ctx context.Context, name string) (kv.Namespace, error) {
	m, err := a.GetNamespace(ctx, &pb.GetNamespaceRequest{Name: name})
	if err != nil {
		return kv.Namespace{}, err
	}
	return api.Namespace(m)
}
