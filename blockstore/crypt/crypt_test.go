package crypt

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
)

func testKey(t testing.TB, id string, fill byte) *Key {
	t.Helper()
	k, err := NewKey(id, bytes.Repeat([]byte{fill}, KeyBytes))
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func random(n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{byte(n)}).Read(b)
	return b
}

// TestLayers: a layer of any size decrypts to its bytes, and with one changed bit, another number,
// another salt, another context or another key it fails.
func TestLayers(t *testing.T) {
	k := testKey(t, "k", 1)
	salt := random(SaltBytes)
	c := k.Cipher(salt, []byte("volume"), []byte("header"))
	for _, n := range []int{1, 2, 15, 16, 17, 31, 32, 33, 100, 4096, 5000} {
		plain := random(n)
		sealed, tag := make([]byte, n), make([]byte, TagBytes)
		c.SealLayer(3, sealed, plain, tag)
		if n >= 16 && bytes.Contains(sealed, plain[n-16:]) {
			t.Errorf("%d bytes: the end of the layer is not encrypted", n)
		}
		open := func(c *Cipher, layer uint32, b, tag []byte) ([]byte, error) {
			b = bytes.Clone(b)
			err := c.OpenLayer(layer, b, tag)
			return b, err
		}
		if got, err := open(c, 3, sealed, tag); err != nil || !bytes.Equal(got, plain) {
			t.Fatalf("%d bytes: decrypted to other bytes, %v", n, err)
		}
		for at := 0; at < n; at += 1 + n/50 {
			b := bytes.Clone(sealed)
			b[at] ^= 0x10
			if _, err := open(c, 3, b, tag); !errors.Is(err, ErrAuth) {
				t.Fatalf("%d bytes, byte %d changed: %v; want ErrAuth", n, at, err)
			}
		}
		for at := range tag {
			b := bytes.Clone(tag)
			b[at] ^= 1
			if _, err := open(c, 3, sealed, b); !errors.Is(err, ErrAuth) {
				t.Fatalf("%d bytes, byte %d of the tag changed: %v; want ErrAuth", n, at, err)
			}
		}
		for what, other := range map[string]*Cipher{
			"salt":              k.Cipher(random(SaltBytes-1), []byte("volume"), []byte("header")),
			"context":           k.Cipher(salt, []byte("volume"), []byte("Header")),
			"bounds of context": k.Cipher(salt, []byte("volumeh"), []byte("eader")),
			"key":               testKey(t, "k", 2).Cipher(salt, []byte("volume"), []byte("header")),
		} {
			if _, err := open(other, 3, sealed, tag); !errors.Is(err, ErrAuth) {
				t.Errorf("%d bytes, another %s: %v; want ErrAuth", n, what, err)
			}
		}
		if _, err := open(c, 4, sealed, tag); !errors.Is(err, ErrAuth) {
			t.Errorf("%d bytes, another layer: %v; want ErrAuth", n, err)
		}
	}
}

// TestKeystreams: equal layers of one slot, and the two halves of a layer, are encrypted with different
// key streams.
func TestKeystreams(t *testing.T) {
	c := testKey(t, "k", 1).Cipher(random(SaltBytes))
	seen := make(map[string]string)
	note := func(what string, stream []byte) {
		for at := 0; at+16 <= len(stream); at += 16 {
			block := string(stream[at : at+16])
			if other := seen[block]; other != "" {
				t.Errorf("%s at %d has the key stream of %s", what, at, other)
			}
			seen[block] = fmt.Sprintf("%s at %d", what, at)
		}
	}
	for layer := range uint32(20) {
		zero, sealed := make([]byte, 64), make([]byte, 64)
		c.SealLayer(layer, sealed, zero, make([]byte, TagBytes))
		note(fmt.Sprint("layer ", layer), sealed)
	}
	rest := make([]byte, 64+TagBytes)
	c.SealRest(rest)
	note("the rest", rest[:64])
}

func TestRest(t *testing.T) {
	c := testKey(t, "k", 1).Cipher(random(SaltBytes))
	plain := random(100)
	b := append(bytes.Clone(plain), make([]byte, TagBytes)...)
	c.SealRest(b)
	for at := range b {
		o := bytes.Clone(b)
		o[at] ^= 4
		if _, err := c.OpenRest(o); !errors.Is(err, ErrAuth) {
			t.Fatalf("byte %d changed: %v; want ErrAuth", at, err)
		}
	}
	if _, err := c.OpenRest(make([]byte, TagBytes-1)); !errors.Is(err, ErrAuth) {
		t.Errorf("too short: %v; want ErrAuth", err)
	}
	if got, err := c.OpenRest(b); err != nil || !bytes.Equal(got, plain) {
		t.Errorf("decrypted to other bytes, %v", err)
	}
}

