package binding

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	grpccodes "google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client/gateway"
	"github.com/penstock-kv/penstock/client/leader"
	"github.com/penstock-kv/penstock/client/traffic"
	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testnode"
	"github.com/penstock-kv/penstock/lab/testplanner"
	"github.com/penstock-kv/penstock/server/planner"
)

// geo has blocks of 16 tokens.
var geo = kv.SingleGroup(2, 16, 1024)

// fleet is a planner and a storage node in this process, and a store with a namespace.
type fleet struct {
	*rig
	planner *testplanner.Planner
	ns      *Namespace
	gateway *events[Event, *Gateway]
}

func newFleet(t *testing.T) *fleet {
	t.Helper()
	f := &fleet{planner: testplanner.Start(t, testplanner.Options{
		TCP:     true,
		Planner: planner.Options{Planner: dualpath.Options{BlockTokens: geo.BlockTokens, MinPart: geo.BlockTokens, GroupTimeout: time.Hour}, TickEvery: time.Millisecond},
	})}
	f.rig = newRig(t, testnode.Start(t, testnode.Options{}).Addr)
	h, err := f.store.Ensure(kv.Namespace{Name: "m", Index: kv.IndexTrie, Geometry: geo}, true)
	f.ns = valueOf(t, f.library.Namespace, h, err)
	h, err = f.ns.OpenGateway(GatewayOptions{Planner: PlannerOptions{Address: f.planner.Addr}})
	f.gateway = watch[Event](t, valueOf(t, f.library.Gateway, h, err))
	return f
}

// options returns the options of a leader of one engine.
func (f *fleet) options(role leader.Role) LeaderOptions {
	return LeaderOptions{
		Planner: PlannerOptions{Address: f.planner.Addr}, Group: role.String(), Node: "node of " + role.String(), Role: role, FetchEvery: time.Millisecond,
		Members: []Member{{Name: role.String() + "-0", Address: []byte("address of " + role.String()), Token: []byte{1, 0, byte(role)}, DeviceBlocks: 100}},
	}
}

func (f *fleet) lead(o LeaderOptions) *events[Action, *Leader] {
	f.t.Helper()
	h, err := f.ns.OpenLeader(o)
	return watch[Action](f.t, valueOf(f.t, f.library.Leader, h, err))
}

// prompt returns 10 blocks and a token. Prompts of different numbers share no block.
func prompt(number int) []kv.Token {
	tokens := make([]kv.Token, 10*geo.BlockTokens+1)
	tokens[0] = kv.Token(number)
	return tokens
}

// fill stores the first blocks of a prompt.
func (f *fleet) fill(tokens []kv.Token, blocks int) []kv.BlockID {
	f.t.Helper()
	ids := make([]kv.BlockID, len(tokens)/geo.BlockTokens)
	if _, err := f.ns.Chain(ids[:0], nil, nil, tokens); err != nil {
		f.t.Fatal(err)
	}
	f.register()
	b := &Batch{KeyOffsets: []uint32{0}}
	for i := range blocks {
		b.Keys = append(b.Keys, ids[i][:]...)
		b.KeyOffsets = append(b.KeyOffsets, uint32(len(b.Keys)))
		size := uint64(geo.PieceBytes(0))
		b.Addresses, b.Lengths = append(b.Addresses, f.addr+uint64(i)*size), append(b.Lengths, size)
	}
	if r := f.ns.Do(OpPut, b); r.Err != nil || r.OK != blocks {
		f.t.Fatalf("stored %d of %d blocks: %v", r.OK, blocks, r.Err)
	}
	return ids
}

// drainer is a Leader or a Gateway.
type drainer[E any] interface {
	Drain([]E) (int, error)
	EventFD() (int, error)
}

// events takes the events of a queue, one after the other.
type events[E any, D drainer[E]] struct {
	of      D
	t       testing.TB
	fd      *os.File // a duplicate of the eventfd
	waiting []E
}

func watch[E any, D drainer[E]](t testing.TB, of D) *events[E, D] {
	t.Helper()
	fd, err := of.EventFD()
	if err == nil {
		fd, err = syscall.Dup(fd)
	}
	if err != nil {
		t.Fatal(err)
	}
	e := &events[E, D]{of: of, t: t, fd: os.NewFile(uintptr(fd), "eventfd")}
	t.Cleanup(func() { e.fd.Close() })
	return e
}

// wait returns when the eventfd is readable. It makes it unreadable.
func (e *events[E, D]) wait() {
	e.t.Helper()
	if err := e.fd.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		e.t.Fatal(err)
	}
	if _, err := e.fd.Read(make([]byte, 8)); err != nil {
		e.t.Fatalf("no event: %v", err)
	}
}

