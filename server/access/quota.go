package access

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/dustin/go-humanize"

	"github.com/penstock-kv/penstock/kv"
)

// TenantsMax is the maximum number of tenants with a quota in a file. Each has series of metrics.
const TenantsMax = 256

// quota is the number of bytes in the YAML document, written like 2TiB.
type quota int64

// UnmarshalText parses a number of bytes with or without a unit.
func (q *quota) UnmarshalText(text []byte) error {
	n, err := humanize.ParseBytes(strings.TrimSpace(string(text)))
	if err != nil || n == 0 || n > math.MaxInt64 {
		return fmt.Errorf("%q is not a number of bytes; write it like 2TiB or 500GB, or remove the tenant if there is no quota", clip(string(text)))
	}
	*q = quota(n)
	return nil
}

// addTenant adds the quota of a tenant, whose namespaces match pattern. key is the key of the document
// that an error concerns.
func (p *Policy) addTenant(pattern string, bytes quota) (key string, err error) {
	prefix, is := strings.CutSuffix(pattern, "*")
	switch {
	case pattern == "*":
		return "namespaces", fmt.Errorf(`a quota on "*" would be one on the whole node; set the capacity of the node instead`)
	case !is && patternValid(pattern):
		return "namespaces", fmt.Errorf(`%q is one namespace; set its quota with penstock ns quota, or write a prefix such as team-a/*`, clip(pattern))
	case !is || !patternValid(pattern):
		return "namespaces", fmt.Errorf(`%q is not a prefix followed by "*", such as team-a/*`, clip(pattern))
	case bytes == 0:
		return "quota", fmt.Errorf("tenant %s has no quota; write it like 2TiB, or remove the tenant", clip(pattern))
	case len(p.tenants) == TenantsMax:
		return "", fmt.Errorf("the file has more than %d tenants with a quota; give several of them one prefix", TenantsMax)
	}
	for _, other := range p.tenants {
		if strings.HasPrefix(prefix, other.Prefix) || strings.HasPrefix(other.Prefix, prefix) {
			return "namespaces", fmt.Errorf("%s overlaps with the tenant %s*, so a namespace could count towards two quotas; give each namespace one tenant", clip(pattern), clip(other.Prefix))
		}
	}
	p.tenants = append(p.tenants, kv.TenantQuota{Prefix: prefix, Bytes: int64(bytes)})
	return "", nil
}

// TenantQuotas returns the quotas of the tenants, in the order of the file. None has a prefix that begins
// with that of another.
func (p *Policy) TenantQuotas() []kv.TenantQuota {
	if p == nil {
		return nil
	}
	return slices.Clone(p.tenants)
}

// quotaOf returns the quota of the tenant with a prefix, in bytes; 0 if there is none.
func (p *Policy) quotaOf(prefix string) int64 {
	for _, q := range p.tenants {
		if q.Prefix == prefix {
			return q.Bytes
		}
	}
	return 0
}

// tenantChanges returns one line for each tenant whose quota differs, in the order of the prefixes.
func tenantChanges(was, is *Policy) (out []string) {
	var prefixes []string
	for _, q := range slices.Concat(was.tenants, is.tenants) {
		prefixes = append(prefixes, q.Prefix)
	}
	slices.Sort(prefixes)
	for _, prefix := range slices.Compact(prefixes) {
		switch old, now := was.quotaOf(prefix), is.quotaOf(prefix); {
		case old == now:
		case old == 0:
			out = append(out, fmt.Sprintf("tenant %s* is added: quota %d", prefix, now))
		case now == 0:
			out = append(out, fmt.Sprintf("tenant %s* is removed: quota %d", prefix, old))
		default:
			out = append(out, fmt.Sprintf("tenant %s*: quota: %d → %d", prefix, old, now))
		}
	}
	return out
}
