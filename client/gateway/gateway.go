package gateway

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"math"
	"sync"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
)

// Storage is the client of the storage nodes. *client.Store implements it.
type Storage interface {
	Match(ctx context.Context, r client.MatchRequest) (client.MatchResult, error)
	Namespace(ctx context.Context, name string) (kv.Namespace, error)
}

// Options of a Gateway.
type Options struct {
	// Namespace has the KV of the model that the engines serve.
	Namespace kv.Namespace
	// Store finds cached prefixes. Planner is a connection to the planner. Both are required. The
	// Gateway does not close them.
	Store   Storage
	Planner grpc.ClientConnInterface
	// Epoch, if not 0, is the version of the weights for all requests. It must be live in the
	// namespace. All requests are computed and stored with these weights, even if newer weights
	// exist. With 0, a request begins with the newest epoch that the storage nodes have, and the
	// planner may plan it again with newer weights.
	Epoch kv.Epoch
}

// Gateway serves requests. Its methods may be called concurrently.
type Gateway struct {
	opts  Options
	chain kv.Chain

	mu sync.Mutex
	// epoch is the newest epoch that a storage node or a Started update has reported; 0: use the
	// epoch of Options.Namespace.
	epoch  kv.Epoch
	caches caches
}

// New returns a gateway, which needs no Close.
func New(opts Options) (*Gateway, error) {
	if opts.Store == nil || opts.Planner == nil {
		return nil, errors.New("gateway: Store and Planner are required")
	}
	chain, err := opts.Namespace.Chain()
	if err != nil {
		return nil, fmt.Errorf("gateway: namespace %q: %w", opts.Namespace.Name, err)
	}
	return &Gateway{opts: opts, chain: chain}, nil
}

// BlockTokens returns the number of tokens in a block of the namespace.
func (g *Gateway) BlockTokens() int { return g.opts.Namespace.Geometry.BlockTokens }

// Request is a prompt to be served.
type Request struct {
	// ID identifies the request: 1 to 256 bytes. It must be unique among the running requests.
	ID string
	// Tokens are the prompt. Instead of Tokens, Prompt and IDs may be set: the number of the
	// prompt's tokens, and the chained ids of the prompt's full blocks, which may continue with the
	// ids of the output's blocks.
	Tokens []kv.Token
	Prompt int
	IDs    []kv.BlockID
	// Salts are the data, besides tokens and weights, on which the KV of Tokens depends. Their blocks
	// must ascend. The engines must compute the ids with the same salts.
	Salts []Salt
	// Output is the number of tokens expected to be generated. The planner reserves
	// device memory for them.
	Output int
	// Deadline, if not 0, is the longest time from the submission of the request until its engines
	// are chosen. After this time the planner refuses the request.
	Deadline time.Duration
	// Tenant is the name of the tenant, at most 256 bytes. Tenants with requests in the queue share
	// the engines in proportion to the shares that the planner has for these tenants. Requests of a
	// higher Priority go first, whatever their tenant.
	Tenant   string
	Priority int32
	// FirstToken, if not 0, is the longest useful time from the call of Serve to the first token.
	// The planner refuses the request (Late) when it finds that the first token would be later.
	FirstToken time.Duration
	// Resident lists decode engines, at most 64, that have the beginning of the prompt in device
	// memory. If it is empty, the gateway lists the engines with a prefix cache
	// (leader.Member.PrefixCacheBlocks) to which it has sent a prompt with the same beginning.
	Resident []Resident
	// Extra, if set, is JSON that both engines get (Payload.Extra).
	Extra json.RawMessage
}

// Salt is data on which the KV of a prompt depends from a block on. It is hashed in front of that block
// (kv.Chain.Salt).
type Salt struct {
	Block int
	Extra []byte
}

// Resident is a decode engine and the number of leading tokens of the prompt that it holds.
type Resident struct {
	Engine string
	Tokens int
}

// Kind is the kind of an Event.
type Kind uint8

