package kvevents

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/internal/zmtp"
)

// PublisherOptions are the options of a Publisher. A zero field selects its default.
type PublisherOptions struct {
	// Keep is the maximum number, and KeepBytes the maximum total size in bytes, of the messages
	// that are kept for slow subscribers and replays. Defaults 10,000, as in vLLM, and 64 MiB.
	Keep      int
	KeepBytes int64
	// Peers is the maximum number of connections of each socket. Further connections are closed at
	// once. Default 256.
	Peers int
	// BareReplays omits the topic in replies to replay requests, as older versions of
	// vLLM do.
	BareReplays bool
	// StallTimeout is the maximum duration of one write. A connection whose peer reads nothing for
	// that time is closed. Default 5 min.
	StallTimeout time.Duration
	// Linger is the maximum time for which Close waits until subscribers have received all
	// published messages. Default 1 s, as in vLLM.
	Linger time.Duration
	// Missed, if not nil, is called in two cases: with 0 when a subscriber joins, and with the
	// number of lost messages when a peer needs messages that are not kept any more. Missed must
	// not wait.
	Missed func(peer net.Addr, lost uint64)
}

func (o *PublisherOptions) ensureDefaults() {
	if o.Keep == 0 {
		o.Keep = 10000
	}
	if o.KeepBytes == 0 {
		o.KeepBytes = 64 << 20
	}
	if o.Peers == 0 {
		o.Peers = 256
	}
	if o.StallTimeout == 0 {
		o.StallTimeout = 5 * time.Minute
	}
	if o.Linger == 0 {
		o.Linger = time.Second
	}
	if o.Missed == nil {
		o.Missed = func(net.Addr, uint64) {}
	}
}

// Stats are counters since the start of a Publisher.
type Stats struct {
	// Messages counts the published messages.
	Messages uint64 `json:"messages"`
	// Lost counts the messages that slow subscribers did not receive, and the messages of replay
	// requests that could not be replayed.
	Lost uint64 `json:"lost"`
	// Replays counts the replay requests that were served.
	Replays uint64 `json:"replays"`
	// Joined counts the subscribers that joined.
	Joined uint64 `json:"joined"`
	// Refused counts the connections that were closed because there were too many, or because the
	// peer violated the protocol.
	Refused uint64 `json:"refused"`
}

// Publisher is a PUB socket and, after ListenReplay, a ROUTER socket for replays.
type Publisher struct {
	opts PublisherOptions
	ring *ring
	wg   sync.WaitGroup

	lost, replays, joined, refused atomic.Uint64

	mu        sync.Mutex // guards the fields below
	closing   bool
	listeners []net.Listener
	conns     map[net.Conn]*connection
}

// connection is an accepted connection.
type connection struct {
	kind string // type of the publisher's socket: PUB or ROUTER
	// greeted is set after the handshake.
	greeted bool
}

// NewPublisher returns a Publisher that does not listen yet.
func NewPublisher(o PublisherOptions) *Publisher {
	o.ensureDefaults()
	return &Publisher{opts: o, ring: newRing(o.Keep, o.KeepBytes), conns: make(map[net.Conn]*connection)}
}

// Publish numbers and sends a message. It never waits. The Publisher owns payload after the call.
func (p *Publisher) Publish(topic string, payload []byte) { p.ring.publish(topic, payload) }

// Stats returns the counters.
func (p *Publisher) Stats() Stats {
	return Stats{Messages: p.ring.place(), Lost: p.lost.Load(), Replays: p.replays.Load(), Joined: p.joined.Load(), Refused: p.refused.Load()}
}

// Listen accepts subscribers at an endpoint (see zmtp.Listen) and returns the endpoint
// with the actual port.
func (p *Publisher) Listen(ctx context.Context, endpoint string) (string, error) {
	return p.listen(ctx, endpoint, p.pub())
}

// ListenReplay accepts replay requests at an endpoint, and is otherwise like Listen.
func (p *Publisher) ListenReplay(ctx context.Context, endpoint string) (string, error) {
	return p.listen(ctx, endpoint, p.router())
}

// socket is the kind of socket that a listener serves.
type socket struct {
	kind  string
	peers []string
	// serve serves one peer until the connection ends or the Publisher is closed.
	serve func(c *zmtp.Conn) error
}

func (p *Publisher) pub() socket { return socket{"PUB", []string{"SUB", "XSUB"}, p.subscriber} }

