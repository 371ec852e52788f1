package membership

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
)

// fillsPrefix begins the keys of the orders to fill members, by name. All keys have the same fillRecord: a new
// order replaces the keys of an earlier one.
func (c *Cluster) fillsPrefix() string { return c.opts.Prefix + "/fills/" }

// fillRecord is an order to fill members in etcd. From are the names of the members at the time of the order: each
// of them may have sequences to copy.
type fillRecord struct {
	drainRecord
	From []string `json:"from,omitempty"`
}

// FillEnd is the end of the last order to fill members that has ended. An order that another one replaces has no
// FillEnd.
type FillEnd struct {
	// Names are the members of the order.
	Names []string `json:"names"`
	// Stopped is set if FillMembers without names ended the order. Otherwise the copies were complete.
	Stopped bool `json:"stopped,omitempty"`
	// Revision is the etcd revision of the end.
	Revision int64 `json:"-"`
}

// fillEndRecord is a FillEnd in etcd.
type fillEndRecord struct {
	Version int `json:"version"`
	FillEnd
}

// fillEndKey has the last fillEndRecord.
func (c *Cluster) fillEndKey() string { return c.opts.Prefix + "/fill-end" }

// putFillEnd returns the operation that records the end of the orders in etcd.
func (c *Cluster) putFillEnd(orders []*mvccpb.KeyValue, stopped bool) (clientv3.Op, error) {
	end := FillEnd{Stopped: stopped}
	for _, kv := range orders {
		end.Names = append(end.Names, string(kv.Key[len(c.fillsPrefix()):]))
	}
	value, err := json.Marshal(fillEndRecord{recordVersion, end})
	if err != nil {
		return clientv3.Op{}, fmt.Errorf("membership: %w", err)
	}
	return clientv3.OpPut(c.fillEndKey(), string(value)), nil
}

func decodeFillEnd(kv *mvccpb.KeyValue) (*FillEnd, error) {
	var r fillEndRecord
	if err := json.Unmarshal(kv.Value, &r); err != nil {
		return nil, fmt.Errorf("membership: etcd key %s: %w", kv.Key, err)
	}
	r.Revision = kv.ModRevision
	return &r.FillEnd, nil
}

// FillMembers orders that the named members, which have joined, get the sequences whose homes they are: each
// other member copies these sequences from its store. Until all have done so, the members are Member.Filling.
// The order replaces an earlier one. Without names it ends the earlier one. FillMembers returns the etcd revision of
// the order, with which Listing.LastFill.Revision can be compared.
func (c *Cluster) FillMembers(ctx context.Context, names []string, d Drain) (revision int64, err error) {
	if d.BytesPerSecond < 0 {
		return 0, refusal{fmt.Errorf("a rate of %d bytes per second", d.BytesPerSecond), codes.InvalidArgument}
	}
	for {
		old, err := c.get(ctx, c.fillsPrefix(), clientv3.WithPrefix(), clientv3.WithKeysOnly())
		if err != nil {
			return 0, err
		}
		all, err := c.Members(ctx)
		if err != nil {
			return 0, err
		}
		ops, err := c.fillOps(names, all, d)
		if err != nil {
			return 0, err
		}
		if len(names) == 0 && len(old.Kvs) > 0 {
			end, err := c.putFillEnd(old.Kvs, true)
			if err != nil {
				return 0, err
			}
			ops = append(ops, end)
		}
		for _, kv := range old.Kvs {
			if name := string(kv.Key[len(c.fillsPrefix()):]); !slices.Contains(names, name) {
				ops = append(ops, clientv3.OpDelete(string(kv.Key)))
			}
		}
		resp, err := c.do(ctx, clientv3.OpTxn([]clientv3.Cmp{c.fillsUnchanged(old)}, ops, nil))
		if err != nil {
			return 0, err
		}
		if resp.Txn().Succeeded {
			return resp.Txn().Header.Revision, nil
		}
	}
}

// fillsUnchanged is the condition that no order was written after the orders were read.
func (c *Cluster) fillsUnchanged(read *clientv3.GetResponse) clientv3.Cmp {
	return clientv3.Compare(clientv3.ModRevision(c.fillsPrefix()), "<", read.Header.Revision+1).WithPrefix()
}

// fillOps returns the operations that write the order for the named members, of all members.
func (c *Cluster) fillOps(names []string, all []Member, d Drain) (ops []clientv3.Op, err error) {
	record := fillRecord{drainRecord: drainRecord{Version: recordVersion, Drain: d}}
	states := make(map[string]State)
	for _, m := range all {
		states[m.Name] = m.State
		record.From = append(record.From, m.Name)
	}
	value, err := json.Marshal(record)
	if err != nil {
		return nil, fmt.Errorf("membership: %w", err)
	}
	puts := make(map[string]bool)
	for _, name := range names {
		switch states[name] {
		case "":
			return nil, unknownMember(name)
		case Draining:
			return nil, refusal{fmt.Errorf("node %q drains and gets no sequences", name), codes.FailedPrecondition}
		}
		if !puts[name] {
			puts[name] = true
			ops = append(ops, clientv3.OpPut(c.fillsPrefix()+name, string(value)))
		}
	}
	if len(puts) == len(all) {
		return nil, refusal{errors.New("all nodes of the cluster are named: name those that have joined, and no others"), codes.InvalidArgument}
	}
	return ops, nil
}

// EndFill ends the order with the ID if all members have copied their sequences, and no node is down that was a
// member at the order, unless that node was drained or removed.
func (c *Cluster) EndFill(ctx context.Context, id int64) error {
	orders, err := c.get(ctx, c.fillsPrefix(), clientv3.WithPrefix())
	if err != nil || len(orders.Kvs) == 0 {
		return err
	}
	var order fillRecord
	if err := json.Unmarshal(orders.Kvs[0].Value, &order); err != nil {
		return fmt.Errorf("membership: etcd key %s: %w", orders.Kvs[0].Key, err)
	}
	all, err := c.Members(ctx)
	if err != nil {
		return err
	}
	up := make(map[string]bool)
	for _, m := range all {
		if up[m.Name] = true; m.State != Draining && (m.Move.Order != id || m.Move.Phase != MoveDone) {
			return nil
		}
	}
	if down := slices.DeleteFunc(order.From, func(name string) bool { return up[name] }); len(down) > 0 {
		if left, err := c.mayReturn(ctx, down); err != nil || left {
			return err
		}
	}
	end, err := c.putFillEnd(orders.Kvs, false)
	if err != nil {
		return err
	}
	_, err = c.do(ctx, clientv3.OpTxn([]clientv3.Cmp{c.fillsUnchanged(orders)}, []clientv3.Op{clientv3.OpDelete(c.fillsPrefix(), clientv3.WithPrefix()), end}, nil))
	return err
}

// mayReturn reports whether one of the nodes, which are down, was neither drained nor removed.
func (c *Cluster) mayReturn(ctx context.Context, down []string) (bool, error) {
	nodes, err := c.nodes(ctx)
	if err != nil {
		return false, err
	}
	drains, err := c.get(ctx, c.drainsPrefix(), clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		return false, err
	}
	for _, name := range down {
		drained := slices.ContainsFunc(drains.Kvs, func(kv *mvccpb.KeyValue) bool { return string(kv.Key) == c.drainsPrefix()+name })
		if n, ok := nodes[name]; ok && !n.removed && !drained {
			return true, nil
		}
	}
	return false, nil
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
