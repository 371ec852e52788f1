package blockstore

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/penstock-kv/penstock/blockstore/health"
)

// Stats describes the store at one moment. All sizes of slots include header and padding.
type Stats struct {
	// CapacityBytes is the capacity of the present volumes, and FileBytes the size of their files.
	CapacityBytes, FileBytes int64
	// TableBytes is the DRAM of the segment and slot tables, in bytes.
	TableBytes int64
	// LostBytes is the part of the configured capacity that would belong to missing and removed
	// volumes.
	LostBytes int64
	Slots     SlotStats
	Counters  CounterStats
	// Classes is one entry for each slot size in use, smallest first.
	Classes []ClassStats
	// Volumes is one entry for each volume, by index.
	Volumes []VolumeStats
}

// SlotStats has the bytes of the slots in each state.
type SlotStats struct {
	// LiveBytes is the size of the slots that the index refers to, ReservedBytes of the slots that
	// are being written, CondemnedBytes of the freed slots that still have readers, and FreeBytes
	// of the free slots in segments that are divided into slots.
	LiveBytes, ReservedBytes, CondemnedBytes, FreeBytes int64
	// Live is the number of live slots.
	Live int64
}

// UsedBytes returns the bytes of the slots that are not free.
func (s SlotStats) UsedBytes() int64 { return s.LiveBytes + s.ReservedBytes + s.CondemnedBytes }

func (s *SlotStats) add(o SlotStats) {
	s.LiveBytes += o.LiveBytes
	s.ReservedBytes += o.ReservedBytes
	s.CondemnedBytes += o.CondemnedBytes
	s.FreeBytes += o.FreeBytes
	s.Live += o.Live
}

// CounterStats has counters since Open.
type CounterStats struct {
	// Reads counts the pieces requested from Read. Each has one outcome: verified (then ReadBytes
	// includes its bytes), stale, corrupt, or another failure.
	Reads, ReadBytes, ReadStale, ReadCorrupt, ReadFailures uint64
	// Writes counts the slots submitted to a device, and WrittenBytes the bytes that the device
	// completed.
	Writes, WrittenBytes, WriteFailures uint64
	// Scrubbed counts the slots read by Scrub.
	Scrubbed, ScrubbedBytes, ScrubCorrupt, ScrubFailures uint64
}

func (c *CounterStats) add(o CounterStats) {
	c.Reads += o.Reads
	c.ReadBytes += o.ReadBytes
	c.ReadStale += o.ReadStale
	c.ReadCorrupt += o.ReadCorrupt
	c.ReadFailures += o.ReadFailures
	c.Writes += o.Writes
	c.WrittenBytes += o.WrittenBytes
	c.WriteFailures += o.WriteFailures
	c.Scrubbed += o.Scrubbed
	c.ScrubbedBytes += o.ScrubbedBytes
	c.ScrubCorrupt += o.ScrubCorrupt
	c.ScrubFailures += o.ScrubFailures
}

// ClassStats describes the segments of one slot size.
type ClassStats struct {
	SlotBytes int64
	// Segments is the number of segments; Slots, Live and Free count their slots.
	Segments          int
	Slots, Live, Free int64
}

// VolumeStats describes one volume.
type VolumeStats struct {
	// Path is the volume's directory.
	Path string
	// CapacityBytes is the volume's share of the capacity, FileBytes the size of its files,
	// FreeSpaceBytes the free space of its file system when last read.
	CapacityBytes, FileBytes, FreeSpaceBytes int64
	// Segments is the number of segment files. Among them, Blank counts the segments without slots,
	// Bad the segments whose header could not be written, and Retiring the segments that exceed the
	// capacity.
	Segments, Blank, Bad, Retiring int
	Slots                          SlotStats
	Counters                       CounterStats
	// BelowFloor is set if the free space is below the floor. If the volume takes no new blocks,
	// BelowFloor or Health is the reason.
	BelowFloor bool
	Health     health.Status
	// Key is the id of the key that encrypts new slots of the volume, "" if they are not encrypted.
	Key string
}

// Stats returns counters and sizes. It reads one volume after the other while the store is in use.
func (s *Store) Stats() Stats {
	st := Stats{CapacityBytes: s.opts.CapacityBytes}
	classes := make(map[int64]*ClassStats)
	for _, v := range s.volumes {
		vs := v.stats(classes)
		if !v.counts() {
			st.CapacityBytes -= vs.CapacityBytes
			st.LostBytes += vs.CapacityBytes
		}
		st.FileBytes += vs.FileBytes
		st.TableBytes += v.space.memory()
		st.Slots.add(vs.Slots)
		st.Counters.add(vs.Counters)
		st.Volumes = append(st.Volumes, vs)
	}
	for _, c := range classes {
		st.Classes = append(st.Classes, *c)
	}
	slices.SortFunc(st.Classes, func(a, b ClassStats) int { return cmp.Compare(a.SlotBytes, b.SlotBytes) })
	return st
}

