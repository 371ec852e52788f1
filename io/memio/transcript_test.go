package memio_test

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/memio"
)

// TestTranscripts runs testdata/*.td: "do" makes calls on the volume, "crash" shows the states
// after crashes of copies.
func TestTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		s := &transcript{driver: newDriver(t, memio.New(memio.Options{}))}
		s.buf = testkit.AlignedBuffer(t, 16*blockio.Align)
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			s.T = t
			var out strings.Builder
			switch d.Cmd {
			case "do":
				for line := range strings.Lines(d.Input) {
					if err := s.call(strings.Fields(line)); err != nil {
						fmt.Fprintf(&out, "%s: %v\n", strings.TrimSpace(line), err)
					}
				}
			case "crash":
				s.crash(d, &out)
			default:
				d.Fatalf(t, "unknown command %s", d.Cmd)
			}
			return out.String()
		})
	})
}

type transcript struct{ *driver }

func (s *transcript) call(words []string) error {
	name, n := "", int64(0)
	if len(words) > 1 {
		name = words[1]
	}
	if len(words) > 2 {
		s.scan(words[2], &n)
	}
	f := s.open[name]
	switch words[0] {
	case "create":
		f, err := s.dev.Create(name, n*blockio.Align)
		s.open[name] = f
		return err
	case "remove":
		return errors.Join(f.Close(), s.dev.Remove(name))
	case "sync":
		return s.dev.Sync(s.Context(), f)
	case "list":
		_, err := s.dev.List()
		return err
	case "poweroff":
		s.scan(name, &n)
		s.dev.PowerOffAfter(n)
		return nil
	case "read":
		return s.do(blockio.Request{Op: blockio.Read, File: f, Bufs: [][]byte{s.buf[:f.Size()]}})
	case "write":
		return s.do(blockio.Request{Op: blockio.Write, File: f, Offset: n * blockio.Align, Bufs: [][]byte{s.letters(words[3:])}})
	}
	s.Fatalf("unknown call %s", words[0])
	return nil
}

func (s *transcript) scan(word string, n *int64) {
	if _, err := fmt.Sscan(word, n); err != nil {
		s.Fatalf("%q: %v", word, err)
	}
}

func (s *transcript) do(r blockio.Request) error {
	batch := []blockio.Request{r}
	if err := s.dev.Do(s.Context(), batch); err != nil {
		return err
	}
	return batch[0].Err
}

// letters fills one sector per letter; a single letter fills a page.
func (s *transcript) letters(words []string) []byte {
	letters := strings.Join(words, "")
	if len(letters) == 1 {
		letters = strings.Repeat(letters, sectorsPerPage)
	}
	buf := s.buf[:len(letters)*sectorBytes]
	for i := range buf {
		buf[i] = letters[i/sectorBytes]
	}
	return buf
}

func (s *transcript) crash(d *datadriven.TestData, out *strings.Builder) {
	var seeds []uint64
	for _, arg := range d.CmdArgs {
		for _, val := range strings.Split(strings.Join(arg.Vals, ","), ",") {
			var seed int64
			s.scan(val, &seed)
			seeds = append(seeds, uint64(seed))
		}
	}
	for _, seed := range seeds {
		got := s.sectors(s.dev.Clone().Crash(seed))
		var files []string
		for _, name := range slices.Sorted(maps.Keys(got)) {
			files = append(files, name+" ["+picture(got[name])+"]")
		}
		if files == nil {
			files = []string{"nothing"}
		}
		fmt.Fprintf(out, "seed %d: %s\n", seed, strings.Join(files, "  "))
	}
}

func picture(sectors []byte) string {
	var out strings.Builder
	for i, v := range sectors {
		if i > 0 && i%sectorsPerPage == 0 {
			out.WriteByte(' ')
		}
		if v == 0 {
			v = '.'
		}
		out.WriteByte(v)
	}
	return out.String()
}
