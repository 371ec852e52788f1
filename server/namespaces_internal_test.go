package server

import (
	"fmt"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/kv"
)

// TestNamespacePages: the namespaces of the largest cluster, with all counters, exceed the maximum size of a message. Each page is below it, and the
// pages have every namespace once, in order.
func TestNamespacePages(t *testing.T) {
	const count = 131_072 // the most in a cluster
	all := make([]kv.Namespace, count)
	for i := range all {
		all[i] = kv.Namespace{ID: kv.NamespaceID(i + 1), Name: fmt.Sprintf("team-%03d/model-%06d", i/1000, i), Index: kv.IndexTrie, Epoch: 7, Geometry: kv.SingleGroup(61, 64, 1152)}
	}
	describe := func(ns kv.Namespace) *pb.Namespace {
		m := api.NamespaceProto(ns)
		m.UsedBytes, m.Blocks, m.EpochSinceUnixMs = 1<<40, 1<<20, 1_800_000_000_000
		m.Counters = &pb.Counters{}
		counters := m.Counters.ProtoReflect()
		for i := range counters.Descriptor().Fields().Len() {
			counters.Set(counters.Descriptor().Fields().Get(i), protoreflect.ValueOfUint64(1<<40))
		}
		m.Live = []*pb.LiveEpoch{{Epoch: 7, Blocks: 1 << 20, Bytes: 1 << 40, Matches: 1 << 20, Hits: 1 << 20}}
		return m
	}
	total := 0
	for _, limit := range []int{4096, count} {
		total = 0
		for rest := all; len(rest) > 0; {
			page := namespacePage(rest, limit, describe)
			total += proto.Size(page)
			if n := proto.Size(page); n > maxMessageBytes || len(page.Namespaces) > limit {
				t.Fatalf("a page of %d namespaces, at most %d, has %d bytes", len(page.Namespaces), limit, n)
			}
			for i, m := range page.Namespaces {
				if m.GetName() != rest[i].Name {
					t.Fatalf("namespace %q; want %q", m.GetName(), rest[i].Name)
				}
			}
			rest = rest[len(page.Namespaces):]
			want := ""
			if len(rest) > 0 {
				want = page.Namespaces[len(page.Namespaces)-1].GetName()
			}
			if page.GetNext() != want {
				t.Fatalf("next is %q; want %q", page.GetNext(), want)
			}
		}
	}
	if total <= maxMessageBytes {
		t.Errorf("all namespaces have %d bytes, so a page was not needed", total)
	}
	t.Logf("%d namespaces have %d bytes; a message has at most %d", count, total, maxMessageBytes)
}
