package qos

import (
	"fmt"
	"strings"
)

// DCB is the configuration of an Ethernet port for priorities (Data Center Bridging, IEEE 802.1Qaz
// and 802.1Qbb). It maps DSCPs to priorities and priorities to traffic classes, gives bandwidth to
// traffic classes, and marks priorities as lossless.
type DCB struct {
	// DSCPPrio is the priority of each DSCP; -1: the DSCP has no priority.
	DSCPPrio [MaxDSCP + 1]int
	PrioTC   [MaxPriority + 1]int
	// TCBandwidth is the bandwidth of each traffic class with ETS (weighted scheduling), in
	// percent.
	TCBandwidth [MaxPriority + 1]int
	// Strict is true for a traffic class that is served before all classes that are not strict.
	Strict [MaxPriority + 1]bool
	PFC    [MaxPriority + 1]bool
}

// dscpNames returns the code points by the names that iproute2's dcb prints.
func dscpNames() map[string]int {
	names := map[string]int{"default": 0, "EF": 46, "LE": 1, "VA": 44}
	for class := 1; class <= 7; class++ {
		names[fmt.Sprintf("CS%d", class)] = class * 8
	}
	for class := 1; class <= 4; class++ {
		for drop := 1; drop <= 3; drop++ {
			names[fmt.Sprintf("AF%d%d", class, drop)] = class*8 + drop*2
		}
	}
	return names
}

// ParseDCB reads the output of `dcb ets show`, `dcb pfc show` and `dcb app show` for one
// interface, one after the other. It also reads the dcb commands that make these settings. Both
// consist of keywords followed by key:value words.
func ParseDCB(text string) (DCB, error) {
	d := DCB{}
	for i := range d.DSCPPrio {
		d.DSCPPrio[i] = -1
	}
	line := 0
	for raw := range strings.Lines(text) {
		line++
		raw, _, _ = strings.Cut(raw, "#")
		if err := d.parseLine(raw); err != nil {
			return DCB{}, fmt.Errorf("qos: line %d: %w", line, err)
		}
	}
	return d, nil
}

func (d *DCB) parseLine(line string) error {
	keyword := ""
	for word := range strings.FieldsSeq(line) {
		key, value, ok := strings.Cut(word, ":")
		if !ok {
			keyword = word
			continue
		}
		if err := d.set(keyword, key, value); err != nil {
			return fmt.Errorf("%s %s: %w", keyword, word, err)
		}
	}
	return nil
}

// set stores one key:value pair. It ignores the pairs of other keywords.
func (d *DCB) set(keyword, key, value string) (err error) {
	switch keyword {
	case "dscp-prio":
		var code int
		if code, err = parseDSCP(key); err == nil {
			d.DSCPPrio[code], err = number(value, 0, MaxPriority)
		}
		return err
	case "prio-tc", "tc-bw", "tc-tsa", "prio-pfc":
	default:
		return nil
	}
	from, to := 0, MaxPriority
	if key != "all" {
		if from, err = number(key, 0, MaxPriority); err != nil {
			return err
		}
		to = from
	}
	for i := from; i <= to && err == nil; i++ {
		err = d.setOne(keyword, i, value)
	}
	return err
}

func (d *DCB) setOne(keyword string, i int, value string) (err error) {
	switch keyword {
	case "prio-tc":
		d.PrioTC[i], err = number(value, 0, MaxPriority)
	case "tc-bw":
		d.TCBandwidth[i], err = number(value, 0, 100)
	case "tc-tsa":
		d.Strict[i] = value == "strict"
	case "prio-pfc":
		if value != "on" && value != "off" {
			return fmt.Errorf("%q is neither on nor off", value)
		}
		d.PFC[i] = value == "on"
	}
	return err
}

func parseDSCP(key string) (int, error) {
	if n, ok := dscpNames()[key]; ok {
		return n, nil
	}
	return number(key, 0, MaxDSCP)
}

// priority returns the priority of a DSCP. An unmapped DSCP has priority 0, as 802.1Qcd prescribes
// for packets that match no entry.
func (d *DCB) priority(dscp uint8) int { return max(d.DSCPPrio[min(dscp, MaxDSCP)], 0) }

// Share returns the share of the bandwidth, from 0 to 1, of the traffic class of dscp, while this
// class and the class of other have packets waiting and no third class has.
func (d *DCB) Share(dscp, other uint8) float64 {
	a, b := d.PrioTC[d.priority(dscp)], d.PrioTC[d.priority(other)]
	switch {
	case a == b:
		return 0.5
	case d.Strict[a] && d.Strict[b]: // the higher class goes first
		if a > b {
			return 1
		}
		return 0
	case d.Strict[a]:
		return 1
	case d.Strict[b]:
		return 0
	case d.TCBandwidth[a]+d.TCBandwidth[b] == 0:
		return 0.5
	}
	return float64(d.TCBandwidth[a]) / float64(d.TCBandwidth[a]+d.TCBandwidth[b])
}
