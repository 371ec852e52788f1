// Package screen draws the frames of package top: State is the state of the screen, Press applies a
// key to it, and Lines returns the lines for a size. All three are pure.
//
//	terminal ── bytes ──► Keys ── Key ──► State.Press
//	                                          │
//	nodes ──► top.Meter ── top.Frame ──► State.Frame
//	                                          │
//	terminal ◄── Line.ANSI ◄── Line ◄── State.Lines(width, height)
//
// A line is never longer than the width. Columns that do not fit are left out, the last first; the
// first column and the sort column stay. Each state is written as a word, so that colour is never
// the only sign. Text from nodes cannot contain control characters.
//
// Table returns all rows and columns as plain lines, for pipes.
package screen
