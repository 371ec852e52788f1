package qos

import (
	"fmt"
	"slices"
	"strings"

	"github.com/penstock-kv/penstock/rdma"
)

// HighShareMin is the least guaranteed share of the bandwidth for collectives that passes the
// check. The DualPath paper reserves "approximately 99%" (section 5.1); HighShareMin is the least
// value that rounds to 99%.
const HighShareMin = 0.985

// Deviation is a difference between a configuration and the needs of the traffic classes.
type Deviation struct {
	// Where is the kind of port in an OpenSM file, such as "swe"; "" for all kinds.
	Where string `json:"where,omitempty"`
	What  string `json:"what"`
	Do    string `json:"do"`
}

// Report is the result of a check.
type Report struct {
	// Fabric is "InfiniBand" or "RoCE".
	Fabric string `json:"fabric"`
	// HighShare is the guaranteed share of the bandwidth, from 0 to 1, for collectives while cache
	// traffic is waiting too. It is the least value over all kinds of ports.
	HighShare  float64     `json:"high_share"`
	Deviations []Deviation `json:"deviations"`
}

// Check reads a configuration, which is the QoS lines of an OpenSM file, or the output or the
// commands of dcb. It recognizes the kind by the words in text. It compares the configuration with
// the needs of the classes of m.
func Check(text string, m Map) (Report, error) {
	words := strings.Fields(text)
	has := func(prefixes ...string) bool {
		return slices.ContainsFunc(words, func(w string) bool {
			return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(w, p) })
		})
	}
	switch {
	case has("qos_"):
		o, err := ParseOpenSM(text)
		if err != nil {
			return Report{}, err
		}
		return o.Check(m), nil
	case has("tc-bw", "prio-tc", "dscp-prio", "prio-pfc"):
		d, err := ParseDCB(text)
		if err != nil {
			return Report{}, err
		}
		return d.Check(m), nil
	}
	return Report{}, fmt.Errorf("qos: neither an OpenSM file (qos_vlarb_high …) nor what dcb prints (dcb ets show, dcb pfc show, dcb app show)")
}

// Check compares an OpenSM file with the needs of the classes of m.
func (o OpenSM) Check(m Map) Report {
	r := Report{Fabric: "InfiniBand", HighShare: 1, Deviations: []Deviation{}}
	if !o.Enabled {
		r.add("", "qos TRUE", "QoS is off: OpenSM sets no tables")
	}
	for _, kind := range append([]string{""}, portKinds()...) {
		if a, ok := o.Ports[kind]; ok {
			r.arbiter(kind, a, m)
		}
	}
	return r
}

func (r *Report) add(where, do, what string, args ...any) {
	r.Deviations = append(r.Deviations, Deviation{Where: where, What: fmt.Sprintf(what, args...), Do: do})
}

// arbiter checks the arbitration tables of one kind of port.
func (r *Report) arbiter(where string, a Arbiter, m Map) {
	kv, coll := m[rdma.ClassKV], m[rdma.ClassCollective]
	low, high := a.VL(kv.SL), a.VL(coll.SL)
	prefix := "qos_"
	if where != "" {
		prefix += where + "_"
	}
	for _, table := range [][]Weight{a.High, a.Low} {
		for _, w := range table {
			if w.VL >= a.VLs && w.Weight > 0 {
				r.add(where, prefix+"max_vls", "VL %d has a weight, and only %d lanes exist", w.VL, a.VLs)
			}
		}
	}
	if low == high {
		r.add(where, prefix+"max_vls of 4 or more, and "+prefix+"sl2vl", "kv (SL %d) and collective (SL %d) are both on VL %d", kv.SL, coll.SL, low)
		r.HighShare = min(r.HighShare, 0.5)
		return
	}
	if weightOf(a.High, high) == 0 {
		r.add(where, fmt.Sprintf("%svlarb_high with %d:192", prefix, high), "collective's VL %d is not in the high table", high)
		r.HighShare = 0
	}
	if weightOf(a.High, low) > 0 {
		r.add(where, fmt.Sprintf("%svlarb_high with %d:0", prefix, low), "kv's VL %d is in the high table, beside collective", low)
		r.HighShare = min(r.HighShare, 0.5)
		return
	}
	if weightOf(a.Low, low) == 0 {
		r.add(where, fmt.Sprintf("%svlarb_low with %d:64", prefix, low), "kv's VL %d has no weight anywhere: it starves", low)
	}
	if a.HighLimit == UnlimitedHigh {
		r.add(where, prefix+"high_limit 240", "a high limit of 255 switches the low table off: kv starves while collectives run")
	}
	share := a.HighShare()
	r.HighShare = min(r.HighShare, share)
	if share < HighShareMin {
		r.add(where, prefix+"high_limit 240", "collectives are guaranteed only %.1f %%, beside kv", 100*share)
	}
}

// Check compares a port's DCB settings with the needs of the classes of m.
func (d DCB) Check(m Map) Report {
	kv, coll := m[rdma.ClassKV], m[rdma.ClassCollective]
	r := Report{Fabric: "RoCE", HighShare: d.Share(coll.DSCP, kv.DSCP), Deviations: []Deviation{}}
	for c, l := range m {
		class := rdma.Class(c)
		switch p := d.DSCPPrio[l.DSCP]; {
		case p < 0:
			r.add("", fmt.Sprintf("dcb app add dev DEV dscp-prio %d:%d", l.DSCP, l.Priority), "DSCP %d of %v has no priority: the port does not tell it apart", l.DSCP, class)
		case p != int(l.Priority):
			r.add("", fmt.Sprintf("dcb app replace dev DEV dscp-prio %d:%d", l.DSCP, l.Priority), "DSCP %d of %v has priority %d, not %d", l.DSCP, class, p, l.Priority)
		}
		if p := d.priority(l.DSCP); !d.PFC[p] {
			r.add("", fmt.Sprintf("dcb pfc set dev DEV prio-pfc %d:on", p), "priority %d of %v is not lossless: PFC is off", p, class)
		}
	}
	low, high := d.PrioTC[d.priority(kv.DSCP)], d.PrioTC[d.priority(coll.DSCP)]
	switch {
	case low == high:
		r.add("", "dcb ets set dev DEV prio-tc", "kv and collective share traffic class %d", low)
	case r.HighShare == 1 && (d.Strict[high] || d.TCBandwidth[low] == 0):
		r.add("", fmt.Sprintf("dcb ets set dev DEV tc-tsa %d:ets %d:ets tc-bw %d:1", low, high, low), "kv starves while collectives run: traffic class %d has no bandwidth of its own", low)
	case r.HighShare < HighShareMin:
		r.add("", "dcb ets set dev DEV tc-bw", "collectives are guaranteed only %.1f %%, beside kv", 100*r.HighShare)
	}
	return r
}
