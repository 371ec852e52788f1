package membership

import (
	"encoding/json"
	"fmt"
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

// Member is the record of one node in etcd. A node that is down has none.
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

// serves reports whether the member may serve a namespace as of revision Applied.
func (m Member) serves() bool { return m.State != Joining }

func decodeMember(key, value []byte) (Member, error) {
	var m Member
	if err := json.Unmarshal(value, &m); err != nil {
		return m, fmt.Errorf("membership: etcd key %s: %w", key, err)
	}
	return m, nil
}
