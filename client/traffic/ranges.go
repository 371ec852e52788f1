package traffic

import (
	"fmt"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
)

// wireVersion is the TrafficMessage.version that this package sends and accepts.
const wireVersion = 3

const (
	// pagesPerMessage and rangesPerMessage bound the list in one message, so that the
	// message fits in a receive buffer of the peer (recvBytes): a page takes up to 5
	// bytes on the wire, a range up to 10.
	pagesPerMessage  = 8192
	rangesPerMessage = 4096
)

// appendRanges appends ascending blocks as ranges [from, to), with two numbers for each range.
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

// sendsOf returns the messages with the list of blocks that the prefill engine (PE) sends.
// recomputed are the hit blocks among blocks that the model computed again. Both arguments must be
// ascending.
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

// incoming collects the list of the blocks that the PE sends. The list arrives in several messages.
type incoming struct {
	// sent and again have an element for each block of the prompt. sent: the prefill engine (PE)
	// sends the block. again: the block is a hit block and was computed again. any: the PE sends at
	// least one block. anyAgain: at least one hit block was computed again.
	sent, again   []bool
	any, anyAgain bool
	// arrived is the number of messages that have arrived, messages the number of all messages of
	// the list. messages is 0 until the first message has arrived.
	arrived, messages uint32
}

// complete reports whether every message has arrived.
func (in *incoming) complete() bool { return in.messages > 0 && in.arrived == in.messages }

// take adds the list of one message.
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
	in.any, in.anyAgain = in.any || len(s.Blocks) > 0, in.anyAgain || len(s.Recomputed) > 0
	in.messages = s.Messages
	in.arrived++
	return nil
}

// pageList collects the list of the PE's device pages, which arrives in several messages.
type pageList struct {
	// pages has an element for each block of the prompt. known marks the blocks whose page has
	// arrived; left is the number of the other blocks.
	pages []uint32
	known []bool
	left  int
}

// newPageList returns the list before the first message.
func newPageList(blocks int) *pageList {
	return &pageList{make([]uint32, blocks), make([]bool, blocks), blocks}
}

// take adds the pages of one message.
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
