package client_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma/tcp"
	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/handoff"
	"github.com/penstock-kv/penstock/server/storage"
)

// newLocalHost is newHost with a unix socket, whose path it returns.
func newLocalHost(t testing.TB, segmentBytes int64, edit func(*storage.Options, *server.Options)) (*host, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "local.sock")
	h := &host{t: t, edit: edit, segmentBytes: segmentBytes, medium: memio.New(memio.Options{}), index: vfs.NewMem(), control: testkit.Port(t), data: testkit.Port(t)}
	h.socket(path)
	h.start()
	t.Cleanup(h.kill)
	return h, path
}

// localRig is a rig of one node whose arena it maps.
type localRig struct {
	*rig
	socket string
}

func newLocalRig(t testing.TB, edit func(*storage.Options, *server.Options)) (localRig, *host) {
	h, path := newLocalHost(t, 1<<20, edit)
	return localRig{newRig(t, func(o *client.Options) { o.LocalSocket = path }, h), path}, h
}

// noLoans waits until all loans are returned.
func (h *host) noLoans() {
	h.t.Helper()
	eventually(h.t, "all loans returned", func() bool { s := h.node.Stats(); return s.Loans == 0 && s.LoanBytes == 0 })
}

// borrow reads ids and checks every byte of the blocks that count as read.
func (r localRig) borrow(ns kv.Namespace, ids []kv.BlockID) client.LocalResult {
	r.t.Helper()
	got, err := r.store.ReadLocal(r.t.Context(), client.ReadRequest{Namespace: ns, IDs: ids})
	if err != nil {
		r.t.Fatalf("read local: %v", err)
	}
	r.checkBorrowed(got, ids)
	return got
}

func (r localRig) checkBorrowed(got client.LocalResult, ids []kv.BlockID) {
	r.t.Helper()
	for _, p := range got.Pieces {
		if err := check(p.Bytes, ids[p.Block], p.Group, 0); err != nil {
			r.t.Fatal(err)
		}
	}
}

func (r localRig) giveBack(got client.LocalResult) {
	r.t.Helper()
	if err := errors.Join(got.Return(r.t.Context()), got.Return(r.t.Context())); err != nil {
		r.t.Errorf("return: %v", err)
	}
}

func TestReadLocal(t *testing.T) {
	r, h := newLocalRig(t, nil)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	// More than one task: a task has at most 1 MiB here.
	ids := chain(ns, 200, 1)
	r.mustPut(ns, ids)
	got := r.borrow(ns, ids)
	if got.Outcome != client.Hit || got.Blocks != 200 || len(got.Pieces) != 200 || got.Bytes != 200*8192 || got.Cut != client.CutComplete {
		t.Fatalf("borrowed %d pieces: %+v", len(got.Pieces), got.ReadResult)
	}
	for i, p := range got.Pieces {
		if p.Block != i || len(p.Bytes) != 8192 || cap(p.Bytes) != 8192 {
			t.Fatalf("piece %d is block %d, %d bytes of %d", i, p.Block, len(p.Bytes), cap(p.Bytes))
		}
	}
	if s := h.node.Stats(); s.Loans != 200 {
		t.Errorf("%d pieces lent; want 200", s.Loans)
	}
	again := got // a copy of the result is the same loan
	r.giveBack(got)
	r.giveBack(again)
	h.noLoans()

	part, err := r.store.ReadLocal(t.Context(), client.ReadRequest{Namespace: ns, IDs: ids[:4], FirstLayer: 1, Layers: 2, Pieces: []client.Piece{{Block: 3}, {Block: 0}}})
	if err != nil || len(part.Pieces) != 2 || part.Pieces[0].Block != 3 {
		t.Fatalf("two layers of two blocks: %+v, %v", part, err)
	}
	for _, p := range part.Pieces {
		want := make([]byte, 8192)
		fill(want, ids[p.Block], 0, 0)
		if string(p.Bytes) != string(want[2048:6144]) {
			t.Errorf("layers 1 and 2 of block %d: wrong bytes", p.Block)
		}
	}
	r.giveBack(part)

	none := r.borrow(ns, chain(ns, 3, 9))
	if none.Outcome != client.Miss || len(none.Pieces) != 0 {
		t.Errorf("blocks that are not there: %+v", none)
	}
	r.giveBack(none)
	short := r.borrow(ns, append(ids[:5:5], chain(ns, 6, 9)[5]))
	if short.Outcome != client.Hit || short.Blocks != 5 || short.Cut != client.CutAbsent {
		t.Errorf("five of six: %+v", short.ReadResult)
	}
	r.giveBack(short)
	h.noLoans()
}

