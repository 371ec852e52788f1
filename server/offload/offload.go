package offload

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/client/gateway"
	"github.com/penstock-kv/penstock/client/relay"
	"github.com/penstock-kv/penstock/dualpath/prfaas"
	"github.com/penstock-kv/penstock/kv"
)

// Storage is a client of one datacenter's storage nodes. *client.Store implements it.
type Storage interface {
	Match(ctx context.Context, r client.MatchRequest) (client.MatchResult, error)
}

// Options of an Offload.
type Options struct {
	// Gateway serves the requests. Local and remote storage must have the same definition of
	// Namespace, which is the Namespace of the Gateway. Both fields are required.
	Gateway   *gateway.Gateway
	Namespace kv.Namespace
	// Shards are the namespaces of the other shards, if a block of the prompt has several: with tensor
	// parallelism each rank stores a part of the heads. They have the block ids and epochs of
	// Namespace.
	Shards []kv.Namespace
	// Here finds blocks in local and There in remote storage. Link copies blocks from remote to local
	// storage. The caller closes all three. All are required.
	Here, There Storage
	Link        *relay.Relay
	// URL is the base of the OpenAI-compatible API of the remote engines, such as
	// http://10.1.0.1:7440. Required.
	URL *url.URL
	// Model is the name of the model in requests to URL. Default: the first model that /v1/models
	// lists.
	Model string
	// TokenSource, if not nil, returns the bearer token that a request to URL is sent with.
	TokenSource func() string
	// Router has the threshold in tokens, and Abundant, which means that the link has spare
	// bandwidth. With Abundant a prefix that only remote storage has is copied too.
	Router prfaas.Router
	// InFlight is the largest number of concurrent remote prefills. Default 64.
	InFlight int
	// Timeout is the longest time for the remote prefill and the copy of one request. Default 5 s.
	// The QueueWait of the front must be longer, because QueueWait begins with the arrival of the
	// request.
	Timeout time.Duration
	// BacklogMax limits the backlog of the link: the time that the link needs for the bytes that
	// wait for it. Above this limit no remote prefill begins. Default 2 s.
	BacklogMax time.Duration
	// DownFor is the time after a failure during which no remote request is made. Default 5 s.
	DownFor time.Duration
	// Client sends the requests to URL. Default: a client with http.DefaultTransport and no time
	// limit.
	Client *http.Client
	// Logger receives the log; nil: nothing is logged. Registry, if not nil, receives the metrics.
	Logger   *slog.Logger
	Registry prometheus.Registerer
}

