package main

import (
	"context"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/top"
	"github.com/penstock-kv/penstock/internal/top/fromapi"
)

// observed are the nodes of which top takes samples.
type observed struct {
	nodes   []observedNode
	started time.Time
	// namespaces: samples have the namespaces too.
	namespaces bool
	// answerTimeout is the time that a node has for its answer. 0: it depends on the interval.
	answerTimeout time.Duration
}

type observedNode struct {
	address string
	conn    *grpc.ClientConn
}

// observe opens connections to the nodes of --server. It contacts none.
func (c *connection) observe() (*observed, error) {
	if err := c.checkServers(); err != nil {
		return nil, err
	}
	o := &observed{started: time.Now()}
	for i, address := range c.list() {
		if slices.Contains(c.list()[:i], address) {
			o.close()
			return nil, usagef("--%s: %s is listed twice", c.endpoint.flag, address)
		}
		conn, err := c.dial(address)
		if err != nil {
			o.close()
			return nil, err
		}
		o.nodes = append(o.nodes, observedNode{address: address, conn: conn})
	}
	return o, nil
}

func (o *observed) close() {
	for _, n := range o.nodes {
		_ = n.conn.Close() // no call is in progress
	}
}

// Without --answer-timeout, a node has the length of the interval for its answer, but at least
// answerMin and at most answerMax.
const (
	answerMin = time.Second
	answerMax = 10 * time.Second
)

// sample asks all nodes at once. A node that does not answer in time is in the sample with the
// reason. The error is that of ctx.
func (o *observed) sample(ctx context.Context, interval time.Duration) (top.Sample, error) {
	within := o.answerTimeout
	if within == 0 {
		within = min(max(interval, answerMin), answerMax)
	}
	asked, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	s := top.Sample{At: time.Since(o.started), Nodes: make([]top.Node, len(o.nodes))}
	panics := make([]any, len(o.nodes))
	var wg sync.WaitGroup
	for i, n := range o.nodes {
		wg.Go(func() {
			panics[i] = caught(func() { s.Nodes[i] = n.answer(asked, within, o.namespaces) })
		})
	}
	wg.Wait()
	for _, p := range panics {
		if p != nil {
			panic(p)
		}
	}
	return s, over(ctx)
}

// caught calls f. If f panics, caught returns the value of the panic and the stack as text;
// otherwise nil. A goroutine sends this text to the goroutine that restores the terminal and then
// panics with the text.
func caught(f func()) (panicked any) {
	defer func() {
		if p := recover(); p != nil {
			panicked = fmt.Sprintf("%v\n%s", p, debug.Stack())
		}
	}()
	f()
	return nil
}

// answer returns the answer of the node, or the reason why there is none.
func (n observedNode) answer(ctx context.Context, within time.Duration, namespaces bool) top.Node {
	// A node that was down may be back, so gRPC must not wait for its next attempt.
	n.conn.ResetConnectBackoff()
	node, err := n.sample(ctx, namespaces)
	switch {
	case err == nil:
		return node
	case outOfTime(ctx, err):
		return top.Node{Address: n.address, Failure: fmt.Sprintf("timeout after %v", within)}
	}
	return top.Node{Address: n.address, Failure: firstLine(err)}
}

func (n observedNode) sample(ctx context.Context, namespaces bool) (top.Node, error) {
	client := pb.NewAdminClient(n.conn)
	status, err := client.Status(ctx, &pb.StatusRequest{})
	if err != nil {
		return top.Node{}, err
	}
	node := fromapi.Node(n.address, status)
	if !namespaces {
		return node, nil
	}
	all, err := listNamespaces(ctx, client)
	if err != nil {
		node.ListFailure = firstLine(err)
		return node, nil
	}
	node.Listed = true
	for _, ns := range all {
		node.Namespaces = append(node.Namespaces, fromapi.Namespace(ns))
	}
	return node, nil
}

// firstLine returns the text of an error without the hints in its further lines.
func firstLine(err error) string {
	line, _, _ := strings.Cut(explain(err), "\n")
	return line
}
