package client

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/rdma"
)

// promisingEngine answers each message with a reply that announces a number of immediates, of which
// only some arrive.
type promisingEngine struct {
	rdma.Engine
	store          *Store
	imms           *rdma.ImmCounters
	peer           rdma.EngineID
	promised, come int
}

func (e *promisingEngine) ExpectImm(x rdma.Expect) (*rdma.Expectation, error) {
	return e.imms.Expect(x, nil)
}

func (e *promisingEngine) Send(_ context.Context, to rdma.EngineID, msg []byte, done func(error)) error {
	call, request, err := api.ParseCall(msg)
	if err != nil {
		return err
	}
	reply := append(api.Reply{ID: call.ID, Immediates: uint32(e.promised)}.Append(nil), request...)
	go func() {
		done(nil)
		e.store.calls.receive(to, reply)
		for range e.come {
			e.imms.Count(to, 7)
		}
	}()
	return nil
}

func (e *promisingEngine) Stats() rdma.Stats {
	counted, _ := e.imms.Stats()
	return rdma.Stats{ImmediatesIn: counted}
}

// TestPromisedBytesDoNotCome: a read without a deadline whose announced immediates do not arrive
// ends after a bounded time, and not earlier.
func TestPromisedBytesDoNotCome(t *testing.T) {
	for come, want := range []codes.Code{codes.Unavailable, codes.Unavailable, codes.OK} {
		synctest.Test(t, func(t *testing.T) {
			s := &Store{}
			e := &promisingEngine{store: s, imms: rdma.NewImmCounters(0), peer: rdma.EngineID{1}, promised: 2, come: come}
			s.opts.Engine = e
			s.calls.init(s)
			s.calls.on = true
			r, err := s.calls.openTransport(e.peer, api.CallVersion, 1<<16)
			if err != nil {
				t.Fatal(err)
			}
			defer r.close()
			begin := time.Now()
			_, err = r.do(t.Context(), api.MethodRead, &pb.ReadRequest{}, 7, 0)
			if status.Code(err) != want {
				t.Errorf("%d of 2 immediates: %v; want %v", come, err, want)
			}
			took := time.Since(begin)
			if want == codes.OK && took != 0 || want != codes.OK && took != landWithin {
				t.Errorf("%d of 2 immediates: it took %v", come, took)
			}
			// A call that ends earlier leaves no state behind.
			synctest.Wait() // the engine's goroutine has read it
			e.come = 0
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			if _, err := r.do(ctx, api.MethodRead, &pb.ReadRequest{}, 8, 0); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("given up: %v", err)
			}
			if len(s.calls.slots) != 0 || len(s.calls.pending) != 0 {
				t.Errorf("%d slots and %d calls are kept", len(s.calls.slots), len(s.calls.pending))
			}
		})
	}
}

// TestPromisedBytesWait: a read whose bytes wait behind those of other reads, for longer than
// landWithin, gets them. If only the bytes of other reads arrive, it ends after landAtMost.
func TestPromisedBytesWait(t *testing.T) {
	const other = 9 // the immediate of another read
	for _, after := range []time.Duration{25 * time.Second, time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			s := &Store{}
			e := &promisingEngine{store: s, imms: rdma.NewImmCounters(0), peer: rdma.EngineID{1}, promised: 2, come: 1}
			s.opts.Engine = e
			s.calls.init(s)
			s.calls.on = true
			r, err := s.calls.openTransport(e.peer, api.CallVersion, 1<<16)
			if err != nil {
				t.Fatal(err)
			}
			defer r.close()
			stop := make(chan struct{})
			defer close(stop)
			go func() {
				tick, last := time.NewTicker(time.Second), time.After(after)
				defer tick.Stop()
				for {
					select {
					case <-tick.C:
						e.imms.Count(e.peer, other)
					case <-last:
						e.imms.Count(e.peer, 7)
					case <-stop:
						return
					}
				}
			}()
			begin := time.Now()
			_, err = r.do(t.Context(), api.MethodRead, &pb.ReadRequest{}, 7, 0)
			want, code := after, codes.OK
			if after > landAtMost {
				want, code = landAtMost, codes.Unavailable
			}
			if took := time.Since(begin); status.Code(err) != code || took != want {
				t.Errorf("%v after %v; want %v after %v", err, took, code, want)
			}
		})
	}
}
