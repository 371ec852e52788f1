package api

import (
	"fmt"
	"math"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/kv"
)

// AppendIDs appends ids to dst in the form that messages have: 16 bytes each, without separators.
func AppendIDs(dst []byte, ids []kv.BlockID) []byte {
	for i := range ids {
		dst = append(dst, ids[i][:]...)
	}
	return dst
}

// IDs is the inverse of AppendIDs. It fails if b is not a whole number of ids or has more than
// limit ids.
func IDs(b []byte, limit int) ([]kv.BlockID, error) {
	if len(b)%kv.BlockIDSize != 0 {
		return nil, fmt.Errorf("block ids of %d bytes: not a multiple of %d", len(b), kv.BlockIDSize)
	}
	n := len(b) / kv.BlockIDSize
	if n > limit {
		return nil, fmt.Errorf("a chain of %d blocks: at most %d are accepted", n, limit)
	}
	ids := make([]kv.BlockID, n)
	for i := range ids {
		ids[i] = kv.BlockID(b[i*kv.BlockIDSize:])
	}
	return ids, nil
}

// GeometryProto returns g as a message.
func GeometryProto(g kv.Geometry) *pb.Geometry {
	m := &pb.Geometry{BlockTokens: uint32(g.BlockTokens), Dtype: g.DType, Layout: g.Layout}
	for _, gr := range g.Groups {
		m.Groups = append(m.Groups, &pb.Group{
			Kind:         pb.GroupKind(gr.Kind),
			Layers:       uint32(gr.Layers),
			TokenBytes:   uint32(gr.TokenBytes),
			WindowTokens: uint32(gr.WindowTokens),
		})
	}
	return m
}

// Geometry returns the validated geometry of a message.
func Geometry(m *pb.Geometry) (kv.Geometry, error) {
	g := kv.Geometry{BlockTokens: clampInt(m.GetBlockTokens()), DType: m.GetDtype(), Layout: m.GetLayout()}
	for _, gr := range m.GetGroups() {
		g.Groups = append(g.Groups, kv.Group{
			Kind:         kv.GroupKind(clampInt(uint32(gr.GetKind()))),
			Layers:       clampInt(gr.GetLayers()),
			TokenBytes:   clampInt(gr.GetTokenBytes()),
			WindowTokens: clampInt(gr.GetWindowTokens()),
		})
	}
	return g, g.Validate()
}

// clampInt converts v to an int of at most math.MaxInt32, so that a large v does not become
// negative on 32-bit platforms.
func clampInt(v uint32) int { return int(min(uint64(v), math.MaxInt32)) }

// NamespaceProto returns ns as a message. The message's counters are zero.
func NamespaceProto(ns kv.Namespace) *pb.Namespace {
	return &pb.Namespace{
		Id:         uint32(ns.ID),
		Name:       ns.Name,
		Tenant:     ns.Tenant,
		Salt:       ns.Salt,
		Geometry:   GeometryProto(ns.Geometry),
		Index:      pb.IndexKind(ns.Index),
		Epoch:      uint64(ns.Epoch),
		QuotaBytes: ns.QuotaBytes,
		Replicas:   uint32(ns.Replicas),
	}
}

// Namespace returns the validated namespace of a message. An unspecified index
// kind is trie.
func Namespace(m *pb.Namespace) (kv.Namespace, error) {
	g, err := Geometry(m.GetGeometry())
	if err != nil {
		return kv.Namespace{}, err
	}
	ns := kv.Namespace{
		ID:         kv.NamespaceID(m.GetId()),
		Name:       m.GetName(),
		Tenant:     m.GetTenant(),
		Salt:       m.GetSalt(),
		Geometry:   g,
		Index:      kv.IndexKind(m.GetIndex()),
		Epoch:      kv.Epoch(m.GetEpoch()),
		QuotaBytes: m.GetQuotaBytes(),
		Replicas:   clampInt(m.GetReplicas()),
	}
	if m.GetIndex() == pb.IndexKind_INDEX_KIND_UNSPECIFIED {
		ns.Index = kv.IndexTrie
	}
	return ns, ns.Validate()
}

// AttemptName returns the name of an attempt at a request. Both engines and the gateway use this
// name. seq is the sequence number of the planner's action START for the attempt.
func AttemptName(request string, seq uint64) string { return fmt.Sprintf("%s#%d", request, seq) }
