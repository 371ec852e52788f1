package access_test

import (
	"crypto/sha256"
	"crypto/x509/pkix"
	"encoding/asn1"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/server/access"
)

const (
	tokenA = "token-of-team-a-0123456789"
	tokenB = "token-of-team-b-0123456789"
)

// hash is the entry of a token in a roles file.
func hash(token string) string { return fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(token))) }

func good() string {
	return `# two teams
principals:
  - name: team-a
    tokens: [` + hash(tokenA) + `]
    subjects: ["CN=engine,O=team-a"]
    rates: {read: 1.5GiB, write: 1000}
    weight: 3
    grants:
      - {roles: [read, write], namespaces: [team-a/*, shared]}
      - {roles: [admin], namespaces: [team-a/scratch]}
  - name: sre
    tokens: [` + hash(tokenB) + `]
    grants:
      - {roles: [operate], namespaces: ["*"]}
`
}

func parse(t *testing.T, text string) *access.Policy {
	t.Helper()
	p, err := access.Parse("roles.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestGrants(t *testing.T) {
	p := parse(t, good())
	a, ok := p.ByHeader("Bearer " + tokenA)
	if !ok || a.Principal.Name() != "team-a" {
		t.Fatalf("the token is of %v, %v", a, ok)
	}
	for _, c := range []struct {
		roles     access.Role
		namespace string
		want      bool
	}{
		{access.Read, "team-a/x", true},
		{access.Read, "team-a/", true},
		{access.Read, "team-a", false},
		{access.Read, "team-ab/x", false},
		{access.Read, "shared", true},
		{access.Read, "shared2", false},
		{access.Read, "", false},
		{access.Write, "team-a/x", true},
		{access.Admin, "team-a/x", false},
		{access.Admin, "team-a/scratch", true},
		{access.Admin, "team-a/scratch2", false},
		{access.Admin | access.Write, "team-a/x", true},
		{access.Operate, "team-a/x", false},
		{0, "team-a/x", false},
	} {
		if got := a.Principal.Has(c.roles, c.namespace); got != c.want {
			t.Errorf("team-a has %v on %q: %v", c.roles, c.namespace, got)
		}
	}
	if got, want := a.Principal.Rates(), (access.Rates{Read: 3 << 29, Write: 1000}); got != want {
		t.Errorf("the rates of team-a are %v; want %v", got, want)
	}
	if !a.Principal.HasAnywhere(access.Admin) || a.Principal.HasAnywhere(access.Operate) || a.Principal.HasEverywhere(access.Any) {
		t.Error("the roles of team-a anywhere or everywhere are wrong")
	}
	for prefix, want := range map[string]bool{"team-a/": true, "team-a/x": true, "team-a": false, "team-": false, "": false, "team-b/": false} {
		if got := a.Principal.HasAll(access.Read, prefix); got != want {
			t.Errorf("team-a has read on all of %s*: %v", prefix, got)
		}
	}
	b, _ := p.ByHeader("Bearer " + tokenB)
	if a, b := a.Principal.Weight(), b.Principal.Weight(); a != 3 || b != 1 {
		t.Errorf("the weights are %d and %d; want 3 and the default 1", a, b)
	}
	if got := b.Principal.Rates(); got != (access.Rates{}) {
		t.Errorf("the rates of sre are %v", got)
	}
	if !b.Principal.HasEverywhere(access.Operate) || b.Principal.HasEverywhere(access.Read) || b.Principal.Has(access.Read, "team-a/x") {
		t.Error("the roles of sre are wrong")
	}
}

func TestIdentities(t *testing.T) {
	p := parse(t, good())
	for _, c := range []struct {
		header, want string
	}{
		{"", ""},
		{"Bearer ", ""},
		{"Bearer wrong-token-0123456789", ""},
		{tokenA, ""},
		{"Basic " + tokenA, ""},
		{"Bearer " + tokenA + " ", ""},
		{"Bearer " + hash(tokenA), ""},
		{"Bearer " + tokenA, "team-a"},
		{"Bearer " + tokenB, "sre"},
	} {
		id, ok := p.ByHeader(c.header)
		if ok != (c.want != "") || ok && id.Principal.Name() != c.want {
			t.Errorf("%q: %v, %v", c.header, id, ok)
		}
		if again, same := p.ByCredential(id.Credential); same != ok || again.Principal != id.Principal {
			t.Errorf("%q: its credential gives %v, %v", c.header, again, same)
		}
	}
	for subject, want := range map[string]bool{"CN=engine,O=team-a": true, "CN=engine": false, "": false, "cn=engine,o=team-a": false} {
		if id, ok := p.BySubject(subject); ok != want || ok && id.Principal.Name() != "team-a" {
			t.Errorf("subject %q: %v, %v", subject, id, ok)
		}
	}
	if n := len(p.Credentials()); n != 3 {
		t.Errorf("%d credentials", n)
	}
}

// TestShortToken: a token that can be guessed is not accepted, although the file has its SHA-256.
func TestShortToken(t *testing.T) {
	p := parse(t, strings.Replace(good(), hash(tokenA), hash("short"), 1))
	if _, ok := p.ByHeader("Bearer short"); ok {
		t.Error("a token of 5 characters is accepted")
	}
}

// TestBadFiles: each error names the line and has no token.
func TestBadFiles(t *testing.T) {
	const secret = "5up3rs3cretbearertoken"
	for name, c := range map[string]struct{ replace, by, want string }{
		"a token in plain text":         {hash(tokenA), secret, "4: principals.0.tokens.0: is not sha256:"},
		"a token with a prefix":         {hash(tokenA), "sha256:" + secret, "4: principals.0.tokens.0: is not sha256:"},
		"a hash without prefix":         {"sha256:", "", "4: principals.0.tokens.0: is not sha256:"},
		"a token in place of a list":    {"[" + hash(tokenA) + "]", secret, "4: principals.0.tokens: must be a list"},
		"a token as a mapping":          {hash(tokenA), "{" + secret + ": 1}", "4: principals.0.tokens.0: must be a list"},
		"half a hash":                   {hash(tokenA), hash(tokenA)[:40], "4: principals.0.tokens.0"},
		"the same token twice":          {hash(tokenB), hash(tokenA), `12: principals.1.tokens.0: principal "team-a" has the same one`},
		"the same name twice":           {"name: sre", "name: team-a", `11: principals.1.name: two principals`},
		"no name":                       {"name: sre", `name: ""`, "11: principals.1.name"},
		"a name with a blank":           {"name: sre", `name: "s re"`, "11: principals.1.name"},
		"a name with a newline":         {"name: sre", `name: "s\nre"`, "11: principals.1.name"},
		"an unknown role":               {"[admin]", "[owner]", `10: principals.0.grants.1.roles: "owner" is not one of read, write, admin, operate`},
		"no roles":                      {"[admin]", "[]", "10: principals.0.grants.1.roles: the grant has no roles"},
		"no namespaces":                 {"[team-a/scratch]", "[]", "10: principals.0.grants.1.namespaces: the grant has no namespaces"},
		"an empty pattern":              {"[team-a/scratch]", `[""]`, "is neither the name of a namespace"},
		"a star inside":                 {"team-a/scratch", "team-*/x", "is neither the name of a namespace"},
		"two stars":                     {"team-a/scratch", "team-a/**", "is neither the name of a namespace"},
		"operate on a prefix":           {`["*"]`, "[team-a/*]", "operate concerns the whole node"},
		"no grants":                     {"    grants:\n      - {roles: [operate], namespaces: [\"*\"]}\n", "", "has no grants"},
		"no credential":                 {"    tokens: [" + hash(tokenB) + "]\n", "", "has neither tokens nor subjects"},
		"a rate of nothing":             {"read: 1.5GiB", "read: 0", `6: principals.0.rates.read: "0" is not a number of bytes per second`},
		"a rate with another unit":      {"read: 1.5GiB", "read: 2GiB/s", `6: principals.0.rates.read: "2GiB/s" is not a number of bytes per second`},
		"a negative rate":               {"read: 1.5GiB", "read: -1", `6: principals.0.rates.read: "-1" is not a number of bytes per second`},
		"a rate above all bounds":       {"read: 1.5GiB", "read: 9EiB", `6: principals.0.rates.read: "9EiB" is not a number of bytes per second`},
		"a weight of 0":                 {"weight: 3", "weight: 0", `7: principals.0.weight: "0" is not a weight; write a whole number from 1 to 1000`},
		"a negative weight":             {"weight: 3", "weight: -3", `7: principals.0.weight: "-3" is not a weight`},
		"a fraction as weight":          {"weight: 3", "weight: 1.5", `7: principals.0.weight: "1.5" is not a weight`},
		"a weight above the maximum":    {"weight: 3", "weight: 1001", `7: principals.0.weight: "1001" is not a weight`},
		"a weight without a value":      {"weight: 3", "weight:", `7: principals.0.weight: has no value`},
		"an empty subject":              {`"CN=engine,O=team-a"`, `""`, "principals.0.subjects.0: has 0 bytes"},
		"a subject twice":               {`"CN=engine,O=team-a"`, `"CN=a", "CN=a"`, "principals.0.subjects.1: principal"},
		"an unknown key":                {"name: sre", "nmae: sre", `unknown key "nmae"; did you mean "name"`},
		"no principals":                 {good(), "principals: []\n", "the file has no principal"},
		"an empty file":                 {good(), "", "the file has no principal"},
		"not YAML":                      {good(), "principals: [", "roles.yaml"},
		"a star without quotes":         {`["*"]`, "[*]", "roles.yaml"},
		"more credentials than allowed": {"[" + hash(tokenA) + "]", "[" + strings.Join(hashes(access.CredentialsMax), ", ") + "]", "more than 256"},
	} {
		text := good()
		if !strings.Contains(text, c.replace) {
			t.Fatalf("%s: %q is not in the file", name, c.replace)
		}
		_, err := access.Parse("roles.yaml", []byte(strings.Replace(text, c.replace, c.by, 1)))
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), secret[:5]) {
			t.Errorf("%s: the error is %v; want %q without the token", name, err, c.want)
		}
	}
}

