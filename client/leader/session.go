package leader

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
)

// retryEvery is the time between two sessions. endWithin is the longest wait for the planner to end
// the last session.
const (
	retryEvery = 50 * time.Millisecond
	endWithin  = time.Second
)

// Run keeps the group registered until ctx ends, if necessary with several sessions one after the
// other. It returns when the last session has ended. Call Run once.
func (l *Leader) Run(ctx context.Context) {
	// Requests continue after ctx has ended, until the planner has planned them again. Otherwise
	// the other engine of each request would report the request as failed.
	defer func() {
		l.cancelAll()
		l.changes.Wait()
	}()
	var last string // the error that was logged last
	for ctx.Err() == nil {
		registered, err := l.session(ctx)
		if registered {
			last = ""
		}
		if ctx.Err() != nil || errors.Is(err, errChanged) {
			continue
		}
		if err.Error() != last {
			last = err.Error()
			l.log.Warn("the session with the planner has ended; the leader tries again until there is one", "group", l.opts.Group, "err", err)
		}
		select {
		case <-time.After(retryEvery):
		case <-ctx.Done():
		}
	}
}

// cancelAll ends the contexts of all requests.
func (l *Leader) cancelAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, h := range l.held {
		h.cancel()
	}
	clear(l.held)
	clear(l.ended)
	l.reports = nil
}

// linger returns a context that ends the given time after ctx.
func linger(ctx context.Context, after time.Duration) (context.Context, context.CancelFunc) {
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		t := time.NewTimer(after)
		defer t.Stop()
		select {
		case <-t.C:
			cancel()
		case <-life.Done():
		}
	})
	return life, func() {
		stop()
		cancel()
	}
}

// stream is a session's.
type stream = grpc.BidiStreamingClient[pb.LeaderMessage, pb.LeaderAction]

// session runs one gRPC stream to the planner. For a group without engines it first waits for an
// engine. registered reports whether the planner accepted the registration.
func (l *Leader) session(ctx context.Context) (registered bool, err error) {
	register, version, err := l.registration()
	if err != nil {
		return false, err
	}
	if len(register.Engines) == 0 {
		return false, l.await(ctx, version)
	}
	leave, left := context.WithCancel(ctx)
	defer left()
	life, cancel := linger(leave, endWithin)
	defer cancel()
	s, err := pb.NewPlannerClient(l.opts.Planner).Lead(life)
	if err != nil {
		return false, err
	}
	begun, received := make(chan struct{}), make(chan struct{})
	var why error
	go func() {
		defer close(received)
		registered, why = l.receive(ctx, s, begun)
	}()
	err = l.send(ctx, s, register, version, begun, received)
	if err == nil {
		// The planner has ended the stream, or will end it before the context of linger ends.
		_ = s.CloseSend()
		left()
		<-received
		return registered, why
	}
	cancel()
	<-received
	return registered, err
}

