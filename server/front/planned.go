package front

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/client/gateway"
	"github.com/penstock-kv/penstock/kv"
)

// Planner serves requests on a prefill/decode cluster. *gateway.Gateway implements it.
type Planner interface {
	Serve(ctx context.Context, r gateway.Request) iter.Seq2[gateway.Event, error]
	BlockTokens() int
}

const (
	// confirmWait is the longest wait for the planner's Done after the client has received the
	// whole response.
	confirmWait = 30 * time.Second
	// maxConfirming is the largest number of requests that wait for Done. The planner aborts
	// further requests.
	maxConfirming = 1024
)

// planned sends a request to the prefill engine and the decode engine that the planner has chosen.
// The client gets the decode engine's response.
type planned struct {
	front   *Front
	planner Planner
	engines map[string]*engine // by the planner's name
	models  models
	// pauses has the models whose chats with images are not planned now. renderRefused is set from an engine's refusal of renderPath
	// until an engine's answer. The refusal is logged once.
	pauses        pauses
	renderRefused atomic.Bool

	numbers atomic.Uint64 // of requests
	// confirming has an element for each request that waits only for the planner's Done.
	confirming  chan struct{}
	confirmWait time.Duration
	// unknown has the names of engines that the planner has chosen and that are not in
	// Options.Engines. Each is logged once.
	unknown sync.Map

	ctx  context.Context // the context of all sessions
	stop context.CancelFunc

	mu       sync.Mutex
	closing  bool           // no further session may begin
	sessions sync.WaitGroup // Add is called with mu held and closing unset
}

var _ router = (*planned)(nil)

func newPlanned(f *Front, engines []*engine) *planned {
	r := &planned{
		front: f, planner: f.opts.Planner, engines: make(map[string]*engine), models: models{front: f},
		confirming: make(chan struct{}, maxConfirming), confirmWait: confirmWait,
	}
	for _, e := range engines {
		r.engines[e.planned] = e
	}
	r.ctx, r.stop = context.WithCancel(context.Background())
	return r
}

// drain waits for the sessions, until ctx ends.
func (r *planned) drain(ctx context.Context) error {
	r.mu.Lock()
	r.closing = true
	r.mu.Unlock()
	ended := make(chan struct{})
	go func() {
		r.sessions.Wait()
		close(ended)
	}()
	select {
	case <-ended:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("front: some requests have not ended: %w", ctx.Err())
	}
}

// close ends the sessions.
func (r *planned) close() {
	r.stop()
	_ = r.drain(context.Background()) // drain returns an error only if its context ends
}

// route serves one completion request.
func (r *planned) route(out *http.Request, req *request) (*http.Response, error) {
	resp, reason, err := r.serveAny(out, req)
	if reason != "" {
		r.front.metrics.unplanned.WithLabelValues(reason).Inc()
	} else if err != nil {
		r.front.metrics.planned.WithLabelValues(outcomeOf(out.Context(), err)).Inc()
	}
	return resp, err
}

// serveAny serves a request without a plan if its model or its prompt requires it. reason is then the
// reason.
func (r *planned) serveAny(out *http.Request, req *request) (resp *http.Response, reason string, err error) {
	if out.Header.Get("Content-Encoding") != "" {
		return nil, "", unsupported("Content-Encoding", "the gateway does not read compressed bodies")
	}
	params, err := paramsOf(req.fields)
	if err != nil {
		return nil, "", err
	}
	media, err := mediaOf(out, req.fields)
	if err != nil {
		return nil, "", err
	}
	model, adapter := modelOf(req.fields), ""
	switch {
	case wantsPromptLogprobs(req.fields, isChat(out)):
		reason = unplannedLogprobs
	case set(req.fields, "use_beam_search"):
		reason = unplannedBeams
	case media.parts > 0 && (r.pauses.paused(model) || checkFields(req.fields) != nil):
		reason = unplannedMedia
	default:
		reason, adapter = r.models.unplanned(out, req.fields)
	}
	if reason == "" {
		resp, err = r.serve(out, req, params, adapter, media)
		var refused *refusal
		var notRendered *notRenderedError
		failed := errors.As(err, &refused) && refused.code == refusedByPlanner
		switch {
		case errors.As(err, &notRendered):
			reason = unplannedMedia
		case failed && media.parts > 0:
			// The engines may number images, or an image at a URL may have changed.
			r.pauses.pause(model)
			reason = unplannedMedia
		case failed && adapter != "":
			// The adapter's files, or the engines' options of LoRA, may differ between the engines or from
			// those of the identity.
			reason = unplannedAdapter
		case failed && isChat(out) && r.pauses.paused(""):
			// The tokens came from /tokenize, and the engines may have others.
			reason = unplannedTokens
		default:
			return resp, "", err
		}
		if failed {
			r.models.setIdentity(model, identity{})
		}
	}
	resp, err = r.front.pooled.route(out, req)
	return resp, reason, err
}

