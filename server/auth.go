package server

import (
	"context"
	"crypto/subtle"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"
)

// authenticator checks the bearer token of every call. Without a configured token it accepts every
// call. config.Validate then requires a loopback listener, client certificates or --insecure.
type authenticator struct {
	token string
	audit audit
}

func (a authenticator) check(md metadata.MD) error {
	if a.token == "" {
		return nil
	}
	for _, v := range md.Get("authorization") {
		given, ok := strings.CutPrefix(v, "Bearer ")
		if ok && subtle.ConstantTimeCompare([]byte(given), []byte(a.token)) == 1 {
			return nil
		}
	}
	if len(md.Get("authorization")) > 0 {
		return status.Error(codes.Unauthenticated, "the bearer token is not this node's; compare the client's token file (--token-file) with auth.token_file of the node")
	}
	return status.Error(codes.Unauthenticated, "this node requires a bearer token; give the client the node's token file (--token-file)")
}

// tap refuses a call by its headers, before its message is read, so that the messages of
// unauthorised peers take no memory.
func (a authenticator) tap(ctx context.Context, info *tap.Info) (context.Context, error) {
	err := a.check(info.Header)
	if err != nil {
		a.audit.line(ctx, info.FullMethodName, nil, nil, err)
	}
	return ctx, err
}
