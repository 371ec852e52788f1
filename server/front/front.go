package front

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc/codes"

	"github.com/penstock-kv/penstock/internal/bearer"
	"github.com/penstock-kv/penstock/internal/options"
	"github.com/penstock-kv/penstock/internal/prefixset"
	"github.com/penstock-kv/penstock/internal/ratelog"
	"github.com/penstock-kv/penstock/internal/webmux"
)

// Engine is the address of an inference engine.
type Engine struct {
	// Name is the name in metrics and logs. Default: the URL. With a planner, the engine must have
	// this name, or host:port of the URL, at the planner.
	Name string
	// URL is the base URL, http or https.
	URL string
}

// Options are the options of a Front. Zeros are replaced by the defaults named here.
type Options struct {
	// Engines has at least one engine.
	Engines []Engine
	// EngineTLS is the configuration for engines with https. Nil means the system's default.
	EngineTLS *tls.Config
	// Tokens returns the accepted bearer tokens. The Authorization header of each request must have
	// one of them. If Tokens is nil or returns no token, every request is accepted. The header is
	// passed on to the engine in all cases.
	Tokens func() []string
	// MaxInFlight is the largest number of concurrent requests at an engine. Default 256.
	MaxInFlight int
	// MaxQueue is the largest number of requests that wait for an engine, default 1024. QueueWait
	// is the longest wait of such a request, default 10 s.
	MaxQueue  int
	QueueWait time.Duration
	// MaxAttempts is the largest number of engines to which a request is sent, one after the other.
	// Default 3.
	MaxAttempts int
	// LoadFactor limits the load (requests in progress) up to which an engine is chosen because it
	// has the prefix of a prompt: LoadFactor times the mean load of the engines. It must be at
	// least 1. Default 1.25.
	LoadFactor float64
	// PrefixBlocks is the capacity of the index of prompt prefixes of each engine, in blocks of 256
	// bytes of a prompt. Default 65536.
	PrefixBlocks int
	// MaxBodyBytes is the largest size of a request's body, default 32 MiB. BodyMemoryBytes is the
	// largest size of all bodies in memory together, default 1 GiB.
	MaxBodyBytes    int64
	BodyMemoryBytes int64
	// HealthInterval is the time between two polls of an engine, default 2 s. HealthTimeout bounds
	// the time of one poll, default 5 s.
	HealthInterval time.Duration
	HealthTimeout  time.Duration

	// Planner, if set, chooses a prefill and a decode engine for each completion, and the pool
	// chooses engines for all other requests.
	Planner Planner
	// Instance is the prefix of the ids of requests at the planner. It must be unique among the
	// clients of the planner.
	Instance string
	// OutputTokens is the expected number of output tokens of a request that sets no limit for its
	// output. Default 1024.
	OutputTokens int
	// TenantHeader is the name of the header with a request's tenant. If it is empty, requests have
	// no tenant.
	TenantHeader string
	// FirstToken is the time limit from the arrival of a request to its first token; 0 means no
	// limit. FirstTokenHeader is the name of a header in which a request may set its own limit, in
	// milliseconds.
	FirstToken       time.Duration
	FirstTokenHeader string
	// ReplanWait is the longest wait until the planner starts a request again whose engines have
	// failed before the first byte of the response. Default 30 s.
	ReplanWait time.Duration

	Logger   *slog.Logger
	Registry prometheus.Registerer
}

// EnsureDefaults sets the fields that are zero to their defaults.
func (o *Options) EnsureDefaults() {
	options.SetDefault(&o.MaxInFlight, 256)
	options.SetDefault(&o.MaxQueue, 1024)
	options.SetDefault(&o.QueueWait, 10*time.Second)
	options.SetDefault(&o.MaxAttempts, 3)
	options.SetDefault(&o.LoadFactor, 1.25)
	options.SetDefault(&o.PrefixBlocks, 1<<16)
	options.SetDefault(&o.MaxBodyBytes, 32<<20)
	options.SetDefault(&o.BodyMemoryBytes, 1<<30)
	options.SetDefault(&o.HealthInterval, 2*time.Second)
	options.SetDefault(&o.HealthTimeout, 5*time.Second)
	options.SetDefault(&o.OutputTokens, 1024)
	options.SetDefault(&o.ReplanWait, 30*time.Second)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Registry == nil {
		o.Registry = prometheus.NewRegistry()
	}
}

// Front is the handler of the OpenAI-compatible API.
type Front struct {
	opts    Options
	pool    *pool
	pooled  *pooled
	planned *planned // nil without a planner
	metrics *metrics
	mux     *webmux.Mux
	// refused logs the calls without the gateway's token. The kind is the message.
	refused *ratelog.Log[string]
	bodies  *semaphore.Weighted
	client  *http.Transport

	stop     context.CancelFunc
	watchers sync.WaitGroup
}

