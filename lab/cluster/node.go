package cluster

import (
	"bufio"
	"cmp"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/client/leader"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/emulate"
	"github.com/penstock-kv/penstock/lab/netlab"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/qos"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// Kind is the kind of a node.
type Kind string

// The kinds of nodes.
const (
	KindGateway Kind = "gateway"
	KindPrefill Kind = "prefill"
	KindDecode  Kind = "decode"
)

// NodeConfig is the first line of a node's standard input.
type NodeConfig struct {
	Kind Kind   `json:"kind"`
	Name string `json:"name"`
	// Planner and Storage are gRPC addresses.
	Planner string `json:"planner"`
	Storage string `json:"storage"`
	// Namespace holds the KV; the gateway creates it.
	Namespace  string `json:"namespace"`
	Layers     int    `json:"layers"`
	TokenBytes int    `json:"token_bytes"` // bytes of one token in one layer
	Tokens     int    `json:"block_tokens"`
	// Compute is the address of an engine's compute NIC. Token is the token with which peers
	// connect to the engine.
	Compute string `json:"compute,omitempty"`
	Token   string `json:"token,omitempty"` // hex
	// Model is an engine's model. The engine's device memory holds Window layers of DeviceBlocks
	// blocks. BufferBytes is the size of the engine's KV buffer in host memory.
	Model        emulate.Model `json:"model"`
	BufferBytes  int64         `json:"buffer_bytes,omitempty"`
	DeviceBlocks int           `json:"device_blocks,omitempty"`
	Window       int           `json:"window,omitempty"`
	// ReadRate is the rate of the storage NIC, in tokens per second; 0: the engine
	// measures it.
	ReadRate float64 `json:"read_rate,omitempty"`
	// Classes: the compute network has a traffic class for collectives, so the engine marks its KV
	// traffic as KV.
	Classes bool `json:"classes,omitempty"`
	// Shaped: this process rate-limits its NICs itself, to SNICBits and CNICBits bits per second. A
	// rate of 0 is no limit; the bytes are counted nevertheless.
	Shaped   bool   `json:"shaped,omitempty"`
	SNICBits uint64 `json:"snic_bits,omitempty"`
	CNICBits uint64 `json:"cnic_bits,omitempty"`
	// Deadline is a gateway's time limit for a turn (one request of an agent).
	Deadline time.Duration `json:"deadline,omitempty"`
}

// Order is a command to a node. Orders follow the configuration.
type Order struct {
	// Replay makes a gateway replay agents, Parallel at a time.
	Replay   []emulate.Session `json:"replay,omitempty"`
	Parallel int               `json:"parallel,omitempty"`
	// Bump makes a gateway begin a new epoch of the weights on the storage node and the planner.
	// The order may be sent during a replay.
	Bump bool `json:"bump,omitempty"`
	// Flip is the interval at which an engine flips a bit of its buffer, Flips is the number of
	// flips; 0: none.
	Flip  time.Duration `json:"flip,omitempty"`
	Flips int           `json:"flips,omitempty"`
	// BurstSink is the address on which an engine's node must receive bursts. Bursts are the bursts
	// that the node must send.
	BurstSink string  `json:"burst_sink,omitempty"`
	Bursts    *Bursts `json:"bursts,omitempty"`
	// SNICBits and CNICBits, unless 0, are new limits of a shaped NIC, in bits per second.
	SNICBits uint64 `json:"snic_bits,omitempty"`
	CNICBits uint64 `json:"cnic_bits,omitempty"`
}

// NICCounters are the counters of an engine that rate-limits its own NICs.
type NICCounters struct {
	SNIC netlab.Counters `json:"snic"`
	CNIC netlab.Counters `json:"cnic"`
}

// Event is a report of a node.
type Event struct {
	Turn *Turn `json:"turn,omitempty"`
	// Started: the planner has chosen both engines of a turn (one request of an agent), and their
	// reads begin.
	Started bool `json:"started,omitempty"`
	// Replayed reports that the agents of the last Replay have ended. Its value is the planner's
	// counters.
	Replayed *PlannerStats `json:"replayed,omitempty"`
	// Counts are an engine's counters since its start.
	Counts *emulate.Counts `json:"counts,omitempty"`
	// NICs are the counters of an engine that rate-limits its own NICs; sent with Counts.
	NICs *NICCounters `json:"nics,omitempty"`
	// Loaded: the cached KV of a request has reached a prefill engine.
	Loaded *emulate.Loaded `json:"loaded,omitempty"`
	// Sink is the memory to which bursts write: the reply to BurstSink. Bursts is the result of the
	// ordered bursts.
	Sink   *BurstTarget `json:"sink,omitempty"`
	Bursts *BurstResult `json:"bursts,omitempty"`
	// Flipped is the number of bits flipped so far.
	Flipped int `json:"flipped,omitempty"`
	// Bumped is the result of a Bump.
	Bumped *Bumped `json:"bumped,omitempty"`
}

// Bumped is a new epoch, or the error that prevented it.
type Bumped struct {
	Epoch kv.Epoch `json:"epoch,omitempty"`
	Err   string   `json:"err,omitempty"`
}

// PlannerStats are the planner's counters since its start.
type PlannerStats struct {
	Replanned  uint64 `json:"planned_anew"`
	Splits     uint64 `json:"splits"`
	Cuts       uint64 `json:"cuts"`
	Hedges     uint64 `json:"hedges"`
	Recomputes uint64 `json:"recomputes"`
}

// Turn is emulate.TurnResult with its error as text.
type Turn struct {
	emulate.TurnResult
	Err    string `json:",omitempty"`
	Failed bool
}

// node is the state that all kinds of nodes share.
type node struct {
	cfg     NodeConfig
	log     *slog.Logger
	planner *grpc.ClientConn
	engine  *tcp.Engine
	store   *client.Store
	// snic and cnic are set if this process rate-limits its NICs.
	snic, cnic *shaper

	mu  sync.Mutex
	out io.Writer
}

// countsEvery is the interval at which an engine reports its counters.
const countsEvery = 250 * time.Millisecond

// Node runs a node. It reads the configuration and orders from in, writes events to out, and
// returns when ctx or in ends.
func Node(ctx context.Context, in io.Reader, out io.Writer, log *slog.Logger) (err error) {
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, maxLine)
	n := &node{log: log, out: out}
	if !lines.Scan() {
		return fmt.Errorf("cluster: standard input ended before the configuration of the node (%w); penstock demo runs this command", cmp.Or(lines.Err(), io.ErrUnexpectedEOF))
	}
	if err := json.Unmarshal(lines.Bytes(), &n.cfg); err != nil {
		return fmt.Errorf("cluster: configuration of the node: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if err := n.connect(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.store.Close(), n.engine.Close(), n.planner.Close()) }()
	orders := make(chan Order)
	go func() {
		defer cancel()
		defer close(orders)
		for lines.Scan() {
			var o Order
			if err := json.Unmarshal(lines.Bytes(), &o); err != nil {
				log.Error("could not parse an order", "err", err)
				return
			}
			select {
			case orders <- o:
			case <-ctx.Done():
				return
			}
		}
	}()
	switch n.cfg.Kind {
	case KindGateway:
		return n.gateway(ctx, orders)
	case KindPrefill, KindDecode:
		return n.serve(ctx, orders)
	}
	return fmt.Errorf("cluster: node of kind %q; must be %s, %s or %s", n.cfg.Kind, KindGateway, KindPrefill, KindDecode)
}

// writeEvent writes an event to the parent.
func (n *node) writeEvent(e Event) {
	line, err := json.Marshal(e)
	if err != nil {
		n.log.Error("could not encode an event", "err", err)
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	// The write fails only if the parent has exited. Then standard input ends, and this
	// process exits.
	_, _ = n.out.Write(append(line, '\n'))
}

// heartbeat is the interval of heartbeats. idle is the time without a message after which a peer
// counts as dead. Both are shorter than the defaults of package tcp, so that a demonstration shows
// the effect of faults.
const (
	heartbeat = 500 * time.Millisecond
	idle      = 2 * time.Second
)

// options returns the options of every transfer engine.
func (n *node) options() tcp.Options {
	return tcp.Options{HeartbeatInterval: heartbeat, IdleTimeout: idle, Logger: n.log, ZeroCopy: true}
}

// connect dials the planner and the storage node. They need not be running yet.
func (n *node) connect(ctx context.Context) (err error) {
	quick := grpc.WithConnectParams(grpc.ConnectParams{
		Backoff: backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 500 * time.Millisecond}, MinConnectTimeout: time.Second,
	})
	if n.planner, err = grpc.NewClient(n.cfg.Planner, grpc.WithTransportCredentials(insecure.NewCredentials()), quick); err != nil {
		return fmt.Errorf("cluster: planner: %w", err)
	}
	if n.cfg.Shaped {
		n.snic, n.cnic = newShaper(n.cfg.SNICBits), newShaper(n.cfg.CNICBits)
	}
	o := n.options()
	if n.snic != nil {
		o.Wrap = n.snic.wrap
	}
	if n.engine, err = tcp.New(ctx, o); err != nil {
		return errors.Join(err, n.planner.Close())
	}
	n.store, err = client.Open(ctx, client.Options{Engine: n.engine, Servers: []string{n.cfg.Storage}, DeadFor: time.Second, Logger: n.log})
	if err != nil {
		return errors.Join(fmt.Errorf("cluster: storage: %w", err), n.engine.Close(), n.planner.Close())
	}
	return nil
}

// gateway replays agents.
func (n *node) gateway(ctx context.Context, orders <-chan Order) (err error) {
	conn, err := grpc.NewClient(n.cfg.Storage, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	admin := pb.NewAdminClient(conn)
	def := kv.Namespace{Name: n.cfg.Namespace, Geometry: kv.SingleGroup(n.cfg.Layers, n.cfg.Tokens, n.cfg.TokenBytes)}
	_, err = admin.CreateNamespace(ctx, &pb.CreateNamespaceRequest{Namespace: api.NamespaceProto(def)})
	if err := ignore(err, codes.AlreadyExists); err != nil {
		return fmt.Errorf("cluster: create namespace %q: %w", def.Name, err)
	}
	ns, err := n.store.Namespace(ctx, n.cfg.Namespace)
	if err != nil {
		return err
	}
	g := &emulate.Gateway{Namespace: ns, Store: n.store, Planner: n.planner, Deadline: n.cfg.Deadline}
	g.Done = func(r emulate.TurnResult) {
		t := Turn{TurnResult: r, Failed: r.Err != nil}
		if r.Err != nil {
			t.Err = r.Err.Error()
		}
		t.TurnResult.Err = nil
		n.writeEvent(Event{Turn: &t})
	}
	g.Started = func(string, int) { n.writeEvent(Event{Started: true}) }
	n.log.Info("ready")
	var replay sync.WaitGroup
	defer replay.Wait()
	for o := range orders {
		if o.Bump {
			b := n.bump(ctx, admin)
			n.writeEvent(Event{Bumped: &b})
			continue
		}
		replay.Wait() // one replay at a time
		replay.Go(func() { n.replay(ctx, g, o) })
	}
	return nil
}

// replay replays the recorded agent sessions through the gateway g. It then writes an Event with
// the planner's counters for the test.
func (n *node) replay(ctx context.Context, g *emulate.Gateway, o Order) {
	g.Run(ctx, o.Replay, o.Parallel)
	stats := PlannerStats{}
	if top, err := pb.NewPlannerClient(n.planner).Top(ctx, &pb.TopRequest{}); err == nil {
		stats = PlannerStats{top.Replanned, top.Splits, top.Cuts, top.Hedges, top.Recomputes}
	} else {
		n.log.Warn("could not read the planner's counters", "err", err)
	}
	n.writeEvent(Event{Replayed: &stats})
}

// bump begins a new epoch on storage, and then sets the same epoch on the planner.
func (n *node) bump(ctx context.Context, admin pb.AdminClient) Bumped {
	r, err := admin.BumpEpoch(ctx, &pb.BumpEpochRequest{Name: n.cfg.Namespace})
	if err == nil {
		_, err = pb.NewPlannerClient(n.planner).BumpWeights(ctx, &pb.BumpWeightsRequest{Namespace: n.cfg.Namespace, Epoch: r.NewEpoch})
	}
	if err != nil {
		return Bumped{Err: err.Error()}
	}
	return Bumped{Epoch: kv.Epoch(r.NewEpoch)}
}

// ignore returns nil for an error with the given code, and err otherwise.
func ignore(err error, code codes.Code) error {
	if status.Code(err) == code {
		return nil
	}
	return err
}

// serve runs an engine and the leader of its group.
func (n *node) serve(ctx context.Context, orders <-chan Order) (err error) {
	token, err := hex.DecodeString(n.cfg.Token)
	if err != nil {
		return fmt.Errorf("cluster: token: %w", err)
	}
	o := n.options()
	o.Listen, o.Token = n.cfg.Compute, token
	if n.cfg.Classes {
		marks := qos.Default()
		o.QoS = &marks
	}
	if n.cnic != nil {
		o.Wrap = n.cnic.wrap
	}
	compute, err := tcp.New(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, compute.Close()) }()
	ns, err := n.store.Namespace(ctx, n.cfg.Namespace)
	if err != nil {
		return err
	}
	e, err := emulate.NewEngine(emulate.EngineOptions{
		Name: n.cfg.Name, Model: n.cfg.Model, Namespace: ns, Store: n.store, Compute: compute,
		BufferBytes: n.cfg.BufferBytes, DeviceBlocks: n.cfg.DeviceBlocks, Window: n.cfg.Window, Logger: n.log,
		Loaded: func(l emulate.Loaded) { n.writeEvent(Event{Loaded: &l}) },
	})
	if err != nil {
		return err
	}
	role := leader.Decode
	if n.cfg.Kind == KindPrefill {
		role = leader.Prefill
	}
	l, err := leader.New(leader.Options{
		Group: n.cfg.Name, Node: n.cfg.Name, Role: role, Geometry: ns.Geometry, Planner: n.planner, ReadRate: n.cfg.ReadRate, Logger: n.log,
		Members:    []leader.Member{e.Member(compute.Addr(), rdma.Token(token))},
		SwitchRole: func(_ context.Context, to leader.Role) ([]leader.Member, error) { return nil, e.SwitchRole(to) },
	})
	if err != nil {
		return errors.Join(err, e.Close())
	}
	var wg sync.WaitGroup
	wg.Go(func() { l.Run(ctx) })
	wg.Go(func() {
		t := time.NewTicker(countsEvery)
		defer t.Stop()
		for {
			select {
			case <-t.C:
				n.reportCounts(e)
			case <-ctx.Done():
				return
			}
		}
	})
	n.log.Info("ready")
	for o := range orders {
		if o.Flip > 0 {
			wg.Go(func() { n.flip(ctx, e, o) })
		}
		if o.BurstSink != "" {
			wg.Go(func() { n.sink(ctx, o.BurstSink) })
		}
		if o.Bursts != nil && o.Bursts.Target != nil {
			wg.Go(func() { n.burst(ctx, o.Bursts) })
		}
		if n.snic != nil && o.SNICBits > 0 {
			n.snic.setRate(o.SNICBits)
		}
		if n.cnic != nil && o.CNICBits > 0 {
			n.cnic.setRate(o.CNICBits)
		}
	}
	wg.Wait()
	err = e.Close()
	n.reportCounts(e)
	return err
}

// reportCounts reports the counters of an engine and its NICs.
func (n *node) reportCounts(e *emulate.Engine) {
	c := e.Counts()
	ev := Event{Counts: &c}
	if n.snic != nil {
		ev.NICs = &NICCounters{n.snic.counters(), n.cnic.counters()}
	}
	n.writeEvent(ev)
}

// flip flips bits of the engine's buffer at the interval and as often as the order requires.
func (n *node) flip(ctx context.Context, e *emulate.Engine, o Order) {
	t := time.NewTicker(o.Flip)
	defer t.Stop()
	for done := 0; done < o.Flips; {
		select {
		case <-t.C:
			e.FlipBit()
			done++
			n.writeEvent(Event{Flipped: done})
		case <-ctx.Done():
			return
		}
	}
}
