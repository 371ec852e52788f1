package zmtp_test

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/internal/zmtp"
	"github.com/penstock-kv/penstock/internal/zmtp/zmtptest"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// accepted is the result of Handshake on the serving end.
type accepted struct {
	conn *zmtp.Conn
	err  error
}

// serve performs a PUB socket's handshake with a peer that sends the given bytes. The
// second result has all bytes that the peer receives until the connection ends.
func serve(t *testing.T, o zmtp.Options, sent []byte) (accepted, <-chan []byte) {
	t.Helper()
	ours, theirs := net.Pipe()
	t.Cleanup(func() { _ = errors.Join(ours.Close(), theirs.Close()) })
	go func() { _, _ = theirs.Write(sent) }()
	replies := make(chan []byte, 1)
	go func() {
		b, _ := io.ReadAll(theirs)
		replies <- b
	}()
	c, err := zmtp.Handshake(ours, "PUB", []string{"SUB", "XSUB"}, o)
	return accepted{c, err}, replies
}

// hello returns the bytes that a SUB socket of libzmq 4.3 sends before its first
// subscription.
func hello(kind string) []byte {
	g := make([]byte, 64)
	g[0], g[8], g[9], g[10], g[11] = 0xff, 1, 0x7f, 3, 1
	copy(g[12:], "NULL")
	ready := append([]byte{5}, "READY"...)
	ready = append(append(ready, 11), "Socket-Type"...)
	ready = binary.BigEndian.AppendUint32(ready, uint32(len(kind)))
	ready = append(ready, kind...)
	return append(append(g, 4, byte(len(ready))), ready...)
}

// opening has the bytes that a PUB socket sends in a handshake, from RFC 23.
var opening = "ff00000000000000007f" + "0300" + hex.EncodeToString([]byte("NULL")) + strings.Repeat("00", 16+1+31) +
	"0426" + "05" + hex.EncodeToString([]byte("READY")) +
	"0b" + hex.EncodeToString([]byte("Socket-Type")) + "00000003" + hex.EncodeToString([]byte("PUB")) +
	"08" + hex.EncodeToString([]byte("Identity")) + "00000000"

// TestBytes compares each byte of the greeting, READY and a message of two frames.
func TestBytes(t *testing.T) {
	got, replies := serve(t, zmtp.Options{}, hello("SUB"))
	if got.err != nil || got.conn.Peer() != "SUB" {
		t.Fatalf("%+v", got)
	}
	long := bytes.Repeat([]byte{7}, 256)
	if err := errors.Join(got.conn.Send([]byte("kv"), long), got.conn.Flush(), got.conn.Close()); err != nil {
		t.Fatal(err)
	}
	want := opening + "01" + "02" + hex.EncodeToString([]byte("kv")) + "02" + "0000000000000100" + hex.EncodeToString(long)
	if have := hex.EncodeToString(<-replies); have != want {
		t.Errorf("sent\n%s\nwant\n%s", have, want)
	}
}

// TestMessages sends frames of each size class in both directions, over TCP and a unix
// socket.
func TestMessages(t *testing.T) {
	testkit.VerifyNone(t)
	for _, endpoint := range []string{"tcp://127.0.0.1:0", "ipc://" + filepath.Join(t.TempDir(), "s")} {
		l, err := zmtp.Listen(t.Context(), endpoint)
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan accepted, 1)
		go func() {
			c, err := l.Accept()
			if err != nil {
				done <- accepted{nil, err}
				return
			}
			z, err := zmtp.Handshake(c, "ROUTER", []string{"DEALER"}, zmtp.Options{})
			done <- accepted{z, err}
		}()
		client := zmtptest.Dial(t, zmtp.Endpoint(l.Addr()), "DEALER", "ROUTER")
		got := <-done
		if got.err != nil {
			t.Fatal(got.err)
		}
		for _, size := range []int{0, 1, 255, 256, 60 << 10} {
			msg := [][]byte{{}, bytes.Repeat([]byte{7}, size), []byte("end")}
			client.MustSend(msg...)
			received, err := got.conn.Receive()
			if err != nil || !reflect.DeepEqual(received, msg) {
				t.Fatalf("%s, %d bytes: %d frames, %v", endpoint, size, len(received), err)
			}
			if err := errors.Join(got.conn.Send(received...), got.conn.Flush()); err != nil {
				t.Fatal(err)
			}
			if back := client.MustReceive(); !reflect.DeepEqual(back, msg) {
				t.Fatalf("%s, %d bytes: %d frames came back", endpoint, size, len(back))
			}
		}
		if err := errors.Join(got.conn.Close(), l.Close()); err != nil {
			t.Error(err)
		}
	}
}

