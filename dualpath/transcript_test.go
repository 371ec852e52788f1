package dualpath

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// TestTranscripts runs testdata/*.td. Times are milliseconds, other numbers are tokens.
//
//	planner [policy=P] [alpha=N] [beta=N] [block=N] [minpart=N] [rate=N] [compute=N] [queue=N] [weights=(TENANT:N,…)]
//	up      group=G role=prefill|decode engines=(ID@NODE,…) [hbm=N] [longest=N] [buffer=BYTES] [holding=(REQUEST@ENGINE[#ATTEMPT[/ORDER[/ended]]][+FROM-TO[rREAD]]…[~PEER],…) [hit=N]] [again] [seen=N] [switching=prefill|decode]
//	submit  id=N prompt=N [hit=N] [out=N] [ns=N] [epoch=N] [deadline=N] [first=N] [tenant=NAME] [priority=N]
//	fetch   group=G [tok=(…)] [seq=(…)] [hbm=(…)] [buffer=(…)] [queue=(…)] [rate=(…)] [seen=N]     lists in the order of engines, or of their nodes
//	progress request=N side=prefill|decode upto=N [landed=N]      stopped request=N side=… upto=N [failed] [gone]
//	finished request=N side=…      failed request=N side=… [upto=N]      cancel request=N      down group=G      epoch ns=N to=N [drain=recompute|finish|abort]: first the counts of older requests
//	switch  group=G to=prefill|decode [drain=recompute|finish]      refused group=G
//	tick    at=N
//	explain request=N              state                stats
//
// A part with READ is being read. seen is of a group that was registered before. A block takes 100 bytes of a buffer, its checksums one, a request 10. The four about an attempt take attempt=N, the number of a start, and those about a read read=N, the number of the action that ordered it. Each command takes at=N, the time; without it, no time passes.
func TestTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata/transcripts", func(t *testing.T, path string) {
		s := &transcript{}
		datadriven.RunTest(t, path, s.run)
	})
}

// transcript is the state of a transcript.
type transcript struct {
	p    *Planner
	now  time.Duration
	spec map[GroupID][]EngineSpec
}

// run performs one command.
func (s *transcript) run(t *testing.T, d *datadriven.TestData) string {
	c := &args{t: t, d: d}
	if d.HasArg("at") {
		s.now = time.Duration(c.num("at", 0)) * time.Millisecond
	}
	switch d.Cmd {
	case "planner":
		policy, err := ParseReadPolicy(c.text("policy", "split"))
		if err != nil {
			t.Fatal(err)
		}
		s.spec = map[GroupID][]EngineSpec{}
		weights := map[string]float64{}
		for _, w := range c.list("weights") {
			tenant, n, _ := strings.Cut(w, ":")
			weight, err := strconv.ParseFloat(n, 64)
			if err != nil {
				t.Fatal(err)
			}
			weights[tenant] = weight
		}
		s.p = newPlanner(t, Options{
			Weights: weights,
			Policy:  policy, Alpha: c.num("alpha", 0), Beta: c.num("beta", 0), BlockTokens: c.num("block", 64), MinPart: c.num("minpart", 128),
			ReadRate: float64(c.num("rate", 10_000)), PrefillRate: float64(c.num("compute", 0)), MaxQueue: c.num("queue", 0),
		})
		return ""
	case "up":
		return s.up(c)
	case "submit":
		return s.step(Submit{s.now, Request{
			ID: RequestID(c.num("id", 0)), Namespace: NamespaceID(c.num("ns", 0)), Epoch: uint64(c.num("epoch", 0)),
			Prompt: c.num("prompt", 0), Hit: c.num("hit", 0), Output: c.num("out", 0), Deadline: time.Duration(c.num("deadline", 0)) * time.Millisecond,
			Exact: d.HasArg("exact"), FirstToken: time.Duration(c.num("first", 0)) * time.Millisecond, Tenant: c.text("tenant", ""), Priority: c.num("priority", 0),
		}})
	case "fetch":
		return s.fetch(c)
	case "progress":
		return s.step(Progress{s.now, c.request(), c.attempt(), c.role("side"), c.num("upto", 0), c.num("landed", 0), c.read()})
	case "stopped":
		return s.step(Stopped{s.now, c.request(), c.attempt(), c.role("side"), c.num("upto", 0), d.HasArg("failed") || d.HasArg("gone"), d.HasArg("gone"), c.read()})
	case "finished":
		return s.step(Finished{s.now, c.request(), c.attempt(), c.role("side")})
	case "failed":
		return s.step(Failed{s.now, c.request(), c.attempt(), c.role("side"), c.num("upto", 0)})
	case "cancel":
		return s.step(Cancelled{s.now, c.request()})
	case "down":
		return s.step(GroupDown{s.now, GroupID(c.num("group", 0))})
	case "epoch":
		older := s.p.Older(NamespaceID(c.num("ns", 0)), uint64(c.num("to", 0)))
		return fmt.Sprintf("%+v\n", older) + s.step(Epoch{s.now, NamespaceID(c.num("ns", 0)), uint64(c.num("to", 0)), c.drain()})
	case "switch":
		return s.step(SwitchRole{s.now, GroupID(c.num("group", 0)), c.role("to"), c.drain()})
	case "refused":
		return s.step(SwitchRefused{s.now, GroupID(c.num("group", 0))})
	case "tick":
		return s.step(Tick{s.now})
	case "explain":
		x, ok := s.p.Explain(c.request())
		if !ok {
			return "not remembered\n"
		}
		return x.String()
	case "state":
		return s.p.String()
	case "stats":
		return fmt.Sprintf("%+v\n", s.p.Stats())
	}
	t.Fatalf("%s: no such command", d.Cmd)
	return ""
}

