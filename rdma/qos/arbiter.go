package qos

import "slices"

// Arbiter is how a port of an InfiniBand fabric chooses the virtual lane of the
// next packet (InfiniBand Architecture Specification, volume 1, section 7.6.9).
type Arbiter struct {
	// VLs is how many data lanes there are: 1, 2, 4, 8 or 15.
	VLs int
	// HighLimit is how much the high table may send before the low one gets a
	// turn, in units of 4096 bytes; 255: no limit.
	HighLimit int
	High, Low []Weight
	// SL2VL is the lane of each service level, before it is cut to VLs.
	SL2VL [MaxSL + 1]int
}

// Weight is an entry of a table: a lane, and how much it may send in its turn,
// in units of 64 bytes. Of weight 0 the entry is skipped.
type Weight struct{ VL, Weight int }

// Units of the specification, in bytes.
const (
	limitUnit  = 4096
	weightUnit = 64
	packetMax  = 4096
)

// UnlimitedHigh is the HighLimit that never lets the low table have a turn
// while the high one has packets.
const UnlimitedHigh = 255

// VL is the lane of a service level: OpenSM cuts what SL2VL says to the lanes
// that there are.
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

// weightOf sums the entries of a lane.
func weightOf(table []Weight, vl int) int {
	sum := 0
	for _, w := range table {
		if w.VL == vl {
			sum += w.Weight
		}
	}
	return sum
}

// HighShare is the least part of the bandwidth that the lanes of the high table
// have together, while they and those that are only in the low table all have
// packets waiting: HighLimit x 4096 bytes of theirs, then a turn of the low
// table, which is one packet of at most 4096 bytes. It is 1 where the others
// have no turn.
//
// With DualPath's tables (appendix A.1) it is 240*4096/(240*4096 + 64*64): the
// weight of the low lane is one packet.
func (a *Arbiter) HighShare() float64 {
	others := slices.ContainsFunc(a.Low, func(w Weight) bool { return w.Weight > 0 && weightOf(a.High, w.VL) == 0 })
	if !others || a.HighLimit == UnlimitedHigh {
		return 1
	}
	high := max(a.HighLimit, 1) * limitUnit // a limit of 0 is one packet
	return float64(high) / float64(high+packetMax)
}

// Simulate lets a port send packets of mtu bytes while the lanes in waiting
// always have one, and returns the bytes that each lane sent. A high table that
// has a packet and is within the limit sends it; else the count begins anew and
// the low table sends one packet, if it has any.
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
	left  int // bytes that the entry may still send
}

// newTurns keeps the entries that have something to send.
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

// next is the lane of the next packet. A packet may overdraw its entry's weight.
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
