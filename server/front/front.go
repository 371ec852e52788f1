package front

import (
	"bytes"
	"context"
	"crypto/subtle"
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

	"github.com/penstock-kv/penstock/internal/options"
)

// Engine is where an inference engine is.
type Engine struct {
	// Name is that of metrics and logs; the URL. The planner has the same, or else the URL's
	// host:port.
	Name string
	// URL is the base URL, http or https.
	URL string
}

// Options are what a Front is made of. Zeros are replaced by the defaults named here.
type Options struct {
	// Engines are at least one.
	Engines []Engine
	// EngineTLS is for engines with https; nil is the system's default.
	EngineTLS *tls.Config
	// BearerToken must be in the Authorization header of each request; "" lets all in.
	// The header is passed on in both cases.
	BearerToken string
	// MaxInFlight is how many requests an engine serves at a time; 256.
	MaxInFlight int
	// MaxQueue is how many requests wait for an engine; 1024. QueueWait is for how long; 10 s.
	MaxQueue  int
	QueueWait time.Duration
	// MaxAttempts is how many engines a request is sent to; 3.
	MaxAttempts int
	// LoadFactor is the load, as a multiple of the mean, up to which an engine is chosen
	// for the prefix of a prompt; 1.25. It is at least 1.
	LoadFactor float64
	// PrefixBlocks is how many blocks of prompts, of 256 bytes, are remembered for each
	// engine; 65536.
	PrefixBlocks int
	// MaxBodyBytes bounds the body of a request; 32 MiB. BodyMemoryBytes bounds all bodies
	// together; 1 GiB.
	MaxBodyBytes    int64
	BodyMemoryBytes int64
	// HealthInterval is the time between two polls of an engine, 2 s. HealthTimeout is
	// how long an engine may take to answer one, 5 s.
	HealthInterval time.Duration
	HealthTimeout  time.Duration

	// Planner, if set, chooses a prefill and a decode engine for each completion, and the pool
	// chooses engines for all other requests.
	Planner Planner
	// Instance begins the IDs of requests at the planner. No other client of the planner has it.
	Instance string
	// OutputTokens is how many tokens a request is expected to generate that does not say; 1024.
	OutputTokens int
	// TenantHeader names the header of requests that has their tenant. "": requests have none.
	TenantHeader string
	// FirstToken is how long after the arrival of a request its first token is of use; 0: no
	// limit. FirstTokenHeader names the header with the same in milliseconds, for one request.
	FirstToken       time.Duration
	FirstTokenHeader string
	// ReplanWait is how long a request whose engines have failed before the first byte of the
	// answer waits for the planner to start it again; 30 s.
	ReplanWait time.Duration

	Logger   *slog.Logger
	Registry prometheus.Registerer
}

// EnsureDefaults fills in the defaults.
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
	mux     *http.ServeMux
	bodies  *semaphore.Weighted
	client  *http.Transport

	stop     context.CancelFunc
	watchers sync.WaitGroup
}

// New begins to poll the engines, none of which is healthy before it has answered.
// Close ends that. Errors are about the options.
func New(opts Options) (*Front, error) {
	opts.EnsureDefaults()
	engines, err := newEngines(opts)
	if err != nil {
		return nil, err
	}
	m := newMetrics(opts.Registry, engines)
	f := &Front{
		opts: opts, metrics: m, bodies: semaphore.NewWeighted(opts.BodyMemoryBytes),
		pool: &pool{
			engines: engines, maxLoad: opts.MaxInFlight, maxWaiting: opts.MaxQueue, maxWait: opts.QueueWait,
			loadFactor: opts.LoadFactor, interval: opts.HealthInterval, log: opts.Logger, metrics: m,
		},
		client: &http.Transport{
			DialContext:         (&net.Dialer{Timeout: 5 * time.Second}).DialContext,
			TLSClientConfig:     opts.EngineTLS,
			TLSHandshakeTimeout: 5 * time.Second,
			MaxIdleConnsPerHost: opts.MaxInFlight,
			// uvicorn, the HTTP server of vLLM and SGLang, closes idle connections after
			// 5 s. A request that meets the end of its connection is one more attempt.
			IdleConnTimeout: 3 * time.Second,
			// The answer is passed through as it comes.
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
		return nil, errors.New("front: no engine is given")
	}
	if opts.LoadFactor < 1 || math.IsNaN(opts.LoadFactor) {
		return nil, fmt.Errorf("front: LoadFactor is %v; must be at least 1", opts.LoadFactor)
	}
	if opts.BodyMemoryBytes < opts.MaxBodyBytes+bodyOverhead {
		return nil, fmt.Errorf("front: BodyMemoryBytes, %d, is less than MaxBodyBytes, %d, and %d bytes of a request's own", opts.BodyMemoryBytes, opts.MaxBodyBytes, bodyOverhead)
	}
	var engines []*engine
	for _, given := range opts.Engines {
		base, err := url.Parse(given.URL)
		if err != nil {
			return nil, fmt.Errorf("front: engine: want a URL such as http://10.0.0.1:8000: %w", errors.Unwrap(err)) // err itself has the password
		}
		if base.Scheme != "http" && base.Scheme != "https" || base.Host == "" || base.User != nil || base.RawQuery != "" || base.Fragment != "" {
			return nil, fmt.Errorf("front: engine %q: want a URL such as http://10.0.0.1:8000", base.Redacted())
		}
		name, planned := strings.TrimSuffix(base.String(), "/"), base.Host
		if given.Name != "" {
			name, planned = given.Name, given.Name
		}
		if slices.ContainsFunc(engines, func(e *engine) bool { return e.name == name }) {
			return nil, fmt.Errorf("front: engine %s is given twice", name)
		}
		if base.Path == "" {
			base.Path = "/" // JoinPath would make a relative path of it
		}
		engines = append(engines, &engine{name: name, planned: planned, base: base, suspect: make(chan struct{}, 1), index: newPrefixIndex(opts.PrefixBlocks)})
	}
	return engines, nil
}

// Drain waits until the planner has ended the requests that clients have the answers of. It
// returns ctx's error if that ends first. No request may be served any more.
func (f *Front) Drain(ctx context.Context) error {
	if f.planned == nil {
		return nil
	}
	return f.planned.drain(ctx)
}

// Close ends the polls of engines, and what Drain waits for. The HTTP server ends the requests.
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

// EngineHealth returns whether each engine is healthy, by its name.
func (f *Front) EngineHealth() map[string]bool {
	f.pool.mu.Lock()
	defer f.pool.mu.Unlock()
	health := make(map[string]bool)
	for _, e := range f.pool.engines {
		health[e.name] = e.healthy
	}
	return health
}

// ServeHTTP answers a request. It may be called concurrently.
func (f *Front) ServeHTTP(w http.ResponseWriter, r *http.Request) { f.mux.ServeHTTP(w, r) }

func (f *Front) routes() *http.ServeMux {
	mux := http.NewServeMux()
	for path, method := range map[string]string{"/v1/completions": http.MethodPost, "/v1/chat/completions": http.MethodPost, "/v1/models": http.MethodGet, "/v1/models/": http.MethodGet} {
		mux.HandleFunc(method+" "+path, f.serve)
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Allow", method)
			writeError(w, http.StatusMethodNotAllowed, "method_not_allowed", fmt.Sprintf("%s takes %s, not %s", r.URL.Path, method, r.Method))
		})
	}
	mux.HandleFunc("GET /health", f.health)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		writeError(w, http.StatusNotFound, "not_found", fmt.Sprintf("the gateway has no %s; it has /v1/completions, /v1/chat/completions, /v1/models and /health", r.URL.Path))
	})
	return mux
}

