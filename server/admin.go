package server

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"math"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/access"
	"github.com/penstock-kv/penstock/server/metrics"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
)

// adminService implements penstock.v1.Admin.
type adminService struct {
	pb.UnimplementedAdminServer
	*Server
}

var _ pb.AdminServer = (*adminService)(nil)

// describe returns a namespace with its current counters. The cost does not depend on the number of other
// namespaces.
func (s *adminService) describe(ns kv.Namespace) *pb.Namespace {
	st, _ := s.node.NamespaceStats(ns.ID)
	out := api.NamespaceProto(ns)
	out.UsedBytes, out.Blocks, out.Leases = st.Bytes, st.Blocks, st.Leases
	out.Counters = countersProto(s.opts.Metrics, func(c *metrics.NamespaceCounter) uint64 { return c.Value(ns.Name) })
	if start := s.node.EpochStart(ns.ID); !start.At.IsZero() {
		out.EpochSinceUnixMs = start.At.UnixMilli()
	}
	for _, e := range st.Live {
		out.Live = append(out.Live, &pb.LiveEpoch{
			Epoch: uint64(e.Epoch), Kept: e.Kept, Blocks: e.Blocks, Bytes: e.Bytes,
			Matches: e.Matches, Hits: e.Hits, Leases: e.Leases, Pins: e.Pins,
		})
	}
	return out
}

// describeAll returns several namespaces with their counters.
func (s *adminService) describeAll(all []kv.Namespace) []*pb.Namespace {
	out := make([]*pb.Namespace, len(all))
	for i, ns := range all {
		out[i] = s.describe(ns)
	}
	return out
}

func (s *adminService) CreateNamespace(ctx context.Context, req *pb.CreateNamespaceRequest) (*pb.Namespace, error) {
	def, err := api.Namespace(req.GetNamespace())
	if err != nil {
		return nil, invalid(err)
	}
	var ns kv.Namespace
	if req.GetSalting() == pb.Salting_SALTING_NONE || len(def.Salt) > 0 {
		ns, err = s.namespaces.CreateNamespace(ctx, def)
	} else {
		ns, err = s.namespaces.EnsureNamespace(ctx, def, func() ([]byte, error) { return s.newSalt(ctx, req) })
	}
	if err != nil {
		return nil, statusOf(err)
	}
	return s.describe(ns), nil
}

// saltBytes is the length of the salts that a node makes.
const saltBytes = 32

// newSalt returns the salt of the namespace that a request without a salt creates. A tenant, which has the role
// admin on some namespaces only, gets a random salt, so that principals without a role on the namespace
// cannot compute its ids.
func (s *adminService) newSalt(ctx context.Context, req *pb.CreateNamespaceRequest) ([]byte, error) {
	id, ok := identityOf(ctx)
	if !ok || id.Principal.HasEverywhere(access.Admin) {
		return nil, nil
	}
	if req.GetSalting() == pb.Salting_SALTING_EXISTING && s.opts.Cluster == nil {
		return nil, status.Errorf(codes.Aborted, "namespace %q does not exist, and the node makes no random salt for it", req.GetNamespace().GetName())
	}
	salt := make([]byte, saltBytes)
	_, err := rand.Read(salt)
	return salt, err
}

func (s *adminService) GetNamespace(_ context.Context, req *pb.GetNamespaceRequest) (*pb.Namespace, error) {
	// Engines get the newest epoch by this call.
	if c := s.opts.Cluster; c != nil {
		if err := c.Admit(req.GetName()); err != nil {
			return nil, err
		}
	}
	ns, err := s.node.Namespace(req.GetName())
	if err != nil {
		return nil, statusOf(err)
	}
	return s.describe(ns), nil
}

// ListNamespaces returns a page of the namespaces. Without a limit, which clients of earlier releases do not
// send, the page has all of them, and the call fails if they exceed maxMessageBytes.
func (s *adminService) ListNamespaces(ctx context.Context, req *pb.ListNamespacesRequest) (*pb.ListNamespacesResponse, error) {
	all := slices.DeleteFunc(s.node.Namespaces(), func(ns kv.Namespace) bool {
		return ns.Name <= req.GetAfter() || !sees(ctx, access.Any, ns.Name)
	})
	if req.GetLimit() == 0 {
		return &pb.ListNamespacesResponse{Namespaces: s.describeAll(all)}, nil
	}
	return namespacePage(all, int(req.GetLimit()), s.describe), nil
}