func TestReadLocalOfHybridAndFlat(t *testing.T) {
	r, h := newLocalRig(t, nil)
	flat := r.namespace("flat", geometry, kv.IndexFlat)
	ids := keys(10, 1)
	r.mustPut(flat, ids)
	got := r.borrow(flat, ids)
	if got.Blocks != 10 {
		t.Errorf("flat: %+v", got.ReadResult)
	}
	r.giveBack(got)

	g := kv.Geometry{BlockTokens: 4, DType: "u8", Layout: "l", Groups: []kv.Group{
		{Kind: kv.Full, Layers: 2, TokenBytes: 512},
		{Kind: kv.Window, Layers: 3, TokenBytes: 256, WindowTokens: 8},
	}}
	hybrid := r.namespace("hybrid", g, kv.IndexTrie)
	ids = chain(hybrid, 6, 2)
	var pieces []client.Piece
	var at int64
	for group := range g.Groups {
		for b := range ids {
			pieces = append(pieces, client.Piece{Block: b, Group: group, Offset: at})
			at += g.PieceBytes(group)
		}
	}
	mem := r.memory(at)
	for _, p := range pieces {
		fill(mem.Bytes()[p.Offset:][:g.PieceBytes(p.Group)], ids[p.Block], p.Group, 0)
	}
	if w, err := r.store.Write(t.Context(), client.WriteRequest{Namespace: hybrid, IDs: ids, From: mem, Pieces: pieces}); err != nil || w.Blocks != 6 {
		t.Fatalf("write: %+v, %v", w, err)
	}
	needed := 0
	for group := range g.Groups {
		needed += 6 - g.FirstNeeded(group, 6)
	}
	got, err := r.store.ReadLocal(t.Context(), client.ReadRequest{Namespace: hybrid, IDs: ids})
	if err != nil || got.Blocks != 6 || len(got.Pieces) != needed {
		t.Fatalf("hybrid: %d pieces, %+v, %v", len(got.Pieces), got.ReadResult, err)
	}
	r.checkBorrowed(got, ids)
	r.giveBack(got)
	h.noLoans()
}

// TestBorrowedBytesAreReadOnly: the process that maps the memory cannot write to it.
func TestBorrowedBytesAreReadOnly(t *testing.T) {
	r, _ := newLocalRig(t, nil)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 1, 1)
	r.mustPut(ns, ids)
	got := r.borrow(ns, ids)
	defer r.giveBack(got)
	faulted := func() (faulted bool) {
		defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
		defer func() { faulted = recover() != nil }()
		got.Pieces[0].Bytes[0]++
		return false
	}()
	if !faulted {
		t.Error("borrowed memory could be written")
	}
	r.checkBorrowed(got, ids)
}

// TestBorrowedBytesStay: borrowed bytes do not change during evictions, a new epoch, and writes of
// other blocks to every byte of the arena that is not lent.
func TestBorrowedBytesStay(t *testing.T) {
	r, h := newLocalRig(t, nil)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 64, 1)
	r.mustPut(ns, ids)
	got := r.borrow(ns, ids)
	if got.Blocks != 64 {
		t.Fatalf("%+v", got.ReadResult)
	}
	h.admin(func(ctx context.Context, c pb.AdminClient) error {
		_, err := c.Evict(ctx, &pb.EvictRequest{Bytes: 1 << 40})
		return err
	})
	r.bump("m")
	old := ns
	ns, err := r.store.Namespace(t.Context(), "m")
	if err != nil {
		t.Fatal(err)
	}
	for seed := range uint32(20) {
		other := chain(ns, 128, 100+seed)
		w, err := r.put(ns, other, 0, 0)
		if err != nil || w.Outcome != client.Hit {
			t.Fatalf("write: %+v, %v", w, err)
		}
		if again := r.get(ns, other); again.Blocks != 128 {
			t.Fatalf("read: %+v", again)
		}
		r.checkBorrowed(got, ids)
	}
	for _, ns := range []kv.Namespace{ns, old} {
		if m := r.match(ns, ids); m.Blocks != 0 {
			t.Errorf("%d blocks of the old epoch match", m.Blocks)
		}
	}
	r.giveBack(got)
	h.noLoans()
}

