package emulate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
)

// Turn is one round of a session: tokens appended to the context, and generated.
type Turn struct{ Append, Output int }

// Session is one agent: its turns follow each other, each with all of the context
// before it.
type Session struct {
	Name  string
	Turns []Turn
}

// TurnResult is what became of one turn.
type TurnResult struct {
	Session string
	Turn    int
	// Prompt and Hit are tokens.
	Prompt, Hit int
	// PrefillSide and DecodeSide are the tokens read by either, at the last start.
	PrefillSide, DecodeSide int
	// From the beginning of the turn: Matched, the hit is known; Started, both
	// engines are, at the last start; FirstToken, the end of prefill; Took, the last
	// token is there and stored.
	Matched, Started, FirstToken, Took time.Duration
	// Replans is how often it was planned anew. Err is why it failed, if it did.
	Replans int
	Err     error
}

// Gateway replays sessions: it finds each prompt's cached prefix, submits the
// request to the planner, and waits.
type Gateway struct {
	Namespace kv.Namespace
	Store     *client.Store
	Planner   grpc.ClientConnInterface
	// Epoch, if not 0, is the version of the weights of all requests, which the namespace
	// keeps live. 0: the newest of the nodes.
	Epoch kv.Epoch
	// Deadline of one turn; 0: none.
	Deadline time.Duration
	// Started, if set, is called each time that a turn has both engines.
	Started func(session string, turn int)
	// Done, if set, is called after each turn; one call at a time.
	Done func(TurnResult)

	mu sync.Mutex
	// epoch is the nodes' newest that is known; 0: that of Namespace.
	epoch kv.Epoch
}

// Run replays the sessions, at most parallel at a time, and returns when all have
// ended. A turn that fails ends its session.
func (g *Gateway) Run(ctx context.Context, sessions []Session, parallel int) []TurnResult {
	var (
		all  []TurnResult
		wg   sync.WaitGroup
		slot = make(chan struct{}, max(parallel, 1))
	)
	for i := range sessions {
		select {
		case slot <- struct{}{}:
		case <-ctx.Done():
			wg.Wait()
			return all
		}
		wg.Add(1)
		go func() {
			defer wg.Done()
			defer func() { <-slot }()
			g.session(ctx, &sessions[i], func(r TurnResult) {
				g.mu.Lock()
				defer g.mu.Unlock()
				all = append(all, r)
				if g.Done != nil {
					g.Done(r)
				}
			})
		}()
	}
	wg.Wait()
	return all
}

// session replays one.
func (g *Gateway) session(ctx context.Context, s *Session, done func(TurnResult)) {
	var tokens []kv.Token
	for i, t := range s.Turns {
		tokens = appendTokens(tokens, s.Name, t.Append)
		r := g.turn(ctx, s, i, tokens, t.Output)
		done(r)
		if r.Err != nil {
			return
		}
		tokens = appendTokens(tokens, s.Name, t.Output)
	}
}

// appendTokens makes n tokens more of a session's context.
func appendTokens(tokens []kv.Token, name string, n int) []kv.Token {
	h := fnv.New64a()
	_, _ = io.WriteString(h, name) // it never fails
	seed := h.Sum64()
	for range n {
		x := (seed + uint64(len(tokens))) * 0x9e3779b97f4a7c15
		tokens = append(tokens, kv.Token(x>>40)%100_000)
	}
	return tokens
}

// turn serves one turn.
func (g *Gateway) turn(ctx context.Context, s *Session, i int, prompt []kv.Token, output int) TurnResult {
	r := TurnResult{Session: s.Name, Turn: i, Prompt: len(prompt)}
	if g.Deadline > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, g.Deadline)
		defer cancel()
	}
	r.Err = g.serve(ctx, &r, fmt.Sprintf("%s.%d", s.Name, i), prompt, output, s.Name)
	return r
}

