package blockstore

import (
	"math/bits"

	"github.com/penstock-kv/penstock/blockstore/ondisk"
)

// volumeSet is a set of volume indices.
type volumeSet [ondisk.VolumeSetBytes]byte

func (s *volumeSet) has(i int) bool { return s[i/8]&(1<<(i%8)) != 0 }
func (s *volumeSet) add(i int)      { s[i/8] |= 1 << (i % 8) }
func (s *volumeSet) drop(i int)     { s[i/8] &^= 1 << (i % 8) }

func (s *volumeSet) len() (n int) {
	for _, b := range s {
		n += bits.OnesCount8(b)
	}
	return n
}

// membership is the operator's order for each volume: to drain it, to remove it, or neither. Every
// superblock stores it. The membership with the highest version is valid.
type membership struct {
	version           uint32
	draining, removed volumeSet
}

// membershipOf returns the newest membership of the superblocks.
func membershipOf(found []*candidate) (m membership) {
	for _, c := range found {
		if sb := c.superblock; sb.MembershipVersion >= m.version {
			m = membership{version: sb.MembershipVersion, draining: sb.Draining, removed: sb.Removed}
		}
	}
	return m
}

// put writes the membership into a superblock.
func (m *membership) put(sb *ondisk.Superblock) {
	sb.MembershipVersion, sb.Draining, sb.Removed = m.version, m.draining, m.removed
}
