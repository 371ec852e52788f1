package emulate

import (
	"context"
	"fmt"
	"hash/fnv"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/client/gateway"
	"github.com/penstock-kv/penstock/kv"
)

// Turn is one round of a session: Append tokens are added to the context, then Output
// tokens are generated.
type Turn struct{ Append, Output int }

// Session is one agent. Its turns run one after another. The prompt of each turn is the whole
// context of the session so far.
type Session struct {
	Name  string
	Turns []Turn
}

// TurnResult is the outcome of one turn.
type TurnResult struct {
	Session string
	Turn    int
	// Prompt is the length of the prompt and Hit the length of its cached prefix, both in tokens.
	Prompt, Hit int
	// PrefillSide and DecodeSide are the numbers of tokens that the prefill engine and the decode
	// engine read, since the request was last started.
	PrefillSide, DecodeSide int
	// Durations since the beginning of the turn. Matched: the hit length is known. Started: both
	// engines are assigned (for the last time, if the turn was planned again). FirstToken: prefill
	// ended. Took: the last token has been generated and stored.
	Matched, Started, FirstToken, Took time.Duration
	// Replans is how often the planner planned the turn again. Err is set if the turn failed.
	Replans int
	Err     error
}

// Gateway replays sessions through a gateway.Gateway.
type Gateway struct {
	Namespace kv.Namespace
	Store     *client.Store
	Planner   grpc.ClientConnInterface
	// Epoch, if not 0, is the version of the weights for all requests. It must be a live epoch of
	// the namespace. 0: the newest version on the nodes.
	Epoch kv.Epoch
	// Deadline is the time limit of one turn; 0: none.
	Deadline time.Duration
	// Started, if set, is called each time both engines are assigned to a turn.
	Started func(session string, turn int)
	// Done, if set, is called after each turn. Calls do not overlap.
	Done func(TurnResult)

	mu sync.Mutex
}

// Run replays the sessions, at most parallel of them at a time, and returns when all have
// ended. A turn that fails ends its session.
func (g *Gateway) Run(ctx context.Context, sessions []Session, parallel int) []TurnResult {
	var (
		all  []TurnResult
		wg   sync.WaitGroup
		slot = make(chan struct{}, max(parallel, 1))
	)
	done := func(r TurnResult) {
		g.mu.Lock()
		defer g.mu.Unlock()
		all = append(all, r)
		if g.Done != nil {
			g.Done(r)
		}
	}
	gw, err := gateway.New(gateway.Options{Namespace: g.Namespace, Store: g.Store, Planner: g.Planner, Epoch: g.Epoch})
	if err != nil {
		for _, s := range sessions {
			done(TurnResult{Session: s.Name, Err: err})
		}
		return all
	}
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
			g.session(ctx, gw, &sessions[i], done)
		}()
	}
	wg.Wait()
	return all
}

// session replays one session.
func (g *Gateway) session(ctx context.Context, gw *gateway.Gateway, s *Session, done func(TurnResult)) {
	var tokens []kv.Token
	for i, t := range s.Turns {
		tokens = appendTokens(tokens, s.Name, t.Append)
		r := g.turn(ctx, gw, s, i, tokens, t.Output)
		done(r)
		if r.Err != nil {
			return
		}
		tokens = appendTokens(tokens, s.Name, t.Output)
	}
}

// appendTokens appends n tokens to a session's context.
func appendTokens(tokens []kv.Token, name string, n int) []kv.Token {
	h := fnv.New64a()
	_, _ = io.WriteString(h, name) // Write of a hash never fails
	seed := h.Sum64()
	for range n {
		x := (seed + uint64(len(tokens))) * 0x9e3779b97f4a7c15
		tokens = append(tokens, kv.Token(x>>40)%100_000)
	}
	return tokens
}

// turn serves one turn.
func (g *Gateway) turn(ctx context.Context, gw *gateway.Gateway, s *Session, i int, prompt []kv.Token, output int) TurnResult {
	r := TurnResult{Session: s.Name, Turn: i, Prompt: len(prompt)}
	if g.Deadline > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, g.Deadline)
		defer cancel()
	}
	r.Err = g.serve(ctx, gw, &r, fmt.Sprintf("%s.%d", s.Name, i), prompt, output)
	return r
}

// serve serves a request to its end.
func (g *Gateway) serve(ctx context.Context, gw *gateway.Gateway, r *TurnResult, id string, prompt []kv.Token, output int) error {
	begin := time.Now()
	chain, err := g.Namespace.Chain()
	if err != nil {
		return err
	}
	// ids include the output's blocks: the engines generate no text, so the ids are known.
	ids, _ := chain.Append(nil, appendTokens(prompt[:len(prompt):len(prompt)], r.Session, output))
	for ev, err := range gw.Serve(ctx, gateway.Request{ID: id, Prompt: len(prompt), IDs: ids, Output: output}) {
		at := time.Since(begin)
		r.Took = at
		if err != nil {
			return err
		}
		switch ev.Kind {
		case gateway.Matched:
			r.Matched, r.Hit = at, ev.Hit
		case gateway.Started:
			r.PrefillSide, r.DecodeSide, r.Started = ev.ReadByPrefill, ev.ReadByDecode, at
			if g.Started != nil {
				g.Started(r.Session, r.Turn)
			}
		case gateway.Prefilled:
			r.FirstToken = at
		case gateway.Replanned:
			r.Replans++
		}
	}
	return nil
}
