package yamlfile

import (
	"bytes"
	"encoding"
	"errors"
	"fmt"
	"io"
	"math"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// SizeMax is the maximum size of a file in bytes. Files written by hand are smaller.
const SizeMax = 1 << 20

// Error is an error at one position.
type Error struct {
	File string
	// Line is the number of the line, from 1; 0 means the whole file.
	Line int
	// Path is the dotted path of the key, "" for the whole file.
	Path string
	Text string
}

// Error returns file:line: path: text.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(e.File)
	if e.Line > 0 {
		fmt.Fprintf(&b, ":%d", e.Line)
	}
	if e.Path != "" {
		b.WriteString(": " + e.Path)
	}
	return b.String() + ": " + e.Text
}

// File is one parsed document.
type File struct {
	name string
	root *yaml.Node // nil: empty
}

// Parse reads the one document of raw, of SizeMax bytes at most. Errors use name for the file.
func Parse(name string, raw []byte) (*File, error) { return ParseAtMost(name, raw, SizeMax) }

// ParseAtMost is Parse with another maximum size, sizeMax bytes, for a file that a program may have
// written.
func ParseAtMost(name string, raw []byte, sizeMax int) (*File, error) {
	if len(raw) > sizeMax {
		return nil, &Error{File: name, Text: fmt.Sprintf("%d bytes long; at most %d are read", len(raw), sizeMax)}
	}
	f := &File{name: name}
	dec := yaml.NewDecoder(bytes.NewReader(raw))
	var doc yaml.Node
	if err := dec.Decode(&doc); errors.Is(err, io.EOF) {
		return f, nil
	} else if err != nil {
		return nil, f.reword(err)
	}
	f.root = doc.Content[0]
	if err := dec.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return nil, &Error{File: name, Text: "more than one YAML document; remove what follows the second ---"}
	}
	return f, nil
}

// Decode stores the document in v, a pointer to a struct that holds its defaults. Only keys with a
// yaml tag in the struct are accepted.
func (f *File) Decode(v any) error {
	if f.root == nil {
		return nil
	}
	if err := f.check(f.root, reflect.TypeOf(v).Elem(), "", 0); err != nil {
		return err
	}
	if err := f.root.Decode(v); err != nil {
		return f.reword(err)
	}
	return nil
}

// Errorf returns an error about the key at path, such as "clusters.0.gpus". If the file does not
// have the key, the error has the line of the nearest parent of the key.
func (f *File) Errorf(path, format string, args ...any) error {
	return &Error{File: f.name, Line: f.line(path), Path: path, Text: fmt.Sprintf(format, args...)}
}

// Has reports whether the file has the key at path.
func (f *File) Has(path string) bool {
	n, whole := f.find(path)
	return n != nil && whole
}

func (f *File) line(path string) int {
	if n, _ := f.find(path); n != nil {
		return n.Line
	}
	return 0
}

// find returns the node of the key at path and true. If the key is missing, it returns the node of
// its nearest parent and false.
func (f *File) find(path string) (*yaml.Node, bool) {
	n, at := f.root, f.root
	if path == "" || n == nil {
		return n, true
	}
	for part := range strings.SplitSeq(path, ".") {
		key, value := child(n, part)
		if value == nil {
			return at, false
		}
		n, at = value, key
	}
	return at, true
}

// child returns the key and the value of one part of a path.
func child(n *yaml.Node, part string) (key, value *yaml.Node) {
	n = resolve(n)
	switch n.Kind {
	case yaml.MappingNode:
		for i := 0; i+1 < len(n.Content); i += 2 {
			if n.Content[i].Value == part {
				return n.Content[i], n.Content[i+1]
			}
		}
	case yaml.SequenceNode:
		if i, err := strconv.Atoi(part); err == nil && i >= 0 && i < len(n.Content) {
			return n.Content[i], n.Content[i]
		}
	}
	return nil, nil
}

func resolve(n *yaml.Node) *yaml.Node {
	for n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	return n
}

// depthMax is the maximum depth of nested values. A limit is needed because a YAML alias may
// contain itself.
const depthMax = 32

var unmarshaler = reflect.TypeFor[yaml.Unmarshaler]()

// check compares the document with the type into which it will be decoded.
func (f *File) check(n *yaml.Node, t reflect.Type, path string, depth int) error {
	if depth > depthMax {
		return &Error{File: f.name, Line: n.Line, Path: path, Text: fmt.Sprintf("nested more than %d deep", depthMax)}
	}
	n = resolve(n)
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if reflect.PointerTo(t).Implements(unmarshaler) {
		return nil
	}
	switch {
	case n.Kind == yaml.ScalarNode:
		return f.checkScalar(n, t, path)
	case n.Kind == yaml.MappingNode && t.Kind() == reflect.Struct:
		return f.checkStruct(n, t, path, depth)
	case n.Kind == yaml.MappingNode && t.Kind() == reflect.Map:
		for i := 0; i+1 < len(n.Content); i += 2 {
			if err := f.check(n.Content[i+1], t.Elem(), join(path, n.Content[i].Value), depth+1); err != nil {
				return err
			}
		}
	case n.Kind == yaml.SequenceNode && (t.Kind() == reflect.Slice || t.Kind() == reflect.Array):
		for i, c := range n.Content {
			if err := f.check(c, t.Elem(), join(path, strconv.Itoa(i)), depth+1); err != nil {
				return err
			}
		}
	default:
		return &Error{File: f.name, Line: n.Line, Path: path, Text: fmt.Sprintf("is %s; write %s", kindWord(n.Kind), typeWord(t))}
	}
	return nil
}

