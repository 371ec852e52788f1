package handshake

import (
	"bytes"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"syscall"
	"testing"

	"github.com/penstock-kv/penstock/rdma"
)

var (
	proto = Protocol{Hello: [4]byte{'T', 'E', 'S', '1'}, Challenge: [4]byte{'T', 'E', 'C', '1'}, MoreBytes: 3}
	good  = rdma.Token("a token on both sides")
	alice = rdma.EngineID{1}
	bob   = rdma.EngineID{2}
)

// meet runs both sides over a pipe. v is bob's verdict.
func meet(dialer, acceptor Protocol, want rdma.EngineID, mine, theirs rdma.Token, v Verdict) (peer rdma.EngineID, hello Hello, dialErr, acceptErr error) {
	a, b := net.Pipe()
	end := make(chan struct{})
	go func() {
		defer close(end)
		defer b.Close()
		var verdict func(Verdict) error
		hello, verdict, acceptErr = acceptor.Accept(b, bob, []rdma.Token{theirs})
		if acceptErr == nil {
			acceptErr = verdict(v)
		}
	}()
	peer, dialErr = dialer.Dial(a, Hello{Param: 77, Engine: alice, Session: [16]byte{9}, More: []byte("abc")[:dialer.MoreBytes]}, want, mine)
	a.Close()
	<-end
	return peer, hello, dialErr, acceptErr
}

// TestHandshake: a dialer that holds the token is accepted and receives the acceptor's
// identity. Any other dialer is refused, and each error states the reason.
func TestHandshake(t *testing.T) {
	other := Protocol{Hello: [4]byte{'O', 'T', 'H', '1'}, Challenge: [4]byte{'O', 'T', 'C', '1'}, MoreBytes: 3}
	newer := Protocol{Hello: [4]byte{'T', 'E', 'S', '2'}, Challenge: [4]byte{'T', 'E', 'C', '2'}, MoreBytes: 2}
	older := Protocol{Hello: [4]byte{'T', 'E', 'S', '0'}, Challenge: [4]byte{'T', 'E', 'C', '0'}}
	stranger := rdma.Token("another engine's token")
	for _, c := range []struct {
		name         string
		dialer       Protocol
		want         rdma.EngineID
		token        rdma.Token
		verdict      Verdict
		dial, accept error
	}{
		{"known", proto, bob, good, OK, nil, nil},
		{"any engine", proto, rdma.EngineID{}, good, OK, nil, nil},
		{"wrong token", proto, bob, stranger, OK, rdma.ErrAuth, rdma.ErrAuth},
		{"wrong engine", proto, rdma.EngineID{3}, good, OK, rdma.ErrNoPeer, ErrLeft},
		{"itself", proto, rdma.EngineID{}, good, OK, rdma.ErrNoPeer, ErrLeft},
		{"full", proto, bob, good, Full, rdma.ErrBusy, nil},
		{"not assembled", proto, bob, good, Request, rdma.ErrPeerDied, nil},
		{"of a session that is over", proto, bob, good, Gone, ErrGone, nil},
		{"too early", proto, bob, good, Later, ErrLater, nil},
		{"another protocol", other, bob, good, OK, io.EOF, ErrMalformed},
		{"newer version", newer, bob, good, OK, rdma.ErrVersion, rdma.ErrVersion},
		{"older version", older, bob, good, OK, rdma.ErrVersion, rdma.ErrVersion},
	} {
		t.Run(c.name, func(t *testing.T) {
			self := bob
			if c.name == "itself" {
				bob = alice
				defer func() { bob = self }()
			}
			peer, hello, dialErr, acceptErr := meet(c.dialer, proto, c.want, c.token, good, c.verdict)
			if !errors.Is(dialErr, c.dial) || !errors.Is(acceptErr, c.accept) {
				t.Fatalf("dialer %v, acceptor %v; want %v and %v", dialErr, acceptErr, c.dial, c.accept)
			}
			if c.dial == nil && (peer != bob || hello.Engine != alice || hello.Param != 77 || hello.Session != [16]byte{9} || string(hello.More) != "abc") {
				t.Errorf("peer %v, hello %+v", peer, hello)
			}
		})
	}
}

// TestImpostor: an acceptor that sends OK without proof of the token is rejected.
func TestImpostor(t *testing.T) {
	_, _, err, _ := meet(proto, proto, bob, good, good, OK)
	if err != nil {
		t.Fatal(err)
	}
	a, b := net.Pipe()
	go func() {
		defer b.Close()
		_, _ = io.ReadFull(b, make([]byte, proto.helloSize()))
		challenge := append(proto.Challenge[:], make([]byte, ChallengeSize-4)...)
		challenge[8] = bob[0]
		_, _ = b.Write(challenge)
		_, _ = io.ReadFull(b, make([]byte, ProofSize))
		_, _ = b.Write(make([]byte, VerdictSize))
	}()
	defer a.Close()
	if _, err := proto.Dial(a, Hello{Engine: alice, More: make([]byte, 3)}, bob, good); !errors.Is(err, rdma.ErrAuth) {
		t.Fatalf("error %v, want ErrAuth", err)
	}
}

