package main

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/server/membership"
)

// printMembers prints a table of the nodes, in which nodes that are down come last. Below it, each node that copies
// blocks or is down has a line.
func printMembers(t *table, resp *pb.ListMembersResponse) {
	t.row("NAME", "STATE", "ZONE", "CAPACITY", "USED", "VOLUMES", "NICS", "APPLIED", "SINCE", "ADDRESS", "VERSION")
	row := func(m *pb.Member, since string) {
		t.row(m.GetName(), m.GetState(), m.GetZone(), size(m.GetCapacityBytes()), size(m.GetUsedBytes()), volumeSummary(m), nicSummary(m), m.GetApplied(), since, m.GetAddr(), m.GetVersion())
	}
	for _, m := range resp.GetMembers() {
		row(m, utc(m.GetSinceUnixMs()))
	}
	for _, m := range resp.GetDown() {
		row(m, downSince(m))
	}
	for _, m := range resp.GetMembers() {
		if m.GetMove() != nil {
			t.row("  " + m.GetName() + ": " + moveLine(m))
		}
	}
	for _, m := range resp.GetDown() {
		t.row("  " + m.GetName() + ": " + downLine(m))
	}
}

// utc returns a time as text.
func utc(ms int64) string { return time.UnixMilli(ms).UTC().Format(time.RFC3339) }

// downSince returns the time at which the lease of a node that is down ended or, if no node saw the end, the time of the node's
// last record.
func downSince(m *pb.Member) string {
	if m.GetLeftUnixMs() != 0 {
		return utc(m.GetLeftUnixMs())
	}
	return "after " + utc(cmp.Or(m.GetWrittenUnixMs(), m.GetSinceUnixMs()))
}

// downWords is downSince for a sentence.
func downWords(m *pb.Member) string {
	if m.GetLeftUnixMs() == 0 {
		return "down since a time " + downSince(m)
	}
	return "down since " + downSince(m)
}

// downLine returns the blocks and volumes that a node had which is down.
func downLine(m *pb.Member) string {
	line := fmt.Sprintf("it had %s blocks, %s, and %s leases and pins", count(m.GetBlocks()), size(m.GetUsedBytes()), count(m.GetLeases()))
	var paths []string
	for _, v := range m.GetVolumes() {
		paths = append(paths, v.GetPath())
	}
	if len(paths) > 0 {
		line += " on " + strings.Join(paths, ", ")
	}
	if isDrained(m) {
		line += "; drained" + evictedWords(m.GetMove())
	}
	return line
}

// isDrained reports whether the other nodes have all blocks of a node with an order to drain.
func isDrained(down *pb.Member) bool {
	return down.GetMove().GetPhase() == string(membership.MoveDone)
}

// volumeSummary sums up the volumes of a node: their number, and how many are ok if not all are.
func volumeSummary(m *pb.Member) string {
	sound := 0
	for _, v := range m.GetVolumes() {
		if v.GetState() == "ok" {
			sound++
		}
	}
	switch n := len(m.GetVolumes()); {
	case n == 0:
		return "-"
	case sound < n:
		return fmt.Sprintf("%d of %d ok", sound, n)
	default:
		return fmt.Sprintf("%d ok", n)
	}
}

// nicSummary sums up the NICs of a node: their number, how many are up if not all are, and the rates of their links.
func nicSummary(m *pb.Member) string {
	up, bits := 0, int64(0)
	for _, n := range m.GetNics() {
		if n.GetUp() {
			up++
			bits += n.GetLinkBitsPerSecond()
		}
	}
	text := "-"
	switch n := len(m.GetNics()); {
	case n == 0:
		return text
	case up < n:
		text = fmt.Sprintf("%d of %d up", up, n)
	default:
		text = fmt.Sprintf("%d up", n)
	}
	if bits > 0 {
		text += ", " + gigabits(bits)
	}
	return text
}

// gigabits returns the rate of a link as text.
func gigabits(bits int64) string {
	if bits == 0 {
		return "unknown"
	}
	return fmt.Sprintf("%.4g Gbit/s", float64(bits)/1e9)
}

// printDetails prints the volumes and the NICs of the nodes.
func printDetails(t *table, nodes []*pb.Member) {
	t.row()
	t.row("NODE", "VOLUME", "STATE", "CAPACITY", "USED", "BLOCKS", "REASON")
	for _, m := range nodes {
		for _, v := range m.GetVolumes() {
			t.row(m.GetName(), v.GetPath(), v.GetState(), size(v.GetCapacityBytes()), size(v.GetUsedBytes()), count(v.GetBlocks()), cmp.Or(v.GetReason(), "-"))
		}
	}
	t.row()
	t.row("NODE", "NIC", "ADDRESS", "STATE", "LINK")
	for _, m := range nodes {
		for _, n := range m.GetNics() {
			state := "down"
			if n.GetUp() {
				state = "up"
			}
			t.row(m.GetName(), n.GetName(), n.GetAddress(), state, gigabits(n.GetLinkBitsPerSecond()))
		}
	}
}