// namespacePage returns the first namespaces of all: at most limit, and at most half of a message, but at least
// one.
func namespacePage(all []kv.Namespace, limit int, describe func(kv.Namespace) *pb.Namespace) *pb.ListNamespacesResponse {
	page := &pb.ListNamespacesResponse{}
	sizeBytes := 0
	for _, ns := range all {
		if n := len(page.Namespaces); n >= limit || sizeBytes > maxMessageBytes/2 {
			page.Next = page.Namespaces[n-1].GetName()
			break
		}
		m := describe(ns)
		sizeBytes += proto.Size(m)
		page.Namespaces = append(page.Namespaces, m)
	}
	return page
}

func (s *adminService) DeleteNamespace(ctx context.Context, req *pb.DeleteNamespaceRequest) (*pb.DeleteNamespaceResponse, error) {
	r, err := s.namespaces.DeleteNamespace(ctx, req.GetName(), req.GetDryRun())
	return &pb.DeleteNamespaceResponse{Blocks: r.Blocks, Bytes: r.Bytes}, statusOf(err)
}

func (s *adminService) BumpEpoch(ctx context.Context, req *pb.BumpEpochRequest) (*pb.BumpEpochResponse, error) {
	b, err := s.namespaces.BumpEpoch(ctx, req.GetName(), kv.Epoch(req.GetTo()), int(req.GetKeep()))
	if err != nil {
		return nil, statusOf(err)
	}
	return &pb.BumpEpochResponse{OldEpoch: uint64(b.Old), NewEpoch: uint64(b.Live[0]), Live: epochNumbers(b.Live), Retired: epochNumbers(b.Retired)}, nil
}

func epochNumbers(epochs []kv.Epoch) []uint64 {
	out := make([]uint64, len(epochs))
	for i, e := range epochs {
		out[i] = uint64(e)
	}
	return out
}

func (s *adminService) RetireEpoch(ctx context.Context, req *pb.RetireEpochRequest) (*pb.RetireEpochResponse, error) {
	r, err := s.namespaces.RetireEpoch(ctx, req.GetName(), kv.Epoch(req.GetEpoch()), req.GetForce(), req.GetDryRun())
	return &pb.RetireEpochResponse{Blocks: r.Blocks, Bytes: r.Bytes}, statusOf(err)
}

func (s *adminService) SetQuota(ctx context.Context, req *pb.SetQuotaRequest) (*pb.Namespace, error) {
	ns, err := s.namespaces.SetQuota(ctx, req.GetName(), req.GetQuotaBytes())
	if err != nil {
		return nil, statusOf(err)
	}
	return s.describe(ns), nil
}

func (s *adminService) SetReplicas(ctx context.Context, req *pb.SetReplicasRequest) (*pb.Namespace, error) {
	ns, err := s.namespaces.SetReplicas(ctx, req.GetName(), int(min(req.GetReplicas(), kv.MaxReplicas+1)))
	if err != nil {
		return nil, statusOf(err)
	}
	return s.describe(ns), nil
}

func (s *adminService) DeleteBlocks(_ context.Context, req *pb.DeleteBlocksRequest) (*pb.DeleteBlocksResponse, error) {
	id, err := kv.BlockIDFromBytes(req.GetBlockId())
	if err != nil {
		return nil, invalid(err)
	}
	r, err := s.node.DeleteBlocks(req.GetNamespace(), id, req.GetDryRun())
	return &pb.DeleteBlocksResponse{Blocks: r.Blocks, Bytes: r.Bytes}, statusOf(err)
}

func (s *adminService) Evict(_ context.Context, req *pb.EvictRequest) (*pb.EvictResponse, error) {
	r, err := s.node.Evict(req.GetNamespace(), req.GetBytes(), req.GetDryRun())
	return &pb.EvictResponse{Blocks: r.Blocks, Bytes: r.Bytes}, statusOf(err)
}

func (s *adminService) StatBlock(_ context.Context, req *pb.StatBlockRequest) (*pb.Block, error) {
	id, err := kv.BlockIDFromBytes(req.GetBlockId())
	if err != nil {
		return nil, invalid(err)
	}
	_, infos, err := s.node.StatBlock(req.GetNamespace(), id)
	if err != nil {
		return nil, statusOf(err)
	}
	return blockProto(infos[0]), nil
}

