package main

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/kvevents"
	"github.com/penstock-kv/penstock/internal/zmtp"
)

// zmqFlags are the flags of events --zmq.
type zmqFlags struct {
	endpoint, replay  string
	topic             string
	form, hashes      choiceFlag
	medium            string
	keep              int
	keepBytes         int64
	bareReplays       bool
	resync, heartbeat time.Duration
}

// choiceFlag is a flag whose value is one of words.
type choiceFlag struct {
	value string
	words []string
}

func (f *choiceFlag) String() string { return f.value }
func (f *choiceFlag) Type() string   { return strings.Join(f.words, "|") }

func (f *choiceFlag) Set(s string) error {
	for _, w := range f.words {
		if s == w {
			f.value = s
			return nil
		}
	}
	return fmt.Errorf("%q is not one of %s", s, strings.Join(f.words, ", "))
}

func addZMQFlags(cmd *cobra.Command) *zmqFlags {
	z := &zmqFlags{
		form:      choiceFlag{"arrays", []string{"arrays", "maps"}},
		hashes:    choiceFlag{"bytes", []string{"bytes", "int"}},
		keepBytes: 64 << 20,
	}
	f := cmd.Flags()
	f.StringVar(&z.endpoint, "zmq", "", "publish on a ZeroMQ PUB socket at this endpoint: tcp://HOST:PORT, tcp://*:PORT or ipc://PATH")
	f.StringVar(&z.replay, "zmq-replay", "", "accept replay requests on a ROUTER socket at this endpoint")
	f.StringVar(&z.topic, "zmq-topic", kvevents.DefaultTopic, "topic of the messages; {node} is the node's name (penstock serve --node), {namespace} the namespace. Routers read kv@POD@MODEL")
	f.Var(&z.form, "zmq-form", "encoding of an event: arrays, as in vLLM up to 0.23, which every router reads; maps, as in vLLM since 0.24")
	f.Var(&z.hashes, "zmq-hashes", "block hashes as bytes, or their last 8 bytes as an integer")
	f.StringVar(&z.medium, "zmq-medium", kvevents.MediumStorage, "medium of the blocks in the events")
	f.IntVar(&z.keep, "zmq-keep", 10000, "messages kept for slow subscribers and replays")
	f.Var(sizeFlag{&z.keepBytes}, "zmq-keep-bytes", "largest total size of the messages kept")
	f.BoolVar(&z.bareReplays, "zmq-bare-replays", false, "leave the topic out of replays, as older versions of vLLM do")
	f.DurationVar(&z.resync, "zmq-resync", time.Minute, "least time between two publications of all blocks for subscribers that joined or lost messages; 0: do not publish all blocks for them")
	f.DurationVar(&z.heartbeat, "zmq-heartbeat", 0, "interval of messages without events on each topic; 0: none")
	completeValues(cmd, "zmq-form", z.form.words...)
	completeValues(cmd, "zmq-hashes", z.hashes.words...)
	return z
}

// given returns the first flag on the command line that needs --zmq, or "".
func (z *zmqFlags) given(cmd *cobra.Command) string {
	for _, name := range []string{"zmq-replay", "zmq-topic", "zmq-form", "zmq-hashes", "zmq-medium", "zmq-keep", "zmq-keep-bytes", "zmq-bare-replays", "zmq-resync", "zmq-heartbeat"} {
		if cmd.Flag(name).Changed {
			return name
		}
	}
	return ""
}

// check returns a usage error for flags that exclude each other, before a node is contacted.
func (z *zmqFlags) check(cmd *cobra.Command, nodes int, namespace string) error {
	if z.endpoint == "" {
		return usagef("--%s needs --zmq with the endpoint to publish at, for example tcp://*:5557", z.given(cmd))
	}
	for _, name := range []string{"after", "count"} {
		if cmd.Flag(name).Changed {
			return usagef("--%s %s: --zmq publishes all blocks and events until interrupted; omit one of the two flags", name, cmd.Flag(name).Value)
		}
	}
	if err := zmtp.Check(z.endpoint); err != nil {
		return usagef("--zmq: %w", err)
	}
	if z.replay != "" {
		if err := zmtp.Check(z.replay); err != nil {
			return usagef("--zmq-replay: %w", err)
		}
	}
	if err := kvevents.Topic(z.topic).Check(nodes, namespace); err != nil {
		return usagef("--zmq-topic: %w", err)
	}
	switch {
	case z.keep == 0 || z.keepBytes == 0:
		return usagef("--zmq-keep %d, --zmq-keep-bytes %s: each must be more than 0, because only kept messages can be sent", z.keep, size(z.keepBytes))
	case z.bareReplays && z.replay == "":
		return usagef("--zmq-bare-replays: there are no replays without --zmq-replay")
	case z.bareReplays && (nodes > 1 || namespace == ""):
		return usagef("--zmq-bare-replays: a replay without topics cannot name the node and the namespace; give one node in --server, and --namespace")
	}
	return nil
}

