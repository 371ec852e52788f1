package kvevents

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-kv/penstock/internal/zmtp/zmtptest"
)

// pipes is a listener of connections in memory. The connections have no buffer, so a
// write waits until the peer reads.
type pipes struct {
	accepted chan net.Conn
	closed   chan struct{}
}

func newPipes() *pipes { return &pipes{make(chan net.Conn), make(chan struct{})} }

func (l *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-l.accepted:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *pipes) Close() error   { close(l.closed); return nil }
func (l *pipes) Addr() net.Addr { return nil }

// dial returns the peer's end of a new connection. Writes of the peer do not wait, so both
// ends can send their greeting at the same time.
func (l *pipes) dial() net.Conn {
	ours, theirs := net.Pipe()
	l.accepted <- ours
	c := &peer{Conn: theirs, written: make(chan []byte, 4*topicsMax), closed: make(chan struct{})}
	go c.pump()
	return c
}

// peer is a connection whose writes do not wait.
type peer struct {
	net.Conn
	written chan []byte
	once    sync.Once
	closed  chan struct{}
}

func (c *peer) Write(b []byte) (int, error) {
	c.written <- bytes.Clone(b)
	return len(b), nil
}

func (c *peer) pump() {
	for {
		select {
		case b := <-c.written:
			if _, err := c.Conn.Write(b); err != nil {
				return
			}
		case <-c.closed:
			return
		}
	}
}

func (c *peer) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

// stage is a Publisher whose sockets are pipes.
type stage struct {
	*Publisher
	t           *testing.T
	pub, router *pipes
}

// withPublisher runs f in a synctest bubble and closes the Publisher afterwards.
func withPublisher(t *testing.T, o PublisherOptions, f func(s *stage)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := &stage{Publisher: NewPublisher(o), t: t, pub: newPipes(), router: newPipes()}
		if !s.serve(s.pub, s.Publisher.pub()) || !s.serve(s.router, s.Publisher.router()) {
			t.Fatal("a new publisher is closed")
		}
		defer func() {
			if err := errors.Join(s.Close(), s.Close()); err != nil {
				t.Error(err)
			}
		}()
		f(s)
	})
}

// subscribe returns a subscriber whose subscription the publisher has received.
func (s *stage) subscribe(topics ...string) *zmtptest.Client {
	c := zmtptest.New(s.t, s.pub.dial(), "SUB", "PUB")
	for _, topic := range topics {
		c.MustSend(append([]byte{1}, topic...))
	}
	synctest.Wait()
	return c
}

// want receives a message and checks its sequence number and topic.
func (s *stage) want(c *zmtptest.Client, seq uint64, topic string) {
	s.t.Helper()
	m := c.MustReceive()
	if len(m) != 3 || string(m[0]) != topic || binary.BigEndian.Uint64(m[1]) != seq {
		s.t.Fatalf("%q; want message %d of %q", m, seq, topic)
	}
}

// TestSubscriptions: a subscriber receives messages whose topic begins with one of its
// subscriptions, from the subscription on.
func TestSubscriptions(t *testing.T) {
	var joined int
	withPublisher(t, PublisherOptions{Missed: func(net.Addr, uint64) { joined++ }}, func(s *stage) {
		s.Publish("kv@a", []byte("before"))
		all, none, two := s.subscribe(""), s.subscribe(), s.subscribe("kv@a", "x", "x")
		for range 2 {
			s.Publish("kv@a", nil)
			s.Publish("kv@b", nil)
		}
		s.Publish("xx", nil)
		for seq, topic := range []string{"kv@a", "kv@b", "kv@a", "kv@b", "xx"} {
			s.want(all, uint64(seq)+1, topic)
		}
		s.want(two, 1, "kv@a")
		s.want(two, 3, "kv@a")
		s.want(two, 5, "xx")
		synctest.Wait()
		two.MustSend([]byte("\x00x")) // it subscribed to x twice
		two.MustSend([]byte("\x00kv@a"))
		none.MustSend([]byte("\x01kv@b"))
		synctest.Wait()
		for _, topic := range []string{"kv@a", "kv@b", "xx"} {
			s.Publish(topic, nil)
		}
		s.want(two, 8, "xx")
		s.want(none, 7, "kv@b")
		for seq, topic := range []string{"kv@a", "kv@b", "xx"} {
			s.want(all, uint64(seq)+6, topic)
		}
		if got := s.Stats(); got.Messages != 9 || got.Lost != 0 || got.Joined != 4 || joined != 4 {
			t.Errorf("%+v, joined %d times", got, joined)
		}
	})
}

