package access

import (
	"crypto/sha256"
	"crypto/subtle"
	"strings"

	"github.com/penstock-kv/penstock/internal/bearer"
	"github.com/penstock-kv/penstock/kv"
)

// Credential identifies one bearer token, or one certificate subject of a policy. It is not a secret.
type Credential [sha256.Size]byte

// TokenCredential returns the credential of a bearer token, the same with and without a policy.
func TokenCredential(token string) Credential { return sha256.Sum256([]byte(token)) }

// Principal is a client, or a group of clients with equal rights.
type Principal struct {
	name   string
	grants []grant
	rates  Rates
	// weight is 0 if the document has none.
	weight int
}

// grant gives roles on the namespaces that a pattern matches.
type grant struct {
	roles   Role
	pattern string
}

// matches reports whether the grant concerns a namespace.
func (g grant) matches(namespace string) bool {
	prefix, ok := strings.CutSuffix(g.pattern, "*")
	if ok {
		return strings.HasPrefix(namespace, prefix)
	}
	return namespace == g.pattern
}

// Name returns the name of the principal.
func (p *Principal) Name() string { return p.name }

// Has reports whether the principal has one of the roles on a namespace, which need not exist.
func (p *Principal) Has(roles Role, namespace string) bool {
	for _, g := range p.grants {
		if g.roles&roles != 0 && g.matches(namespace) {
			return true
		}
	}
	return false
}

// HasAnywhere reports whether the principal has one of the roles on any namespace.
func (p *Principal) HasAnywhere(roles Role) bool {
	for _, g := range p.grants {
		if g.roles&roles != 0 {
			return true
		}
	}
	return false
}

// HasAll reports whether the principal has one of the roles, by one grant, on all namespaces whose names
// begin with a prefix.
func (p *Principal) HasAll(roles Role, prefix string) bool {
	for _, g := range p.grants {
		if strings.HasSuffix(g.pattern, "*") && g.roles&roles != 0 && g.matches(prefix) {
			return true
		}
	}
	return false
}

// HasEverywhere reports whether the principal has one of the roles by a grant on all namespaces.
func (p *Principal) HasEverywhere(roles Role) bool {
	for _, g := range p.grants {
		if g.roles&roles != 0 && g.pattern == "*" {
			return true
		}
	}
	return false
}

// Identity is a principal and the credential that it presented.
type Identity struct {
	Principal  *Principal
	Credential Credential
}

// Policy has the principals of a roles file or document.
type Policy struct {
	principals []*Principal
	byName     map[string]*Principal
	// tokens and subjects are the credentials of all principals, in the order of the file.
	tokens   []Identity
	subjects []subject
	all      map[Credential]*Principal
	tenants  []kv.TenantQuota
	digest   [sha256.Size]byte
	outdated bool
}

// Outdate returns a copy of the policy that is outdated.
func (p *Policy) Outdate() *Policy {
	q := *p
	q.outdated = true
	return &q
}

// Outdated reports whether principals of the policy may have been removed since etcd has last answered. By an outdated
// policy only calls that show the state of the process are admitted.
func (p *Policy) Outdated() bool { return p.outdated }

// subject is a certificate subject and its identity.
type subject struct {
	name string
	Identity
}

// ByHeader returns the identity of the token in the value of an Authorization header. ok is false if
// the value has no token of the policy.
func (p *Policy) ByHeader(header string) (id Identity, ok bool) {
	token, is := strings.CutPrefix(header, "Bearer ")
	if !is || len(token) < bearer.MinChars {
		return Identity{}, false
	}
	sum := TokenCredential(token)
	found := -1
	for i := range p.tokens {
		same := subtle.ConstantTimeCompare(sum[:], p.tokens[i].Credential[:])
		found = subtle.ConstantTimeSelect(same, i, found)
	}
	if found < 0 {
		return Identity{}, false
	}
	return p.tokens[found], true
}

// BySubject returns the identity of a client certificate by its subject, as pkix.Name.String
// writes it. The caller has verified the certificate.
func (p *Policy) BySubject(name string) (Identity, bool) {
	for _, s := range p.subjects {
		if s.name == name {
			return s.Identity, true
		}
	}
	return Identity{}, false
}

// ByCredential returns the identity of a credential, if the policy still has it.
func (p *Policy) ByCredential(c Credential) (Identity, bool) {
	principal, ok := p.all[c]
	return Identity{Principal: principal, Credential: c}, ok
}

// Named returns the principal with a name, or nil.
func (p *Policy) Named(name string) *Principal { return p.byName[name] }

// Credentials returns all credentials, in the order of the file, tokens first.
func (p *Policy) Credentials() []Credential {
	out := make([]Credential, 0, len(p.all))
	for _, t := range p.tokens {
		out = append(out, t.Credential)
	}
	for _, s := range p.subjects {
		out = append(out, s.Credential)
	}
	return out
}

// Equal reports whether both policies were read from the same bytes. Nil is equal to nil only.
func (p *Policy) Equal(q *Policy) bool {
	if p == nil || q == nil {
		return p == q
	}
	return p.digest == q.digest
}

// Principals returns the number of principals; 0 for nil.
func (p *Policy) Principals() int {
	if p == nil {
		return 0
	}
	return len(p.principals)
}

// Digest returns the first 8 bytes of the SHA-256 of the file, which are enough to tell versions of
// the file apart.
func (p *Policy) Digest() []byte { return p.digest[:8] }
