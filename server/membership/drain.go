package membership

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
)

// Drain is the order that a member's blocks be copied to the other members, or that members be filled
// (FillMembers). It is in etcd until UndrainMember or the end of the copies, so it also holds for later
// processes of the nodes.
type Drain struct {
	// BytesPerSecond is the largest rate of the copies; 0: the node's own setting.
	BytesPerSecond int64 `json:"bytes_per_second,omitempty"`
	// Since is the time of the order.
	Since time.Time `json:"since"`
}

// drainRecord is a Drain in etcd.
type drainRecord struct {
	Version int `json:"version"`
	Drain
}

// ID identifies the order among the orders for one member.
func (d Drain) ID() int64 { return d.Since.UnixNano() }

// Move is the state of the copies of a draining member.
type Move struct {
	// Order is the ID of the order that the copies belong to.
	Order int64 `json:"order,omitempty"`
	// Phase is MoveCopying, MoveWaiting or MoveDone; empty: the member does not drain.
	Phase MovePhase `json:"phase,omitempty"`
	// Blocks and Bytes are the blocks that the member has, and Copied those of them that other members
	// have, as far as they were compared.
	Blocks       int64 `json:"blocks,omitempty"`
	Bytes        int64 `json:"bytes,omitempty"`
	CopiedBlocks int64 `json:"copied_blocks,omitempty"`
	CopiedBytes  int64 `json:"copied_bytes,omitempty"`
	// BytesPerSecond is the present rate of the copies, and Seconds the time that the rest takes at
	// this rate; 0: unknown.
	BytesPerSecond int64 `json:"bytes_per_second,omitempty"`
	Seconds        int64 `json:"seconds,omitempty"`
	// Left is the number of blocks that could not be copied in the last pass, and Reason why the
	// first of them was not.
	Left   int64  `json:"left,omitempty"`
	Reason string `json:"reason,omitempty"`
	// Checked is the time at which the other members were asked for all blocks after the copies; zero: not yet, or by a node of
	// an older version.
	Checked time.Time `json:"checked,omitzero"`
}

// of returns the state if it is that of the order to drain the member or, without one, of the order to fill members. Otherwise
// the state is that of an earlier order, and of returns none.
func (m Move) of(drain, fill *Drain) Move {
	if drain == nil {
		drain = fill
	}
	if drain == nil || m.Order != drain.ID() {
		return Move{}
	}
	return m
}

// Copies are the counters of the copies of this process.
type Copies struct {
	// Blocks and Bytes were copied. Failures counts the blocks that could not be copied, once in each pass.
	Blocks, Bytes, Failures int64
}

// MovePhase is the phase of a Move.
type MovePhase string

const (
	// MoveCopying: blocks are compared and copied.
	MoveCopying MovePhase = "copying"
	// MoveWaiting: blocks are left that could not be copied. They are tried again.
	MoveWaiting MovePhase = "waiting"
	// MoveDone: all blocks were copied, or other members had them. These may have evicted some meanwhile: CopiedBlocks is the number of
	// blocks that they had at the time Checked. Blocks that are stored later are copied too.
	MoveDone MovePhase = "done"
)

func (c *Cluster) drainsPrefix() string { return c.opts.Prefix + "/drains/" }

func decodeDrain(key, value []byte) (*Drain, error) {
	var r drainRecord
	if err := json.Unmarshal(value, &r); err != nil {
		return nil, fmt.Errorf("membership: etcd key %s: %w", key, err)
	}
	if r.Version != recordVersion {
		return nil, fmt.Errorf("membership: etcd key %s has version %d; this program supports version %d: run the same release on all nodes", key, r.Version, recordVersion)
	}
	return &r.Drain, nil
}

// DrainMember orders that a member be drained, on this or another node. It fails if no other member
// would get new sequences. Repeated for a draining member, it replaces the order.
func (c *Cluster) DrainMember(ctx context.Context, name string, d Drain) error {
	if d.BytesPerSecond < 0 {
		return refusal{fmt.Errorf("a rate of %d bytes per second", d.BytesPerSecond), codes.InvalidArgument}
	}
	value, err := json.Marshal(drainRecord{Version: recordVersion, Drain: d})
	if err != nil {
		return fmt.Errorf("membership: %w", err)
	}
	for {
		orders, err := c.get(ctx, c.drainsPrefix(), clientv3.WithPrefix(), clientv3.WithKeysOnly())
		if err != nil {
			return err
		}
		if err := c.mayDrain(ctx, name); err != nil {
			return err
		}
		unchanged := clientv3.Compare(clientv3.ModRevision(c.drainsPrefix()), "<", orders.Header.Revision+1).WithPrefix()
		resp, err := c.do(ctx, clientv3.OpTxn([]clientv3.Cmp{unchanged}, []clientv3.Op{clientv3.OpPut(c.drainsPrefix()+name, string(value))}, nil))
		if err != nil || resp.Txn().Succeeded {
			return err
		}
	}
}

