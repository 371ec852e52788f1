package planners

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
)

const (
	// askEvery is the mean interval at which each planner is asked whether it leads, for the case that
	// the leader hangs and another planner is elected: then no stream fails.
	askEvery = 2 * time.Second
	// While a leader is sought, the interval begins at askSoon and doubles up to askLate.
	askSoon = 50 * time.Millisecond
	askLate = 400 * time.Millisecond
	// askLeast is the shortest time between two calls to one planner.
	askLeast = 10 * time.Millisecond
	// askWithin is the time after which a planner that does not answer is asked again.
	askWithin = time.Second
)

// Conn is a connection to the planner that leads. It implements grpc.ClientConnInterface. Its
// methods may be called concurrently.
type Conn struct {
	planners []*planner
	// every is askEvery.
	every time.Duration
	// open ends with Close.
	open   context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu sync.Mutex
	// leader is the planner that leads, nil if none does. doubted is set when a call to the leader has
	// failed, until the leader has confirmed that it leads. Meanwhile no call begins, and the streams
	// in progress go on.
	leader  *planner
	doubted bool
	// late is set when the leader has failed to answer whether it leads, until it answers. Meanwhile
	// calls begin, and the planners are asked as while a leader is sought.
	late bool
	// term is the highest term that the Conn has seen. 0: no planner is elected.
	term uint64
	// behind is a planner that leads in a term below term, nil if none does.
	behind *planner
	// reign ends with the leadership of leader.
	reign *reign
	// asked is closed and replaced when a planner has answered or has failed to answer; sought, when
	// the Conn has begun to seek a leader.
	asked, sought chan struct{}
}

// planner is one of the planners. Conn.mu guards the fields after conn.
type planner struct {
	addr string
	conn *grpc.ClientConn
	// answers is the number of calls that have ended. state describes the last answer.
	answers int
	state   string
}

// reign is the time for which the Conn regards one planner as the leader. The cause of its end is the
// error of the calls in progress.
type reign struct {
	ctx context.Context
	end context.CancelCauseFunc
}

var _ grpc.ClientConnInterface = (*Conn)(nil)

// errClosed has the code with which gRPC's own connections fail after Close.
var errClosed = status.Error(codes.Canceled, "the connection to the planners is closed")

// Check returns an error if addresses cannot be the argument of Dial.
func Check(addresses string) error {
	list := strings.Split(addresses, ",")
	for i, a := range list {
		if err := client.CheckServer(a); err != nil {
			return err
		}
		if slices.Contains(list[:i], a) {
			return fmt.Errorf("planner %q is listed twice", a)
		}
	}
	return nil
}

// Dial returns a connection to the planner that leads, among the planners at addresses (host:port,
// with commas between). It does not wait for a planner.
func Dial(addresses string, opts client.DialOptions) (*Conn, error) {
	return dial(addresses, opts, askEvery)
}

