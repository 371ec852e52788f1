package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/placement"
)

// directory follows the cluster's list of members. It has the time at which each member was last in
// the list. Only one goroutine uses it.
type directory struct {
	store *Store
	// members are the nodes in the list, by their names.
	members map[string]*member
	// absent is a node that is down, for a table without members.
	absent *node
}

// member is a node that is in the list of members, or was.
type member struct {
	*node
	place placement.Place
	seen  time.Time
}

// discover reads the list of members, and follows it until the Store is closed. If no seed (a node
// of Options.Servers) returns the list, all blocks are misses until a seed does. It fails if the
// seeds that answer are not in a cluster, or refuse the client.
func (s *Store) discover(ctx context.Context, warn *slog.Logger) error {
	d := &directory{store: s, members: make(map[string]*member), absent: newNode(s, "the cluster of "+strings.Join(s.opts.Servers, ","))}
	d.absent.leave()
	d.publish(nil, nil)
	switch err := d.refresh(ctx); {
	case errors.Is(err, errDown):
		warn.Warn("no storage node returns the list of members; it is tried again", "servers", s.opts.Servers, "err", hideInternal(err))
	case err != nil:
		return err
	}
	s.spawn(d.run)
	return nil
}

// run reads the list of members at intervals.
func (d *directory) run() {
	tick := time.NewTicker(d.store.opts.MembersEvery)
	defer tick.Stop()
	failed := false
	for {
		select {
		case <-tick.C:
		case <-d.store.ctx.Done():
			return
		}
		err := d.refresh(d.store.ctx)
		if err != nil && !failed && d.store.ctx.Err() == nil {
			d.store.opts.Logger.Warn("the list of members cannot be read; the last one stays valid", "err", hideInternal(err))
		}
		failed = err != nil
	}
}

// refresh replaces the table with the present members. It asks the members, one after the other, and
// then all seeds at once. The error is errDown if no node has returned a list.
func (d *directory) refresh(ctx context.Context) error {
	var errs []error
	take := func(list *pb.ListMembersResponse, err error) bool {
		if err == nil {
			d.replace(list.GetMembers(), list.GetRemoved())
			return true
		}
		errs = append(errs, err)
		return false
	}
	for _, m := range d.members {
		if sess, err := m.live(ctx); err == nil && take(d.store.listMembers(ctx, m.target, sess.admin)) {
			return nil
		}
	}
	if take(d.store.askSeeds(ctx)) {
		return nil
	}
	if ctx.Err() != nil {
		return fmt.Errorf("client: list the members: %w", ctx.Err())
	}
	err := errors.Join(errs...)
	if errors.Is(err, ErrAuth) || errors.Is(err, ErrRequest) {
		return err
	}
	return fmt.Errorf("client: list the members: %w: %w", errDown, err)
}

// askSeeds asks all seeds and returns the first list, so that a seed that does not answer delays no
// other.
func (s *Store) askSeeds(ctx context.Context) (*pb.ListMembersResponse, error) {
	ctx, cancel := context.WithCancel(ctx)
	var asking sync.WaitGroup
	defer asking.Wait()
	defer cancel()
	lists := make(chan *pb.ListMembersResponse, len(s.opts.Servers))
	errs := make(chan error, len(s.opts.Servers))
	for _, target := range s.opts.Servers {
		asking.Go(func() {
			if list, err := s.askSeed(ctx, target); err != nil {
				errs <- err
			} else {
				lists <- list
			}
		})
	}
	var all []error
	for range s.opts.Servers {
		select {
		case list := <-lists:
			return list, nil
		case err := <-errs:
			all = append(all, err)
		}
	}
	return nil, errors.Join(all...)
}

// askSeed returns the members as the node at target has them. It opens a connection for this call
// only, because the node may be a member under another address.
func (s *Store) askSeed(ctx context.Context, target string) (*pb.ListMembersResponse, error) {
	conn, err := Dial(target, s.opts.dial())
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrAuth, err)
	}
	defer conn.Close()
	return s.listMembers(ctx, target, pb.NewAdminClient(conn))
}

// listMembers returns the members as one node has them from etcd, at least one.
func (s *Store) listMembers(ctx context.Context, target string, admin pb.AdminClient) (*pb.ListMembersResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, s.opts.DialTimeout)
	defer cancel()
	resp, err := admin.ListMembers(ctx, &pb.ListMembersRequest{})
	switch status.Code(err) {
	case codes.OK:
		if len(resp.GetMembers()) == 0 {
			return nil, fmt.Errorf("client: %s returned a list without members", target)
		}
		return resp, nil
	case codes.FailedPrecondition, codes.Unimplemented:
		return nil, fmt.Errorf("client: %w: Options.Discover: %s is not in a cluster: %w", ErrRequest, target, err)
	}
	return nil, callError(context.WithoutCancel(ctx), "list the members", target, err)
}

// States of a member. The sequences of a draining member move to other members.
const (
	stateJoining  = "joining"
	stateDraining = "draining"
)

// replace makes Store.table the nodes of the listed members and of the members that were last
// listed within GoneFor and are not removed. It leaves out a new member that is still joining and, with
// Options.SkipDraining, the members that drain.
func (d *directory) replace(list []*pb.Member, removed []string) {
	now := time.Now()
	var left []*node
	for _, m := range list {
		old := d.members[m.GetName()]
		if m.GetState() == stateJoining && old == nil {
			continue
		}
		if old == nil || old.target != m.GetAddr() {
			if old != nil {
				left = append(left, old.node)
			}
			old = &member{node: newNode(d.store, m.GetAddr())}
			d.members[m.GetName()] = old
		}
		// A member that joins again keeps its sequences, or stays draining, until it serves.
		draining := m.GetState() == stateDraining || m.GetState() == stateJoining && old.place.Draining
		old.place = placement.Place{
			Seed: placement.PlaceSeed(m.GetName()), Capacity: max(1, m.GetCapacityBytes()), Draining: draining, Zone: m.GetZone(), Used: m.GetUsedBytes(), New: m.GetFilling(),
		}
		old.seen = now
	}
	var names, hidden []string
	for name, m := range d.members {
		if now.Sub(m.seen) > d.store.opts.GoneFor || slices.Contains(removed, name) {
			delete(d.members, name)
			left = append(left, m.node)
			continue
		}
		if m.place.Draining && d.store.opts.SkipDraining {
			hidden = append(hidden, name)
		} else {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	d.publish(names, hidden)
	for _, n := range left {
		n.leave()
	}
}

// publish makes the table that of the named members.
func (d *directory) publish(names, hidden []string) {
	t := &table{nodes: make([]*node, len(names)), places: make([]placement.Place, len(names))}
	for i, name := range names {
		t.nodes[i], t.places[i] = d.members[name].node, d.members[name].place
	}
	for _, name := range hidden {
		t.hidden = append(t.hidden, d.members[name].node)
	}
	if len(names) == 0 {
		t.nodes, t.places = []*node{d.absent}, []placement.Place{{Capacity: 1}}
	}
	t.overfull = placement.Overfull(t.places)
	sameHomes := func(a, b placement.Place) bool {
		a.Used, b.Used = 0, 0 // it changes with each write, and no home with it
		return a == b
	}
	if old := d.store.table.Swap(t); old == nil || !slices.Equal(old.nodes, t.nodes) || !slices.EqualFunc(old.places, t.places, sameHomes) {
		d.store.placements.Add(1)
	}
}
