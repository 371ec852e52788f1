package access

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/penstock-kv/penstock/internal/yamlfile"
)

// CredentialsMax is the maximum number of credentials in a file. The number is limited because a
// token is compared with each of them.
const CredentialsMax = 256

// file is the structure of the YAML document.
type file struct {
	Principals []struct {
		Name     string   `yaml:"name"`
		Tokens   []string `yaml:"tokens"`
		Subjects []string `yaml:"subjects"`
		Rates    struct {
			Read  rate `yaml:"read"`
			Write rate `yaml:"write"`
		} `yaml:"rates"`
		Weight weight `yaml:"weight"`
		Grants []struct {
			Roles      []string `yaml:"roles"`
			Namespaces []string `yaml:"namespaces"`
		} `yaml:"grants"`
	} `yaml:"principals"`
	Tenants []struct {
		Namespaces string `yaml:"namespaces"`
		Quota      quota  `yaml:"quota"`
	} `yaml:"tenants"`
}

// ReadFile returns the policy in a file, or nil if path is "".
func ReadFile(path string) (*Policy, error) {
	if path == "" {
		return nil, nil
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("roles file: %w", err)
	}
	p, err := Parse(path, raw)
	if err != nil {
		return nil, fmt.Errorf("roles file %w", err)
	}
	return p, nil
}

// BytesMax is the maximum size of a document in etcd, which takes no larger ones by default.
const BytesMax = 1 << 20

// None returns the policy without principals, which refuses every call. A node has it before it has read a
// document from etcd.
func None() *Policy { return &Policy{all: make(map[Credential]*Principal)} }

// Parse returns the policy in the content of a file. Errors use name for the file. No error has a
// value of the list tokens, because an administrator may have written a token there.
func Parse(name string, raw []byte) (*Policy, error) {
	y, err := yamlfile.Parse(name, raw)
	if err != nil {
		return nil, err
	}
	var f file
	if err := y.Decode(&f); err != nil {
		return nil, withoutToken(err)
	}
	if len(f.Principals) == 0 {
		return nil, y.Errorf("principals", "the file has no principal, so every call would be refused; add one")
	}
	p := &Policy{all: make(map[Credential]*Principal), byName: make(map[string]*Principal), digest: sha256.Sum256(raw)}
	for i, entry := range f.Principals {
		at := fmt.Sprintf("principals.%d", i)
		bad := func(key, format string, args ...any) error { return y.Errorf(at+key, format, args...) }
		if err := checkName(entry.Name); err != nil {
			return nil, bad(".name", "%v", err)
		}
		if p.byName[entry.Name] != nil {
			return nil, bad(".name", "two principals have the name %q; put all grants and tokens into one", entry.Name)
		}
		if len(entry.Tokens)+len(entry.Subjects) == 0 {
			return nil, bad("", "principal %q has neither tokens nor subjects, so no client can be it; add one", entry.Name)
		}
		principal := &Principal{name: entry.Name, rates: Rates{Read: int64(entry.Rates.Read), Write: int64(entry.Rates.Write)}, weight: int(entry.Weight)}
		for j, g := range entry.Grants {
			roles, err := rolesOf(g.Roles)
			if err != nil {
				return nil, bad(fmt.Sprintf(".grants.%d.roles", j), "%v", err)
			}
			if err := principal.grant(roles, g.Namespaces); err != nil {
				return nil, bad(fmt.Sprintf(".grants.%d.namespaces", j), "%v", err)
			}
		}
		if len(principal.grants) == 0 {
			return nil, bad(".grants", "principal %q has no grants, so each of its calls would be refused; add one, or remove the principal", entry.Name)
		}
		for j, text := range entry.Tokens {
			c, err := tokenCredential(text)
			if err == nil {
				err = p.add(c, principal)
			}
			if err != nil {
				return nil, bad(fmt.Sprintf(".tokens.%d", j), "%v", err)
			}
			p.tokens = append(p.tokens, Identity{Principal: principal, Credential: c})
		}
		for j, text := range entry.Subjects {
			c, err := subjectCredential(text)
			if err == nil {
				err = p.add(c, principal)
			}
			if err != nil {
				return nil, bad(fmt.Sprintf(".subjects.%d", j), "%v", err)
			}
			p.subjects = append(p.subjects, subject{name: text, Identity: Identity{Principal: principal, Credential: c}})
		}
		p.principals = append(p.principals, principal)
		p.byName[entry.Name] = principal
	}
	for i, entry := range f.Tenants {
		if key, err := p.addTenant(entry.Namespaces, entry.Quota); err != nil {
			return nil, y.Errorf(strings.TrimSuffix(fmt.Sprintf("tenants.%d.%s", i, key), "."), "%v", err)
		}
	}
	return p, nil
}

