package rdma

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strings"
)

// EngineID names one engine for its lifetime. It is 16 random bytes, chosen when the engine
// starts. A peer is identified by its EngineID and not by an address, because an engine without a
// listener has no address.
type EngineID [16]byte

// String returns the first 8 hex digits, enough for a log line.
func (id EngineID) String() string { return hex.EncodeToString(id[:4]) }

// IsZero reports whether the ID is unset.
func (id EngineID) IsZero() bool { return id == EngineID{} }

// NetAddr is the address of one NIC in the notation of its provider: "host:port" for tcp, opaque
// bytes (GID, QP number) for other providers.
type NetAddr string

// Addr is the address of an engine: its ID and one NetAddr per NIC.
type Addr struct {
	Engine EngineID
	NICs   []NetAddr
}

// NICKey is one way to reach a range of memory: a NIC, and the key of the memory on that NIC.
type NICKey struct {
	Addr NetAddr
	Key  uint64
}

// Desc describes remote memory to a peer that may write to the memory. A peer that has the Desc,
// and the token of the memory's engine, can write there, so distribute a Desc with care. A Desc is
// plain data; the target checks each write and does not rely on the Desc.
type Desc struct {
	// Engine is the owner of the memory.
	Engine EngineID
	// NICs are the paths to the memory, one for each NIC of the engine.
	NICs []NICKey
	// Base is the address of the first byte in the provider's address space (0 for tcp, a virtual
	// address for verbs). Len is the length in bytes.
	Base, Len uint64
	// Peers are the engines that may write to the memory; empty: every engine with a session. A
	// NIC checks the key of a write but not its sender. So an engine that is not among Peers
	// replaces the key in its writes by an invalid key.
	Peers []EngineID
}

// Limits of the encoding.
const (
	// MaxNICs is the largest number of NICs of one engine.
	MaxNICs = 64
	// MaxNetAddr is the longest NetAddr, in bytes.
	MaxNetAddr = 255
)

// Versions of the encodings. The version is the first byte of an encoding.
const (
	descVersion = 0xD1
	addrVersion = 0xA1
)

// Addr returns the address of the memory's owner.
func (d Desc) Addr() Addr {
	a := Addr{Engine: d.Engine}
	for _, n := range d.NICs {
		if n.Addr != "" {
			a.NICs = append(a.NICs, n.Addr)
		}
	}
	return a
}

// AppendBinary appends the encoding of d, little-endian:
//
//	version 1 = 0xD1 | engine 16 | base 8 | len 8 | NICs 1 | NICs x ( addr length 1 | addr | key 8 ) | peers x engine 16, to the end
func (d Desc) AppendBinary(b []byte) ([]byte, error) {
	if len(d.NICs) > MaxNICs {
		return b, fmt.Errorf("rdma: desc with %d NICs, at most %d: %w", len(d.NICs), MaxNICs, ErrRange)
	}
	b = append(b, descVersion)
	b = append(b, d.Engine[:]...)
	b = binary.LittleEndian.AppendUint64(b, d.Base)
	b = binary.LittleEndian.AppendUint64(b, d.Len)
	b = append(b, byte(len(d.NICs)))
	for _, n := range d.NICs {
		if len(n.Addr) > MaxNetAddr {
			return b, fmt.Errorf("rdma: NIC address of %d bytes, at most %d: %w", len(n.Addr), MaxNetAddr, ErrRange)
		}
		b = append(b, byte(len(n.Addr)))
		b = append(b, n.Addr...)
		b = binary.LittleEndian.AppendUint64(b, n.Key)
	}
	for _, p := range d.Peers {
		b = append(b, p[:]...)
	}
	return b, nil
}

// MarshalBinary returns the encoding of d.
func (d Desc) MarshalBinary() ([]byte, error) { return d.AppendBinary(nil) }

// UnmarshalBinary decodes b, which must be exactly one Desc. It keeps no reference to b.
func (d *Desc) UnmarshalBinary(b []byte) error {
	r := reader{b: b}
	if v := r.byte(); v != descVersion {
		return fmt.Errorf("rdma: desc of version %#x, want %#x: %w", v, descVersion, ErrMalformed)
	}
	var out Desc
	copy(out.Engine[:], r.take(16))
	out.Base, out.Len = r.uint64(), r.uint64()
	n := int(r.byte())
	if n > MaxNICs {
		return fmt.Errorf("rdma: desc with %d NICs, at most %d: %w", n, MaxNICs, ErrMalformed)
	}
	for range n {
		addr := NetAddr(r.take(int(r.byte())))
		out.NICs = append(out.NICs, NICKey{Addr: addr, Key: r.uint64()})
	}
	for !r.short && len(r.b) > 0 {
		var p EngineID
		copy(p[:], r.take(len(p)))
		out.Peers = append(out.Peers, p)
	}
	if err := r.end("desc", len(b)); err != nil {
		return err
	}
	*d = out
	return nil
}

