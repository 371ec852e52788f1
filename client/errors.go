package client

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Sentinels, by what the caller should do. Everything else that can go wrong is
// an Outcome.
var (
	// ErrAuth: the node does not accept our token or certificate; fix the
	// configuration.
	ErrAuth = errors.New("not authorised")
	// ErrProvider: the node's data plane is of another kind than Options.Engine;
	// open an engine of the provider that the error names.
	ErrProvider = errors.New("another transfer engine is needed")
	// ErrNotFound: no such namespace, or the lease has ended.
	ErrNotFound = errors.New("not found")
	// ErrRequest: the request cannot be right; fix the caller.
	ErrRequest = errors.New("bad request")
	// ErrMismatch: the caller's geometry or epoch is not the namespace's; ask
	// Namespace again, and lay the blocks out anew.
	ErrMismatch = errors.New("namespace differs")
	// ErrUnavailable: no node answers. Only calls without an Outcome return it.
	ErrUnavailable = errors.New("no storage node answers")
	// ErrVersion: the node is of another version. It does not have the call, or it and
	// this client do not understand each other's data plane. Run the same release of
	// Penstock on both sides.
	ErrVersion = errors.New("another version of Penstock")
	// ErrUnsupported: the node does not lend its memory to this process, so use Read
	// instead of ReadLocal.
	ErrUnsupported = errors.New("not supported")
	// ErrClosed: the Store is closed; stop.
	ErrClosed = errors.New("store is closed")
)

// errDown says that a node cannot be reached, or that its data plane cannot. The
// caller turns it into a Miss. It never leaves the package.
var errDown = errors.New("node is down")

// versionError is the error of a node of another version. It matches ErrVersion and errDown:
// other nodes answer calls without this node, which may be restarted with another release.
type versionError struct{ words string }

func (e versionError) Error() string   { return "client: " + e.words }
func (e versionError) Unwrap() []error { return []error{ErrVersion, errDown} }

// errBusy says that a node reached a bound. It never leaves the package.
var errBusy = errors.New("node is busy")

// callError turns the error of an RPC into one of the sentinels, ctx's error,
// errDown or errBusy, with what the node said.
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

// inWords is kind with what the node said of it. A node's own kinds are called
// nearly the same; what its words hold already is not said before them.
func inWords(kind error, words string) error {
	if errors.Is(kind, errBusy) {
		words = strings.TrimPrefix(words, "busy: ") // storage.ErrBusy
	}
	if strings.Contains(words, kind.Error()) {
		return wordedError{kind: kind, words: words}
	}
	return fmt.Errorf("%w: %s", kind, words)
}

// wordedError is of a kind that its words name.
type wordedError struct {
	kind  error
	words string
}

func (e wordedError) Error() string { return e.words }
func (e wordedError) Unwrap() error { return e.kind }

// inner is the text of one of our errors inside of another: "client: " stands
// before the whole once.
func inner(err error) string { return strings.ReplaceAll(err.Error(), "client: ", "") }

// hideInternal keeps the package's own sentinels out of what callers can ask
// for, but not out of the text. What it returns goes into an error of ours.
func hideInternal(err error) error {
	if err == nil || !errors.Is(err, errDown) && !errors.Is(err, errBusy) {
		return err
	}
	return errors.New(inner(err))
}
