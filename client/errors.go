package client

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Sentinels, by the action that the caller should take. All other failures are an Outcome.
var (
	// ErrAuth: the node does not accept the client's token or certificate. Fix the configuration.
	ErrAuth = errors.New("not authorised")
	// ErrProvider: the provider of the node's data plane differs from that of Options.Engine. Open
	// an engine of the provider that the error names.
	ErrProvider = errors.New("another transfer engine is needed")
	// ErrNotFound: the namespace does not exist, or the lease has ended.
	ErrNotFound = errors.New("not found")
	// ErrRequest: the request is invalid. Fix the caller.
	ErrRequest = errors.New("bad request")
	// ErrMismatch: the caller's geometry or epoch differs from the namespace's. Call Namespace
	// again, and compute the layout of the blocks again.
	ErrMismatch = errors.New("namespace differs")
	// ErrUnavailable: no node answers. Only calls without an Outcome return it.
	ErrUnavailable = errors.New("no storage node answers")
	// ErrVersion: the node is of another version. The node does not support the call, or the
	// data-plane protocols of node and client differ. Run the same release of Penstock for nodes
	// and clients.
	ErrVersion = errors.New("another version of Penstock")
	// ErrUnsupported: the node does not lend its memory to this process, so use Read
	// instead of ReadLocal.
	ErrUnsupported = errors.New("not supported")
	// ErrClosed: the Store is closed; stop.
	ErrClosed = errors.New("store is closed")
)

// errDown reports that a node or its data plane cannot be reached. The caller turns it into a Miss.
// The error never leaves the package.
var errDown = errors.New("node is down")

// versionError is the error of a node of another version. It matches ErrVersion. It also matches
// errDown, so that calls to other nodes continue without this node, which may be restarted with
// another release.
type versionError struct{ words string }

func (e versionError) Error() string   { return "client: " + e.words }
func (e versionError) Unwrap() []error { return []error{ErrVersion, errDown} }

// errBusy reports that a node reached a bound. The error never leaves the package.
var errBusy = errors.New("node is busy")

// callError turns the error of an RPC into one of the sentinels, the error of ctx, errDown or
// errBusy, together with the node's message. what is the name of the call.
func callError(ctx context.Context, what, target string, err error) error {
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return fmt.Errorf("client: %s: %s: %w", what, target, ctx.Err())
	}
	st := status.Convert(err)
	var kind error
	switch st.Code() {
	case codes.Unavailable, codes.Canceled:
		// Canceled without our ctx: the connection was replaced under the call.
		kind = errDown
	case codes.DeadlineExceeded:
		kind = context.DeadlineExceeded
	case codes.ResourceExhausted:
		kind = errBusy
	case codes.Unauthenticated, codes.PermissionDenied:
		kind = ErrAuth
	case codes.NotFound:
		kind = ErrNotFound
	case codes.InvalidArgument, codes.OutOfRange:
		kind = ErrRequest
	case codes.FailedPrecondition, codes.AlreadyExists:
		kind = ErrMismatch
	}
	if kind == nil {
		return fmt.Errorf("client: %s: %s: %w", what, target, err)
	}
	return fmt.Errorf("client: %s: %s: %w", what, target, inWords(kind, st.Message()))
}

// inWords returns kind with the node's message. If the message contains the text of kind already,
// as most messages of nodes do, the text of kind is not repeated.
func inWords(kind error, words string) error {
	if errors.Is(kind, errBusy) {
		words = strings.TrimPrefix(words, "busy: ") // storage.ErrBusy
	}
	if strings.Contains(words, kind.Error()) {
		return wordedError{kind: kind, words: words}
	}
	return fmt.Errorf("%w: %s", kind, words)
}

// wordedError is an error that matches kind and whose text is words alone, because words contains
// the text of kind.
type wordedError struct {
	kind  error
	words string
}

func (e wordedError) Error() string { return e.words }
func (e wordedError) Unwrap() error { return e.kind }

// inner returns the text of an error of this package for use inside another error. It removes the
// prefix "client: ", so that the prefix occurs only once, at the start of the whole text.
func inner(err error) string { return strings.ReplaceAll(err.Error(), "client: ", "") }

// hideInternal removes the package's own sentinels from err, so that callers cannot match them with
// errors.Is. The text stays. The result becomes part of another error of this package.
func hideInternal(err error) error {
	if err == nil || !errors.Is(err, errDown) && !errors.Is(err, errBusy) {
		return err
	}
	return errors.New(inner(err))
}
