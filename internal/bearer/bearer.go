// Package bearer reads files of bearer tokens and compares tokens. Of a file it keeps only the token that a client
// sends (File).
//
//	new-token        one token per line: a client sends the first,
//	old-token        and a server accepts all of them
//
// Two tokens let an operator replace a token while clients use the old one: the servers accept both
// until each client has the new one.
package bearer

import (
	"crypto/subtle"
	"fmt"
	"os"
	"strings"
)

// MinChars is the minimum length of a token: 16 characters of base64 are 96 random bits.
const MinChars = 16

// Max is the maximum number of tokens in a file. The number is limited because the token of every
// call is compared with each of them.
const Max = 16

// Parse returns the tokens in a file's content: its lines without surrounding blanks, except empty
// lines.
func Parse(content []byte) []string {
	var tokens []string
	for line := range strings.Lines(string(content)) {
		if token := strings.TrimSpace(line); token != "" {
			tokens = append(tokens, token)
		}
	}
	return tokens
}

// Read returns the tokens of a file, of which there is at least one, or nil if path is "". No error
// contains a token.
func Read(path string) ([]string, error) {
	if path == "" {
		return nil, nil
	}
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("token file: %w", err)
	}
	tokens := Parse(content)
	if len(tokens) > Max {
		return nil, fmt.Errorf("token file %s: it has %d tokens; keep the ones in use, at most %d", path, len(tokens), Max)
	}
	shortest := 0
	for i, token := range tokens {
		if i == 0 || len(token) < shortest {
			shortest = len(token)
		}
	}
	if shortest < MinChars {
		return nil, fmt.Errorf("token file %s: a token of %d characters can be guessed; use at least %d (openssl rand -hex 32 > %s)", path, shortest, MinChars, path)
	}
	return tokens, nil
}

// Accepts reports whether one of the values of an Authorization header has one of the tokens. If
// there are no tokens, every call is accepted. The time that Accepts takes does not depend on the
// number of characters that match.
func Accepts(tokens []string, headers ...string) bool {
	return len(tokens) == 0 || Index(tokens, headers...) >= 0
}

// Index returns the index of a token that one of the values of an Authorization header has, or -1 if there
// is none. The time that Index takes does not depend on the number of characters that match.
func Index(tokens []string, headers ...string) int {
	found := -1
	for _, header := range headers {
		given, ok := strings.CutPrefix(header, "Bearer ")
		if !ok {
			continue
		}
		for i, token := range tokens {
			same := subtle.ConstantTimeCompare([]byte(given), []byte(token))
			found = subtle.ConstantTimeSelect(same, i, found)
		}
	}
	return found
}
