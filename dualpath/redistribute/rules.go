package redistribute

// Bounds of the rules of thumb (section 5.5 of the paper). Route, fetch and local are the three
// choices (doc.go).
const (
	// DecodeRows is the largest number of query rows of a decoding step. Up to this number, route
	// is cheapest.
	DecodeRows = 1000
	// RouteRowsMost is the number of query rows above which route takes longer than fetch.
	RouteRowsMost = 100_000
	// For chunks of less than RuleLocalTokens tokens, local is cheaper than the splice of a fetch.
	// For chunks of more than RuleFetchTokens tokens, fetch is cheaper. In between, the cost of
	// computing a token decides.
	RuleLocalTokens, RuleFetchTokens = 75, 220
	// AmortiseRatio: fetching a chunk takes at least AmortiseRatio times as long as routing the
	// query of one decoding step to it. So fetch is cheaper than route only if one instance uses
	// the fetched chunk in more than AmortiseRatio steps.
	AmortiseRatio = 60
)

// Rule is the rule of thumb that applies to a request.
type Rule struct {
	Primitive Primitive `json:"primitive"`
	Why       string    `json:"why"`
	// Sure is set if the request lies in the regime that the paper characterises: one step and one
	// round trip over one of the paper's fabrics. In this regime Decide gives the same result.
	Sure bool `json:"sure"`
}

// RuleOfThumb returns a choice without the measured constants of a fabric (section 5.5). If it is
// not Sure, Decide is more accurate.
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
		// The query has more bytes than the chunk (section 5.1 of the paper). But route takes
		// longer than fetch only for a still larger query, so the choice is not sure.
		moves.Why = "the query is more than the chunk"
		moves.Sure = false
		return moves
	case r.Reuse == Selected:
		// Route is never sure here. The fetch that the paper measured has handshakes and host
		// copies. Without them, fetching the selection at the peak rate of a fast link takes no
		// longer than the computation and merge of route.
		return Rule{Route, "the indexer's choice is attended on its holder", false}
	case r.Rows <= DecodeRows:
		// Route is sure only for a Moved chunk, because the paper compares route with a fetch that
		// includes a splice.
		return Rule{Route, "a decoding step: its rows are less than the chunk", once && r.Reuse == Moved && r.Tokens >= RuleFetchTokens}
	}
	return Rule{Route, "when in doubt, the query moves", false}
}

// fallback returns the rule for the choice between fetch and local.
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
	// With the transfer included, fetch is cheaper than local from about 250 tokens on, even at
	// the lowest cost per token.
	sure := r.Reuse == Prefix || r.Reuse == Moved && r.Tokens > RuleFetchTokens*6/5
	return Rule{Fetch, "the chunk is long, and there is no way for the query", r.NoRoute && sure}
}
