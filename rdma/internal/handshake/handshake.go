package handshake

import (
	"bytes"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"syscall"

	"github.com/penstock-kv/penstock/rdma"
)

// Sizes of the messages, in bytes.
const (
	nonceSize     = 32
	HelloSize     = 72 // without the protocol's additional bytes
	ChallengeSize = 56
	ProofSize     = sha256.Size
	VerdictSize   = 8 + sha256.Size
)

// Protocol describes the protocol that uses the stream after the handshake. Hello and Challenge are
// the magics with which its hello and its challenge begin; the last byte of a magic is the version.
// A hello has MoreBytes additional bytes that the protocol defines.
type Protocol struct {
	Hello, Challenge [4]byte
	MoreBytes        int
}

// helloSize is the size of the protocol's hello.
func (p Protocol) helloSize() int { return HelloSize + p.MoreBytes }

// Hello is the dialer's description of its engine and of the session.
type Hello struct {
	// Param and More are defined by the protocol. More has MoreBytes bytes.
	Param   uint32
	Engine  rdma.EngineID
	Session [16]byte
	More    []byte

	// Token is the token that the dialer has proved. Only Accept sets it.
	Token rdma.Token

	nonce [nonceSize]byte
}

// Verdict is the acceptor's decision.
type Verdict uint8

// Verdicts.
const (
	OK Verdict = 0
	// Token: the proof is wrong.
	Token Verdict = 1
	// Full: the acceptor already has its largest number of sessions, in all or with this token.
	Full Verdict = 2
	// Request: the session could not be started.
	Request Verdict = 3
	// Gone: the session has ended.
	Gone Verdict = 4
	// Later: the resource that the dialer requests is still in use at the acceptor.
	Later Verdict = 5
)

// VerdictOf returns the verdict for an error of Admission.Admit.
func VerdictOf(err error) Verdict {
	if errors.Is(err, rdma.ErrBusy) {
		return Full
	}
	return Token
}

// String returns a phrase for logs and error texts.
func (v Verdict) String() string {
	switch v {
	case OK:
		return "accepted"
	case Token:
		return "token not accepted"
	case Full:
		return "too many peers"
	case Request:
		return "session could not be assembled"
	case Gone:
		return "the peer has ended the session"
	case Later:
		return "the peer still uses the NIC pair"
	}
	return fmt.Sprintf("verdict %d", uint8(v))
}

// Errors.
var (
	// ErrMalformed: the peer does not use this protocol.
	ErrMalformed = errors.New("malformed handshake")
	// ErrLeft: the peer closed the connection before it sent a proof, as health checks do, and dialers
	// that need the connection no more because another one of the same session was refused.
	ErrLeft = errors.New("the peer closed the connection during the handshake")
	// ErrGone and ErrLater are the errors for the verdicts Gone and Later.
	ErrGone  = errors.New("the peer has ended the session")
	ErrLater = errors.New("still in use on the peer")
)

// Roles that are part of the two proofs, so that neither proof can be replayed as the other.
const (
	roleDialer   = "penstock rdma dialer"
	roleAcceptor = "penstock rdma acceptor"
)

// prove returns the HMAC over the transcript, which proves that the sender has the token.
func prove(token rdma.Token, role string, parts ...[]byte) []byte {
	m := hmac.New(sha256.New, token)
	m.Write([]byte(role))
	for _, p := range parts {
		m.Write(p)
	}
	return m.Sum(nil)
}

// otherVersion returns an error if magic differs from want only in the version.
func otherVersion(magic, want []byte) error {
	if !bytes.Equal(magic[:3], want[:3]) || magic[3] == want[3] {
		return nil
	}
	return fmt.Errorf("the peer speaks version %s of the protocol and this side version %s: %w", magic[3:4], want[3:], rdma.ErrVersion)
}

// encode returns the bytes of h.
func (p Protocol) encode(h *Hello) []byte {
	b := append(make([]byte, 0, p.helloSize()), p.Hello[:]...)
	b = binary.LittleEndian.AppendUint32(b, h.Param)
	b = append(b, h.Engine[:]...)
	b = append(b, h.Session[:]...)
	b = append(b, h.More...)
	return append(b, h.nonce[:]...)
}

// decode reads a hello from b, which holds helloSize bytes. More refers to b, so b must stay
// valid.
func (p Protocol) decode(b []byte) (h Hello, _ error) {
	if !bytes.Equal(b[:4], p.Hello[:]) {
		return h, fmt.Errorf("hello begins with %q, want %q: %w", b[:4], p.Hello[:], ErrMalformed)
	}
	h.Param = binary.LittleEndian.Uint32(b[4:])
	copy(h.Engine[:], b[8:24])
	copy(h.Session[:], b[24:40])
	h.More = b[40 : 40+p.MoreBytes]
	copy(h.nonce[:], b[40+p.MoreBytes:])
	if h.Engine.IsZero() {
		return h, fmt.Errorf("hello of engine zero: %w", ErrMalformed)
	}
	return h, nil
}