// publish follows the nodes and publishes their events until it is interrupted.
func (c *connection) publish(cmd *cobra.Command, z *zmqFlags, namespace string) (err error) {
	if err := z.check(cmd, len(c.list()), namespace); err != nil {
		return err
	}
	o := kvevents.Options{
		Namespace: namespace, Topic: kvevents.Topic(z.topic), Resync: z.resync, Heartbeat: z.heartbeat,
		Wire: kvevents.Wire{Maps: z.form.value == "maps", IntHashes: z.hashes.value == "int", Medium: z.medium},
	}
	for _, target := range c.list() {
		conn, err := c.dial(target)
		if err != nil {
			return err
		}
		defer conn.Close()
		o.Nodes = append(o.Nodes, kvevents.Node{Server: target, Cache: pb.NewCacheClient(conn), Admin: pb.NewAdminClient(conn)})
	}
	lines := &zmqLines{o: outputOf(cmd)}
	var follower *kvevents.Follower
	o.Publisher = kvevents.NewPublisher(kvevents.PublisherOptions{
		Keep: z.keep, KeepBytes: z.keepBytes, BareReplays: z.bareReplays,
		Missed: func(peer net.Addr, lost uint64) {
			follower.Missed(peer, lost)
			lines.missed(peer, lost)
		},
	})
	o.Report = lines.report
	if follower, err = kvevents.NewFollower(o); err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, o.Publisher.Close())
		lines.print(zmqLine{What: "ended", Stats: new(o.Publisher.Stats())})
	}()
	ctx, cancel := c.limit(cmd.Context())
	defer cancel()
	listening := zmqLine{What: "listening"}
	if listening.Endpoint, err = o.Publisher.Listen(ctx, z.endpoint); err != nil {
		return err
	}
	if z.replay != "" {
		if listening.Replay, err = o.Publisher.ListenReplay(ctx, z.replay); err != nil {
			return err
		}
	}
	lines.print(listening)
	err = follower.Run(ctx)
	if ctx.Err() != nil {
		return nil // an interrupt or --timeout is the normal end
	}
	return c.hinted(err)
}

// zmqLine is one line of the output of events --zmq.
type zmqLine struct {
	// What is listening, joined, lost, ended, or a kvevents.Report.What.
	What string `json:"what"`
	Time string `json:"time"`
	// Endpoint and Replay are the endpoints of the PUB and the ROUTER socket.
	Endpoint string `json:"endpoint,omitempty"`
	Replay   string `json:"replay,omitempty"`
	// Peer is the address of a subscriber. Messages is the number of messages that the subscriber
	// has lost.
	Peer     string           `json:"peer,omitempty"`
	Messages uint64           `json:"messages,omitempty"`
	Report   *kvevents.Report `json:"node,omitempty"`
	Stats    *kvevents.Stats  `json:"stats,omitempty"`
}

// zmqLines prints lines. Its methods may be called concurrently.
type zmqLines struct {
	mu sync.Mutex
	o  output
}

func (l *zmqLines) missed(peer net.Addr, lost uint64) {
	line := zmqLine{What: "joined", Peer: peer.String()}
	if lost > 0 {
		line.What, line.Messages = "lost", lost
	}
	l.print(line)
}

func (l *zmqLines) report(r kvevents.Report) { l.print(zmqLine{What: r.What, Report: &r}) }

func (l *zmqLines) print(line zmqLine) {
	line.Time = time.Now().UTC().Format("2006-01-02T15:04:05.000Z")
	l.mu.Lock()
	defer l.mu.Unlock()
	// A failed write to standard output does not stop publishing.
	if l.o.json {
		_ = l.o.emitLine(line)
		return
	}
	_, _ = fmt.Fprintf(l.o.w, "%s %s%s\n", line.Time, line.What, line.details())
}

// details returns, as text, the fields of a line that follow What and Time.
func (l zmqLine) details() string {
	switch r := l.Report; {
	case r != nil && r.What == "announced":
		return fmt.Sprintf(" %s (%s): %s blocks in %d namespaces", r.Server, r.Node, count(int64(r.Blocks)), r.Namespaces)
	case r != nil && r.Reason != "":
		return fmt.Sprintf(" %s: %s", r.Server, dialWords(r.Reason))
	case r != nil:
		return " " + r.Server
	case l.Stats != nil:
		s := l.Stats
		return fmt.Sprintf(": %s messages, %s lost by slow subscribers, %s replays, %s subscribers joined, %s refused",
			count(s.Messages), count(s.Lost), count(s.Replays), count(s.Joined), count(s.Refused))
	case l.What == "listening" && l.Replay != "":
		return fmt.Sprintf(" at %s, replays at %s", l.Endpoint, l.Replay)
	case l.What == "listening":
		return " at " + l.Endpoint
	case l.What == "lost":
		return fmt.Sprintf(" %s messages: %s reads too slowly, or requested a replay of messages that are no longer kept", count(l.Messages), l.Peer)
	}
	return ": " + l.Peer
}
