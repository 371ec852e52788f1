package storage

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie"
)

// SetTenantQuotas replaces the quotas of tenants. They are in force for Reserves and Commits that begin
// afterwards, and end with the process. A quota below what a tenant has evicts nothing by itself: a
// write of the tenant evicts, and an eviction for the whole node takes from the tenant first.
// SetTenantQuotas logs the namespaces of which no block fits.
func (n *Node) SetTenantQuotas(quotas []kv.TenantQuota) {
	n.index.SetTenantQuotas(quotas)
	if err := n.CheckTenantQuotas(quotas); err != nil {
		n.opts.Logger.Warn("writes of these namespaces are refused, because their tenant's quota in the roles is below one block", "err", err)
	}
}

// Tenants returns the figures of the tenants with a quota, sorted by prefix.
func (n *Node) Tenants() []trie.TenantStats { return n.index.Tenants() }

// CheckTenantQuotas returns an error, of type ErrRequest, if a quota is too small for one block of a
// namespace of the node. It names each such tenant with one namespace.
func (n *Node) CheckTenantQuotas(quotas []kv.TenantQuota) error {
	if len(quotas) == 0 {
		return nil
	}
	all := n.index.Namespaces() // sorted by name
	var errs []error
	for _, q := range quotas {
		first, _ := slices.BinarySearchFunc(all, q.Prefix, func(ns kv.Namespace, prefix string) int { return strings.Compare(ns.Name, prefix) })
		for _, ns := range all[first:] {
			if !strings.HasPrefix(ns.Name, q.Prefix) {
				break
			}
			if err := n.fitsTenant(ns, q); err != nil {
				errs = append(errs, err)
				break
			}
		}
	}
	return errors.Join(errs...)
}

// fitsTenant returns an error if one block of the namespace is larger than the quota of its tenant.
func (n *Node) fitsTenant(ns kv.Namespace, q kv.TenantQuota) error {
	block, err := n.slotBytes(ns)
	if err != nil {
		return err
	}
	if q.Bytes < block {
		return fmt.Errorf("%w: tenant %s*: a quota of %d bytes is too small for one block of namespace %q, which takes %d on storage", ErrRequest, q.Prefix, q.Bytes, ns.Name, block)
	}
	return nil
}
