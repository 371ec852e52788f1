package screen

import (
	"strings"
	"unicode"
)

// Style is a set of attributes of text.
type Style uint8

// The attributes. Warn and Bad are colours.
const (
	Bold Style = 1 << iota
	Reverse
	Warn
	Bad
)

// Span is text of one style.
type Span struct {
	Text  string
	Style Style
}

// Line is one line of the screen.
type Line []Span

// String returns the text without styles.
func (l Line) String() string {
	var b strings.Builder
	for _, s := range l {
		b.WriteString(s.Text)
	}
	return b.String()
}

// attributes are the parameters of the escape sequence SGR.
var attributes = []struct {
	style  Style
	code   string
	colour bool
}{
	{Bold, "1", false}, {Reverse, "7", false}, {Warn, "33", true}, {Bad, "31", true},
}

// ANSI returns the text with escape sequences for its styles, without colours if colour is false.
func (l Line) ANSI(colour bool) string {
	var b strings.Builder
	for _, s := range l {
		codes := ""
		for _, a := range attributes {
			if s.Style&a.style != 0 && (colour || !a.colour) {
				codes += ";" + a.code
			}
		}
		if codes == "" {
			b.WriteString(s.Text)
			continue
		}
		b.WriteString("\x1b[" + codes[1:] + "m" + s.Text + "\x1b[0m")
	}
	return b.String()
}

// cut returns the first width characters of the line.
func (l Line) cut(width int) Line {
	var out Line
	for _, s := range l {
		runes := []rune(s.Text)
		if len(runes) >= width {
			return append(out, Span{string(runes[:width]), s.Style})
		}
		width -= len(runes)
		out = append(out, s)
	}
	return out
}

// clean replaces characters that do not print: text from a node must not control the terminal.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) || r == unicode.ReplacementChar {
			return '?'
		}
		return r
	}, s)
}

// fit returns s cut or padded to width characters, with its text at the left or at the right.
func fit(s string, width int, left bool) string {
	runes := []rune(s)
	if len(runes) > width {
		return string(runes[:max(0, width-1)]) + "…"
	}
	pad := strings.Repeat(" ", width-len(runes))
	if left {
		return s + pad
	}
	return pad + s
}
