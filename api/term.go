package api

import (
	"strconv"

	"google.golang.org/grpc/metadata"
)

// termHeader is the key of a header with the term of an elected planner (planner.proto).
const termHeader = "penstock-term"

// TermPairs returns a header with a term, which SetHeader or NewOutgoingContext of gRPC sends.
func TermPairs(term uint64) metadata.MD {
	return metadata.Pairs(termHeader, strconv.FormatUint(term, 10))
}

// Term returns the term in a header, or 0 if it has none.
func Term(header metadata.MD) uint64 {
	for _, v := range header.Get(termHeader) {
		if n, err := strconv.ParseUint(v, 10, 64); err == nil {
			return n
		}
	}
	return 0
}
