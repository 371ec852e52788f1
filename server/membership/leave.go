package membership

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// leave is the end of a member's lease.
type leave struct {
	name, store string
	// rev is the revision of the end, and at the time at which this member saw it.
	rev int64
	at  time.Time
}

// leavesPerTxn is the number of leaves in one transaction; etcd takes 128 operations by default.
const leavesPerTxn = 64

// followLeaves notes in the record of each member that leaves the time at which its lease has ended, until ctx ends.
//
// All members see the end of a lease. Each waits for a random time of at most a quarter of the TTL, and reads then whether
// another one has noted it. So one or a few of them write, and the time in the record is that of the end all the same.
func (s *session) followLeaves(ctx context.Context) error {
	said := ""
	for {
		err := s.watchLeaves(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if errors.Is(err, rpctypes.ErrCompacted) {
			s.leftAfter = 0 // the leaves before the next watch are not noted
		}
		if text := err.Error(); text != said {
			s.log.Warn("the times at which nodes leave the cluster are not noted; it is tried again", "err", err)
			said = text
		}
		select {
		case <-time.After(s.opts.TTL / 4):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (s *session) watchLeaves(ctx context.Context) error {
	ctx, end := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer end()
	opts := []clientv3.OpOption{clientv3.WithPrefix(), clientv3.WithFilterPut(), clientv3.WithPrevKV(), clientv3.WithProgressNotify()}
	if s.leftAfter > 0 {
		opts = append(opts, clientv3.WithRev(s.leftAfter+1))
	}
	changes := s.etcd.Watch(ctx, s.membersPrefix(), opts...)
	var left []leave
	var due <-chan time.Time
	for {
		select {
		case resp, open := <-changes:
			if err := resp.Err(); err != nil {
				return fmt.Errorf("watch the members: %w", err)
			}
			if !open {
				return errors.New("the watch of the members has ended")
			}
			for _, e := range resp.Events {
				// A session that has ended may have left a record with an older lease, whose end is no leave of this node.
				if e.PrevKv == nil || string(e.Kv.Key) == s.key {
					continue
				}
				m, err := decodeMember(e.PrevKv.Key, e.PrevKv.Value)
				if err != nil {
					continue // of a version with other records
				}
				left = append(left, leave{name: m.Name, store: m.Store, rev: e.Kv.ModRevision, at: time.Now().UTC()})
			}
			if len(left) == 0 && resp.IsProgressNotify() {
				s.leftAfter = max(s.leftAfter, resp.Header.Revision)
			}
			if len(left) > 0 && due == nil {
				due = time.After(rand.N(s.opts.TTL / 4))
			}
		case <-due:
			n := min(len(left), leavesPerTxn)
			if err := s.noteLeaves(ctx, left[:n]); err != nil {
				return err
			}
			s.leftAfter = max(s.leftAfter, left[n-1].rev)
			if left, due = left[n:], nil; len(left) > 0 {
				due = time.After(0)
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// noteLeaves writes the times of leaves that no other member has noted.
func (s *session) noteLeaves(ctx context.Context, left []leave) error {
	ctx, cancel := context.WithTimeout(ctx, s.opts.TTL)
	defer cancel()
	var reads []clientv3.Op
	for _, l := range left {
		// A later revision is that of a note, or of the node that has joined again.
		reads = append(reads, clientv3.OpGet(s.nodesPrefix()+l.store, clientv3.WithMaxModRev(l.rev)))
	}
	resp, err := s.etcd.Txn(ctx).Then(reads...).Commit()
	if err != nil {
		return fmt.Errorf("read the records of nodes that have left: %w", err)
	}
	noted := false
	for i, l := range left {
		kvs := resp.Responses[i].GetResponseRange().Kvs
		if len(kvs) == 0 {
			continue
		}
		value, err := withLeft(kvs[0], l.at)
		if err != nil {
			s.log.Warn("the time at which a node left the cluster cannot be noted", "node", l.name, "err", err)
			continue
		}
		done, err := s.etcd.Txn(ctx).If(
			clientv3.Compare(clientv3.ModRevision(string(kvs[0].Key)), "=", kvs[0].ModRevision),
			clientv3.Compare(clientv3.CreateRevision(s.membersPrefix()+l.name), "=", 0),
			clientv3.Compare(clientv3.CreateRevision(s.removedPrefix()+l.store), "=", 0),
		).Then(clientv3.OpPut(string(kvs[0].Key), value)).Commit()
		if err != nil {
			return fmt.Errorf("note the time at which node %q left: %w", l.name, err)
		}
		noted = noted || done.Succeeded
	}
	if noted {
		return s.sweep(ctx)
	}
	return nil
}

// withLeft returns the NodeRecord in etcd with the time of the end of the lease. It keeps fields of newer versions.
func withLeft(kv *mvccpb.KeyValue, at time.Time) (string, error) {
	fields := make(map[string]json.RawMessage)
	if err := json.Unmarshal(kv.Value, &fields); err != nil {
		return "", fmt.Errorf("membership: etcd key %s: %w", kv.Key, err)
	}
	left, err := json.Marshal(at)
	if err != nil {
		return "", fmt.Errorf("membership: %w", err)
	}
	fields["left"] = left
	value, err := json.Marshal(fields)
	if err != nil {
		return "", fmt.Errorf("membership: %w", err)
	}
	return string(value), nil
}

// removedRecordAge is the time for which the NodeRecord of a removed node stays in etcd. Until then the list of removed
// nodes has the node, so that clients forget it; they keep the place of a node that has left for a few minutes.
const removedRecordAge = 24 * time.Hour

// sweep deletes the records that nothing reads: of nodes that were removed long ago, and of volumes whose node has other
// volumes. The member that notes a leave calls it, so the records in etcd are bounded without a timer.
func (s *session) sweep(ctx context.Context) error {
	resp, err := s.etcd.Txn(ctx).Then(
		clientv3.OpGet(s.nodesPrefix(), clientv3.WithPrefix()), clientv3.OpGet(s.removedPrefix(), clientv3.WithPrefix()),
	).Commit()
	if err != nil {
		return fmt.Errorf("read the records of nodes: %w", err)
	}
	all := resp.Responses[0].GetResponseRange().Kvs
	records, err := newest(all)
	if err != nil {
		return err
	}
	old := make(map[string]bool)
	for _, kv := range resp.Responses[1].GetResponseRange().Kvs {
		var r removal
		if err := json.Unmarshal(kv.Value, &r); err != nil {
			return fmt.Errorf("membership: etcd key %s: %w", kv.Key, err)
		}
		old[string(kv.Key[len(s.removedPrefix()):])] = time.Since(r.Since) > removedRecordAge
	}
	keep := make(map[string]bool, len(records))
	for _, r := range records {
		keep[s.nodesPrefix()+r.Store] = !old[r.Store]
	}
	for _, kv := range all {
		if keep[string(kv.Key)] {
			continue
		}
		unchanged := clientv3.Compare(clientv3.ModRevision(string(kv.Key)), "=", kv.ModRevision)
		if _, err := s.etcd.Txn(ctx).If(unchanged).Then(clientv3.OpDelete(string(kv.Key))).Commit(); err != nil {
			return fmt.Errorf("delete the record of a node: %w", err)
		}
	}
	return nil
}

// revised is a NodeRecord with its revision.
type revised struct {
	NodeRecord
	rev int64
}

// newest returns the NodeRecord that was written last of each name.
func newest(kvs []*mvccpb.KeyValue) (map[string]revised, error) {
	all := make(map[string]revised, len(kvs))
	for _, kv := range kvs {
		r := revised{rev: kv.ModRevision}
		if err := json.Unmarshal(kv.Value, &r.NodeRecord); err != nil {
			return nil, fmt.Errorf("membership: etcd key %s: %w", kv.Key, err)
		}
		if old, ok := all[r.Name]; !ok || old.rev < r.rev {
			all[r.Name] = r
		}
	}
	return all, nil
}
