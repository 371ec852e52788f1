package planner

import (
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/dualpath"
)

// names assigns numbers to names, starting at 1. A number is never assigned to another name,
// because an old action may contain the number.
type names struct {
	what string
	ids  map[string]uint32
	list []string
}

func newNames(what string) names {
	return names{what: what, ids: make(map[string]uint32), list: []string{""}}
}

// id returns the number of a name. A new name gets the next number.
func (n *names) id(name string) (uint32, error) {
	if id, ok := n.ids[name]; ok {
		return id, nil
	}
	if name == "" || len(name) > maxNameBytes {
		return 0, status.Errorf(codes.InvalidArgument, "a name among the %s has %d bytes; it must have 1 to %d", n.what, len(name), maxNameBytes)
	}
	if len(n.list) > maxNames {
		return 0, status.Errorf(codes.ResourceExhausted, "the planner has seen its maximum of %d names of %s since its start; use stable names, or restart the planner", maxNames, n.what)
	}
	id := uint32(len(n.list))
	n.ids[name] = id
	n.list = append(n.list, name)
	return id, nil
}

// of returns the name of a number, or "" if the number was not assigned.
func (n *names) of(id uint32) string {
	if int(id) >= len(n.list) {
		return ""
	}
	return n.list[id]
}

// recent holds the last requests by name, for Explain and Recent.
type recent struct {
	ring   []named
	at     int
	byName map[string]dualpath.RequestID
}

// named is a request's name and number.
type named struct {
	name string
	id   dualpath.RequestID
}

func newRecent(n int) recent {
	return recent{ring: make([]named, max(n, 1)), byName: make(map[string]dualpath.RequestID, n)}
}

// last returns up to n requests, the newest first.
func (q *recent) last(n int) []named {
	var out []named
	for i := range min(n, len(q.ring)) {
		r := q.ring[(q.at-1-i+len(q.ring))%len(q.ring)]
		if r.name == "" {
			break
		}
		out = append(out, r)
	}
	return out
}

// add adds a request. It removes the oldest request if there is no room.
func (q *recent) add(name string, id dualpath.RequestID) {
	if old := q.ring[q.at]; q.byName[old.name] == old.id {
		delete(q.byName, old.name)
	}
	q.ring[q.at] = named{name, id}
	q.at = (q.at + 1) % len(q.ring)
	q.byName[name] = id
}
