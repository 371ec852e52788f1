// Command dualpath is the smallest prefill/decode cluster: a planner, one prefill and one
// decode engine, and a gateway, in one process. Its engines move KV with real traffic
// managers and compute nothing. It needs a storage node:
//
//	penstock serve --data /tmp/kv --capacity 1GiB &
//	go run ./examples/dualpath -storage 127.0.0.1:7420
//
// It serves the same prompt twice. The first request stores the KV of the prompt, and
// the second one finds it and reads it through the storage NICs of both engines. An engine
// of yours differs in prefill and decode, which run the model.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/client/gateway"
	"github.com/penstock-kv/penstock/client/leader"
	"github.com/penstock-kv/penstock/client/traffic"
	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/tcp"
	"github.com/penstock-kv/penstock/server/planner"
)

// geometry is that of a model with 4 layers, in blocks of 16 tokens.
var geometry = kv.SingleGroup(4, 16, 512)

const deviceBlocks = 64 // of each engine

// token opens the compute NICs of the engines to each other.
var token = rdma.Token("the compute network of an example")

func main() {
	storage := flag.String("storage", "127.0.0.1:7420", "gRPC address of the storage node")
	address := flag.String("planner", "", "gRPC address of the planner; empty: the program starts one")
	flag.Parse()
	if err := run(context.Background(), *storage, *address); err != nil {
		log.Fatal(err)
	}
}

// run serves two requests. If address is not empty, it is the address of the planner.
func run(ctx context.Context, storage, address string) (err error) {
	stop := func() {}
	if address == "" {
		if address, stop, err = startPlanner(); err != nil {
			return err
		}
	}
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		stop()
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	var leaders sync.WaitGroup
	var engines []*engine
	defer func() {
		cancel()
		leaders.Wait()
		for _, e := range engines {
			err = errors.Join(err, e.close())
		}
		err = errors.Join(err, conn.Close())
		stop()
	}()
	for _, role := range []leader.Role{leader.Prefill, leader.Decode} {
		e, err := open(ctx, storage)
		if err != nil {
			return err
		}
		engines = append(engines, e)
		l, err := leader.New(leader.Options{
			Group: role.String(), Node: "machine for " + role.String(), Role: role, Geometry: geometry, Planner: conn,
			Members: []leader.Member{{
				Name: role.String() + "-0", Engine: e, Peer: traffic.Peer{Addr: e.compute.Addr(), Token: token}, DeviceBlocks: deviceBlocks, Footprint: e.manager.Footprint(),
				NICs: e.compute.NICs,
			}},
		})
		if err != nil {
			return err
		}
		leaders.Go(func() { l.Run(ctx) })
	}
	g, err := gateway.New(gateway.Options{Namespace: engines[0].ns, Store: engines[0].store, Planner: conn})
	if err != nil {
		return err
	}
	prompt := make([]kv.Token, 20*geometry.BlockTokens+1)
	for _, id := range []string{"first", "second"} {
		for ev, err := range g.Serve(ctx, gateway.Request{ID: id, Tokens: prompt, Output: 8}) {
			if err != nil {
				return err
			}
			switch ev.Kind {
			case gateway.Matched:
				fmt.Printf("%s: %d of %d tokens are cached\n", id, ev.Hit, len(prompt))
			case gateway.Started:
				fmt.Printf("%s: %s reads %d tokens, %s reads %d\n", id, ev.Prefill, ev.ReadByPrefill, ev.Decode, ev.ReadByDecode)
			default:
				fmt.Printf("%s: %v\n", id, ev.Kind)
			}
		}
	}
	return nil
}

// startPlanner starts a planner as penstock planner does, and returns its address.
func startPlanner() (address string, stop func(), err error) {
	service, err := planner.New(planner.Options{Planner: dualpath.Options{BlockTokens: geometry.BlockTokens, MinPart: geometry.BlockTokens}})
	if err != nil {
		return "", nil, err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		service.Close()
		return "", nil, err
	}
	server := grpc.NewServer()
	pb.RegisterPlannerServer(server, service)
	var served sync.WaitGroup
	served.Go(func() { _ = server.Serve(listener) }) // it ends with Stop
	return listener.Addr().String(), func() {
		service.Close()
		server.Stop()
		served.Wait()
	}, nil
}

// engine is an engine with a storage NIC, a compute NIC and "device memory".
type engine struct {
	snic, compute *tcp.Engine
	store         *client.Store
	ns            kv.Namespace
	device        rdma.Region
	manager       *traffic.Manager
	running       sync.WaitGroup

	mu   sync.Mutex
	free []uint32 // device pages
	jobs map[string]*job
}

// transfer is a request's traffic job of either role.
type transfer interface {
	Read(traffic.Part)
	Cut()
}

// job is a request. Orders that come before its transfer has begun wait.
type job struct {
	transfer transfer
	orders   []func(transfer)
}