// serve serves a request with a plan. adapter is the identity of its LoRA adapter, or empty.
func (r *planned) serve(out *http.Request, req *request, params fields, adapter string, m media) (*http.Response, error) {
	output, err := outputTokens(req.fields, isChat(out), r.front.opts.OutputTokens)
	if err != nil {
		return nil, err
	}
	ask := gateway.Request{Output: output, Deadline: r.front.opts.QueueWait}
	if err := r.class(&ask, out.Header, req); err != nil {
		return nil, err
	}
	var tokens []kv.Token
	var images []image
	if m.parts > 0 {
		tokens, images, err = r.render(out, req, m)
	} else {
		var resp *http.Response
		if tokens, resp, err = r.tokensOf(out, req); resp != nil {
			r.front.metrics.planned.WithLabelValues(outcomeEngine).Inc()
			return resp, nil
		}
	}
	if err != nil {
		return nil, err
	}
	if ask.Salts, err = saltsOf(req.fields, adapter, images, r.planner.BlockTokens()); err != nil {
		return nil, err
	}
	s := &session{
		router: r, out: out, fields: req.fields, params: params, id: r.front.opts.Instance + "." + strconv.FormatUint(r.numbers.Add(1), 10),
		events: make(chan gateway.Event), outcomes: make(chan outcome), over: make(chan struct{}),
		reply: make(chan reply, 1), closed: make(chan error, 1), gone: out.Context().Done(), submitted: time.Now(), prompt: len(tokens),
	}
	r.mu.Lock()
	if r.closing {
		r.mu.Unlock()
		return nil, errClosing
	}
	r.sessions.Add(1)
	r.mu.Unlock()
	s.ctx, s.cancel = context.WithCancel(r.ctx)
	ask.ID, ask.Tokens = s.id, tokens
	if ask.FirstToken > 0 {
		ask.FirstToken = max(ask.FirstToken-time.Since(req.start), time.Millisecond)
	}
	s.parts.Go(func() { s.follow(ask) })
	go func() {
		defer r.sessions.Done()
		s.run()
	}()
	first := <-s.reply
	return first.resp, first.err
}

// errClosing: the front is closing.
var errClosing = &refusal{reason: rejectPlanner, status: http.StatusServiceUnavailable, code: "shutting_down", message: "the gateway is shutting down", retry: true}

// The outcomes of a request on a cluster, for metrics.
const (
	outcomeDone        = "done"        // the client has the response, and the planner has ended the request
	outcomeUnconfirmed = "unconfirmed" // the client has the response, but the planner did not end the request in time
	outcomeEngine      = "engine"      // an engine has refused the request
	outcomeRefused     = "refused"     // the gateway responded with 4xx
	outcomeFailed      = "failed"      // the gateway responded with 5xx
	outcomeCut         = "cut"         // the response ended early
	outcomeGone        = "gone"        // the client has disconnected
)

// outcomeOf returns the outcome of a request that got an error.
func outcomeOf(ctx context.Context, err error) string {
	var own *refusal
	switch {
	case ctx.Err() != nil:
		return outcomeGone
	case errors.As(err, &own) && own.status < 500, errors.Is(err, errQueueFull), errors.Is(err, errQueueWait):
		return outcomeRefused
	}
	return outcomeFailed
}

// transferField is the request field that engines pass to their KV connector. transferKey is the
// member of this field's value that the gateway sets.
const (
	transferField = "kv_transfer_params"
	transferKey   = "penstock"
)

