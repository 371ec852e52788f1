package storage

import (
	"maps"
	"slices"

	"github.com/penstock-kv/penstock/kv"
)

// maxEnded is the number of deleted names whose last epochs the catalogue has.
const maxEnded = 1024

// endedNames has the last epochs of deleted namespaces. A new namespace begins above the last epoch of
// its name, so that no request of a client that still has the deleted namespace's definition is a
// request for a live epoch. The size is bounded: beyond maxEnded, or if the catalogue has no room, the names
// with the lowest epochs are replaced by a floor, which then holds for every name.
type endedNames struct {
	names map[string]kv.Epoch
	// floor is at least the last epoch of each deleted name that is not in names. All epochs in names are
	// above floor.
	floor kv.Epoch
}

// last returns an epoch that is not below the last one of any deleted namespace of this name.
func (e *endedNames) last(name string) kv.Epoch { return max(e.floor, e.names[name]) }

// add records the deletion of a namespace.
func (e *endedNames) add(ns kv.Namespace) {
	if ns.Epoch <= e.last(ns.Name) {
		return
	}
	if e.names == nil {
		e.names = make(map[string]kv.Epoch)
	}
	e.names[ns.Name] = ns.Epoch
	if len(e.names) > maxEnded {
		e.raise(slices.Min(slices.Collect(maps.Values(e.names))))
	}
}

// raise replaces the names with epochs up to floor by floor.
func (e *endedNames) raise(floor kv.Epoch) {
	e.floor = max(e.floor, floor)
	maps.DeleteFunc(e.names, func(_ string, last kv.Epoch) bool { return last <= e.floor })
}

// halve replaces half of the names, those with the lowest epochs, by a floor. It returns false if there is
// no name.
func (e *endedNames) halve() bool {
	if len(e.names) == 0 {
		return false
	}
	e.raise(slices.Sorted(maps.Values(e.names))[(len(e.names)-1)/2])
	return true
}

// without returns the names, except the names of namespaces with later epochs, whose own epochs suffice.
func (e *endedNames) without(namespaces []kv.Namespace) map[string]kv.Epoch {
	names := maps.Clone(e.names)
	for _, ns := range namespaces {
		if last, ok := names[ns.Name]; ok && ns.Epoch > last {
			delete(names, ns.Name)
		}
	}
	return names
}