const (
	// Matched: the cached prefix is known (Hit, Epoch).
	Matched Kind = iota + 1
	// Waiting: the planner cannot be reached (Reason). The gateway submits the request again until
	// the planner accepts it. Meanwhile the engines continue the request.
	Waiting
	// Accepted: the planner has the request.
	Accepted
	// Started: the planner has chosen both engines, which begin to read (Prefill, Decode, Attempt,
	// Epoch, ReadByPrefill, ReadByDecode). Another Started follows each Replanned.
	Started
	// Prefilled: the decode engine has the prompt's KV and the first token. There is at most one
	// Prefilled for each Started, and none if the report of the end of decode reached the planner
	// first.
	Prefilled
	// Replanned: the planner plans the request again, because an engine was lost or
	// failed, or because the weights have changed (Reason).
	Replanned
	// Done: the decode engine has completed the output.
	Done
)

var kindNames = [...]string{"", "matched", "waiting", "accepted", "started", "prefilled", "replanned", "done"}

// String returns the kind's name.
func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return fmt.Sprintf("kind %d", uint8(k))
}

// Event is one step of a request. Fields that the comment of its Kind does not name are zero.
type Event struct {
	Kind Kind
	// Hit is the cached prefix in tokens. Epoch is the version of the weights: in Matched, the
	// version of the cached prefix; in Started, the version with which the request is computed.
	Hit   int
	Epoch kv.Epoch
	// Attempt is the name of the attempt on both engines (leader.Request.Name). With a planner of
	// an earlier version, Attempt is empty and the Epoch of Started is 0.
	Attempt string
	// Prefill and Decode are the names of the engines. ReadByPrefill and ReadByDecode are the
	// numbers of cached tokens that the machine of each engine reads from storage.
	Prefill, Decode             string
	ReadByPrefill, ReadByDecode int
	Reason                      string
}

// Refusal classifies the reasons for which the planner refuses a request.
type Refusal uint8

const (
	// OtherRefusal: for any other reason, for example because engines failed every attempt.
	OtherRefusal = Refusal(pb.Refusal_REFUSAL_UNSPECIFIED)
	// Busy: too many requests wait, or this request has waited until its deadline. It may be
	// submitted again later.
	Busy = Refusal(pb.Refusal_REFUSAL_BUSY)
	// TooLong: no engine of the cluster has room for a request of this length.
	TooLong = Refusal(pb.Refusal_REFUSAL_TOO_LONG)
	// Invalid: the lengths of the request contradict each other.
	Invalid = Refusal(pb.Refusal_REFUSAL_INVALID)
	// OldWeights: the weights have changed, and the change ended the requests of older weights. If
	// the request is submitted again, it is served with the new weights.
	OldWeights = Refusal(pb.Refusal_REFUSAL_OLD_WEIGHTS)
	// Late: the first token cannot be produced within Request.FirstToken. The request may be
	// submitted again later (RefusedError.RetryAfter).
	Late = Refusal(pb.Refusal_REFUSAL_LATE)
)

// RefusedError is the planner's refusal of a request.
type RefusedError struct {
	Refusal Refusal
	Reason  string
	// RetryAfter is set for Late. It is the planner's estimate of the time after which the request
	// could be served in time if no other requests arrive; 0: unknown.
	RetryAfter time.Duration
}

// Error returns the reason.
func (e *RefusedError) Error() string { return "the planner refused the request: " + e.Reason }

// retryEvery is the time between two submissions while the planner cannot be reached.
const retryEvery = 50 * time.Millisecond

// Prepare returns r with Prompt and IDs in place of Tokens. It returns an error that wraps
// client.ErrRequest if the request cannot be served. Serve calls Prepare itself.
func (g *Gateway) Prepare(r Request) (Request, error) {
	if r.Tokens != nil && (r.Prompt != 0 || r.IDs != nil) {
		return r, fmt.Errorf("gateway: %w: request %q has tokens, and a length or ids beside them; give one or the other", client.ErrRequest, r.ID)
	}
	if r.Tokens == nil && r.Salts != nil {
		return r, fmt.Errorf("gateway: %w: request %q has salts and no tokens; salt the ids instead", client.ErrRequest, r.ID)
	}
	if r.Tokens != nil {
		r.Prompt = len(r.Tokens)
		var err error
		if r.IDs, err = g.idsOf(r.Tokens, r.Salts); err != nil {
			return r, fmt.Errorf("gateway: %w: request %q: %w", client.ErrRequest, r.ID, err)
		}
		r.Tokens, r.Salts = nil, nil
	}
	return r, r.check(g.opts.Namespace.Geometry.BlockTokens)
}

