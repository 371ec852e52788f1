package planner

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/dualpath"
)

// bump is the last BumpWeights of a namespace. Its JSON is what an elected planner keeps for later terms.
type bump struct {
	Namespace string         `json:"namespace"`
	Epoch     uint64         `json:"epoch"`
	Policy    dualpath.Drain `json:"policy"`
}

// bumps is the JSON that a Lease stores. The latest bump is last.
type bumps struct {
	Version int    `json:"version"`
	Bumps   []bump `json:"bumps"`
}

const (
	bumpsVersion = 1
	// maxBumps is the number of namespaces whose bumps a Lease stores: those with the latest bumps. Each bump removes
	// the bumps of deleted namespaces. With names of the maximum length they have less than the 1.5 MiB that etcd accepts in a request.
	maxBumps = 1024
	// keepWithin is the time limit of a write to the Lease, and of the wait for a leader's confirmation.
	keepWithin = 5 * time.Second
)

// resume applies the bumps that an earlier term has stored. This planner has no request yet: rebumpLocked applies the policies
// when groups register with requests of older weights.
func (s *Service) resume(kept []byte) error {
	if kept == nil {
		return nil
	}
	var b bumps
	d := json.NewDecoder(bytes.NewReader(kept))
	d.DisallowUnknownFields()
	if err := d.Decode(&b); err != nil || b.Version != bumpsVersion {
		return fmt.Errorf("planner: the epochs of the planner before are not of version %d (%.100q): run the same release on all planners (%v)", bumpsVersion, kept, err)
	}
	s.keeping.Lock()
	defer s.keeping.Unlock()
	s.kept = b.Bumps
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, one := range s.kept {
		if err := s.bumpLocked(one); err != nil {
			return err
		}
	}
	return nil
}

// keep stores a bump for later terms, and removes the bumps of namespaces that were deleted.
func (s *Service) keep(ctx context.Context, one bump) error {
	if s.lease == nil {
		return nil
	}
	s.keeping.Lock()
	defer s.keeping.Unlock()
	ctx, cancel := context.WithTimeout(ctx, keepWithin)
	defer cancel()
	list := slices.DeleteFunc(slices.Clone(s.kept), func(b bump) bool { return b.Namespace == one.Namespace })
	var names []string
	for _, b := range list {
		names = append(names, b.Namespace)
	}
	deleted, err := s.lease.Deleted(ctx, names)
	if err != nil {
		deleted = nil // they stay until a later bump: the planner's user in etcd may have no right to read the namespaces
	}
	list = slices.DeleteFunc(list, func(b bump) bool { return slices.Contains(deleted, b.Namespace) })
	list = append(list, one)
	list = list[max(0, len(list)-maxBumps):]
	value, err := json.Marshal(bumps{bumpsVersion, list})
	if err != nil {
		return fmt.Errorf("planner: %w", err)
	}
	if err := s.lease.Keep(ctx, value); err != nil {
		return status.Errorf(codes.Unavailable, "namespace %q: epoch %d is not in etcd for the next planner, so nothing has changed; repeat the call (%v)", one.Namespace, one.Epoch, err)
	}
	s.kept = list
	return nil
}

// bumpLocked begins the epoch.
func (s *Service) bumpLocked(b bump) error {
	id, err := s.namespaces.id(b.Namespace)
	if err != nil {
		return err
	}
	s.bumped[b.Namespace] = b
	s.stepLocked(dualpath.Epoch{At: s.now(), Namespace: dualpath.NamespaceID(id), Epoch: b.Epoch, Drain: b.Policy})
	return nil
}

// rebumpLocked applies the policies of bumps to the requests that a group has just listed. An earlier planner has started the
// requests of older weights, and ended before the group's leader had received the orders of the bump.
func (s *Service) rebumpLocked(namespaces []string) {
	slices.Sort(namespaces)
	for _, name := range slices.Compact(namespaces) {
		if b, ok := s.bumped[name]; ok {
			_ = s.bumpLocked(b) // the name has a number
		}
	}
}
