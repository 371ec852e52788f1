package qos

import (
	"fmt"
	"strings"
)

// DCB is how an Ethernet port sorts packets: DSCP to priority, priority to
// traffic class, bandwidth to traffic classes, and which priorities are
// lossless (IEEE 802.1Qaz and 802.1Qbb).
type DCB struct {
	// DSCPPrio is the priority of each DSCP; -1: none is set.
	DSCPPrio [MaxDSCP + 1]int
	PrioTC   [MaxPriority + 1]int
	// TCBandwidth is in percent, for traffic classes of ETS.
	TCBandwidth [MaxPriority + 1]int
	// Strict traffic classes go before all others.
	Strict [MaxPriority + 1]bool
	PFC    [MaxPriority + 1]bool
}

// dscpNames are iproute2's, by which dcb prints code points.
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

// ParseDCB reads what `dcb ets show`, `dcb pfc show` and `dcb app show` print
// for one interface, one after the other, or the dcb commands that set it: both
// are keywords followed by key:value words.
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

// set takes one mapping; those of other keywords are passed over.
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

// priority is the one of a DSCP. An unmapped DSCP has priority 0, which is what
// 802.1Qcd says of packets that match no entry.
func (d *DCB) priority(dscp uint8) int { return max(d.DSCPPrio[min(dscp, MaxDSCP)], 0) }

// Share is the part of the bandwidth that the traffic class of dscp has, while
// it and the class of other have packets waiting and no third one has.
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