// await waits until the members have changed since the given version.
func (l *Leader) await(ctx context.Context, version int) error {
	for {
		if l.changed(version) {
			return errChanged
		}
		select {
		case <-l.wake:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// changed reports whether the members have changed since the given version.
func (l *Leader) changed(version int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.version != version
}

// send sends the registration and, when begun is closed, reports and fetches. It returns nil if the
// planner has ended the stream, ctx has ended, or the group has no engine any more. The caller then
// closes the stream in order.
func (l *Leader) send(ctx context.Context, s stream, register *pb.RegisterGroup, version int, begun, received <-chan struct{}) error {
	if err := s.Send(&pb.LeaderMessage{Message: &pb.LeaderMessage_Register{Register: register}}); err != nil {
		return unlessEOF(err)
	}
	t := time.NewTicker(l.opts.FetchEvery)
	defer t.Stop()
	var counted time.Time // when the NICs were read last
	for {
		fetch := false
		select {
		case <-begun:
			begun = nil
		case <-l.wake:
		case <-t.C:
			fetch = true
		case <-received:
			return nil
		case <-ctx.Done():
			return nil
		}
		if l.changed(version) {
			if l.memberless() {
				return nil
			}
			return errChanged
		}
		if begun != nil {
			continue
		}
		if fetch {
			l.mergeProgress()
		}
		if err := l.flush(s); err != nil {
			return unlessEOF(err)
		}
		if fetch {
			f := l.fetch()
			if now := time.Now(); now.Sub(counted) >= nicsEvery {
				counted = now
				l.nics(f)
			}
			if err := s.Send(&pb.LeaderMessage{Message: &pb.LeaderMessage_Fetch{Fetch: f}}); err != nil {
				return unlessEOF(err)
			}
		}
	}
}

// unlessEOF returns nil for io.EOF and otherwise err. Send returns io.EOF when the stream has
// ended, and the receiver gets the reason.
func unlessEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// flush sends the reports that wait.
func (l *Leader) flush(s stream) error {
	for {
		l.mu.Lock()
		if len(l.reports) == 0 {
			l.mu.Unlock()
			return nil
		}
		next := l.reports[0]
		l.reports[0] = report{}
		l.reports = l.reports[1:]
		l.mu.Unlock()
		signal(l.drained)
		if err := s.Send(next.message); err != nil {
			return err
		}
		l.sent(next)
	}
}

// sent is called when the report m has been sent. If m reports the end of a request and the planner
// sends no confirmations, the leader does not keep the end any longer.
func (l *Leader) sent(m report) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.planner == 0 && l.endsLocked(m) {
		delete(l.ended, m.of.ID)
	}
}

// receive handles the planner's actions until the stream ends. It closes begun after the first
// action. registered reports whether there was an action.
func (l *Leader) receive(ctx context.Context, s stream, begun chan<- struct{}) (registered bool, err error) {
	for {
		a, err := s.Recv()
		if errors.Is(err, io.EOF) {
			return registered, errors.New("the planner ended the session")
		}
		if err != nil {
			return registered, err
		}
		if !registered {
			registered = true
			l.registered(a.Planner)
			close(begun)
		}
		if err := l.room(s.Context()); err != nil {
			return registered, err
		}
		if err := l.act(ctx, a); err != nil {
			l.log.Error("an action of the planner cannot be taken", "group", l.opts.Group, "action", a.Kind.String(), "request", a.Request, "err", err)
		}
		// From here on, the reported load of the engines includes a request that the action has
		// assigned. So the reports may have the action's number (FetchWork.seen).
		l.mu.Lock()
		l.seen, l.taken = max(l.seen, a.Seq), max(l.taken, a.Seq)
		l.mu.Unlock()
	}
}

// room waits until fewer than maxReports reports wait, so that another action may be handled.
func (l *Leader) room(ctx context.Context) error {
	for {
		l.mu.Lock()
		n := len(l.reports)
		l.mu.Unlock()
		if n < maxReports {
			return nil
		}
		select {
		case <-l.drained:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// act takes one action.
func (l *Leader) act(ctx context.Context, a *pb.LeaderAction) error {
	switch a.Kind {
	case pb.LeaderAction_KIND_ASSIGN:
		return l.assign(a)
	case pb.LeaderAction_KIND_START:
		err := l.start(context.WithoutCancel(ctx), a)
		if err != nil {
			// The planner plans the request again, with other engines if there are any.
			l.abort(a.Request)
			l.queueReport(report{message: failed(a.Request, a.Seq, l.roleNow(), 0)})
		}
		return err
	case pb.LeaderAction_KIND_READ:
		l.onAttempt(a, func(r *Request) {
			for _, p := range a.Parts {
				part := l.part(p)
				l.expect(r, part, a.Seq)
				r.engine.Read(r.Name, part)
			}
		})
	case pb.LeaderAction_KIND_RECOMPUTE:
		l.onAttempt(a, func(r *Request) {
			for _, p := range a.Parts {
				part := l.part(p)
				l.mu.Lock()
				r.brings = append(r.brings, part)
				l.mu.Unlock()
				r.engine.Recompute(r.Name, part)
			}
		})
	case pb.LeaderAction_KIND_CUT, pb.LeaderAction_KIND_DROP:
		// The planner ignores the report of the end of a read that it has dropped.
		l.onAttempt(a, func(r *Request) { r.engine.Cut(r.Name) })
	case pb.LeaderAction_KIND_ABORT:
		l.abort(a.Request)
	case pb.LeaderAction_KIND_CONFIRMED:
		l.confirmed(a)
	case pb.LeaderAction_KIND_ANNOUNCE:
		l.announce(Role(a.Side))
	case pb.LeaderAction_KIND_SWITCH:
		l.takeSwitch(ctx, Role(a.Side))
	}
	return nil
}

// confirmed drops the end of an attempt after the planner has confirmed it.
func (l *Leader) confirmed(a *pb.LeaderAction) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e := l.ended[a.Request]; e != nil && e.attempt.attempt == a.Attempt {
		delete(l.ended, a.Request)
	}
}

// onAttempt calls f with the running attempt at a request, if there is one.
func (l *Leader) onAttempt(a *pb.LeaderAction, f func(r *Request)) {
	l.mu.Lock()
	h := l.held[a.Request]
	started := h != nil && h.attempt != nil
	if started {
		h.attempt.order = a.Seq
	}
	l.mu.Unlock()
	if started {
		f(h.attempt)
	}
}

// assign keeps a request until its START.
func (l *Leader) assign(a *pb.LeaderAction) error {
	if a.Submitted == nil {
		return errors.New("leader: an assignment without its request")
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.switching != 0 {
		return fmt.Errorf("leader: the engines of group %q are changing their role to %v", l.opts.Group, l.switching)
	}
	if old := l.held[a.Request]; old != nil {
		old.cancel() // an attempt that the planner gave up in an earlier session
		delete(l.held, a.Request)
	}
	delete(l.ended, a.Request) // the end of an attempt that the planner gave up
	m, ok := l.memberLocked(a.Engine)
	if !ok {
		return fmt.Errorf("leader: engine %q is not in group %q", a.Engine, l.opts.Group)
	}
	l.held[a.Request] = &held{submit: a.Submitted, member: m}
	return nil
}

// abort ends a request.
func (l *Leader) abort(request string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.held[request]
	switch {
	case h == nil:
	case h.attempt == nil:
		delete(l.held, request)
		signal(l.freed)
	default:
		// The attempt counts in the engine's load until it has ended on the engine.
		h.aborted = true
		h.cancel()
	}
}
