package posixio

import "github.com/penstock-kv/penstock/io/blockio"

// spanBytesMax is the maximum size, in bytes, of requests that are joined into one system call.
// Larger calls are not faster than that; several calls in parallel are.
const spanBytesMax = 4 << 20

// span has the requests for one system call: the same operation on the same file, where each
// request starts at the offset at which the previous one ends.
type span []blockio.Request

func (s span) bytes() int64 {
	var n int64
	for i := range s {
		n += s[i].Len()
	}
	return n
}

func (s span) bufs() [][]byte {
	var bufs [][]byte
	for i := range s {
		bufs = append(bufs, s[i].Bufs...)
	}
	return bufs
}

// spans cuts a batch into spans, in order.
type spans struct {
	rest     []blockio.Request
	bytesMax int64
}

// newSpans divides batch into spans. A span is no larger than limitBytes, the limit of the budget,
// so that it fits the budget.
func newSpans(batch []blockio.Request, limitBytes int64) *spans {
	return &spans{rest: batch, bytesMax: min(spanBytesMax, limitBytes)}
}

// next returns the next span; it is empty at the end.
func (s *spans) next() span {
	if len(s.rest) == 0 {
		return nil
	}
	n, bytes, vecs := 1, s.rest[0].Len(), len(s.rest[0].Bufs)
	for ; n < len(s.rest); n++ {
		before, r := &s.rest[n-1], &s.rest[n]
		bytes += r.Len()
		vecs += len(r.Bufs)
		if bytes > s.bytesMax || vecs > blockio.MaxVecs || !continues(before, r) {
			break
		}
	}
	out := s.rest[:n]
	s.rest = s.rest[n:]
	return out
}

func continues(before, r *blockio.Request) bool {
	return r.Op == before.Op && r.File == before.File && r.Offset == before.Offset+before.Len()
}
