package top

import (
	"slices"
	"strings"
	"time"
)

// A Frame has the rows of one sample.
type Frame struct {
	Total      Total          `json:"total"`
	Nodes      []NodeRow      `json:"nodes"`
	Namespaces []NamespaceRow `json:"namespaces,omitzero"`
	NICs       []NICRow       `json:"nics,omitzero"`
	Volumes    []VolumeRow    `json:"volumes,omitzero"`
}

// Total has the sums over the nodes that answered.
type Total struct {
	Nodes     int `json:"nodes"`
	Answering int `json:"answering"`
	Rates
	CapacityBytes int64 `json:"capacity_bytes"`
	UsedBytes     int64 `json:"used_bytes"`
	BusyCalls     Value `json:"busy_calls_per_second"`
}

// NodeRow is one node.
type NodeRow struct {
	Address string `json:"address"`
	Name    string `json:"name"`
	// Failure is the reason why the node did not answer. The fields below are empty then.
	Failure string `json:"failure,omitempty"`
	// ListFailure is the reason why the namespaces of the node are not known.
	ListFailure string `json:"list_failure,omitempty"`
	State       string `json:"state"`
	// Reason is the reason for a state that is not serving, or for the state of a volume.
	Reason string `json:"reason,omitempty"`
	// Restarted is set if the node has started again since its last answer. Its rates are unknown
	// then.
	Restarted     bool  `json:"restarted,omitempty"`
	Up            Value `json:"up_seconds"`
	CapacityBytes int64 `json:"capacity_bytes"`
	UsedBytes     int64 `json:"used_bytes"`
	Fill          Value `json:"fill"`
	Rates
	BusyCalls    Value `json:"busy_calls_per_second"`
	RunningReads Value `json:"running_reads"`
	WaitingReads Value `json:"waiting_reads"`
	ReadsMax     Value `json:"running_reads_limit"`
	Reservations Value `json:"reservations"`
	// VolumeStates counts the volumes by their states. A volume without free space is counted as
	// below_floor.
	VolumeStates map[string]int `json:"volume_states"`
}

// NamespaceRow is one namespace on all nodes that have it.
type NamespaceRow struct {
	Name  string `json:"name"`
	Nodes int    `json:"nodes"`
	// Epoch is the newest epoch, and LowestEpoch the epoch of the node that is furthest
	// behind.
	Epoch       uint64 `json:"epoch"`
	LowestEpoch uint64 `json:"lowest_epoch"`
	// EpochSince is the time at which the first node began Epoch; zero: unknown.
	EpochSince time.Time `json:"epoch_since,omitzero"`
	// oldestStart is the earliest start among the nodes that had Epoch already when they started.
	oldestStart time.Time
	LiveEpochs  int   `json:"live_epochs"`
	UsedBytes   int64 `json:"used_bytes"`
	// OldBytes is the part of UsedBytes that blocks of older epochs occupy, retired ones included.
	OldBytes Value `json:"old_bytes"`
	// QuotaBytes is the sum of the quotas; 0: none. QuotaUsed is the used part of it.
	QuotaBytes int64 `json:"quota_bytes"`
	QuotaUsed  Value `json:"quota_used"`
	Leases     int64 `json:"leases"`
	Rates
}

// NICRow is one NIC of one node.
type NICRow struct {
	Node     string `json:"node"`
	Name     string `json:"name"`
	Address  string `json:"address"`
	Up       bool   `json:"up"`
	Reason   string `json:"reason,omitempty"`
	Sent     Value  `json:"sent_bytes_per_second"`
	Received Value  `json:"received_bytes_per_second"`
	// LinkBits is the rate of the link in bits per second. SentShare and ReceivedShare are the
	// parts of it that are used.
	LinkBits      Value `json:"link_bits_per_second"`
	SentShare     Value `json:"sent_share"`
	ReceivedShare Value `json:"received_share"`
}

// VolumeRow is one volume of one node.
type VolumeRow struct {
	Node               string `json:"node"`
	Path               string `json:"path"`
	State              string `json:"state"`
	Reason             string `json:"reason,omitempty"`
	CapacityBytes      int64  `json:"capacity_bytes"`
	UsedBytes          int64  `json:"used_bytes"`
	Fill               Value  `json:"fill"`
	ReadBytes          Value  `json:"read_bytes_per_second"`
	WrittenBytes       Value  `json:"written_bytes_per_second"`
	Failures           Value  `json:"failures_per_second"`
	InFlightBytes      int64  `json:"in_flight_bytes"`
	InFlightLimitBytes int64  `json:"in_flight_limit_bytes"`
}