func hashes(n int) (out []string) {
	for i := range n {
		out = append(out, hash(fmt.Sprintf("token-%020d", i)))
	}
	return out
}

func TestReadFile(t *testing.T) {
	if p, err := access.ReadFile(""); p != nil || err != nil {
		t.Errorf("no file: %v, %v", p, err)
	}
	path := filepath.Join(t.TempDir(), "roles.yaml")
	if _, err := access.ReadFile(path); err == nil {
		t.Error("a file that does not exist is read")
	}
	if err := os.WriteFile(path, []byte(good()), 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := access.ReadFile(path)
	if err != nil || p.Principals() != 2 || !p.Equal(parse(t, good())) || p.Equal(parse(t, good()+"\n")) || p.Equal(nil) {
		t.Errorf("%v, %v", p, err)
	}
	var none *access.Policy
	if none.Principals() != 0 || !none.Equal(nil) || none.Equal(p) {
		t.Error("no policy is not equal to itself alone")
	}
}

// FuzzParse: of any input, Parse makes an error or a policy in which every credential has a
// principal with grants, and no principal has roles that are not in the input.
func FuzzParse(f *testing.F) {
	f.Add([]byte(good()))
	f.Add([]byte("principals: [{name: a, tokens: [sha256:00], grants: []}]"))
	f.Add([]byte("principals: &a [{name: b, grants: *a}]"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		p, err := access.Parse("roles.yaml", raw)
		if err != nil {
			return
		}
		if p.Principals() == 0 || len(p.Credentials()) == 0 || len(p.Credentials()) > access.CredentialsMax {
			t.Fatalf("%d principals with %d credentials", p.Principals(), len(p.Credentials()))
		}
		for _, c := range p.Credentials() {
			id, ok := p.ByCredential(c)
			if !ok || id.Principal.Name() == "" || !id.Principal.HasAnywhere(access.Any) {
				t.Fatalf("credential %x is of %v", c, id.Principal)
			}
			for _, r := range access.Roles() {
				if id.Principal.HasAnywhere(r) && !strings.Contains(string(raw), r.String()) && !strings.Contains(string(raw), `\`) {
					t.Fatalf("%q has the role %v, which the file does not name", id.Principal.Name(), r)
				}
			}
			if id.Principal.HasAnywhere(access.Operate) != id.Principal.HasEverywhere(access.Operate) {
				t.Fatalf("%q operates a part of the node", id.Principal.Name())
			}
		}
	})
}

// FuzzHeader: of any header, only the right ones name a principal.
func FuzzHeader(f *testing.F) {
	p, err := access.Parse("roles.yaml", []byte(good()))
	if err != nil {
		f.Fatal(err)
	}
	for _, seed := range []string{"", "Bearer", "Bearer ", "Bearer " + tokenA, "bearer " + tokenA, "Bearer " + tokenA + "\x00", "Bearer " + tokenB} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, header string) {
		id, ok := p.ByHeader(header)
		want := map[string]string{"Bearer " + tokenA: "team-a", "Bearer " + tokenB: "sre"}[header]
		if ok != (want != "") || ok && id.Principal.Name() != want {
			t.Fatalf("%q is %v", header, id.Principal)
		}
	})
}

// FuzzSubject: of the subjects of any certificates, only the one in the file names the principal. Text in one
// attribute that looks like another attribute does not.
func FuzzSubject(f *testing.F) {
	p, err := access.Parse("roles.yaml", []byte(good()))
	if err != nil {
		f.Fatal(err)
	}
	for _, seed := range [][3]string{{"engine", "team-a", ""}, {"engine,O=team-a", "", ""}, {"engine", "team-a", "x"}, {"engine+O=team-a", "", ""}, {"", "team-a,CN=engine", ""}} {
		f.Add(seed[0], seed[1], seed[2])
	}
	f.Fuzz(func(t *testing.T, name, organization, unit string) {
		made := pkix.Name{CommonName: name}
		if organization != "" {
			made.Organization = []string{organization}
		}
		if unit != "" {
			made.OrganizationalUnit = []string{unit}
		}
		der, err := asn1.Marshal(made.ToRDNSequence())
		if err != nil {
			return // a text that no certificate can have
		}
		var rdns pkix.RDNSequence
		if _, err := asn1.Unmarshal(der, &rdns); err != nil {
			return
		}
		var subject pkix.Name
		subject.FillFromRDNSequence(&rdns)
		want := name == "engine" && organization == "team-a" && unit == ""
		if id, ok := p.BySubject(subject.String()); ok != want {
			t.Fatalf("the subject %q of a certificate is %v", subject, id.Principal)
		}
	})
}

// TestDocumentation: the examples of docs/access.md and of the package's documentation are valid.
func TestDocumentation(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(testkit.RepositoryRoot(t), "docs", "access.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, example, ok := strings.Cut(string(page), "```yaml\n")
	example, _, end := strings.Cut(example, "```")
	if p := parse(t, example); !ok || !end || p.Principals() != 2 {
		t.Errorf("docs/access.md: %d principals", p.Principals())
	}
	doc, err := os.ReadFile("doc.go")
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ := strings.Cut(string(doc), "// The file is YAML:\n//\n")
	text, _, ok = strings.Cut(text, "\n//\n// The format differs")
	if p := parse(t, strings.ReplaceAll(text, "//\t", "")); !ok || p.Principals() != 2 {
		t.Errorf("doc.go: %d principals", p.Principals())
	}
}
