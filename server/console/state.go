package console

import (
	"cmp"
	"context"
	"fmt"
	"slices"
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
	// Tenants returns the tenants with a quota, sorted by prefix.
	Tenants(context.Context) []Tenant
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
	// Erasures has the volumes, also of adopted nodes, that may still have secrets of ended epochs, sorted
	// by path.
	Erasures []Erasure
	// Cluster is nil if the node stands alone.
	Cluster *Cluster
}

// Erasure is a volume that may still have the secrets of ended epochs of some namespaces. Since is the
// time at which the first of these epochs ended.
type Erasure struct {
	Volume     string
	Namespaces int
	Since      time.Time
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
	// Down are the nodes that have joined, were not removed, and have no lease.
	Down []Member
	// LeaseFailure is the reason why the node may not serve; "" if its lease lets it serve.
	LeaseFailure string
	// RefusedNamespaces counts the namespaces that the node refuses because it could not apply the
	// last change of them.
	RefusedNamespaces int
}

// Member is a node of the cluster, as of its last record in etcd. The lease of a node in Cluster.Members is valid, because etcd
// removes the record of a member with its lease.
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
	// Blocks and Leases are those of the record, and HotPrefixes the number of prefixes that have copies on further nodes.
	Blocks, Leases, HotPrefixes int64
	Volumes                     []MemberVolume
	NICs                        []MemberNIC
	// Left is the time at which the lease of a node that is down ended; zero: no other node saw the end. Written is the time of
	// the record of such a node; zero: it is not known.
	Left, Written time.Time
	// Drained is set if the node is down and the other nodes have all of its blocks.
	Drained bool
}

// MemberVolume is a volume of another node, and MemberNIC a NIC of its data plane.
type MemberVolume struct {
	Path, State, Reason              string
	CapacityBytes, UsedBytes, Blocks int64
	Fill                             top.Value
}

// MemberNIC is a NIC of the data plane of another node.
type MemberNIC struct {
	Name, Address string
	Up            bool
	// LinkBits is the rate of the link in bits per second; 0: unknown.
	LinkBits int64
}

// SoundVolumes returns the number of volumes that are ok.
func (m Member) SoundVolumes() (n int) {
	for _, v := range m.Volumes {
		if v.State == "ok" {
			n++
		}
	}
	return n
}

// UpNICs returns the number of NICs that are up.
func (m Member) UpNICs() (n int) {
	for _, nic := range m.NICs {
		if nic.Up {
			n++
		}
	}
	return n
}

// LinkRate returns the sum of the rates of the links that are up, as text; "" if none is known.
func (m Member) LinkRate() string {
	bits := int64(0)
	for _, nic := range m.NICs {
		if nic.Up {
			bits += nic.LinkBits
		}
	}
	if bits == 0 {
		return ""
	}
	return fmt.Sprintf("%.4g Gbit/s", float64(bits)/1e9)
}

// remoteVolume is a row of the volumes of other nodes.
type remoteVolume struct {
	Node string
	Down bool
	MemberVolume
}

// remoteVolumesShown is the number of rows in the table of the volumes of other nodes.
const remoteVolumesShown = 256

// remoteVolumes returns at most limit volumes of the other nodes: first the volumes of nodes that are down, then volumes with a
// state other than ok, then the fullest. all is the number of volumes without the limit.
func (c *Cluster) remoteVolumes(limit int) (rows []remoteVolume, all int) {
	add := func(nodes []Member, down bool) {
		for _, m := range nodes {
			if m.Self {
				continue
			}
			for _, v := range m.Volumes {
				rows = append(rows, remoteVolume{Node: m.Name, Down: down, MemberVolume: v})
			}
		}
	}
	add(c.Down, true)
	add(c.Members, false)
	first := func(v remoteVolume) int {
		switch {
		case v.Down:
			return 0
		case v.State != "ok":
			return 1
		}
		return 2
	}
	slices.SortStableFunc(rows, func(a, b remoteVolume) int {
		return cmp.Or(cmp.Compare(first(a), first(b)), cmp.Compare(b.Fill.Of, a.Fill.Of))
	})
	all = len(rows)
	return rows[:min(all, limit)], all
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

// Tenant is a tenant with a quota: all namespaces whose names begin with a prefix.
type Tenant struct {
	Prefix                            string
	QuotaBytes, UsedBytes, Namespaces int64
	// Fill is the used part of the quota.
	Fill top.Value
	// EvictedBlocks and EvictedBytes count the blocks that the node evicted because of the quota.
	// RefusedBlocks counts the blocks that the node did not store because of the quota. The counts begin
	// when the running node gets the quota.
	EvictedBlocks, EvictedBytes, RefusedBlocks int64
}

// NamespacesLink returns the address of the page with the tenant's namespaces.
func (t Tenant) NamespacesLink() string { return namespacesLink(t.Prefix, columns()[0].key, false, 1) }

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
	if c := o.Cluster; c != nil {
		faults = append(faults, c.faults()...)
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
	for _, e := range o.Erasures {
		faults = append(faults, Fault{Subject: "volume " + e.Volume, State: "erasure pending", Since: e.Since, Reason: fmt.Sprintf(
			"it may have the secrets of ended epochs of %s: bring it back, or remove it and erase its disk", plural(int64(e.Namespaces), "namespace"))})
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

// faults returns the faults of the other nodes: nodes that are down and not drained, and volumes that are not ok.
func (c *Cluster) faults() (faults []Fault) {
	for _, m := range c.Down {
		if !m.Drained {
			faults = append(faults, Fault{Subject: "node " + m.Name, State: "down", Reason: "its lease in etcd has ended", Since: m.Left})
		}
	}
	for _, m := range c.Members {
		if m.Self {
			continue
		}
		for _, v := range m.Volumes {
			if v.State != "ok" {
				faults = append(faults, Fault{Subject: "volume " + v.Path + " of node " + m.Name, State: v.State, Reason: v.Reason})
			}
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
		if n := int64(len(c.Down)); n > 0 {
			text += fmt.Sprintf(" Down: %s.", plural(n, "node"))
		}
	}
	return text
}
