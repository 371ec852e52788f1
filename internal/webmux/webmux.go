// Package webmux is an http.ServeMux that lists its patterns. A test tries each pattern of a process with
// each role, so that no path can be added without a row in the table of docs/access.md.
package webmux

import (
	"net/http"
	"slices"
)

// Mux is an http.ServeMux that lists its patterns. The zero Mux has none. Patterns are added before the first
// request; ServeHTTP and Patterns may then be called concurrently.
type Mux struct {
	mux      http.ServeMux
	patterns []string
}

// Handle adds a handler, as http.ServeMux does.
func (m *Mux) Handle(pattern string, h http.Handler) {
	m.mux.Handle(pattern, h)
	m.patterns = append(m.patterns, pattern)
}

// HandleFunc adds a handler, as http.ServeMux does.
func (m *Mux) HandleFunc(pattern string, h func(http.ResponseWriter, *http.Request)) {
	m.Handle(pattern, http.HandlerFunc(h))
}

// ServeHTTP implements http.Handler.
func (m *Mux) ServeHTTP(w http.ResponseWriter, r *http.Request) { m.mux.ServeHTTP(w, r) }

// Patterns returns the patterns of all handlers, sorted.
func (m *Mux) Patterns() []string { return slices.Sorted(slices.Values(m.patterns)) }