// New returns a Front and starts to poll the engines. An engine is healthy after its first successful
// poll. Close ends the polls. New fails only if the options are invalid.
func New(opts Options) (*Front, error) {
	opts.EnsureDefaults()
	engines, err := newEngines(opts)
	if err != nil {
		return nil, err
	}
	m := newMetrics(opts.Registry, engines)
	f := &Front{
		opts: opts, metrics: m, refused: ratelog.New[string](opts.Logger), bodies: semaphore.NewWeighted(opts.BodyMemoryBytes),
		pool: &pool{
			engines: engines, maxLoad: opts.MaxInFlight, maxWaiting: opts.MaxQueue, maxWait: opts.QueueWait,
			loadFactor: opts.LoadFactor, interval: opts.HealthInterval, log: opts.Logger, metrics: m,
		},
		client: &http.Transport{
			DialContext:         (&net.Dialer{Timeout: 5 * time.Second}).DialContext,
			TLSClientConfig:     opts.EngineTLS,
			TLSHandshakeTimeout: 5 * time.Second,
			MaxIdleConnsPerHost: opts.MaxInFlight,
			// uvicorn, the HTTP server of vLLM and SGLang, closes idle connections after 5 s. A
			// request on a connection that was just closed takes one more attempt.
			IdleConnTimeout: 3 * time.Second,
			// The response is passed through unchanged.
			DisableCompression: true,
		},
	}
	f.pooled = &pooled{front: f}
	if opts.Planner != nil {
		f.planned = newPlanned(f, engines)
	}
	f.mux = f.routes()
	ctx, cancel := context.WithCancel(context.Background())
	f.stop = cancel
	for _, e := range engines {
		f.watchers.Go(func() { f.pool.watch(ctx, e, f.poll) })
	}
	return f, nil
}

func newEngines(opts Options) ([]*engine, error) {
	if len(opts.Engines) == 0 {
		return nil, errors.New("front: Options.Engines is empty")
	}
	if opts.LoadFactor < 1 || math.IsNaN(opts.LoadFactor) {
		return nil, fmt.Errorf("front: LoadFactor is %v; must be at least 1", opts.LoadFactor)
	}
	if opts.BodyMemoryBytes < opts.MaxBodyBytes+bodyOverhead {
		return nil, fmt.Errorf("front: BodyMemoryBytes is %d; it must be at least MaxBodyBytes, %d, plus %d bytes", opts.BodyMemoryBytes, opts.MaxBodyBytes, bodyOverhead)
	}
	var engines []*engine
	for _, given := range opts.Engines {
		base, err := url.Parse(given.URL)
		if err != nil {
			return nil, fmt.Errorf("front: an engine's URL is invalid; give a URL such as http://10.0.0.1:8000: %w", errors.Unwrap(err)) // err itself contains the password
		}
		if base.Scheme != "http" && base.Scheme != "https" || base.Host == "" || base.User != nil || base.RawQuery != "" || base.Fragment != "" {
			return nil, fmt.Errorf("front: the URL of engine %q is invalid; give a URL such as http://10.0.0.1:8000", base.Redacted())
		}
		name, planned := strings.TrimSuffix(base.String(), "/"), base.Host
		if given.Name != "" {
			name, planned = given.Name, given.Name
		}
		if slices.ContainsFunc(engines, func(e *engine) bool { return e.name == name }) {
			return nil, fmt.Errorf("front: engine %s is in the list twice", name)
		}
		if base.Path == "" {
			base.Path = "/" // JoinPath would otherwise return a relative path
		}
		engines = append(engines, &engine{name: name, planned: planned, base: base, suspect: make(chan struct{}, 1), index: prefixset.New(opts.PrefixBlocks)})
	}
	return engines, nil
}

// Drain waits until the planner has ended the requests whose clients have received the whole
// response. If ctx ends first, it returns ctx's error. No request may be in progress.
func (f *Front) Drain(ctx context.Context) error {
	if f.planned == nil {
		return nil
	}
	return f.planned.drain(ctx)
}

// Close ends the polls of engines and the requests for which Drain waits. The HTTP server ends the
// other requests.
func (f *Front) Close() {
	if f.planned != nil {
		f.planned.close()
	}
	f.stop()
	f.watchers.Wait()
	f.client.CloseIdleConnections()
}

// Ready reports whether any engine is healthy.
func (f *Front) Ready() bool { return f.pool.anyHealthy() }

// EngineHealth returns the health of each engine by name.
func (f *Front) EngineHealth() map[string]bool {
	f.pool.mu.Lock()
	defer f.pool.mu.Unlock()
	health := make(map[string]bool)
	for _, e := range f.pool.engines {
		health[e.name] = e.healthy
	}
	return health
}

