package server

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/placement"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/server/membership"
	"github.com/penstock-kv/penstock/server/storage"
)

// Namespaces changes namespaces. *storage.Node changes those of one node, *membership.Cluster those
// of all nodes of a cluster; see the methods of both for the contracts.
type Namespaces interface {
	CreateNamespace(ctx context.Context, def kv.Namespace) (kv.Namespace, error)
	EnsureNamespace(ctx context.Context, def kv.Namespace, salt storage.NewSalt) (kv.Namespace, error)
	DeleteNamespace(ctx context.Context, name string, dryRun bool) (storage.Removed, error)
	BumpEpoch(ctx context.Context, name string, to kv.Epoch, keep int) (storage.Bumped, error)
	RetireEpoch(ctx context.Context, name string, epoch kv.Epoch, force, dryRun bool) (storage.Removed, error)
	SetQuota(ctx context.Context, name string, quotaBytes int64) (kv.Namespace, error)
	SetReplicas(ctx context.Context, name string, replicas int) (kv.Namespace, error)
}

// cachePrefix begins the full name of each method of the Cache service.
var cachePrefix = "/" + pb.Cache_ServiceDesc.ServiceName + "/"

// admitUnary is a grpc.UnaryServerInterceptor that refuses calls of the Cache service on namespaces
// that the cluster does not let the node serve.
func (s *Server) admitUnary(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if !strings.HasPrefix(info.FullMethod, cachePrefix) {
		return next(ctx, req)
	}
	if err := s.admit(req); err != nil {
		return nil, err
	}
	resp, err := next(ctx, req)
	if err == nil {
		err = s.admitResult(req)
	}
	if err != nil {
		return nil, err
	}
	return resp, nil
}

// admit returns an error if the cluster does not let the node serve the namespace of a request.
// Requests without a namespace, which end leases and reservations, are always admitted.
func (s *Server) admit(req any) error {
	if s.opts.Cluster == nil {
		return nil
	}
	if w, ok := req.(*pb.WriteRequest); ok {
		req = w.GetReserve()
	}
	named, ok := req.(interface{ GetNamespace() string })
	if !ok {
		return nil
	}
	return s.opts.Cluster.Admit(named.GetNamespace())
}

// admitResult is admit for the time after a call. A read whose node has lost its lease meanwhile
// fails, because the bytes may be outdated. Other calls return no bytes, and some return an id that
// the client must get (of a lease or a reservation).
func (s *Server) admitResult(req any) error {
	if _, ok := req.(*pb.ReadRequest); !ok {
		return nil
	}
	return s.admit(req)
}

// errAlone is the error of calls that need a cluster.
var errAlone = status.Error(codes.FailedPrecondition, "this node is not in a cluster: its setting cluster.etcd is empty")

// Details returns the details of a node for its record in etcd. The function linkRate returns the rate of the link of a NIC.
func Details(node *storage.Node, data rdma.Engine, linkRate func(rdma.NIC) int64) membership.Details {
	d := membership.Details{HotPrefixes: int64(node.HotCopies())}
	for _, n := range data.NICs() {
		d.NICs = append(d.NICs, membership.NIC{Name: n.Name, Addr: string(n.Addr), Up: n.Up, BitsPerSecond: linkRate(n)})
	}
	for _, v := range node.Volumes() {
		volume := membership.Volume{Path: v.Path, State: v.Health.State.String(), CapacityBytes: v.CapacityBytes, UsedBytes: v.Slots.UsedBytes(), Blocks: v.Slots.Live}
		if v.Health.Cause != nil {
			volume.Reason = sentence(v.Health.Cause)
		}
		d.Volumes = append(d.Volumes, volume)
	}
	erasures := make(map[string]volumeErasures)
	for _, e := range node.Erasures() {
		addErasure(erasures, e.Volumes, e.Since)
	}
	for _, path := range slices.Sorted(maps.Keys(erasures)) {
		d.Erasures = append(d.Erasures, membership.Erasures{Volume: path, Namespaces: erasures[path].namespaces, SinceUnixMs: erasures[path].since.UnixMilli()})
	}
	return d
}

func (s *adminService) ListMembers(ctx context.Context, req *pb.ListMembersRequest) (*pb.ListMembersResponse, error) {
	if s.opts.Cluster == nil {
		return nil, errAlone
	}
	read := s.opts.Cluster.List
	if req.GetNodes() {
		read = s.opts.Cluster.ListNodes
	}
	list, err := read(ctx)
	if err != nil {
		return nil, statusOf(err)
	}
	resp := &pb.ListMembersResponse{Removed: list.Removed}
	if end := list.LastFill; end != nil {
		resp.LastFill = &pb.FillEnd{Revision: end.Revision, Names: end.Names, Stopped: end.Stopped}
	}
	for _, m := range list.Members {
		member := memberProto(m)
		if req.GetNodes() {
			addDetails(ctx, member, m, list.Details[m.Name])
		}
		resp.Members = append(resp.Members, member)
	}
	for _, n := range list.Down {
		member := memberProto(n.Member)
		member.State = stateDown
		member.LeftUnixMs, member.WrittenUnixMs = unixMs(n.Left), unixMs(n.Written)
		addDetails(ctx, member, n.Member, n.Details)
		resp.Down = append(resp.Down, member)
	}
	return resp, nil
}

// stateDown is the state of a node without a lease.
const stateDown = "down"

// unixMs returns t in ms, and 0 for the zero time.
func unixMs(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}

func memberProto(m membership.Member) *pb.Member {
	return &pb.Member{
		Name: m.Name, Addr: m.Addr, Zone: m.Zone, State: string(m.State), CapacityBytes: m.CapacityBytes, UsedBytes: m.UsedBytes,
		Version: m.Version, SinceUnixMs: m.Since.UnixMilli(), Applied: m.Applied, Move: moveProto(m), Filling: m.Filling,
	}
}