// A Meter computes rates from consecutive samples. The zero value has no sample.
type Meter struct {
	// last has the last answer of each node, by address.
	last map[string]answer
}

// answer is the answer of a node, with the time of its sample.
type answer struct {
	Node
	at time.Duration
}

// Add returns the rows of a sample. A rate is the growth since the node's last answer.
func (m *Meter) Add(s Sample) Frame {
	if m.last == nil {
		m.last = make(map[string]answer)
	}
	f := Frame{Total: Total{Nodes: len(s.Nodes)}}
	namespaces := make(map[string]*NamespaceRow)
	for _, n := range s.Nodes {
		if n.Failure != "" {
			f.Nodes = append(f.Nodes, NodeRow{Address: n.Address, Name: m.last[n.Address].Name, Failure: n.Failure})
			continue
		}
		before, after := m.last[n.Address], answer{n, s.At}
		m.last[n.Address] = after
		apart := spanOf(before, after)
		row := nodeRow(before.Node, n, apart)
		f.Nodes = append(f.Nodes, row)
		f.Total.add(row)
		f.NICs = append(f.NICs, nicRows(before.Node, n, apart)...)
		f.Volumes = append(f.Volumes, volumeRows(before.Node, n, apart)...)
		addNamespaces(namespaces, before.Node, n, apart)
	}
	for _, row := range namespaces {
		if !row.oldestStart.IsZero() && !row.EpochSince.Before(row.oldestStart) {
			row.EpochSince = time.Time{} // a node has joined since the epoch began
		}
		if row.QuotaBytes > 0 {
			row.QuotaUsed = Known(float64(row.UsedBytes) / float64(row.QuotaBytes))
		} else {
			row.QuotaBytes = 0
		}
		f.Namespaces = append(f.Namespaces, *row)
	}
	slices.SortFunc(f.Namespaces, func(a, b NamespaceRow) int { return strings.Compare(a.Name, b.Name) })
	return f
}

// spanOf returns the time between two answers of a node, and 0 if they cannot be compared.
func spanOf(before, after answer) span {
	if !before.Started.Equal(after.Started) || before.Address == "" {
		return 0
	}
	apart := after.at - before.at
	if before.Up > 0 && after.Up > 0 {
		apart = after.Up - before.Up
	}
	if apart < shortestSpan {
		return 0
	}
	return span(apart)
}

func (t *Total) add(n NodeRow) {
	t.Answering++
	t.Rates = t.plus(n.Rates)
	t.CapacityBytes += n.CapacityBytes
	t.UsedBytes += n.UsedBytes
	t.BusyCalls = t.BusyCalls.Plus(n.BusyCalls)
}

// display returns the name of a node in tables.
func (n Node) display() string {
	if n.Name == "" {
		return n.Address
	}
	return n.Name
}

func nodeRow(before, n Node, apart span) NodeRow {
	row := NodeRow{
		Address: n.Address, Name: n.Name, ListFailure: n.ListFailure, State: n.State, Reason: n.Reason,
		Restarted:     before.Address != "" && !before.Started.Equal(n.Started),
		CapacityBytes: n.CapacityBytes, UsedBytes: n.UsedBytes, Fill: share(n.UsedBytes, n.CapacityBytes),
		Rates:        apart.rates(before.Counters, n.Counters),
		VolumeStates: make(map[string]int),
	}
	if n.Up > 0 {
		row.Up = Known(n.Up.Seconds())
	}
	if n.Counters != nil {
		row.RunningReads, row.WaitingReads, row.ReadsMax = Known(float64(n.RunningReads)), Known(float64(n.WaitingReads)), Known(float64(n.ReadsMax))
		row.Reservations = Known(float64(n.Reservations))
		if before.Counters != nil {
			row.BusyCalls = apart.rate(before.BusyCalls, n.BusyCalls)
		}
	}
	for _, v := range n.Volumes {
		state := v.state()
		row.VolumeStates[state]++
		if row.Reason == "" && state != "ok" {
			row.Reason = v.Path + ": " + because(state, v.Reason)
		}
	}
	return row
}

// state returns the state of the volume, or below_floor if it is ok and takes no new blocks because
// its file system is full.
func (v Volume) state() string {
	if v.State == "ok" && v.BelowFloor {
		return "below_floor"
	}
	return v.State
}

func because(state, reason string) string {
	if reason == "" {
		return state
	}
	return state + " (" + reason + ")"
}

func share(part, whole int64) Value {
	if whole <= 0 {
		return Value{}
	}
	return Known(float64(part) / float64(whole))
}

