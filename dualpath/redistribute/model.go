package redistribute

import (
	"fmt"
	"math"
)

// Model is everything a decision is made of but the request.
type Model struct {
	Payload Payload
	Fabric  Fabric
	// Splice is what adapting a fetched chunk to a new position and scattering it
	// into the local pool takes, in seconds: flat in the chunk's length (section
	// 2.2: 2.8 to 3.1 ms from 55 to 4096 tokens).
	Splice float64
	// Prefill is one token of one layer computed again, in seconds: c.
	Prefill float64
	// Holder is the holder's partial attention.
	Holder Holder
	// Merge is the requester's recombination of all partials, in seconds.
	Merge float64
	// Gather is the fetch of a scattered selection.
	Gather Gather
	// Host is what software adds to a routed step.
	Host Host
}

// Holder is the time of one batched partial for N requesters at once (section 6.3):
// flat up to Elbow, then a straight line. The zero value takes no time.
type Holder struct {
	// Base seconds up to Elbow requesters, Step seconds for each one more.
	Base, Step float64
	Elbow      int
}

// Seconds is the partial for n requesters.
func (h Holder) Seconds(n int) float64 {
	return h.Base + h.Step*float64(max(0, n-h.Elbow))
}

// Gather is what a scattered selection takes beyond the bytes of a coalesced pull.
type Gather struct {
	// Holder is the handshake with each holder, in seconds a layer.
	Holder float64
	// Bandwidth at which entries are collected, in bytes a second; 0: the fabric's.
	Bandwidth float64
}

// Host is the time of a routed step in the software above the transport: Fixed +
// Row a query row, in seconds (section 5.3).
type Host struct{ Fixed, Row float64 }

// FanIn is how many requesters one holder serves at once almost for free: the elbow
// both of its copy engines and of its attention kernel (sections 6.2, 6.3).
const FanIn = 8

// H100 is the paper's model of DeepSeek-V2-Lite on f. Splice, c and merge are as
// printed (c is the middle of 0.5 to 1.5 us). The holder's line runs from 15 us at
// the elbow to 0.4 ms at 256 requesters.
func H100(f Fabric) Model {
	const base, full, saturated = 15e-6, 0.4e-3, 256
	return Model{
		Payload: DeepSeekV2Lite(), Fabric: f, Splice: 3e-3, Prefill: 1e-6, Merge: 25e-6,
		Holder: Holder{Base: base, Step: (full - base) / (saturated - FanIn), Elbow: FanIn},
	}
}

// Transport is m without what is neither on the wire nor in fetch and local:
// compute, merge and host. The paper's figures of route are of this.
func (m Model) Transport() Model {
	m.Holder, m.Merge, m.Host = Holder{}, 0, Host{}
	return m
}

// PrototypeHost is the overhead of the paper's client (section 5.3).
func PrototypeHost() Host { return Host{Fixed: 3.5e-3, Row: 12.5e-6} }

// PrototypeGather is what its gather of 2048 entries takes, bound by copies in host
// memory: 1.3 ms a layer from one holder and 3.9 ms from seven (section 5.4),
// joined by a straight line.
func PrototypeGather() Gather {
	const one, seven = 1.3e-3, 3.9e-3
	holder := (seven - one) / 6
	return Gather{Holder: holder, Bandwidth: DeepSeekV2Lite().LayerBytes(2048) / (one - holder)}
}

// Validate returns an error that names the first constant out of its range.
func (m Model) Validate() error {
	if err := m.Payload.Validate(); err != nil {
		return err
	}
	if err := m.Fabric.Validate(); err != nil {
		return err
	}
	for _, x := range []struct {
		name  string
		value float64
	}{
		{"splice", m.Splice}, {"prefill of a token and layer", m.Prefill}, {"holder's partial", m.Holder.Base}, {"holder's step", m.Holder.Step},
		{"holder's elbow", float64(m.Holder.Elbow)}, {"merge", m.Merge}, {"gather of a holder", m.Gather.Holder}, {"gather bandwidth", m.Gather.Bandwidth},
		{"host overhead", m.Host.Fixed}, {"host overhead of a row", m.Host.Row},
	} {
		if !(x.value >= 0) || math.IsInf(x.value, 0) {
			return fmt.Errorf("redistribute: %s: %v; it must be zero or positive", x.name, x.value)
		}
	}
	return nil
}