// idsOf returns the ids of a prompt's full blocks.
func (g *Gateway) idsOf(tokens []kv.Token, salts []Salt) (ids []kv.BlockID, err error) {
	chain, bt, last := g.chain, g.opts.Namespace.Geometry.BlockTokens, -1
	for _, s := range salts {
		if s.Block <= last {
			return nil, fmt.Errorf("a salt of block %d after the salt of block %d; their blocks must ascend", s.Block, last)
		}
		last = s.Block
		until := min(s.Block, len(tokens)/bt)
		ids, _ = chain.Append(ids, tokens[len(ids)*bt:until*bt])
		chain = chain.Salt(s.Extra)
	}
	ids, _ = chain.Append(ids, tokens[len(ids)*bt:])
	return ids, nil
}

// Serve serves a request and returns its events. Serving begins when the loop over the events
// begins. An error is the last element: a *RefusedError if the planner refuses the request, or the
// cause of ctx if ctx has ended. Other errors of the planner have a gRPC status, such as
// ResourceExhausted if the planner has no room for the payload.
func (g *Gateway) Serve(ctx context.Context, r Request) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		prefilled := false
		err := g.serve(ctx, r, func(ev Event) bool {
			switch ev.Kind {
			case Started:
				prefilled = false
			case Prefilled:
				if prefilled { // a restarted planner gets the engine's report again, so it sends Prefilled again
					return true
				}
				prefilled = true
			}
			return yield(ev, nil)
		})
		switch {
		case err == nil || errors.Is(err, errLeft):
		case ctx.Err() != nil:
			yield(Event{}, fmt.Errorf("gateway: request %q: %w", r.ID, context.Cause(ctx)))
		default:
			yield(Event{}, err)
		}
	}
}

// errLeft: the caller has left the loop.
var errLeft = errors.New("the loop was left")

