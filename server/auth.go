package server

import (
	"context"
	"crypto/subtle"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// authenticator checks the bearer token of every call. Without a token it lets
// everyone in: the listener is on loopback, or asks for client certificates, or
// the operator said --insecure (config.Validate).
type authenticator struct{ token string }

func (a authenticator) check(ctx context.Context) error {
	if a.token == "" {
		return nil
	}
	md, _ := metadata.FromIncomingContext(ctx)
	for _, v := range md.Get("authorization") {
		given, ok := strings.CutPrefix(v, "Bearer ")
		if ok && subtle.ConstantTimeCompare([]byte(given), []byte(a.token)) == 1 {
			return nil
		}
	}
	if len(md.Get("authorization")) > 0 {
		return status.Error(codes.Unauthenticated, "the bearer token is not this node's; compare the client's token file (--token-file) with auth.token_file of the node")
	}
	return status.Error(codes.Unauthenticated, "this node wants a bearer token; give the client the node's token file (--token-file)")
}

func (a authenticator) unary(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if err := a.check(ctx); err != nil {
		return nil, err
	}
	return next(ctx, req)
}

func (a authenticator) stream(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	if err := a.check(stream.Context()); err != nil {
		return err
	}
	return next(srv, stream)
}
