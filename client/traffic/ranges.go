package traffic

import (
	"fmt"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
)

// wireVersion is TrafficMessage.version of this package.
const wireVersion = 2

const (
	// pagesPerMessage and rangesPerMessage bound what one message lists, so that it
	// fits in a receive buffer of the peer (recvBytes): a page has up to 5 bytes, a
	// range up to 10.
	pagesPerMessage  = 8192
	rangesPerMessage = 4096
)

// appendRanges appends the ranges [from, to) of ascending blocks, two numbers each.
func appendRanges(dst, blocks []uint32) []uint32 {
	for i, b := range blocks {
		if i > 0 && dst[len(dst)-1] == b {
			dst[len(dst)-1]++
			continue
		}
		dst = append(dst, b, b+1)
	}
	return dst
}

// sendsOf lists blocks and recomputed, both ascending, in as many messages as they
// need.
func sendsOf(blocks, recomputed []uint32) []*pb.TrafficSends {
	var out []*pb.TrafficSends
	add := func(ranges []uint32, list func(*pb.TrafficSends) *[]uint32) {
		for len(ranges) > 0 {
			n := min(len(ranges), 2*rangesPerMessage)
			s := new(pb.TrafficSends)
			*list(s) = ranges[:n]
			out, ranges = append(out, s), ranges[n:]
		}
	}
	sent, again := appendRanges(nil, blocks), appendRanges(nil, recomputed)
	if len(sent)+len(again) <= 2*rangesPerMessage {
		out = []*pb.TrafficSends{{Blocks: sent, Recomputed: again}}
	} else {
		add(sent, func(s *pb.TrafficSends) *[]uint32 { return &s.Blocks })
		add(again, func(s *pb.TrafficSends) *[]uint32 { return &s.Recomputed })
	}
	for _, s := range out {
		s.Messages = uint32(len(out))
	}
	return out
}

// incoming is what the prefill side says that it sends, as far as its messages have
// arrived.
type incoming struct {
	// sent and again have an element for each block of the prompt: the prefill side
	// sends it; it had to be computed again. any: at least one is sent.
	sent, again []bool
	any         bool
	// arrived messages of messages; 0 messages: none has arrived.
	arrived, messages uint32
}

// complete reports whether every message has arrived.
func (in *incoming) complete() bool { return in.messages > 0 && in.arrived == in.messages }

// take enters a message.
func (in *incoming) take(s *pb.TrafficSends) error {
	if s.Messages == 0 || in.messages != 0 && s.Messages != in.messages || in.complete() {
		return fmt.Errorf("a list of blocks in %d messages, after %d of %d: %w", s.Messages, in.arrived, in.messages, ErrJob)
	}
	for _, l := range []struct {
		ranges []uint32
		into   []bool
	}{{s.Blocks, in.sent}, {s.Recomputed, in.again}} {
		if len(l.ranges)%2 != 0 {
			return fmt.Errorf("%d numbers are no ranges of blocks: %w", len(l.ranges), ErrJob)
		}
		for i := 0; i < len(l.ranges); i += 2 {
			from, to := l.ranges[i], l.ranges[i+1]
			if from >= to || int64(to) > int64(len(l.into)) {
				return fmt.Errorf("it sends blocks [%d, %d) of %d: %w", from, to, len(l.into), ErrJob)
			}
			for b := from; b < to; b++ {
				if l.into[b] {
					return fmt.Errorf("it lists block %d twice: %w", b, ErrJob)
				}
				l.into[b] = true
			}
		}
	}
	in.any = in.any || len(s.Blocks) > 0
	in.messages = s.Messages
	in.arrived++
	return nil
}

// pageList is the prefill side's device pages, as far as its messages have arrived.
type pageList struct {
	// pages has an element for each block of the prompt; known tells which have
	// arrived, left how many have not.
	pages []uint32
	known []bool
	left  int
}

// newPageList returns a list of which nothing has arrived.
func newPageList(blocks int) pageList {
	return pageList{make([]uint32, blocks), make([]bool, blocks), blocks}
}

// take enters a message.
func (l *pageList) take(m *pb.TrafficPages) error {
	from, to := int64(m.First), int64(m.First)+int64(len(m.Pages))
	if from >= to || to > int64(len(l.pages)) {
		return fmt.Errorf("pages of the blocks [%d, %d) of %d: %w", from, to, len(l.pages), ErrJob)
	}
	for i, page := range m.Pages {
		b := from + int64(i)
		if l.known[b] {
			return fmt.Errorf("two pages for block %d: %w", b, ErrJob)
		}
		l.pages[b], l.known[b] = page, true
	}
	l.left -= len(m.Pages)
	return nil
}
