package server

import (
	"context"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"

	"github.com/penstock-kv/penstock/internal/bearer"
)

// Tokens returns the bearer tokens that are accepted at present. If it returns none, or if the
// function is nil, no token is required. config.Validate then requires a loopback listener, client
// certificates or --insecure.
type Tokens func() []string

// authenticator checks the credentials of every call: against the roles file if there is one,
// otherwise against the bearer tokens.
type authenticator struct {
	tokens Tokens
	guard  guard
	audit  audit
}

func (a authenticator) check(md metadata.MD) error {
	if a.tokens == nil || bearer.Accepts(a.tokens(), md.Get("authorization")...) {
		return nil
	}
	if len(md.Get("authorization")) > 0 {
		return status.Error(codes.Unauthenticated, "the bearer token is not this node's; compare the client's token file (--token-file) with auth.token_file of the node")
	}
	return status.Error(codes.Unauthenticated, "this node requires a bearer token; give the client the node's token file (--token-file)")
}

// tap refuses a call by its headers, before its message is read, so that the messages of
// unauthorised peers take no memory.
func (a authenticator) tap(ctx context.Context, info *tap.Info) (context.Context, error) {
	var err error
	// The policy is loaded once, so that a reload in between leaves no call unchecked.
	if policy := a.guard.roles.current(); policy != nil {
		ctx, err = admit(ctx, policy, info.FullMethodName, info.Header)
	} else {
		err = a.check(info.Header)
	}
	if err != nil {
		a.audit.line(ctx, info.FullMethodName, nil, nil, err)
	}
	return ctx, err
}