// TestSlowSubscriber: a subscriber that does not read delays neither the publisher nor
// other subscribers. When it reads again, it has lost exactly the messages that Stats.Lost
// counts and that a replay lacks. After that it loses no message.
func TestSlowSubscriber(t *testing.T) {
	const keep, published = 100, 1000
	var missed uint64
	withPublisher(t, PublisherOptions{Keep: keep, Missed: func(_ net.Addr, n uint64) { missed += n }}, func(s *stage) {
		fast, slow, idle := s.subscribe(""), s.subscribe("kv"), s.subscribe()
		for seq := range uint64(published) {
			s.Publish("kv", bytes.Repeat([]byte{1}, 2<<10))
			s.want(fast, seq, "kv")
		}
		synctest.Wait()
		var got, lost uint64
		for next := uint64(0); next < published; got++ {
			seq := binary.BigEndian.Uint64(slow.MustReceive()[1])
			lost += seq - next
			next = seq + 1
		}
		if stats := s.Stats(); lost == 0 || got+lost != published || stats.Lost != lost || missed != lost || got < keep {
			t.Errorf("slow: %d received, %d lost, counted %d and reported %d", got, lost, stats.Lost, missed)
		}
		s.Publish("kv", nil)
		s.want(slow, published, "kv")
		s.want(fast, published, "kv")
		synctest.Wait()
		idle.MustSend([]byte("\x01kv"))
		synctest.Wait()
		s.Publish("kv", nil)
		s.want(idle, published+1, "kv")
	})
}

// TestBytesAreBounded: the bytes of the kept messages are bounded, whatever their number.
func TestBytesAreBounded(t *testing.T) {
	withPublisher(t, PublisherOptions{KeepBytes: 10 << 10}, func(s *stage) {
		for range 100 {
			s.Publish("", make([]byte, 1<<10))
		}
		if s.ring.bytes > 10<<10 || s.ring.next-s.ring.oldest != 10 {
			t.Errorf("%d bytes in %d messages are kept", s.ring.bytes, s.ring.next-s.ring.oldest)
		}
	})
}

// TestStalledSubscriber: a subscriber that reads nothing for StallTimeout is disconnected,
// and so is a subscriber that reads nothing while the publisher is being closed.
func TestStalledSubscriber(t *testing.T) {
	withPublisher(t, PublisherOptions{StallTimeout: time.Minute}, func(s *stage) {
		c := s.subscribe("")
		s.Publish("", []byte("x"))
		time.Sleep(59 * time.Second)
		synctest.Wait()
		if n := s.connections(); n != 1 {
			t.Errorf("%d connections after 59 s; want 1", n)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if n := s.connections(); n != 0 {
			t.Errorf("%d connections after a minute; want none", n)
		}
		if _, err := c.Receive(); err == nil {
			t.Error("the connection is still open")
		}
	})
	withPublisher(t, PublisherOptions{Linger: time.Second}, func(s *stage) {
		s.subscribe("") // a subscriber that never reads
		reader := s.subscribe("")
		defer s.pub.dial().Close() // a connection that does not begin its handshake
		silent := s.router.dial()
		defer silent.Close()
		begin := time.Now()
		s.Publish("", []byte("last"))
		closed := make(chan error, 1)
		go func() { closed <- s.Close() }()
		synctest.Wait() // Close waits for the subscribers
		if got := reader.MustReceive()[2]; string(got) != "last" {
			t.Errorf("%q", got)
		}
		if err := <-closed; err != nil || time.Since(begin) != time.Second {
			t.Errorf("closed after %v: %v", time.Since(begin), err)
		}
		if _, err := io.ReadAll(silent); err != nil {
			t.Error(err)
		}
		s.Publish("", []byte("late"))
		if _, err := s.Listen(t.Context(), "tcp://127.0.0.1:0"); err == nil {
			t.Error("a closed publisher listens")
		}
	})
}

func (s *stage) connections() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)
}

