package console

import (
	"cmp"
	"context"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/penstock-kv/penstock/internal/top"
)

// rowsPerPage is the number of rows of a table that one page has.
const rowsPerPage = 100

// filterBytes is the maximum length of a filter, which each link of the page repeats.
const filterBytes = 128

// namespacesView is the data of the templates of the namespaces.
type namespacesView struct {
	At time.Time
	// Filter, Sort and Descending are the state of the controls.
	Filter, Sort string
	Descending   bool
	Columns      []columnView
	Rows         []Namespace
	// Total counts the namespaces that the caller may see, and Matching the namespaces that the filter
	// selects. First and Last are the numbers of the first and the last row, from 1.
	Total, Matching, First, Last int
	// Page and Pages are the number of this page, from 1, and of the last page. Previous and Next are
	// the links to the neighbours, "" at the ends.
	Page, Pages    int
	Previous, Next string
	// UsedBytes and OldBytes are the sums over the matching namespaces.
	UsedBytes int64
	OldBytes  top.Value
	// Tenants are the tenants with a quota that the caller may see, the fullest first, at most
	// tenantsShown. MoreTenants is the number of the other tenants that the caller may see.
	Tenants     []Tenant
	MoreTenants int64
}

// tenantsShown is the number of tenants on the page.
const tenantsShown = 20

// columnView is the head of a column.
type columnView struct {
	Title string
	// Link sorts by the column, or turns the order if the table is sorted by it.
	Link string
	// Order is the value of aria-sort: "ascending", "descending" or "none".
	Order string
	// Number is set if the column has numbers, which are aligned at the right.
	Number bool
}

// column is a column of the table of namespaces.
type column struct {
	key, title string
	// number is set if the column has numbers. The first click then sorts the highest first.
	number  bool
	compare func(a, b *Namespace) int
}

func byValue(of func(*Namespace) top.Value) func(a, b *Namespace) int {
	return func(a, b *Namespace) int {
		x, y := of(a), of(b)
		switch {
		case !x.Known || !y.Known: // unknown values are the lowest
			return cmp.Compare(strconv.FormatBool(x.Known), strconv.FormatBool(y.Known))
		default:
			return cmp.Compare(x.Of, y.Of)
		}
	}
}

func columns() []column {
	by := func(of func(*Namespace) int64) func(a, b *Namespace) int {
		return func(a, b *Namespace) int { return cmp.Compare(of(a), of(b)) }
	}
	return []column{
		{"name", "Namespace", false, func(a, b *Namespace) int { return strings.Compare(a.Name, b.Name) }},
		{"tenant", "Tenant", false, func(a, b *Namespace) int { return strings.Compare(a.Tenant, b.Tenant) }},
		{"epoch", "Epoch", true, func(a, b *Namespace) int { return cmp.Compare(a.Epoch, b.Epoch) }},
		{"since", "Since", true, func(a, b *Namespace) int { return a.EpochSince.Compare(b.EpochSince) }},
		{"hits", "Hit rate since then", true, byValue(func(n *Namespace) top.Value { return n.HitRateSince })},
		{"used", "Used", true, by(func(n *Namespace) int64 { return n.UsedBytes })},
		{"quota", "Used of quota", true, byValue(func(n *Namespace) top.Value { return n.QuotaUsed })},
		{"old", "Old epochs", true, byValue(func(n *Namespace) top.Value { return n.OldBytes })},
		{"rate", "Read rate", true, byValue(func(n *Namespace) top.Value { return n.ReadBytes })},
		{"reads", "Blocks read", true, func(a, b *Namespace) int { return cmp.Compare(a.Counters.ReadBlocks, b.Counters.ReadBlocks) }},
		{"evicted", "Blocks evicted", true, func(a, b *Namespace) int { return cmp.Compare(a.Counters.EvictedBlocks, b.Counters.EvictedBlocks) }},
		{"leases", "Leases", true, by(func(n *Namespace) int64 { return n.Leases })},
	}
}

