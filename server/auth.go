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

// current returns the tokens that are accepted at present, none if the function is nil.
func (t Tokens) current() []string {
	if t == nil {
		return nil
	}
	return t()
}

// authenticator checks the credentials of every call: against the roles file if there is one,
// otherwise against the bearer tokens.
type authenticator struct {
	tokens Tokens
	guard  guard
	audit  audit
}

// withBearer returns a context that carries the caller's bearer token.
func withBearer(ctx context.Context, token string) context.Context {
	return context.WithValue(ctx, bearerKey{}, token)
}

// bearerKey is the key of the bearer token, a string, in the context of a call that the token file has admitted.
type bearerKey struct{}

// bearerOf returns the bearer token by which the token file has admitted a call. It is empty if no token was required,
// or roles have admitted the call.
func bearerOf(ctx context.Context) string {
	token, _ := ctx.Value(bearerKey{}).(string)
	return token
}

// check returns an error unless the headers of a call have one of the tokens. The returned context carries
// the token.
func (a authenticator) check(ctx context.Context, md metadata.MD) (context.Context, error) {
	tokens := a.tokens.current()
	if len(tokens) == 0 {
		return ctx, nil
	}
	if i := bearer.Index(tokens, md.Get("authorization")...); i >= 0 {
		return withBearer(ctx, tokens[i]), nil
	}
	if len(md.Get("authorization")) > 0 {
		return ctx, status.Error(codes.Unauthenticated, "the bearer token is not this node's; compare the client's token file (--token-file) with auth.token_file of the node")
	}
	return ctx, status.Error(codes.Unauthenticated, "this node requires a bearer token; give the client the node's token file (--token-file)")
}

// tap refuses a call by its headers, before its message is read, so that the messages of
// unauthorised peers take no memory.
func (a authenticator) tap(ctx context.Context, info *tap.Info) (context.Context, error) {
	var err error
	// The policy is loaded once, so that a reload in between leaves no call unchecked.
	if policy := a.guard.roles.current(); policy != nil {
		ctx, err = admit(ctx, policy, info.FullMethodName, info.Header)
	} else {
		ctx, err = a.check(ctx, info.Header)
	}
	if err != nil {
		a.audit.line(ctx, info.FullMethodName, nil, nil, err)
	}
	return ctx, err
}
