package front

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"strconv"
	"sync"
	"time"
)

// route sends one request to one engine after another until one has answered. It is the
// transport of a ReverseProxy, which passes the answer on.
type route struct {
	front      *Front
	ticket     *ticket
	body       []byte
	start      time.Time
	completion bool
	stale      bool // an attempt has met the end of an idle connection
}

var _ http.RoundTripper = (*route)(nil)

// RoundTrip returns the first answer, the first byte of whose body has arrived, or the
// last failure.
func (r *route) RoundTrip(req *http.Request) (*http.Response, error) {
	p, m := r.front.pool, r.front.metrics
	var last error
	for attempt := 1; ; attempt++ {
		e, err := p.acquire(req.Context(), r.ticket)
		if err != nil {
			if last != nil && errors.Is(err, errNoEngine) {
				err = last
			}
			return nil, err
		}
		resp, reused, err := r.send(req, e)
		if err != nil && req.Context().Err() != nil {
			p.release(e)
			return nil, err
		}
		if err == nil && !unavailable(resp.StatusCode) {
			p.served(e)
			m.requests.WithLabelValues(e.name, strconv.Itoa(resp.StatusCode)).Inc()
			if r.completion {
				m.firstByte.WithLabelValues(e.name).Observe(time.Since(r.start).Seconds())
			}
			return resp, nil
		}
		// An engine may close an idle connection when a request is on its way to it. The
		// same engine may then have the next attempt.
		if err != nil && reused && !r.stale {
			r.stale = true
			attempt--
			p.release(e)
			m.retries.WithLabelValues(e.name).Inc()
			last = err
			continue
		}
		r.ticket.tried = append(r.ticket.tried, e)
		if err != nil {
			last = fmt.Errorf("%s: %w", e.name, err)
			p.failed(e, err, true)
		} else {
			last = fmt.Errorf("%s: %s", e.name, resp.Status)
			p.failed(e, errors.New(resp.Status), false)
		}
		if attempt >= r.front.opts.MaxAttempts || !p.another(r.ticket) {
			if err == nil {
				m.requests.WithLabelValues(e.name, strconv.Itoa(resp.StatusCode)).Inc()
				return resp, nil // an answer of the engine, whose reason the client gets
			}
			p.release(e)
			return nil, last
		}
		m.retries.WithLabelValues(e.name).Inc()
		r.front.opts.Logger.Debug("another engine gets the request", "failed", last)
		if err == nil {
			_ = resp.Body.Close() // ends the load too
		} else {
			p.release(e)
		}
	}
}

// unavailable reports whether a status means that another engine may do better.
func unavailable(status int) bool {
	return status == http.StatusBadGateway || status == http.StatusServiceUnavailable || status == http.StatusGatewayTimeout
}

// send makes one attempt. The load on the engine ends when the body of the response is
// closed; with an error it goes on. reused: the connection had served a request before.
func (r *route) send(req *http.Request, e *engine) (_ *http.Response, reused bool, err error) {
	ctx, cancel := context.WithCancel(req.Context())
	out := req.Clone(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GotConn: func(info httptrace.GotConnInfo) { reused = info.Reused },
	}))
	path := e.base.JoinPath(req.URL.EscapedPath())
	out.URL.Scheme, out.URL.Host, out.URL.Path, out.URL.RawPath = path.Scheme, path.Host, path.Path, path.RawPath
	out.Host = ""
	out.Body, out.GetBody, out.ContentLength, out.TransferEncoding = nil, nil, 0, nil
	if len(r.body) > 0 {
		out.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(r.body)), nil }
		out.Body, _ = out.GetBody()
		out.ContentLength = int64(len(r.body))
	}
	resp, err := r.front.client.RoundTrip(out)
	if err != nil {
		cancel()
		return nil, reused, err
	}
	a := &answer{front: r.front, engine: e, cancel: cancel, body: resp.Body}
	if err := a.first(); err != nil && err != io.EOF {
		_ = resp.Body.Close()
		cancel()
		return nil, reused, fmt.Errorf("the answer ended before its first byte: %w", err)
	}
	resp.Body = a
	return resp, reused, nil
}

// answer is the body of an engine's response, the start of which has arrived.
type answer struct {
	front  *Front
	engine *engine
	cancel context.CancelFunc
	body   io.ReadCloser
	start  []byte
	failed error // of the read that brought start
	once   sync.Once
}

// first reads until something has arrived, or returns why nothing has.
func (a *answer) first() error {
	buffer := make([]byte, 4096)
	for len(a.start) == 0 && a.failed == nil {
		n, err := a.body.Read(buffer)
		a.start, a.failed = buffer[:n], err
	}
	if len(a.start) > 0 {
		return nil
	}
	return a.failed
}

// Read returns the bytes as they arrive.
func (a *answer) Read(p []byte) (n int, err error) {
	if len(a.start) > 0 {
		n = copy(p, a.start)
		a.start = a.start[n:]
		return n, nil
	}
	if err = a.failed; err == nil {
		n, err = a.body.Read(p)
	}
	if err != nil && err != io.EOF && !errors.Is(err, context.Canceled) {
		a.front.pool.failed(a.engine, err, true)
	}
	return n, err
}

// Close ends the request and its load on the engine.
func (a *answer) Close() error {
	err := a.body.Close()
	a.once.Do(func() {
		a.cancel()
		a.front.pool.release(a.engine)
	})
	return err
}
