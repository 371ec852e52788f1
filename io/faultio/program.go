package faultio

import (
	"math/rand/v2"
	"sync"
	"time"
)

// program is a set of rules with their state: counts and random numbers.
type program struct {
	counter *Counter

	mu    sync.Mutex
	rules []running
	// rng draws the positions of a Torn and a Flip.
	rng *rand.Rand
}

type running struct {
	rule
	text    string
	applies func(*call) bool
}

func newProgram(counter *Counter, rules *Rules) *program {
	p := &program{counter: counter}
	p.set(rules)
	return p
}

func (p *program) set(rules *Rules) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rules, p.rng = nil, rand.New(rand.NewPCG(1, 0x666c6970))
	if rules == nil {
		return
	}
	for _, r := range rules.list {
		p.rules = append(p.rules, running{rule: r, text: r.String(), applies: r.when.start()})
	}
}

// verdict is the effect of the rules on one call.
type verdict struct {
	delay time.Duration
	// rule is the rule that has an effect, apart from Delay rules; nil if there is none.
	rule *running
	// draw is a random number for the position of the damage.
	draw uint64
}

// judge evaluates the rules for a call.
func (p *program) judge(c *call) verdict {
	p.mu.Lock()
	defer p.mu.Unlock()
	var v verdict
	for i := range p.rules {
		r := &p.rules[i]
		if !r.suits(c) || !r.applies(c) {
			continue
		}
		if r.action == Delay {
			v.delay += r.delay
			p.counter.add(r.injection(c))
			continue
		}
		v.rule, v.draw = r, p.rng.Uint64()
		break
	}
	return v
}

// suits reports whether the action applies to the kind of call.
func (r *running) suits(c *call) bool {
	return r.action == Err || r.action == Delay || c.transfer()
}

func (r *running) injection(c *call) Injection {
	i := Injection{Rule: r.text, Action: r.action, Kind: c.kind, Offset: c.offset, Bytes: c.bytes}
	if len(c.files) > 0 {
		i.File = c.files[0]
	}
	return i
}

// failure records an Err or Short and returns its error.
func (p *program) failure(r *running, c *call, err error) error {
	return &Error{Injection: p.counter.add(r.injection(c)), Err: err}
}

// wait sleeps for a Delay.
func wait(d time.Duration) {
	if d > 0 {
		time.Sleep(d)
	}
}
