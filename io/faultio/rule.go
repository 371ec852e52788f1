package faultio

import (
	"fmt"
	"math/rand/v2"
	"path"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Action is the effect of a rule.
type Action uint8

// The actions, as the package comment describes them.
const (
	Err Action = iota + 1
	Short
	Torn
	Flip
	Delay
	Stall
)

// waits reports whether the action only makes the call wait.
func (a Action) waits() bool { return a == Delay || a == Stall }

var actionNames = [...]string{Err: "Err", Short: "Short", Torn: "Torn", Flip: "Flip", Delay: "Delay", Stall: "Stall"}

// String returns the action's word in the language.
func (a Action) String() string {
	if int(a) < len(actionNames) && actionNames[a] != "" {
		return actionNames[a]
	}
	return fmt.Sprintf("Action(%d)", uint8(a))
}

// Kind is a kind of call.
type Kind uint8

// The kinds of calls to which rules apply.
const (
	Read Kind = iota + 1
	Write
	Sync
	Create
	Open
	Remove
)

// kindWords are the predicates that select one kind.
var kindWords = [...]string{Read: "Reads", Write: "Writes", Sync: "Syncs", Create: "Creates", Open: "Opens", Remove: "Removes"}

// String returns "read", "write" and so on.
func (k Kind) String() string {
	if int(k) < len(kindWords) && kindWords[k] != "" {
		return strings.ToLower(strings.TrimSuffix(kindWords[k], "s"))
	}
	return fmt.Sprintf("Kind(%d)", uint8(k))
}

// Rules are a parsed text: a list of possible faults. They are immutable. Each Wrap, SetRules or
// Hook starts with new counts and random numbers.
type Rules struct {
	list []rule
}

// String returns the rules in their language, one per line. Parsing the result returns equal rules.
func (r *Rules) String() string {
	var b strings.Builder
	for _, x := range r.list {
		fmt.Fprintln(&b, x)
	}
	return b.String()
}

type rule struct {
	action Action
	errno  syscall.Errno // of Err
	delay  time.Duration // of Delay
	bit    int64         // of Flip; negative: random
	when   predicate
}

func (r rule) String() string {
	words := []string{r.action.String()}
	switch {
	case r.action == Err:
		words = append(words, unix.ErrnoName(r.errno))
	case r.action == Delay:
		words = append(words, r.delay.String())
	case r.action == Flip && r.bit >= 0:
		words = append(words, strconv.FormatInt(r.bit, 10))
	}
	if _, always := r.when.(anyCall); !always {
		words = append(words, r.when.String())
	}
	return "(" + strings.Join(words, " ") + ")"
}

// call describes one call of the device. Predicates test it.
type call struct {
	kind          Kind
	files         []string
	offset, bytes int64 // of a transfer
}

func (c *call) transfer() bool { return c.kind == Read || c.kind == Write }

// predicate selects calls. start returns a new function that tests calls; its counts and random
// numbers start anew. The function is not safe for concurrent use.
type predicate interface {
	String() string
	start() func(*call) bool
}

type anyCall struct{}

func (anyCall) String() string          { return "Any" }
func (anyCall) start() func(*call) bool { return func(*call) bool { return true } }

type ofKind Kind

func (k ofKind) String() string          { return kindWords[k] }
func (k ofKind) start() func(*call) bool { return func(c *call) bool { return c.kind == Kind(k) } }

type ofFile string

func (f ofFile) String() string { return "(File " + strconv.Quote(string(f)) + ")" }

func (f ofFile) start() func(*call) bool {
	return func(c *call) bool {
		return slices.ContainsFunc(c.files, func(name string) bool {
			ok, err := path.Match(string(f), name)
			return ok && err == nil
		})
	}
}

type atOffset struct{ from, to int64 }

func (o atOffset) String() string { return fmt.Sprintf("(Offset %d %d)", o.from, o.to) }

func (o atOffset) start() func(*call) bool {
	return func(c *call) bool { return c.transfer() && c.offset < o.to && o.from < c.offset+c.bytes }
}

type after int64

func (n after) String() string { return fmt.Sprintf("(After %d)", int64(n)) }

func (n after) start() func(*call) bool {
	left := int64(n)
	return func(*call) bool {
		left--
		return left < 0
	}
}

type count int64

func (n count) String() string { return fmt.Sprintf("(Count %d)", int64(n)) }

func (n count) start() func(*call) bool {
	left := int64(n)
	return func(*call) bool {
		left--
		return left >= 0
	}
}

type prob struct {
	p    float64
	seed uint64
}

func (p prob) String() string {
	return fmt.Sprintf("(Prob %s %d)", strconv.FormatFloat(p.p, 'g', -1, 64), p.seed)
}

func (p prob) start() func(*call) bool {
	rng := rand.New(rand.NewPCG(p.seed, 0x70726f62))
	return func(*call) bool { return rng.Float64() < p.p }
}

type not struct{ p predicate }

func (n not) String() string { return "(Not " + n.p.String() + ")" }

func (n not) start() func(*call) bool {
	p := n.p.start()
	return func(c *call) bool { return !p(c) }
}

// combined is And, or Or.
type combined struct {
	or   bool
	list []predicate
}

func (m combined) String() string {
	words := []string{"And"}
	if m.or {
		words[0] = "Or"
	}
	for _, p := range m.list {
		words = append(words, p.String())
	}
	return "(" + strings.Join(words, " ") + ")"
}

func (m combined) start() func(*call) bool {
	var list []func(*call) bool
	for _, p := range m.list {
		list = append(list, p.start())
	}
	return func(c *call) bool {
		for _, p := range list {
			if p(c) == m.or {
				return m.or
			}
		}
		return !m.or
	}
}
