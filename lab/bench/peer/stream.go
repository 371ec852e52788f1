package peer

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/mem"
)

// Settings of the gRPC byte stream: the fastest that were found for moving a block through a gRPC
// stream in Go. The codec passes buffers through without encoding, the windows hold several blocks,
// and the transport's buffers are large.
const (
	streamBufferBytes = 1 << 20
	streamWindowBytes = 16 << 20
	streamMethod      = "/bench.Bytes/Get"
)

// rawCodec passes bytes through unchanged.
type rawCodec struct{}

func (rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	b, ok := v.(*mem.BufferSlice)
	if !ok {
		return nil, fmt.Errorf("raw codec: %T is no buffer", v)
	}
	return *b, nil
}

func (rawCodec) Unmarshal(data mem.BufferSlice, v any) error {
	b, ok := v.(*mem.BufferSlice)
	if !ok {
		return fmt.Errorf("raw codec: %T is no buffer", v)
	}
	data.Ref() // the caller frees its reference
	*b = data
	return nil
}

func (rawCodec) Name() string { return "raw" }

// ServeStream answers each request (8 bytes: the block number) with a block of memory, blockBytes
// long, until ctx ends. It calls ready with the address on which it listens.
func ServeStream(ctx context.Context, memory []byte, blockBytes int, ready func(addr string)) error {
	l, err := listen(ctx)
	if err != nil {
		return err
	}
	get := func(_ any, s grpc.ServerStream) error {
		for {
			var req mem.BufferSlice
			if err := s.RecvMsg(&req); err != nil {
				if errors.Is(err, io.EOF) {
					return nil
				}
				return err
			}
			n := int(binary.LittleEndian.Uint64(req.Materialize())) % (len(memory) / blockBytes)
			req.Free()
			block := mem.BufferSlice{mem.SliceBuffer(memory[n*blockBytes:][:blockBytes])}
			if err := s.SendMsg(&block); err != nil {
				return err
			}
		}
	}
	server := grpc.NewServer(
		grpc.ForceServerCodecV2(rawCodec{}), grpc.MaxRecvMsgSize(math.MaxInt32), grpc.MaxSendMsgSize(math.MaxInt32),
		grpc.InitialWindowSize(streamWindowBytes), grpc.InitialConnWindowSize(4*streamWindowBytes),
		grpc.WriteBufferSize(streamBufferBytes), grpc.ReadBufferSize(streamBufferBytes),
	)
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: "bench.Bytes", HandlerType: (*any)(nil),
		Streams: []grpc.StreamDesc{{StreamName: "Get", Handler: get, ServerStreams: true, ClientStreams: true}},
	}, struct{}{})
	defer context.AfterFunc(ctx, server.Stop)()
	ready(l.Addr().String())
	return server.Serve(l)
}

// Stream is a client's connection to ServeStream.
type Stream struct{ conn *grpc.ClientConn }

// DialStream connects to a ServeStream.
func DialStream(addr string) (*Stream, error) {
	conn, err := grpc.NewClient("passthrough:///"+addr,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) { return dial(ctx, addr) }),
		grpc.WithInitialWindowSize(streamWindowBytes), grpc.WithInitialConnWindowSize(4*streamWindowBytes),
		grpc.WithWriteBufferSize(streamBufferBytes), grpc.WithReadBufferSize(streamBufferBytes),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(rawCodec{}), grpc.MaxCallRecvMsgSize(math.MaxInt32)),
	)
	if err != nil {
		return nil, err
	}
	return &Stream{conn}, nil
}

// Open begins a stream on the connection. get reads one block into dst; only one goroutine may call
// get.
func (s *Stream) Open(ctx context.Context) (get func(block int, dst []byte) error, err error) {
	stream, err := s.conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, streamMethod)
	if err != nil {
		return nil, err
	}
	var req [8]byte
	return func(block int, dst []byte) error {
		binary.LittleEndian.PutUint64(req[:], uint64(block))
		ask := mem.BufferSlice{mem.SliceBuffer(append([]byte(nil), req[:]...))}
		if err := stream.SendMsg(&ask); err != nil {
			return err
		}
		var got mem.BufferSlice
		if err := stream.RecvMsg(&got); err != nil {
			return err
		}
		defer got.Free()
		if got.Len() != len(dst) {
			return fmt.Errorf("gRPC stream: %d bytes, want %d", got.Len(), len(dst))
		}
		got.CopyTo(dst)
		return nil
	}, nil
}

// Close closes the connection.
func (s *Stream) Close() error { return s.conn.Close() }