// paramsOf returns the members of the client's own kv_transfer_params.
func paramsOf(f fields) (fields, error) {
	given := f.get(transferField)
	if given == nil {
		return nil, nil
	}
	if given[0] != '{' {
		return nil, invalid(transferField, "want an object")
	}
	params, err := membersOf(given)
	if err != nil {
		return nil, invalid(transferField, err.Error())
	}
	if len(params.only(transferKey)) > 0 {
		return nil, invalid(transferField+"."+transferKey, "it is the gateway's to set; leave it out")
	}
	return params, nil
}

// attemptParams is the value of transferKey.
type attemptParams struct {
	Attempt string `json:"attempt"`
	Epoch   uint64 `json:"epoch"`
}

// bodies returns the bodies of the requests to both engines of an attempt.
func bodies(f, params fields, attempt attemptParams) (prefill, decode payload) {
	own, _ := json.Marshal(attempt) // a string and a number can always be encoded
	transfer := edit{transferField, bytes.Join(params.edited(edit{transferKey, own}), nil)}
	edits := []edit{
		transfer, {"max_tokens", []byte("1")}, {"min_tokens", nil}, {"stream", []byte("false")}, {"stream_options", nil}, {"n", []byte("1")},
	}
	if f.get("max_completion_tokens") != nil {
		edits = append(edits, edit{"max_completion_tokens", []byte("1")})
	}
	return f.edited(edits...), f.edited(transfer)
}

// refusedByPlanner is the code of a refusal for which the planner has no reason of its own, such as the
// failure of every attempt.
const refusedByPlanner = "planner_refused"

// refusalOf returns the response for a request that failed at the planner or at storage.
func (r *planned) refusalOf(err error) error {
	own := &refusal{reason: rejectPlanner, message: err.Error()}
	var refused *gateway.RefusedError
	switch {
	case errors.Is(err, client.ErrRequest):
		own.status, own.code = http.StatusBadRequest, "invalid_request"
	case !errors.As(err, &refused):
		if status.Code(err) == codes.ResourceExhausted {
			return busy(rejectPlanner, err.Error())
		}
		own.status, own.code, own.retry = http.StatusServiceUnavailable, "planner_failed", true
		r.front.opts.Logger.Warn("a request failed at the planner or in storage", "err", err)
	case refused.Refusal == gateway.Busy:
		return busy(rejectPlanner, err.Error())
	case refused.Refusal == gateway.Late:
		own.reason, own.status, own.code, own.retry, own.after = rejectLate, http.StatusTooManyRequests, "first_token_late", true, refused.RetryAfter
	case refused.Refusal == gateway.TooLong:
		own.status, own.code = http.StatusBadRequest, "context_length_exceeded"
	case refused.Refusal == gateway.Invalid:
		own.status, own.code = http.StatusBadRequest, "invalid_request"
	case refused.Refusal == gateway.OldWeights:
		own.status, own.code, own.retry = http.StatusServiceUnavailable, "weights_changed", true
	default:
		own.status, own.code = http.StatusServiceUnavailable, refusedByPlanner
	}
	return own
}

// enginesOf returns the engines that the planner has chosen.
func (r *planned) enginesOf(ev gateway.Event) (prefill, decode *engine, err error) {
	prefill, decode = r.engines[ev.Prefill], r.engines[ev.Decode]
	if prefill != nil && decode != nil {
		return prefill, decode, nil
	}
	r.front.metrics.unknownEngines.Inc()
	known := strings.Join(slices.Sorted(maps.Keys(r.engines)), ", ")
	message := fmt.Sprintf("the planner has chosen the engines %s and %s, and the gateway has %s: give it each engine of the cluster as --engine NAME=URL, with the planner's name", ev.Prefill, ev.Decode, known)
	for _, name := range []string{ev.Prefill, ev.Decode} {
		if r.engines[name] == nil {
			if _, logged := r.unknown.LoadOrStore(name, true); !logged {
				r.front.opts.Logger.Error("the planner chose an engine that the gateway does not have; add it with --engine NAME=URL", "engine", name, "known", known)
			}
		}
	}
	return nil, nil, &refusal{reason: rejectEngines, status: http.StatusBadGateway, code: "unknown_engine", message: message}
}