// next returns the next event.
func (e *events[E, D]) next() E {
	e.t.Helper()
	for len(e.waiting) == 0 {
		e.wait()
		e.waiting = make([]E, 8)
		n, err := e.of.Drain(e.waiting)
		if err != nil {
			e.t.Fatal(err)
		}
		e.waiting = e.waiting[:n]
	}
	next := e.waiting[0]
	e.waiting = e.waiting[1:]
	return next
}

// want returns the next event of a leader and checks its kind.
func want(e *events[Action, *Leader], kind ActionKind) Action {
	e.t.Helper()
	a := e.next()
	if a.Kind != kind {
		e.t.Fatalf("action %d of attempt %s; want %d", a.Kind, a.Attempt.request.Name, kind)
	}
	return a
}

// submit submits a request to the fleet's gateway.
func (f *fleet) submit(r gateway.Request) Handle {
	f.t.Helper()
	h, err := f.gateway.of.Submit(r)
	if err != nil {
		f.t.Fatal(err)
	}
	return h
}

// until takes the gateway's events until one of a request has the kind; 0 is a failure.
func (f *fleet) until(request Handle, kind gateway.Kind) Event {
	f.t.Helper()
	for {
		switch e := f.gateway.next(); {
		case e.Request == request && e.Kind == kind:
			return e
		case e.Request == request && e.last():
			f.t.Fatalf("%v, %v; want %v", e.Kind, e.Err, kind)
		}
	}
}

// await waits until a condition of the planner holds.
func (f *fleet) await(what string, ok func(*pb.TopResponse) bool) {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), time.Minute)
	defer cancel()
	for {
		top, err := pb.NewPlannerClient(f.planner.Conn).Top(ctx, &pb.TopRequest{}, grpc.WaitForReady(true))
		if err == nil && ok(top) {
			return
		}
		if ctx.Err() != nil {
			f.t.Fatalf("not reached: %s; the planner has %v, %v", what, top, err)
		}
	}
}

func (f *fleet) must(err error) {
	f.t.Helper()
	if err != nil {
		f.t.Fatal(err)
	}
}

// readAll reports that an attempt has read its parts.
func (f *fleet) readAll(a *Attempt) {
	f.t.Helper()
	for _, p := range a.Start().Parts {
		f.must(a.Progress(traffic.Progress{Part: p, Upto: p.To, Bytes: int64(p.Len()) * geo.PieceBytes(0)}))
	}
}

// TestLeader: both engines of a request get its description, report, and end it.
func TestLeader(t *testing.T) {
	f := newFleet(t)
	tokens := prompt(1)
	ids := f.fill(tokens, 8)
	p, d := f.lead(f.options(leader.Prefill)), f.lead(f.options(leader.Decode))
	request := f.submit(gateway.Request{ID: "r", Tokens: tokens, Output: 5, Extra: []byte(`{"n":1}`)})
	pa, da := want(p, ActionStart).Attempt, want(d, ActionStart).Attempt
	read := 0
	for _, a := range []*Attempt{pa, da} {
		s := a.Start()
		other := map[string]string{"prefill": "decode", "decode": "prefill"}[s.Role.String()]
		if s.Engine != s.Role.String()+"-0" || s.PeerEngine != other+"-0" || string(s.PeerAddress) != "address of "+other || !bytes.Equal(s.PeerToken, []byte{1, 0, byte(leader.Prefill + leader.Decode - s.Role)}) {
			t.Errorf("%s with %s at %q, token %v", s.Engine, s.PeerEngine, s.PeerAddress, []byte(s.PeerToken))
		}
		if s.ID != "r" || s.Name == "" || s.Name != pa.Start().Name || s.Namespace != "m" || s.Prompt != 161 || s.Output != 5 || s.Hit != 8 {
			t.Errorf("%+v", s)
		}
		if fmt.Sprint(s.IDs) != fmt.Sprint(ids) || string(s.Extra) != `{"n":1}` {
			t.Errorf("ids %v, extra %s; want %v", s.IDs, s.Extra, ids)
		}
		for _, part := range s.Parts {
			read += part.Len()
		}
		f.readAll(a)
	}
	if read != 8 {
		t.Errorf("the engines read %d blocks; want 8", read)
	}
	f.must(pa.Done("", 0))
	f.must(da.Passed())
	f.must(da.Done("", 0))
	f.until(request, gateway.Done)
	for _, err := range []error{da.Done("", 0), pa.Done("again", 0)} {
		if !errors.Is(err, ErrHandle) {
			t.Errorf("a second end: %v; want ErrHandle", err)
		}
	}
	if _, err := f.library.Attempt(pa.Handle()); !errors.Is(err, ErrHandle) {
		t.Errorf("an ended attempt: %v", err)
	}
	f.must(p.of.Close())
	p.wait() // a duplicate of the descriptor is readable
	if _, err := p.of.Drain(nil); !errors.Is(err, ErrHandle) {
		t.Errorf("a closed leader: %v", err)
	}
	if err := p.of.Close(); !errors.Is(err, ErrHandle) {
		t.Errorf("a second Close: %v", err)
	}
}

