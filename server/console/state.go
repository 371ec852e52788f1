package console

import (
	"context"
	"fmt"
	"time"

	"github.com/penstock-kv/penstock/internal/top"
)

// Source supplies the state of a node. Several of its methods may be called concurrently, but none
// except Pins concurrently with itself.
type Source interface {
	// Overview returns the state of the node and of its cluster.
	Overview(context.Context) Overview
	// Namespaces returns all namespaces of the node.
	Namespaces(context.Context) []Namespace
	// Prefixes returns the counters of matches.
	Prefixes(context.Context) Prefixes
	// Pins returns the pins of the namespaces that sees accepts, in List the oldest ones, at most rows.
	Pins(ctx context.Context, sees func(namespace string) bool, rows int) Pins
	// Actions returns the last calls of administrators that changed state or failed to, the newest
	// first. The caller must not change the slice.
	Actions(context.Context) []Action
}

// Overview is the state of the node and of its cluster.
type Overview struct {
	// At is the time at which the state was read.
	At      time.Time
	Version string
	Started time.Time
	Node    top.NodeRow
	Volumes []Volume
	NICs    []top.NICRow
	// Blocks counts pieces.
	Blocks, Namespaces, Leases int64
	CorruptBlocks              uint64
	Durability, EvictionPolicy string
	RSSBytes, MemoryBudget     int64
	// Cluster is nil if the node stands alone.
	Cluster *Cluster
}

// Volume is the state of one volume.
type Volume struct {
	top.VolumeRow
	// IO is the backend of its device, and Duty the state that the operator ordered.
	IO, Duty string
	// Since is the time at which the state began; zero: at the start of the node.
	Since  time.Time
	Blocks int64
	// FailedRequests counts the failed reads and writes of the device since the start of the node.
	FailedRequests uint64
	// MoveStalled is the reason why blocks stay on a draining volume.
	MoveStalled string
	// Key is the id of the key that encrypts new blocks, "" if they are not encrypted.
	Key string
}

// Cluster is the state of the cluster as the node finds it in etcd.
type Cluster struct {
	// Failure is the reason why Members is empty.
	Failure string
	Members []Member
	// LeaseFailure is the reason why the node may not serve; "" if its lease lets it serve.
	LeaseFailure string
	// RefusedNamespaces counts the namespaces that the node refuses because it could not apply the
	// last change of them.
	RefusedNamespaces int
}

// Member is a node in the list of members. Its lease in etcd is valid, because etcd removes the record
// with the lease.
type Member struct {
	Name, Addr, Zone, State, Version string
	CapacityBytes, UsedBytes         int64
	// Fill is the used part of the capacity.
	Fill  top.Value
	Since time.Time
	// Applied is the etcd revision up to which the member has applied all changes of namespaces.
	Applied int64
	// Self is set for the node itself.
	Self bool
}

// Namespace is the state of one namespace on the node.
type Namespace struct {
	top.NamespaceRow
	Tenant string
	// Counters count since the start of the node.
	Counters top.Counters
	// HitRateSince is the part of the tokens queried since EpochSince that were found. It is unknown
	// if none were queried.
	HitRateSince top.Value
}

// Prefixes has the counters of the Match calls.
type Prefixes struct {
	At time.Time
	// Cuts counts the Match calls since the start of the node by the reason for the length of the
	// match: the label of penstock_match_cuts_total.
	Cuts map[string]uint64
	// Epochs are the live epochs of all namespaces.
	Epochs []Epoch
	// Top are the prefixes with the most tokens found, the first one with the most.
	Top []Prefix
}

// Prefix has the hits of the matches whose chains begin with one block.
type Prefix struct {
	Namespace string
	Epoch     uint64
	// First is the id of that block.
	First string
	// Matches and Tokens count the Match calls that found blocks, and the tokens that they found.
	Matches, Tokens int64
	// Blocks and Bytes are the size of the longest match.
	Blocks, Bytes int64
	// Last is the time of the last match, and Cut the reason why that match was not longer.
	Last time.Time
	Cut  string
}

