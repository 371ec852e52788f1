package suite

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"

	"google.golang.org/grpc"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
)

// model describes a namespace with blocks of one size.
type model struct {
	blockBytes int64
	layers     int
	// prompt: the blocks are one chain. Otherwise each block is the first block of a separate
	// prompt.
	prompt bool
}

func (m model) name() string {
	kind := "blocks-"
	if m.prompt {
		kind = "prompt-"
	}
	return kind + strings.ReplaceAll(sizeName(m.blockBytes), " ", "")
}

func (m model) geometry() kv.Geometry {
	return kv.SingleGroup(m.layers, 16, int(m.blockBytes)/m.layers/16)
}

// Models by the size of a block. A layer of a block has 64 KiB, or 256 KiB in the largest block.
func oneMiB() model { return model{blockBytes: 1 * mib, layers: 16} }

func fourMiB() model { return model{blockBytes: 4 * mib, layers: 64} }

func sixteenMiB() model { return model{blockBytes: 16 * mib, layers: 64} }

// remote is a client of a node.
type remote struct {
	engine rdma.Engine
	store  *client.Store
	memory *client.Memory
	land   []byte
}

func (s *serverSuite) remote(ctx context.Context, addr string, conns int) (*remote, error) {
	return s.remoteWith(ctx, client.Options{Servers: []string{addr}}, conns)
}

func (s *serverSuite) remoteWith(ctx context.Context, o client.Options, conns int) (_ *remote, err error) {
	r := &remote{land: s.land.Bytes()}
	if r.engine, err = s.NewEngine(ctx, conns); err != nil {
		return nil, err
	}
	o.Engine = r.engine
	if r.store, err = client.Open(ctx, o); err != nil {
		return nil, errors.Join(err, r.engine.Close())
	}
	if r.memory, err = r.store.Register(r.land); err != nil {
		return nil, errors.Join(err, r.close(ctx))
	}
	return r, nil
}

func (r *remote) close(ctx context.Context) error {
	var err error
	if r.memory != nil {
		err = r.memory.Close(ctx)
	}
	return errors.Join(err, r.store.Close(), r.engine.Close())
}

// blockID returns the id of block n of a model without prompt. Each such block is the first of a
// prompt, so it can be read alone.
func blockID(n int) (id kv.BlockID) {
	binary.LittleEndian.PutUint64(id[:], uint64(n)+1)
	copy(id[8:], "penstock")
	return id
}

// read reads block n into offset at of the landing memory.
func (r *remote) read(ctx context.Context, ns kv.Namespace, n int, at int64) error {
	res, err := r.store.Read(ctx, client.ReadRequest{
		Namespace: ns, IDs: []kv.BlockID{blockID(n)}, Into: r.memory, Pieces: []client.Piece{{Offset: at}},
	})
	if err != nil {
		return err
	}
	if res.Blocks != 1 {
		return fmt.Errorf("bench: block %d was not read: %v, %s %s %v", n, res.Outcome, res.Cut, res.Detail, res.Lost)
	}
	return nil
}

// create creates the model's namespace on the node and stores blocks of the given total
// size, in bytes.
func (r *remote) create(ctx context.Context, addr string, m model, bytes int64) (kv.Namespace, error) {
	conn, err := client.Dial(addr, client.DialOptions{})
	if err != nil {
		return kv.Namespace{}, err
	}
	defer conn.Close()
	if err := createNamespace(ctx, conn, m); err != nil {
		return kv.Namespace{}, err
	}
	ns, err := r.store.Namespace(ctx, m.name())
	if err != nil {
		return ns, err
	}
	rng := rand.New(rand.NewPCG(11, uint64(m.blockBytes)))
	for i := 0; i+8 <= len(r.land); i += 8 {
		binary.LittleEndian.PutUint64(r.land[i:], rng.Uint64())
	}
	for n := range int(bytes / m.blockBytes) {
		at := int64(n) * m.blockBytes % landBytes
		res, err := r.store.Write(ctx, client.WriteRequest{
			Namespace: ns, IDs: []kv.BlockID{blockID(n)}, From: r.memory, Pieces: []client.Piece{{Offset: at}},
		})
		if err != nil {
			return ns, err
		}
		if res.Blocks != 1 {
			return ns, fmt.Errorf("bench: block %d was not stored: %v %v", n, res.Outcome, res.Refused)
		}
	}
	return ns, nil
}

func createNamespace(ctx context.Context, conn *grpc.ClientConn, m model) error {
	_, err := pb.NewAdminClient(conn).CreateNamespace(ctx, &pb.CreateNamespaceRequest{
		Namespace: api.NamespaceProto(kv.Namespace{Name: m.name(), Index: kv.IndexTrie, Geometry: m.geometry()}),
	})
	return err
}

// place returns the offset in the landing memory for the block that a caller reads in its read
// number turn, counted from 0. The reads of all callers with the same number use consecutive
// offsets, so together they use all of the memory.
func place(caller, turn, callers int, blockBytes int64) int64 {
	slots := int(landBytes / blockBytes)
	return int64((caller+turn*callers)%slots) * blockBytes
}

// chain stores one prompt of the given number of blocks in a new namespace.
func (r *remote) chain(ctx context.Context, addr string, m model, blocks int) (kv.Namespace, []kv.BlockID, error) {
	ids := make([]kv.BlockID, blocks)
	for i := range ids {
		ids[i] = blockID(1<<32 + i)
	}
	m.prompt = true
	if ns, err := r.store.Namespace(ctx, m.name()); err == nil {
		return ns, ids, nil
	}
	conn, err := client.Dial(addr, client.DialOptions{})
	if err != nil {
		return kv.Namespace{}, nil, err
	}
	defer conn.Close()
	if err := createNamespace(ctx, conn, m); err != nil {
		return kv.Namespace{}, nil, err
	}
	ns, err := r.store.Namespace(ctx, m.name())
	if err != nil {
		return ns, nil, err
	}
	w, err := r.store.Write(ctx, client.WriteRequest{Namespace: ns, IDs: ids, From: r.memory})
	if err == nil && w.Blocks != blocks {
		err = fmt.Errorf("bench: %d blocks of %d were stored: %v", w.Blocks, blocks, w.Refused)
	}
	return ns, ids, err
}
