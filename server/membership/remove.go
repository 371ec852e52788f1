package membership

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
)

// Removed is the result of RemoveMember.
type Removed struct {
	// Up is set if the node was in the list of members, so it was serving or was about to.
	Up bool
	// LostBlocks and LostBytes are the blocks of the node that no other node is known to have, and Leases the
	// open leases and pins of the node, as of its last record. LostBytes is the size of the slots, or the payload
	// if the node has begun to drain.
	LostBlocks, LostBytes, Leases int64
}

// removal is the record that the node with some volumes was removed.
type removal struct {
	Version int       `json:"version"`
	Name    string    `json:"name"`
	Since   time.Time `json:"since"`
}

// nodesPrefix begins the keys of the NodeRecord of each node, by Member.Store. They are under no lease, so
// they also have the nodes that are down. removedPrefix begins the keys of removals, by Member.Store.
func (c *Cluster) nodesPrefix() string   { return c.opts.Prefix + "/nodes/" }
func (c *Cluster) removedPrefix() string { return c.opts.Prefix + "/removed/" }

func (c *Cluster) removedKey() string { return c.removedPrefix() + c.opts.Member.Store }

// errRemoved: the volumes of this node were removed from the cluster.
var errRemoved = errors.New("removed from the cluster")

// wasRemoved returns the error of a node that is not admitted.
func (c *Cluster) wasRemoved() error {
	name := c.opts.Member.Name
	return fmt.Errorf("node %q was %w (penstock cluster remove), and serves nothing: delete its volumes to start it as an empty node, or admit it with its blocks by penstock cluster readmit %s on another node", name, errRemoved, name)
}

// noteRemoved makes Admit return the reason while the node is removed.
func (c *Cluster) noteRemoved(err error) {
	if errors.Is(err, errRemoved) {
		c.removed.Store(&refusal{err, codes.ResourceExhausted})
	} else if c.removed.Load() != nil {
		c.removed.Store(nil)
	}
}

// lastRecord returns the record that stays in etcd when the node is down. Move is the last state that the
// copies had, because they end before the node does.
func (s *session) lastRecord(m NodeRecord) NodeRecord {
	s.Cluster.mu.Lock()
	defer s.Cluster.mu.Unlock()
	m.Written = time.Now().UTC()
	if m.Move.Phase != "" {
		s.lastMove = m.Move
	}
	m.Move = s.lastMove
	return m
}

