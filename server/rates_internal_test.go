package server

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/server/access"
	"github.com/penstock-kv/penstock/server/storage"
)

// TestRateOnAverage: a principal that moves as much as it may gets its rate on average, whatever the
// sizes of its calls: never more than one second's worth and one call above it, and never less than one
// call below it.
func TestRateOnAverage(t *testing.T) {
	for seed := range uint64(50) {
		random := rand.New(rand.NewPCG(seed, 1))
		perSecond := int64(1) << random.IntN(31)
		largest := int64(1) << random.IntN(31)
		var s spend
		start := time.Unix(0, 0)
		now, moved := start, int64(0)
		for range 2000 {
			now = now.Add(time.Duration(random.Int64N(int64(2 * time.Second))))
			for range random.IntN(4) {
				if s.allow(now, "p", "reads", perSecond) != nil {
					break
				}
				n := random.Int64N(largest) + 1
				s.take(now, int(n))
				moved += n
			}
			if most := float64(perSecond)*(now.Sub(start).Seconds()+1) + float64(largest); float64(moved) > most*1.000001 {
				t.Fatalf("seed %d: %d bytes after %v at %d a second, calls of up to %d", seed, moved, now.Sub(start), perSecond, largest)
			}
		}
		if uint64(moved) != s.bytes.Load() {
			t.Errorf("seed %d: %d bytes are counted; want %d", seed, s.bytes.Load(), moved)
		}
		// While it is refused, it has moved no less than its rate allows.
		for n := max(largest, perSecond/100, 1); s.allow(now, "p", "reads", perSecond) == nil; moved += n {
			s.take(now, int(n))
		}
		if float64(moved) < float64(perSecond)*0.999999 {
			t.Errorf("seed %d: refused after %d bytes at %d a second", seed, moved, perSecond)
		}
	}
}

// TestBusyUntilPaid: after a call that is larger than the rate the principal is refused exactly until
// the bytes are paid. A change of the rate begins with a full bucket, and without a rate there is no
// limit.
func TestBusyUntilPaid(t *testing.T) {
	var s spend
	at := func(seconds float64) time.Time {
		return time.Unix(1000, 0).Add(time.Duration(seconds * float64(time.Second)))
	}
	allowed := func(seconds float64, perSecond int64, want bool) {
		t.Helper()
		err := s.allow(at(seconds), "p", "reads", perSecond)
		if (err == nil) != want || err != nil && !errors.Is(err, storage.ErrBusy) {
			t.Errorf("after %v s at %d a second: %v", seconds, perSecond, err)
		}
	}
	allowed(0, 100, true)
	s.take(at(0), 1100) // 1000 more than the bucket has
	allowed(0, 100, false)
	allowed(9.99, 100, false)
	allowed(10.01, 100, true)
	s.take(at(10.01), 5000)
	allowed(10.01, 100, false)
	allowed(10.01, 200, true)
	s.take(at(10.01), 5000)
	allowed(10.01, 200, false)
	allowed(10.01, 0, true)
	s.take(at(10.01), 1<<30)
	allowed(10.01, 0, true)
	if n := s.limited.Load(); n != 4 {
		t.Errorf("%d refused calls are counted; want 4", n)
	}
}

// TestRatesForgetPrincipals: the table of spendings keeps the principals of the policy in use, and stays
// bounded when roles files with other names follow each other.
func TestRatesForgetPrincipals(t *testing.T) {
	var r rates
	policy := func(name string) (*access.Policy, *access.Principal) {
		p, err := access.Parse("roles.yaml", fmt.Appendf(nil, "principals: [{name: kept, subjects: [CN=kept], grants: [{roles: [read], namespaces: [m]}]}, {name: %s, subjects: [CN=a], grants: [{roles: [read], namespaces: [m]}]}]", name))
		if err != nil {
			t.Fatal(err)
		}
		return p, p.Named(name)
	}
	first, _ := policy("a")
	r.of(first.Named("kept"), first).read.take(time.Now(), 7)
	for i := range 5 * access.CredentialsMax {
		p, other := policy(fmt.Sprint("n", i))
		if got := r.of(other, p); r.of(other, p) != got {
			t.Fatal("two spendings for one principal")
		}
	}
	if n := len(r.snapshot()); n > 2*access.CredentialsMax {
		t.Errorf("%d principals are kept", n)
	}
	if s := r.snapshot()["kept"]; s == nil || s.read.bytes.Load() != 7 {
		t.Error("a principal of the policy has lost its spending")
	}
}

// TestShareOfCall: the share of a call has the weight that its principal has in the policy in use, also after a reload.
// A call without a principal has the zero share.
func TestShareOfCall(t *testing.T) {
	policy := func(text string) *access.Policy {
		p, err := access.Parse("roles.yaml", fmt.Appendf(nil, "principals: [{%s, subjects: [CN=a], grants: [{roles: [read], namespaces: [m]}]}]", text))
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	now := policy("name: a, weight: 3")
	s := &Server{guard: guard{roles: func() *access.Policy { return now }}}
	if share := s.shareOf(t.Context()); share.Principal != "" || share.Weight != nil {
		t.Errorf("a call without a principal has the share %+v", share)
	}
	id, ok := now.BySubject("CN=a")
	if !ok {
		t.Fatal("the policy has no principal")
	}
	ctx := withIdentity(context.Background(), id)
	share := s.shareOf(ctx)
	expect := func(what string, want int) {
		t.Helper()
		if share.Principal != "a" || share.Weight() != want {
			t.Errorf("%s: the share is of %q with the weight %d; want a and %d", what, share.Principal, share.Weight(), want)
		}
	}
	expect("at first", 3)
	now = policy("name: a, weight: 7")
	expect("after a reload", 7)
	now = policy("name: a")
	expect("without a weight", 1)
	now = policy("name: b, weight: 9")
	expect("after the principal was removed", 1)
	if got := s.shareOf(ctx); got.Principal != "b" || got.Weight() != 9 {
		t.Errorf("the call of a principal that was renamed has the share of %q", got.Principal)
	}
	now = nil
	expect("without a policy", 1)
}