func (f *File) checkScalar(n *yaml.Node, t reflect.Type, path string) error {
	if n.Tag == "!!null" {
		return &Error{File: f.name, Line: n.Line, Path: path, Text: "has no value; give one, or leave the key out"}
	}
	if t == reflect.TypeFor[time.Duration]() && n.Tag != "!!str" && n.Value != "0" {
		return &Error{File: f.name, Line: n.Line, Path: path, Text: fmt.Sprintf("is %q, without a unit; write %s", n.Value, typeWord(t))}
	}
	if u, ok := reflect.New(t).Interface().(encoding.TextUnmarshaler); ok {
		if err := u.UnmarshalText([]byte(n.Value)); err != nil {
			return &Error{File: f.name, Line: n.Line, Path: path, Text: err.Error()}
		}
		return nil
	}
	switch t.Kind() {
	case reflect.Struct, reflect.Map, reflect.Slice, reflect.Array:
		return &Error{File: f.name, Line: n.Line, Path: path, Text: fmt.Sprintf("is %q; write %s", n.Value, typeWord(t))}
	case reflect.Float32, reflect.Float64:
		var v float64
		if err := n.Decode(&v); err != nil {
			return &Error{File: f.name, Line: n.Line, Path: path, Text: fmt.Sprintf("is %q; write %s", n.Value, typeWord(t))}
		}
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return &Error{File: f.name, Line: n.Line, Path: path, Text: fmt.Sprintf("is %s; write a finite number", n.Value)}
		}
	default:
		var v float64
		cut := n.Tag == "!!float" && n.Decode(&v) == nil && v != math.Trunc(v) // an integer field would lose the fraction
		if err := n.Decode(reflect.New(t).Interface()); err != nil || cut && t.Kind() != reflect.String {
			return &Error{File: f.name, Line: n.Line, Path: path, Text: fmt.Sprintf("is %q; write %s", n.Value, typeWord(t))}
		}
	}
	return nil
}

func (f *File) checkStruct(n *yaml.Node, t reflect.Type, path string, depth int) error {
	fields := keysOf(t)
	first := make(map[string]int)
	for i := 0; i+1 < len(n.Content); i += 2 {
		key := n.Content[i]
		j := slices.IndexFunc(fields, func(f field) bool { return f.key == key.Value })
		if j < 0 {
			return &Error{File: f.name, Line: key.Line, Path: path, Text: fmt.Sprintf("unknown key %q; %s", key.Value, remedy(key.Value, fields))}
		}
		if line, ok := first[key.Value]; ok {
			return &Error{File: f.name, Line: key.Line, Path: path, Text: fmt.Sprintf("key %q stands in line %d already; remove one", key.Value, line)}
		}
		first[key.Value] = key.Line
		if err := f.check(n.Content[i+1], fields[j].typ, join(path, key.Value), depth+1); err != nil {
			return err
		}
	}
	return nil
}

type field struct {
	key string
	typ reflect.Type
}

// keysOf returns the keys of a struct, in the order of its fields.
func keysOf(t reflect.Type) []field {
	var out []field
	for i := range t.NumField() {
		key, _, _ := strings.Cut(t.Field(i).Tag.Get("yaml"), ",")
		if key != "" && key != "-" {
			out = append(out, field{key, t.Field(i).Type})
		}
	}
	return out
}

// remedy lists the valid keys, and suggests the most similar one.
func remedy(given string, fields []field) string {
	known := make([]string, len(fields))
	best, distance := "", 3
	for i, f := range fields {
		known[i] = f.key
		if d := edits(given, f.key); d < distance {
			best, distance = f.key, d
		}
	}
	text := "known are " + strings.Join(known, ", ")
	if best != "" {
		text = fmt.Sprintf("did you mean %q? %s", best, text)
	}
	return text
}

// edits returns the number of characters to insert, delete or replace between a and b
// (Levenshtein), for words of moderate length.
func edits(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, diagonal+1)
		}
	}
	return row[len(b)]
}

func join(path, part string) string {
	if path == "" {
		return part
	}
	return path + "." + part
}

func kindWord(k yaml.Kind) string {
	if k == yaml.SequenceNode {
		return "a list"
	}
	return "a mapping"
}

func typeWord(t reflect.Type) string {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch t.Kind() {
	case reflect.Struct, reflect.Map:
		return "a mapping of keys"
	case reflect.Slice, reflect.Array:
		return "a list"
	case reflect.Float32, reflect.Float64:
		return "a number"
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		if t.PkgPath() == "time" {
			return "a duration such as 30s or 1m30s"
		}
		return "a whole number"
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return "a whole number, 0 or above"
	case reflect.Bool:
		return "true or false"
	}
	return "text"
}

var yamlLine = regexp.MustCompile(`^(?:yaml: )?line (\d+): `)

// reword converts an error of the YAML library to an Error, with file and line.
func (f *File) reword(err error) error {
	text := err.Error()
	var typed *yaml.TypeError
	if errors.As(err, &typed) && len(typed.Errors) > 0 {
		text = typed.Errors[0]
	}
	e := &Error{File: f.name, Text: strings.TrimPrefix(text, "yaml: ")}
	if m := yamlLine.FindStringSubmatch(text); m != nil {
		e.Line, _ = strconv.Atoi(m[1]) // cannot fail: the pattern admits only digits
		e.Text = text[len(m[0]):]
	}
	return e
}
