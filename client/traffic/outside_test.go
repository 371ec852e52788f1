//go:build !race

package traffic

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
)

// outsideProgram makes a manager like an engine outside the repository.
const outsideProgram = `package main

import (
	"context"
	"fmt"
	"log"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/client/traffic"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// storage has no block.
type storage struct{}

func (storage) Register([]byte) (*client.Memory, error) { return new(client.Memory), nil }
func (storage) Read(context.Context, client.ReadRequest) (client.ReadResult, error) {
	return client.ReadResult{Cut: client.CutAbsent}, nil
}
func (storage) Write(_ context.Context, w client.WriteRequest) (client.WriteResult, error) {
	return client.WriteResult{Outcome: client.Hit, Stored: len(w.Pieces), Blocks: len(w.IDs)}, nil
}

var _ traffic.Storage = (*client.Store)(nil)

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
	ctx := context.Background()
	geometry := kv.SingleGroup(2, 4, 512)
	token := rdma.Token("an engine outside of the repository")
	open := func() (*traffic.Manager, *tcp.Engine) {
		nic, err := tcp.New(ctx, tcp.Options{Listen: "127.0.0.1:0", Token: token})
		must(err)
		device, err := nic.Register(make([]byte, 2*8*geometry.LayerBytes(0)), rdma.RegisterOptions{Local: true})
		must(err)
		m, err := traffic.New(traffic.Options{
			Namespace: kv.Namespace{Name: "m", Geometry: geometry}, Storage: storage{}, Compute: nic, BufferBytes: 4 << 20,
			Device: traffic.Device{Region: device, Bases: []uint64{0, uint64(8 * geometry.LayerBytes(0))}},
		})
		must(err)
		return m, nic
	}
	pe, near := open()
	de, far := open()
	pages := []uint32{3, 5}
	d, err := de.Decode(ctx, traffic.DecodeJob{Request: "r", Blocks: 2, Pages: pages, Peer: traffic.Peer{Addr: near.Addr(), Token: token}})
	must(err)
	p, err := pe.Prefill(ctx, traffic.PrefillJob{Request: "r", Blocks: 2, Pages: pages})
	must(err)
	for l := range 2 {
		must(p.Layer(ctx, l))
		p.Computed(l)
	}
	must(p.Finish(ctx))
	must(d.Finish(ctx))
	must(pe.Close())
	must(de.Close())
	must(near.Close())
	must(far.Close())
	fmt.Println("served")
}
`

// TestOutside: a module outside of the repository imports every package that it may,
// and serves a request with two managers.
//
// The program is built without the race detector, so the plain build's run of this test is
// enough.
func TestOutside(t *testing.T) {
	testkit.Long(t, "compiles and runs a module of its own")
	list := exec.CommandContext(t.Context(), "go", "list", "-f", "{{if ne .Name \"main\"}}{{.ImportPath}}{{end}}", "./...")
	list.Dir = testkit.RepositoryRoot(t)
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	all := &strings.Builder{}
	all.WriteString("package main\n\nimport (\n")
	for path := range strings.FieldsSeq(string(out)) {
		if !strings.Contains(path, "/internal/") {
			fmt.Fprintf(all, "\t_ %q\n", path)
		}
	}
	all.WriteString(")\n")
	m := testkit.OutsideModule(t, map[string]string{"main.go": outsideProgram, "all.go": all.String()})
	if out, err := m.Go(t.Context(), "run", ".").CombinedOutput(); err != nil || !strings.Contains(string(out), "served") {
		t.Errorf("%v\n%s", err, out)
	}
}
