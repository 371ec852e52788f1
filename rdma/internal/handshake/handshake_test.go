package handshake

import (
	"bytes"
	"errors"
	"io"
	"net"
	"testing"

	"github.com/penstock-kv/penstock/rdma"
)

var (
	proto = Protocol{Hello: [4]byte{'T', 'E', 'S', '1'}, Challenge: [4]byte{'T', 'E', 'C', '1'}}
	good  = rdma.Token("a token that both sides know")
	alice = rdma.EngineID{1}
	bob   = rdma.EngineID{2}
)

// meet runs both sides over a pipe; v is bob's verdict.
func meet(dialer, acceptor Protocol, want rdma.EngineID, mine, theirs rdma.Token, v Verdict) (peer rdma.EngineID, hello Hello, dialErr, acceptErr error) {
	a, b := net.Pipe()
	end := make(chan struct{})
	go func() {
		defer close(end)
		defer b.Close()
		var verdict func(Verdict) error
		hello, verdict, acceptErr = acceptor.Accept(b, bob, theirs)
		if acceptErr == nil {
			acceptErr = verdict(v)
		}
	}()
	peer, dialErr = dialer.Dial(a, Hello{Param: 77, Engine: alice, Session: [16]byte{9}}, want, mine)
	a.Close()
	<-end
	return peer, hello, dialErr, acceptErr
}

// TestHandshake: who knows the token gets in and learns who is there; nobody
// else does, and each error says which of the reasons it was.
func TestHandshake(t *testing.T) {
	other := Protocol{Hello: [4]byte{'O', 'T', 'H', '1'}, Challenge: [4]byte{'O', 'T', 'C', '1'}}
	stranger := rdma.Token("a token of somebody else")
	for _, c := range []struct {
		name         string
		dialer       Protocol
		want         rdma.EngineID
		token        rdma.Token
		verdict      Verdict
		dial, accept error
	}{
		{"known", proto, bob, good, OK, nil, nil},
		{"whoever is there", proto, rdma.EngineID{}, good, OK, nil, nil},
		{"wrong token", proto, bob, stranger, OK, rdma.ErrAuth, rdma.ErrAuth},
		{"wrong engine", proto, rdma.EngineID{3}, good, OK, rdma.ErrNoPeer, io.EOF},
		{"itself", proto, rdma.EngineID{}, good, OK, rdma.ErrNoPeer, io.EOF},
		{"full", proto, bob, good, Full, rdma.ErrBusy, nil},
		{"not assembled", proto, bob, good, Request, rdma.ErrPeerDied, nil},
		{"another protocol", other, bob, good, OK, io.EOF, ErrMalformed},
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
			if c.dial == nil && (peer != bob || hello.Engine != alice || hello.Param != 77 || hello.Session != [16]byte{9}) {
				t.Errorf("peer %v, hello %+v", peer, hello)
			}
		})
	}
}

// TestImpostor: an acceptor that only claims OK without the token's proof is
// found out.
func TestImpostor(t *testing.T) {
	_, _, err, _ := meet(proto, proto, bob, good, good, OK)
	if err != nil {
		t.Fatal(err)
	}
	a, b := net.Pipe()
	go func() {
		defer b.Close()
		_, _ = io.ReadFull(b, make([]byte, HelloSize))
		challenge := append(proto.Challenge[:], make([]byte, ChallengeSize-4)...)
		challenge[8] = bob[0]
		_, _ = b.Write(challenge)
		_, _ = io.ReadFull(b, make([]byte, ProofSize))
		_, _ = b.Write(make([]byte, VerdictSize))
	}()
	defer a.Close()
	if _, err := proto.Dial(a, Hello{Engine: alice}, bob, good); !errors.Is(err, rdma.ErrAuth) {
		t.Fatalf("error %v, want ErrAuth", err)
	}
}

// TestSilent: a connection that is closed at once is no attempt.
func TestSilent(t *testing.T) {
	if _, _, err := proto.Accept(readWriter{bytes.NewReader(nil)}, bob, good); !errors.Is(err, ErrSilent) {
		t.Fatal(err)
	}
}

// readWriter reads what it is given and swallows what is written.
type readWriter struct{ io.Reader }

func (readWriter) Write(b []byte) (int, error) { return len(b), nil }

// FuzzAccept: whatever a stranger says, it is an error and never a session.
func FuzzAccept(f *testing.F) {
	f.Add([]byte{})
	f.Add(append([]byte("TES1"), make([]byte, 200)...))
	h := Hello{Engine: alice}
	f.Add(append(proto.encode(&h), make([]byte, ProofSize)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, _, err := proto.Accept(readWriter{bytes.NewReader(b)}, bob, good); err == nil {
			t.Fatal("a stranger got in")
		}
	})
}

// FuzzDial: whatever an impostor answers, it is an error.
func FuzzDial(f *testing.F) {
	f.Add([]byte{})
	f.Add(append([]byte("TEC1"), make([]byte, 200)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, err := proto.Dial(readWriter{bytes.NewReader(b)}, Hello{Engine: alice}, rdma.EngineID{}, good); err == nil {
			t.Fatal("an impostor got through")
		}
	})
}
