// Package crypt encrypts the content of slots and catalogues with AES-256-GCM. It has keys, no I/O
// and no policy.
//
// No two contents are encrypted with the same key and nonce. Each slot write and each catalogue
// write derives a key of its own with HKDF-Expand (SHA-256) from
//
//   - the volume key of the operator (Key),
//   - a salt of 32 random bytes, which is stored with the content, and
//   - the context: for a slot the id of its volume and all clear fields of its header, among them
//     extent and generation.
//
// The nonces under the derived key are the numbers of the layers. Generations alone would be nonces
// as long as the boot counter of a store never goes back. It goes back if an operator restores an
// image of a disk, and the nodes of a cluster may use one key file. The salt protects these cases;
// the generation in the context protects against a random source that repeats itself.
//
// With the secret of an epoch (Secret), the slot's key is derived from HKDF-Extract of the volume key, as
// the salt, and the secret. A slot can then be decrypted only with both: when the secret is erased, the
// volume key does not decrypt the slots of the epoch any more.
//
// A key of its own for each slot also binds the content to its place: if a clear field of the header
// was changed, or the content belongs to another slot, another key is derived, and every tag is wrong.
package crypt

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
)

// The sizes of the parts, in bytes.
const (
	// KeyBytes is the size of the secret of a Key.
	KeyBytes = 32
	// SecretBytes is the size of a Secret.
	SecretBytes = 32
	// SaltBytes is the size of the random salt of a content.
	SaltBytes = 32
	// TagBytes is the size of an authentication tag.
	TagBytes = 16
	// CheckBytes is the size of a key check value.
	CheckBytes = 16
	// MaxIDBytes is the maximum length of the id of a key.
	MaxIDBytes = 32
	// MaxKeys is the maximum number of keys of a Keyring.
	MaxKeys = 64
)

var (
	// ErrAuth: the tag does not match. The content, its place or its header was changed, or it was
	// encrypted with another key.
	ErrAuth = errors.New("authentication failed")
	// ErrKeys is wrapped by the errors about a text of keys.
	ErrKeys = errors.New("bad keys")
)

// Key is one key of the operator. Its text forms contain only the id.
type Key struct {
	id     string
	secret [KeyBytes]byte
}

// NewKey makes a key. The id consists of 1 to MaxIDBytes letters, digits, dots, dashes and
// underscores.
func NewKey(id string, secret []byte) (*Key, error) {
	if id == "" || len(id) > MaxIDBytes || strings.Trim(id, idChars) != "" {
		return nil, fmt.Errorf("crypt: the id of a key has 1 to %d letters, digits, dots, dashes and underscores: %w", MaxIDBytes, ErrKeys)
	}
	if len(secret) != KeyBytes {
		return nil, fmt.Errorf("crypt: key %s has %d bytes, want %d: %w", id, len(secret), KeyBytes, ErrKeys)
	}
	k := &Key{id: id}
	copy(k.secret[:], secret)
	return k, nil
}

const idChars = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_"

// ID returns the id of the key.
func (k *Key) ID() string { return k.id }

// Secret is the random secret of one epoch of a namespace. No format prints it.
type Secret [SecretBytes]byte

// NewSecret reads a secret from r; nil means crypto/rand.
func NewSecret(r io.Reader) (s Secret, err error) {
	err = Salt(r, s[:])
	return s, err
}

// Format prints no byte of the secret, with any verb.
func (s Secret) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, "secret") }

// With returns the key that k and the secret of an epoch determine together. It has the id of k.
func (k *Key) With(s *Secret) *Key {
	prk, err := hkdf.Extract(sha256.New, s[:], k.secret[:])
	if err != nil {
		panic(fmt.Sprintf("crypt: HKDF of a secret: %v", err)) // only the FIPS settings of the process can cause it
	}
	both := &Key{id: k.id}
	copy(both.secret[:], prk)
	return both
}

// Format prints the id, with any verb, so that no format prints the secret.
func (k Key) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, k.id) }

// Check returns the key check value, which differs for two keys and does not reveal them.
func (k *Key) Check() (check [CheckBytes]byte) {
	copy(check[:], derive(&k.secret, "penstock key check", CheckBytes))
	return check
}