func (s *adminService) ListBlocks(_ context.Context, req *pb.ListBlocksRequest) (*pb.ListBlocksResponse, error) {
	var cursor uint32
	switch len(req.GetCursor()) {
	case 0:
	case 4:
		cursor = binary.LittleEndian.Uint32(req.GetCursor())
	default:
		return nil, invalid(errCursor)
	}
	_, infos, next, err := s.node.ListBlocks(req.GetNamespace(), cursor, int(min(req.GetLimit(), 1<<20)))
	if err != nil {
		return nil, statusOf(err)
	}
	resp := &pb.ListBlocksResponse{}
	for _, info := range infos {
		resp.Blocks = append(resp.Blocks, blockProto(info))
	}
	if next != 0 {
		resp.Cursor = binary.LittleEndian.AppendUint32(nil, next)
	}
	return resp, nil
}

func blockProto(info trie.Info) *pb.Block {
	b := &pb.Block{
		Id:         info.ID[:],
		Depth:      uint32(info.Depth),
		Group:      uint32(info.Group),
		Extent:     info.Ref.Extent.String(),
		Generation: uint64(info.Ref.Generation),
		Children:   uint32(info.Children),
		Leases:     uint32(info.Leases),
		BlockClass: pb.BlockClass_BLOCK_CLASS_PREFIX,
		Epoch:      uint64(info.Epoch),
	}
	if info.Class == trie.Transfer {
		b.BlockClass = pb.BlockClass_BLOCK_CLASS_TRANSFER
	}
	if !info.Parent.IsZero() {
		b.Parent = info.Parent[:]
	}
	return b
}

// pinsMax bounds the pins in one response. A pin takes about 100 bytes.
const pinsMax = 4096

func (s *adminService) ListPins(ctx context.Context, req *pb.ListPinsRequest) (*pb.ListPinsResponse, error) {
	limit := pinsMax
	if n := req.GetLimit(); n != 0 {
		limit = int(min(n, pinsMax))
	}
	if req.GetCursor() > math.MaxUint32 {
		return nil, invalid(errCursor)
	}
	pins, next, err := s.node.Pins(nil, req.GetNamespace(), req.GetLeases(), uint32(req.GetCursor()), limit)
	if err != nil {
		return nil, statusOf(err)
	}
	resp := &pb.ListPinsResponse{Cursor: uint64(next)}
	for _, p := range pins {
		if !sees(ctx, access.Admin, p.Namespace) {
			continue
		}
		m := &pb.Pin{
			Lease: uint64(p.Lease), Namespace: p.Namespace, Epoch: uint64(p.Epoch), Owner: p.Owner,
			SinceUnixMs: p.Since.UnixMilli(), Blocks: int64(p.Blocks), Bytes: p.Bytes, OfEpoch: p.OfEpoch,
		}
		if !p.Expires.IsZero() {
			m.ExpiresUnixMs = p.Expires.UnixMilli()
		}
		resp.Pins = append(resp.Pins, m)
	}
	return resp, nil
}

func (s *adminService) VerifyBlocks(ctx context.Context, req *pb.VerifyBlocksRequest) (*pb.VerifyBlocksResponse, error) {
	ids, err := api.IDs(req.GetBlockIds(), s.opts.Limits.ChainBlocks)
	if err != nil {
		return nil, invalid(err)
	}
	verified, err := s.node.Verify(ctx, req.GetNamespace(), kv.Epoch(req.GetEpoch()), ids)
	if err != nil {
		return nil, statusOf(err)
	}
	index := make(map[kv.BlockID]uint32, len(ids))
	for i, id := range ids {
		index[id] = uint32(i)
	}
	resp := &pb.VerifyBlocksResponse{}
	var texts reasons
	for _, v := range verified {
		r := &pb.PieceResult{Block: index[v.ID], Group: uint32(v.Group), LayerSums: v.LayerSums}
		switch v.State {
		case storage.Delivered:
			r.State = pb.PieceResult_STATE_DELIVERED
		case storage.Absent:
			r.State = pb.PieceResult_STATE_MISS
		case storage.Corrupt:
			r.State = pb.PieceResult_STATE_CORRUPT
		default:
			r.State = pb.PieceResult_STATE_FAILED
		}
		r.Reason = texts.of("", v.Err)
		resp.Pieces = append(resp.Pieces, r)
	}
	return resp, nil
}

func (s *adminService) Scrub(req *pb.ScrubRequest, stream grpc.ServerStreamingServer[pb.ScrubProgress]) error {
	if req.GetBytesPerSecond() < 0 {
		return invalid(errRate)
	}
	total := s.node.Stats().Index.Pieces
	err := s.node.Scrub(stream.Context(), req.GetBytesPerSecond(), func(slots, bytes, corrupt int64) error {
		return stream.Send(&pb.ScrubProgress{VerifiedBlocks: slots, TotalBlocks: max(total, slots), VerifiedBytes: bytes, CorruptBlocks: corrupt})
	})
	return statusOf(err)
}