// serve serves a request and calls event until it returns false.
func (g *Gateway) serve(ctx context.Context, r Request, event func(Event) bool) error {
	begin := time.Now()
	bt := g.opts.Namespace.Geometry.BlockTokens
	r, err := g.Prepare(r)
	if err != nil {
		return err
	}
	// At least one token is computed, because its logits give the first token of the output. A match of all
	// blocks could not be shortened: with windows or recurrent state a shorter prefix needs other pieces.
	m, err := g.Match(ctx, r.IDs[:(r.Prompt-1)/bt])
	if err != nil {
		return fmt.Errorf("gateway: request %q: %w", r.ID, err)
	}
	hit := m.Blocks * bt
	if len(r.Resident) == 0 {
		r.Resident = g.resident(m.Epoch, r.IDs[:r.Prompt/bt])
	}
	submit, err := g.submission(r, hit, m.Epoch)
	if err != nil {
		return err
	}
	if !event(Event{Kind: Matched, Hit: hit, Epoch: m.Epoch}) {
		return errLeft
	}
	answered := false // set once the decode engine has the first token (Prefilled)
	watched := func(ev Event) bool {
		answered = answered || ev.Kind == Prefilled
		return event(ev)
	}
	resubmitted, waiting := false, false
	for {
		submit.FirstTokenMilliseconds = 0
		if r.FirstToken > 0 && !answered {
			submit.FirstTokenMilliseconds = uint64(max(1, (r.FirstToken - time.Since(begin)).Milliseconds()))
		}
		accepted, err := g.follow(ctx, submit, r.IDs[:r.Prompt/bt], watched)
		if err == nil || errors.Is(err, errLeft) || ctx.Err() != nil {
			return err
		}
		// A planner that has not noticed the end of the previous stream refuses a new stream with
		// AlreadyExists.
		if code := status.Code(err); code != codes.Unavailable && !(resubmitted && code == codes.AlreadyExists) {
			return fmt.Errorf("gateway: request %q: %w", r.ID, err)
		}
		if (accepted || !waiting) && !event(Event{Kind: Waiting, Reason: status.Convert(err).Message()}) {
			return errLeft
		}
		resubmitted, waiting = true, true
		select {
		case <-time.After(retryEvery):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// maxPayload is the largest payload in bytes that the planner accepts (Payload).
const maxPayload = 3 << 20

// payloadBytes returns the approximate size of the request's payload.
func (r *Request) payloadBytes() int {
	return base64.StdEncoding.EncodedLen(len(r.IDs)*kv.BlockIDSize) + len(r.Extra)
}

// maxID is the longest Request.ID, and Request.Tenant, in bytes.
const maxID = 256

// check refuses a request that cannot be submitted.
func (r *Request) check(blockTokens int) error {
	switch full := r.Prompt / blockTokens; {
	case r.ID == "" || len(r.ID) > maxID:
		return fmt.Errorf("gateway: %w: a request whose ID has %d bytes; it must have 1 to %d", client.ErrRequest, len(r.ID), maxID)
	case r.Prompt <= 0 || r.Prompt > math.MaxInt32 || r.Output < 0 || r.Output > math.MaxInt32:
		return fmt.Errorf("gateway: %w: request %q has a prompt of %d tokens and an output of %d; the prompt must have at least 1, the output 0, and both at most %d", client.ErrRequest, r.ID, r.Prompt, r.Output, math.MaxInt32)
	case len(r.IDs) < full:
		return fmt.Errorf("gateway: %w: request %q has %d ids for the %d full blocks of its prompt", client.ErrRequest, r.ID, len(r.IDs), full)
	case r.Deadline < 0 || r.FirstToken < 0:
		return fmt.Errorf("gateway: %w: request %q has a deadline of %v, and of %v for its first token; they must not be negative", client.ErrRequest, r.ID, r.Deadline, r.FirstToken)
	case len(r.Tenant) > maxID:
		return fmt.Errorf("gateway: %w: request %q: the name of its tenant has %d bytes; it must have at most %d", client.ErrRequest, r.ID, len(r.Tenant), maxID)
	case r.payloadBytes() > maxPayload:
		return fmt.Errorf("gateway: %w: request %q has %d block ids and %d bytes of Extra, which take %d bytes; the planner takes %d", client.ErrRequest, r.ID, len(r.IDs), len(r.Extra), r.payloadBytes(), maxPayload)
	case !utf8.ValidString(r.ID) || !utf8.ValidString(r.Tenant):
		return fmt.Errorf("gateway: %w: request %q of tenant %q: a name that is not UTF-8", client.ErrRequest, r.ID, r.Tenant)
	case len(r.Extra) > 0 && !(json.Valid(r.Extra) && utf8.Valid(r.Extra)):
		return fmt.Errorf("gateway: %w: request %q: Extra is not JSON in UTF-8", client.ErrRequest, r.ID)
	}
	for _, h := range r.Resident {
		if h.Tokens < 0 || h.Tokens > r.Prompt {
			return fmt.Errorf("gateway: %w: request %q: engine %q holds %d tokens of a prompt of %d", client.ErrRequest, r.ID, h.Engine, h.Tokens, r.Prompt)
		}
		if !utf8.ValidString(h.Engine) {
			return fmt.Errorf("gateway: %w: request %q: the name of engine %q is not UTF-8", client.ErrRequest, r.ID, h.Engine)
		}
	}
	return nil
}

// submission returns the message for the planner.
func (g *Gateway) submission(r Request, hit int, epoch kv.Epoch) (*pb.SubmitRequest, error) {
	payload, err := Payload{IDs: r.IDs, Extra: r.Extra}.Encode()
	if err != nil {
		return nil, fmt.Errorf("gateway: request %q: %w", r.ID, err)
	}
	s := &pb.SubmitRequest{
		Id: r.ID, Namespace: g.opts.Namespace.Name, Epoch: uint64(epoch), PromptTokens: uint32(r.Prompt), HitTokens: uint32(hit), OutputTokens: uint32(r.Output),
		Payload: payload, ExactEpoch: g.opts.Epoch != 0, Tenant: r.Tenant, Priority: r.Priority,
	}
	if r.Deadline > 0 {
		s.DeadlineMilliseconds = uint64(max(1, r.Deadline.Milliseconds()))
	}
	for _, h := range r.Resident {
		s.Resident = append(s.Resident, &pb.Resident{Engine: h.Engine, Tokens: uint32(h.Tokens)})
	}
	return s, nil
}

// Match finds the cached prefix of a chain, as Serve does. The blocks are of Options.Epoch or, if
// that is 0, of the newest epoch of the storage nodes.
func (g *Gateway) Match(ctx context.Context, ids []kv.BlockID) (client.MatchResult, error) {
	if g.opts.Epoch != 0 {
		return g.opts.Store.Match(ctx, client.MatchRequest{Namespace: g.opts.Namespace, IDs: ids, Epoch: g.opts.Epoch})
	}
	g.mu.Lock()
	epoch := g.epoch
	g.mu.Unlock()
	m, err := g.opts.Store.Match(ctx, client.MatchRequest{Namespace: g.opts.Namespace, IDs: ids, Epoch: epoch})
	if err != nil || m.Cut != client.CutEpoch {
		return m, err
	}
	ns, err := g.opts.Store.Namespace(ctx, g.opts.Namespace.Name)
	if err != nil {
		return m, err
	}
	g.newer(ns.Epoch)
	return g.opts.Store.Match(ctx, client.MatchRequest{Namespace: ns, IDs: ids})
}

// newer records an epoch of the weights. Later requests match prefixes of the newest recorded
// epoch, even while storage keeps an older epoch live.
func (g *Gateway) newer(epoch kv.Epoch) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.epoch = max(g.epoch, epoch)
}

// resident returns the engines whose prefix caches have the beginning of a prompt.
func (g *Gateway) resident(epoch kv.Epoch, ids []kv.BlockID) []Resident {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.caches.find(epoch, ids, g.opts.Namespace.Geometry.BlockTokens)
}

// sent records that the decode engine of a STARTED update has received a prompt.
func (g *Gateway) sent(started *pb.RequestUpdate, ids []kv.BlockID) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.caches.sent(started.DecodeEngine, started.DecodeCache, kv.Epoch(started.Epoch), ids, g.opts.Namespace.Geometry.BlockTokens)
}

// follow submits a request and passes its updates on until the request ends. ids are those of the
// prompt's full blocks. accepted reports whether the planner accepted the request.
func (g *Gateway) follow(ctx context.Context, submit *pb.SubmitRequest, ids []kv.BlockID, event func(Event) bool) (accepted bool, err error) {
	// The stream ends with this call, so that the planner notices when the caller gives the request
	// up.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := pb.NewPlannerClient(g.opts.Planner).Submit(ctx, submit)
	if err != nil {
		return false, err
	}
	var last *pb.RequestUpdate // the last STARTED whose decode engine has not received the prompt yet
	for {
		u, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return accepted, status.Error(codes.Unavailable, "the planner ended the stream before the request")
		}
		if err != nil {
			return accepted, err
		}
		accepted = true
		ev := Event{Reason: u.Reason}
		switch u.Kind {
		case pb.RequestUpdate_KIND_ACCEPTED:
			ev.Kind = Accepted
		case pb.RequestUpdate_KIND_STARTED:
			ev = started(submit.Id, u)
			g.newer(ev.Epoch)
			last = u
		case pb.RequestUpdate_KIND_PREFILLED:
			ev.Kind = Prefilled
		case pb.RequestUpdate_KIND_REPLANNED:
			ev.Kind = Replanned
		case pb.RequestUpdate_KIND_FINISHED:
			ev.Kind = Done
		case pb.RequestUpdate_KIND_REJECTED:
			return true, &RefusedError{refusal(u.Refusal), u.Reason, time.Duration(min(u.RetryAfterMilliseconds, math.MaxInt32)) * time.Millisecond}
		default:
			continue
		}
		if last != nil && (ev.Kind == Prefilled || ev.Kind == Done) {
			g.sent(last, ids)
			last = nil
		}
		if !event(ev) {
			return true, errLeft
		}
		if ev.Kind == Done {
			return true, nil
		}
	}
}

// refusal converts the class of a refusal from its wire form.
func refusal(r pb.Refusal) Refusal {
	if _, known := pb.Refusal_name[int32(r)]; !known {
		return OtherRefusal
	}
	return Refusal(r)
}

// started converts the start of a request to an Event.
func started(id string, u *pb.RequestUpdate) Event {
	ev := Event{Kind: Started, Prefill: u.PrefillEngine, Decode: u.DecodeEngine, Epoch: kv.Epoch(u.Epoch)}
	if u.Attempt != 0 {
		ev.Attempt = api.AttemptName(id, u.Attempt)
	}
	for _, p := range u.Parts {
		if p.Side == pb.Side_SIDE_PREFILL {
			ev.ReadByPrefill += int(p.To - p.From)
		} else {
			ev.ReadByDecode += int(p.To - p.From)
		}
	}
	return ev
}
