package faultio

import (
	"fmt"
	"math"
	"path"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Limits of the input of Parse, so that no input exhausts the memory or the stack.
const (
	depthMax = 32
	delayMax = time.Hour
	errnoMax = 4095 // the highest errno of Linux
)

// Parse reads rules in the language that the package comment describes. An error contains the
// position, in bytes from the start, and the expected words.
func Parse(text string) (*Rules, error) {
	p := &parser{text: text}
	rules := &Rules{}
	for {
		p.space()
		if p.at == len(p.text) {
			return rules, nil
		}
		n, err := p.node(0)
		if err != nil {
			return nil, err
		}
		r, err := toRule(n)
		if err != nil {
			return nil, err
		}
		rules.list = append(rules.list, r)
	}
}

// MustParse is Parse for constant texts in tests. It panics on an error.
func MustParse(text string) *Rules {
	rules, err := Parse(text)
	if err != nil {
		panic(err)
	}
	return rules
}

// node is a word, a quoted string or a list.
type node struct {
	at     int
	word   string
	quoted bool
	list   []node // nil unless the node is a list
}

func (n node) fail(format string, args ...any) error {
	return fmt.Errorf("faultio: at byte %d: %s", n.at, fmt.Sprintf(format, args...))
}

func (n node) String() string {
	switch {
	case n.list != nil:
		return "a list"
	case n.quoted:
		return strconv.Quote(n.word)
	}
	return n.word
}

type parser struct {
	text string
	at   int
}

func (p *parser) space() {
	p.at = len(p.text) - len(strings.TrimLeft(p.text[p.at:], " \t\r\n"))
}

// node reads one node. The parser must be at the first byte of the node.
func (p *parser) node(depth int) (node, error) {
	n := node{at: p.at}
	switch rest := p.text[p.at:]; {
	case depth > depthMax:
		return n, n.fail("more than %d lists inside each other", depthMax)
	case rest[0] == '(':
		return p.nodeList(depth)
	case rest[0] == ')':
		return n, n.fail(`")" without "("`)
	case rest[0] == '"':
		return p.quoted()
	default:
		end := strings.IndexAny(rest, "() \t\r\n\"")
		if end < 0 {
			end = len(rest)
		}
		n.word = rest[:end]
		p.at += end
		return n, nil
	}
}

func (p *parser) nodeList(depth int) (node, error) {
	n := node{at: p.at, list: []node{}}
	for p.at++; ; {
		p.space()
		if p.at == len(p.text) {
			return n, n.fail(`"(" without ")"`)
		}
		if p.text[p.at] == ')' {
			p.at++
			return n, nil
		}
		item, err := p.node(depth + 1)
		if err != nil {
			return n, err
		}
		n.list = append(n.list, item)
	}
}

func (p *parser) quoted() (node, error) {
	n := node{at: p.at, quoted: true}
	prefix, err := strconv.QuotedPrefix(p.text[p.at:])
	if err != nil {
		return n, n.fail("a quoted string that does not end, or holds what it may not")
	}
	if n.word, err = strconv.Unquote(prefix); err != nil {
		return n, n.fail("quoted string %s: %v", prefix, err)
	}
	p.at += len(prefix)
	return n, nil
}

// toRule reads "(Action argument… predicate?)".
func toRule(n node) (rule, error) {
	if len(n.list) == 0 || n.list[0].list != nil {
		return rule{}, n.fail("%v where a rule is expected: (Err EIO Reads)", n)
	}
	r := rule{bit: -1, when: anyCall{}}
	head, rest := n.list[0], n.list[1:]
	var err error
	switch head.word {
	case "Err":
		r.action = Err
		r.errno, rest, err = takeErrno(n, rest)
	case "ENOSPC":
		r.action, r.errno = Err, syscall.ENOSPC
	case "Delay":
		r.action = Delay
		r.delay, rest, err = takeDelay(n, rest)
	case "Flip":
		r.action = Flip
		r.bit, rest, err = takeBit(rest)
	case "Short":
		r.action = Short
	case "Torn":
		r.action = Torn
	case "Stall":
		r.action = Stall
	default:
		err = head.fail("unknown action %v; want Err, ENOSPC, Short, Torn, Flip, Delay or Stall", head)
	}
	if err != nil {
		return rule{}, err
	}
	if len(rest) > 1 {
		return rule{}, rest[1].fail("%v after the predicate of %s; join predicates with (And …) or (Or …)", rest[1], head.word)
	}
	if len(rest) == 1 {
		r.when, err = toPredicate(rest[0])
	}
	return r, err
}

func takeErrno(n node, rest []node) (syscall.Errno, []node, error) {
	if len(rest) == 0 || rest[0].list != nil {
		return 0, nil, n.fail("Err without the name of an error: (Err EIO)")
	}
	for e := range syscall.Errno(errnoMax) {
		if name := unix.ErrnoName(e); name != "" && name == rest[0].word {
			return e, rest[1:], nil
		}
	}
	return 0, nil, rest[0].fail("unknown error %v; want a name of errno(3) such as EIO", rest[0])
}

func takeDelay(n node, rest []node) (time.Duration, []node, error) {
	if len(rest) == 0 || rest[0].list != nil {
		return 0, nil, n.fail("Delay without a duration: (Delay 5ms)")
	}
	d, err := time.ParseDuration(rest[0].word)
	if err != nil || d < 0 || d > delayMax {
		return 0, nil, rest[0].fail("delay %v; want a duration from 0 to %v such as 5ms", rest[0], delayMax)
	}
	return d, rest[1:], nil
}

// takeBit reads the bit of a Flip, if there is one.
func takeBit(rest []node) (int64, []node, error) {
	if len(rest) == 0 || rest[0].list != nil {
		return -1, rest, nil
	}
	bit, err := strconv.ParseInt(rest[0].word, 10, 64)
	if err != nil {
		return -1, rest, nil // a predicate
	}
	if bit < 0 {
		return 0, nil, rest[0].fail("bit %d; want the number of a bit from the start of the request", bit)
	}
	return bit, rest[1:], nil
}

func toPredicate(n node) (predicate, error) {
	if n.list == nil {
		return toWord(n)
	}
	if len(n.list) == 0 || n.list[0].list != nil {
		return nil, n.fail("a list where a predicate is expected: (Offset 0 4096)")
	}
	args := n.list[1:]
	switch head := n.list[0].word; head {
	case "File":
		return toFile(n, args)
	case "Offset":
		return toOffset(n, args)
	case "Prob":
		return toProb(n, args)
	case "After", "Count":
		v, err := integers(n, args, 1)
		if err != nil {
			return nil, err
		}
		if head == "After" {
			return after(v[0]), nil
		}
		return count(v[0]), nil
	case "And", "Or", "Not":
		return toCombined(n, head, args)
	default:
		return nil, n.list[0].fail("unknown predicate %v; want File, Offset, After, Count, Prob, And, Or or Not", n.list[0])
	}
}

func toWord(n node) (predicate, error) {
	if !n.quoted && n.word == "Any" {
		return anyCall{}, nil
	}
	for k, word := range kindWords {
		if word != "" && !n.quoted && word == n.word {
			return ofKind(k), nil
		}
	}
	return nil, n.fail("unknown predicate %v; want Reads, Writes, Syncs, Creates, Opens, Removes, Any or a list", n)
}

func toFile(n node, args []node) (predicate, error) {
	if len(args) != 1 || !args[0].quoted {
		return nil, n.fail(`File takes one quoted pattern: (File "seg-*")`)
	}
	if _, err := path.Match(args[0].word, ""); err != nil {
		return nil, args[0].fail("pattern %v: %v", args[0], err)
	}
	return ofFile(args[0].word), nil
}

func toOffset(n node, args []node) (predicate, error) {
	v, err := integers(n, args, 2)
	if err != nil {
		return nil, err
	}
	if v[1] <= v[0] {
		return nil, n.fail("bytes %d to %d are none; want (Offset FROM TO) with FROM < TO", v[0], v[1])
	}
	return atOffset{v[0], v[1]}, nil
}

func toProb(n node, args []node) (predicate, error) {
	if len(args) != 2 || args[0].list != nil || args[1].list != nil {
		return nil, n.fail("Prob takes a probability and a seed: (Prob 0.01 7)")
	}
	p, err := strconv.ParseFloat(args[0].word, 64)
	if err != nil || math.IsNaN(p) || p < 0 || p > 1 {
		return nil, args[0].fail("probability %v; want 0 to 1", args[0])
	}
	seed, err := strconv.ParseUint(args[1].word, 10, 64)
	if err != nil {
		return nil, args[1].fail("seed %v; want a whole number from 0", args[1])
	}
	return prob{p + 0, seed}, nil // + 0 converts -0 to 0
}

func toCombined(n node, head string, args []node) (predicate, error) {
	if len(args) == 0 || head == "Not" && len(args) != 1 {
		return nil, n.fail("%s with %d predicates", head, len(args))
	}
	var list []predicate
	for _, a := range args {
		p, err := toPredicate(a)
		if err != nil {
			return nil, err
		}
		list = append(list, p)
	}
	if head == "Not" {
		return not{list[0]}, nil
	}
	return combined{head == "Or", list}, nil
}

// integers reads exactly want integers, each at least 0.
func integers(n node, args []node, want int) ([]int64, error) {
	if len(args) != want {
		return nil, n.fail("%v takes %d numbers, not %d", n.list[0], want, len(args))
	}
	var out []int64
	for _, a := range args {
		v, err := strconv.ParseInt(a.word, 10, 64)
		if err != nil || v < 0 || a.list != nil || a.quoted {
			return nil, a.fail("%v; want a whole number from 0", a)
		}
		out = append(out, v)
	}
	return out, nil
}
