package profile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// The constants of the DualPath paper, sections A.4 and 6.1.
const (
	alphaSeconds = 3
	betaSeconds  = 5
	zFactor      = 1.05
)

// Setting is one key below "schedule" in the planner's configuration, with its value. Comment is the
// reason for the value.
type Setting struct {
	Key     string  `json:"key"`
	Value   float64 `json:"value"`
	Comment string  `json:"comment"`
}

// text returns the value as YAML: an integer, except for a factor.
func (s Setting) text() string { return strconv.FormatFloat(s.Value, 'f', -1, 64) }

// Settings returns the planner's keys that follow from the measured rates, in tokens per second. A
// rate of 0 means not measured.
func Settings(readRate, prefillRate float64) []Setting {
	var out []Setting
	add := func(key string, value float64, comment string) { out = append(out, Setting{key, value, comment}) }
	if readRate > 0 {
		r := math.Max(1, math.Round(readRate))
		add("read_rate", r, "tokens a second that one storage NIC reads, measured")
		add("alpha", alphaSeconds*r, "tokens: 3 s of read_rate")
	}
	if prefillRate > 0 {
		r := math.Max(1, math.Round(prefillRate))
		add("prefill_rate", r, "tokens a second that one prefill engine computes, measured")
		add("beta", betaSeconds*r, "tokens: 5 s of prefill_rate")
	}
	if len(out) > 0 {
		add("z_factor", zFactor, "not measured: DualPath, section 6.1")
	}
	return out
}

// section is the section of the planner's configuration that has these settings.
const section = "schedule"

// Update sets the settings in the section schedule of a planner's configuration, which may be
// empty. All other content is kept, comments included.
func Update(name string, raw []byte, settings []Setting) ([]byte, error) {
	var doc yaml.Node
	var before []byte
	dec := yaml.NewDecoder(bytes.NewReader(raw))
	if err := dec.Decode(&doc); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if err := dec.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: more than one YAML document; remove the documents after the first", name)
	}
	if doc.Kind == 0 { // an empty file, or a file with only comments, has no document
		before = raw
		doc = yaml.Node{Kind: yaml.DocumentNode, Content: []*yaml.Node{{Kind: yaml.MappingNode}}}
	}
	top := doc.Content[0]
	if top.Kind != yaml.MappingNode {
		return nil, fmt.Errorf("%s:%d: a planner's configuration is a mapping of keys", name, top.Line)
	}
	part := valueOf(top, section)
	if part.Kind == yaml.ScalarNode && (part.Tag == "!!null" || part.Value == "" && part.Tag == "") {
		part.Kind, part.Tag, part.Value = yaml.MappingNode, "", ""
	}
	if part.Kind != yaml.MappingNode {
		return nil, fmt.Errorf("%s:%d: %s: it must be a mapping of keys", name, part.Line, section)
	}
	for _, s := range settings {
		v := valueOf(part, s.Key)
		head, foot := v.HeadComment, v.FootComment
		*v = yaml.Node{Kind: yaml.ScalarNode, Value: s.text(), LineComment: "# " + s.Comment, HeadComment: head, FootComment: foot}
	}
	var b strings.Builder
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	if err := errors.Join(enc.Encode(&doc), enc.Close()); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return append(before[:len(before):len(before)], b.String()...), nil
}

// valueOf returns the node of a key, and adds the key if it is missing.
func valueOf(m *yaml.Node, key string) *yaml.Node {
	for i := 0; i+1 < len(m.Content); i += 2 {
		if m.Content[i].Value == key {
			return m.Content[i+1]
		}
	}
	v := &yaml.Node{Kind: yaml.ScalarNode}
	m.Content = append(m.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: key}, v)
	return v
}