// TestLeaderOverPlannerRestart: a request whose attempts are open continues, without another
// START, when the planner was restarted.
func TestLeaderOverPlannerRestart(t *testing.T) {
	f := newFleet(t)
	p, d := f.lead(f.options(leader.Prefill)), f.lead(f.options(leader.Decode))
	request := f.submit(gateway.Request{ID: "r", Tokens: prompt(1)})
	pa, da := want(p, ActionStart).Attempt, want(d, ActionStart).Attempt
	f.planner.Restart()
	f.until(request, gateway.Waiting)
	f.until(request, gateway.Accepted)
	f.await("the request with its engines", func(top *pb.TopResponse) bool {
		return len(top.Groups) == 2 && top.Waiting == 0 && top.Serving == 1
	})
	f.must(pa.Done("", 0))
	f.must(da.Done("", 0))
	f.until(request, gateway.Done)
}

// TestAttemptEnds: an attempt whose other engine fails, and one whose engine is removed, get
// END, and the request is started again.
func TestAttemptEnds(t *testing.T) {
	f := newFleet(t)
	p, d := f.lead(f.options(leader.Prefill)), f.lead(f.options(leader.Decode))
	request := f.submit(gateway.Request{ID: "r", Tokens: prompt(1)})
	pa, da := want(p, ActionStart).Attempt, want(d, ActionStart).Attempt
	f.must(pa.Done("out of memory", 0))
	if a := want(d, ActionEnd); a.Attempt != da {
		t.Errorf("END of %s; want %s", a.Attempt.request.Name, da.request.Name)
	}
	f.must(da.Done("given up", 0))
	pa, da = want(p, ActionStart).Attempt, want(d, ActionStart).Attempt
	f.must(d.of.Remove("decode-0"))
	if err := d.of.Remove("decode-0"); !errors.Is(err, ErrNoEngine) || CodeOf(err) != NotFound {
		t.Errorf("a second Remove: %v", err)
	}
	want(d, ActionEnd)
	want(p, ActionEnd)
	f.must(da.Done("given up", 0))
	f.must(pa.Done("given up", 0))
	m := f.options(leader.Decode).Members[0]
	f.must(d.of.Add(m))
	if err := d.of.Add(m); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "is a member") {
		t.Errorf("a second Add: %v", err)
	}
	pa, da = want(p, ActionStart).Attempt, want(d, ActionStart).Attempt
	f.must(pa.Done("", 0))
	f.must(da.Done("", 0))
	f.until(request, gateway.Done)
}

// TestCutAndRead: a part whose block storage does not have is recomputed.
func TestCutAndRead(t *testing.T) {
	f := newFleet(t)
	tokens := prompt(1)
	f.fill(tokens, 8)
	p, d := f.lead(f.options(leader.Prefill)), f.lead(f.options(leader.Decode))
	request := f.submit(gateway.Request{ID: "r", Tokens: tokens})
	pa, da := want(p, ActionStart).Attempt, want(d, ActionStart).Attempt
	for _, a := range []*Attempt{pa, da} {
		for _, part := range a.Start().Parts {
			f.must(a.Stopped(traffic.Stop{Part: part, Upto: part.From, Gone: true}))
		}
	}
	got := 0
	for got < 8 {
		a := p.next()
		switch a.Kind {
		case ActionRecompute:
			got += a.Part.Len()
		case ActionRead, ActionCut:
		default:
			t.Fatalf("action %d", a.Kind)
		}
	}
	f.must(pa.Done("", 0))
	f.must(da.Done("", 0))
	f.until(request, gateway.Done)
}

