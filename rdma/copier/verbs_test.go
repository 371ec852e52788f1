//go:build verbs && cgo && linux

package copier

import (
	"testing"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
	"github.com/penstock-kv/penstock/rdma/verbs"
)

// port returns an RDMA port of this machine that is up.
func port(t testing.TB) string {
	t.Helper()
	all, err := verbs.List()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range all {
		if d.Up {
			return d.Name
		}
	}
	if len(all) > 0 {
		t.Fatalf("no RDMA port is up: %+v", all)
	}
	t.Skip("no RDMA device on this machine; lab/rdmalab makes a guest that has some")
	return ""
}

// newVerbs returns a copier over loopback of one RDMA port.
func newVerbs(t testing.TB) Copier {
	t.Helper()
	open := func(at string) rdma.Engine {
		control, err := group.TCP(t.Context(), at, "", nil)
		if err != nil {
			t.Fatal(err)
		}
		e, err := verbs.New(t.Context(), verbs.Options{
			Devices: []string{port(t)},
			Group:   group.Options{Control: control, Token: rdma.Token(testToken)},
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := e.Close(); err != nil {
				t.Error(err)
			}
		})
		return e
	}
	return openNIC(t, open(""), open("127.0.0.1:0"))
}

func TestVerbs(t *testing.T) { suite(t, newVerbs) }

func BenchmarkVerbs(b *testing.B) {
	for _, count := range []int{1, 16, 256} {
		b.Run(sizeName(count), func(b *testing.B) { benchmarkSubmit(b, newVerbs(b), count) })
	}
}
