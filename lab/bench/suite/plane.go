package suite

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/lab/bench"
	"github.com/penstock-kv/penstock/lab/bench/peer"
	"github.com/penstock-kv/penstock/rdma"
)

// planeName is the contender that uses only the transfer engine, without gRPC, index and checksums.
// The difference between its rate and the rate of a client's reads is the cost of these three.
const planeName = "transfer engine alone"

// sinkToken is the token with which engines connect to a sink, the child process whose memory they
// write to.
const sinkToken = "penstock bench sink"

// SinkToken returns the token that a sink's engine must accept.
func SinkToken() rdma.Token { return rdma.Token(sinkToken) }

// Sink runs in the child process. It registers memory for remote writes, and returns one line with
// the address and the descriptor of the memory.
func Sink(ctx context.Context, e rdma.Engine, memory *arena.Arena) (line string, region rdma.Region, err error) {
	region, err = e.Register(memory.Bytes(), rdma.RegisterOptions{})
	if err != nil {
		return "", nil, err
	}
	desc := region.Desc()
	raw, err := desc.MarshalBinary()
	if err != nil {
		return "", nil, errors.Join(err, region.Close(ctx))
	}
	return base64.StdEncoding.EncodeToString(raw), region, nil
}

// SinkBytes is the size of a sink's memory.
const SinkBytes = landBytes

// planeWrites returns a turn (one measured run of a contender) that writes blocks into the sink. As
// many writes are in flight as reads in the other contenders.
func (s *serverSuite) planeWrites(m model, l load, sink *peer.Child) func(context.Context) (bench.Sample, error) {
	return func(ctx context.Context) (_ bench.Sample, err error) {
		raw, err := base64.StdEncoding.DecodeString(sink.Ready)
		if err != nil {
			return nil, err
		}
		var dst rdma.Desc
		if err := dst.UnmarshalBinary(raw); err != nil {
			return nil, fmt.Errorf("bench: parse the sink's address: %w", err)
		}
		e, err := s.NewEngine(ctx, l.conns)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, e.Close()) }()
		if _, err := e.Connect(ctx, dst.Addr(), SinkToken()); err != nil {
			return nil, err
		}
		src, err := e.Register(s.land.Bytes(), rdma.RegisterOptions{Local: true})
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, src.Close(ctx)) }()
		var next atomic.Int64
		return drive(ctx, s.Turn, l.depth(), gi, []*peer.Process{sink.Process}, func(int) (int64, error) {
			at := uint64(place(int(next.Add(1)), 0, 1, m.blockBytes))
			done := make(chan error, 1)
			err := e.Write(ctx, rdma.Write{Src: src, SrcOffset: at, Dst: dst, DstOffset: at, Len: uint64(m.blockBytes), Done: func(err error) { done <- err }})
			if err != nil {
				return 0, err
			}
			return m.blockBytes, <-done
		})
	}
}
