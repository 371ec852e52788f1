package access

import (
	"fmt"
	"slices"
	"strings"
)

// Governs reports whether the principal can replace a roles document: it has the roles admin and operate on
// all namespaces.
func (p *Principal) Governs() bool { return p.HasEverywhere(Admin) && p.HasEverywhere(Operate) }

// Governed reports whether a principal of the policy governs it.
func (p *Policy) Governed() bool { return slices.ContainsFunc(p.principals, (*Principal).Governs) }

// Changes returns one line for each principal that differs between the policies, in the order of their
// names, and then one for each tenant whose quota differs. The lines have no credentials, only the number of credentials that differ.
func Changes(was, is *Policy) []string {
	var names []string
	for _, p := range slices.Concat(was.principals, is.principals) {
		names = append(names, p.name)
	}
	slices.Sort(names)
	var out []string
	for _, name := range slices.Compact(names) {
		old, now := was.Named(name), is.Named(name)
		switch {
		case old == nil:
			out = append(out, fmt.Sprintf("principal %s is added: %s", name, now.describe()))
		case now == nil:
			out = append(out, fmt.Sprintf("principal %s is removed: %s", name, old.describe()))
		default:
			if d := differences(was, is, old, now); len(d) > 0 {
				out = append(out, fmt.Sprintf("principal %s: %s", name, strings.Join(d, "; ")))
			}
		}
	}
	return append(out, tenantChanges(was, is)...)
}

// differences returns the differences between two versions of one principal.
func differences(was, is *Policy, old, now *Principal) (out []string) {
	missing := func(p *Policy, of *Principal, from *Policy, other *Principal) (n int) {
		for c, owner := range p.all {
			if owner == of && from.all[c] != other {
				n++
			}
		}
		return n
	}
	if added, removed := missing(is, now, was, old), missing(was, old, is, now); added+removed > 0 {
		out = append(out, fmt.Sprintf("tokens and subjects: %d added, %d removed", added, removed))
	}
	if a, b := old.describeRates(), now.describeRates(); a != b {
		out = append(out, fmt.Sprintf("rates: %s → %s", a, b))
	}
	if a, b := old.Weight(), now.Weight(); a != b {
		out = append(out, fmt.Sprintf("weight: %d → %d", a, b))
	}
	if a, b := old.describe(), now.describe(); a != b {
		out = append(out, fmt.Sprintf("grants: %s → %s", a, b))
	}
	return out
}

// describe returns the grants of the principal as text.
func (p *Principal) describe() string {
	words := make([]string, len(p.grants))
	for i, g := range p.grants {
		words[i] = strings.ReplaceAll(g.roles.String(), " or ", "+") + " on " + g.pattern
	}
	return strings.Join(words, ", ")
}

func (p *Principal) describeRates() string {
	words := func(rate int64) string {
		if rate == 0 {
			return "none"
		}
		return fmt.Sprint(rate)
	}
	return "read " + words(p.rates.Read) + ", write " + words(p.rates.Write)
}
