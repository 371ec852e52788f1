package kvevents

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/vmihailenco/msgpack/v5"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// block returns the id of block n, which ends with n.
func block(n uint64) (id kv.BlockID) {
	binary.BigEndian.PutUint64(id[8:], n)
	return id
}

// TestWire prints the bytes of each encoding, and the values that the MessagePack decoder
// of llm-d and AIBrix reads from them.
func TestWire(t *testing.T) {
	datadriven.RunTest(t, "testdata/wire.td", func(t *testing.T, d *datadriven.TestData) string {
		w := Wire{Medium: MediumStorage}
		for _, a := range d.CmdArgs {
			switch a.Key {
			case "maps":
				w.Maps = true
			case "ints":
				w.IntHashes = true
			case "medium":
				w.Medium = a.Vals[0]
			default:
				d.Fatalf(t, "argument %s", a)
			}
		}
		var changes []Change
		for line := range strings.Lines(d.Input) {
			changes = append(changes, parseChange(t, d, strings.Fields(line)))
		}
		b := w.AppendBatch(nil, time.UnixMilli(1_700_000_000_250), changes...)
		var out strings.Builder
		for at := 0; at < len(b); at += 32 {
			out.WriteString(hex.EncodeToString(b[at:min(at+32, len(b))]) + "\n")
		}
		var v any
		if err := msgpack.Unmarshal(b, &v); err != nil {
			d.Fatalf(t, "%v", err)
		}
		fmt.Fprintf(&out, "%s\n", plain(v))
		return out.String()
	})
}

func parseChange(t *testing.T, d *datadriven.TestData, words []string) (c Change) {
	if len(words) > 1 {
		for n := range strings.SplitSeq(words[1], ",") {
			c.IDs = append(c.IDs, parseBlock(t, d, n))
		}
	}
	switch words[0] {
	case "stored":
		c.Kind, c.BlockTokens = Stored, 64
		if len(words) > 3 {
			c.Parent = parseBlock(t, d, words[3])
		}
	case "removed":
		c.Kind = Removed
	case "cleared":
		c.Kind = Cleared
	default:
		d.Fatalf(t, "change %q", words)
	}
	return c
}

func parseBlock(t *testing.T, d *datadriven.TestData, text string) kv.BlockID {
	var n uint64
	if _, err := fmt.Sscan(text, &n); err != nil {
		d.Fatalf(t, "block %q: %v", text, err)
	}
	return block(n)
}

// plain formats a decoded value, with bytes in hexadecimal.
func plain(v any) string {
	switch v := v.(type) {
	case []any:
		words := make([]string, len(v))
		for i := range v {
			words[i] = plain(v[i])
		}
		return "[" + strings.Join(words, " ") + "]"
	case map[string]any:
		for k := range v {
			v[k] = plain(v[k])
		}
		return fmt.Sprint(v)
	case []byte:
		return "0x" + hex.EncodeToString(v)
	case float64:
		return fmt.Sprintf("%.3f", v)
	}
	return fmt.Sprint(v)
}

// The structures of llm-d's first releases, whose decoder requires the exact number of
// fields.
type (
	llmdBatch struct {
		_      struct{} `msgpack:",as_array"`
		TS     float64
		Events []msgpack.RawMessage
		Rank   *int
	}
	llmdStored struct {
		_           struct{} `msgpack:",as_array"`
		Tag         string
		BlockHashes []any
		ParentHash  any
		TokenIDs    []uint32
		BlockSize   int
		LoraID      *int
		Medium      *string
		LoraName    *string
	}
	llmdRemoved struct {
		_           struct{} `msgpack:",as_array"`
		Tag         string
		BlockHashes []any
		Medium      *string
	}
)

