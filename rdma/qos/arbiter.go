package qos

import "slices"

// Arbiter is the configuration by which a port of an InfiniBand fabric chooses the virtual lane
// (VL) of the next packet (InfiniBand Architecture Specification, volume 1, section 7.6.9).
type Arbiter struct {
	// VLs is the number of data lanes of the port: 1, 2, 4, 8 or 15.
	VLs int
	// HighLimit is the number of bytes that the lanes of the high-priority table may send before
	// the low-priority table gets a turn, in units of 4096 bytes; 255: no limit.
	HighLimit int
	High, Low []Weight
	// SL2VL is the lane of each service level (SL), before it is reduced to the number of lanes in
	// VLs.
	SL2VL [MaxSL + 1]int
}

// Weight is an entry of an arbitration table: a lane, and the number of bytes that the lane may
// send in its turn, in units of 64 bytes. An entry of weight 0 is skipped.
type Weight struct{ VL, Weight int }

// Units of the specification, in bytes.
const (
	limitUnit  = 4096
	weightUnit = 64
	packetMax  = 4096
)

// UnlimitedHigh is the HighLimit with which the low-priority table gets no turn while a lane of
// the high-priority table has packets.
const UnlimitedHigh = 255

// VL returns the lane of a service level. If SL2VL names a lane that the port does not have,
// OpenSM keeps only the low bits of its number; VL does the same.
func (a *Arbiter) VL(sl uint8) int {
	if sl > MaxSL {
		sl = MaxSL
	}
	vl := a.SL2VL[sl]
	if vl >= a.VLs && a.VLs > 0 {
		mask := 1
		for mask*2 <= a.VLs {
			mask *= 2
		}
		vl &= mask - 1
	}
	return vl
}

// weightOf returns the sum of the weights of a lane in a table.
func weightOf(table []Weight, vl int) int {
	sum := 0
	for _, w := range table {
		if w.VL == vl {
			sum += w.Weight
		}
	}
	return sum
}

// HighShare returns the guaranteed share of the bandwidth, from 0 to 1, of all lanes of the
// high-priority table together. It assumes that these lanes, and the lanes that are only in the
// low-priority table, always have packets waiting. The high-priority table then sends HighLimit x
// 4096 bytes, and after that the low-priority table sends one packet of at most 4096 bytes. The
// share is 1 if the low-priority table gets no turn.
//
// With the tables of the DualPath paper (appendix A.1) the share is 240*4096/(240*4096 + 64*64),
// because the weight of the low-priority lane is one packet.
func (a *Arbiter) HighShare() float64 {
	others := slices.ContainsFunc(a.Low, func(w Weight) bool { return w.Weight > 0 && weightOf(a.High, w.VL) == 0 })
	if !others || a.HighLimit == UnlimitedHigh {
		return 1
	}
	high := max(a.HighLimit, 1) * limitUnit // a limit of 0 allows one packet
	return float64(high) / float64(high+packetMax)
}

// Simulate simulates a port that sends packets of mtu bytes while each lane in waiting always has
// a packet. It returns the bytes that each lane sent. The high-priority table sends while one of
// its lanes has a packet and the limit is not reached. Otherwise the count towards the limit is
// reset, and the low-priority table sends one packet, if it has any.
func (a *Arbiter) Simulate(mtu, packets int, waiting ...int) map[int]int {
	sent := make(map[int]int)
	high, low := newTurns(a.High, waiting), newTurns(a.Low, waiting)
	spent := 0
	for range packets {
		vl, ok := -1, false
		if a.HighLimit == UnlimitedHigh || spent == 0 || spent < a.HighLimit*limitUnit {
			if vl, ok = high.next(mtu); ok {
				spent += mtu
			}
		}
		if !ok {
			spent = 0
			if vl, ok = low.next(mtu); !ok {
				vl, ok = high.next(mtu)
			}
		}
		if !ok {
			return sent
		}
		sent[vl] += mtu
	}
	return sent
}

// turns goes round a table.
type turns struct {
	table []Weight
	at    int
	left  int // bytes that the entry may still send in this turn
}

// newTurns returns the turns over those entries of table that have a weight and whose lane is in
// waiting.
func newTurns(table []Weight, waiting []int) *turns {
	t := &turns{}
	for _, w := range table {
		if w.Weight > 0 && slices.Contains(waiting, w.VL) {
			t.table = append(t.table, w)
		}
	}
	if len(t.table) > 0 {
		t.left = t.table[0].Weight * weightUnit
	}
	return t
}

// next returns the lane of the next packet. The packet may exceed the remaining weight of its
// entry.
func (t *turns) next(mtu int) (vl int, ok bool) {
	if len(t.table) == 0 {
		return 0, false
	}
	if t.left <= 0 {
		t.at = (t.at + 1) % len(t.table)
		t.left = t.table[t.at].Weight * weightUnit
	}
	t.left -= mtu
	return t.table[t.at].VL, true
}
