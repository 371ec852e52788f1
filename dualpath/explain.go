package dualpath

import (
	"fmt"
	"strings"
	"time"
)

// maxNotes is the number of notes that are kept for one request. Later notes are only counted.
const maxNotes = 16

// Explanation is the record of one request: each decision with its inputs, in order.
type Explanation struct {
	Request RequestID
	Since   time.Duration
	// Lost counts notes beyond maxNotes.
	Lost  int
	notes [maxNotes]note
	n     int
}

// note is one line of an Explanation. The text is formatted when Lines is called.
type note struct {
	at     time.Duration
	format string
	args   [5]int
	n      int
}

// note adds a line to the explanation. The verbs of format take args in order; %s prints an
// argument as a Role.
func (x *Explanation) note(at time.Duration, format string, args ...int) {
	if x.n == maxNotes {
		x.Lost++
		return
	}
	l := &x.notes[x.n]
	x.n++
	l.at, l.format, l.n = at, format, copy(l.args[:], args)
}

// Line is the text of one decision, and the time of the decision.
type Line struct {
	At   time.Duration
	Text string
}

// Lines returns the record as text.
func (x *Explanation) Lines() []Line {
	out := make([]Line, 0, x.n)
	for i := range x.n {
		l := &x.notes[i]
		args := make([]any, l.n)
		verbs := verbsOf(l.format)
		for j := range args {
			args[j] = l.args[j]
			if j < len(verbs) && verbs[j] == 's' {
				args[j] = Role(l.args[j]).String()
			}
		}
		out = append(out, Line{l.at, fmt.Sprintf(l.format, args...)})
	}
	return out
}

// verbsOf returns the verbs of a format string. The verbs must have no flags or widths.
func verbsOf(format string) []byte {
	var verbs []byte
	for i := 0; i+1 < len(format); i++ {
		if format[i] == '%' {
			verbs = append(verbs, format[i+1])
			i++
		}
	}
	return verbs
}

// String returns the record as text, with times in seconds.
func (x *Explanation) String() string {
	var b strings.Builder
	for _, l := range x.Lines() {
		fmt.Fprintf(&b, "%8.3f  %s\n", l.At.Seconds(), l.Text)
	}
	if x.Lost > 0 {
		fmt.Fprintf(&b, "          and %d more\n", x.Lost)
	}
	return b.String()
}

// Explain returns the record of a request, if the request is among the last Options.MaxExplain
// submitted ones.
func (p *Planner) Explain(id RequestID) (Explanation, bool) {
	x := p.explained.byID[id]
	if x == nil {
		return Explanation{}, false
	}
	return *x, true
}

// explainRing holds the last explanations.
type explainRing struct {
	ring []*Explanation
	at   int
	byID map[RequestID]*Explanation
}

// newExplainRing returns a ring with room for n explanations.
func newExplainRing(n int) explainRing {
	return explainRing{ring: make([]*Explanation, n), byID: make(map[RequestID]*Explanation, n)}
}

// next adds an explanation for a new request to the ring, removes the oldest if the ring is full,
// and returns the new one.
func (q *explainRing) next(id RequestID, now time.Duration) *Explanation {
	x := &Explanation{Request: id, Since: now}
	if len(q.ring) == 0 {
		return x
	}
	if old := q.ring[q.at]; old != nil && q.byID[old.Request] == old {
		delete(q.byID, old.Request)
	}
	q.ring[q.at] = x
	q.at = (q.at + 1) % len(q.ring)
	q.byID[id] = x
	return x
}

// explainOrder notes why a request is granted next, if the request has a tenant or a priority.
func (p *Planner) explainOrder(r *request) {
	f := r.flow
	switch {
	case r.Tenant == "" && r.Priority == 0:
	case f == f.level.replanned:
		r.why.note(p.now, "next of priority %d: planned anew before; %d more of the priority wait", r.Priority, f.level.waiting-1)
	default:
		r.why.note(p.now, "next of priority %d: work granted to its tenant, by weight, is the least (%d; virtual time %d); %d more of the tenant wait, %d of the priority",
			r.Priority, int(f.served), int(f.level.virtual), f.waiting-1, f.level.waiting-1)
	}
}

// explainPrefill notes why a prefill engine was chosen, and the numbers of engines in each
// category.
func (p *Planner) explainPrefill(r *request, g *group, en *engine, cat class, ps *pools) {
	if cat == shortQueue {
		r.why.note(p.now, "prefill engine %d: least tokens (%d) of %d with a short reading queue; %d more with a long one, of %d in the group",
			int(en.id), en.tok, len(ps.heaps[shortQueue]), len(ps.heaps[longQueue]), len(g.engines))
		return
	}
	r.why.note(p.now, "prefill engine %d: least tokens (%d) of %d with a long reading queue (here %d); none of %d has a short one and room",
		int(en.id), en.tok, len(ps.heaps[longQueue]), en.node.queue, len(g.engines))
}

// explainDecode notes why a decode engine was chosen.
func (p *Planner) explainDecode(r *request, pe *engine, c *decodeChoice) {
	en, n := c.engine, r.decodeLen()
	switch {
	case p.opts.Network != nil:
		r.why.note(p.now, "decode engine %d on node %d: transfer from node %d, wait and first step take %d us, the least of all with room",
			int(en.id), int(en.node.id), int(pe.node.id), int(c.seconds*1e6))
	case c.high:
		r.why.note(p.now, "decode engine %d: least tokens (%d); with %d more every one with room is above Z = %d (%d queued fit)",
			int(en.id), en.tok, n, int(c.z), c.fitting)
	default:
		r.why.note(p.now, "decode engine %d: fewest requests (%d) of those that stay below Z = %d with %d tokens more (%d queued fit)",
			int(en.id), en.seq, int(c.z), n, c.fitting)
	}
}
