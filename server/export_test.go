package server

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// EndAgainAfter sets the time after which EndRemovedSessions passes over the sessions again.
func (s *Server) EndAgainAfter(d time.Duration) { s.later.after = d }

// Patterns returns the patterns of the HTTP listener.
func (s *Server) Patterns() []string { return s.routes().Patterns() }

// Patterns returns the patterns of the HTTP listener.
func (n *PlannerNode) Patterns() []string { return n.routes(prometheus.NewRegistry()).Patterns() }

// Patterns returns the patterns of the HTTP listener.
func (n *FrontNode) Patterns() []string { return n.routes(prometheus.NewRegistry()).Patterns() }
