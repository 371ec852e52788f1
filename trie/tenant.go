package trie

import (
	"cmp"
	"math/bits"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/kv"
)

// A tenant has the namespaces whose names begin with a prefix. Trie.mu guards all fields but the atomic
// ones.
type tenant struct {
	prefix     string
	quotaBytes int64
	// bytes is the size of the slots of all pieces of these namespaces, also of deleted ones, and
	// garbage the number of their unmatchable nodes.
	bytes   int64
	garbage int
	// hand advances with each draw of an eviction (lottery.next).
	hand uint64
	// removed is set when SetTenantQuotas was called without the prefix.
	removed bool
	// evicted, evictedBytes and refused count since the tenant has a quota (TenantStats).
	evicted, evictedBytes, refused atomic.Int64
}

// charge counts the pieces that were evicted because of the tenant's quota. Unmatchable pieces do not
// count: their space would have been freed anyway.
func (tn *tenant) charge(gone []Evicted) {
	for i := range gone {
		if gone[i].Why == Chosen && gone[i].Tenant == tn.prefix {
			tn.evicted.Add(1)
			tn.evictedBytes.Add(gone[i].SlotBytes)
		}
	}
}

func (tn *tenant) overQuota() bool { return tn.bytes > tn.quotaBytes }

func (tn *tenant) room(bytes int64) bool { return tn == nil || tn.bytes+bytes <= tn.quotaBytes }

// SetTenantQuotas replaces the quotas of tenants. They are not stored: the caller sets them after each
// Open. SetTenantQuotas evicts nothing. If the namespaces of a tenant hold more than the new quota,
// Evict takes from them first, and Put refuses their pieces until they are below the quota. It takes
// time for each namespace and each epoch, and for no block. The prefixes must differ as
// kv.TenantQuota.Prefix describes.
func (t *Trie) SetTenantQuotas(quotas []kv.TenantQuota) {
	quotas = slices.SortedFunc(slices.Values(quotas), func(a, b kv.TenantQuota) int { return strings.Compare(a.Prefix, b.Prefix) })
	t.mu.Lock()
	defer t.mu.Unlock()
	if slices.EqualFunc(t.tenants, quotas, func(tn *tenant, q kv.TenantQuota) bool { return tn.prefix == q.Prefix && tn.quotaBytes == q.Bytes }) {
		return
	}
	tenants := make([]*tenant, len(quotas))
	for i, q := range quotas {
		invariants.Assert(q.Prefix != "" && q.Bytes > 0 && (i == 0 || !strings.HasPrefix(q.Prefix, quotas[i-1].Prefix)), "tenants: quota %d is %+v", i, q)
		tenants[i] = &tenant{prefix: q.Prefix, quotaBytes: q.Bytes}
		if old := t.tenantOfLocked(q.Prefix); old != nil && old.prefix == q.Prefix {
			old.quotaBytes, old.bytes, old.garbage = q.Bytes, 0, 0
			tenants[i] = old
		}
	}
	for _, old := range t.tenants {
		old.removed = !slices.Contains(tenants, old)
	}
	t.tenants = tenants
	for ns := range t.namespacesLocked() {
		if ns.tenant = t.tenantOfLocked(ns.def.Name); ns.tenant != nil {
			ns.tenant.bytes += ns.bytes
			ns.tenant.garbage += ns.garbage
		}
	}
}

// namespacesLocked returns all namespaces, and the deleted ones of which nodes wait for ReclaimStep.
func (t *Trie) namespacesLocked() map[*namespace]bool {
	all := make(map[*namespace]bool, len(t.namespaces))
	for _, ns := range t.namespaces {
		all[ns] = true
	}
	for _, sp := range t.spaces {
		if sp != nil {
			all[sp.ns] = true
		}
	}
	return all
}

// tenantOfLocked returns the tenant of the namespaces with a name, or nil. Of the prefixes that are not
// above the name, the highest one is the only one with which the name can begin, because no prefix
// begins with another.
func (t *Trie) tenantOfLocked(name string) *tenant {
	i, found := slices.BinarySearchFunc(t.tenants, name, func(tn *tenant, name string) int { return strings.Compare(tn.prefix, name) })
	if found {
		return t.tenants[i]
	}
	if i == 0 || !strings.HasPrefix(name, t.tenants[i-1].prefix) {
		return nil
	}
	return t.tenants[i-1]
}

// TenantQuota returns the quota of the tenant that a namespace with this name belongs to, which need not
// exist. ok is false if there is none.
func (t *Trie) TenantQuota(name string) (q kv.TenantQuota, ok bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if tn := t.tenantOfLocked(name); tn != nil {
		return kv.TenantQuota{Prefix: tn.prefix, Bytes: tn.quotaBytes}, true
	}
	return q, false
}

