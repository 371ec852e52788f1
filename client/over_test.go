package client_test

import (
	"context"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/rdma"
)

// plainEngine registers regions that do not report landings. If reports is set, its regions report
// them, and reports counts the reports.
type plainEngine struct {
	rdma.Engine
	reports *atomic.Uint64
}

type plainRegion struct{ rdma.Region }

type countingRegion struct {
	rdma.LandingRegion
	reports *atomic.Uint64
}

func (e plainEngine) Register(mem []byte, opts rdma.RegisterOptions) (rdma.Region, error) {
	r, err := e.Engine.Register(mem, opts)
	if l, ok := r.(rdma.LandingRegion); ok && e.reports != nil {
		return countingRegion{l, e.reports}, err
	}
	return plainRegion{r}, err
}

func (r countingRegion) WindowLanding(off, n uint64, landed func(off, n uint64), peers ...rdma.EngineID) (rdma.Window, error) {
	return r.LandingRegion.WindowLanding(off, n, func(off, n uint64) {
		r.reports.Add(n)
		landed(off, n)
	}, peers...)
}

// TestWrittenOver: a block whose bytes were right when they arrived and wrong at the end of Read is
// not delivered. A block whose bytes were wrong first and right at the end is delivered. Both hold
// with and without landing reports of the engine.
func TestWrittenOver(t *testing.T) {
	for _, name := range []string{"reports", "not reports"} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t)
			var reports atomic.Uint64
			r, ns, ids := fakeRig(t, f, func(o *client.Options) {
				e := plainEngine{Engine: o.Engine}
				if name == "reports" {
					e.reports = &reports
				}
				o.Engine = e
			})
			fill(f.mem[:8192], ids[0], 0, 1)
			copy(f.mem[8192:], f.mem[:8192])
			f.mem[8192+3*2048+17] ^= 1 // in layer 3
			const right, wrong = 0, 8192
			var order []uint64 // the sources of the writes to block 1, in order
			f.read = func(_ context.Context, f *fake, req *pb.ReadRequest) (*pb.ReadResponse, error) {
				var dst rdma.Desc
				if err := dst.UnmarshalBinary(req.GetDestination()); err != nil {
					return nil, status.Error(codes.Internal, err.Error())
				}
				resp, err := f.serve(req, 1)
				for _, src := range order {
					done := rdma.NewFlag()
					w := rdma.Write{Src: f.region, SrcOffset: src, Dst: dst, DstOffset: req.GetPieces()[1].GetOffset(), Len: 8192, Done: done.Set}
					if err := f.engine.Write(context.Background(), w); err != nil {
						return nil, status.Error(codes.Internal, err.Error())
					}
					if err := done.Wait(context.Background()); err != nil {
						return nil, status.Error(codes.Internal, err.Error())
					}
				}
				return resp, err
			}
			mem := r.memory(4 * 8192)
			for _, c := range []struct {
				order  []uint64
				blocks int
			}{{nil, 4}, {[]uint64{right}, 4}, {[]uint64{wrong}, 1}, {[]uint64{wrong, right}, 4}, {[]uint64{right, wrong}, 1}} {
				order = c.order
				reports.Store(0)
				got, err := r.store.Read(t.Context(), client.ReadRequest{Namespace: ns, IDs: ids, Into: mem})
				if err != nil || got.Blocks != c.blocks || (c.blocks < 4) != (len(got.Lost) == 1 && got.Lost[0].Block == 1 && got.Lost[0].Reason == client.LostChecksum) {
					t.Errorf("written over from %v: %+v, %v", c.order, got, err)
				}
				if want := uint64(4+len(c.order)) * 8192; name == "reports" && reports.Load() != want {
					t.Errorf("written over from %v: reports of %d bytes, not %d", c.order, reports.Load(), want)
				}
			}
		})
	}
}