// up performs the command of that name.
func (s *transcript) up(c *args) string {
	g := GroupUp{At: s.now, Group: GroupID(c.num("group", 0)), Role: c.role("role")}
	for _, pair := range c.list("engines") {
		var e, n int
		if _, err := fmt.Sscanf(pair, "%d@%d", &e, &n); err != nil {
			c.t.Fatalf("engine %q: %v", pair, err)
		}
		g.Engines = append(g.Engines, EngineSpec{
			Engine: EngineID(e), Node: NodeID(n), HBMTokens: c.num("hbm", 0), PromptTokens: c.num("longest", 0),
			Buffer: Buffer{Bytes: c.num("buffer", 0), Block: 100, Sums: 1, Request: 10},
		})
	}
	for _, held := range c.list("holding") {
		h := Held{Request: Request{Prompt: 100, Hit: c.num("hit", 0)}}
		held, peer, _ := strings.Cut(held, "~")
		fmt.Sscan(peer, &h.Peer)
		held, parts, _ := strings.Cut(held, "+")
		for part := range strings.SplitSeq(parts, "+") {
			var q Part
			var read uint64
			n, _ := fmt.Sscanf(part, "%d-%dr%d", &q.From, &q.To, &read)
			if n >= 2 {
				h.Parts = append(h.Parts, q)
			}
			if n == 3 {
				h.Reading, h.Read = q, read
			}
		}
		text, ended := strings.CutSuffix(held, "/ended")
		h.Ended = ended
		// Omitted values stay zero.
		if n, err := fmt.Sscanf(text, "%d@%d#%d/%d", &h.Request.ID, &h.Engine, &h.Attempt, &h.Order); n < 2 {
			c.t.Fatalf("held %q: %v", held, err)
		}
		g.Holding = append(g.Holding, h)
	}
	g.Again, g.Returns, g.Seen = c.d.HasArg("again"), c.d.HasArg("seen"), uint64(c.num("seen", 0))
	if c.d.HasArg("switching") {
		g.Switching = c.role("switching")
	}
	s.spec[g.Group] = g.Engines
	return s.step(g)
}