// withoutToken replaces the text of an error about an entry of tokens, because the text may quote a
// token.
func withoutToken(err error) error {
	var at *yamlfile.Error
	if errors.As(err, &at) && strings.Contains(at.Path, "tokens") {
		return &yamlfile.Error{File: at.File, Line: at.Line, Path: at.Path, Text: "must be a list of texts, each " + tokenForm}
	}
	return err
}

// add adds a credential to the policy.
func (p *Policy) add(c Credential, of *Principal) error {
	if other := p.all[c]; other != nil {
		return fmt.Errorf("principal %q has the same one; give each principal its own", other.name)
	}
	if len(p.all) == CredentialsMax {
		return fmt.Errorf("the file has more than %d tokens and subjects; clients with equal rights may share a principal and its token", CredentialsMax)
	}
	p.all[c] = of
	return nil
}

// tokenForm describes an entry of tokens.
const tokenForm = "sha256: followed by 64 hexadecimal digits (printf %s \"$TOKEN\" | sha256sum)"

// tokenCredential decodes an entry of tokens. The error does not have the text.
func tokenCredential(text string) (c Credential, err error) {
	digits, ok := strings.CutPrefix(text, "sha256:")
	raw, err := hex.DecodeString(digits)
	if !ok || err != nil || len(raw) != len(c) {
		return c, errors.New("is not " + tokenForm)
	}
	return Credential(raw), nil
}

// subjectBytesMax is the maximum length of a certificate subject in a file.
const subjectBytesMax = 1 << 10

// subjectCredential returns the credential of a certificate subject.
func subjectCredential(text string) (Credential, error) {
	if text == "" || len(text) > subjectBytesMax {
		return Credential{}, fmt.Errorf("has %d bytes; write the subject of a certificate (openssl x509 -noout -subject -nameopt RFC2253), at most %d", len(text), subjectBytesMax)
	}
	return sha256.Sum256([]byte("subject " + text)), nil
}

// nameBytesMax is the maximum length of the name of a principal.
const nameBytesMax = 64

func checkName(name string) error {
	if name == "" || len(name) > nameBytesMax || strings.IndexFunc(name, func(r rune) bool { return !nameRune(r) || r == '/' }) >= 0 {
		return fmt.Errorf("the name %q must have 1 to %d characters of [A-Za-z0-9._-]", clip(name), nameBytesMax)
	}
	return nil
}

// nameRune reports whether r can be part of the name of a namespace.
func nameRune(r rune) bool {
	return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("._/-", r)
}

func rolesOf(names []string) (all Role, err error) {
	for _, name := range names {
		role, ok := roleNamed(name)
		if !ok {
			return 0, fmt.Errorf("%q is not one of read, write, admin, operate", clip(name))
		}
		all |= role
	}
	if all == 0 {
		return 0, errors.New("the grant has no roles; write at least one of read, write, admin, operate")
	}
	return all, nil
}

// patternBytesMax is the maximum length of a pattern: that of the name of a namespace, and the "*".
const patternBytesMax = 129

// patternValid reports whether pattern is the name of a namespace, or a prefix followed by "*".
func patternValid(pattern string) bool {
	prefix := strings.TrimSuffix(pattern, "*")
	return pattern != "" && len(pattern) <= patternBytesMax && strings.IndexFunc(prefix, func(r rune) bool { return !nameRune(r) }) < 0
}

// grant adds roles on the namespaces that match one of the patterns.
func (p *Principal) grant(roles Role, patterns []string) error {
	if len(patterns) == 0 {
		return errors.New(`the grant has no namespaces; write names, prefixes such as team-a/*, or "*"`)
	}
	for _, pattern := range patterns {
		if !patternValid(pattern) {
			return fmt.Errorf(`%q is neither the name of a namespace nor a prefix followed by "*"`, clip(pattern))
		}
		if roles&Operate != 0 && pattern != "*" {
			return fmt.Errorf(`operate concerns the whole node: grant it on "*", in a grant of its own, not on %q`, clip(pattern))
		}
		p.grants = append(p.grants, grant{roles, pattern})
	}
	return nil
}

// clip limits the length of a text of the file in an error.
func clip(text string) string {
	if len(text) <= nameBytesMax {
		return text
	}
	return strings.ToValidUTF8(text[:nameBytesMax], "") + "…"
}