func TestLoanBound(t *testing.T) {
	r, h := newLocalRig(t, func(so *storage.Options, _ *server.Options) { so.LoanBytesMax = 256 << 10 })
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 100, 1)
	r.mustPut(ns, ids)
	var all []client.LocalResult
	for busy := false; !busy; {
		got := r.borrow(ns, ids[:8])
		busy = got.Outcome == client.Busy
		if busy && (got.Cut != client.CutBusy || got.Detail == "" || len(got.Pieces) != 0) {
			t.Errorf("busy: %+v", got)
		}
		all = append(all, got)
		if s := h.node.Stats(); s.LoanBytes > 256<<10 || len(all) > 100 {
			t.Fatalf("%d bytes lent after %d reads", s.LoanBytes, len(all))
		}
	}
	if got := r.get(ns, ids[:8]); got.Blocks != 8 {
		t.Errorf("all is lent, and a Read gets %+v", got)
	}
	for _, l := range all {
		r.giveBack(l)
	}
	h.noLoans()
	got := r.borrow(ns, ids[:8])
	if got.Blocks != 8 {
		t.Errorf("after the return: %+v", got.ReadResult)
	}
	r.giveBack(got)
}

func TestLocalUnsupported(t *testing.T) {
	h, path := newLocalHost(t, 1<<20, nil)
	other, otherPath := newLocalHost(t, 1<<20, nil)
	deaf := filepath.Join(t.TempDir(), "deaf.sock")
	l, err := net.Listen("unix", deaf)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte(strings.Repeat("HTTP/1.1 400 Bad Request\r\n", 10)))
			c.Close()
		}
	}()
	for name, tc := range map[string]struct{ socket, want string }{
		"none":          {"", "LocalSocket"},
		"absent":        {path + ".none", path + ".none"},
		"another node":  {otherPath, otherPath},
		"not a node":    {deaf, deaf},
		"not a socket":  {os.Args[0], os.Args[0]},
		"too long path": {"/" + strings.Repeat("x", 200), "xxx"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, func(o *client.Options) { o.LocalSocket = tc.socket }, h)
			ns := r.namespace("m"+strings.ReplaceAll(name, " ", ""), geometry, kv.IndexTrie)
			ids := chain(ns, 4, 1)
			r.mustPut(ns, ids)
			_, err := r.store.ReadLocal(t.Context(), client.ReadRequest{Namespace: ns, IDs: ids})
			if !errors.Is(err, client.ErrUnsupported) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("read local: %v; want ErrUnsupported with %q", err, tc.want)
			}
			if got := r.get(ns, ids); got.Blocks != 4 {
				t.Errorf("read: %+v", got)
			}
		})
	}
	h.noLoans()
	other.noLoans()
	// An invalid request is refused without a socket too.
	r := newRig(t, nil, h)
	if _, err := r.store.ReadLocal(t.Context(), client.ReadRequest{}); !errors.Is(err, client.ErrRequest) {
		t.Errorf("no namespace: %v", err)
	}
}

// TestNodeRestartsUnderLoan: blocks borrowed from a node that has ended stay readable. The next
// read borrows from the restarted node.
func TestNodeRestartsUnderLoan(t *testing.T) {
	r, h := newLocalRig(t, nil)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 8, 1)
	r.mustPut(ns, ids)
	before := r.borrow(ns, ids)
	h.restart()
	var after client.LocalResult
	eventually(t, "a hit after the restart", func() bool {
		var err error
		after, err = r.store.ReadLocal(t.Context(), client.ReadRequest{Namespace: ns, IDs: ids})
		if err != nil && !errors.Is(err, client.ErrUnsupported) {
			t.Fatal(err)
		}
		return after.Outcome == client.Hit
	})
	r.checkBorrowed(after, ids)
	// The memory is still mapped. With the invariants, the node has overwritten the returned
	// memory.
	_ = before.Pieces[0].Bytes[8191]
	r.giveBack(before)
	r.giveBack(after)
	h.noLoans()
}

// TestCancelledLocalRead: ctx ends while the device is slow. No loan is left.
func TestCancelledLocalRead(t *testing.T) {
	r, h := newLocalRig(t, nil)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 8, 1)
	r.mustPut(ns, ids)
	r.giveBack(r.borrow(ns, ids))
	for range 20 {
		h.gate.shut()
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			<-h.gate.arrived
			wg.Go(h.gate.lift) // the reply and the cancellation race
			cancel()
		})
		got, err := r.store.ReadLocal(ctx, client.ReadRequest{Namespace: ns, IDs: ids})
		if err == nil {
			r.checkBorrowed(got, ids)
			r.giveBack(got)
		} else if !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		wg.Wait()
		cancel()
	}
	h.gate.lift()
	h.noLoans()
}

