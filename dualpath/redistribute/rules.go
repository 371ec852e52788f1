package redistribute

// Bounds of the rules of thumb (section 5.5). Between RuleLocalTokens and RuleFetchTokens the cost
// of a token decides whether local or fetch is cheaper.
const (
	// DecodeRows is the largest batch of a decoding step; up to it, route is cheapest.
	DecodeRows = 1000
	// RouteRowsMost is the number of rows at which the ranking of route and fetch inverts.
	RouteRowsMost = 100_000
	// RuleLocalTokens and RuleFetchTokens: below the first, computing a chunk again is cheaper than
	// splicing it; above the second, it is not.
	RuleLocalTokens, RuleFetchTokens = 75, 220
	// AmortiseRatio is a lower bound of the ratio of fetch to route at decode: fewer steps on one
	// instance do not repay a fetch.
	AmortiseRatio = 60
)

// Rule is the rule of thumb that applies to a request.
type Rule struct {
	Primitive Primitive `json:"primitive"`
	Why       string    `json:"why"`
	// Sure is set if the request lies in the regime that the paper characterises: one step and one
	// round trip over one of its fabrics. Decide gives the same result there.
	Sure bool `json:"sure"`
}

// RuleOfThumb returns the choice that needs no constants (section 5.5). If it is not Sure, Decide
// is more accurate.
func (r Request) RuleOfThumb() Rule {
	r.EnsureDefaults()
	once := r.Steps == 1 && r.Trips == 1 && r.Requesters <= FanIn
	moves := r.fallback()
	switch {
	case r.NoRoute:
		return moves
	case r.Reuse != Selected && r.Steps > AmortiseRatio && !r.NoFetch:
		return Rule{Fetch, "many steps on one instance attend to it: a fetch is repaid", false}
	case (r.Rows > RouteRowsMost || r.Rows > max(DecodeRows, r.Tokens)) && !(r.NoFetch && r.NoLocal):
		// The query would be larger than the chunk (section 5.1); the ranking by time inverts
		// later.
		moves.Why = "the query is more than the chunk"
		moves.Sure = false
		return moves
	case r.Reuse == Selected:
		// This is never sure: a gather at the peak of a fast link, without the handshakes and host
		// copies that the paper measured, takes no longer than compute and merge.
		return Rule{Route, "the indexer's choice is attended on its holder", false}
	case r.Rows <= DecodeRows:
		// A prefix is fetched without a splice, but the paper's regime includes one.
		return Rule{Route, "a decoding step: its rows are less than the chunk", once && r.Reuse == Moved && r.Tokens >= RuleFetchTokens}
	}
	return Rule{Route, "when in doubt, the query moves", false}
}

// fallback returns the rule between fetch and local, if the query cannot move.
func (r Request) fallback() Rule {
	short := r.Reuse == Moved && r.Tokens < RuleLocalTokens
	switch {
	case r.NoFetch:
		return Rule{Local, "nothing else can be done", true}
	case r.NoLocal:
		return Rule{Fetch, "nothing else can be done", true}
	case short:
		return Rule{Local, "a short chunk is computed within a splice", r.NoRoute}
	}
	// With its pull, a fetch becomes cheaper than the cheapest tokens at about 250 of them.
	sure := r.Reuse == Prefix || r.Reuse == Moved && r.Tokens > RuleFetchTokens*6/5
	return Rule{Fetch, "the chunk is long, and there is no way for the query", r.NoRoute && sure}
}