// addDetails adds to a member the details of its record that the caller may see.
func addDetails(ctx context.Context, to *pb.Member, m membership.Member, d membership.Details) {
	to.Blocks, to.Leases, to.HotPrefixes = m.Blocks, m.Leases, d.HotPrefixes
	for _, n := range d.NICs {
		to.Nics = append(to.Nics, &pb.MemberNIC{Name: n.Name, Address: n.Addr, Up: n.Up, LinkBitsPerSecond: n.BitsPerSecond})
	}
	if !operates(ctx) {
		return // the paths and errors are those of the node's host
	}
	for _, v := range d.Volumes {
		to.Volumes = append(to.Volumes, &pb.MemberVolume{Path: v.Path, State: v.State, Reason: v.Reason, CapacityBytes: v.CapacityBytes, UsedBytes: v.UsedBytes, Blocks: v.Blocks})
	}
	for _, e := range d.Erasures {
		to.Erasures = append(to.Erasures, &pb.VolumeErasures{Volume: e.Volume, Namespaces: int64(e.Namespaces), SinceUnixMs: e.SinceUnixMs})
	}
}

// moveProto returns the progress of a member that drains or fills others, nil for other members.
func moveProto(m membership.Member) *pb.MoveStatus {
	if m.Move.Phase == "" {
		return nil
	}
	return &pb.MoveStatus{
		Phase: string(m.Move.Phase), Blocks: m.Move.Blocks, Bytes: m.Move.Bytes, CopiedBlocks: m.Move.CopiedBlocks, CopiedBytes: m.Move.CopiedBytes,
		BytesPerSecond: m.Move.BytesPerSecond, SecondsLeft: m.Move.Seconds, LeftBlocks: m.Move.Left, Reason: m.Move.Reason, CheckedUnixMs: unixMs(m.Move.Checked),
	}
}

func (s *adminService) DrainMember(ctx context.Context, req *pb.DrainMemberRequest) (*pb.DrainMemberResponse, error) {
	if s.opts.Cluster == nil {
		return nil, errAlone
	}
	var err error
	if req.GetCancel() {
		err = s.opts.Cluster.UndrainMember(ctx, req.GetName())
	} else {
		err = s.opts.Cluster.DrainMember(ctx, req.GetName(), membership.Drain{BytesPerSecond: req.GetBytesPerSecond(), Since: time.Now().UTC()})
	}
	if err != nil {
		return nil, statusOf(err)
	}
	return &pb.DrainMemberResponse{}, nil
}

func (s *adminService) FillMembers(ctx context.Context, req *pb.FillMembersRequest) (*pb.FillMembersResponse, error) {
	if s.opts.Cluster == nil {
		return nil, errAlone
	}
	if req.GetDryRun() {
		return s.planFill(ctx, req.GetNames())
	}
	revision, err := s.opts.Cluster.FillMembers(ctx, req.GetNames(), membership.Drain{BytesPerSecond: req.GetBytesPerSecond(), Since: time.Now().UTC()})
	return &pb.FillMembersResponse{Revision: revision}, statusOf(err)
}

// planFill returns the blocks that this node would copy to the named members.
func (s *adminService) planFill(ctx context.Context, names []string) (*pb.FillMembersResponse, error) {
	members, err := s.opts.Cluster.Members(ctx)
	if err != nil {
		return nil, statusOf(err)
	}
	places := make([]placement.Place, len(members))
	fills := make(map[int]*pb.Fill)
	resp := new(pb.FillMembersResponse)
	for i, m := range members {
		places[i] = placement.Place{Seed: placement.PlaceSeed(m.Name), Capacity: max(1, m.CapacityBytes), Draining: m.State == membership.Draining, Zone: m.Zone}
		if slices.Contains(names, m.Name) {
			fills[i] = &pb.Fill{Name: m.Name}
			resp.Fills = append(resp.Fills, fills[i])
		}
	}
	for _, ns := range s.node.Namespaces() {
		for _, epoch := range ns.Live() {
			tips, _, err := s.node.Tips(ns.Name, epoch)
			if err != nil {
				continue // the epoch or the namespace has ended
			}
			counted := make(map[uint32]bool)
			for _, tip := range tips {
				chain, err := s.node.Chain(ns.Name, epoch, tip.ID)
				if err != nil {
					continue
				}
				if ctx.Err() != nil {
					return nil, statusOf(ctx.Err())
				}
				homes := placement.Homes(nil, places, chain[0].ID, ns.Copies())
				for _, link := range chain {
					for _, piece := range link.Pieces {
						if counted[piece.Node] {
							continue
						}
						counted[piece.Node] = true
						for _, home := range homes {
							if f := fills[home]; f != nil {
								f.Blocks++
								f.Bytes += ns.Geometry.PieceBytes(piece.Group)
							}
						}
					}
				}
			}
		}
	}
	return resp, nil
}

func (s *adminService) RemoveMember(ctx context.Context, req *pb.RemoveMemberRequest) (*pb.RemoveMemberResponse, error) {
	if s.opts.Cluster == nil {
		return nil, errAlone
	}
	if req.GetCancel() {
		return &pb.RemoveMemberResponse{}, statusOf(s.opts.Cluster.ReadmitMember(ctx, req.GetName()))
	}
	lost, err := s.opts.Cluster.RemoveMember(ctx, req.GetName(), req.GetForce(), req.GetDryRun())
	if err != nil {
		return nil, statusOf(err)
	}
	return &pb.RemoveMemberResponse{Up: lost.Up, LostBlocks: lost.LostBlocks, LostBytes: lost.LostBytes, Leases: lost.Leases}, nil
}
