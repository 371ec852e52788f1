package console

import (
	"cmp"
	"context"
	"net/url"
	"slices"
	"time"

	"github.com/penstock-kv/penstock/internal/top"
)

// cutMeanings has the reasons for the length of a match, with their meanings, in the order of the
// page.
func cutMeanings() []cutView {
	return []cutView{
		{Reason: "complete", Meaning: "the whole chain was found"},
		{Reason: "absent", Meaning: "the next block is not stored"},
		{Reason: "epoch", Meaning: "none of the requested epochs is live"},
		{Reason: "lease_denied", Meaning: "a lease was requested and there are too many"},
		{Reason: "state_missing", Meaning: "the blocks are stored, but no recurrent state at their end"},
		{Reason: "window_missing", Meaning: "the blocks are stored, but not all of the sliding window"},
		{Reason: "limit", Meaning: "the prefix has the length that the caller permits"},
		{Reason: "too_long", Meaning: "the prefix has the length that the index permits"},
	}
}

// cutView is a row of the table of cuts.
type cutView struct {
	Reason, Meaning string
	Count           uint64
	Part            top.Value
}

// epochView is a row of the table of epochs.
type epochView struct {
	Epoch
	// PerMatch is the mean number of blocks that a match found.
	PerMatch top.Value
}

type prefixesView struct {
	Matches uint64
	Cuts    []cutView
	Epochs  []epochView
	Total   int
	At      time.Time
	Top     []Prefix
}

// viewPrefixes shows the reasons of cuts, the prefixes with the most tokens found, and the epochs in which most
// blocks were found.
func (c *Console) viewPrefixes(ctx context.Context, _ url.Values) (any, string) {
	p := c.prefixes.get(ctx, c.opts.Now(), c.opts.Interval)
	v := prefixesView{Cuts: cutMeanings()}
	for _, n := range p.Cuts {
		v.Matches += n
	}
	for i := range v.Cuts {
		cut := &v.Cuts[i]
		cut.Count = p.Cuts[cut.Reason]
		cut.Part = top.Known(float64(cut.Count)).Over(top.Known(float64(v.Matches)))
	}
	for _, e := range p.Epochs {
		if c.opts.Access.SeesNamespace(ctx, e.Namespace) {
			v.Epochs = append(v.Epochs, epochView{e, top.Known(float64(e.Hits)).Over(top.Known(float64(e.Matches)))})
		}
	}
	v.At = p.At
	for _, t := range p.Top {
		if len(v.Top) < rowsPerPage && c.opts.Access.SeesNamespace(ctx, t.Namespace) {
			v.Top = append(v.Top, t)
		}
	}
	v.Total = len(v.Epochs)
	slices.SortFunc(v.Epochs, func(a, b epochView) int {
		return cmp.Or(cmp.Compare(b.Hits, a.Hits), cmp.Compare(b.Matches, a.Matches), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(b.Epoch.Epoch, a.Epoch.Epoch))
	})
	v.Epochs = v.Epochs[:min(len(v.Epochs), rowsPerPage)]
	return v, plural(int64(v.Total), "live epoch") + "."
}

// viewPins shows the pins that the caller may see, the oldest first. Callers do not share the state,
// because the source keeps only the rows of the page.
func (c *Console) viewPins(ctx context.Context, _ url.Values) (any, string) {
	p := c.pins(ctx, func(namespace string) bool { return c.opts.Access.SeesPins(ctx, namespace) }, rowsPerPage)
	return p, plural(int64(p.Total), "pin") + "."
}

type actionsView struct{ Actions []Action }

// viewActions shows the last calls of administrators.
func (c *Console) viewActions(ctx context.Context, _ url.Values) (any, string) {
	all := c.actions.get(ctx, c.opts.Now(), c.opts.Interval)
	if len(all) == 0 {
		return actionsView{}, "No action since the start of the node."
	}
	return actionsView{all}, "The last action is " + all[0].Call + ", " + all[0].Result + "."
}
