package server

import (
	"log/slog"
	"slices"
	"strings"
	"sync"

	"github.com/penstock-kv/penstock/server/console"
)

// actionsKept is the number of administrators' calls that the console shows.
const actionsKept = 256

// recentActions keeps the last calls of the audit log that changed state or failed to. It is full
// after actionsKept calls; a further one replaces the oldest.
type recentActions struct {
	mu   sync.Mutex
	ring []console.Action
	next int // the index of the oldest, while the ring is full
}

func (r *recentActions) add(a console.Action) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.ring) < actionsKept {
		r.ring = append(r.ring, a)
		return
	}
	r.ring[r.next] = a
	r.next = (r.next + 1) % actionsKept
}

// list returns the calls, the newest first.
func (r *recentActions) list() []console.Action {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := slices.Concat(r.ring[r.next:], r.ring[:r.next])
	slices.Reverse(all)
	return all
}

// attrsText returns attributes as in a line of the log.
func attrsText(attrs []slog.Attr) string {
	words := make([]string, len(attrs))
	for i, a := range attrs {
		words[i] = a.String()
	}
	return strings.Join(words, " ")
}
