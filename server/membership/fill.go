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

// fillsPrefix begins the keys of the orders to fill members, by name. All keys have the same Drain: a new
// order replaces the keys of an earlier one.
func (c *Cluster) fillsPrefix() string { return c.opts.Prefix + "/fills/" }

// FillMembers orders that the named members, which have joined, get the sequences whose homes they are: each
// other member copies these sequences from its store. Until all have done so, the members are Member.Filling.
// The order replaces an earlier one. Without names it ends the earlier one.
func (c *Cluster) FillMembers(ctx context.Context, names []string, d Drain) error {
	if d.BytesPerSecond < 0 {
		return refusal{fmt.Errorf("a rate of %d bytes per second", d.BytesPerSecond), codes.InvalidArgument}
	}
	value, err := json.Marshal(drainRecord{Version: recordVersion, Drain: d})
	if err != nil {
		return fmt.Errorf("membership: %w", err)
	}
	all, err := c.Members(ctx)
	if err != nil {
		return err
	}
	states, others := make(map[string]State), 0
	for _, m := range all {
		states[m.Name] = m.State
		others++
	}
	puts := make(map[string]bool)
	var ops []clientv3.Op
	for _, name := range names {
		switch states[name] {
		case "":
			return unknownMember(name)
		case Draining:
			return refusal{fmt.Errorf("node %q drains and gets no sequences", name), codes.FailedPrecondition}
		}
		if !puts[name] {
			puts[name] = true
			ops = append(ops, clientv3.OpPut(c.fillsPrefix()+name, string(value)))
		}
	}
	if len(puts) == others {
		return refusal{errors.New("all nodes of the cluster are named: name those that have joined, and no others"), codes.InvalidArgument}
	}
	old, err := c.get(ctx, c.fillsPrefix(), clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		return err
	}
	for _, kv := range old.Kvs {
		if !puts[string(kv.Key[len(c.fillsPrefix()):])] {
			ops = append(ops, clientv3.OpDelete(string(kv.Key)))
		}
	}
	_, err = c.do(ctx, clientv3.OpTxn(nil, ops, nil))
	return err
}

// EndFill ends the order with the ID if all members have copied their sequences.
func (c *Cluster) EndFill(ctx context.Context, id int64) error {
	orders, err := c.get(ctx, c.fillsPrefix(), clientv3.WithPrefix())
	if err != nil || len(orders.Kvs) == 0 {
		return err
	}
	all, err := c.Members(ctx)
	if err != nil {
		return err
	}
	for _, m := range all {
		if m.State != Draining && (m.Move.Order != id || m.Move.Phase != MoveDone) {
			return nil
		}
	}
	unchanged := clientv3.Compare(clientv3.ModRevision(c.fillsPrefix()), "<", orders.Header.Revision+1).WithPrefix()
	_, err = c.do(ctx, clientv3.OpTxn([]clientv3.Cmp{unchanged}, []clientv3.Op{clientv3.OpDelete(c.fillsPrefix(), clientv3.WithPrefix())}, nil))
	return err
}

// Filling returns the order to fill members, nil if there is none, as of the last answer of etcd, and a
// channel that is closed when that changes.
func (c *Cluster) Filling() (*Drain, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.fill, c.fillChanged
}

// setFill takes over an order from etcd.
func (c *Cluster) setFill(d *Drain) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fill == d || c.fill != nil && d != nil && *c.fill == *d {
		return
	}
	c.fill = d
	close(c.fillChanged)
	c.fillChanged = make(chan struct{})
}

// followFills follows the orders to fill members until ctx ends.
func (s *session) followFills(ctx context.Context) error {
	said := ""
	for {
		err := s.watchFills(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if text := err.Error(); text != said {
			s.log.Warn("the order to fill nodes cannot be followed; it is tried again", "err", err)
			said = text
		}
		select {
		case <-time.After(s.opts.TTL / 4):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (s *session) watchFills(ctx context.Context) error {
	ctx, end := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer end()
	var changes clientv3.WatchChan
	for {
		limited, cancel := context.WithTimeout(ctx, s.opts.TTL)
		resp, err := s.etcd.Get(limited, s.fillsPrefix(), clientv3.WithPrefix(), clientv3.WithLimit(1))
		cancel()
		if err != nil {
			return fmt.Errorf("read the order to fill nodes: %w", err)
		}
		var order *Drain
		if len(resp.Kvs) > 0 {
			if order, err = decodeDrain(resp.Kvs[0].Key, resp.Kvs[0].Value); err != nil {
				return err
			}
		}
		s.setFill(order)
		if changes == nil {
			changes = s.etcd.Watch(ctx, s.fillsPrefix(), clientv3.WithPrefix(), clientv3.WithRev(resp.Header.Revision+1))
		}
		change, open := <-changes
		if err := change.Err(); err != nil {
			return fmt.Errorf("watch the order to fill nodes: %w", err)
		}
		if !open {
			return errors.New("the watch of the order to fill nodes has ended")
		}
	}
}