func TestParse(t *testing.T) {
	secret := base64.StdEncoding.EncodeToString(random(KeyBytes))
	other := base64.StdEncoding.EncodeToString(random(KeyBytes + 1)[:KeyBytes])
	r, err := Parse([]byte("# keys\n\n old-1\t" + secret + "\r\n2026.02_b " + other))
	if err != nil || strings.Join(r.IDs(), " ") != "old-1 2026.02_b" || r.Newest().ID() != "2026.02_b" || r.Find("old-1").ID() != "old-1" || r.Find("x") != nil {
		t.Fatalf("parsed %v, %v", r, err)
	}
	for text, want := range map[string]string{
		"":                                     "0 keys",
		"# only a comment":                     "0 keys",
		"a " + secret + "\na " + other:         "two keys have the id a",
		"a " + secret[:20]:                     "key a has 15 bytes, want 32",
		"a !" + secret[1:]:                     "line 1: the second word is not base64",
		secret:                                 "line 1 has 1 words",
		"a " + secret + " b":                   "line 1 has 3 words",
		"a/b " + secret:                        "the id of a key has",
		strings.Repeat("a", 33) + " " + secret: "the id of a key has",
		strings.Repeat("k "+secret+"\n", 1) + "x": "line 2 has 1 words",
	} {
		_, err := Parse([]byte(text))
		if !errors.Is(err, ErrKeys) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v; want %q", text, err, want)
		}
		if err != nil && strings.Contains(err.Error(), secret[1:12]) {
			t.Errorf("%q: the error has a part of the secret: %v", text, err)
		}
	}
}

// TestWith: content that is encrypted with a key and a secret can be decrypted with both only.
func TestWith(t *testing.T) {
	k, other := testKey(t, "k", 1), testKey(t, "k", 2)
	a, err := NewSecret(bytes.NewReader(random(SecretBytes)))
	if err != nil {
		t.Fatal(err)
	}
	b, err := NewSecret(nil)
	if err != nil || a == b {
		t.Fatalf("a second secret: equal %v, %v", a == b, err)
	}
	if _, err := NewSecret(bytes.NewReader(nil)); err == nil {
		t.Error("a secret of no random bytes")
	}
	plain, salt := random(100), random(SaltBytes)
	sealed := append(bytes.Clone(plain), make([]byte, TagBytes)...)
	k.With(&a).Cipher(salt).SealRest(sealed)
	for what, key := range map[string]*Key{"key alone": k, "another secret": k.With(&b), "another key": other.With(&a), "no secret": k.With(new(Secret))} {
		if _, err := key.Cipher(salt).OpenRest(bytes.Clone(sealed)); !errors.Is(err, ErrAuth) {
			t.Errorf("%s: %v; want ErrAuth", what, err)
		}
	}
	if got, err := k.With(&a).Cipher(salt).OpenRest(bytes.Clone(sealed)); err != nil || !bytes.Equal(got, plain) {
		t.Errorf("decrypted to other bytes, %v", err)
	}
	if id := k.With(&a).ID(); id != "k" {
		t.Errorf("id %s", id)
	}
}

// TestNoSecretInText: no verb of fmt prints the secret of a key.
func TestNoSecretInText(t *testing.T) {
	k := testKey(t, "k", 0xab)
	r, err := NewKeyring(k)
	if err != nil {
		t.Fatal(err)
	}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%d", "%x"} {
		secret := Secret(k.secret)
		for _, v := range []any{k, *k, r, *r, secret, &secret} {
			text := strings.ToLower(fmt.Sprintf(verb, v))
			for _, part := range []string{"abab", "171 171", "0xab"} {
				if strings.Contains(text, part) {
					t.Errorf("%s of %T has the secret: %s", verb, v, text)
				}
			}
		}
	}
}

func TestEqual(t *testing.T) {
	a, b := testKey(t, "a", 1), testKey(t, "b", 2)
	ring := func(keys ...*Key) *Keyring {
		r, err := NewKeyring(keys...)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	var none *Keyring
	if !none.Equal(nil) || none.Equal(ring(a)) || ring(a).Equal(nil) || !ring(a, b).Equal(ring(testKey(t, "a", 1), b)) ||
		ring(a, b).Equal(ring(b, a)) || ring(a).Equal(ring(testKey(t, "a", 2))) || ring(a).Equal(ring(a, b)) {
		t.Error("Equal is wrong")
	}
	if a.Check() == b.Check() || a.Check() != testKey(t, "c", 1).Check() {
		t.Error("the check value does not depend on the secret alone")
	}
}

func BenchmarkCipher(b *testing.B) {
	k := testKey(b, "k", 1)
	salt := random(SaltBytes)
	for b.Loop() {
		k.Cipher(salt, salt[:16], make([]byte, 104))
	}
}

func BenchmarkOpenLayer(b *testing.B) {
	c := testKey(b, "k", 1).Cipher(random(SaltBytes))
	plain, sealed, tag := random(64<<10), make([]byte, 64<<10), make([]byte, TagBytes)
	c.SealLayer(0, sealed, plain, tag)
	buf := make([]byte, len(sealed))
	b.SetBytes(int64(len(buf)))
	for b.Loop() {
		copy(buf, sealed)
		if err := c.OpenLayer(0, buf, tag); err != nil {
			b.Fatal(err)
		}
	}
}