func dial(addresses string, opts client.DialOptions, every time.Duration) (*Conn, error) {
	if err := Check(addresses); err != nil {
		return nil, fmt.Errorf("planners: %w", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	c := &Conn{every: every, open: ctx, cancel: cancel, asked: make(chan struct{}), sought: make(chan struct{})}
	for a := range strings.SplitSeq(addresses, ",") {
		conn, err := client.Dial(a, opts)
		if err != nil {
			return nil, errors.Join(err, c.Close())
		}
		c.planners = append(c.planners, &planner{addr: a, conn: conn, state: "not asked yet"})
	}
	if len(c.planners) == 1 {
		c.leadsLocked(c.planners[0], 0)
		return c, nil
	}
	for _, p := range c.planners {
		c.wg.Go(func() { c.ask(ctx, p) })
	}
	return c, nil
}

// Close closes the connections. Calls and streams in progress fail.
func (c *Conn) Close() error {
	c.cancel()
	c.wg.Wait()
	c.mu.Lock()
	if c.reign != nil {
		c.reign.end(errClosed)
	}
	c.mu.Unlock()
	var errs []error
	for _, p := range c.planners {
		errs = append(errs, p.conn.Close())
	}
	return errors.Join(errs...)
}

// leadsLocked makes p, which may be nil, the leader.
func (c *Conn) leadsLocked(p *planner, term uint64) {
	c.term = max(c.term, term)
	if c.reign != nil {
		why := "no planner leads"
		if p != nil {
			why = fmt.Sprintf("the planner at %s leads (term %d)", p.addr, term)
		}
		c.reign.end(status.Error(codes.Unavailable, why))
		c.reign = nil
	}
	c.leader, c.doubted, c.late = p, false, false
	if p != nil {
		c.reign = new(reign)
		c.reign.ctx, c.reign.end = context.WithCancelCause(context.Background())
		return
	}
	c.seekLocked()
}

// seekLocked asks all planners at once.
func (c *Conn) seekLocked() {
	close(c.sought)
	c.sought = make(chan struct{})
}

// jitter returns a random time between half of d and one and a half times d, so that the clients of a
// planner do not ask it at the same moment.
func jitter(d time.Duration) time.Duration { return d/2 + rand.N(d) }

// ask asks a planner at intervals, and when the Conn begins to seek a leader, whether it leads, until
// ctx ends.
func (c *Conn) ask(ctx context.Context, p *planner) {
	t := time.NewTimer(0)
	defer t.Stop()
	least := time.NewTimer(0)
	defer least.Stop()
	var sought <-chan struct{}
	pause := askSoon
	for {
		select {
		case <-t.C:
		case <-sought:
			pause = askSoon
		case <-ctx.Done():
			return
		}
		select {
		case <-least.C:
		case <-ctx.Done():
			return
		}
		c.mu.Lock()
		sought = c.sought
		c.mu.Unlock()
		limited, cancel := context.WithTimeout(ctx, askWithin)
		r, err := pb.NewPlannerClient(p.conn).Election(limited, &pb.ElectionRequest{})
		cancel()
		switch status.Code(err) {
		case codes.Unimplemented:
			r, err = &pb.ElectionResponse{}, nil // a planner of an earlier version, which is not elected
		case codes.Unavailable:
			// A planner that has started again may be elected before gRPC would connect again.
			p.conn.ResetConnectBackoff()
		}
		least.Reset(askLeast)
		if c.answered(p, r, err) {
			t.Reset(jitter(c.every))
			pause = askSoon
		} else {
			t.Reset(jitter(pause))
			pause = min(2*pause, askLate)
		}
	}
}

// answered records the answer of a planner. It reports whether a planner leads for certain and answers.
func (c *Conn) answered(p *planner, r *pb.ElectionResponse, err error) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	p.answers++
	if c.behind == p {
		c.behind = nil
	}
	switch {
	case err != nil:
		// The stream of a leader that has ended fails by itself. A leader that only answers late
		// keeps its streams. Another planner may be elected soon.
		p.state = status.Convert(err).Message()
		if c.leader == p && !c.late {
			c.late = true
			c.seekLocked()
		}
	case !r.Elected:
		p.state = "not elected, but one of several planners: it needs cluster.etcd"
	case !r.Leads:
		p.state = "a standby"
		if c.leader == p {
			c.leadsLocked(nil, 0)
		}
	case r.Term < c.term:
		p.state = fmt.Sprintf("leads in term %d, but term %d has begun", r.Term, c.term)
		c.behind = p
		if c.leader == p {
			c.leadsLocked(nil, 0)
		}
	default:
		p.state = "leads"
		switch {
		case c.leader == nil || r.Term > c.term:
			c.leadsLocked(p, r.Term)
		case c.leader == p:
			c.doubted, c.late = false, false
		case c.doubted || c.late:
			// The term is known from the header of a response to an earlier call.
			c.leadsLocked(p, r.Term)
		}
	}
	close(c.asked)
	c.asked = make(chan struct{})
	return c.leader != nil && !c.doubted && !c.late
}

// find returns the leader. If none is known for certain, find waits until each planner has answered a
// call that began after find.
func (c *Conn) find(ctx context.Context) (*planner, *reign, uint64, error) {
	var until []int
	for {
		c.mu.Lock()
		if c.leader != nil && !c.doubted {
			defer c.mu.Unlock()
			return c.leader, c.reign, c.term, nil
		}
		waits := until == nil
		var states []string
		for i, p := range c.planners {
			if len(until) < len(c.planners) {
				until = append(until, p.answers+2) // the first may be of a call in progress
			}
			waits = waits || p.answers < until[i]
			states = append(states, p.addr+": "+p.state)
		}
		asked := c.asked
		c.mu.Unlock()
		if !waits {
			return nil, nil, 0, status.Errorf(codes.Unavailable, "no planner leads (%s)", strings.Join(states, "; "))
		}
		select {
		case <-asked:
		case <-c.open.Done():
			return nil, nil, 0, errClosed
		case <-ctx.Done():
			return nil, nil, 0, status.FromContextError(ctx.Err()).Err()
		}
	}
}

// surpass sends the highest term to the planner that leads in a lower term, if there is one. That planner
// then ends its term, and its next term is above the highest one. Without this call the election would
// not continue after etcd has lost its data, because the planner gets no other call of this Conn.
func (c *Conn) surpass(ctx context.Context) {
	c.mu.Lock()
	p, term := c.behind, c.term
	c.mu.Unlock()
	if p == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, askWithin)
	defer cancel()
	// The planner refuses the call, so nothing is sent.
	if s, err := pb.NewPlannerClient(p.conn).Lead(withTerm(ctx, term)); err == nil {
		_, _ = s.Recv()
	}
}