func nicRows(before, n Node, apart span) (rows []NICRow) {
	for i, nic := range n.NICs {
		row := NICRow{Node: n.display(), Name: nic.Name, Address: nic.Address, Up: nic.Up, Reason: nic.Reason}
		if nic.LinkBits > 0 {
			row.LinkBits = Known(float64(nic.LinkBits))
		}
		// The NICs of an engine keep their order during its life.
		if i < len(before.NICs) && before.NICs[i].Name == nic.Name {
			row.Sent = apart.rate(before.NICs[i].SentBytes, nic.SentBytes)
			row.Received = apart.rate(before.NICs[i].ReceivedBytes, nic.ReceivedBytes)
		}
		link := Value{Of: row.LinkBits.Of / 8, Known: row.LinkBits.Known}
		row.SentShare, row.ReceivedShare = row.Sent.Over(link), row.Received.Over(link)
		rows = append(rows, row)
	}
	return rows
}

func volumeRows(before, n Node, apart span) (rows []VolumeRow) {
	for i, v := range n.Volumes {
		row := VolumeRow{
			Node: n.display(), Path: v.Path, State: v.state(), Reason: v.Reason,
			CapacityBytes: v.CapacityBytes, UsedBytes: v.UsedBytes, Fill: share(v.UsedBytes, v.CapacityBytes),
			InFlightBytes: v.InFlightBytes, InFlightLimitBytes: v.InFlightLimitBytes,
		}
		if i < len(before.Volumes) && before.Volumes[i].Path == v.Path {
			row.ReadBytes = apart.rate(before.Volumes[i].ReadBytes, v.ReadBytes)
			row.WrittenBytes = apart.rate(before.Volumes[i].WriteBytes, v.WriteBytes)
			row.Failures = apart.rate(before.Volumes[i].Failures, v.Failures)
		}
		rows = append(rows, row)
	}
	return rows
}

// addNamespaces adds the namespaces of a node to the rows, by name. QuotaBytes of a row is negative
// while a node of it has no quota.
func addNamespaces(rows map[string]*NamespaceRow, before, n Node, apart span) {
	earlier := make(map[uint32]*Counters, len(before.Namespaces))
	for _, ns := range before.Namespaces {
		earlier[ns.ID] = ns.Counters
	}
	for _, ns := range n.Namespaces {
		row := rows[ns.Name]
		if row == nil {
			row = &NamespaceRow{Name: ns.Name, Epoch: ns.Epoch, LowestEpoch: ns.Epoch, OldBytes: Known(0)}
			rows[ns.Name] = row
		}
		row.addEpochs(ns, n.Started)
		row.Nodes++
		row.UsedBytes += ns.UsedBytes
		row.Leases += ns.Leases
		if ns.QuotaBytes == 0 || row.QuotaBytes < 0 {
			row.QuotaBytes = -1
		} else {
			row.QuotaBytes += ns.QuotaBytes
		}
		counted, known := earlier[ns.ID]
		if !known && before.Listed {
			counted = &Counters{} // the namespace was created since the last answer
		}
		row.Rates = row.plus(apart.rates(counted, ns.Counters))
	}
}

// addEpochs adds the epochs of a namespace on one node to the row. On a node without the newest
// epoch, all blocks count as old. LiveEpochs is 0 if a node of an older version did not report the
// size of its epochs.
func (r *NamespaceRow) addEpochs(ns Namespace, started time.Time) {
	old := ns.UsedBytes - ns.NewestBytes
	switch {
	case ns.Epoch > r.Epoch:
		r.Epoch, r.EpochSince, r.oldestStart = ns.Epoch, time.Time{}, time.Time{}
		r.addBegin(ns, started)
		r.OldBytes.Of = float64(r.UsedBytes) + float64(old)
	case ns.Epoch < r.Epoch:
		r.OldBytes.Of += float64(ns.UsedBytes)
	default:
		r.OldBytes.Of += float64(old)
		r.addBegin(ns, started)
	}
	r.LowestEpoch = min(r.LowestEpoch, ns.Epoch)
	r.LiveEpochs = max(r.LiveEpochs, ns.LiveEpochs, 1)
	r.OldBytes.Known = r.OldBytes.Known && ns.LiveEpochs > 0
}

// addBegin adds the time at which a node began the newest epoch. started is the time at which the
// node started.
func (r *NamespaceRow) addBegin(ns Namespace, started time.Time) {
	earliest, at := &r.EpochSince, ns.EpochSince
	if at.IsZero() {
		earliest, at = &r.oldestStart, started
	}
	if earliest.IsZero() || at.Before(*earliest) {
		*earliest = at
	}
}
