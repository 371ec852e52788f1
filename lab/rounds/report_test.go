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
// the lowest hit rate of an interval, that of the last one, and the seconds after which it is full.
func (r *report) table() string {
	var b strings.Builder
	b.WriteString("round\tfault\tvictim\tseconds\t" + strings.Join(outcomeNames[:], "\t"))
	for _, s := range r.load.spaces {
		fmt.Fprintf(&b, "\tlowest hit rate of %s\tlast\tseconds until %d", s.name, full)
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
			fmt.Fprintf(&b, "\t%.0f\t%.0f\t%.2f", lowest, last, s.recovered(one).Seconds())
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// write writes rounds.tsv, the events, hit-rate.svg, and a figure for each round.
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
	if err := r.draw(seed); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(r.dir, "events.txt"), []byte(strings.Join(events, "\n")+"\n"), 0o644); err != nil {
		return err
	}
	for i, one := range r.rows {
		figure := r.figure(fmt.Sprintf("Seed %d, round %d: %s (%s)", seed, i+1, one.name, one.detail), one.began, one.ended)
		if err := save(figure, filepath.Join(r.dir, fmt.Sprintf("round-%03d.svg", i+1))); err != nil {
			return err
		}
	}
	return nil
}

// draw writes hit-rate.svg, the hit rates of the namespaces without bumps over the first rounds.
func (r *report) draw(seed uint64) error {
	rows := r.rows[:min(len(r.rows), drawnRounds)]
	if len(rows) == 0 {
		return nil
	}
	first, last := rows[0].began, rows[len(rows)-1].ended
	figure := r.figure(fmt.Sprintf("Hit rate under faults, one after the other (seed %d)", seed), first, last)
	figure.Series = figure.Series[:min(len(figure.Series), 2)]
	figure.Width, figure.Height = 14, 4.5
	for _, one := range rows {
		name := one.name
		if one.name == restarts {
			name += " " + one.detail
		}
		figure.Marks = append(figure.Marks, chart.Mark{X: (one.began - first).Seconds(), Name: name})
	}
	return save(figure, filepath.Join(r.dir, "hit-rate.svg"))
}

// drawnRounds is the number of rounds in hit-rate.svg.
const drawnRounds = 12

// figure returns the hit rates of all namespaces in a span of time.
func (r *report) figure(title string, from, to time.Duration) chart.Chart {
	figure := chart.Chart{Title: title, XLabel: "time (s)", YLabel: "hit rate (%)", Kind: chart.Steps}
	for _, s := range r.load.spaces {
		x, y := s.hitRate(from, to)
		if len(x) > 0 {
			figure.Series = append(figure.Series, chart.Series{Name: fmt.Sprintf("%s, replicas %d", s.name, s.replicas), X: x, Y: y})
		}
	}
	return figure
}

func save(figure chart.Chart, path string) error {
	var svg bytes.Buffer
	if err := figure.Write(&svg, chart.SVG); err != nil {
		return err
	}
	return os.WriteFile(path, svg.Bytes(), 0o644)
}

// recovered returns the time from the beginning of a round to the last of its intervals with a hit rate
// below full percent.
func (s *space) recovered(one row) time.Duration {
	x, y := s.hitRate(one.began, one.ended)
	for i := len(y) - 1; i >= 0; i-- {
		if y[i] < full { // false for NaN
			return time.Duration((x[i] + interval.Seconds()) * float64(time.Second))
		}
	}
	return 0
}

// full is the hit rate, in percent, from which on a namespace counts as recovered.
const full = 90