// AppendBinary appends the encoding of a, little-endian:
//
//	version 1 = 0xA1 | engine 16 | NICs 1 | NICs x ( addr length 1 | addr )
func (a Addr) AppendBinary(b []byte) ([]byte, error) {
	if len(a.NICs) > MaxNICs {
		return b, fmt.Errorf("rdma: address with %d NICs, at most %d: %w", len(a.NICs), MaxNICs, ErrRange)
	}
	b = append(b, addrVersion)
	b = append(b, a.Engine[:]...)
	b = append(b, byte(len(a.NICs)))
	for _, n := range a.NICs {
		if len(n) > MaxNetAddr {
			return b, fmt.Errorf("rdma: NIC address of %d bytes, at most %d: %w", len(n), MaxNetAddr, ErrRange)
		}
		b = append(b, byte(len(n)))
		b = append(b, n...)
	}
	return b, nil
}

// MarshalBinary returns the encoding of a.
func (a Addr) MarshalBinary() ([]byte, error) { return a.AppendBinary(nil) }

// UnmarshalBinary decodes b, which must be exactly one Addr. It keeps no reference to b.
func (a *Addr) UnmarshalBinary(b []byte) error {
	r := reader{b: b}
	if v := r.byte(); v != addrVersion {
		err := ErrVersion
		if len(b) == 0 {
			err = ErrMalformed
		}
		return fmt.Errorf("rdma: address of version %#x, want %#x: %w", v, addrVersion, err)
	}
	var out Addr
	copy(out.Engine[:], r.take(16))
	n := int(r.byte())
	if n > MaxNICs {
		return fmt.Errorf("rdma: address with %d NICs, at most %d: %w", n, MaxNICs, ErrMalformed)
	}
	for range n {
		out.NICs = append(out.NICs, NetAddr(r.take(int(r.byte()))))
	}
	if err := r.end("address", len(b)); err != nil {
		return err
	}
	*a = out
	return nil
}

// reader reads little-endian fields from a slice. After the end of the slice, its methods return
// zeroes and set short.
type reader struct {
	b     []byte
	short bool
}

func (r *reader) take(n int) []byte {
	if r.short || n > len(r.b) {
		r.short = true
		return nil
	}
	out := r.b[:n]
	r.b = r.b[n:]
	return out
}

func (r *reader) byte() byte {
	if b := r.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (r *reader) uint64() uint64 {
	if b := r.take(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

// end returns an error if bytes were missing or are left over.
func (r *reader) end(what string, total int) error {
	if r.short {
		return fmt.Errorf("rdma: %s of %d bytes ends early: %w", what, total, ErrMalformed)
	}
	if len(r.b) != 0 {
		return fmt.Errorf("rdma: %d bytes left over after the %s: %w", len(r.b), what, ErrMalformed)
	}
	return nil
}

// Token is the secret of an engine. A peer that proves that it has the token may open a session. A
// token has at least MinToken bytes.
type Token []byte

// MinToken is the length of the shortest token, in bytes. It is chosen because 128 bits cannot be
// guessed.
const MinToken = 16

// String hides the secret from logs.
func (t Token) String() string { return fmt.Sprintf("token(%d bytes)", len(t)) }

// GoString hides the secret from logs.
func (t Token) GoString() string { return t.String() }

// Format hides the secret from every verb.
func (t Token) Format(s fmt.State, _ rune) { _, _ = s.Write([]byte(t.String())) }

// ParseToken reads a token from text: base64 (standard alphabet) after
// "base64:", hex after "hex:", otherwise the bytes themselves.
func ParseToken(text string) (Token, error) {
	raw := []byte(text)
	var err error
	if s, ok := strings.CutPrefix(text, "base64:"); ok {
		raw, err = base64.StdEncoding.DecodeString(s)
	} else if s, ok := strings.CutPrefix(text, "hex:"); ok {
		raw, err = hex.DecodeString(s)
	}
	if err != nil {
		return nil, fmt.Errorf("rdma: token does not decode: %w", err)
	}
	if err := Token(raw).Validate(); err != nil {
		return nil, err
	}
	return raw, nil
}

// Admission decides which peers may open sessions with an engine. It replaces the engine's one token
// by a set of tokens that may change while the engine runs, such as one for each client. Both
// functions may be called concurrently.
type Admission struct {
	// Tokens returns the tokens, one of which a peer must prove. It is called at each handshake. The
	// caller does not change the slice.
	Tokens func() []Token
	// Admit is called when a peer has proved a token, before the peer gets a session. It may be
	// called several times for a session, because a session may have several connections. An error
	// refuses the connection. The dialer gets ErrBusy if the error is ErrBusy, and ErrAuth otherwise.
	Admit func(peer EngineID, proved Token) error
}

// AdmissionOf returns a, or the Admission that admits every peer that proves token if a is nil.
func AdmissionOf(a *Admission, token Token) *Admission {
	if a != nil {
		return a
	}
	tokens := []Token{token}
	return &Admission{Tokens: func() []Token { return tokens }, Admit: func(EngineID, Token) error { return nil }}
}

// Validate returns an error if the token is too short to be a secret.
func (t Token) Validate() error {
	if len(t) < MinToken {
		return fmt.Errorf("rdma: token of %d bytes; at least %d are needed", len(t), MinToken)
	}
	return nil
}