// TestCommands: Receive handles the commands of version 3.1.
func TestCommands(t *testing.T) {
	sent := append(hello("SUB"), 4, 13, 9)
	sent = append(append(sent, "SUBSCRIBEkv@"...), 4, 10, 6)
	sent = append(append(sent, "CANCELkv@"...), 4, 10, 4)
	sent = append(append(sent, "PING\x00\x64hey"...), 4, 5, 4)
	sent = append(append(sent, "LATE"...), 0, 2, 1, 'x')
	got, replies := serve(t, zmtp.Options{}, sent)
	if got.err != nil {
		t.Fatal(got.err)
	}
	for _, want := range []string{"\x01kv@", "\x00kv@", "\x01x"} {
		m, err := got.conn.Receive()
		if err != nil || len(m) != 1 || string(m[0]) != want {
			t.Fatalf("%q, %v; want %q", m, err, want)
		}
	}
	if err := got.conn.Close(); err != nil {
		t.Fatal(err)
	}
	if have, want := hex.EncodeToString(<-replies), opening+"0408"+"04"+hex.EncodeToString([]byte("PONGhey")); have != want {
		t.Errorf("sent\n%s\nwant\n%s", have, want)
	}
}

// TestRefused: peers with another protocol, with a wrong socket type, or that send too
// much are refused.
func TestRefused(t *testing.T) {
	curve := hello("SUB")
	copy(curve[12:], "CURVE")
	old := hello("SUB")
	old[10] = 2
	for name, c := range map[string]struct {
		sent []byte
		say  string
	}{
		"http":      {bytes.Repeat([]byte("GET / HTTP/1.1\r\n"), 5), "greeting"},
		"version 2": {old, "greeting"},
		"curve":     {curve, `"CURVE"`},
		"dealer":    {hello("DEALER"), `"DEALER"`},
		"no ready":  {append(hello("SUB")[:64], 0, 1, 1), "READY"},
		"cut short": {append(hello("SUB")[:64], 4, 8, 5, 'R', 'E', 'A', 'D', 'Y', 9, 'x'), "READY"},
		"property":  {append(hello("SUB")[:64], 4, 12, 5, 'R', 'E', 'A', 'D', 'Y', 1, 'x', 0xff, 0xff, 0xff, 0xff), "cut short"},
		"too large": {append(hello("SUB")[:64], 6, 0, 0, 0, 1, 0, 0, 0, 0), "bytes"},
	} {
		got, _ := serve(t, zmtp.Options{}, c.sent)
		if !errors.Is(got.err, zmtp.ErrProtocol) || !strings.Contains(got.err.Error(), c.say) {
			t.Errorf("%s: %v; want an error with %s", name, got.err, c.say)
		}
	}
}

// TestSilentPeer: the handshake with a peer that sends nothing ends with a timeout.
func TestSilentPeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		got, _ := serve(t, zmtp.Options{HandshakeTimeout: time.Second}, nil)
		var timeout net.Error
		if !errors.As(got.err, &timeout) || !timeout.Timeout() {
			t.Errorf("%v; want a timeout", got.err)
		}
	})
}

