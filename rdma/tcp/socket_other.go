//go:build !linux

package tcp

import (
	"log/slog"
	"syscall"
)

// usableCongestion: only Linux lets a socket choose.
func usableCongestion(string, *slog.Logger) string { return "system" }

// control has nothing to prepare.
func (e *Engine) control(_, _ string, _ syscall.RawConn) error { return nil }