// tenantsOverQuota returns the tenants whose namespaces hold more bytes than the quota.
func (t *Trie) tenantsOverQuota() []*tenant {
	t.mu.RLock()
	defer t.mu.RUnlock()
	over := slices.Clone(t.tenants)
	return slices.DeleteFunc(over, func(tn *tenant) bool { return !tn.overQuota() })
}

// tenantRun is the number of leaves that an eviction from a tenant examines in one namespace before it
// chooses a namespace again.
const tenantRun = 16

// A lottery chooses among the newest epochs of a tenant's namespaces, each in proportion to its bytes. The
// order of the policy is over the nodes of all tenants, and a list of leaves is over those of one epoch, so
// there is no order by age over the namespaces of a tenant. With this choice each namespace loses the same
// part of its bytes, and the bytes of a namespace that is no longer used are evicted gradually.
type lottery struct {
	tn     *tenant
	spaces []*space
	// leaves is the number of leaves in the lists of spaces at the last draw.
	leaves int
}

// lotteryOf returns the lottery of a tenant. It has the epochs that are the newest now.
func (t *Trie) lotteryOf(tn *tenant) *lottery {
	t.mu.RLock()
	defer t.mu.RUnlock()
	l := &lottery{tn: tn}
	for _, ns := range t.recorded {
		if ns.tenant == tn {
			l.spaces = append(l.spaces, ns.live[0])
		}
	}
	slices.SortFunc(l.spaces, func(a, b *space) int { return cmp.Compare(a.serial, b.serial) })
	return l
}

// next returns the next epoch to evict from, or nil if none has a leaf in its list. Successive draws are
// spread evenly: the hand advances by the golden ratio of its range. Trie.mu is held for writing.
func (l *lottery) next() *space {
	var total uint64
	l.leaves = 0
	for _, sp := range l.spaces {
		total += sp.tickets()
		l.leaves += sp.leaves.len
	}
	if total == 0 {
		return nil
	}
	l.tn.hand += 0x9E3779B97F4A7C15
	at, _ := bits.Mul64(l.tn.hand, total)
	for _, sp := range l.spaces {
		if n := sp.tickets(); at < n {
			return sp
		} else {
			at -= n
		}
	}
	panic("trie: a draw above the sum of the tickets")
}

// tickets returns the weight of an epoch in a lottery.
func (sp *space) tickets() uint64 {
	if sp.dead || sp.leaves.oldest == 0 {
		return 0
	}
	return uint64(sp.bytes)
}

// fromLottery evicts one step of the pieces of the newest epochs of a tenant's namespaces.
func (e *eviction) fromLottery() (more bool) {
	t := e.t
	t.mu.Lock()
	defer t.mu.Unlock()
	t.leases.applyUnparks(t)
	end := len(e.dst) + victimsPerStep
	for looks := 0; looks < looksPerStep; {
		sp := e.lottery.next()
		if sp == nil {
			return false
		}
		for run := 0; run < tenantRun && sp.leaves.oldest != 0; run++ {
			switch {
			case e.enoughLocked():
				return false
			case len(e.dst) >= end:
				return true
			}
			e.oldestLeaf(&sp.leaves)
			looks++
		}
	}
	return true
}

// tenantStatsLocked returns the figures of all tenants with a quota.
func (t *Trie) tenantStatsLocked() []TenantStats {
	count := make(map[*tenant]int64, len(t.tenants))
	for _, ns := range t.namespaces {
		count[ns.tenant]++
	}
	all := make([]TenantStats, len(t.tenants))
	for i, tn := range t.tenants {
		all[i] = TenantStats{
			TenantQuota: kv.TenantQuota{Prefix: tn.prefix, Bytes: tn.quotaBytes}, UsedBytes: tn.bytes, Namespaces: count[tn],
			EvictedPieces: tn.evicted.Load(), EvictedBytes: tn.evictedBytes.Load(), RefusedPieces: tn.refused.Load(),
		}
	}
	return all
}

// CountRefused adds to the pieces that were not stored because of a tenant's quota. The caller of Put
// calls it with the final statuses of the pieces of one write to a namespace. The pieces without a parent
// count too, if the quota refused a piece.
func (t *Trie) CountRefused(id kv.NamespaceID, statuses []PutStatus) {
	if !slices.Contains(statuses, OverTenantQuota) {
		return
	}
	var n int64
	for _, s := range statuses {
		if s == OverTenantQuota || s == ParentAbsent {
			n++
		}
	}
	t.mu.RLock()
	defer t.mu.RUnlock()
	if ns, err := t.lookupLocked(id); err == nil && ns.tenant != nil {
		ns.tenant.refused.Add(n)
	}
}

// Tenants returns the figures of the tenants with a quota, sorted by prefix.
func (t *Trie) Tenants() []TenantStats {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.tenantStatsLocked()
}