// TestReportsOutOfRange: reports that no request can have are refused with the numbers.
func TestReportsOutOfRange(t *testing.T) {
	f := newFleet(t)
	tokens := prompt(1)
	f.fill(tokens, 8)
	p, d := f.lead(f.options(leader.Prefill)), f.lead(f.options(leader.Decode))
	request := f.submit(gateway.Request{ID: "r", Tokens: tokens})
	pa, da := want(p, ActionStart).Attempt, want(d, ActionStart).Attempt
	for name, err := range map[string]error{
		"empty part":       pa.Progress(traffic.Progress{Part: traffic.Part{From: 1, To: 1}, Upto: 1}),
		"beyond the hit":   pa.Progress(traffic.Progress{Part: traffic.Part{From: 0, To: 9}, Upto: 1}),
		"upto outside":     pa.Progress(traffic.Progress{Part: traffic.Part{From: 2, To: 8}, Upto: 1}),
		"negative bytes":   pa.Progress(traffic.Progress{Part: traffic.Part{From: 0, To: 8}, Bytes: -1}),
		"stopped outside":  pa.Stopped(traffic.Stop{Part: traffic.Part{From: 0, To: 8}, Upto: 9}),
		"too many intact":  pa.Done("x", 9),
		"negative intact":  pa.Done("x", -1),
		"reversed part":    pa.Stopped(traffic.Stop{Part: traffic.Part{From: 8, To: 0}}),
		"negative part":    pa.Stopped(traffic.Stop{Part: traffic.Part{From: -1, To: 8}}),
		"upto before part": pa.Stopped(traffic.Stop{Part: traffic.Part{From: 4, To: 8}, Upto: 3}),
	} {
		if !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v; want ErrInvalid", name, err)
		}
	}
	f.must(pa.Done("", 0))
	f.must(da.Done("", 0))
	f.until(request, gateway.Done)
}

// TestLeaderOptions: options that no leader can have are refused, with their names.
func TestLeaderOptions(t *testing.T) {
	f := newFleet(t)
	for word, change := range map[string]func(*LeaderOptions){
		"planner":            func(o *LeaderOptions) { o.Planner.Address = "no port" },
		"group":              func(o *LeaderOptions) { o.Group = "" },
		"node":               func(o *LeaderOptions) { o.Node = strings.Repeat("n", 257) },
		"role":               func(o *LeaderOptions) { o.Role = 0 },
		"engine":             func(o *LeaderOptions) { o.Members[0].Name = "" },
		"DeviceBlocks":       func(o *LeaderOptions) { o.Members[0].DeviceBlocks = 0 },
		"twice":              func(o *LeaderOptions) { o.Members = append(o.Members, o.Members[0]) },
		"256":                func(o *LeaderOptions) { o.Members[0].Address = make([]byte, 256) },
		"/no/such/file":      func(o *LeaderOptions) { o.Planner.TokenFile = "/no/such/file" },
		"/no/such/authority": func(o *LeaderOptions) { o.Planner.CAFile = "/no/such/authority" },
	} {
		o := f.options(leader.Decode)
		change(&o)
		if _, err := f.ns.OpenLeader(o); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), word) {
			t.Errorf("%v; want ErrInvalid with %q", err, word)
		}
	}
}

// TestStoreClosesLeaders: Close of the store ends a leader with open attempts.
func TestStoreClosesLeaders(t *testing.T) {
	f := newFleet(t)
	p, d := f.lead(f.options(leader.Prefill)), f.lead(f.options(leader.Decode))
	f.submit(gateway.Request{ID: "r", Tokens: prompt(1)})
	pa := want(p, ActionStart).Attempt
	f.must(f.store.Close())
	if err := pa.Done("", 0); !errors.Is(err, ErrHandle) {
		t.Errorf("an attempt of a closed store: %v", err)
	}
	for _, h := range []Handle{p.of.handle, pa.Handle()} {
		if f.library.remove(h) {
			t.Errorf("handle %d is open", h)
		}
	}
	if err := d.of.Close(); !errors.Is(err, ErrHandle) {
		t.Errorf("Close after the store's: %v", err)
	}
}

// TestFixedRole: the engines behind the C interface have a fixed role. The planner refuses to
// switch their group, with the reason, and drains nothing.
func TestFixedRole(t *testing.T) {
	f := newFleet(t)
	f.lead(f.options(leader.Prefill))
	f.lead(f.options(leader.Decode))
	other := f.options(leader.Decode)
	other.Group, other.Node, other.Members[0].Name = "other", "other node", "other-0"
	f.lead(other)
	f.await("three groups", func(top *pb.TopResponse) bool { return len(top.Groups) == 3 })
	planner := pb.NewPlannerClient(f.planner.Conn)
	_, err := planner.SwitchRole(t.Context(), &pb.SwitchRoleRequest{Group: "other", Role: pb.Side_SIDE_PREFILL})
	if status.Code(err) != grpccodes.FailedPrecondition || !strings.Contains(err.Error(), "its engines have a fixed role, such as kv_role of vLLM") {
		t.Errorf("a switch: %v", err)
	}
	r, err := planner.Roles(t.Context(), &pb.RolesRequest{})
	f.must(err)
	for _, g := range r.Groups {
		if g.Switching != 0 || g.Switches {
			t.Errorf("group %v", g)
		}
	}
}