// ServeHTTP serves a request. It may be called concurrently.
func (f *Front) ServeHTTP(w http.ResponseWriter, r *http.Request) { f.mux.ServeHTTP(w, r) }

// Patterns returns the patterns of the paths that ServeHTTP serves.
func (f *Front) Patterns() []string { return f.mux.Patterns() }

func (f *Front) routes() *webmux.Mux {
	mux := new(webmux.Mux)
	for path, method := range map[string]string{"/v1/completions": http.MethodPost, "/v1/chat/completions": http.MethodPost, "/v1/models": http.MethodGet, "/v1/models/": http.MethodGet} {
		mux.HandleFunc(method+" "+path, f.serve)
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Allow", method)
			writeError(w, http.StatusMethodNotAllowed, "method_not_allowed", fmt.Sprintf("%s takes %s, not %s", r.URL.Path, method, r.Method))
		})
	}
	mux.HandleFunc("GET /health", f.health)
	mux.HandleFunc("/", notFound)
	return mux
}

func notFound(w http.ResponseWriter, r *http.Request) {
	writeError(w, http.StatusNotFound, "not_found", fmt.Sprintf("the gateway has no %s; it has /v1/completions, /v1/chat/completions, /v1/models and /health", r.URL.Path))
}

// leavesPath reports whether a path has a segment "." or "..". The multiplexer redirects such a path, unless the dots
// are percent-encoded. An engine, or a proxy in front of it, could take the path for one that the gateway does
// not have.
func leavesPath(path string) bool {
	return slices.ContainsFunc(strings.Split(path, "/"), func(s string) bool { return s == "." || s == ".." })
}

// health responds 200 if any engine is healthy, and 503 otherwise.
func (f *Front) health(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	if !f.Ready() {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"engines": f.EngineHealth()}) // an error means that the caller has disconnected
}

const (
	// bodyOverhead is the number of bytes of BodyMemoryBytes that a request takes in addition to
	// its body. So BodyMemoryBytes also bounds the number of requests.
	bodyOverhead = 16 << 10
	// noMemory is the error message when BodyMemoryBytes is used up.
	noMemory = "the requests in the gateway have taken all memory for bodies"
	// bodyTimeout is the longest time for the body of a request to arrive.
	bodyTimeout = time.Minute
	// callRefused is the message of a line of the audit log, as on storage nodes and planners.
	callRefused = "call refused"
)

// serve sends a request to an engine.
func (f *Front) serve(w http.ResponseWriter, r *http.Request) {
	start := time.Now()
	if leavesPath(r.URL.Path) {
		notFound(w, r)
		return
	}
	if !f.authorized(r) {
		const why = "the bearer token is missing or is not the gateway's"
		f.refused.Warn(callRefused, callRefused, "call", r.Pattern, "peer", r.RemoteAddr, "result", codes.Unauthenticated.String(), "refused", why)
		w.Header().Set("WWW-Authenticate", "Bearer")
		f.reject(w, rejectAuth, http.StatusUnauthorized, "invalid_api_key", why)
		return
	}
	size := f.opts.MaxBodyBytes
	if r.ContentLength >= 0 {
		size = min(size, r.ContentLength)
	}
	if !f.bodies.TryAcquire(size + bodyOverhead) {
		f.refuse(w, busy(rejectMemory, noMemory))
		return
	}
	defer func() { f.bodies.Release(size + bodyOverhead) }()
	body, ok := f.readBody(w, r)
	if !ok {
		return
	}
	f.bodies.Release(size - int64(len(body))) // for a body without Content-Length
	size = int64(len(body))
	req := &request{body: payload{body}, start: start, completion: r.Method == http.MethodPost}
	// Only the engine decodes a compressed body.
	if req.completion && r.Header.Get("Content-Encoding") == "" {
		var err error
		if req.fields, err = parseFields(body); err != nil {
			f.reject(w, rejectBody, http.StatusBadRequest, "invalid_json", "the body must be a JSON object: "+err.Error())
			return
		}
	}
	var to router = f.pooled
	if req.completion && f.planned != nil {
		to = f.planned
	}
	proxy := httputil.ReverseProxy{
		Rewrite: func(pr *httputil.ProxyRequest) {
			// ReverseProxy removes these headers and changes a query that it cannot parse.
			// Restore the headers and the query.
			for _, name := range []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"} {
				if values, ok := pr.In.Header[name]; ok {
					pr.Out.Header[name] = values
				}
			}
			pr.Out.URL.RawQuery = pr.In.URL.RawQuery
		},
		Transport: &transport{front: f, router: to, request: req},
		ErrorLog:  slog.NewLogLogger(f.opts.Logger.Handler(), slog.LevelDebug),
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			f.explain(w, r, err)
		},
	}
	proxy.ServeHTTP(w, r)
}

func (f *Front) authorized(r *http.Request) bool {
	return f.opts.Tokens == nil || bearer.Accepts(f.opts.Tokens(), r.Header.Get("Authorization"))
}

