package top

import "time"

// Counters count the work of a node or of one namespace on it. They only grow.
type Counters struct {
	QueriedTokens, HitTokens    uint64
	ReadBlocks, ReadBytes       uint64
	WrittenBlocks, WrittenBytes uint64
	EvictedBlocks, EvictedBytes uint64
}

// A Sample is the state of several nodes at one time.
type Sample struct {
	// At is the time of the sample, from any fixed start, by the clock of the observer.
	At    time.Duration
	Nodes []Node
}

// Node is the answer of one node.
type Node struct {
	// Address is the node's address as the user gave it. It identifies the node in all samples.
	Address string
	// Failure is the reason why the node did not answer; "" if it answered. The other fields are
	// empty if it did not.
	Failure string

	Name, Version string
	// State is serving, draining, read_only or failed, and Reason the reason for a state that is
	// not serving.
	State, Reason string
	// Started is the time at which the node started, and identifies this run of the node. Up is the
	// time since then by the node's clock; 0: a node of an older version did not report it.
	Started time.Time
	Up      time.Duration

	CapacityBytes, UsedBytes int64
	// Counters is nil if a node of an older version did not report them. The five fields below it
	// are 0 then.
	Counters                             *Counters
	BusyCalls                            uint64
	RunningReads, WaitingReads, ReadsMax int64
	Reservations                         int64

	Volumes []Volume
	NICs    []NIC
	// Listed is set if Namespaces has all namespaces of the node. ListFailure is the reason why it
	// has none although they were requested.
	Listed      bool
	ListFailure string
	Namespaces  []Namespace
}

// Volume is the state of one volume.
type Volume struct {
	Path string
	// State is ok, suspect, failed, draining or removed, and Reason the cause of a state that is
	// not ok.
	State, Reason                     string
	BelowFloor                        bool
	CapacityBytes, UsedBytes          int64
	ReadBytes, WriteBytes, Failures   uint64
	InFlightBytes, InFlightLimitBytes int64
}

// NIC is the state of one NIC of the data plane.
type NIC struct {
	Name, Address            string
	Up                       bool
	Reason                   string
	SentBytes, ReceivedBytes uint64
	// LinkBits is the rate of the link in bits per second; 0: unknown.
	LinkBits int64
}

// Namespace is the state of one namespace on one node.
type Namespace struct {
	// ID changes if a namespace is deleted and created again with the same name.
	ID    uint32
	Name  string
	Epoch uint64
	// EpochSince is the time at which Epoch began; zero: before the node started.
	EpochSince time.Time
	// LiveEpochs is the number of live epochs, and NewestBytes the size of the blocks of the newest
	// of them. UsedBytes has the blocks of all epochs, retired epochs included.
	LiveEpochs                         int
	NewestBytes, UsedBytes, QuotaBytes int64
	Leases                             int64
	// Counters is nil if a node of an older version did not report them.
	Counters *Counters
}
