package membership

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"
)

// State is the state of a member.
type State string

const (
	// Joining: the node reads the namespaces. It does not serve.
	Joining State = "joining"
	// Serving: the node takes reads and writes.
	Serving State = "serving"
	// Draining: an operator has ordered that the node's blocks be copied to the other members
	// (DrainMember). The node serves; clients put new sequences on other members.
	Draining State = "draining"
	// Stopping: the node completes its calls before it ends.
	Stopping State = "stopping"
)

// Member is the record of one node in etcd, under the node's lease. A node that is down has none, but it has a NodeRecord.
type Member struct {
	// Name is unique in the cluster.
	Name string `json:"name"`
	// Addr is the address of the control plane, host:port, as clients dial it.
	Addr string `json:"addr"`
	// Store identifies the volumes of the node. A process locks its volumes, or owns them by a lease, so
	// two processes with the same Store do not serve at the same time.
	Store string `json:"store"`
	// Zone is the node's failure domain, as configured.
	Zone  string `json:"zone,omitempty"`
	State State  `json:"state"`
	// CapacityBytes is the size of the store, and UsedBytes its use at the last renewal.
	CapacityBytes int64 `json:"capacity_bytes"`
	UsedBytes     int64 `json:"used_bytes"`
	// Blocks is the number of blocks, and Leases the number of open leases, pins included, at the last
	// renewal.
	Blocks  int64  `json:"blocks,omitempty"`
	Leases  int64  `json:"leases,omitempty"`
	Version string `json:"version"`
	// Since is the time at which the node joined.
	Since time.Time `json:"since"`
	// Applied is the etcd revision up to which the node has applied all changes of namespaces.
	Applied int64 `json:"applied"`
	// Move is the state of the copies while the member drains, or copies sequences to members that are
	// filled.
	Move Move `json:"move,omitzero"`
	// Filling is set by Members if there is an order to fill the member (FillMembers).
	Filling bool `json:"-"`
}

// NodeRecord is the record of a node that stays in etcd while the node is down.
type NodeRecord struct {
	// Member is the last record of the member.
	Member
	Details
	// Written is the time at which the node wrote the record, by its own clock. Zero: a node of an older version wrote it.
	Written time.Time `json:"written,omitzero"`
	// Left is the time at which another member saw the end of the node's lease, by the clock of that member. It is zero
	// while the node is up, and if no member with this field was up at the end of the lease.
	Left time.Time `json:"left,omitzero"`
}

// Details is the state of a node that clients do not need to choose nodes, so that a Member does not have it.
type Details struct {
	NICs    []NIC    `json:"nics,omitempty"`
	Volumes []Volume `json:"volumes,omitempty"`
	// Erasures has the volumes that may still have secrets of ended epochs, sorted by path. Volumes has no
	// missing volumes.
	Erasures []Erasures `json:"erasures,omitempty"`
	// HotPrefixes is the number of the node's hot prefixes that have copies on other nodes.
	HotPrefixes int64 `json:"hot_prefixes,omitempty"`
}

// NIC is one NIC of the data plane.
type NIC struct {
	Name string `json:"name"`
	Addr string `json:"addr"`
	Up   bool   `json:"up"`
	// BitsPerSecond is the rate of the link; 0: unknown.
	BitsPerSecond int64 `json:"bits_per_second,omitempty"`
}

// Volume is one volume.
type Volume struct {
	Path string `json:"path"`
	// State is ok, suspect, failed, draining or removed.
	State string `json:"state"`
	// Reason is the cause of a state that is not ok, as of the last record.
	Reason        string `json:"reason,omitempty"`
	CapacityBytes int64  `json:"capacity_bytes"`
	// UsedBytes and Blocks are those at the last record.
	UsedBytes int64 `json:"used_bytes"`
	Blocks    int64 `json:"blocks,omitempty"`
}

// Erasures are the erasures of secrets of ended epochs that are not complete on one volume.
type Erasures struct {
	Volume string `json:"volume"`
	// Namespaces is the number of namespaces with such epochs.
	Namespaces int `json:"namespaces"`
	// SinceUnixMs is the time at which the first of the epochs ended.
	SinceUnixMs int64 `json:"since_unix_ms"`
}

// sameButUse reports whether two Details differ only by what changes while the node works normally: less than a hundredth of
// the use of each volume, the number of hot prefixes, and the texts of reasons.
func (d Details) sameButUse(e Details) bool {
	return slices.Equal(d.NICs, e.NICs) && slices.Equal(d.Erasures, e.Erasures) && slices.EqualFunc(d.Volumes, e.Volumes, func(a, b Volume) bool {
		small := max(a.UsedBytes-b.UsedBytes, b.UsedBytes-a.UsedBytes) <= a.CapacityBytes/100
		a.UsedBytes, a.Blocks, a.Reason = b.UsedBytes, b.Blocks, b.Reason
		return small && a == b
	})
}

// hotPrefixesEvery is the time between two writes of a record of which only the number of hot prefixes has changed, in lifetimes of
// the lease. The number may change each second, and etcd keeps all versions of a record until it is compacted.
const hotPrefixesEvery = 4

// same reports whether a record need not be written: written is the last one, of the given age.
func (r NodeRecord) same(written NodeRecord, age, ttl time.Duration) bool {
	return sameButUse(r.Member, written.Member) && r.Details.sameButUse(written.Details) && (r.HotPrefixes == written.HotPrefixes || age < hotPrefixesEvery*ttl)
}

// serves reports whether the member may serve a namespace as of revision Applied.
func (m Member) serves() bool { return m.State != Joining }

func decodeMember(key, value []byte) (Member, error) {
	var m Member
	if err := json.Unmarshal(value, &m); err != nil {
		return m, fmt.Errorf("membership: etcd key %s: %w", key, err)
	}
	return m, nil
}