// FuzzWire: the decoders of llm-d read the encoded values in each encoding. Its first
// releases decode arrays into structures, later ones decode maps by field names.
func FuzzWire(f *testing.F) {
	f.Add(uint64(1), uint8(3), uint64(0), uint8(0), "STORAGE", 64)
	f.Add(uint64(1)<<63, uint8(200), uint64(7), uint8(3), "", 0)
	f.Add(uint64(255), uint8(0), uint64(math.MaxUint64), uint8(1), "ж", 1<<20)
	f.Fuzz(func(t *testing.T, first uint64, count uint8, parent uint64, form uint8, medium string, tokens int) {
		w := Wire{Maps: form&1 != 0, IntHashes: form&2 != 0, Medium: medium}
		stored := Change{Kind: Stored, Parent: block(parent), BlockTokens: tokens}
		for i := range uint64(count) {
			stored.IDs = append(stored.IDs, block(first+i))
		}
		removed := Change{Kind: Removed, IDs: stored.IDs}
		b := w.AppendBatch([]byte("before"), time.UnixMilli(1500), stored, removed, Change{Kind: Cleared})[len("before"):]
		var batch llmdBatch
		if err := msgpack.Unmarshal(b, &batch); err != nil || batch.TS != 1.5 || batch.Rank == nil || *batch.Rank != 0 || len(batch.Events) != 3 {
			t.Fatalf("%+v, %v", batch, err)
		}
		s, r, tag := decodeEvents(t, w, batch.Events)
		if s.Tag != "BlockStored" || !reflect.DeepEqual(hashes(t, w, s.BlockHashes), lows(stored.IDs)) || s.BlockSize != tokens || len(s.TokenIDs) != 0 || s.LoraID != nil || s.LoraName != nil || s.Medium == nil || *s.Medium != medium {
			t.Fatalf("stored %+v", s)
		}
		if parent == 0 && s.ParentHash != nil || parent != 0 && hashes(t, w, []any{s.ParentHash})[0] != parent {
			t.Fatalf("parent %v; want %d", s.ParentHash, parent)
		}
		if r.Tag != "BlockRemoved" || !reflect.DeepEqual(hashes(t, w, r.BlockHashes), lows(removed.IDs)) || r.Medium == nil || *r.Medium != medium {
			t.Fatalf("removed %+v", r)
		}
		if tag != "AllBlocksCleared" {
			t.Fatalf("the third event is %q", tag)
		}
	})
}

func decodeEvents(t *testing.T, w Wire, events []msgpack.RawMessage) (s llmdStored, r llmdRemoved, tag string) {
	t.Helper()
	var cleared []any
	targets := []any{&s, &r, &cleared}
	if w.Maps {
		var m [3]map[string]any
		for i := range m {
			if err := msgpack.Unmarshal(events[i], &m[i]); err != nil {
				t.Fatal(err)
			}
		}
		// Put the map's fields into the order of the arrays.
		for i, names := range [][]string{
			{"type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"},
			{"type", "block_hashes", "medium"}, {"type"},
		} {
			if len(m[i]) != len(names) {
				t.Fatalf("event %d: %v; want the fields %v", i, m[i], names)
			}
			fields := make([]any, len(names))
			for k, name := range names {
				fields[k] = m[i][name]
			}
			var err error
			if events[i], err = msgpack.Marshal(fields); err != nil {
				t.Fatal(err)
			}
		}
	}
	for i, target := range targets {
		if err := msgpack.Unmarshal(events[i], target); err != nil {
			t.Fatalf("event %d: %v", i, err)
		}
	}
	return s, r, cleared[0].(string)
}

// hashes returns the last 8 bytes of each decoded hash, as llm-d stores them.
func hashes(t *testing.T, w Wire, raw []any) []uint64 {
	t.Helper()
	out := []uint64{}
	for _, h := range raw {
		v := reflect.ValueOf(h)
		switch {
		case w.IntHashes && v.CanUint():
			out = append(out, v.Uint())
		case w.IntHashes && v.CanInt():
			out = append(out, uint64(v.Int()))
		default:
			b, ok := h.([]byte)
			if w.IntHashes || !ok || len(b) != kv.BlockIDSize {
				t.Fatalf("hash %v (%T)", h, h)
			}
			out = append(out, binary.BigEndian.Uint64(b[8:]))
		}
	}
	return out
}

func lows(ids []kv.BlockID) []uint64 {
	out := []uint64{}
	for _, id := range ids {
		out = append(out, binary.BigEndian.Uint64(id[8:]))
	}
	return out
}
