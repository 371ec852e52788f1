package rounds

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/penstock-kv/penstock/internal/chart"
)

// interval is the length of an interval of the hit rate.
const interval = 250 * time.Millisecond

// sample adds a read of a whole sequence, of which blocks were found.
func (s *space) sample(at time.Duration, blocks int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := int(at / interval)
	for len(s.wanted) <= i {
		s.wanted, s.found = append(s.wanted, 0), append(s.found, 0)
	}
	s.found[i] += float64(blocks)
	s.wanted[i] += sequenceBlocks
}

// hitRate returns the hit rate in percent of each interval in [from, to), NaN without a read, and the
// times of the intervals in seconds after from.
func (s *space) hitRate(from, to time.Duration) (x, y []float64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	first := int(from / interval)
	for i := first; i < min(int(to/interval), len(s.wanted)); i++ {
		x = append(x, float64(i-first)*interval.Seconds())
		if s.wanted[i] == 0 {
			y = append(y, math.NaN())
			continue
		}
		y = append(y, 100*s.found[i]/s.wanted[i])
	}
	return x, y
}

// report is the results of the rounds.
type report struct {
	dir  string
	load *load
	rows []row
}

// row is one round.
type row struct {
	name, detail string
	began, ended time.Duration
	counts       []tally // by namespace
}

// add adds a round to the report. before has the counts at its beginning.
func (r *report) add(name, detail string, began, ended time.Duration, before []tally) {
	one := row{name: name, detail: detail, began: began, ended: ended}
	for i, s := range r.load.spaces {
		one.counts = append(one.counts, s.tally().minus(before[i]))
	}
	r.rows = append(r.rows, one)
}

// table returns a line for each round: how long it took, its calls by outcome, and for each namespace
// the lowest hit rate of an interval and that of the last one.
func (r *report) table() string {
	var b strings.Builder
	b.WriteString("round\tfault\tvictim\tseconds\t" + strings.Join(outcomeNames[:], "\t"))
	for _, s := range r.load.spaces {
		fmt.Fprintf(&b, "\tlowest hit rate of %s\tlast", s.name)
	}
	b.WriteByte('\n')
	for i, one := range r.rows {
		fmt.Fprintf(&b, "%d\t%s\t%s\t%.1f", i+1, one.name, one.detail, (one.ended - one.began).Seconds())
		var sum tally
		for _, c := range one.counts {
			for o := range c {
				sum[o] += c[o]
			}
		}
		for _, n := range sum {
			fmt.Fprintf(&b, "\t%d", n)
		}
		for _, s := range r.load.spaces {
			lowest, last := math.NaN(), math.NaN()
			_, rates := s.hitRate(one.began, one.ended)
			for _, y := range rates {
				if math.IsNaN(lowest) || y < lowest {
					lowest = y
				}
				if !math.IsNaN(y) {
					last = y
				}
			}
			fmt.Fprintf(&b, "\t%.0f\t%.0f", lowest, last)
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// write writes rounds.tsv, the events, and a figure for each round.
func (r *report) write(seed uint64, events []string) error {
	if r.dir == "" {
		return nil
	}
	if err := os.MkdirAll(r.dir, 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(r.dir, "rounds.tsv"), []byte(r.table()), 0o644); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(r.dir, "events.txt"), []byte(strings.Join(events, "\n")+"\n"), 0o644); err != nil {
		return err
	}
	for i, one := range r.rows {
		figure := chart.Chart{Title: fmt.Sprintf("Seed %d, round %d: %s (%s)", seed, i+1, one.name, one.detail), XLabel: "time (s)", YLabel: "hit rate (%)", Kind: chart.Steps}
		for _, s := range r.load.spaces {
			x, y := s.hitRate(one.began, one.ended)
			if len(x) > 0 {
				figure.Series = append(figure.Series, chart.Series{Name: fmt.Sprintf("%s, replicas %d", s.name, s.replicas), X: x, Y: y})
			}
		}
		var svg bytes.Buffer
		if err := figure.Write(&svg, chart.SVG); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(r.dir, fmt.Sprintf("round-%03d.svg", i+1)), svg.Bytes(), 0o644); err != nil {
			return err
		}
	}
	return nil
}