// failed handles an error of a call to p that may mean that p has ended or does not lead any more. The
// Conn asks all planners. The other streams to p go on until another planner leads, or p does not.
func (c *Conn) failed(p *planner, r *reign, err error) {
	if status.Code(err) != codes.Unavailable || len(c.planners) == 1 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.reign == r && !c.doubted {
		p.state = status.Convert(err).Message()
		c.doubted = true
		c.seekLocked()
	}
}

// check compares the term in the header of a response with the highest one.
func (c *Conn) check(p *planner, header metadata.MD) error {
	term := api.Term(header)
	c.mu.Lock()
	defer c.mu.Unlock()
	if term > 0 && term < c.term {
		return status.Errorf(codes.Unavailable, "the planner at %s responds for term %d, but term %d has begun", p.addr, term, c.term)
	}
	c.term = max(c.term, term)
	return nil
}

// join returns a context that ends with ctx or with the reign, and that sends the term.
func join(ctx context.Context, r *reign, term uint64) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(r.ctx, cancel)
	context.AfterFunc(ctx, func() { stop() }) // the reign does not keep contexts that have ended
	return withTerm(ctx, term), cancel
}

// withTerm returns a context whose calls send the term, if it is not 0.
func withTerm(ctx context.Context, term uint64) context.Context {
	if term == 0 {
		return ctx
	}
	md, _ := metadata.FromOutgoingContext(ctx)
	return metadata.NewOutgoingContext(ctx, metadata.Join(md, api.TermPairs(term)))
}

// ended replaces an error that the end of the reign has caused.
func (r *reign) ended(ctx context.Context, err error) error {
	if err != nil && ctx.Err() == nil && r.ctx.Err() != nil {
		return context.Cause(r.ctx)
	}
	return err
}

// Invoke implements grpc.ClientConnInterface.
func (c *Conn) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	p, r, term, err := c.find(ctx)
	if err != nil {
		return err
	}
	joined, done := join(ctx, r, term)
	defer done()
	var header metadata.MD
	if err := p.conn.Invoke(joined, method, args, reply, append(slices.Clip(opts), grpc.Header(&header))...); err != nil {
		c.failed(p, r, err)
		return r.ended(ctx, err)
	}
	err = c.check(p, header)
	c.failed(p, r, err)
	return err
}

// NewStream implements grpc.ClientConnInterface.
func (c *Conn) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	p, r, term, err := c.find(ctx)
	if err != nil {
		// Only leaders of groups have the right to end a term.
		if method == pb.Planner_Lead_FullMethodName {
			c.surpass(ctx)
		}
		return nil, err
	}
	joined, done := join(ctx, r, term)
	s, err := p.conn.NewStream(joined, desc, method, opts...)
	if err != nil {
		done()
		c.failed(p, r, err)
		return nil, r.ended(ctx, err)
	}
	return &stream{ClientStream: s, conn: c, planner: p, reign: r, ctx: ctx, done: done}, nil
}

// stream is a stream to the leader. It ends with the reign.
type stream struct {
	grpc.ClientStream
	conn    *Conn
	planner *planner
	reign   *reign
	ctx     context.Context // the caller's
	done    context.CancelFunc
	// checked is set when the term of the planner has been compared. Only RecvMsg uses it.
	checked bool
}

// RecvMsg implements grpc.ClientStream.
func (s *stream) RecvMsg(m any) error {
	if err := s.ClientStream.RecvMsg(m); err != nil {
		s.done()
		s.conn.failed(s.planner, s.reign, err)
		return s.reign.ended(s.ctx, err)
	}
	if s.checked {
		return nil
	}
	header, err := s.Header()
	if err == nil {
		err = s.conn.check(s.planner, header)
	}
	if err != nil {
		s.done()
		s.conn.failed(s.planner, s.reign, err)
		return err
	}
	s.checked = true
	return nil
}