// EnsureDefaults sets the fields that are zero to their defaults.
func (o *Options) EnsureDefaults() {
	if o.InFlight == 0 {
		o.InFlight = 64
	}
	if o.Timeout == 0 {
		o.Timeout = 5 * time.Second
	}
	if o.BacklogMax == 0 {
		o.BacklogMax = 2 * time.Second
	}
	if o.DownFor == 0 {
		o.DownFor = 5 * time.Second
	}
	if o.Client == nil {
		o.Client = &http.Client{}
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Registry == nil {
		o.Registry = prometheus.NewRegistry()
	}
}

// Validate returns an error that names the first field out of its range.
func (o *Options) Validate() error {
	switch {
	case o.Gateway == nil || o.Here == nil || o.There == nil || o.Link == nil || o.URL == nil:
		return errors.New("offload: Gateway, Here, There, Link and URL are required")
	case !(o.Router.Threshold >= 0):
		return fmt.Errorf("offload: the threshold is %v tokens; it must not be negative", o.Router.Threshold)
	case o.InFlight < 1 || o.Timeout <= 0 || o.BacklogMax <= 0 || o.DownFor <= 0:
		return fmt.Errorf("offload: InFlight is %d, Timeout %v, BacklogMax %v, DownFor %v; all must be above 0", o.InFlight, o.Timeout, o.BacklogMax, o.DownFor)
	}
	return nil
}

// Offload serves requests through a gateway, some of them after a remote prefill. Its methods may
// be called concurrently.
type Offload struct {
	opts    Options
	metrics *metrics
	slots   chan struct{} // has an element for each request that is prefilled remotely

	mu        sync.Mutex
	downUntil time.Time
	model     string // Options.Model, or the first model that URL listed
}

// New returns an Offload. It needs no Close.
func New(o Options) (*Offload, error) {
	o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	f := &Offload{opts: o, slots: make(chan struct{}, o.InFlight), model: o.Model}
	f.metrics = newMetrics(f)
	return f, nil
}

// Serve serves a request as gateway.Gateway.Serve does.
func (f *Offload) Serve(ctx context.Context, r gateway.Request) iter.Seq2[gateway.Event, error] {
	return func(yield func(gateway.Event, error) bool) {
		if r.Tokens != nil && r.Salts == nil { // the remote engines get the tokens only
			begin := time.Now()
			f.prefill(ctx, r)
			if r.FirstToken > 0 {
				r.FirstToken = max(1, r.FirstToken-time.Since(begin)) // the Gateway counts FirstToken from its own call of Serve
			}
		}
		for ev, err := range f.opts.Gateway.Serve(ctx, r) {
			if !yield(ev, err) {
				return
			}
		}
	}
}

// BlockTokens returns the number of tokens in a block of the namespace.
func (f *Offload) BlockTokens() int { return f.opts.Gateway.BlockTokens() }

// The outcomes of requests, for metrics.
const (
	outcomeLocal   = "local"   // prefilled locally, because of the threshold
	outcomeBusy    = "busy"    // prefilled locally, because the link or the remote datacenter was busy or down
	outcomeRemote  = "remote"  // prefilled remotely
	outcomeFetched = "fetched" // prefilled locally, after its prefix was copied
	outcomeFailed  = "failed"  // prefilled locally, because the remote datacenter failed
)

// prefill makes the remote engines prefill a prompt if the router decides so, and copies the KV to
// local storage.
func (f *Offload) prefill(ctx context.Context, r gateway.Request) {
	begin := time.Now()
	outcome, err := f.try(ctx, r)
	f.metrics.requests.WithLabelValues(outcome).Inc()
	if outcome == outcomeRemote || outcome == outcomeFetched {
		f.metrics.seconds.Observe(time.Since(begin).Seconds())
	}
	if err != nil && ctx.Err() == nil {
		f.down()
		f.opts.Logger.Warn("a prompt was not prefilled in the other datacenter; this cluster prefills it", "request", r.ID, "tokens", len(r.Tokens), "err", err)
	}
}

func (f *Offload) try(ctx context.Context, r gateway.Request) (outcome string, err error) {
	tokens := r.Tokens
	if r, err = f.opts.Gateway.Prepare(r); err != nil {
		return outcomeLocal, nil // Serve returns the error
	}
	bt := f.opts.Namespace.Geometry.BlockTokens
	// The local cluster computes at least one token, because its logits give the first token of the
	// output.
	ids := r.IDs[:(r.Prompt-1)/bt]
	here, err := f.opts.Gateway.Match(ctx, ids)
	if err != nil {
		return outcomeLocal, nil // Serve returns the error
	}
	if !f.opts.Router.Abundant && float64(r.Prompt-here.Tokens) <= f.opts.Router.Threshold {
		return outcomeLocal, nil
	}
	ctx, cancel := context.WithTimeout(ctx, f.opts.Timeout)
	defer cancel()
	if !f.up() {
		return outcomeBusy, nil
	}
	there, err := f.whole(ctx, ids, here.Epoch)
	if err != nil {
		return outcomeFailed, err
	}
	route, err := f.opts.Router.Route(prfaas.Request{
		Total: r.Prompt, Cached: here.Tokens, Remote: []prfaas.Cluster{{Cached: there * bt}},
	})
	if err != nil {
		return outcomeFailed, err
	}
	switch {
	case route.Side == prfaas.Remote:
	case route.FetchFrom >= 0:
		if _, err := f.copy(ctx, ids[:route.Prefix/bt], here); err != nil {
			return outcomeFailed, err
		}
		return outcomeFetched, nil
	default:
		return outcomeLocal, nil
	}
	select {
	case f.slots <- struct{}{}:
		defer func() { <-f.slots }()
	default:
		return outcomeBusy, nil
	}
	if err := f.remote(ctx, tokens, ids, here, there); err != nil {
		return outcomeFailed, err
	}
	return outcomeRemote, nil
}

// remote makes the remote engines prefill a prompt, unless remote storage has the prompt already.
// Then it copies the prompt's blocks to local storage.
func (f *Offload) remote(ctx context.Context, tokens []kv.Token, ids []kv.BlockID, here client.MatchResult, there int) error {
	if there < len(ids) {
		if err := f.complete(ctx, tokens); err != nil {
			return err
		}
		var err error
		if there, err = f.stored(ctx, ids, here.Epoch); err != nil {
			return err
		}
	}
	copied, err := f.copy(ctx, ids[:there], here)
	if err != nil {
		return err
	}
	if copied < len(ids) {
		return fmt.Errorf("blocks %d to %d of the prompt are not stored", copied, len(ids)-1)
	}
	return nil
}

// shards returns the namespaces of all shards.
func (f *Offload) shards() []kv.Namespace {
	return append([]kv.Namespace{f.opts.Namespace}, f.opts.Shards...)
}

// whole returns the number of leading blocks that remote storage has in all shards.
func (f *Offload) whole(ctx context.Context, ids []kv.BlockID, epoch kv.Epoch) (int, error) {
	shards := f.shards()
	// With window or state groups a part of a match need not be one, so after a shorter match all other
	// shards are matched again.
	for i, agreed := 0, 0; agreed < len(shards); i, agreed = (i+1)%len(shards), agreed+1 {
		m, err := f.opts.There.Match(ctx, client.MatchRequest{Namespace: shards[i], IDs: ids, Epoch: epoch})
		if err != nil {
			return 0, fmt.Errorf("remote storage: %w", err)
		}
		if m.Blocks < len(ids) {
			ids, agreed = ids[:m.Blocks], 0
		}
	}
	return len(ids), nil
}

// copy copies the blocks ids, all of which remote storage has, to local storage, which has here in the
// first shard. It returns the number of leading blocks that local storage has then in all shards.
func (f *Offload) copy(ctx context.Context, ids []kv.BlockID, here client.MatchResult) (int, error) {
	shards := f.shards()
	copied := make([]int, len(shards))
	// All shards at once, so that the backlog of the link has the bytes of all.
	g, ctx := errgroup.WithContext(ctx)
	for i, ns := range shards {
		g.Go(func() error {
			first := here.Blocks
			if i > 0 {
				m, err := f.opts.Here.Match(ctx, client.MatchRequest{Namespace: ns, IDs: ids, Epoch: here.Epoch})
				if err != nil {
					return fmt.Errorf("namespace %q in local storage: %w", ns.Name, err)
				}
				first = m.Blocks
			}
			done, err := f.opts.Link.Copy(ctx, ns, here.Epoch, ids, first)
			copied[i] = done.Blocks
			return err
		})
	}
	err := g.Wait()
	return slices.Min(copied), err
}

const (
	// storeEvery is the interval at which remote storage is polled for the blocks of a prompt.
	// Engines store the blocks after their response.
	storeEvery = 20 * time.Millisecond
)

// stored waits until remote storage has all blocks. If ctx ends first, it returns the number of
// blocks that remote storage has.
func (f *Offload) stored(ctx context.Context, ids []kv.BlockID, epoch kv.Epoch) (int, error) {
	t := time.NewTicker(storeEvery)
	defer t.Stop()
	for {
		n, err := f.whole(ctx, ids, epoch)
		if err == nil && n == len(ids) {
			return n, nil
		}
		select {
		case <-t.C:
		case <-ctx.Done():
			return 0, fmt.Errorf("remote storage has %d of %d blocks of the prompt: %w", n, len(ids), context.Cause(ctx))
		}
	}
}

// up reports whether a remote request may be made: the link between the datacenters and the remote
// datacenter are neither down nor busy.
func (f *Offload) up() bool {
	if f.opts.Link.Backlog() > f.opts.BacklogMax || len(f.slots) == cap(f.slots) {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return time.Now().After(f.downUntil)
}

// down records a failed remote request.
func (f *Offload) down() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.downUntil = time.Now().Add(f.opts.DownFor)
}
