package front

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"reflect"
	"strings"
	"testing"
)

// decoded is the simplest parser of an object. Numbers keep their spelling.
func decoded(t *testing.T, text []byte) map[string]any {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	var object map[string]any
	if err := d.Decode(&object); err != nil {
		t.Fatalf("%q: %v", text, err)
	}
	return object
}

// text returns the bytes that are sent to an engine.
func text(t *testing.T, p payload) []byte {
	t.Helper()
	b, err := io.ReadAll(p.open())
	if err != nil || int64(len(b)) != p.size() {
		t.Fatalf("%d bytes of %d, %v", len(b), p.size(), err)
	}
	return b
}

// TestEdited: members that are not edited keep their spelling and their order.
func TestEdited(t *testing.T) {
	for _, c := range []struct{ body, want string }{
		{`{}`, `{"new":[1],"old":2}`},
		{` { "a" : 1.0e+01 , "\u006fld" : {"x": [ "}\"" ]}, "gone":null,"b":"\u00e9\/" } `, `{"a" : 1.0e+01,"b":"\u00e9\/","new":[1],"old":2}`},
		{`{"old":1,"old":3,"gone":4,"gone":5}`, `{"new":[1],"old":2}`},
		{"null", `{"new":[1],"old":2}`},
	} {
		f, err := parseFields([]byte(c.body))
		if err != nil {
			t.Fatal(err)
		}
		if got := string(text(t, f.edited(edit{"new", []byte("[1]")}, edit{"old", []byte("2")}, edit{"gone", nil}))); got != c.want {
			t.Errorf("%s became %s; want %s", c.body, got, c.want)
		}
	}
	many := "{" + strings.Repeat(`"a":1,`, maxFields) + `"a":1}`
	if _, err := parseFields([]byte(many)); !errors.Is(err, errManyFields) {
		t.Errorf("%d members: %v", maxFields+1, err)
	}
}

// FuzzEdited compares edits of the text with edits of a decoded map, in which the last of two
// members with the same name is used.
func FuzzEdited(f *testing.F) {
	for _, seed := range []string{`{}`, `{"n":1.50,"max_tokens":1e3,"x":{"n":[{}]}}`, `{"n":2,"n":3}`, `{"":"\\\"","\u006e":[[]] , "stream":true}`, "{\"a\":\"\xff\"}", `null`} {
		f.Add([]byte(seed), "n", "min_tokens", `{"a": 1.0}`)
	}
	f.Fuzz(func(t *testing.T, body []byte, set, remove, value string) {
		if set == remove || !json.Valid([]byte(value)) || strings.ToValidUTF8(set, "") != set || strings.ToValidUTF8(remove, "") != remove {
			return
		}
		members, err := parseFields(body)
		if err != nil {
			if json.Unmarshal(body, new(map[string]any)) == nil && !errors.Is(err, errManyFields) {
				t.Errorf("%q: %v", body, err)
			}
			return
		}
		want := decoded(t, body)
		if want == nil {
			want = make(map[string]any)
		}
		given, err := json.Marshal(want[set])
		if err != nil {
			t.Fatal(err)
		}
		if got := members.get(set); (got == nil) != (want[set] == nil) || got != nil && !reflect.DeepEqual(decoded(t, objectOf(set, got)), decoded(t, objectOf(set, given))) {
			t.Errorf("%q of %q is %q; want %s", set, body, got, given)
		}
		want[set] = decoded(t, objectOf("v", []byte(value)))["v"]
		delete(want, remove)
		out := text(t, members.edited(edit{set, []byte(value)}, edit{remove, nil}))
		checkSame(t, out, want)
	})
}

// checkSame fails unless an object has these members.
func checkSame(t *testing.T, object []byte, want map[string]any) {
	t.Helper()
	if got := decoded(t, object); !reflect.DeepEqual(got, want) {
		t.Errorf("%q; want %v", object, want)
	}
}

// objectOf returns an object with one member.
func objectOf(name string, value []byte) []byte {
	key, _ := json.Marshal(name) // every string can be encoded
	return bytes.Join([][]byte{[]byte("{"), key, []byte(":"), value, []byte("}")}, nil)
}