// followRemoval returns errRemoved when this node is removed.
func (s *session) followRemoval(ctx context.Context) error {
	for {
		err := s.watchRemoval(ctx)
		if ctx.Err() != nil || errors.Is(err, errRemoved) {
			return err
		}
		select { // renew ends the session if etcd does not answer for long
		case <-time.After(s.opts.TTL / 4):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (s *session) watchRemoval(ctx context.Context) error {
	limited, cancel := context.WithTimeout(ctx, s.opts.TTL)
	defer cancel()
	resp, err := s.etcd.Get(limited, s.removedKey())
	if err != nil {
		return fmt.Errorf("read the removed nodes: %w", err)
	}
	if len(resp.Kvs) > 0 {
		return s.wasRemoved()
	}
	ctx, end := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer end()
	for resp := range s.etcd.Watch(ctx, s.removedKey(), clientv3.WithRev(resp.Header.Revision+1)) {
		if err := resp.Err(); err != nil {
			return fmt.Errorf("watch the removed nodes: %w", err)
		}
		for _, e := range resp.Events {
			if len(e.Kv.Value) > 0 {
				return s.wasRemoved()
			}
		}
	}
	return errors.New("the watch of the removed nodes has ended")
}

// node is what etcd has of one name.
type node struct {
	Member
	// up is set if the node is in the list of members. removed is set if the volumes of the record are
	// removed.
	up, removed bool
}

// nodes returns the last record of each name: that of the member, if there is one, and otherwise the record
// that was written last.
func (c *Cluster) nodes(ctx context.Context) (map[string]node, error) {
	records, err := c.get(ctx, c.nodesPrefix(), clientv3.WithPrefix())
	if err != nil {
		return nil, err
	}
	removals, err := c.get(ctx, c.removedPrefix(), clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		return nil, err
	}
	members, _, err := c.members(ctx)
	if err != nil {
		return nil, err
	}
	removed := make(map[string]bool, len(removals.Kvs))
	for _, kv := range removals.Kvs {
		removed[string(kv.Key[len(c.removedPrefix()):])] = true
	}
	all, err := newest(records.Kvs)
	if err != nil {
		return nil, err
	}
	out := make(map[string]node, len(all))
	for name, r := range all {
		out[name] = node{Member: r.Member, removed: removed[r.Store]}
	}
	for _, m := range members {
		n := node{Member: m, up: true, removed: removed[m.Store]}
		if last, ok := out[m.Name]; ok && last.Store == m.Store {
			n.Move = last.Move
		}
		out[m.Name] = n
	}
	return out, nil
}

// removedNames returns the names of the nodes that were removed, and that no other node has.
func (c *Cluster) removedNames(ctx context.Context) (names []string, err error) {
	all, err := c.nodes(ctx)
	for name, n := range all {
		if n.removed {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, err
}

// RemoveMember takes a node out of the cluster: clients forget it, and a process with its volumes is not
// admitted any more. It fails if the node is up, or has blocks that were not copied to others, unless force
// is set, and if no other member would serve. With dryRun it changes nothing. RemoveMember returns when a
// node that was up has stopped to serve, or its lease has ended.
func (c *Cluster) RemoveMember(ctx context.Context, name string, force, dryRun bool) (Removed, error) {
	value, err := json.Marshal(removal{Version: recordVersion, Name: name, Since: time.Now().UTC()})
	if err != nil {
		return Removed{}, fmt.Errorf("membership: %w", err)
	}
	for {
		removals, err := c.get(ctx, c.removedPrefix(), clientv3.WithPrefix(), clientv3.WithKeysOnly())
		if err != nil {
			return Removed{}, err
		}
		n, lost, err := c.mayRemove(ctx, name, force)
		if err != nil || dryRun {
			return lost, err
		}
		// Another node may be removed after the check: one that serves must be left. The node may join after the
		// check, too.
		conditions := []clientv3.Cmp{clientv3.Compare(clientv3.ModRevision(c.removedPrefix()), "<", removals.Header.Revision+1).WithPrefix()}
		if !force {
			conditions = append(conditions, clientv3.Compare(clientv3.CreateRevision(c.membersPrefix()+name), "=", 0))
		}
		resp, err := c.do(ctx, clientv3.OpTxn(conditions, []clientv3.Op{
			clientv3.OpPut(c.removedPrefix()+n.Store, string(value)), clientv3.OpDelete(c.drainsPrefix() + name), clientv3.OpDelete(c.fillsPrefix() + name),
		}, nil))
		if err != nil {
			return lost, err
		}
		if resp.Txn().Succeeded {
			return lost, c.untilLeft(ctx, n.Member)
		}
	}
}

// mayRemove returns the node and the losses of its removal, or the reason why it is refused.
func (c *Cluster) mayRemove(ctx context.Context, name string, force bool) (node, Removed, error) {
	all, err := c.nodes(ctx)
	if err != nil {
		return node{}, Removed{}, err
	}
	n, ok := all[name]
	if !ok {
		return n, Removed{}, refusal{fmt.Errorf("the cluster has no node %q", name), codes.NotFound}
	}
	if n.removed && !n.up {
		return n, Removed{}, refusal{fmt.Errorf("node %q was removed already", name), codes.FailedPrecondition}
	}
	others := 0
	for other, o := range all {
		if other != name && o.up && o.State == Serving && !o.removed {
			others++
		}
	}
	if others == 0 {
		return n, Removed{}, refusal{fmt.Errorf("node %q cannot be removed: no other node of the cluster serves", name), codes.FailedPrecondition}
	}
	lost, drained := Removed{Up: n.up, LostBlocks: n.Blocks, LostBytes: n.UsedBytes, Leases: n.Leases}, false
	order, err := c.get(ctx, c.drainsPrefix()+name)
	if err != nil {
		return n, lost, err
	}
	if len(order.Kvs) > 0 {
		d, err := decodeDrain(order.Kvs[0].Key, order.Kvs[0].Value)
		if err != nil {
			return n, lost, err
		}
		if n.Move.Order == d.ID() {
			lost.LostBlocks, lost.LostBytes = n.Move.Blocks-n.Move.CopiedBlocks, n.Move.Bytes-n.Move.CopiedBytes
			drained = n.Move.Phase == MoveDone
		}
	}
	switch {
	case force:
	case !drained:
		err = refusal{fmt.Errorf("node %q is not drained, and %d blocks would be lost: run penstock cluster drain %s --wait first, or give the blocks up with --force", name, lost.LostBlocks, name), codes.FailedPrecondition}
	case n.up:
		err = refusal{fmt.Errorf("node %q is drained and still up: stop its process first, or use --force", name), codes.FailedPrecondition}
	}
	return n, lost, err
}

// untilLeft returns when the record of the member is not in the list any more.
func (c *Cluster) untilLeft(ctx context.Context, m Member) error {
	limited, cancel := context.WithTimeout(ctx, 2*c.opts.TTL)
	defer cancel()
	tick := time.NewTicker(max(c.opts.TTL/40, 50*time.Millisecond))
	defer tick.Stop()
	for {
		all, _, err := c.members(limited)
		if err == nil {
			left := true
			for _, other := range all {
				left = left && (other.Name != m.Name || other.Store != m.Store)
			}
			if left {
				return nil
			}
		}
		select {
		case <-tick.C:
		case <-limited.Done():
			return refusal{fmt.Errorf("node %q is removed, and has not left the list of members yet: %w", m.Name, context.Cause(limited)), codes.DeadlineExceeded}
		}
	}
}

// ReadmitMember ends the effect of RemoveMember: the process with the volumes of the node joins again.
func (c *Cluster) ReadmitMember(ctx context.Context, name string) error {
	resp, err := c.get(ctx, c.removedPrefix(), clientv3.WithPrefix())
	if err != nil {
		return err
	}
	var found []clientv3.Op
	for _, kv := range resp.Kvs {
		var r removal
		if err := json.Unmarshal(kv.Value, &r); err != nil {
			return fmt.Errorf("membership: etcd key %s: %w", kv.Key, err)
		}
		if r.Name == name {
			found = append(found, clientv3.OpDelete(string(kv.Key)))
		}
	}
	if len(found) == 0 {
		return refusal{fmt.Errorf("no node %q was removed from the cluster", name), codes.NotFound}
	}
	_, err = c.do(ctx, clientv3.OpTxn(nil, found, nil))
	return err
}
