package server

import (
	"context"
	"errors"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/handoff"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
)

// errStopping is the error with which streams end and calls are refused at shutdown.
var errStopping = errors.New("node is shutting down")

// errorCodes maps errors to gRPC codes. The first entry that matches is used.
var errorCodes = []struct {
	err  error
	code codes.Code
}{
	{context.Canceled, codes.Canceled},
	{context.DeadlineExceeded, codes.DeadlineExceeded},
	{storage.ErrRequest, codes.InvalidArgument},
	{kv.ErrGeometry, codes.InvalidArgument},
	{kv.ErrNamespace, codes.InvalidArgument},
	{trie.ErrEntry, codes.InvalidArgument},
	{arena.ErrTooLarge, codes.InvalidArgument},
	{storage.ErrMismatch, codes.FailedPrecondition},
	{trie.ErrPinned, codes.FailedPrecondition},
	{trie.ErrNamespaceExists, codes.AlreadyExists},
	{trie.ErrNamespaceUnknown, codes.NotFound},
	{trie.ErrLeaseUnknown, codes.NotFound},
	{trie.ErrAbsent, codes.NotFound},
	{storage.ErrVolumeUnknown, codes.NotFound},
	{storage.ErrVolumeState, codes.FailedPrecondition},
	{storage.ErrReservation, codes.NotFound},
	{trie.ErrTooManyNamespaces, codes.ResourceExhausted},
	{storage.ErrBusy, codes.ResourceExhausted},
	{storage.ErrReadOnly, codes.Unavailable},
	{storage.ErrDraining, codes.Unavailable},
	{errStopping, codes.Unavailable},
	{handoff.ErrSession, codes.Aborted}, // the client connects to the socket again
	{handoff.ErrLoan, codes.InvalidArgument},
}

// statusOf converts an error to the status that the client receives.
func statusOf(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	for _, e := range errorCodes {
		if errors.Is(err, e.err) {
			return status.Error(e.code, sentence(err))
		}
	}
	return status.Error(codes.Internal, sentence(err))
}

// sentenceBytes is the maximum length of one error text in a response. An error may join the errors
// of many segments or volumes.
const sentenceBytes = 1 << 10

// sentence returns an error's text, cut to sentenceBytes.
func sentence(err error) string { return clip(err.Error()) }

func clip(s string) string {
	if len(s) <= sentenceBytes {
		return s
	}
	return strings.ToValidUTF8(s[:sentenceBytes], "") + "…"
}

// reasons makes the reason texts for the pieces of one reply, and limits their total size to
// reasonsBytes. Above that limit, the text of a piece is only the word for its reason, without the
// error's text.
type reasons struct{ used int }

// reasonsBytes is the maximum total size of the error texts in one reply, in bytes.
const reasonsBytes = 8 << 10

// of returns the word for a reason, which may be empty, joined with the error's text.
func (r *reasons) of(word string, err error) string {
	if err == nil {
		return word
	}
	s := sentence(err)
	if r.used += len(s); r.used > reasonsBytes {
		return word
	}
	if word == "" {
		return s
	}
	return word + ": " + s
}

// invalid is the status of a request that could not be decoded.
func invalid(err error) error { return status.Error(codes.InvalidArgument, sentence(err)) }
