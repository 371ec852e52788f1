package peer

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os/exec"
	"strconv"
)

// Redis is a redis-server on the loopback interface without persistence.
type Redis struct {
	*Process
	port int
}

// StartRedis starts a server.
func StartRedis() (*Redis, error) {
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	p, err := start(exec.Command("redis-server", "--bind", "127.0.0.1", "--port", strconv.Itoa(port),
		"--save", "", "--appendonly", "no", "--daemonize", "no", "--protected-mode", "no"))
	if err != nil {
		return nil, err
	}
	r := &Redis{p, port}
	if err := p.waitPort(loopback(port)); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return r, nil
}

// Port returns the server's port.
func (r *Redis) Port() int { return r.port }

// Conn connects to the server. This package implements the client's protocol, because a client
// library would copy each value once more; here values are read straight into their destination.
func (r *Redis) Conn(ctx context.Context) (*RedisConn, error) {
	c, err := dial(ctx, loopback(r.port))
	if err != nil {
		return nil, err
	}
	return &RedisConn{c: c, r: bufio.NewReader(c)}, nil
}

// RedisConn is one connection. Requests may be pipelined: each Take reads the answer to one Ask, in
// the order of the Asks.
type RedisConn struct {
	c net.Conn
	r *bufio.Reader
	b []byte
}

// Set stores a value.
func (c *RedisConn) Set(key string, value []byte) error {
	head := fmt.Sprintf("*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n", len(key), key, len(value))
	bufs := net.Buffers{[]byte(head), value, []byte("\r\n")}
	if _, err := bufs.WriteTo(c.c); err != nil {
		return err
	}
	line, err := c.r.ReadString('\n')
	if err == nil && line != "+OK\r\n" {
		err = fmt.Errorf("redis: %q", line)
	}
	return err
}

// Ask sends a GET.
func (c *RedisConn) Ask(key string) error {
	c.b = fmt.Appendf(c.b[:0], "*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n", len(key), key)
	_, err := c.c.Write(c.b)
	return err
}

// Take reads the next answer into dst, which must have the length of the value.
func (c *RedisConn) Take(dst []byte) error {
	line, err := c.r.ReadString('\n')
	if err != nil {
		return err
	}
	if want := fmt.Sprintf("$%d\r\n", len(dst)); line != want {
		return fmt.Errorf("redis: answer %q, want %q", line, want)
	}
	// io.ReadFull reads the part that is not buffered yet straight into dst, without a copy.
	if _, err := io.ReadFull(c.r, dst); err != nil {
		return err
	}
	_, err = c.r.Discard(len("\r\n"))
	return err
}

// Close closes the connection.
func (c *RedisConn) Close() error { return c.c.Close() }