func (p *Publisher) router() socket {
	return socket{"ROUTER", []string{"REQ", "DEALER", "ROUTER"}, p.replayer}
}

func (p *Publisher) listen(ctx context.Context, endpoint string, s socket) (string, error) {
	l, err := zmtp.Listen(ctx, endpoint)
	if err != nil {
		return "", err
	}
	if !p.serve(l, s) {
		return "", errors.Join(fmt.Errorf("kvevents: listen on %s: the publisher is closed", endpoint), l.Close())
	}
	return zmtp.Endpoint(l.Addr()), nil
}

// serve starts accepting connections from a listener. Close closes the listener. serve returns
// false if the Publisher is closed already.
func (p *Publisher) serve(l net.Listener, s socket) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closing {
		return false
	}
	p.listeners = append(p.listeners, l)
	p.wg.Go(func() { p.accept(l, s) })
	return true
}

// acceptPause is the pause after a failed accept, for example without a free file
// descriptor.
const acceptPause = 50 * time.Millisecond

func (p *Publisher) accept(l net.Listener, s socket) {
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			time.Sleep(acceptPause)
			continue
		}
		if !p.add(c, s.kind) {
			p.refused.Add(1)
			_ = c.Close() // an error has no effect: nothing was sent
			continue
		}
		p.wg.Go(func() {
			defer p.remove(c)
			z, err := zmtp.Handshake(c, s.kind, s.peers, zmtp.Options{})
			if err != nil {
				p.refused.Add(1)
				return
			}
			if p.greeted(c) {
				// The error that ended a connection is not reported, because peers may leave at any
				// time.
				_ = s.serve(z)
			}
		})
	}
}

// add records a connection. It returns false if there are Options.Peers already.
func (p *Publisher) add(c net.Conn, kind string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	var same int
	for _, other := range p.conns {
		if other.kind == kind {
			same++
		}
	}
	if p.closing || same >= p.opts.Peers {
		return false
	}
	p.conns[c] = &connection{kind: kind}
	return true
}

// greeted records that a handshake is complete. It returns false if the Publisher is being closed.
func (p *Publisher) greeted(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conns[c].greeted = true
	return !p.closing
}

func (p *Publisher) remove(c net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c)
	_ = c.Close() // everything was sent, or the peer has left
}

// Close stops listening, sends the published messages to the subscribers for at most Linger, and
// closes all connections. It may be called twice.
func (p *Publisher) Close() error {
	p.mu.Lock()
	p.closing = true
	var errs []error
	for _, l := range p.listeners {
		errs = append(errs, l.Close())
	}
	p.listeners = nil
	p.ring.close()
	within := time.Now().Add(p.opts.Linger)
	for c, is := range p.conns {
		if is.kind == "PUB" && is.greeted {
			_ = c.SetWriteDeadline(within) // fails only if the connection's goroutine has closed it
		} else {
			_ = c.Close() // as above
		}
	}
	p.mu.Unlock()
	p.wg.Wait()
	return errors.Join(errs...)
}

// sendPage is the maximum number of messages in one read from the ring.
const sendPage = 64

// subscriber serves one SUB socket. It receives the peer's subscriptions, while a second goroutine
// sends the messages.
func (p *Publisher) subscriber(c *zmtp.Conn) error {
	s := &subscriptions{topics: make(map[string]int)}
	from := p.ring.place()
	var sending sync.WaitGroup
	gone := make(chan struct{})
	defer sending.Wait()
	defer close(gone)
	sending.Go(func() {
		defer c.Close() // ends Receive
		_ = p.follow(c, s, from, gone)
	})
	for {
		m, err := c.Receive()
		if err != nil {
			return err
		}
		first, err := s.take(m)
		if err != nil {
			return err
		}
		if first {
			p.joined.Add(1)
			p.opts.Missed(c.Net().RemoteAddr(), 0)
		}
	}
}

