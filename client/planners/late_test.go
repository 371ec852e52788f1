package planners

import (
	"context"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
)

// lateConn is a connection without goroutines to planners a and b. a leads in term 1.
func lateConn() (c *Conn, a, b *planner) {
	a, b = &planner{addr: "a"}, &planner{addr: "b"}
	c = &Conn{planners: []*planner{a, b}, asked: make(chan struct{}), sought: make(chan struct{})}
	c.answered(a, &pb.ElectionResponse{Elected: true, Leads: true, Term: 1}, nil)
	return c, a, b
}

// seeks reports whether the Conn has begun to seek a leader since sought was read.
func seeks(sought <-chan struct{}) bool {
	select {
	case <-sought:
		return true
	default:
		return false
	}
}

// TestLeaderAnswersLate: when the leader does not answer whether it leads, the planners are asked as while a leader is
// sought, until it answers or another planner leads. Meanwhile calls go to the leader, and its streams go on.
func TestLeaderAnswersLate(t *testing.T) {
	c, a, b := lateConn()
	timeout := status.Error(codes.DeadlineExceeded, "no answer")
	if sought := c.sought; !c.answered(b, nil, timeout) || seeks(sought) {
		t.Error("a leader is sought after a standby has not answered")
	}
	for range 2 {
		sought, reign := c.sought, c.reign
		if c.answered(a, nil, timeout) || !seeks(sought) {
			t.Error("no leader is sought after the leader has not answered")
		}
		if sought = c.sought; c.answered(a, nil, timeout) || seeks(sought) {
			t.Error("a leader that has not answered twice is sought at once; it is at the next interval")
		}
		if c.answered(b, &pb.ElectionResponse{Elected: true}, nil) {
			t.Error("the leader is certain after the answer of a standby")
		}
		if p, r, _, err := c.find(context.Background()); err != nil || p != a || r.ctx.Err() != nil || r != reign {
			t.Errorf("a call goes to %v: %v", p, err)
		}
		if !c.answered(a, &pb.ElectionResponse{Elected: true, Leads: true, Term: 1}, nil) {
			t.Error("the leader has answered, and is not certain")
		}
	}
	c.answered(a, nil, timeout)
	reign := c.reign
	if !c.answered(b, &pb.ElectionResponse{Elected: true, Leads: true, Term: 2}, nil) || c.leader != b || reign.ctx.Err() == nil {
		t.Error("planner b leads in term 2, and is not the leader")
	}
}

// TestKnownTerm: the leader fails, and the term of the next one is already known from a response. The next one
// becomes the leader.
func TestKnownTerm(t *testing.T) {
	unavailable := status.Error(codes.Unavailable, "down")
	for what, fail := range map[string]func(*Conn, *planner){
		"a call":   func(c *Conn, a *planner) { c.failed(a, c.reign, unavailable) },
		"Election": func(c *Conn, a *planner) { c.answered(a, nil, unavailable) },
	} {
		c, a, b := lateConn()
		c.term = 2
		if fail(c, a); c.leader != a {
			t.Fatalf("%s has failed: the leader is %v", what, c.leader)
		}
		if !c.answered(b, &pb.ElectionResponse{Elected: true, Leads: true, Term: 2}, nil) || c.leader != b {
			t.Errorf("%s has failed: planner b leads in term 2, and the leader is %v", what, c.leader)
		}
	}
}