// fetch performs the command of that name. Omitted values are reported as the planner has them.
func (s *transcript) fetch(c *args) string {
	f := Fetch{At: s.now, Group: GroupID(c.num("group", 0)), Seen: uint64(c.num("seen", int(s.p.seq)))}
	tok, seq, hbm, buffer, queue, rate := c.list("tok"), c.list("seq"), c.list("hbm"), c.list("buffer"), c.list("queue"), c.list("rate")
	at := func(list []string, i, def int) int {
		if i < len(list) {
			fmt.Sscan(list[i], &def)
		}
		return def
	}
	var nodes []NodeID
	for i, e := range s.spec[f.Group] {
		en := s.p.engines[e.Engine]
		if en == nil {
			continue
		}
		f.Engines = append(f.Engines, EngineReport{
			Engine: e.Engine, Tokens: at(tok, i, en.tok), Requests: at(seq, i, en.seq), HBMFree: at(hbm, i, en.left.hbm), BufferFree: at(buffer, i, en.left.buffer),
		})
		if len(nodes) == 0 || nodes[len(nodes)-1] != e.Node {
			f.Nodes = append(f.Nodes, NodeReport{e.Node, at(queue, len(nodes), en.node.queue), float64(at(rate, len(nodes), int(en.node.rate)))})
			nodes = append(nodes, e.Node)
		}
	}
	return s.step(f)
}

// step feeds an event and prints the actions.
func (s *transcript) step(ev Event) string {
	actions := s.p.Step(ev)
	check(s.p)
	if len(actions) == 0 {
		return "nothing\n"
	}
	var b strings.Builder
	for _, a := range actions {
		if a.Seq != 0 {
			fmt.Fprintf(&b, "%d ", a.Seq)
		}
		if a.Kind == Switch || a.Kind == Switched || a.Kind == Announce {
			fmt.Fprintf(&b, "%v group %d to %v", a.Kind, a.Group, a.Side)
		} else {
			fmt.Fprintf(&b, "%v request %d", a.Kind, a.Request)
		}
		switch a.Kind {
		case Assign:
			fmt.Fprintf(&b, ": %v engine %d", a.Side, a.Engine)
		case Start:
			fmt.Fprintf(&b, ": prefill %d, decode %d", a.PE, a.DE)
		case Abort, Recompute:
			fmt.Fprintf(&b, ": engine %d", a.Engine)
		case Read, Cut, Drop:
			fmt.Fprintf(&b, ": %v side, engine %d", a.Side, a.Engine)
		}
		for _, part := range a.Parts[:a.NParts] {
			fmt.Fprintf(&b, "; %v [%d, %d)", part.Side, part.From, part.To)
		}
		if a.Hedge {
			b.WriteString("; hedge")
		}
		if a.Why != NoReason {
			fmt.Fprintf(&b, "; %v", a.Why)
		}
		if a.Need != 0 {
			fmt.Fprintf(&b, ": %d, at most %d", a.Need, a.Most)
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// args parses a command's arguments.
type args struct {
	t *testing.T
	d *datadriven.TestData
}

func (c *args) num(name string, def int) int {
	if c.d.HasArg(name) {
		c.d.ScanArgs(c.t, name, &def)
	}
	return def
}

func (c *args) text(name, def string) string {
	if c.d.HasArg(name) {
		c.d.ScanArgs(c.t, name, &def)
	}
	return def
}

func (c *args) list(name string) []string {
	for _, a := range c.d.CmdArgs {
		if a.Key == name {
			return a.Vals
		}
	}
	return nil
}

func (c *args) attempt() uint64 { return uint64(c.num("attempt", 0)) }

func (c *args) read() uint64 { return uint64(c.num("read", 0)) }

func (c *args) drain() Drain {
	at := slices.Index(drainNames[:], c.text("drain", "recompute"))
	if at < 0 {
		c.t.Fatalf("%s: no such policy", c.d.Pos)
	}
	return Drain(at)
}

func (c *args) request() RequestID { return RequestID(c.num("request", 0)) }

func (c *args) role(name string) Role {
	switch s := c.text(name, ""); s {
	case "prefill":
		return Prefill
	case "decode":
		return Decode
	default:
		c.t.Fatalf("%s: %s=%q is no role", c.d.Pos, name, s)
		return 0
	}
}