// derive returns n bytes of HKDF-Expand with SHA-256. A secret consists of random bytes, so it needs no
// extraction first.
func derive(secret *[KeyBytes]byte, info string, n int) []byte {
	b, err := hkdf.Expand(sha256.New, secret[:], info, n)
	if err != nil {
		panic(fmt.Sprintf("crypt: HKDF of %d bytes: %v", n, err)) // only n or the FIPS settings of the process can cause it
	}
	return b
}

// Keyring has the keys of a store.
type Keyring struct{ keys []*Key }

// Format prints the ids, with any verb.
func (r Keyring) Format(f fmt.State, _ rune) { fmt.Fprint(f, r.IDs()) }

// NewKeyring makes a keyring. The last key is the newest, which encrypts new content.
func NewKeyring(keys ...*Key) (*Keyring, error) {
	if len(keys) == 0 || len(keys) > MaxKeys {
		return nil, fmt.Errorf("crypt: %d keys, want 1 to %d: %w", len(keys), MaxKeys, ErrKeys)
	}
	r := &Keyring{}
	for _, k := range keys {
		if r.Find(k.id) != nil {
			return nil, fmt.Errorf("crypt: two keys have the id %s: %w", k.id, ErrKeys)
		}
		r.keys = append(r.keys, k)
	}
	return r, nil
}

// Parse reads a text with one key a line: the id, white space, and 32 bytes in base64. Empty lines
// and lines that begin with # are skipped. No error contains a part of a secret.
func Parse(text []byte) (*Keyring, error) {
	var keys []*Key
	number := 0
	for line := range bytes.Lines(text) {
		number++
		line = bytes.TrimSpace(line)
		if len(line) == 0 || line[0] == '#' {
			continue
		}
		fields := bytes.Fields(line)
		if len(fields) != 2 {
			return nil, fmt.Errorf("crypt: line %d has %d words; want the id of a key and its 32 bytes in base64: %w", number, len(fields), ErrKeys)
		}
		secret, err := base64.StdEncoding.DecodeString(string(fields[1]))
		if err != nil {
			return nil, fmt.Errorf("crypt: line %d: the second word is not base64: %w", number, ErrKeys)
		}
		k, err := NewKey(string(fields[0]), secret)
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", number, err)
		}
		keys = append(keys, k)
	}
	return NewKeyring(keys...)
}

// Newest returns the key for new content.
func (r *Keyring) Newest() *Key { return r.keys[len(r.keys)-1] }

// Find returns the key with an id, or nil.
func (r *Keyring) Find(id string) *Key {
	for _, k := range r.keys {
		if k.id == id {
			return k
		}
	}
	return nil
}

// IDs returns the ids, oldest first.
func (r Keyring) IDs() []string {
	ids := make([]string, len(r.keys))
	for i, k := range r.keys {
		ids[i] = k.id
	}
	return ids
}

// Equal reports whether two keyrings have the same keys in the same order.
func (r *Keyring) Equal(o *Keyring) bool {
	if r == nil || o == nil || len(r.keys) != len(o.keys) {
		return r == o
	}
	for i, k := range r.keys {
		if k.id != o.keys[i].id || subtle.ConstantTimeCompare(k.secret[:], o.keys[i].secret[:]) == 0 {
			return false
		}
	}
	return true
}

// Salt fills salt with random bytes from r; nil means crypto/rand.
func Salt(r io.Reader, salt []byte) error {
	if r == nil {
		r = rand.Reader
	}
	if _, err := io.ReadFull(r, salt); err != nil {
		return fmt.Errorf("crypt: random bytes for a salt: %w", err)
	}
	return nil
}

// Cipher encrypts and decrypts one content: the layers of one slot, or one catalogue.
type Cipher struct {
	gcm  cipher.AEAD
	tail cipher.Block
}

// Cipher derives the cipher of one content from its salt and context.
func (k *Key) Cipher(salt []byte, context ...[]byte) *Cipher {
	info := make([]byte, 0, 256)
	info = append(info, "penstock content"...)
	for _, c := range append([][]byte{salt}, context...) {
		info = binary.LittleEndian.AppendUint32(info, uint32(len(c)))
		info = append(info, c...)
	}
	keys := derive(&k.secret, string(info), 2*KeyBytes)
	c := new(Cipher)
	block, err := aes.NewCipher(keys[:KeyBytes])
	if err == nil {
		c.gcm, err = cipher.NewGCM(block)
	}
	if err == nil {
		c.tail, err = aes.NewCipher(keys[KeyBytes:])
	}
	if err != nil {
		panic(fmt.Sprintf("crypt: AES-256-GCM: %v", err)) // the sizes are constants
	}
	return c
}

