package server

import (
	"context"
	"errors"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/handoff"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
)

// errStopping ends streams at shutdown.
var errStopping = errors.New("node is shutting down")

// errorCodes says which gRPC code an error is, first match first.
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
	{trie.ErrNamespaceExists, codes.AlreadyExists},
	{trie.ErrNamespaceUnknown, codes.NotFound},
	{trie.ErrLeaseUnknown, codes.NotFound},
	{trie.ErrAbsent, codes.NotFound},
	{storage.ErrReservation, codes.NotFound},
	{trie.ErrTooManyNamespaces, codes.ResourceExhausted},
	{storage.ErrBusy, codes.ResourceExhausted},
	{storage.ErrReadOnly, codes.Unavailable},
	{storage.ErrDraining, codes.Unavailable},
	{errStopping, codes.Unavailable},
	{handoff.ErrSession, codes.Aborted}, // begin again: connect to the socket
	{handoff.ErrLoan, codes.InvalidArgument},
}

// statusOf turns an error into what travels to the client.
func statusOf(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	for _, e := range errorCodes {
		if errors.Is(err, e.err) {
			return status.Error(e.code, err.Error())
		}
	}
	return status.Error(codes.Internal, err.Error())
}

// invalid is the status of a request that could not be decoded.
func invalid(err error) error { return status.Error(codes.InvalidArgument, err.Error()) }
