package fair

import (
	"math/big"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// naive is a Queue without flows: one list of all waiting calls in the order of their arrival, from which
// the next call is computed anew each time, with exact numbers.
type naive struct {
	waiting []naiveCall
	users   []*naiveUser // in the order of their first call
	virtual *big.Rat
	clock   int
}

type naiveCall struct {
	user, tenant string
	units, bytes int64
	turn         *Turn
}

type naiveUser struct {
	name   string
	weight int64
	start  *big.Rat
	held   int64
	since  map[string]int // when the tenant has come to the end of the order of tenants
}

func (m *naive) user(name string) *naiveUser {
	return m.users[slices.IndexFunc(m.users, func(u *naiveUser) bool { return u.name == name })]
}

func (m *naive) calls(user, tenant string) (calls []naiveCall) {
	for _, c := range m.waiting {
		if c.user == user && (tenant == "*" || c.tenant == tenant) {
			calls = append(calls, c)
		}
	}
	return calls
}

func later(a, b *big.Rat) *big.Rat {
	if a.Cmp(b) >= 0 {
		return a
	}
	return b
}

func (m *naive) push(c naiveCall) {
	u := m.user(c.user)
	if len(m.calls(c.user, "*")) == 0 {
		u.start = later(u.start, m.virtual)
	}
	if len(m.calls(c.user, c.tenant)) == 0 {
		m.clock++
		u.since[c.tenant] = m.clock
	}
	m.waiting = append(m.waiting, c)
}

func (m *naive) next(free int64) *naiveCall {
	var who []*naiveUser
	units, weights := free, int64(0)
	for _, u := range m.users {
		if len(m.calls(u.name, "*")) > 0 {
			who = append(who, u)
			units += u.held
			weights += u.weight
		}
	}
	within := slices.DeleteFunc(slices.Clone(who), func(u *naiveUser) bool { return u.held*weights > units*u.weight })
	if len(who) == 0 {
		return nil
	}
	first := slices.MinFunc(within, func(a, b *naiveUser) int { return a.start.Cmp(b.start) })
	var call *naiveCall
	for _, c := range m.calls(first.name, "*") {
		if call == nil || first.since[c.tenant] < first.since[call.tenant] {
			call = &c
		}
	}
	return call
}

func (m *naive) remove(t *Turn) {
	m.waiting = slices.DeleteFunc(m.waiting, func(c naiveCall) bool { return c.turn == t })
}

func (m *naive) take(c naiveCall) {
	u := m.user(c.user)
	m.remove(c.turn)
	m.clock++
	u.since[c.tenant] = m.clock
	m.virtual = later(m.virtual, u.start)
	for _, o := range m.users {
		if len(m.calls(o.name, "*")) > 0 {
			o.start = later(o.start, m.virtual)
		}
	}
	u.start = new(big.Rat).Add(u.start, big.NewRat(max(c.bytes, turnBytesMin), u.weight))
	u.held += c.units
}

func (m *naive) release(user string, units int64) {
	m.user(user).held -= units
	for _, u := range m.users {
		if u.held > 0 || len(m.waiting) > 0 {
			return
		}
	}
	m.virtual = new(big.Rat)
	for _, u := range m.users {
		u.start = new(big.Rat)
	}
}

// FuzzModel compares a Queue with the naive one. Two bytes of the input are one step: calls that come,
// that give up, that are granted and that release their units, and weights that change. Weights are powers of
// two, so the tags of the Queue are exact too.
func FuzzModel(f *testing.F) {
	for seed := range uint64(8) {
		rng := rand.New(rand.NewPCG(seed, 3))
		steps := make([]byte, 600)
		for i := range steps {
			steps[i] = byte(rng.Uint32())
		}
		f.Add(steps)
	}
	f.Fuzz(func(t *testing.T, steps []byte) {
		const size = 64
		names := []string{"a", "b", "c"}
		q, m := New(), &naive{virtual: new(big.Rat)}
		type grant struct {
			flow  *Flow
			user  string
			units int64
		}
		var held []grant
		var used int64
		shareOf := func(name string) Share {
			return Share{Principal: name, Weight: func() int { return int(m.user(name).weight) }}
		}
		for i, name := range names {
			m.users = append(m.users, &naiveUser{name: name, weight: 1 << i, start: new(big.Rat), since: make(map[string]int)})
			q.flowOf(shareOf(name))
		}
		for i := 0; i+1 < len(steps); i += 2 {
			kind, arg := steps[i], int(steps[i+1])
			name := names[arg%3]
			c := naiveCall{user: name, tenant: string('x' + rune(arg/3%2)), units: int64(arg/6%8) + 1, bytes: int64(arg%5) << 12}
			switch {
			case kind < 100 && q.Waiting() < 40:
				by := Caller{Share: shareOf(name), Tenant: c.tenant}
				if q.Waiting() == 0 && c.units <= size-used {
					held = append(held, grant{q.Take(by, c.units, c.bytes), name, c.units})
					used += c.units
					m.push(c)
					m.take(c)
					break
				}
				c.turn = q.Push(by, c.units, c.bytes)
				m.push(c)
			case kind < 120 && q.Waiting() > 0:
				gone := m.waiting[arg%len(m.waiting)].turn
				if !q.Remove(gone) || q.Remove(gone) {
					t.Fatalf("step %d: a waiting call does not go once", i)
				}
				m.remove(gone)
			case kind < 140:
				m.user(name).weight = 1 << (arg / 3 % 5)
			case len(held) > 0:
				g := held[arg%len(held)]
				held = slices.Delete(held, arg%len(held), arg%len(held)+1)
				used -= g.units
				g.flow.Release(g.units)
				m.release(g.user, g.units)
			}
			for {
				want, got := m.next(size-used), q.Next(size-used)
				if want == nil && got == nil {
					break
				}
				if want == nil || got != want.turn {
					t.Fatalf("step %d: the next call is %+v; the model has %+v", i, got, want)
				}
				if got.Units > size-used {
					break
				}
				q.Grant(got)
				m.take(*want)
				used += got.Units
				held = append(held, grant{got.Flow(), want.user, got.Units})
			}
			for _, u := range m.users {
				if waiting, units := q.Of(u.name); units != u.held || waiting != len(m.calls(u.name, "*")) {
					t.Fatalf("step %d: %s has %d units and %d waiting calls; the model has %d and %d", i, u.name, units, waiting, u.held, len(m.calls(u.name, "*")))
				}
			}
			if q.Held() != used || q.Waiting() != len(m.waiting) {
				t.Fatalf("step %d: %d units and %d calls; the model has %d and %d", i, q.Held(), q.Waiting(), used, len(m.waiting))
			}
		}
	})
}

// TestSharesOfHeldUnits: principals that always wait hold units by their weights, to one unit, also if the calls of one
// last a hundred times as long. When a second principal comes, one that holds everything gets no more
// until the other has its share.
func TestSharesOfHeldUnits(t *testing.T) {
	const size = 400
	q := New()
	slow, fast := newPrincipal("slow", 1, 0), newPrincipal("fast", 3, 0)
	held := make(map[*principal][]*Flow)
	free := func() int64 { return size - q.Held() }
	fill := func(all ...*principal) {
		for _, p := range all {
			if waiting, _ := q.Of(p.Share.Principal); waiting == 0 {
				q.Push(p.Caller, 1, 1<<20)
			}
		}
		for turn := q.Next(free()); free() > 0; turn = q.Next(free()) {
			p := slow
			if turn.Flow() == q.flows["fast"] {
				p = fast
			}
			q.Grant(turn)
			held[p] = append(held[p], turn.Flow())
			q.Push(p.Caller, 1, 1<<20)
		}
	}
	release := func(p *principal) {
		held[p][0].Release(1)
		held[p] = held[p][1:]
	}
	fill(slow)
	if n := len(held[slow]); n != size {
		t.Fatalf("alone it holds %d of %d units", n, size)
	}
	for range 3 * size / 4 {
		release(slow)
		fill(slow, fast)
	}
	if n := len(held[slow]); n < size/4 || n > size/4+1 {
		t.Errorf("the first holds %d units and the second %d", len(held[slow]), len(held[fast]))
	}
	rng := rand.New(rand.NewPCG(1, 4))
	for i := range 100 * size {
		p := fast
		if rng.IntN(301) == 0 { // a unit of slow is released once for a hundred times a unit of fast
			p = slow
		}
		release(p)
		fill(slow, fast)
		if n := len(held[slow]); n < size/4-1 || n > size/4+1 {
			t.Fatalf("after %d releases the slow one holds %d of %d units; its share is %d", i, n, size, size/4)
		}
	}
	slow.weight.Store(9)
	for len(held[slow]) < 3*size/4-1 {
		before := len(held[slow])
		release(fast)
		if fill(slow, fast); len(held[slow]) == before {
			t.Fatalf("with the new weight the slow one stays at %d units", before)
		}
	}
}

// TestPassedOver: a principal that was passed over because of its units does not get the bytes of that time later.
func TestPassedOver(t *testing.T) {
	q := New()
	a, b := newPrincipal("a", 1, 0), newPrincipal("b", 1, 0)
	all := q.Take(a.Caller, 100, 1<<20)
	var order string
	for range 200 {
		q.Push(a.Caller, 0, 1<<20)
		q.Push(b.Caller, 0, 1<<20)
	}
	grant := func(n int) {
		order = ""
		for range n {
			turn := q.Next(0)
			order += turn.Flow().share.Principal
			q.Grant(turn)
		}
	}
	if grant(50); order != strings.Repeat("b", 50) {
		t.Errorf("while a holds 100 units, the grants are %s", order)
	}
	all.Release(100)
	if grant(20); strings.Count(order, "a") > 11 || strings.Count(order, "a") < 9 {
		t.Errorf("after a has released them, the grants are %s", order)
	}
}
