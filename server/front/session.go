package front

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/penstock-kv/penstock/client/gateway"
)

// session is a request on a prefill/decode cluster. run makes the decisions, on its own goroutine.
// follow sends the planner's events to run, and ask sends the engines' responses to run.
type session struct {
	router *planned
	out    *http.Request // the client's request without a body
	fields fields
	params fields // of kv_transfer_params
	id     string
	prompt int                // tokens
	ctx    context.Context    // of the planner's session
	cancel context.CancelFunc // ends the session with the planner, which then aborts the request unless it is done
	parts  sync.WaitGroup     // follow and ask

	events   chan gateway.Event // follow closes it
	failure  error              // the planner's error, set before events is closed
	outcomes chan outcome
	over     chan struct{} // closed when run receives no more outcomes
	reply    chan reply    // receives one element
	closed   chan error    // receives the error of answer.closed, io.EOF after the last event of a stream

	// run owns the following fields.
	body      *answer         // of the response to the client, once it has begun
	gone      <-chan struct{} // the client has disconnected, or its response was closed
	submitted time.Time
	matched   bool     // storage has responded
	started   bool     // the first attempt was started
	done      bool     // the planner has ended the request normally
	attempt   *attempt // nil: none is running
	answered  bool     // the client has the start of a response
	refused   bool     // the response to the client is an engine's refusal
	prefilled bool     // in this attempt, the prefill engine has responded or has failed
	delivered bool     // in this attempt, the decode engine has the KV of the prompt
	complete  bool     // the client has the whole response
	ended     bool
	slot      bool  // the session has an element in planned.confirming
	last      error // the failure of the last attempt

	// timer fires when the request has waited too long for the event in the field waits.
	timer *time.Timer
	waits wait
}

// wait is an event for which a request waits, with a time limit.
type wait uint8

const (
	forNothing wait = iota
	forPlanner      // storage and the planner accept the request
	forAttempt      // the planner starts the request again
	forPrefill      // as forAttempt, or the planner reports that the decode engine has the KV of the prompt
	forDone         // the planner and the prefill engine end the request
)

// The pauses between two connections to an engine that accepts none.
const (
	dialPauseMin = 50 * time.Millisecond
	dialPauseMax = time.Second
)

// attempt is a start of the request on two engines.
type attempt struct {
	name   string
	ctx    context.Context
	cancel context.CancelFunc
}

// outcome is the response of one engine of an attempt, or the engine's failure.
type outcome struct {
	attempt *attempt
	engine  *engine
	side    string
	resp    *http.Response
	err     error
}

// close closes the response, if there is one.
func (o *outcome) close() {
	if o.resp != nil {
		_ = o.resp.Body.Close()
	}
}

// reply is the response to the client, or an error.
type reply struct {
	resp *http.Response
	err  error
}

// follow passes the planner's events on to run.
func (s *session) follow(r gateway.Request) {
	defer close(s.events)
	for ev, err := range s.router.planner.Serve(s.ctx, r) {
		if err != nil {
			s.failure = err
			return
		}
		select {
		case s.events <- ev:
		case <-s.ctx.Done():
			return
		}
	}
}

// ask sends an attempt to one engine. The prefill engine's response is read and dropped, unless it
// is a refusal for the client.
//
// When an engine starts, its leader may register it with the planner before the engine listens for
// requests. So ask repeats the connection attempt to an engine that accepts none, for at most
// ReplanWait. Otherwise the attempt would fail, and the engines would report this to the planner
// only after their own time limits.
func (s *session) ask(o outcome, body payload) {
	f := s.router.front
	end := time.Now().Add(f.opts.ReplanWait)
	for pause := dialPauseMin; ; pause = min(2*pause, dialPauseMax) {
		o.resp, o.err = f.send(s.out.WithContext(o.attempt.ctx), o.engine, body)
		if !unreachable(o.err) || o.attempt.ctx.Err() != nil || time.Now().Add(pause).After(end) {
			break
		}
		f.pool.failed(o.engine, fmt.Errorf("%s engine %s: %w", o.side, o.engine.name, o.err), true)
		f.metrics.retries.WithLabelValues(o.engine.name).Inc()
		select {
		case <-time.After(pause):
		case <-o.attempt.ctx.Done(): // send returns its error
		}
	}
	if o.err == nil && o.side == prefillSide && !badRequest(o.resp.StatusCode) {
		_, o.err = io.Copy(io.Discard, o.resp.Body)
		o.close()
	}
	select {
	case s.outcomes <- o:
	case <-s.over:
		o.close()
	}
}