// readBody returns the whole body of a request. It returns false after it has sent an error
// response.
func (f *Front) readBody(w http.ResponseWriter, r *http.Request) ([]byte, bool) {
	tooLarge := func() {
		f.reject(w, rejectBody, http.StatusRequestEntityTooLarge, "request_too_large", fmt.Sprintf("the body has more than %d bytes, the gateway's maximum", f.opts.MaxBodyBytes))
	}
	if r.ContentLength > f.opts.MaxBodyBytes {
		w.Header().Set("Connection", "close") // the body is not read
		tooLarge()
		return nil, false
	}
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Now().Add(bodyTimeout)) // some writers do not support deadlines
	var body bytes.Buffer
	body.Grow(int(max(r.ContentLength, 0)))
	_, err := body.ReadFrom(http.MaxBytesReader(w, r.Body, f.opts.MaxBodyBytes))
	var limit *http.MaxBytesError
	switch {
	case err == nil:
		_ = control.SetReadDeadline(time.Time{})
		return body.Bytes(), true
	case errors.As(err, &limit):
		tooLarge()
	case errors.Is(err, os.ErrDeadlineExceeded):
		w.Header().Set("Connection", "close")
		f.reject(w, rejectBody, http.StatusRequestTimeout, "timeout", fmt.Sprintf("the body did not arrive within %v", bodyTimeout))
	default:
		f.reject(w, rejectGone, http.StatusBadRequest, "incomplete_body", "the body is incomplete: "+err.Error())
	}
	return nil, false
}

// refusal is an error response that the front sends itself, without an engine.
type refusal struct {
	reason  string // for the metric
	status  int
	code    string
	message string
	retry   bool          // the client may try again
	after   time.Duration // wait before the retry; 0: QueueWait
}

// Error returns the message.
func (r *refusal) Error() string { return r.message }

// busy returns a refusal for a full queue or full memory for bodies.
func busy(reason, message string) *refusal {
	return &refusal{reason: reason, status: http.StatusTooManyRequests, code: "rate_limit_exceeded", message: message, retry: true}
}

// explain responds to a request that no engine has served.
func (f *Front) explain(w http.ResponseWriter, r *http.Request, err error) {
	var own *refusal
	switch {
	case r.Context().Err() != nil:
		f.metrics.rejected.WithLabelValues(rejectGone).Inc() // the client has closed its connection
		w.WriteHeader(http.StatusBadGateway)
		return
	case errors.As(err, &own):
	case errors.Is(err, errQueueFull):
		own = busy(rejectQueue, err.Error())
	case errors.Is(err, errQueueWait):
		own = busy(rejectWait, err.Error())
	case errors.Is(err, errNoEngine):
		own = &refusal{reason: rejectEngines, status: http.StatusServiceUnavailable, code: "no_engine", message: err.Error(), retry: true}
	default:
		own = &refusal{reason: rejectEngines, status: http.StatusBadGateway, code: "engine_failed", message: "the engine failed before it answered: " + err.Error()}
	}
	f.refuse(w, own)
}

// refuse responds with a refusal.
func (f *Front) refuse(w http.ResponseWriter, r *refusal) {
	if r.retry {
		w.Header().Set("Retry-After", f.retryAfter(r.after))
	}
	f.reject(w, r.reason, r.status, r.code, r.message)
}

// retryAfter returns a time in whole seconds. For 0 it returns QueueWait: after that time, each
// request that waits at present has an engine or has been refused.
func (f *Front) retryAfter(after time.Duration) string {
	if after == 0 {
		after = f.opts.QueueWait
	}
	return strconv.Itoa(max(1, int(math.Ceil(after.Seconds()))))
}

func (f *Front) reject(w http.ResponseWriter, reason string, status int, code, message string) {
	f.metrics.rejected.WithLabelValues(reason).Inc()
	writeError(w, status, code, message)
}

// writeError responds with an error object of OpenAI's API.
func writeError(w http.ResponseWriter, status int, code, message string) {
	kind := "invalid_request_error"
	switch {
	case status == http.StatusTooManyRequests:
		kind = "rate_limit_error"
	case status >= 500:
		kind = "server_error"
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]any{"error": map[string]any{"message": message, "type": kind, "param": nil, "code": code}}) // an error means that the caller has disconnected
}

// poll requests an engine's health.
func (f *Front) poll(ctx context.Context, e *engine) error {
	ctx, cancel := context.WithTimeout(ctx, f.opts.HealthTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, e.base.JoinPath("/health").String(), nil)
	if err != nil {
		return err
	}
	resp, err := f.client.RoundTrip(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, _ = io.CopyN(io.Discard, resp.Body, 4096) // so that the connection can be reused
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("GET /health: %s", resp.Status)
	}
	return nil
}
