package peer

import (
	"context"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"

	"github.com/penstock-kv/penstock/internal/sys"
)

// Congestion is the congestion control that every contender uses. With bbr, a common default, every
// contender is 10 to 35 % slower on the loopback interface.
const Congestion = "cubic"

const congestionFile = "/proc/sys/net/ipv4/tcp_congestion_control"

// UseCongestion makes Congestion the system's default, for the peers that have no setting for their
// congestion control (Redis, gRPC). It returns a function that restores the old default. If the
// change is not permitted, the note names the contenders that are at a disadvantage.
func UseCongestion() (note string, restore func() error) {
	nothing := func() error { return nil }
	old, err := os.ReadFile(congestionFile)
	if err != nil {
		return fmt.Sprintf("Redis and gRPC use the system's congestion control (%v)", err), nothing
	}
	was := strings.TrimSpace(string(old))
	if was == Congestion {
		return "every connection uses " + Congestion, nothing
	}
	if err := os.WriteFile(congestionFile, []byte(Congestion), 0o644); err != nil {
		return fmt.Sprintf("Redis and gRPC use %s, the others %s: ratios to those two are too good (%v)", was, Congestion, err), nothing
	}
	return fmt.Sprintf("every connection uses %s (the system's default, %s, was changed for this run)", Congestion, was),
		func() error { return os.WriteFile(congestionFile, old, 0o644) }
}

// dial connects with the socket options of Penstock's data plane: cubic, no multipath TCP.
func dial(ctx context.Context, addr string) (net.Conn, error) {
	d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error { return sys.SetCongestion(c, Congestion) }}
	d.SetMultipathTCP(false)
	return d.DialContext(ctx, "tcp", addr)
}

// listen listens with the socket options of Penstock's data plane: cubic, no multipath TCP.
func listen(ctx context.Context) (net.Listener, error) {
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error { return sys.SetCongestion(c, Congestion) }}
	lc.SetMultipathTCP(false)
	return lc.Listen(ctx, "tcp", "127.0.0.1:0")
}
