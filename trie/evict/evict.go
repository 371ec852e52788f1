package evict

import "fmt"

// Node is a node number. The owner of the nodes assigns numbers densely from 1; 0 means no node.
// The memory of a policy is proportional to the highest node number.
type Node = uint32

// Kind names a policy.
type Kind uint8

const (
	// S3FIFO has a small FIFO queue in front of a large one. A touched node of the large queue
	// moves to the head of that queue instead of being evicted. S3FIFO remembers which content it
	// evicted from the small queue. If such content is inserted again, it enters the large queue
	// directly.
	S3FIFO Kind = iota + 1
	// LRU evicts the node whose last touch is the oldest.
	LRU
	// FIFO evicts the node that was inserted first.
	FIFO
)

// Default is the policy with the highest hit rate on the traces (docs/benchmarks.md).
const Default = S3FIFO

// Kinds returns every policy, in a stable order.
func Kinds() []Kind { return []Kind{S3FIFO, LRU, FIFO} }

// String returns the kind's name in the configuration: s3fifo, lru, fifo.
func (k Kind) String() string {
	switch k {
	case S3FIFO:
		return "s3fifo"
	case LRU:
		return "lru"
	case FIFO:
		return "fifo"
	}
	return fmt.Sprintf("Kind(%d)", uint8(k))
}

// ParseKind is the inverse of Kind.String; "s3-fifo" is accepted too.
func ParseKind(s string) (Kind, error) {
	if s == "s3-fifo" {
		return S3FIFO, nil
	}
	for _, k := range Kinds() {
		if k.String() == s {
			return k, nil
		}
	}
	return 0, fmt.Errorf("evict: policy %q; want s3fifo, lru or fifo", s)
}

// A Policy keeps an order of eviction. Touch, Heat and Parked may run concurrently with each other; every
// other method needs exclusive access. The owner of the nodes holds its lock for reading around
// Touch and Heat and for writing around all other methods.
type Policy interface {
	// Kind returns the policy's kind.
	Kind() Kind
	// Insert adds a node that is not in the policy. key identifies the node's content: content that
	// is inserted again after its eviction has the same key. A policy that remembers evicted
	// content keeps content longer if it is inserted again soon after its eviction.
	Insert(n Node, key uint64)
	// InsertCold adds a cold node, which is evicted before all nodes added by Insert. Among cold
	// nodes the order is FIFO.
	InsertCold(n Node)
	// Demote puts a node into a list whose nodes the policy evicts before all other nodes, in the order of the calls, and
	// forgets the node's touches. A later touch removes the node from the list, except under FIFO, which ignores
	// touches. Demote ignores a node that is not in the policy.
	Demote(n Node)
	// Touch records a hit. Concurrent touches may be lost. When a chain is hit, touch the deepest
	// node first and the root last, so that an ancestor counts as at least as recent as its
	// descendants.
	Touch(n Node)
	// Remove removes a node without remembering its content. A node that is not in the policy is
	// ignored.
	Remove(n Node)
	// Victim returns the next node to evict for which evictable is true. The node stays in the
	// policy until the caller calls Evicted or Remove. If evictable returns false for the next
	// node, that node is parked: it is taken out of its queue until Unpark. Victim decrements
	// *steps for each node that it examines, and returns ok false when *steps reaches 0. If ok is
	// false and *steps is not 0, every node is parked.
	Victim(steps *int, evictable func(Node) bool) (n Node, ok bool)
	// Evicted removes a victim and remembers its content under key.
	Evicted(n Node, key uint64)
	// Parked reports whether n waits for Unpark.
	Parked(n Node) bool
	// Unpark puts a parked node at the end of its former queue that is evicted first. A node that
	// is not parked is ignored.
	Unpark(n Node)
	// Cool removes one touch from n and reports whether n had a touch. The owner calls Cool when it
	// evicts nodes of one namespace only, in an order of its own, so that touched nodes get a
	// second chance in that order too.
	Cool(n Node) bool
	// Heat returns how much n has been touched, for an order of nodes by use: 0 if the policy knows of
	// no touch.
	Heat(n Node) int
	// Len returns the number of nodes in the policy, parked nodes included.
	Len() int
	// Bytes returns the size of the policy's memory in bytes.
	Bytes() int64
}

// New returns an empty policy.
func New(kind Kind, tuning Tuning) (Policy, error) {
	tuning.EnsureDefaults()
	if err := tuning.Validate(); err != nil {
		return nil, err
	}
	switch kind {
	case S3FIFO:
		return &s3fifo{tuning: tuning}, nil
	case LRU:
		return newLRU(), nil
	case FIFO:
		return &fifo{}, nil
	}
	return nil, fmt.Errorf("evict: unknown policy %d; want one of %v", kind, Kinds())
}

// Tuning adjusts S3FIFO; the zero value means the defaults. Other policies
// ignore it.
type Tuning struct {
	// SmallPercent is the share of all nodes, in percent, above which nodes are evicted from the
	// small queue; default 70. The S3-FIFO paper uses 10, which suits caches of files. A session
	// reads all of its blocks again or none. With 10, the main queue keeps blocks of ended
	// sessions, while blocks of live sessions are evicted from the small queue before their first
	// reuse (docs/benchmarks.md).
	SmallPercent int
	// PromoteTouches is the number of touches in the small queue that move a node to the main queue
	// instead of evicting it: 1 to 3, default 1.
	PromoteTouches int
	// GhostPercent is the number of evicted nodes whose content is remembered, in percent of the
	// number of nodes in the policy; default 100.
	GhostPercent int
}

// EnsureDefaults fills the fields that are zero.
func (t *Tuning) EnsureDefaults() {
	if t.SmallPercent == 0 {
		t.SmallPercent = 70
	}
	if t.PromoteTouches == 0 {
		t.PromoteTouches = 1
	}
	if t.GhostPercent == 0 {
		t.GhostPercent = 100
	}
}

// Validate reports the first field that is out of range, or nil.
func (t Tuning) Validate() error {
	switch {
	case t.SmallPercent < 1 || t.SmallPercent > 90:
		return fmt.Errorf("evict: small queue of %d %%; want 1 to 90", t.SmallPercent)
	case t.PromoteTouches < 1 || t.PromoteTouches > maxTouches:
		return fmt.Errorf("evict: promotion after %d touches; want 1 to %d", t.PromoteTouches, maxTouches)
	case t.GhostPercent < 0 || t.GhostPercent > 400:
		return fmt.Errorf("evict: ghosts for %d %% of the nodes; want 0 to 400", t.GhostPercent)
	}
	return nil
}
