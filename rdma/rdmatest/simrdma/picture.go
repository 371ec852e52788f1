package simrdma

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/penstock-kv/penstock/rdma/group"
)

// String draws the fabric: each NIC, each of its endpoints with its peer, and each Work in
// flight with its state.
//
//	seed 7 at 1.2ms: 2 events to come, the next at 1.3ms
//	a/0  2 to poll, 4 buffers lent
//	  a/0#1 → b/0#1 kv  7 posted, 2 unpolled
//	    #5 writeImm 4096 B  landing 2/3
//	    #6 write 100 B      on its way
//	b/0  dead: …
func (f *Fabric) String() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d at %v: %d events to come", f.seed, f.now(), len(f.events))
	if len(f.events) > 0 {
		fmt.Fprintf(&b, ", the next at %v", f.events[0].at)
	}
	b.WriteByte('\n')
	for _, name := range slices.Sorted(maps.Keys(f.nics)) {
		f.nics[name].drawLocked(&b)
	}
	return b.String()
}

func (d *Domain) drawLocked(b *strings.Builder) {
	fmt.Fprintf(b, "%s  %d to poll, %d buffers lent", d.opts.Name, d.completions.len(), len(d.receives))
	if d.dead {
		fmt.Fprintf(b, ", dead: %v", d.why)
	}
	b.WriteByte('\n')
	for _, n := range slices.Sorted(maps.Keys(d.endpoints)) {
		e := d.endpoints[n]
		fmt.Fprintf(b, "  %v → %v %v  %d posted, %d unpolled", e, e.peer, e.class, e.posted, e.unpolled)
		for _, s := range []struct {
			name string
			is   bool
		}{{"refusing", e.refusing}, {"broken", e.broken}, {"shut", e.shut}, {"closed", e.closed}} {
			if s.is {
				b.WriteString(", " + s.name)
			}
		}
		b.WriteByte('\n')
		for _, fl := range e.flying {
			fl.draw(b)
		}
	}
}

// draw writes one line about a Work.
func (fl *flight) draw(b *strings.Builder) {
	op := map[group.Op]string{group.OpWrite: "write", group.OpWriteImm: "writeImm", group.OpSend: "send"}[fl.work.Op]
	where := "on its way"
	switch {
	case fl.landed:
		where = "answered"
	case fl.over:
		where = "waits for those before it"
	case fl.accepted:
		where = fmt.Sprintf("landing, %b of %d", fl.placed, fl.pieces)
	case fl.arrived:
		where = "arrived"
	}
	if fl.refused() {
		where += fmt.Sprintf(", refused: %v", fl.why)
	}
	if fl.ghost {
		where += ", a ghost"
	}
	if fl.unanswered != noAlarm {
		where += fmt.Sprintf(", no answer since %v", fl.unanswered.Round(time.Microsecond))
	}
	fmt.Fprintf(b, "    #%d %s %d B  %s\n", fl.number, op, fl.work.Len, where)
}
