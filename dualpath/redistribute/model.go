package redistribute

import (
	"fmt"
	"math"
)

// Model has all inputs of a decision except the request.
type Model struct {
	Payload Payload
	Fabric  Fabric
	// Splice is the time to adapt a fetched chunk to a new position and to scatter it into the
	// local pool, in seconds. It does not depend on the chunk's length (section 2.2: 2.8 to 3.1 ms
	// from 55 to 4096 tokens).
	Splice float64
	// Prefill is the time to recompute one token in one layer, in seconds (c in the paper).
	Prefill float64
	// Holder is the time in which the holder computes the partial attention over its tokens.
	Holder Holder
	// Merge is the time, in seconds, in which the requester merges the partial results of all
	// holders.
	Merge float64
	// Gather is the additional cost of fetching tokens that are scattered over the holders' memory.
	Gather Gather
	// Host is the time of software above the transport in a routed step.
	Host Host
}

// Holder is the time in which a holder computes the partial attention for N concurrent requesters
// in one batch (section 6.3): constant up to Elbow requesters, then linear. The zero value means no
// time.
type Holder struct {
	// Base is the time for up to Elbow requesters, and Step the additional time for each further
	// requester, in seconds.
	Base, Step float64
	Elbow      int
}

// Seconds returns the time for n requesters.
func (h Holder) Seconds(n int) float64 {
	return h.Base + h.Step*float64(max(0, n-h.Elbow))
}

// Gather is the additional cost of fetching a scattered selection, compared with contiguous KV of
// the same size.
type Gather struct {
	// Holder is the time of the handshake with each holder, in seconds per layer.
	Holder float64
	// Bandwidth is the rate at which the entries are collected, in bytes per second; 0 means the
	// bandwidth of the fabric.
	Bandwidth float64
}

// Host is the time of a routed step in the software above the transport: Fixed + Row per query row,
// in seconds (section 5.3).
type Host struct{ Fixed, Row float64 }

// FanIn is the number of requesters that one holder serves concurrently at almost no additional
// cost: above it, both the holder's copy engines and its attention kernel take longer (sections
// 6.2, 6.3).
const FanIn = 8

// H100 returns the paper's model of DeepSeek-V2-Lite on f. Splice, Prefill and Merge are the values
// in the paper (Prefill is the middle of 0.5 to 1.5 us). The holder's time grows from 15 us at
// FanIn requesters to 0.4 ms at 256 requesters.
func H100(f Fabric) Model {
	const base, full, saturated = 15e-6, 0.4e-3, 256
	return Model{
		Payload: DeepSeekV2Lite(), Fabric: f, Splice: 3e-3, Prefill: 1e-6, Merge: 25e-6,
		Holder: Holder{Base: base, Step: (full - base) / (saturated - FanIn), Elbow: FanIn},
	}
}

// Transport returns m without the times that only route (sending the query to the KV) has besides
// the transport: computation on the holder, merge, and host software. The paper's figures for route
// leave these times out.
func (m Model) Transport() Model {
	m.Holder, m.Merge, m.Host = Holder{}, 0, Host{}
	return m
}

// PrototypeHost returns the overhead of the paper's client (section 5.3).
func PrototypeHost() Host { return Host{Fixed: 3.5e-3, Row: 12.5e-6} }

// PrototypeGather returns the gather cost of the paper's prototype, which is limited by copies in
// host memory. For 2048 entries the paper measures 1.3 ms per layer from one holder and 3.9 ms from
// seven (section 5.4); times for other numbers of holders are interpolated linearly.
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