// TestVector: the proofs of one transcript, for implementations in other languages.
func TestVector(t *testing.T) {
	p := Protocol{Hello: [4]byte{'P', 'R', 'D', '3'}, Challenge: [4]byte{'P', 'R', 'C', '3'}, MoreBytes: 16}
	h := Hello{
		Param: 1 | 4<<16, Engine: rdma.EngineID{0xaa, 15: 0xaa}, Session: [16]byte{0xbb, 15: 0xbb},
		More: []byte{1, 2, 2, 3, 7, 15: 0}, nonce: [nonceSize]byte{0xdd},
	}
	hello := p.encode(&h)
	challenge := append(p.Challenge[:], 0, 0, 0, 0)
	challenge = append(challenge, append([]byte{0xcc, 15: 0xcc}, append([]byte{0xee}, make([]byte, nonceSize-1)...)...)...)
	if len(hello) != p.helloSize() || len(challenge) != ChallengeSize {
		t.Fatalf("hello of %d bytes, challenge of %d", len(hello), len(challenge))
	}
	token := rdma.Token("0123456789abcdef")
	for role, want := range map[string]string{
		roleDialer:   "1ccefbf6b33b4ac945881747f45f95fb9781f05c27974370e4f37199bfaac09f",
		roleAcceptor: "9db4e6f7158e1def3ecc28a1bb421a7de07945f92e354f491adec28371038d1b",
	} {
		parts := [][]byte{hello, challenge}
		if role == roleAcceptor {
			parts = append(parts, []byte{byte(OK)})
		}
		if got := hex.EncodeToString(prove(token, role, parts...)); got != want {
			t.Errorf("%s: %s, want %s", role, got, want)
		}
	}
	if _, err := p.Dial(readWriter{bytes.NewReader(nil)}, Hello{Engine: alice}, bob, good); !errors.Is(err, ErrMalformed) {
		t.Errorf("a hello without the protocol's bytes: %v", err)
	}
}

// TestLeft: a connection that the dialer closes before it has sent a whole proof is no authentication
// attempt. With the whole of a wrong proof it is one.
func TestLeft(t *testing.T) {
	h := Hello{Engine: alice, More: make([]byte, 3)}
	whole := append(proto.encode(&h), make([]byte, ProofSize)...)
	for n := range len(whole) + 1 {
		want := ErrLeft
		if n == len(whole) {
			want = rdma.ErrAuth
		}
		if _, _, err := proto.Accept(readWriter{bytes.NewReader(whole[:n])}, bob, []rdma.Token{good}); !errors.Is(err, want) {
			t.Errorf("after %d bytes: %v; want %v", n, err, want)
		}
	}
	// A dialer that leaves before it has received the verdict does not hide its guess.
	for _, end := range []error{io.ErrClosedPipe, syscall.EPIPE, syscall.ECONNRESET} {
		c := &leaver{Reader: bytes.NewReader(whole), end: end}
		if _, _, err := proto.Accept(c, bob, []rdma.Token{good}); !errors.Is(err, rdma.ErrAuth) || errors.Is(err, ErrLeft) {
			t.Errorf("a wrong proof, and %v for the verdict: %v; want %v", end, err, rdma.ErrAuth)
		}
	}
}

// leaver reads the given data, accepts the challenge, and refuses later writes with end.
type leaver struct {
	io.Reader
	end    error
	writes int
}

func (l *leaver) Write(b []byte) (int, error) {
	if l.writes++; l.writes > 1 {
		return 0, l.end
	}
	return len(b), nil
}

// readWriter reads the given data and discards writes.
type readWriter struct{ io.Reader }

func (readWriter) Write(b []byte) (int, error) { return len(b), nil }

// FuzzAccept: any input of an unauthenticated dialer is an error and never a session.
func FuzzAccept(f *testing.F) {
	f.Add([]byte{})
	f.Add(append([]byte("TES1"), make([]byte, 200)...))
	h := Hello{Engine: alice, More: make([]byte, 3)}
	f.Add(append(proto.encode(&h), make([]byte, ProofSize)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, _, err := proto.Accept(readWriter{bytes.NewReader(b)}, bob, []rdma.Token{good}); err == nil {
			t.Fatal("a stranger got in")
		}
	})
}

// FuzzDial: any answer without proof is an error.
func FuzzDial(f *testing.F) {
	f.Add([]byte{})
	f.Add(append([]byte("TEC1"), make([]byte, 200)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, err := proto.Dial(readWriter{bytes.NewReader(b)}, Hello{Engine: alice, More: make([]byte, 3)}, rdma.EngineID{}, good); err == nil {
			t.Fatal("an impostor was accepted")
		}
	})
}