// health answers 200 if any engine is healthy, and else 503.
func (f *Front) health(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	if !f.Ready() {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"engines": f.EngineHealth()}) // an error: the caller has gone
}

const (
	// bodyOverhead is what a request takes of BodyMemoryBytes beside its body. It bounds
	// the number of requests.
	bodyOverhead = 16 << 10
	// noMemory is what clients read when it is used up.
	noMemory = "the requests in the gateway have taken all memory for bodies"
	// bodyTimeout is how long the body of a request may take to arrive.
	bodyTimeout = time.Minute
)

// serve passes a request to an engine.
func (f *Front) serve(w http.ResponseWriter, r *http.Request) {
	start := time.Now()
	if !f.authorized(r) {
		w.Header().Set("WWW-Authenticate", "Bearer")
		f.reject(w, rejectAuth, http.StatusUnauthorized, "invalid_api_key", "the bearer token is missing or is not the gateway's")
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
	f.bodies.Release(size - int64(len(body))) // of a body whose length was not given
	size = int64(len(body))
	req := &request{body: payload{body}, start: start, completion: r.Method == http.MethodPost}
	// A compressed body is for the engine to read.
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
			// ReverseProxy removes these headers, and changes a query that it cannot parse.
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
	if f.opts.BearerToken == "" {
		return true
	}
	given, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	return ok && subtle.ConstantTimeCompare([]byte(given), []byte(f.opts.BearerToken)) == 1
}

// readBody returns the whole body. If it cannot, it has answered.
func (f *Front) readBody(w http.ResponseWriter, r *http.Request) ([]byte, bool) {
	tooLarge := func() {
		f.reject(w, rejectBody, http.StatusRequestEntityTooLarge, "request_too_large", fmt.Sprintf("the body has more than %d bytes, the most that the gateway takes", f.opts.MaxBodyBytes))
	}
	if r.ContentLength > f.opts.MaxBodyBytes {
		w.Header().Set("Connection", "close") // the body is not read
		tooLarge()
		return nil, false
	}
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Now().Add(bodyTimeout)) // not all writers have deadlines
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

// refusal is an answer of the front in place of an engine's.
type refusal struct {
	reason  string // of the metric
	status  int
	code    string
	message string
	retry   bool // the client may come again: after a time, or 0: after the wait of the queue
	after   time.Duration
}

// Error returns the message.
func (r *refusal) Error() string { return r.message }

// busy is a refusal for lack of room.
func busy(reason, message string) *refusal {
	return &refusal{reason: reason, status: http.StatusTooManyRequests, code: "rate_limit_exceeded", message: message, retry: true}
}

// explain answers a request that no engine has answered.
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

// refuse answers with a refusal.
func (f *Front) refuse(w http.ResponseWriter, r *refusal) {
	if r.retry {
		w.Header().Set("Retry-After", f.retryAfter(r.after))
	}
	f.reject(w, r.reason, r.status, r.code, r.message)
}

// retryAfter returns a time in whole seconds. If it is 0, it returns the longest wait of the
// queue: by then each request that waits has an engine or was refused.
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

// writeError answers with an error object as OpenAI's API has it.
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
	_ = json.NewEncoder(w).Encode(map[string]any{"error": map[string]any{"message": message, "type": kind, "param": nil, "code": code}}) // an error: the caller has gone
}

// poll asks an engine for its health.
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
	_, _ = io.CopyN(io.Discard, resp.Body, 4096) // for the connection to be used again
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("GET /health: %s", resp.Status)
	}
	return nil
}