// mayDrain returns an error if the member cannot be drained.
func (c *Cluster) mayDrain(ctx context.Context, name string) error {
	all, err := c.Members(ctx)
	if err != nil {
		return err
	}
	known, others := false, 0
	for _, m := range all {
		switch {
		case m.Name == name:
			known = true
		case m.State == Serving:
			others++
		}
	}
	switch {
	case !known:
		return unknownMember(name)
	case others == 0:
		return refusal{fmt.Errorf("node %q cannot be drained: no other node of the cluster serves and is not draining", name), codes.FailedPrecondition}
	}
	return nil
}

// UndrainMember ends the order of DrainMember. Copied blocks stay where they are.
func (c *Cluster) UndrainMember(ctx context.Context, name string) error {
	all, err := c.Members(ctx)
	if err != nil {
		return err
	}
	known := false
	for _, m := range all {
		known = known || m.Name == name
	}
	resp, err := c.get(ctx, c.drainsPrefix()+name)
	if err != nil {
		return err
	}
	if !known && len(resp.Kvs) == 0 {
		return unknownMember(name)
	}
	_, err = c.do(ctx, clientv3.OpDelete(c.drainsPrefix()+name))
	return err
}

func unknownMember(name string) error {
	return refusal{fmt.Errorf("the cluster has no node %q that is up; penstock cluster members lists the nodes", name), codes.NotFound}
}

// do makes one change in etcd for an admin call.
func (c *Cluster) do(ctx context.Context, op clientv3.Op) (clientv3.OpResponse, error) {
	etcd := c.etcd.opened()
	if etcd == nil {
		return clientv3.OpResponse{}, c.failed(errors.New("not connected yet"))
	}
	ctx, cancel := context.WithTimeout(ctx, c.opts.TTL)
	defer cancel()
	resp, err := etcd.Do(ctx, op)
	if err != nil {
		return resp, c.failed(err)
	}
	return resp, nil
}

// Draining returns the order to drain this node, nil if there is none, as of the last answer of etcd,
// and a channel that is closed when that changes.
func (c *Cluster) Draining() (*Drain, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.drain, c.drainChanged
}

// setDrain takes over an order from etcd.
func (c *Cluster) setDrain(d *Drain) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.drain == d || c.drain != nil && d != nil && *c.drain == *d {
		return
	}
	c.drain = d
	close(c.drainChanged)
	c.drainChanged = make(chan struct{})
}

// MoveState returns the state of the copies of this node, and the counters of all of its copies. The state
// is zero if there is no order to drain the node or to fill others.
func (c *Cluster) MoveState() (Move, Copies) {
	order, _ := c.Draining()
	if order == nil {
		order, _ = c.Filling()
	}
	m := c.opts.Move()
	if order == nil || m.Order != order.ID() {
		m = Move{}
	}
	return m, c.opts.Copies()
}

// Moved makes the member's record have the present Options.Move soon.
func (c *Cluster) Moved() { c.touch() }

// followDrain follows the order for this node until ctx ends.
func (s *session) followDrain(ctx context.Context) error {
	key, said := s.drainsPrefix()+s.opts.Member.Name, ""
	for {
		err := s.watchDrain(ctx, key)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if text := err.Error(); text != said {
			s.log.Warn("the order to drain this node cannot be followed; it is tried again", "err", err)
			said = text
		}
		select {
		case <-time.After(s.opts.TTL / 4):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (s *session) watchDrain(ctx context.Context, key string) error {
	limited, cancel := context.WithTimeout(ctx, s.opts.TTL)
	defer cancel()
	resp, err := s.etcd.Get(limited, key)
	if err != nil {
		return fmt.Errorf("read the order to drain: %w", err)
	}
	take := func(value []byte) error {
		if len(value) == 0 {
			s.setDrain(nil)
			return nil
		}
		d, err := decodeDrain([]byte(key), value)
		if err == nil {
			s.setDrain(d)
		}
		return err
	}
	var value []byte
	if len(resp.Kvs) > 0 {
		value = resp.Kvs[0].Value
	}
	if err := take(value); err != nil {
		return err
	}
	ctx, end := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer end()
	for resp := range s.etcd.Watch(ctx, key, clientv3.WithRev(resp.Header.Revision+1)) {
		if err := resp.Err(); err != nil {
			return fmt.Errorf("watch the order to drain: %w", err)
		}
		for _, e := range resp.Events {
			if err := take(e.Kv.Value); err != nil {
				return err
			}
		}
	}
	return errors.New("the watch of the order to drain has ended")
}
