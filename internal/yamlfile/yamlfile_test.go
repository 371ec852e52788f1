package yamlfile

import (
	"errors"
	"strings"
	"testing"
	"time"
)

type inner struct {
	Gbps float64 `yaml:"gbps"`
	Name string  `yaml:"name"`
}

type outer struct {
	WAN      inner            `yaml:"wan"`
	List     []inner          `yaml:"list"`
	Map      map[string]inner `yaml:"map"`
	Steps    int              `yaml:"steps"`
	On       bool             `yaml:"on"`
	Wait     time.Duration    `yaml:"wait"`
	Optional *inner           `yaml:"optional"`
	hidden   int
}

func parse(raw string) (outer, *File, error) {
	v := outer{Steps: 7}
	f, err := Parse("s.yaml", []byte(raw))
	if err != nil {
		return v, nil, err
	}
	return v, f, f.Decode(&v)
}

func TestDecode(t *testing.T) {
	v := outer{Steps: 7}
	f, err := Parse("s.yaml", []byte("wan: {gbps: 100}\nlist:\n  - name: a\n  - name: b\n    gbps: 1e2\nmap:\n  x: {name: y}\nwait: 1m30s\non: true\noptional: {name: o}\n"))
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Decode(&v); err != nil {
		t.Fatal(err)
	}
	if v.WAN.Gbps != 100 || v.List[1].Gbps != 100 || v.Map["x"].Name != "y" || v.Wait != 90*time.Second || !v.On || v.Steps != 7 || v.Optional.Name != "o" || v.hidden != 0 {
		t.Errorf("%+v", v)
	}
	for path, want := range map[string]string{
		"wan.gbps":      "s.yaml:1: wan.gbps: bad",
		"list.1.gbps":   "s.yaml:5: list.1.gbps: bad",
		"list.1.absent": "s.yaml:4: list.1.absent: bad",
		"absent":        "s.yaml:1: absent: bad",
		"":              "s.yaml:1: bad",
	} {
		if got := f.Errorf(path, "bad").Error(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if !f.Has("list.1.gbps") || f.Has("list.1.absent") || f.Has("list.9") || f.Has("steps") {
		t.Error("what the file has")
	}
	if _, _, err := parse(""); err != nil {
		t.Error(err)
	}
}

func TestComplaints(t *testing.T) {
	for raw, want := range map[string]string{
		"wan:\n  gbsp: 1\n":            `s.yaml:2: wan: unknown key "gbsp"; did you mean "gbps"? known are gbps, name`,
		"steps: 1\nzzzzzz: 2\n":        `s.yaml:2: unknown key "zzzzzz"; known are wan, list`,
		"hidden: 1\n":                  `unknown key "hidden"`,
		"wan: {gbps: .nan}\n":          `s.yaml:1: wan.gbps: is .nan; write a finite number`,
		"wan: {gbps: -.inf}\n":         `write a finite number`,
		"wan: {gbps: fast}\n":          `s.yaml:1: wan.gbps: is "fast"; write a number`,
		"wan: 3\n":                     `s.yaml:1: wan: is "3"; write a mapping`,
		"wan: [1]\n":                   `s.yaml:1: wan: is a list; write a mapping`,
		"list: {a: 1}\n":               `s.yaml:1: list: is a mapping; write a list`,
		"list:\n - gbps: x\n":          `s.yaml:2: list.0.gbps: is "x"; write a number`,
		"map: {x: {nam: 1}}\n":         `map.x: unknown key "nam"; did you mean "name"?`,
		"steps: 1.5\n":                 `steps: is "1.5"; write a whole number`,
		"on: maybe\n":                  `on: is "maybe"; write true or false`,
		"wait: soon\n":                 `wait: is "soon"; write a duration such as`,
		"wait: 30\n":                   `wait: is "30", without a unit; write a duration such as`,
		"wan:\n":                       `wan: has no value`,
		"steps: 1\nsteps: 2\n":         `s.yaml:2: key "steps" stands in line 1 already`,
		"a: 1\n---\nb: 2\n":            `more than one YAML document`,
		"wan: {gbps: 1\n":              `s.yaml:`,
		"\tx: 1\n":                     `s.yaml: found character that cannot start any token`,
		"list: &l\n - name: a\n - *l":  `list.1: is a list`,
		strings.Repeat("#", SizeMax+1): `at most 1048576 are read`,
	} {
		_, _, err := parse(raw)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.40q: %v; want %s", raw, err, want)
		}
		var e *Error
		if err != nil && (!errors.As(err, &e) || e.File != "s.yaml") {
			t.Errorf("%.40q: %T", raw, err)
		}
	}
}

// FuzzParse: no input causes a panic, and an accepted input is accepted again.
func FuzzParse(f *testing.F) {
	f.Add("wan: {gbps: 100}\nlist: [{name: a}]\n")
	f.Add("wan: &a {gbps: 1}\noptional: *a\n")
	f.Add("a: &a [*a]\n")
	f.Add("map: {? [1]: {}}")
	f.Fuzz(func(t *testing.T, raw string) {
		v, file, err := parse(raw)
		if err != nil {
			return
		}
		w := outer{Steps: 7}
		if err := file.Decode(&w); err != nil {
			t.Errorf("accepted once: %v\n%+v", err, v)
		}
	})
}
