package server

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/server/storage"
)

// TestErrorTextsAreBounded: a reply fits the smallest room that callers provide, for any length of
// the errors of volumes and segments and any number of failed pieces.
func TestErrorTextsAreBounded(t *testing.T) {
	var many []error
	for i := range 5000 {
		many = append(many, fmt.Errorf("segment-%08d: transport endpoint is not connected", i))
	}
	long := errors.Join(many...)
	if got := status.Convert(statusOf(long)).Message(); len(got) > sentenceBytes+3 || !strings.HasSuffix(got, "…") {
		t.Errorf("a status of %d bytes", len(got))
	}
	result := storage.LoadResult{}
	request := storage.ReserveRequest{}
	for i := range 512 {
		result.Pieces = append(result.Pieces, storage.LoadedPiece{PieceRef: storage.PieceRef{Block: i}, State: storage.Failed, Err: long})
		request.Pieces = append(request.Pieces, storage.PieceRef{Block: i})
	}
	for name, m := range map[string]proto.Message{"read": readResponse(result, 0), "reserve": &pb.ReserveResponse{Pieces: refuseAll(request, long)}} {
		if n := proto.Size(m); n > callBytes {
			t.Errorf("%s: a reply of %d bytes; callers have room for %d", name, n, callBytes)
		}
	}
	if got := refuseAll(request, long)[511].GetReason(); got != "read_only" {
		t.Errorf("the last piece has %q", got)
	}
}