// unreachable reports whether an engine has accepted no connection.
func unreachable(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}

// badRequest reports whether a prefill engine's status means that the request itself is invalid.
func badRequest(status int) bool {
	return status >= 400 && status < 500 && status != http.StatusNotFound && status != http.StatusTooManyRequests
}

// run serves the request until its end.
func (s *session) run() {
	s.timer = time.NewTimer(s.router.front.opts.QueueWait)
	s.waits = forPlanner
	events := s.events
	for !s.ended {
		select {
		case ev, ok := <-events:
			if !ok {
				events = nil
				s.left()
				continue
			}
			s.on(ev)
		case o := <-s.outcomes:
			s.arrived(o)
		case err := <-s.closed:
			s.passed(err)
		case <-s.timer.C:
			s.late()
		case <-s.gone:
			s.leave()
		case <-s.router.ctx.Done():
			s.fail(errClosing)
		}
	}
	s.timer.Stop()
	s.drop()
	s.cancel()
	close(s.over)
	s.parts.Wait()
	if s.slot {
		s.router.front.metrics.confirming.Dec()
		<-s.router.confirming
	}
}

// await sets the event for which the request waits. The request fails if the event does not occur
// within d.
func (s *session) await(what wait, d time.Duration) {
	s.waits = what
	s.timer.Reset(d)
}

func (s *session) goOn() {
	s.waits = forNothing
	s.timer.Stop()
}

// on handles an event of the planner.
func (s *session) on(ev gateway.Event) {
	m, opts := s.router.front.metrics, &s.router.front.opts
	switch ev.Kind {
	case gateway.Matched:
		s.matched = true
		m.promptTokens.Add(float64(s.prompt))
		m.hitTokens.Add(float64(ev.Hit))
	case gateway.Waiting:
		opts.Logger.Debug("the planner is unreachable", "request", s.id, "reason", ev.Reason)
		if s.attempt == nil && s.waits == forNothing {
			s.await(forPlanner, opts.QueueWait)
		}
	case gateway.Accepted:
		opts.Logger.Debug("the planner has accepted a request", "request", s.id)
		if s.waits == forPlanner {
			s.goOn()
		}
	case gateway.Started:
		if s.attempt == nil || s.attempt.name != ev.Attempt {
			s.start(ev)
		}
	case gateway.Replanned:
		opts.Logger.Debug("the planner is planning a request again", "request", s.id, "reason", ev.Reason)
		m.replans.Inc()
		s.lose(errors.New(ev.Reason))
	case gateway.Prefilled:
		opts.Logger.Debug("the decode engine has the prompt", "request", s.id)
		s.delivered = true
		if s.waits == forPrefill {
			s.goOn()
		}
	case gateway.Done:
		s.done = true
		switch s.waits {
		case forAttempt:
			s.late() // there will be no further attempt
		case forPrefill:
			s.goOn()
		}
		s.settle()
	}
}

// settle ends the request if all its parts have ended normally. The prefill engine may still be
// storing KV when the decode engine has generated the output.
func (s *session) settle() {
	if s.complete && s.done && s.prefilled {
		s.end(outcomeDone)
	}
}