// nonceBytes is the size of a nonce of GCM.
const nonceBytes = 12

// The first byte of a nonce separates the layers of a slot from its list of checksums.
const (
	nonceLayer byte = iota
	nonceRest
)

func nonce(kind byte, number uint32) (n [nonceBytes]byte) {
	n[0] = kind
	binary.LittleEndian.PutUint32(n[8:], number)
	return n
}

// tailBytes is the part at the end of a layer that is not encrypted by GCM itself.
const tailBytes = TagBytes

// The tags of the layers are in the slot's header, but cipher.AEAD decrypts in place only if the tag
// follows the ciphertext, where the next layer is. So the last 16 bytes of a layer, its tail, are
// encrypted with one block of AES in counter mode under another key, and are additional data of
// GCM, which encrypts the bytes before the tail. While GCM decrypts in place, the tag is in the
// place of the tail. Layers of fewer than 16 bytes are decrypted on the stack.

// mask returns the key stream of the tail of a layer.
func (c *Cipher) mask(layer uint32) (m [tailBytes]byte) {
	binary.LittleEndian.PutUint32(m[:], layer)
	c.tail.Encrypt(m[:], m[:])
	return m
}

// SealLayer encrypts plain to dst, which has the same length and does not overlap it, and stores
// the tag.
func (c *Cipher) SealLayer(layer uint32, dst, plain, tag []byte) {
	n := nonce(nonceLayer, layer)
	if len(plain) < tailBytes {
		var small [2 * TagBytes]byte
		sealed := c.gcm.Seal(small[:0], n[:], plain, nil)
		copy(dst, sealed[:len(plain)])
		copy(tag, sealed[len(plain):])
		return
	}
	body := len(plain) - tailBytes
	tail := c.mask(layer)
	subtle.XORBytes(tail[:], tail[:], plain[body:])
	c.gcm.Seal(dst[:0:len(plain)], n[:], plain[:body], tail[:])
	copy(tag, dst[body:len(plain)])
	copy(dst[body:], tail[:])
}

// OpenLayer decrypts b in place. After ErrAuth the content of b is undefined.
func (c *Cipher) OpenLayer(layer uint32, b, tag []byte) error {
	n := nonce(nonceLayer, layer)
	if len(b) < tailBytes {
		var small [2 * TagBytes]byte
		sealed := append(append(small[:0], b...), tag...)
		plain, err := c.gcm.Open(sealed[:0], n[:], sealed, nil)
		if err != nil {
			return fmt.Errorf("crypt: layer %d: %w", layer, ErrAuth)
		}
		copy(b, plain)
		return nil
	}
	body := len(b) - tailBytes
	tail := [tailBytes]byte(b[body:])
	copy(b[body:], tag)
	if _, err := c.gcm.Open(b[:0], n[:], b, tail[:]); err != nil {
		return fmt.Errorf("crypt: layer %d: %w", layer, ErrAuth)
	}
	m := c.mask(layer)
	subtle.XORBytes(b[body:], tail[:], m[:])
	return nil
}

// SealRest encrypts b[:len(b)-TagBytes] in place, and stores the tag in the end of b. It is for the
// bytes of a content that are no layer, once for each Cipher.
func (c *Cipher) SealRest(b []byte) {
	n := nonce(nonceRest, 0)
	plain := b[:len(b)-TagBytes]
	c.gcm.Seal(plain[:0], n[:], plain, nil)
}

// OpenRest is the inverse of SealRest. It returns the plain bytes, a part of b.
func (c *Cipher) OpenRest(b []byte) ([]byte, error) {
	if len(b) < TagBytes {
		return nil, fmt.Errorf("crypt: %d bytes are shorter than a tag: %w", len(b), ErrAuth)
	}
	n := nonce(nonceRest, 0)
	plain, err := c.gcm.Open(b[:0], n[:], b, nil)
	if err != nil {
		return nil, fmt.Errorf("crypt: %w", ErrAuth)
	}
	return plain, nil
}
