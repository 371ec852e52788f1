package qos

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// OpenSM is the QoS part of an opensm.conf.
type OpenSM struct {
	// Enabled is true if the file has the line "qos TRUE".
	Enabled bool
	// Ports holds the settings by kind of port. "" are the settings for all kinds. "ca" (channel
	// adapters), "rtr" (routers), "sw0" (a switch's own port) and "swe" (a switch's external
	// ports) override these.
	Ports map[string]Arbiter
}

// portKinds are OpenSM's prefixes.
func portKinds() []string { return []string{"ca", "rtr", "sw0", "swe"} }

// tableMax is the largest number of entries in an arbitration table.
const tableMax = 64

// vlMax is the last data lane. Lane 15 is reserved for management.
const vlMax = 14

// ParseOpenSM reads the lines of an opensm.conf, or of deploy/qos/opensm.conf, that begin with
// qos. It ignores all other lines. A setting that is missing has OpenSM's default: SL n is on VL
// n, and the tables are empty.
func ParseOpenSM(text string) (OpenSM, error) {
	o := OpenSM{Ports: map[string]Arbiter{"": {VLs: 15, SL2VL: identitySL2VL()}}}
	settings := make(map[string][]setting)
	line := 0
	for raw := range strings.Lines(text) {
		line++
		raw, _, _ = strings.Cut(raw, "#")
		key, value, _ := strings.Cut(strings.TrimSpace(strings.ReplaceAll(raw, "\t", " ")), " ")
		value = strings.TrimSpace(value)
		switch {
		case key == "qos":
			o.Enabled = strings.EqualFold(value, "TRUE")
		case strings.HasPrefix(key, "qos_") && value != "(null)" && value != "":
			kind, name := splitKind(strings.TrimPrefix(key, "qos_"))
			settings[kind] = append(settings[kind], setting{line, name, value})
		}
	}
	for _, kind := range append([]string{""}, portKinds()...) {
		if kind != "" && settings[kind] == nil {
			continue
		}
		a := o.Ports[""].clone()
		for _, s := range settings[kind] {
			if err := a.set(s.name, s.value); err != nil {
				return OpenSM{}, fmt.Errorf("qos: line %d: %w", s.line, err)
			}
		}
		o.Ports[kind] = a
	}
	return o, nil
}

type setting struct {
	line        int
	name, value string
}

// splitKind splits "swe_max_vls" into "swe" and "max_vls".
func splitKind(key string) (kind, name string) {
	if k, rest, ok := strings.Cut(key, "_"); ok && slices.Contains(portKinds(), k) {
		return k, rest
	}
	return "", key
}

func identitySL2VL() (m [MaxSL + 1]int) {
	for sl := range m {
		m[sl] = min(sl, vlMax)
	}
	return m
}

func (a Arbiter) clone() Arbiter {
	a.High, a.Low = slices.Clone(a.High), slices.Clone(a.Low)
	return a
}

// set stores one setting. It ignores settings that do not concern the arbiter.
func (a *Arbiter) set(name, value string) (err error) {
	switch name {
	case "max_vls":
		a.VLs, err = number(value, 1, vlMax+1)
	case "high_limit":
		a.HighLimit, err = number(value, 0, UnlimitedHigh)
	case "vlarb_high":
		a.High, err = parseTable(value)
	case "vlarb_low":
		a.Low, err = parseTable(value)
	case "sl2vl":
		err = a.parseSL2VL(value)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

func number(s string, least, most int) (int, error) {
	n, err := strconv.Atoi(strings.TrimSpace(s))
	if err != nil || n < least || n > most {
		return 0, fmt.Errorf("%q is not a number from %d to %d", s, least, most)
	}
	return n, nil
}

// parseTable reads "0:192,1:192,2:0,3:192".
func parseTable(s string) ([]Weight, error) {
	var table []Weight
	for entry := range strings.SplitSeq(s, ",") {
		vl, weight, ok := strings.Cut(entry, ":")
		if !ok {
			return nil, fmt.Errorf("%q is not VL:weight", entry)
		}
		v, err := number(vl, 0, vlMax)
		if err != nil {
			return nil, fmt.Errorf("VL %w", err)
		}
		w, err := number(weight, 0, 255)
		if err != nil {
			return nil, fmt.Errorf("weight %w", err)
		}
		table = append(table, Weight{v, w})
	}
	if len(table) > tableMax {
		return nil, fmt.Errorf("%d entries, a table has at most %d", len(table), tableMax)
	}
	return table, nil
}

// parseSL2VL reads up to 16 lanes, one for each service level. A port drops the packets of a
// service level on lane 15.
func (a *Arbiter) parseSL2VL(s string) error {
	parts := strings.Split(s, ",")
	if len(parts) > MaxSL+1 {
		return fmt.Errorf("%d lanes for %d service levels", len(parts), MaxSL+1)
	}
	for sl, p := range parts {
		vl, err := number(p, 0, 15)
		if err != nil {
			return fmt.Errorf("of SL %d: %w", sl, err)
		}
		a.SL2VL[sl] = vl
	}
	return nil
}
