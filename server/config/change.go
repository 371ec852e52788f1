package config

import (
	"fmt"
	"regexp"
	"strconv"
)

// A Change is a setting whose value differs between two configurations.
type Change struct {
	// Key is the path of the setting, "limits.writes".
	Key string
	// Old and New are the exact values as text, without passwords in URLs. They contain no other
	// secret, because settings name the files of tokens and keys.
	Old, New string
	// Restart is the reason why a running process cannot take the new value; empty if the process
	// can take it.
	Restart string
}

// String returns the change as a sentence, with the advice to restart if it needs one.
func (c Change) String() string {
	text := fmt.Sprintf("%s: %s → %s", c.Key, shown(c.Old), shown(c.New))
	if c.Restart != "" {
		text += ": " + c.Restart + "; restart to apply it, or set it back"
	}
	return text
}

// shown returns value, or "" in quotes if value is empty, so that an empty value is visible in a
// sentence.
func shown(value string) string {
	if value == "" {
		return `""`
	}
	return value
}

// Changes returns the settings in which two configurations of one type differ, in the order of the
// struct. were and are are their keys.
func Changes(were, are []Key) []Change {
	var all []Change
	for i, was := range were {
		before, after := was.exact(), are[i].exact()
		if before == after {
			continue
		}
		c := Change{Key: was.Path, Old: redact(before), New: redact(after), Restart: was.Restart}
		if was.toggle != "" && (before == "") != (after == "") {
			c.Restart = was.toggle
		}
		all = append(all, c)
	}
	return all
}

// userinfo matches the user and the password of a URL.
var userinfo = regexp.MustCompile(`://[^/@,]*@`)

// redact removes passwords from URLs.
func redact(value string) string { return userinfo.ReplaceAllString(value, "://…@") }

// exact returns the key's value as text. Different values have different texts, unlike with String,
// which rounds a Size.
func (k Key) exact() string {
	text := k.String()
	if size, ok := k.value.Interface().(Size); ok {
		if parsed, err := ParseSize(text); err != nil || parsed != size {
			return strconv.FormatInt(int64(size), 10)
		}
	}
	return text
}