// namespacesLink returns the address of the page with a filter, an order and a page.
func namespacesLink(filter, sort string, descending bool, page int) string {
	q := url.Values{"sort": {sort}}
	if filter != "" {
		q.Set("q", filter)
	}
	if descending {
		q.Set("order", "desc")
	}
	if page > 1 {
		q.Set("page", strconv.Itoa(page))
	}
	return "/namespaces?" + q.Encode()
}

// viewNamespaces selects, sorts and divides the namespaces by the query: q is a part of the name or
// of the tenant, sort the key of a column, order "desc" for the highest first, and page a number from
// 1. A value that is not valid counts as absent.
func (c *Console) viewNamespaces(ctx context.Context, query url.Values) (any, string) {
	now := c.opts.Now()
	all := c.namespaces.get(ctx, now, c.opts.Interval)
	v := namespacesView{At: now, Filter: query.Get("q"), OldBytes: top.Known(0)}
	if len(v.Filter) > filterBytes {
		v.Filter = strings.ToValidUTF8(v.Filter[:filterBytes], "")
	}
	needle := strings.ToLower(v.Filter)
	var rows []*Namespace
	for i := range all {
		ns := &all[i]
		if !c.opts.Access.SeesNamespace(ctx, ns.Name) {
			continue
		}
		v.Total++
		if !strings.Contains(strings.ToLower(ns.Name), needle) && !strings.Contains(strings.ToLower(ns.Tenant), needle) {
			continue
		}
		rows = append(rows, ns)
		v.UsedBytes += ns.UsedBytes
		v.OldBytes = v.OldBytes.Plus(ns.OldBytes)
	}
	v.Matching = len(rows)
	by := columns()[0]
	for _, col := range columns() {
		if col.key == query.Get("sort") {
			by = col
		}
	}
	v.Sort, v.Descending = by.key, query.Get("order") == "desc"
	slices.SortFunc(rows, func(a, b *Namespace) int {
		order := by.compare(a, b)
		if v.Descending {
			order = -order
		}
		return cmp.Or(order, strings.Compare(a.Name, b.Name))
	})
	v.Pages = max(1, (len(rows)+rowsPerPage-1)/rowsPerPage)
	number, err := strconv.Atoi(query.Get("page"))
	if err != nil {
		number = 1
	}
	v.Page = min(max(number, 1), v.Pages)
	first := (v.Page - 1) * rowsPerPage
	last := min(first+rowsPerPage, len(rows))
	for _, ns := range rows[first:last] {
		v.Rows = append(v.Rows, *ns)
	}
	v.First, v.Last = min(first+1, last), last
	if v.Page > 1 {
		v.Previous = namespacesLink(v.Filter, v.Sort, v.Descending, v.Page-1)
	}
	if v.Page < v.Pages {
		v.Next = namespacesLink(v.Filter, v.Sort, v.Descending, v.Page+1)
	}
	for _, col := range columns() {
		head := columnView{Title: col.title, Order: "none", Number: col.number, Link: namespacesLink(v.Filter, col.key, col.number, 1)}
		if col.key == by.key {
			head.Link = namespacesLink(v.Filter, col.key, !v.Descending, 1)
			head.Order = "ascending"
			if v.Descending {
				head.Order = "descending"
			}
		}
		v.Columns = append(v.Columns, head)
	}
	for _, tn := range c.tenants.get(ctx, now, c.opts.Interval) {
		if c.opts.Access.SeesTenant(ctx, tn.Prefix) {
			v.Tenants = append(v.Tenants, tn)
		}
	}
	slices.SortStableFunc(v.Tenants, func(a, b Tenant) int { return cmp.Compare(b.Fill.Of, a.Fill.Of) })
	v.MoreTenants = int64(max(0, len(v.Tenants)-tenantsShown))
	v.Tenants = v.Tenants[:min(len(v.Tenants), tenantsShown)]
	summary := fmt.Sprintf("%s.", plural(int64(v.Total), "namespace"))
	if v.Filter != "" {
		summary = fmt.Sprintf("%d of %s match the filter.", v.Matching, plural(int64(v.Total), "namespace"))
	}
	return v, summary
}
