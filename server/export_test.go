package server

import "time"

// EndAgainAfter sets the time after which EndRemovedSessions passes over the sessions again.
func (s *Server) EndAgainAfter(d time.Duration) { s.later.after = d }
