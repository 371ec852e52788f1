package front

import (
	"context"
	"errors"
	"fmt"
	"net/http"
)

// pooled sends a request to the engine that the pool chooses. After a failure it sends the request
// to another engine.
type pooled struct {
	front *Front
}

var _ router = (*pooled)(nil)

// route returns the first response of an engine or, if every attempt fails, the last failure.
func (r *pooled) route(out *http.Request, req *request) (*http.Response, error) {
	p, m, t := r.front.pool, r.front.metrics, &ticket{prompt: newPrompt(req.fields)}
	var last error
	for attempt := 1; ; attempt++ {
		e, err := p.acquire(out.Context(), t)
		if err != nil {
			if last != nil && errors.Is(err, errNoEngine) {
				err = last
			}
			return nil, err
		}
		ctx, cancel := context.WithCancelCause(out.Context())
		answered := func() bool { return true }
		if attempt < r.front.opts.MaxAttempts {
			answered = p.ask(t, e, cancel)
		}
		resp, err := r.front.send(out.WithContext(ctx), e, req.body)
		if !answered() {
			if err == nil {
				_ = resp.Body.Close()
			}
			err = errHung
		}
		if err != nil {
			cancel(nil)
			if out.Context().Err() != nil {
				p.release(e)
				return nil, err
			}
			last = fmt.Errorf("%s: %w", e.name, err)
			p.failed(e, err, err != errHung)
			p.release(e)
		} else {
			resp.Body.(*answer).closed = func(error) {
				cancel(nil)
				p.release(e)
			}
			if !unavailable(resp.StatusCode) {
				p.served(e)
				return resp, nil
			}
			last = fmt.Errorf("%s: %s", e.name, resp.Status)
			p.failed(e, errors.New(resp.Status), false)
		}
		t.tried = append(t.tried, e)
		if attempt >= r.front.opts.MaxAttempts || !p.another(t) {
			if err == nil {
				return resp, nil // the last engine's response contains the reason, so the client gets it
			}
			return nil, last
		}
		m.retries.WithLabelValues(e.name).Inc()
		r.front.opts.Logger.Debug("the request goes to another engine", "err", last)
		if err == nil {
			_ = resp.Body.Close()
		}
	}
}