// TestEndpoints: Listen accepts valid endpoints, and returns clear errors for invalid ones.
func TestEndpoints(t *testing.T) {
	for _, good := range []string{"tcp://*:0", "tcp://*:*", "tcp://127.0.0.1:5557", "tcp://[::1]:5557", "ipc:///run/x"} {
		if err := zmtp.Check(good); err != nil {
			t.Errorf("%s: %v", good, err)
		}
	}
	for bad, say := range map[string]string{
		"": "tcp://", "*:5557": "tcp://", "udp://*:1": "tcp://", "tcp://5557": "HOST:PORT", "tcp://:5557": "HOST:PORT",
		"tcp://*:99999": `"99999"`, "tcp://*:x": `"x"`, "ipc://": "ipc://PATH",
	} {
		if _, err := zmtp.Listen(t.Context(), bad); err == nil || !strings.Contains(err.Error(), say) || !strings.Contains(err.Error(), `"`+bad+`"`) {
			t.Errorf("%q: %v; want an error with the endpoint and %s", bad, err, say)
		}
	}
	taken, err := zmtp.Listen(t.Context(), "tcp://127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	if _, err := zmtp.Listen(t.Context(), zmtp.Endpoint(taken.Addr())); err == nil || !strings.Contains(err.Error(), "address already in use") {
		t.Errorf("a port that is in use: %v", err)
	}
}

// stream is a connection that is read from a slice and discards writes.
type stream struct {
	net.Conn
	r io.Reader
}

func (s stream) Read(b []byte) (int, error) { return s.r.Read(b) }
func (stream) Write(b []byte) (int, error)  { return len(b), nil }
func (stream) SetDeadline(time.Time) error  { return nil }

// FuzzReceive: for any bytes of a peer, no message exceeds the bound, and each message
// equals the one that a simple reader of frames returns.
func FuzzReceive(f *testing.F) {
	f.Add([]byte{0, 3, 1, 'k', 'v'})
	f.Add([]byte{1, 0, 0, 2, 'h', 'i', 4, 5, 4, 'L', 'A', 'T', 'E', 0, 0})
	f.Add(append([]byte{2, 0, 0, 0, 0, 0, 0, 1, 44}, bytes.Repeat([]byte{9}, 300)...))
	f.Add(append([]byte{4, 13, 9}, "SUBSCRIBEkv@"...))
	f.Fuzz(func(t *testing.T, sent []byte) {
		const limit = 512
		z, err := zmtp.Handshake(stream{r: io.MultiReader(bytes.NewReader(hello("SUB")), bytes.NewReader(sent))}, "PUB", []string{"SUB"}, zmtp.Options{MessageBytes: limit})
		if err != nil {
			t.Fatal(err)
		}
		model := frames(sent)
		for {
			m, err := z.Receive()
			if err != nil {
				return
			}
			var size int
			for _, frame := range m {
				size += len(frame)
			}
			if size > limit {
				t.Fatalf("a message of %d bytes exceeds the bound", size)
			}
			if len(model) == 0 || !reflect.DeepEqual(model[0], m) {
				t.Fatalf("%q; the model has %q", m, model)
			}
			model = model[1:]
		}
	})
}

// frames reads all complete messages in b, without limits.
func frames(b []byte) (messages [][][]byte) {
	var m [][]byte
	for len(b) >= 2 {
		flags, n, at := b[0], uint64(b[1]), 2
		if flags&2 != 0 {
			if len(b) < 9 {
				return messages
			}
			n, at = binary.BigEndian.Uint64(b[1:]), 9
		}
		if n > uint64(len(b)-at) {
			return messages
		}
		body := b[at : at+int(n)]
		b = b[at+int(n):]
		if flags&4 != 0 {
			for command, first := range map[string]byte{"SUBSCRIBE": 1, "CANCEL": 0} {
				if rest, ok := bytes.CutPrefix(body, append([]byte{byte(len(command))}, command...)); ok {
					messages = append(messages, [][]byte{append([]byte{first}, rest...)})
				}
			}
			continue
		}
		if m = append(m, append([]byte{}, body...)); flags&1 == 0 {
			messages, m = append(messages, m), nil
		}
	}
	return messages
}
