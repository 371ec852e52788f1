//go:build fabric && cgo && linux

package fabric

import (
	"bufio"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"testing"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// envChild makes the test binary a peer in another process: sink or source.
const envChild = "PENSTOCK_FABRIC_CHILD"

// childToken is the secret of every server here.
const childToken = "a token for the peers of fabric"

// sinkBytes is the size of a sink's memory.
const sinkBytes = 64 << 20

// child runs such a process.
func child(role string) error {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	in := bufio.NewReader(os.Stdin)
	line, err := in.ReadString('\n')
	if err != nil {
		return err
	}
	switch role {
	case "sink":
		return sink(ctx, in)
	case "source":
		return source(ctx, line)
	}
	return fmt.Errorf("no such child: %s", role)
}

// sink gives access to its memory to every peer that has its Desc, until stdin ends.
func sink(ctx context.Context, in io.Reader) error {
	e, err := childEngine(ctx, "127.0.0.1:0")
	if err != nil {
		return err
	}
	r, err := e.Register(make([]byte, sinkBytes), rdma.RegisterOptions{})
	if err != nil {
		return errors.Join(err, e.Close())
	}
	b, err := r.Desc().MarshalBinary()
	if err != nil {
		return errors.Join(err, e.Close())
	}
	fmt.Println(base64.StdEncoding.EncodeToString(b))
	_, err = io.Copy(io.Discard, in)
	return errors.Join(err, e.Close())
}

// source writes to the memory described by text until it is killed.
func source(ctx context.Context, text string) error {
	b, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return err
	}
	var d rdma.Desc
	if err := d.UnmarshalBinary(b); err != nil {
		return err
	}
	e, err := childEngine(ctx, "")
	if err != nil {
		return err
	}
	if _, err := e.Connect(ctx, d.Addr(), rdma.Token(childToken)); err != nil {
		return err
	}
	src, err := e.Register(slices.Repeat([]byte{1}, int(d.Len)), rdma.RegisterOptions{Local: true})
	if err != nil {
		return err
	}
	for {
		if err := e.Write(ctx, rdma.Write{Src: src, Dst: d, Len: d.Len, Imm: rdma.ImmOf(1)}); err != nil {
			return err
		}
	}
}

func childEngine(ctx context.Context, listen string) (*group.Engine, error) {
	c, err := group.TCP(ctx, listen, "", nil)
	if err != nil {
		return nil, err
	}
	return New(ctx, Options{
		Domain: DomainOptions{Provider: provider}, NICs: []NIC{loopback}, Group: group.Options{Token: rdma.Token(childToken), Control: c},
	})
}

// process is a running child.
type process struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

// start starts a program, which is killed at the end of the test.
func start(t testing.TB, cmd *exec.Cmd) *process {
	t.Helper()
	cmd.Stderr = os.Stderr
	p := &process{cmd: cmd}
	var err error
	if p.in, err = cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.out = bufio.NewReader(out)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.kill)
	return p
}

// kill sends SIGKILL.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

// line reads the program's next line.
func (p *process) line(t testing.TB) string {
	t.Helper()
	s, err := p.out.ReadString('\n')
	if err != nil {
		t.Fatalf("a child sends %q: %v", s, err)
	}
	return s[:len(s)-1]
}

// startChild starts this binary as a peer.
func startChild(t testing.TB, role, text string) *process {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), envChild+"="+role)
	p := start(t, cmd)
	if _, err := fmt.Fprintln(p.in, text); err != nil {
		t.Fatal(err)
	}
	return p
}

// startSink starts a sink and returns its memory.
func startSink(t testing.TB) (rdma.Desc, *process) {
	t.Helper()
	p := startChild(t, "sink", "")
	b, err := base64.StdEncoding.DecodeString(p.line(t))
	if err != nil {
		t.Fatal(err)
	}
	var d rdma.Desc
	if err := d.UnmarshalBinary(b); err != nil {
		t.Fatal(err)
	}
	return d, p
}
