package redistribute

// Bounds of the rules of thumb (section 5.5). Between LocalTokens and FetchTokens it
// depends on the cost of a token whether local or fetch undercuts the other.
const (
	// DecodeRows is the largest batch of a decoding step: up to it, route.
	DecodeRows = 1000
	// RouteRowsMost is where the ranking of route and fetch inverts.
	RouteRowsMost = 100_000
	// RuleLocalTokens and RuleFetchTokens: a shorter chunk is computed again rather
	// than spliced, a longer one is not.
	RuleLocalTokens, RuleFetchTokens = 75, 220
	// AmortiseRatio is how many times route fits into fetch at decode, at least:
	// fewer steps on one instance do not repay a fetch.
	AmortiseRatio = 60
)

// Rule is a rule of thumb that speaks for a request.
type Rule struct {
	Primitive Primitive `json:"primitive"`
	Why       string    `json:"why"`
	// Sure: the request lies in the regime that the paper characterises, one step
	// and one round trip over one of its fabrics, where Decide says the same.
	Sure bool `json:"sure"`
}

// RuleOfThumb is what a scheduler can say of a request without any constant
// (section 5.5). Where it is not Sure, Decide knows better.
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
		// The query would be more than the chunk (section 5.1); in time the ranking
		// inverts later.
		moves.Why = "the query is more than the chunk"
		moves.Sure = false
		return moves
	case r.Reuse == Selected:
		// Never sure: a gather at the peak of a fast link, without the handshakes and
		// host copies that the paper measured, takes no longer than compute and merge.
		return Rule{Route, "the indexer's choice is attended where it lies", false}
	case r.Rows <= DecodeRows:
		// A prefix is fetched without a splice: the paper's regime has one.
		return Rule{Route, "a decoding step: its rows are less than the chunk", once && r.Reuse == Moved && r.Tokens >= RuleFetchTokens}
	}
	return Rule{Route, "when in doubt, the query moves", false}
}

// fallback is the rule between fetch and local, where the query cannot move.
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
	// With its pull a fetch undercuts the cheapest token at some 250 of them.
	sure := r.Reuse == Prefix || r.Reuse == Moved && r.Tokens > RuleFetchTokens*6/5
	return Rule{Fetch, "the chunk is long, and there is no way for the query", r.NoRoute && sure}
}