func (v *volume) stats(classes map[int64]*ClassStats) VolumeStats {
	vs := VolumeStats{
		Path: v.dev.Info().Path, CapacityBytes: v.capacityBytes,
		FreeSpaceBytes: v.freeSpaceBytes.Load(), BelowFloor: v.belowFloor(), Health: v.dev.health(), Counters: v.counter.load(),
	}
	if p := v.keyPeriods(); len(p) > 0 {
		vs.Key = p[len(p)-1].ID.String()
	}
	v.space.addTo(&vs, classes)
	return vs
}

// addTo adds the sizes and counts of the space to vs and classes.
func (s *space) addTo(vs *VolumeStats, classes map[int64]*ClassStats) {
	s.mu.Lock()
	defer s.mu.Unlock()
	vs.FileBytes = s.fileBytes
	for _, n := range s.uses {
		vs.Segments += n
	}
	vs.Bad, vs.Retiring = s.uses[useBad], len(s.surplus)
	vs.Blank = vs.Segments - s.uses[useCut] - vs.Bad
	for size, from := range s.classes {
		n := from.counts
		vs.Slots.add(SlotStats{
			LiveBytes: n.live * size, ReservedBytes: n.reserved * size,
			CondemnedBytes: n.condemned * size, FreeBytes: n.free * size, Live: n.live,
		})
		c := classes[size]
		if c == nil {
			c = &ClassStats{SlotBytes: size}
			classes[size] = c
		}
		c.Segments += from.segments
		c.Slots += n.free + n.reserved + n.live + n.condemned
		c.Live += n.live
		c.Free += n.free
	}
}

// memory returns the DRAM of the segments and of their slot tables, in bytes.
func (s *space) memory() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tableBytes
}

func (c *counters) load() CounterStats {
	return CounterStats{
		Reads: c.reads.Load(), ReadBytes: c.readBytes.Load(), ReadStale: c.readStale.Load(),
		ReadCorrupt: c.readCorrupt.Load(), ReadFailures: c.readFailures.Load(),
		Writes: c.writes.Load(), WrittenBytes: c.writtenBytes.Load(), WriteFailures: c.writeFailures.Load(),
		Scrubbed: c.scrubbed.Load(), ScrubbedBytes: c.scrubbedBytes.Load(),
		ScrubCorrupt: c.scrubCorrupt.Load(), ScrubFailures: c.scrubFailures.Load(),
	}
}

// String prints the stats as `penstock store` does.
func (s Stats) String() string {
	var w strings.Builder
	fmt.Fprintf(&w, "capacity %d, files %d\n", s.CapacityBytes, s.FileBytes)
	fmt.Fprintf(&w, "slots    %d live: %d bytes; reserved %d, condemned %d, free %d\n",
		s.Slots.Live, s.Slots.LiveBytes, s.Slots.ReservedBytes, s.Slots.CondemnedBytes, s.Slots.FreeBytes)
	c := s.Counters
	fmt.Fprintf(&w, "reads    %d: %d bytes; stale %d, corrupt %d, failed %d\n", c.Reads, c.ReadBytes, c.ReadStale, c.ReadCorrupt, c.ReadFailures)
	fmt.Fprintf(&w, "writes   %d: %d bytes; failed %d\n", c.Writes, c.WrittenBytes, c.WriteFailures)
	fmt.Fprintf(&w, "scrubbed %d: %d bytes; corrupt %d, failed %d\n", c.Scrubbed, c.ScrubbedBytes, c.ScrubCorrupt, c.ScrubFailures)
	for _, k := range s.Classes {
		fmt.Fprintf(&w, "class    %d bytes: %d segments, %d slots, %d live, %d free\n", k.SlotBytes, k.Segments, k.Slots, k.Live, k.Free)
	}
	for i, v := range s.Volumes {
		fmt.Fprintf(&w, "volume %d %s: capacity %d, files %d, %d segments (%d blank, %d bad, %d retiring), used %d",
			i, v.Path, v.CapacityBytes, v.FileBytes, v.Segments, v.Blank, v.Bad, v.Retiring, v.Slots.UsedBytes())
		if v.BelowFloor {
			w.WriteString(", below the floor")
		}
		if v.Health.State != health.OK {
			fmt.Fprintf(&w, ", %v", v.Health.State)
			if v.Health.Cause != nil {
				fmt.Fprintf(&w, ": %v", v.Health.Cause)
			}
		}
		w.WriteByte('\n')
	}
	return w.String()
}
