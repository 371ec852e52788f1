// Package chart draws lines, steps and bars into PNG and SVG files: the figures of the reproduction
// and of the cluster demo. It is a thin layer over gonum's plot, which draws axes, ticks and text.
// The package adds one style for all figures, data as plain slices, and checks with clear errors.
//
// It is no plotting library: it has only the features that these figures need, and it computes
// nothing.
//
//	Chart{Kind, Series…} ── Write(w, PNG|SVG)
//	                    └── Save(dir, name) ── dir/name.png, dir/name.svg
//
//	Lines  y over x, points joined          Steps  y holds until the next x (a rate over time)
//	Bars   one group a category, one bar a series side by side
//
// Marks are vertical lines with names, for events in time. A NaN is a gap: it interrupts a line, and leaves out a bar. The colours are those of Okabe and
// Ito, which people with any colour vision can distinguish. From the seventh series on, the colours
// repeat with another dash pattern.
//
// The same Chart gives the same bytes. There is no lock and no state.
package chart