// TestReplay: kept messages are sent again, with and without topic. Messages that are not
// kept are counted as lost.
func TestReplay(t *testing.T) {
	for _, bare := range []bool{false, true} {
		var missed uint64
		withPublisher(t, PublisherOptions{Keep: 200, BareReplays: bare, Missed: func(_ net.Addr, n uint64) { missed += n }}, func(s *stage) {
			for i := range 300 {
				s.Publish("kv", []byte{byte(i)})
			}
			for _, kind := range []string{"REQ", "DEALER", "ROUTER"} {
				c := zmtptest.New(s.t, s.router.dial(), kind, "ROUTER")
				for _, bad := range [][][]byte{{{}}, {{}, []byte("7")}, {sequence(0)}, {[]byte("x"), sequence(0)}, {{}, sequence(0), {}}} {
					c.MustSend(bad...)
				}
				for _, from := range []uint64{0, 100, 250, 300, 1 << 63} {
					c.MustSend(nil, sequence(from))
					for seq := max(100, from); seq < 300; seq++ {
						wantReplayed(s.t, c, bare, "kv", seq, []byte{byte(seq)})
					}
					wantReplayed(s.t, c, bare, "", endOfReplay, []byte{})
				}
			}
			if got := s.Stats(); got.Replays != 15 || got.Lost != 300 || missed != 300 {
				t.Errorf("%+v, reported %d", got, missed)
			}
		})
	}
}

func wantReplayed(t *testing.T, c *zmtptest.Client, bare bool, topic string, seq uint64, payload []byte) {
	t.Helper()
	want := [][]byte{{}, []byte(topic), sequence(seq), payload}
	if bare {
		want = [][]byte{{}, sequence(seq), payload}
	}
	m := c.MustReceive()
	if len(m) != len(want) {
		t.Fatalf("%q; want %q", m, want)
	}
	for i := range m {
		if !bytes.Equal(m[i], want[i]) {
			t.Fatalf("%q; want %q", m, want)
		}
	}
}

// TestReplayFillsGap: a subscriber connects again and requests the missed messages while
// more are published. It then has all messages.
func TestReplayFillsGap(t *testing.T) {
	withPublisher(t, PublisherOptions{}, func(s *stage) {
		c := s.subscribe("")
		s.Publish("kv", nil)
		s.want(c, 0, "kv")
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		for range 5 {
			s.Publish("kv", nil)
		}
		c = s.subscribe("")
		s.Publish("kv", nil)
		s.want(c, 6, "kv")
		r := zmtptest.New(s.t, s.router.dial(), "DEALER", "ROUTER")
		r.MustSend(nil, sequence(1))
		for seq := uint64(1); seq < 7; seq++ {
			wantReplayed(s.t, r, false, "kv", seq, []byte{})
		}
		wantReplayed(s.t, r, false, "", endOfReplay, []byte{})
	})
}

// TestPeersAreBounded: the publisher closes and counts connections above Options.Peers,
// connections with another protocol, and connections that send too much.
func TestPeersAreBounded(t *testing.T) {
	withPublisher(t, PublisherOptions{Peers: 2}, func(s *stage) {
		first, _ := s.subscribe("a"), s.subscribe("b")
		third := s.pub.dial()
		defer third.Close()
		if _, err := io.ReadAll(third); err != nil {
			t.Error(err)
		}
		if err := first.Close(); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		c := s.pub.dial()
		defer c.Close()
		if _, err := c.Write(bytes.Repeat([]byte("GET / HTTP/1.1\r\n"), 5)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadAll(c); err != nil {
			t.Error(err)
		}
		if got := s.Stats().Refused; got != 2 {
			t.Errorf("%d connections were refused; want 2", got)
		}
		for name, send := range map[string]func(c *zmtptest.Client){
			"topics": func(c *zmtptest.Client) {
				for i := range uint64(topicsMax + 1) {
					c.MustSend(append([]byte{1}, sequence(i)...))
				}
			},
			"a long topic": func(c *zmtptest.Client) { c.MustSend(make([]byte, topicBytesMax+1)) },
			"a message":    func(c *zmtptest.Client) { c.MustSend([]byte("hello")) },
			"frames":       func(c *zmtptest.Client) { c.MustSend([]byte{1}, []byte{1}) },
			"nothing":      func(c *zmtptest.Client) { c.MustSend(nil) },
		} {
			c := s.subscribe()
			send(c)
			if _, err := c.Receive(); err == nil {
				t.Errorf("%s: the connection was not closed", name)
			}
			synctest.Wait()
		}
	})
}

// TestSubscriberLeavesQuietly: the connection of a subscriber that leaves is removed even
// if no message is published.
func TestSubscriberLeavesQuietly(t *testing.T) {
	withPublisher(t, PublisherOptions{}, func(s *stage) {
		c := s.subscribe("")
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if n := s.connections(); n != 0 {
			t.Errorf("%d connections; want 0", n)
		}
	})
}
