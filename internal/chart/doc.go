// Package chart draws lines, steps and bars into PNG and SVG files: the figures
// of the reproduction and of the cluster demo. It is a thin layer over gonum's
// plot, which knows axes, ticks and fonts; what is here is one look for all
// figures, data as plain slices, and checks with words.
//
// It is no plotting library: what a figure of ours does not need is not here,
// and it computes nothing.
//
//	Chart{Kind, Series…} ── Write(w, PNG|SVG)
//	                    └── Save(dir, name) ── dir/name.png, dir/name.svg
//
//	Lines  y over x, points joined          Steps  y holds until the next x (a rate over time)
//	Bars   one group a category, one bar a series side by side
//
// A NaN is a gap: a line is broken there, a bar left out. Colours are those of
// Okabe and Ito, which people with any colour vision tell apart; the seventh
// series begins them again with another dash.
//
// The same Chart gives the same bytes. There is no lock and no state.
package chart
