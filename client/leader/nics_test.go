package leader

import (
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/rdma"
)

// TestNICs: a fetch has the counters of the compute NICs of the members that have any: at most MaxNICs,
// with names that fit into a message.
func TestNICs(t *testing.T) {
	many := []rdma.NIC{{Name: "bad\xff" + strings.Repeat("n", maxName), BytesOut: 7, BytesIn: 9}}
	for i := range 2 * MaxNICs {
		many = append(many, rdma.NIC{Name: fmt.Sprint(i)})
	}
	l := &Leader{members: []Member{{Name: "a"}, {Name: "b", NICs: func() []rdma.NIC { return many }}, {Name: "added later", NICs: func() []rdma.NIC { return many }}}}
	f := &pb.FetchWork{Engines: []*pb.EngineState{{Engine: "a"}, {Engine: "b"}}}
	l.nics(f)
	a, b := f.Engines[0], f.Engines[1]
	if len(a.ComputeNics) != 0 || a.ComputeMicroseconds != 0 {
		t.Errorf("an engine without NICs reports %v", a)
	}
	if len(b.ComputeNics) != MaxNICs || b.ComputeMicroseconds == 0 {
		t.Fatalf("%d NICs at %d µs; want %d", len(b.ComputeNics), b.ComputeMicroseconds, MaxNICs)
	}
	if n := b.ComputeNics[0]; !utf8.ValidString(n.Nic) || !strings.HasPrefix(n.Nic, "badn") || len(n.Nic) > maxName || n.BytesOut != 7 || n.BytesIn != 9 {
		t.Errorf("the first NIC is %v", n)
	}
}