// start begins an attempt.
func (s *session) start(ev gateway.Event) {
	m := s.router.front.metrics
	if s.attempt != nil {
		s.lose(errors.New("the planner has started the request again"))
	}
	if s.ended || s.refused {
		return
	}
	s.goOn()
	if !s.started {
		s.started = true
		m.start.Observe(time.Since(s.submitted).Seconds())
	}
	if ev.Attempt == "" {
		s.fail(&refusal{reason: rejectPlanner, status: http.StatusBadGateway, code: "planner_version", message: "the planner does not name its attempts: it is of an earlier version than the gateway; update it"})
		return
	}
	prefill, decode, err := s.router.enginesOf(ev)
	if err != nil {
		s.fail(err)
		return
	}
	m.attempts.Inc()
	s.prefilled, s.delivered = false, false
	s.attempt = &attempt{name: ev.Attempt}
	s.attempt.ctx, s.attempt.cancel = context.WithCancel(context.Background())
	toPrefill, toDecode := bodies(s.fields, s.params, attemptParams{Attempt: ev.Attempt, Epoch: uint64(ev.Epoch)})
	for _, each := range []struct {
		side   string
		engine *engine
		body   payload
	}{{prefillSide, prefill, toPrefill}, {decodeSide, decode, toDecode}} {
		o := outcome{attempt: s.attempt, engine: each.engine, side: each.side}
		s.parts.Go(func() { s.ask(o, each.body) })
	}
}

// lose ends the attempt, if there is one, because one of its engines has failed. The planner then
// starts another attempt. A client that has received the start of a response cannot get another
// response, so its request fails.
func (s *session) lose(why error) {
	switch {
	case s.refused: // the client gets the rest of the refusal
	case s.complete:
		s.end(outcomeUnconfirmed)
	case s.answered:
		s.end(outcomeCut)
	default:
		s.drop()
		s.retry(why)
	}
}

// drop closes the requests to the engines.
func (s *session) drop() {
	if s.attempt != nil {
		s.attempt.cancel()
		s.attempt = nil
	}
}

// retry waits for another attempt.
func (s *session) retry(why error) {
	s.last = why
	if s.waits != forAttempt {
		s.await(forAttempt, s.router.front.opts.ReplanWait)
	}
}

// arrived handles the response of an engine.
func (s *session) arrived(o outcome) {
	if o.attempt != s.attempt {
		o.close()
		return
	}
	f := s.router.front
	switch {
	case o.err != nil:
		o.err = fmt.Errorf("%s engine %s: %w", o.side, o.engine.name, o.err)
		f.pool.failed(o.engine, o.err, true)
	case unavailable(o.resp.StatusCode), o.side == prefillSide && o.resp.StatusCode >= 300 && !badRequest(o.resp.StatusCode):
		o.err = fmt.Errorf("%s engine %s: %s", o.side, o.engine.name, o.resp.Status)
	default:
		f.pool.served(o.engine)
	}
	if o.err != nil {
		f.metrics.failures.WithLabelValues(o.engine.name, o.side).Inc()
		f.opts.Logger.Debug("a request failed on an engine", "request", s.id, "err", o.err)
	}
	s.prefilled = s.prefilled || o.side == prefillSide
	switch {
	case s.answered:
		o.close()
		s.settle()
	case o.side == prefillSide:
		switch {
		case o.err == nil && badRequest(o.resp.StatusCode):
			s.answer(o)
		case o.err != nil && !s.delivered && !s.done:
			s.withoutPrefill(o.err)
		}
	case o.err == nil:
		s.answer(o)
	default:
		o.close()
		if s.retry(o.err); s.done || unreachable(o.err) {
			s.late() // no further attempt will start, or ask has already waited ReplanWait
		}
	}
}

