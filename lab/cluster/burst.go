package cluster

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/qos"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// Bursts are N writes over the compute network that load it as a collective of model execution
// does: Bytes bytes at once, in the traffic class of model execution, with a pause of length Pause
// after each write.
type Bursts struct {
	// From and To are the names of the sending and the receiving engine. In an Order they are
	// ignored: the node that gets the order sends.
	From, To string
	Bytes    int64
	Pause    time.Duration
	N        int
	// AsKV sends the bursts in the traffic class of KV, as if there were no class for collectives.
	AsKV bool

	// Target is the memory to which the bursts write.
	Target *BurstTarget `json:"target,omitempty"`
}

// BurstTarget is memory of an engine's node that receives bursts.
type BurstTarget struct {
	Addr []byte `json:"addr"` // rdma.Addr
	Desc []byte `json:"desc"` // rdma.Desc
}

// burstPort is the port on which a node receives bursts.
const burstPort = 7600

// burstMemory is the size of the largest burst, in bytes.
const burstMemory = 16 << 20

// Burst sends bursts from one engine to another. For each burst it returns the time from its start
// until its last byte had arrived.
func (c *Cluster) Burst(ctx context.Context, b Bursts) ([]time.Duration, error) {
	from, err := c.member(b.From)
	if err != nil {
		return nil, err
	}
	to, err := c.member(b.To)
	if err != nil {
		return nil, err
	}
	if from.proc == nil || to.proc == nil || from.config.Compute == "" || to.config.Compute == "" {
		return nil, fmt.Errorf("cluster: bursts from %s to %s: both must be running engines", b.From, b.To)
	}
	if b.Bytes < 1 || b.Bytes > burstMemory {
		return nil, fmt.Errorf("cluster: bursts of %d bytes; must be 1 to %d bytes", b.Bytes, burstMemory)
	}
	if err := to.send(Order{BurstSink: at(to.compute, burstPort)}); err != nil {
		return nil, err
	}
	if b.Target, err = await(ctx, to, c.sinks); err != nil {
		return nil, err
	}
	if err := from.send(Order{Bursts: &b}); err != nil {
		return nil, err
	}
	took, err := await(ctx, from, c.bursts)
	if err == nil && took.Err != "" {
		err = errors.New(took.Err)
	}
	if err != nil {
		return nil, fmt.Errorf("cluster: bursts from %s to %s: %w", b.From, b.To, err)
	}
	return took.Took, nil
}

// await waits for a report of a node.
func await[T any](ctx context.Context, m *member, c <-chan *T) (*T, error) {
	select {
	case v := <-c:
		return v, nil
	case <-m.proc.Over():
		return nil, fmt.Errorf("cluster: %s ended:\n%s", m.name, m.proc.Log())
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// BurstResult holds the duration of each burst, and the error that ended the bursts early.
type BurstResult struct {
	Took []time.Duration `json:"took"`
	Err  string          `json:"err,omitempty"`
}

// collectives is a node's transfer engine for bursts. The KV has its own transfer engine.
type collectives struct {
	engine *tcp.Engine
	region rdma.Region
}

// newCollectives opens the transfer engine for bursts on an address of the compute NIC. With the
// address "" the engine can only send.
func (n *node) newCollectives(ctx context.Context, listen string) (*collectives, error) {
	token, err := hex.DecodeString(n.cfg.Token)
	if err != nil {
		return nil, err
	}
	marks := qos.Default()
	o := n.options()
	o.Listen, o.Token, o.QoS = listen, token, &marks
	if n.cnic != nil {
		o.Wrap = n.cnic.wrap
	}
	e, err := tcp.New(ctx, o)
	if err != nil {
		return nil, err
	}
	r, err := e.Register(make([]byte, burstMemory), rdma.RegisterOptions{})
	if err != nil {
		return nil, errors.Join(err, e.Close())
	}
	return &collectives{e, r}, nil
}

// sink receives bursts until ctx ends.
func (n *node) sink(ctx context.Context, listen string) {
	c, err := n.newCollectives(ctx, listen)
	if err != nil {
		n.log.Error("could not open the receiver of bursts", "err", err)
		return
	}
	defer func() { _ = c.engine.Close() }()
	t := &BurstTarget{}
	if t.Addr, err = c.engine.Addr().MarshalBinary(); err == nil {
		var w rdma.Window
		if w, err = c.region.Window(0, burstMemory); err == nil {
			t.Desc, err = w.Desc().MarshalBinary()
		}
	}
	if err != nil {
		n.log.Error("could not register memory for bursts", "err", err)
		return
	}
	n.writeEvent(Event{Sink: t})
	<-ctx.Done()
}

// burst sends the bursts of an order and reports the duration of each.
func (n *node) burst(ctx context.Context, b *Bursts) {
	r := &BurstResult{}
	if err := n.send(ctx, b, r); err != nil {
		r.Err = err.Error()
	}
	n.writeEvent(Event{Bursts: r})
}

// send sends the bursts of b and appends the duration of each to r.
func (n *node) send(ctx context.Context, b *Bursts, r *BurstResult) (err error) {
	c, err := n.newCollectives(ctx, "")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.engine.Close()) }()
	var (
		addr rdma.Addr
		desc rdma.Desc
	)
	if err := errors.Join(addr.UnmarshalBinary(b.Target.Addr), desc.UnmarshalBinary(b.Target.Desc)); err != nil {
		return err
	}
	token, err := hex.DecodeString(n.cfg.Token)
	if err != nil {
		return err
	}
	if _, err := c.engine.Connect(ctx, addr, token); err != nil {
		return err
	}
	class := rdma.ClassCollective
	if b.AsKV {
		class = rdma.ClassKV
	}
	for range b.N {
		landed := rdma.NewFlag()
		begin := time.Now()
		err := c.engine.Write(ctx, rdma.Write{Src: c.region, Dst: desc, Len: uint64(b.Bytes), Class: class, Done: landed.Set})
		if err == nil {
			err = landed.Wait(ctx)
		}
		if err != nil {
			return err
		}
		r.Took = append(r.Took, time.Since(begin))
		pause := time.NewTimer(b.Pause)
		select {
		case <-pause.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}