// Dial performs the dialer's part on c: it sends h, proves the token, and checks the acceptor's
// proof. want, if not zero, is the only engine that is accepted. Dial returns the engine that
// answered.
func (p Protocol) Dial(c io.ReadWriter, h Hello, want rdma.EngineID, token rdma.Token) (rdma.EngineID, error) {
	var peer rdma.EngineID
	_, _ = rand.Read(h.nonce[:])
	if len(h.More) != p.MoreBytes {
		return peer, fmt.Errorf("hello with %d bytes more, the protocol has %d: %w", len(h.More), p.MoreBytes, ErrMalformed)
	}
	hello := p.encode(&h)
	if _, err := c.Write(hello); err != nil {
		return peer, fmt.Errorf("hello: %w", err)
	}
	challenge := make([]byte, ChallengeSize)
	if _, err := io.ReadFull(c, challenge); err != nil {
		return peer, fmt.Errorf("challenge: %w", err)
	}
	if err := otherVersion(challenge[:4], p.Challenge[:]); err != nil {
		return peer, err
	}
	if !bytes.Equal(challenge[:4], p.Challenge[:]) {
		return peer, fmt.Errorf("challenge begins with %q, want %q: %w", challenge[:4], p.Challenge[:], ErrMalformed)
	}
	copy(peer[:], challenge[8:24])
	if peer == h.Engine {
		return peer, fmt.Errorf("the address is this engine's own: %w", rdma.ErrNoPeer)
	}
	if !want.IsZero() && peer != want {
		return peer, fmt.Errorf("engine %v answers, not %v: %w", peer, want, rdma.ErrNoPeer)
	}
	if _, err := c.Write(prove(token, roleDialer, hello, challenge)); err != nil {
		return peer, fmt.Errorf("proof: %w", err)
	}
	verdict := make([]byte, VerdictSize)
	if _, err := io.ReadFull(c, verdict); err != nil {
		return peer, fmt.Errorf("verdict: %w", err)
	}
	switch v := Verdict(verdict[0]); v {
	case OK:
	case Token:
		return peer, rdma.ErrAuth
	case Full:
		return peer, fmt.Errorf("%v: %w", v, rdma.ErrBusy)
	case Gone:
		return peer, ErrGone
	case Later:
		return peer, ErrLater
	default:
		return peer, fmt.Errorf("%v: %w", v, rdma.ErrPeerDied)
	}
	if !bytes.Equal(verdict[1:8], make([]byte, 7)) || !hmac.Equal(verdict[8:], prove(token, roleAcceptor, hello, challenge, verdict[:1])) {
		return peer, fmt.Errorf("the peer did not prove the token: %w", rdma.ErrAuth)
	}
	return peer, nil
}

// Accept performs the acceptor's part on c up to the verdict. tokens are the tokens, one of which
// the dialer must prove. The caller sends its decision by calling verdict. After rdma.ErrAuth,
// rdma.ErrVersion, ErrMalformed, or an early end of the stream, the peer has not proved the token.
// ErrLeft is no failed authentication.
func (p Protocol) Accept(c io.ReadWriter, self rdma.EngineID, tokens []rdma.Token) (h Hello, verdict func(Verdict) error, _ error) {
	hello := make([]byte, p.helloSize())
	n, err := io.ReadAtLeast(c, hello, len(p.Hello))
	if err == nil {
		if err := otherVersion(hello[:4], p.Hello[:]); err != nil {
			return h, nil, errors.Join(err, p.sendVersion(c))
		}
		_, err = io.ReadFull(c, hello[n:])
	}
	if err != nil {
		return h, nil, fmt.Errorf("hello: %w", orLeft(err))
	}
	if h, err = p.decode(hello); err != nil {
		return h, nil, err
	}
	challenge := append(make([]byte, 0, ChallengeSize), p.Challenge[:]...)
	challenge = append(challenge, 0, 0, 0, 0)
	challenge = append(challenge, self[:]...)
	var nonce [nonceSize]byte
	_, _ = rand.Read(nonce[:])
	challenge = append(challenge, nonce[:]...)
	if _, err := c.Write(challenge); err != nil {
		return h, nil, fmt.Errorf("challenge: %w", orLeft(err))
	}
	proof := make([]byte, ProofSize)
	if _, err := io.ReadFull(c, proof); err != nil {
		return h, nil, fmt.Errorf("proof: %w", orLeft(err))
	}
	verdict = func(v Verdict) error {
		b := make([]byte, 8, VerdictSize)
		b[0] = byte(v)
		b = append(b, prove(h.Token, roleAcceptor, hello, challenge, b[:1])...)
		_, err := c.Write(b)
		return err
	}
	for _, token := range tokens {
		if hmac.Equal(proof, prove(token, roleDialer, hello, challenge)) {
			h.Token = token
		}
	}
	if h.Token == nil {
		// The dialer does not check the proof in this verdict, which is made without a token.
		return h, nil, errors.Join(rdma.ErrAuth, verdict(Token))
	}
	return h, verdict, nil
}

// orLeft returns ErrLeft if err is the end of a connection by the peer, and otherwise err.
func orLeft(err error) error {
	for _, end := range []error{io.EOF, io.ErrUnexpectedEOF, syscall.ECONNRESET, syscall.EPIPE} {
		if errors.Is(err, end) {
			return ErrLeft
		}
	}
	return err
}

// otherHelloMax is the largest number of bytes that sendVersion reads. A hello of another version
// may have another length.
const otherHelloMax = 4 << 10

// sendVersion sends the magic of the local challenge to a dialer of another version, and reads
// until the dialer closes the connection. If the connection were closed with unread bytes, it
// would be reset, and the dialer might not receive the answer.
func (p Protocol) sendVersion(c io.ReadWriter) error {
	// The write runs concurrently with the read: on an unbuffered connection the dialer still
	// blocks in sending its hello.
	wrote := make(chan error, 1)
	go func() {
		_, err := c.Write(append(p.Challenge[:], make([]byte, ChallengeSize-len(p.Challenge))...))
		wrote <- err
	}()
	_, err := io.CopyN(io.Discard, c, otherHelloMax)
	if err == io.EOF {
		err = nil
	}
	return errors.Join(err, <-wrote)
}
