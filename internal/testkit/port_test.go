package testkit

import (
	"context"
	"errors"
	"net"
	"syscall"
	"testing"
)

// TestPort: a test can listen on the port twice, and in between the kernel assigns it to no
// connection.
func TestPort(t *testing.T) {
	addr := Port(t)
	for range 2 {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		in := make(chan error, 1)
		go func() {
			nc, err := l.Accept()
			in <- errors.Join(err, nc.Close())
		}()
		nc, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(<-in, nc.Close(), l.Close()); err != nil {
			t.Fatal(err)
		}
		if nc, err := net.Dial("tcp", addr); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("dial a port without a listener: %v, %v", nc, err)
		}
		local, err := net.ResolveTCPAddr("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		d := net.Dialer{LocalAddr: local}
		if nc, err := d.DialContext(context.Background(), "tcp", addr); !errors.Is(err, syscall.EADDRINUSE) {
			t.Errorf("another's connection has the port: %v, %v", nc, err)
		}
	}
}

// TestListen: Listen waits until the address is free.
func TestListen(t *testing.T) {
	addr := Port(t)
	first, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	tries := 0
	second := Listen(t, func() (net.Listener, error) {
		tries++
		if tries == 3 {
			_ = first.Close()
		}
		return net.Listen("tcp", addr)
	})
	if tries < 3 {
		t.Errorf("%d tries", tries)
	}
	_ = second.Close()
}