// match finds the cached prefix under the gateway's epoch or the nodes' newest: an emulated
// engine has the weights of every epoch.
func (g *Gateway) match(ctx context.Context, ids []kv.BlockID) (client.MatchResult, error) {
	if g.Epoch != 0 {
		return g.Store.Match(ctx, client.MatchRequest{Namespace: g.Namespace, IDs: ids, Epoch: g.Epoch})
	}
	g.mu.Lock()
	epoch := g.epoch
	g.mu.Unlock()
	m, err := g.Store.Match(ctx, client.MatchRequest{Namespace: g.Namespace, IDs: ids, Epoch: epoch})
	if err != nil || m.Cut != client.CutEpoch {
		return m, err
	}
	ns, err := g.Store.Namespace(ctx, g.Namespace.Name)
	if err != nil {
		return m, err
	}
	g.mu.Lock()
	g.epoch = max(g.epoch, ns.Epoch)
	g.mu.Unlock()
	return g.Store.Match(ctx, client.MatchRequest{Namespace: ns, IDs: ids})
}

// serve finds the hit, submits and follows the request to its end.
func (g *Gateway) serve(ctx context.Context, r *TurnResult, id string, prompt []kv.Token, output int, name string) error {
	begin := time.Now()
	chain, err := g.Namespace.Chain()
	if err != nil {
		return err
	}
	ids, _ := chain.Append(nil, appendTokens(prompt[:len(prompt):len(prompt)], name, output))
	bt := g.Namespace.Geometry.BlockTokens
	full := len(prompt) / bt
	m, err := g.match(ctx, ids[:full])
	if err != nil {
		return fmt.Errorf("emulate: match: %w", err)
	}
	r.Matched = time.Since(begin)
	// One token at least is computed: its logits are what is asked for.
	hit := min(m.Blocks, (len(prompt)-1)/bt)
	r.Hit = hit * bt
	load := Payload{Epoch: uint64(m.Epoch), Prompt: len(prompt), Output: output, Hit: hit}
	for _, b := range ids {
		load.IDs = append(load.IDs, b[:]...)
	}
	raw, err := json.Marshal(load)
	if err != nil {
		return err
	}
	submit := &pb.SubmitRequest{
		Id: id, Namespace: g.Namespace.Name, Epoch: load.Epoch, PromptTokens: uint32(len(prompt)), HitTokens: uint32(r.Hit), OutputTokens: uint32(output), Payload: raw,
		ExactEpoch: g.Epoch != 0,
	}
	for {
		err := g.follow(ctx, r, begin, submit)
		if status.Code(err) != codes.Unavailable || ctx.Err() != nil {
			r.Took = time.Since(begin)
			return err
		}
		// The planner restarts: the same id again.
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// follow submits a request and reads its updates to the end.
func (g *Gateway) follow(ctx context.Context, r *TurnResult, begin time.Time, submit *pb.SubmitRequest) error {
	stream, err := pb.NewPlannerClient(g.Planner).Submit(ctx, submit)
	if err != nil {
		return err
	}
	for {
		u, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return status.Error(codes.Unavailable, "the planner ended the stream before the request")
		}
		if err != nil {
			return err
		}
		switch u.Kind {
		case pb.RequestUpdate_KIND_STARTED:
			r.PrefillSide, r.DecodeSide, r.Started = 0, 0, time.Since(begin)
			for _, p := range u.Parts {
				if p.Side == pb.Side_SIDE_PREFILL {
					r.PrefillSide += int(p.To - p.From)
				} else {
					r.DecodeSide += int(p.To - p.From)
				}
			}
			if g.Started != nil {
				g.Started(r.Session, r.Turn)
			}
		case pb.RequestUpdate_KIND_PREFILLED:
			r.FirstToken = time.Since(begin)
		case pb.RequestUpdate_KIND_REPLANNED:
			r.Replans++
		case pb.RequestUpdate_KIND_REJECTED:
			return fmt.Errorf("emulate: request %q was rejected: %s", submit.Id, u.Reason)
		case pb.RequestUpdate_KIND_FINISHED:
			return nil
		}
	}
}
