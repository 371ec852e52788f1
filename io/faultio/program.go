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
	// replaced is closed when set replaces the rules.
	replaced chan struct{}
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
	if p.replaced != nil {
		close(p.replaced)
	}
	p.replaced = make(chan struct{})
	p.rules, p.rng = nil, rand.New(rand.NewPCG(1, 0x666c6970))
	if rules == nil {
		return
	}
	for _, r := range rules.list {
		p.rules = append(p.rules, running{rule: r, text: r.String(), applies: r.when.start()})
	}
}

// pause is the time that calls wait: for a Delay, and until the channel of a Stall, if it is not nil,
// is closed.
type pause struct {
	delay time.Duration
	until <-chan struct{}
}

// add makes p the pause of calls that wait for both.
func (p *pause) add(o pause) {
	p.delay += o.delay
	if o.until != nil {
		p.until = o.until
	}
}

func (p pause) wait() {
	if p.delay > 0 {
		time.Sleep(p.delay)
	}
	if p.until != nil {
		<-p.until
	}
}

// verdict is the effect of the rules on one call.
type verdict struct {
	pause
	// rule is the rule that has an effect, apart from Delay and Stall rules; nil if there is none.
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
		if r.action.waits() {
			v.delay += r.delay
			if r.action == Stall {
				v.until = p.replaced
			}
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
	return r.action == Err || r.action.waits() || c.transfer()
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
