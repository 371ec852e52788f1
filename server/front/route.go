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
	"sync/atomic"
	"time"
)

// router sends requests to engines.
type router interface {
	// route returns the response for the client after the first byte of its body has arrived. The
	// body is an *answer. out is the client's request as engines get it, without a body.
	// Front.explain converts errors to responses.
	route(out *http.Request, r *request) (*http.Response, error)
}

// request is a client's request that has passed the front's checks.
type request struct {
	body   payload
	fields fields // the members of a completion's body; nil if the body is compressed
	start  time.Time
	// completion is set if an engine runs the model for the request.
	completion bool
}

// transport passes a request to a router. A ReverseProxy uses it and passes the response on.
type transport struct {
	front   *Front
	router  router
	request *request
}

var _ http.RoundTripper = (*transport)(nil)

// RoundTrip returns the router's response and counts it.
func (t *transport) RoundTrip(out *http.Request) (*http.Response, error) {
	resp, err := t.router.route(out, t.request)
	if err != nil {
		return nil, err
	}
	m, name := t.front.metrics, resp.Body.(*answer).engine.name
	m.requests.WithLabelValues(name, strconv.Itoa(resp.StatusCode)).Inc()
	if t.request.completion && !unavailable(resp.StatusCode) {
		m.firstByte.WithLabelValues(name).Observe(time.Since(t.request.start).Seconds())
	}
	return resp, nil
}

// unavailable reports whether a status means that another engine may succeed.
func unavailable(status int) bool {
	return status == http.StatusBadGateway || status == http.StatusServiceUnavailable || status == http.StatusGatewayTimeout
}

// send sends a request to an engine. It returns the engine's response once the first byte of its body has
// arrived. The body of the response is an *answer.
//
// An engine may close an idle connection just when a request is sent on it. The request is then
// sent once more.
//
// If a process of an engine dies, the engine's server responds with errors until it ends too. So the
// error of an engine that is not healthy is a failure of the engine, not its response.
func (f *Front) send(out *http.Request, e *engine, body payload) (*http.Response, error) {
	resp, reused, err := f.sendOnce(out, e, body)
	if err != nil && reused && out.Context().Err() == nil {
		f.metrics.retries.WithLabelValues(e.name).Inc()
		resp, _, err = f.sendOnce(out, e, body)
	}
	if err == nil && failed(resp) {
		if why := f.poll(out.Context(), e); why != nil {
			_ = resp.Body.Close()
			return nil, fmt.Errorf("the engine responded with an error and is not healthy: %v", why) // without the type: this request has reached the engine
		}
	}
	return resp, err
}

// failed reports whether a response is an internal error of the engine: its status, or the first event
// of its stream.
func failed(resp *http.Response) bool {
	return resp.StatusCode == http.StatusInternalServerError || bytes.HasPrefix(resp.Body.(*answer).start, []byte(`data: {"error":`))
}

// sendOnce is send without the second attempt. reused reports whether the connection had served an
// earlier request.
func (f *Front) sendOnce(out *http.Request, e *engine, body payload) (_ *http.Response, reused bool, err error) {
	ctx, cancel := context.WithCancel(out.Context())
	req := out.Clone(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GotConn: func(info httptrace.GotConnInfo) { reused = info.Reused },
	}))
	path := e.base.JoinPath(out.URL.EscapedPath())
	req.URL.Scheme, req.URL.Host, req.URL.Path, req.URL.RawPath = path.Scheme, path.Host, path.Path, path.RawPath
	req.Host = ""
	req.Body, req.GetBody, req.ContentLength, req.TransferEncoding = nil, nil, 0, nil
	if size := body.size(); size > 0 {
		req.GetBody = func() (io.ReadCloser, error) { return body.open(), nil }
		req.Body = body.open()
		req.ContentLength = size
	}
	inFlight := f.metrics.inFlight.WithLabelValues(e.name)
	inFlight.Inc()
	end := sync.OnceFunc(func() {
		cancel()
		inFlight.Dec()
	})
	resp, err := f.client.RoundTrip(req)
	if err != nil {
		end()
		return nil, reused, err
	}
	a := &answer{front: f, engine: e, body: resp.Body, end: end}
	if err := a.first(); err != nil && err != io.EOF {
		_ = resp.Body.Close()
		end()
		return nil, reused, fmt.Errorf("the response ended before its first byte: %w", err)
	}
	resp.Body = a
	return resp, reused, nil
}

// answer is the body of an engine's response whose first bytes have arrived.
type answer struct {
	front  *Front
	engine *engine
	body   io.ReadCloser
	start  []byte
	failed error // the error of the read that filled start
	end    func()
	once   sync.Once

	// closed, if not nil, is called by the first Close with the error of the last Read: io.EOF if
	// the body was read to its end, nil if reading stopped earlier, otherwise the failure.
	closed func(error)
	last   error
	// tail has the last bytes that Read has returned, and whole is set while they end the last event of a stream.
	tail  []byte
	whole atomic.Bool
}

// lastEvent is the last event of a stream of completions, without the empty line that ends it.
const lastEvent = "\ndata: [DONE]"

// passed records that Read returns bytes of the body.
func (a *answer) passed(p []byte) {
	const most = len(lastEvent) + len("\r\n\r\n")
	a.tail = append(a.tail, p[max(0, len(p)-most):]...)
	a.tail = append(a.tail[:0], a.tail[max(0, len(a.tail)-most):]...)
	a.whole.Store(bytes.HasSuffix(a.tail, []byte("\n")) && bytes.HasSuffix(bytes.TrimRight(a.tail, "\r\n"), []byte(lastEvent)))
}

// first reads until the first bytes of the body have arrived. If the body ends or fails before
// that, first returns the error of the read (io.EOF for an empty body).
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
		a.passed(p[:n])
		return n, nil
	}
	if err = a.failed; err == nil {
		n, err = a.body.Read(p)
	}
	a.passed(p[:n])
	a.last = err
	if err != nil && err != io.EOF && !errors.Is(err, context.Canceled) {
		a.front.pool.failed(a.engine, err, true)
	}
	return n, err
}

// Close ends the request to the engine.
func (a *answer) Close() error {
	err := a.body.Close()
	a.once.Do(func() {
		a.end()
		if a.closed != nil {
			a.closed(a.last)
		}
	})
	return err
}