// follow sends the messages from the sequence number from on, until the ring is closed, the peer
// has left, or a write fails.
func (p *Publisher) follow(c *zmtp.Conn, s *subscriptions, from uint64, gone <-chan struct{}) error {
	for {
		pg := p.ring.read(from, sendPage)
		if pg.lost > 0 {
			from += pg.lost
			if s.any() {
				p.miss(c, pg.lost)
			}
		}
		if len(pg.messages) == 0 {
			if pg.closed {
				return nil
			}
			select {
			case <-pg.more:
			case <-gone:
				return nil
			}
			continue
		}
		from = pg.messages[len(pg.messages)-1].seq + 1
		if err := p.send(c, pg.messages, func(m message) [][]byte {
			if !s.match(m.topic) {
				return nil
			}
			return [][]byte{[]byte(m.topic), sequence(m.seq), m.payload}
		}); err != nil {
			return err
		}
	}
}

// send sends messages and flushes the connection. The function frames returns the frames of a
// message, or nil for a message to be skipped. A write takes at most StallTimeout.
func (p *Publisher) send(c *zmtp.Conn, messages []message, frames func(message) [][]byte) error {
	if err := p.extend(c); err != nil {
		return err
	}
	for _, m := range messages {
		f := frames(m)
		if f == nil {
			continue
		}
		if err := c.Send(f...); err != nil {
			return err
		}
	}
	return c.Flush()
}

// extend sets a new write deadline for a peer, unless the Publisher is being closed.
func (p *Publisher) extend(c *zmtp.Conn) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closing {
		return nil
	}
	return c.Net().SetWriteDeadline(time.Now().Add(p.opts.StallTimeout))
}

func (p *Publisher) miss(c *zmtp.Conn, n uint64) {
	p.lost.Add(n)
	p.opts.Missed(c.Net().RemoteAddr(), n)
}

// sequence encodes a sequence number as a frame.
func sequence(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

// endOfReplay is the sequence number -1, which follows the last message of a replay.
const endOfReplay = ^uint64(0)

// replayer serves the replay requests of one peer. A request is [empty] [8 bytes: first
// sequence number]. Other messages are ignored, as in vLLM.
func (p *Publisher) replayer(c *zmtp.Conn) error {
	for {
		m, err := c.Receive()
		if err != nil {
			return err
		}
		if len(m) != 2 || len(m[0]) != 0 || len(m[1]) != 8 {
			continue
		}
		p.replays.Add(1)
		if err := p.replay(c, binary.BigEndian.Uint64(m[1])); err != nil {
			return err
		}
	}
}

// replay sends the kept messages from the sequence number from on, up to the last message published
// before the call, and then the end marker.
func (p *Publisher) replay(c *zmtp.Conn, from uint64) error {
	frames := func(m message) [][]byte {
		if p.opts.BareReplays {
			return [][]byte{nil, sequence(m.seq), m.payload}
		}
		return [][]byte{nil, []byte(m.topic), sequence(m.seq), m.payload}
	}
	for end := p.ring.place(); from < end; {
		pg := p.ring.read(from, sendPage)
		if pg.lost > 0 {
			p.miss(c, pg.lost)
		}
		from = pg.messages[len(pg.messages)-1].seq + 1
		if err := p.send(c, pg.messages, frames); err != nil {
			return err
		}
	}
	return p.send(c, []message{{seq: endOfReplay}}, frames)
}

// Limits of the subscriptions of one peer.
const (
	topicsMax     = 1024
	topicBytesMax = 4096
)

var errSubscription = errors.New("kvevents: the message is not a subscription, or the peer has too many")

// subscriptions are the topic prefixes of one peer.
type subscriptions struct {
	mu     sync.Mutex
	topics map[string]int // the number of subscriptions to each prefix
}

// take applies a message of a SUB socket that adds or removes a subscription. first is true if the
// message adds a topic prefix to which the peer was not subscribed.
func (s *subscriptions) take(m [][]byte) (first bool, err error) {
	if len(m) != 1 || len(m[0]) == 0 || len(m[0]) > topicBytesMax {
		return false, errSubscription
	}
	topic := string(m[0][1:])
	s.mu.Lock()
	defer s.mu.Unlock()
	switch m[0][0] {
	case 1:
		first = s.topics[topic] == 0
		if s.topics[topic]++; len(s.topics) > topicsMax {
			return false, errSubscription
		}
		return first, nil
	case 0:
		if s.topics[topic]--; s.topics[topic] <= 0 {
			delete(s.topics, topic)
		}
		return false, nil
	}
	return false, errSubscription
}

func (s *subscriptions) any() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.topics) > 0
}

func (s *subscriptions) match(topic string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for prefix := range s.topics {
		if strings.HasPrefix(topic, prefix) {
			return true
		}
	}
	return false
}