// withoutPrefill handles a failure of the prefill engine before the decode engine has the prompt. The
// failed request may not have reached the engine, whose leader then has no failure to report, and the
// decode engine would wait for the KV until its own time limit. So the request fails if the planner
// neither starts it again nor reports the end of prefill in time.
func (s *session) withoutPrefill(why error) {
	s.last = why
	if s.waits != forAttempt {
		s.await(forPrefill, s.router.front.opts.ReplanWait)
	}
	if unreachable(why) {
		s.late() // ask has already waited ReplanWait
	}
}

// answer gives the client an engine's response.
func (s *session) answer(o outcome) {
	s.goOn()
	s.answered = true
	if s.refused = o.resp.StatusCode >= 300; s.refused {
		s.cancel()
	}
	s.body = o.resp.Body.(*answer)
	s.body.closed = func(err error) {
		if s.body.whole.Load() { // clients may disconnect after the last event of a stream
			err = io.EOF
		}
		s.closed <- err
	}
	s.reply <- reply{resp: o.resp}
}

// leave handles the end of the client's request. If the response to the client has ended, its end
// is in s.closed already.
func (s *session) leave() {
	s.gone = nil
	select {
	case err := <-s.closed:
		s.passed(err)
		return
	default:
	}
	switch {
	case s.complete:
	case s.answered && s.body.whole.Load():
		s.body.end() // s.closed receives the end of the response
	case s.answered:
		s.end(outcomeGone)
	default:
		s.fail(context.Canceled)
	}
}

// passed handles the end of the response. err is io.EOF if the client has the whole response, nil
// if the client has disconnected, and otherwise the engine's failure.
func (s *session) passed(err error) {
	r := s.router
	switch {
	case s.refused:
		s.end(outcomeEngine)
	case err == nil:
		s.end(outcomeGone)
	case err != io.EOF:
		s.end(outcomeCut)
	case s.done && s.prefilled:
		s.end(outcomeDone)
	default:
		s.complete = true
		s.fields, s.params = nil, nil // the client's body no longer counts towards the bound of bodies
		select {
		case r.confirming <- struct{}{}:
			s.slot = true
			r.front.metrics.confirming.Inc()
			s.await(forDone, r.confirmWait)
		default:
			s.end(outcomeUnconfirmed)
		}
	}
}

// left handles the end of the planner's event stream: it ends the session with the outcome that its
// state allows, unless the client already gets an engine's refusal, or the stream ended without an
// error.
func (s *session) left() {
	switch {
	case s.refused, s.failure == nil:
	case s.complete:
		s.end(outcomeUnconfirmed)
	case s.answered:
		s.end(outcomeCut)
	default:
		s.fail(s.router.refusalOf(s.failure))
	}
}

// late handles a wait that has taken too long.
func (s *session) late() {
	opts := &s.router.front.opts
	switch s.waits {
	case forPlanner:
		message := fmt.Sprintf("the planner has not accepted the request within %v", opts.QueueWait)
		if !s.matched {
			message = fmt.Sprintf("storage has not answered within %v", opts.QueueWait)
		}
		s.fail(&refusal{reason: rejectPlanner, status: http.StatusServiceUnavailable, code: "planner_unavailable", message: message, retry: true})
	case forAttempt, forPrefill:
		message := fmt.Sprintf("the engines failed before they answered: %v", s.last)
		if !s.done {
			message += fmt.Sprintf("; the planner has not started the request again within %v", opts.ReplanWait)
		}
		s.fail(&refusal{reason: rejectEngines, status: http.StatusBadGateway, code: "engine_failed", message: message})
	case forDone:
		s.end(outcomeUnconfirmed)
	}
}

// fail ends the request with an error for the client, or cuts off a response that has begun.
func (s *session) fail(err error) {
	switch {
	case s.complete:
		s.end(outcomeUnconfirmed)
	case s.answered:
		s.end(outcomeCut)
	default:
		s.ended = true
		s.reply <- reply{err: err} // planned.route counts it
	}
}

// end ends a request that got a response.
func (s *session) end(outcome string) {
	s.ended = true
	s.router.front.metrics.planned.WithLabelValues(outcome).Inc()
}