// Epoch is a live epoch of a namespace.
type Epoch struct {
	Namespace string
	Epoch     uint64
	Newest    bool
	// Matches counts the Match calls that the epoch answered since the start of the node, and Hits
	// the blocks that they found.
	Matches, Hits               int64
	Blocks, Bytes, Leases, Pins int64
}

// Pins are the pins that a caller may see.
type Pins struct {
	At time.Time
	// List has the oldest pins, the oldest first.
	List []Pin
	// Total, Blocks and Bytes are of all pins that the caller may see.
	Total         int
	Blocks, Bytes int64
	// Failure is the reason why pins are missing.
	Failure string
}

// Pin keeps blocks, or an epoch, until it ends.
type Pin struct {
	Lease     uint64
	Namespace string
	Epoch     uint64
	// OfEpoch is set if the pin keeps the epoch live and holds no blocks.
	OfEpoch bool
	Owner   string
	Since   time.Time
	// Expires is zero if only an administrator ends the pin.
	Expires       time.Time
	Blocks, Bytes int64
}

// Action is a call of an administrator.
type Action struct {
	At   time.Time
	Call string
	// Peer is the address of the caller, and Principal its name in the roles file, "" if there is
	// none.
	Peer, Principal string
	Request         string
	// Result is the code of gRPC, and Failure the error.
	Result, Failure string
}

// Fault is a state that needs the attention of an operator.
type Fault struct {
	// Subject is the part of the node that has the fault.
	Subject string
	State   string
	Reason  string
	// Since is zero if the time is not known.
	Since time.Time
}

// Faults returns the faults in the state, those of the node and of its cluster before those of its
// volumes and NICs.
func (o Overview) Faults() []Fault {
	var faults []Fault
	if o.Node.State != "serving" {
		faults = append(faults, Fault{Subject: "node " + o.Node.Name, State: o.Node.State, Reason: o.Node.Reason})
	}
	if c := o.Cluster; c != nil {
		if c.LeaseFailure != "" {
			faults = append(faults, Fault{Subject: "lease in etcd", State: "not valid", Reason: c.LeaseFailure})
		}
		if c.Failure != "" {
			faults = append(faults, Fault{Subject: "list of members", State: "not read", Reason: c.Failure})
		}
		if c.RefusedNamespaces > 0 {
			faults = append(faults, Fault{Subject: "namespaces", State: "refused", Reason: fmt.Sprintf("the node could not apply the last change of %s", plural(int64(c.RefusedNamespaces), "namespace"))})
		}
	}
	for _, v := range o.Volumes {
		switch {
		case v.State != "ok":
			faults = append(faults, Fault{Subject: "volume " + v.Path, State: v.State, Reason: v.Reason, Since: v.Since})
		case v.FailedRequests > 0:
			faults = append(faults, Fault{Subject: "volume " + v.Path, State: v.State, Reason: fmt.Sprintf("%s of its device failed since the start of the node", plural(int64(v.FailedRequests), "request"))})
		}
		if v.MoveStalled != "" {
			faults = append(faults, Fault{Subject: "volume " + v.Path, State: "drain stalled", Reason: v.MoveStalled})
		}
	}
	if o.CorruptBlocks > 0 {
		faults = append(faults, Fault{Subject: "blocks", State: "corrupt", Reason: fmt.Sprintf("%s failed a checksum since the start of the node", plural(int64(o.CorruptBlocks), "block"))})
	}
	for _, n := range o.NICs {
		if !n.Up {
			faults = append(faults, Fault{Subject: "NIC " + n.Name, State: "down", Reason: n.Reason})
		}
	}
	return faults
}

// summary returns the line that screen readers announce when it changes. It has no figure that
// changes while the node works normally.
func (o Overview) summary() string {
	text := fmt.Sprintf("Node %s is %s. %s.", o.Node.Name, o.Node.State, plural(int64(len(o.Faults())), "fault"))
	if c := o.Cluster; c != nil && c.Failure == "" {
		text += fmt.Sprintf(" %s.", plural(int64(len(c.Members)), "member"))
	}
	return text
}
