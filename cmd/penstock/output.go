package main

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"unicode"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/penstock-kv/penstock/kv"
)

const (
	formatTable = "table"
	formatJSON  = "json"
)

// formatFlag is --format. It refuses unknown formats when it is parsed.
type formatFlag struct{ value string }

func (f *formatFlag) String() string { return f.value }
func (f *formatFlag) Type() string   { return "table|json" }

func (f *formatFlag) Set(s string) error {
	if s != formatTable && s != formatJSON {
		return fmt.Errorf("%q is neither table nor json", s)
	}
	f.value = s
	return nil
}

func addFormatFlag(root *cobra.Command, w world) {
	f := &formatFlag{value: formatTable}
	var wrong error
	if env := w.env("PENSTOCK_FORMAT"); env != "" {
		wrong = f.Set(env)
	}
	root.PersistentFlags().Var(f, "format", "how results are printed (environment: PENSTOCK_FORMAT)")
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error {
		if wrong != nil && !cmd.Flag("format").Changed {
			return usagef("PENSTOCK_FORMAT: %w", wrong)
		}
		return checkFlags(cmd.Flags())
	}
	completeValues(root, "format", formatTable, formatJSON)
}

// output prints the results of one command.
type output struct {
	w    io.Writer
	json bool
}

func outputOf(cmd *cobra.Command) output {
	f := cmd.Flag("format")
	return output{w: cmd.OutOrStdout(), json: f != nil && f.Value.String() == formatJSON}
}

// emit prints v as JSON, or calls print to print a table.
func (o output) emit(v any, print func(t *table)) error {
	if o.json {
		return o.emitJSON(v, "  ")
	}
	t := &table{tabwriter.NewWriter(o.w, 0, 8, 2, ' ', 0)}
	print(t)
	return t.Flush()
}

// emitLine prints v as one line of JSON, for streams.
func (o output) emitLine(v any) error { return o.emitJSON(v, "") }

func (o output) emitJSON(v any, indent string) error {
	if m, ok := v.(proto.Message); ok {
		v = plain(m.ProtoReflect())
	}
	enc := json.NewEncoder(o.w)
	enc.SetIndent("", indent)
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

// table aligns columns.
type table struct{ *tabwriter.Writer }

// row prints one row of cells. Control characters are replaced by a question mark: names of nodes, owners of pins and
// other texts come from other machines, and must not add rows or control the terminal.
func (t *table) row(cells ...any) {
	text := make([]string, len(cells))
	for i, c := range cells {
		text[i] = strings.Map(func(r rune) rune {
			if unicode.IsControl(r) {
				return '?'
			}
			return r
		}, fmt.Sprint(c))
	}
	fmt.Fprintln(t, strings.Join(text, "\t"))
}

// pair prints a name and its value, unless the value is empty.
func (t *table) pair(name string, value any) {
	if s := fmt.Sprint(value); s != "" {
		t.row(name, s)
	}
}

// size returns a number of bytes as text for a table.
func size(bytes int64) string {
	if bytes < 0 {
		return "-" + size(-bytes)
	}
	return humanize.IBytes(uint64(bytes))
}

// count returns a number as text for a table.
func count[T ~int | ~int64 | ~uint32 | ~uint64](n T) string { return humanize.Comma(int64(n)) }

// plain converts a message to values for encoding/json, with the field names of the .proto file.
// All numbers are JSON numbers (protojson would write 64-bit numbers as strings). Bytes become
// hexadecimal text, a list of block ids becomes a list of texts of 32 digits, and an enumeration
// becomes its last word in lower case.
func plain(m protoreflect.Message) map[string]any {
	out := make(map[string]any)
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if f.Name() == "salt" { // a secret; only its length is shown, as in tables
			out["salt_bytes"] = len(m.Get(f).Bytes())
			continue
		}
		out[string(f.Name())] = plainField(f, m.Get(f), m.Has(f))
	}
	return out
}

func plainField(f protoreflect.FieldDescriptor, v protoreflect.Value, has bool) any {
	if !f.IsList() {
		if f.Kind() == protoreflect.MessageKind && !has {
			return nil
		}
		return plainValue(f, v)
	}
	list := make([]any, v.List().Len())
	for i := range list {
		list[i] = plainValue(f, v.List().Get(i))
	}
	return list
}

func plainValue(f protoreflect.FieldDescriptor, v protoreflect.Value) any {
	switch f.Kind() {
	case protoreflect.MessageKind:
		return plain(v.Message())
	case protoreflect.EnumKind:
		return enumWord(f.Enum(), v.Enum())
	case protoreflect.BytesKind:
		if f.Name() == "block_ids" {
			return splitIDs(v.Bytes())
		}
		return hex.EncodeToString(v.Bytes())
	}
	return v.Interface()
}

// enumWord returns "full" for GROUP_KIND_FULL, and "" for the zero value.
func enumWord(e protoreflect.EnumDescriptor, n protoreflect.EnumNumber) string {
	if n == 0 {
		return ""
	}
	v := e.Values().ByNumber(n)
	if v == nil {
		return fmt.Sprint(n)
	}
	zero := string(e.Values().ByNumber(0).Name())
	return strings.ToLower(strings.TrimPrefix(string(v.Name()), strings.TrimSuffix(zero, "UNSPECIFIED")))
}

func splitIDs(b []byte) []string {
	ids := []string{}
	for len(b) >= kv.BlockIDSize {
		ids = append(ids, hex.EncodeToString(b[:kv.BlockIDSize]))
		b = b[kv.BlockIDSize:]
	}
	return ids
}
