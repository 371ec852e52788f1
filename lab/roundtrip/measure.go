package roundtrip

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/penstock-kv/penstock/rdma"
)

// Options are the options of a measurement.
type Options struct {
	Shapes []Shape
	// Warmup is the number of trips of each shape before the measurement, Repeats the number of
	// measured trips of each shape. The paper uses 50 and 200.
	Warmup, Repeats int
	// Progress, if not nil, is called after each pass. A pass is one round trip of every shape.
	Progress func(done, total int)
}

// Sample is one round trip.
type Sample struct {
	// Shape is the index of the sample's shape.
	Shape int
	Took  time.Duration
}

// requester is the state of a requester during one call of Measure.
type requester struct {
	engine  rdma.Engine
	to      rdma.EngineID
	region  rdma.Region
	window  rdma.Window
	replies chan reply
	dst     rdma.Desc
	base    uint32
	landed  chan error // receives the result of waiting for the immediate
	written chan error // receives the result of the write to the holder
}

// Measure measures round trips from e to the engine to. e must have a session with that engine, and
// an Answerer must run on that engine. memory is scratch memory: the writes come from the first
// half, and the answers arrive in the second half. Measure takes over e's receive buffers, so it
// can be called once per engine.
func Measure(ctx context.Context, e rdma.Engine, to rdma.EngineID, memory []byte, o Options) (_ []Sample, err error) {
	if err := check(o.Shapes, len(memory)); err != nil {
		return nil, err
	}
	if o.Repeats < 1 || o.Warmup < 0 {
		return nil, fmt.Errorf("roundtrip: %d repeats after %d for warming up: at least one repeat is needed", o.Repeats, o.Warmup)
	}
	r := &requester{engine: e, to: to, replies: make(chan reply, 1), landed: make(chan error, 1), written: make(chan error, 1)}
	if r.region, err = e.Register(memory, rdma.RegisterOptions{Local: true}); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.close(ctx)) }()
	half := uint64(len(memory) / 2)
	if r.window, err = r.region.Window(half, half); err != nil {
		return nil, err
	}
	if err := r.open(ctx, o.Shapes); err != nil {
		return nil, err
	}
	var out []Sample
	for turn := range o.Warmup + o.Repeats {
		for i, s := range o.Shapes {
			took, err := r.trip(ctx, i, s)
			if err != nil {
				return nil, fmt.Errorf("roundtrip: %d bytes there and %d back: %w", s.There, s.Back, err)
			}
			if turn >= o.Warmup {
				out = append(out, Sample{i, took})
			}
		}
		if o.Progress != nil {
			o.Progress(turn+1, o.Warmup+o.Repeats)
		}
	}
	return out, e.Send(ctx, to, encode(hello{Version: version}), nil)
}

// open sends the shapes to the holder and receives the window into which the requester writes.
func (r *requester) open(ctx context.Context, shapes []Shape) error {
	err := r.engine.Recv(2, messageBytes, func(from rdma.EngineID, msg []byte) {
		if from != r.to {
			return
		}
		var answer reply
		if err := json.Unmarshal(msg, &answer); err != nil {
			answer = reply{Error: "it answered with something else: " + err.Error()}
		}
		select {
		case r.replies <- answer:
		default: // only one reply was requested
		}
	})
	if err != nil {
		return err
	}
	desc, err := describe(r.window.Desc())
	if err != nil {
		return err
	}
	refused := make(chan error, 1)
	err = r.engine.Send(ctx, r.to, encode(hello{Version: version, Desc: desc, Shapes: shapes}), func(err error) {
		if err != nil {
			refused <- err
		}
	})
	if err != nil {
		return err
	}
	select {
	case a := <-r.replies:
		if a.Error != "" {
			return fmt.Errorf("roundtrip: the other end: %s", a.Error)
		}
		r.base = a.Base
		return r.dst.UnmarshalBinary(a.Desc)
	case err := <-refused:
		return fmt.Errorf("roundtrip: the other end takes no messages (is a fabric probe listening there?): %w", err)
	case <-ctx.Done():
		return fmt.Errorf("roundtrip: the other end does not answer: %w", ctx.Err())
	}
}

// trip is one round trip of shape i.
func (r *requester) trip(ctx context.Context, i int, s Shape) (time.Duration, error) {
	back := uint32(i) + 1
	e, err := r.engine.ExpectImm(rdma.Expect{Imm: back, Count: 1, From: []rdma.EngineID{r.to}, Done: func(err error) { r.landed <- err }})
	if err != nil {
		return 0, err
	}
	start := time.Now()
	err = r.engine.Write(ctx, rdma.Write{Src: r.region, Dst: r.dst, Len: uint64(s.There), Imm: rdma.ImmOf(r.base + uint32(i)), Done: func(err error) { r.written <- err }})
	if err != nil {
		e.Cancel()
		<-r.landed
		return 0, err
	}
	wrote := false
	for {
		select {
		case err := <-r.landed:
			took := time.Since(start)
			if !wrote {
				err = errors.Join(err, <-r.written)
			}
			return took, err
		case err := <-r.written:
			wrote = true
			if err == nil {
				continue
			}
			e.Cancel()
			<-r.landed
			return 0, err
		case <-ctx.Done():
			e.Cancel()
			<-r.landed
			if !wrote {
				r.engine.Disconnect(r.to) // completes the write, so that its Done is called
				<-r.written
			}
			return 0, ctx.Err()
		}
	}
}

// close unregisters the memory, and returns when no operation accesses it.
func (r *requester) close(ctx context.Context) error {
	// The cleanup also runs after ctx has ended, with its own time limit.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), replyWithin)
	defer cancel()
	return r.region.Close(ctx)
}