// open connects an engine to storage and gives it memory.
func open(ctx context.Context, storage string) (_ *engine, err error) {
	e := &engine{jobs: make(map[string]*job)}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.close())
		}
	}()
	if e.snic, err = tcp.New(ctx, tcp.Options{}); err != nil {
		return nil, err
	}
	if e.compute, err = tcp.New(ctx, tcp.Options{Listen: "127.0.0.1:0", Token: token}); err != nil {
		return nil, err
	}
	if e.store, err = client.Open(ctx, client.Options{Servers: []string{storage}, Engine: e.snic}); err != nil {
		return nil, err
	}
	if e.ns, err = e.store.EnsureNamespace(ctx, kv.Namespace{Name: "examples/dualpath", Geometry: geometry, Index: kv.IndexTrie}); err != nil {
		return nil, err
	}
	layer := deviceBlocks * geometry.LayerBytes(0)
	layers := geometry.Groups[0].Layers
	if e.device, err = e.compute.Register(make([]byte, int64(layers)*layer), rdma.RegisterOptions{Local: true}); err != nil {
		return nil, err
	}
	bases := make([]uint64, layers)
	for l := range bases {
		bases[l] = uint64(int64(l) * layer)
	}
	for page := range uint32(deviceBlocks) {
		e.free = append(e.free, page)
	}
	e.manager, err = traffic.New(traffic.Options{
		Namespace: e.ns, Storage: e.store, Compute: e.compute, BufferBytes: 8 << 20, Device: traffic.Device{Region: e.device, Bases: bases},
	})
	return e, err
}

// close ends the engine, in the order opposite to open. Its leader has ended.
func (e *engine) close() error {
	var errs []error
	e.running.Wait()
	if e.manager != nil {
		errs = append(errs, e.manager.Close())
	}
	if e.device != nil {
		errs = append(errs, e.device.Close(context.Background()))
	}
	if e.store != nil {
		errs = append(errs, e.store.Close())
	}
	for _, nic := range []*tcp.Engine{e.compute, e.snic} {
		if nic != nil {
			errs = append(errs, nic.Close())
		}
	}
	return errors.Join(errs...)
}

// Start implements leader.Engine.
func (e *engine) Start(ctx context.Context, r *leader.Request) {
	blocks := (r.Prompt + r.Output + geometry.BlockTokens - 1) / geometry.BlockTokens
	e.mu.Lock()
	defer e.mu.Unlock()
	if blocks > len(e.free) { // the planner gives no more than fits
		r.Done(fmt.Errorf("%d blocks of device memory are free; the request needs %d", len(e.free), blocks))
		return
	}
	pages := e.free[:blocks:blocks]
	e.free = e.free[blocks:]
	e.jobs[r.Name] = &job{}
	e.running.Go(func() {
		err := e.serve(ctx, r, pages[:(r.Prompt+geometry.BlockTokens-1)/geometry.BlockTokens])
		e.mu.Lock()
		e.free = append(e.free, pages...)
		delete(e.jobs, r.Name)
		e.mu.Unlock()
		r.Done(err)
	})
}

// Read, Cut and Recompute implement leader.Engine.
func (e *engine) Read(request string, part traffic.Part) {
	e.order(request, func(t transfer) { t.Read(part) })
}

func (e *engine) Cut(request string) { e.order(request, transfer.Cut) }

func (e *engine) Recompute(request string, part traffic.Part) {
	e.order(request, func(t transfer) {
		if p, ok := t.(*traffic.Prefill); ok {
			p.Recompute(part)
		}
	})
}

// order calls f with the transfer of a request that has not ended.
func (e *engine) order(request string, f func(transfer)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch j := e.jobs[request]; {
	case j == nil:
	case j.transfer == nil:
		j.orders = append(j.orders, f)
	default:
		f(j.transfer)
	}
}

// begun gives a transfer the orders that came before it.
func (e *engine) begun(request string, t transfer) {
	e.mu.Lock()
	defer e.mu.Unlock()
	j := e.jobs[request]
	j.transfer = t
	for _, f := range j.orders {
		f(t)
	}
	j.orders = nil
}

// serve does the engine's part of a request.
func (e *engine) serve(ctx context.Context, r *leader.Request, pages []uint32) error {
	load, err := gateway.ParsePayload(r.Payload)
	if err != nil {
		return err
	}
	if r.Role == leader.Prefill {
		return e.prefill(ctx, r, load.IDs, pages)
	}
	return e.decode(ctx, r, load.IDs, pages)
}

// prefill computes the prompt and sends its KV to the decode engine.
func (e *engine) prefill(ctx context.Context, r *leader.Request, ids []kv.BlockID, pages []uint32) error {
	p, err := e.manager.Prefill(ctx, traffic.PrefillJob{
		Request: r.Name, IDs: ids, Epoch: r.Epoch, Blocks: len(pages), Hit: r.Hit, Parts: r.Parts, Pages: pages, Progress: r.Progress, Stopped: r.Stopped,
	})
	if err != nil {
		return err
	}
	e.begun(r.Name, p)
	for l := range geometry.Groups[0].Layers {
		if err := p.Layer(ctx, l); err != nil {
			p.Cancel()
			return err
		}
		// The model computes layer l of the blocks of p.Miss() here, into their pages.
		p.Computed(l)
	}
	return p.Finish(ctx)
}

// decode receives the KV of the prompt, generates, and stores the new blocks.
func (e *engine) decode(ctx context.Context, r *leader.Request, ids []kv.BlockID, pages []uint32) error {
	d, err := e.manager.Decode(ctx, traffic.DecodeJob{
		Request: r.Name, IDs: ids, Epoch: r.Epoch, Blocks: len(pages), Hit: r.Hit, Parts: r.Parts, Pages: pages, Peer: r.Peer, Progress: r.Progress, Stopped: r.Stopped,
	})
	if err != nil {
		return err
	}
	e.begun(r.Name, d)
	if err := d.Ready(ctx); err != nil {
		d.Cancel()
		return err
	}
	// The model generates here, and calls e.manager.Append for each block that it fills.
	if err := d.Finish(ctx); err != nil || len(ids) == 0 {
		return err
	}
	return e.manager.Settle(ctx, ids[len(ids)-1])
}