// TestStoreClosesUnderLoan: the bytes stay until they are returned.
func TestStoreClosesUnderLoan(t *testing.T) {
	r, h := newLocalRig(t, nil)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 8, 1)
	r.mustPut(ns, ids)
	got := r.borrow(ns, ids)
	if err := r.store.Close(); err != nil {
		t.Fatal(err)
	}
	if s := h.node.Stats(); s.Loans != 8 {
		t.Errorf("%d pieces lent; want 8", s.Loans)
	}
	r.checkBorrowed(got, ids)
	if _, err := r.store.ReadLocal(t.Context(), client.ReadRequest{Namespace: ns, IDs: ids}); !errors.Is(err, client.ErrClosed) {
		t.Errorf("read local from a closed store: %v", err)
	}
	r.giveBack(got)
	h.noLoans()
}

func TestManyBorrowAtOnce(t *testing.T) {
	r, h := newLocalRig(t, nil)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	var chains [8][]kv.BlockID
	for i := range chains {
		chains[i] = chain(ns, 16, uint32(i))
		r.mustPut(ns, chains[i])
	}
	var wg sync.WaitGroup
	for i := range chains {
		wg.Go(func() {
			for range 50 {
				got, err := r.store.ReadLocal(t.Context(), client.ReadRequest{Namespace: ns, IDs: chains[i]})
				if err != nil {
					t.Error(err)
					return
				}
				for _, p := range got.Pieces {
					if err := check(p.Bytes, chains[i][p.Block], p.Group, 0); err != nil {
						t.Error(err)
					}
				}
				if err := got.Return(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	h.noLoans()
}

// alteringProxy is between the client and a node, on gRPC and on the unix socket, and changes the
// node's responses.
type alteringProxy struct {
	pb.UnimplementedCacheServer
	node    pb.CacheClient
	socket  *handoff.Listener
	session api.LocalID // with the node
	loans   uint64
	// change is set between calls. Only the socket orders it with the calls.
	change atomic.Pointer[func(*pb.ReadResponse)]
	// old makes the node look like one that does not support suffixes.
	old bool
	// suffixes counts the reads of suffixes that came over the socket.
	suffixes atomic.Int64
}

func (l *alteringProxy) setChange(change func(*pb.ReadResponse)) { l.change.Store(&change) }

func (l *alteringProxy) Describe(ctx context.Context, req *pb.DescribeRequest) (*pb.DescribeResponse, error) {
	resp, err := l.node.Describe(ctx, req)
	if err == nil {
		id := l.socket.ID()
		resp.LocalId = id[:]
		resp.Suffixes = resp.GetSuffixes() && !l.old
		if l.old {
			resp.StagingBytes = 0
		}
	}
	return resp, err
}

// answer is a handoff.Handler. Calls come one at a time.
func (l *alteringProxy) answer(ctx context.Context, _ api.LocalID, msg, dst []byte) []byte {
	call, request, err := api.ParseCall(msg)
	if err != nil {
		return dst
	}
	var req pb.ReadRequest
	if err := proto.Unmarshal(request, &req); err != nil {
		return dst
	}
	if req.GetSuffix() {
		l.suffixes.Add(1)
	}
	l.loans++
	req.LocalSession, req.Loan = l.session[:], l.loans
	resp, err := l.node.Read(ctx, &req)
	if err != nil {
		return dst
	}
	(*l.change.Load())(resp)
	out, _ := proto.MarshalOptions{}.MarshalAppend(api.Reply{ID: call.ID}.Append(dst), resp)
	return out
}

// newProxy starts a proxy for h, whose socket is at path, and returns a store that reaches only the
// proxy.
func newProxy(t *testing.T, h *host, path string, old bool) (_ *alteringProxy, _ *client.Store, stop func()) {
	conn, err := client.Dial(h.control, client.DialOptions{})
	h.must(err)
	l := &alteringProxy{node: pb.NewCacheClient(conn), old: old}
	own := filepath.Join(t.TempDir(), "alteringProxy.sock")
	l.socket, err = handoff.Listen(handoff.Options{Path: own, Arena: h.arena})
	h.must(err)
	unix, err := net.Dial("unix", path)
	h.must(err)
	msg := make([]byte, api.LocalHelloBytes)
	view, err := arena.Receive(unix.(*net.UnixConn), msg)
	h.must(err)
	var hello api.LocalHello
	h.must(hello.UnmarshalBinary(msg))
	l.session = hello.Session
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	h.must(err)
	s := grpc.NewServer()
	pb.RegisterCacheServer(s, l)
	served := make(chan error, 2)
	go func() { served <- s.Serve(listener) }()
	go func() { served <- l.socket.Serve(l.answer) }()
	engine, err := tcp.New(t.Context(), tcp.Options{})
	h.must(err)
	store, err := client.Open(t.Context(), client.Options{Servers: []string{listener.Addr().String()}, Engine: engine, LocalSocket: own, RetryMax: -1, ReadParallel: 1})
	h.must(err)
	return l, store, func() {
		err := errors.Join(store.Close(), engine.Close(), l.socket.Close(), view.Close(), unix.Close())
		s.Stop()
		if err := errors.Join(err, conn.Close(), <-served, <-served); err != nil {
			t.Error(err)
		}
		h.noLoans()
	}
}

// TestLyingNode: places outside the arena, and wrong places inside, are lost pieces. They cause
// neither a fault nor wrong bytes.
func TestLyingNode(t *testing.T) {
	r, h := newLocalRig(t, func(so *storage.Options, _ *server.Options) { so.LoanBytesMax = 16 << 20 })
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 8, 1)
	r.mustPut(ns, ids)
	l, store, stop := newProxy(t, h, r.socket, false)
	defer stop()
	size := uint64(len(h.arena.Bytes()))
	for name, lie := range map[string]func(*pb.PieceResult){
		"at the end":       func(p *pb.PieceResult) { p.ArenaOffset = size },
		"over the end":     func(p *pb.PieceResult) { p.ArenaOffset = size - 8191 },
		"far away":         func(p *pb.PieceResult) { p.ArenaOffset = 1<<64 - 1 },
		"wraps around":     func(p *pb.PieceResult) { p.ArenaOffset = 1<<64 - 4096 },
		"of another piece": func(p *pb.PieceResult) { p.ArenaOffset += 4096 },
		"no checksums":     func(p *pb.PieceResult) { p.LayerSums = nil },
	} {
		l.setChange(func(resp *pb.ReadResponse) { lie(resp.GetPieces()[3]) })
		got, err := store.ReadLocal(t.Context(), client.ReadRequest{Namespace: ns, IDs: ids})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if got.Blocks != 3 || len(got.Lost) != 1 || got.Lost[0].Reason != client.LostChecksum || len(got.Pieces) != 7 {
			t.Errorf("%s: %d pieces, %+v", name, len(got.Pieces), got.ReadResult)
		}
		r.checkBorrowed(got, ids)
		r.giveBack(got)
	}
	l.setChange(func(resp *pb.ReadResponse) { resp.Pieces = resp.GetPieces()[1:] })
	if _, err := store.ReadLocal(t.Context(), client.ReadRequest{Namespace: ns, IDs: ids}); err == nil {
		t.Error("an answer for other pieces than the requested ones was accepted")
	}
}

// borrowUntilKilled borrows blocks, reports their number on standard output, and waits.
func borrowUntilKilled(t *testing.T, store *client.Store, ns kv.Namespace) {
	got, err := store.ReadLocal(t.Context(), client.ReadRequest{Namespace: ns, IDs: chain(ns, 8, 1)})
	if err != nil {
		t.Fatal(err)
	}
	fmt.Printf("borrowed %d\n", got.Blocks)
	select {}
}

// TestKilledClientReturnsLoans: when a client that has borrowed blocks is killed, its loans end,
// and the loans of another client stay.
func TestKilledClientReturnsLoans(t *testing.T) {
	if store, ns := openVictim(t); store != nil {
		borrowUntilKilled(t, store, ns)
	}
	r, h := newLocalRig(t, nil)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 8, 1)
	r.mustPut(ns, ids)
	mine := r.borrow(ns, ids)
	cmd, out := startVictim(t, "TestKilledClientReturnsLoans", h, ns, r.socket)
	if lines := bufio.NewScanner(out); !lines.Scan() || lines.Text() != "borrowed 8" {
		t.Errorf("the other process reports %q", lines.Text())
	}
	if s := h.node.Stats(); s.Loans != 16 {
		t.Errorf("%d pieces lent to two processes; want 16", s.Loans)
	}
	h.must(cmd.Process.Kill())
	_ = cmd.Wait() // killed
	eventually(t, "the dead process's loans returned", func() bool { return h.node.Stats().Loans == 8 })
	r.checkBorrowed(mine, ids)
	r.giveBack(mine)
	h.noLoans()
}
