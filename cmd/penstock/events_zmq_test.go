package main

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/internal/zmtp/zmtptest"
)

// published is a run of events --zmq in this process.
type published struct {
	t     *testing.T
	lines *bufio.Scanner
	stop  func()
	ended chan int
}

func startPublishing(t *testing.T, server string, args ...string) *published {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	pr, pw := io.Pipe()
	p := &published{t: t, lines: bufio.NewScanner(pr), stop: cancel, ended: make(chan int, 1)}
	go func() {
		code := run(ctx, world{in: strings.NewReader(""), out: pw, err: pw, environ: []string{"PENSTOCK_SERVER=" + server}}, append([]string{"events"}, args...))
		_ = pw.Close()
		p.ended <- code
	}()
	t.Cleanup(func() {
		cancel()
		_, _ = io.Copy(io.Discard, pr)
	})
	return p
}

// line waits for a line with the given What.
func (p *published) line(what string) zmqLine {
	p.t.Helper()
	for p.lines.Scan() {
		var l zmqLine
		if err := json.Unmarshal(p.lines.Bytes(), &l); err != nil {
			p.t.Fatalf("%v in %q", err, p.lines.Text())
		}
		if l.What == what {
			return l
		}
	}
	p.t.Fatalf("no line %q: %v", what, p.lines.Err())
	return zmqLine{}
}

// until receives messages until one contains the word.
func until(t *testing.T, c *zmtptest.Client, topic, word string) {
	t.Helper()
	for {
		m := c.MustReceive()
		if len(m) != 3 || string(m[0]) != topic {
			t.Fatalf("%q; want topic %s", m, topic)
		}
		if strings.Contains(string(m[2]), word) {
			return
		}
	}
}

// TestEventsZMQ: stored, cleared and removed blocks of a node are published, also after
// a restart of the node. A replay has all messages from the first on. After an interrupt
// the exit code is 0.
func TestEventsZMQ(t *testing.T) {
	dir := t.TempDir()
	listen := testkit.Port(t)
	s := startServed(t, dir+"/volume", "--listen", listen)
	tokensFile, dataFile := prompt(t, s, dir, 2)
	p := startPublishing(t, listen, "--zmq", "tcp://127.0.0.1:0", "--zmq-replay", "ipc://"+dir+"/replay", "--zmq-form", "maps", "--zmq-resync", "0", "--format", "json")
	at := p.line("listening")
	if at.Replay != "ipc://"+dir+"/replay" {
		t.Errorf("%+v", at)
	}
	if l := p.line("announced"); l.Report.Node != "test" || l.Report.Server != listen || l.Report.Namespaces != 1 {
		t.Errorf("%+v", l)
	}
	c := zmtptest.Subscribe(t, at.Endpoint, "kv@test/m@")
	p.line("joined")
	put := func() {
		t.Helper()
		s.run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
	}
	const topic = "kv@test/m@m"
	put()
	until(t, c, topic, "BlockStored")
	s.run("ns", "bump-epoch", "m").must(t)
	until(t, c, topic, "AllBlocksCleared")
	put()
	until(t, c, topic, "BlockStored")
	s.run("evict", "--bytes", "1B").must(t)
	until(t, c, topic, "BlockRemoved")

	if r := s.stop(); r.code != exitOK {
		t.Fatalf("serve: exit %d\n%s", r.code, r.err)
	}
	p.line("down")
	s = startServed(t, dir+"/volume", "--listen", listen)
	if l := p.line("announced"); l.Report.Blocks == 0 {
		t.Errorf("%+v: no blocks after a restart", l.Report)
	}
	until(t, c, topic, "AllBlocksCleared")
	until(t, c, topic, "BlockStored")

	r := zmtptest.Dial(t, at.Replay, "DEALER", "ROUTER")
	r.MustSend(nil, make([]byte, 8))
	var replayed int
	for m := r.MustReceive(); len(m[3]) > 0; m = r.MustReceive() {
		replayed++
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	p.stop()
	end := p.line("ended")
	if code := <-p.ended; code != exitOK || int(end.Stats.Messages) != replayed || end.Stats.Lost != 0 || end.Stats.Replays != 1 || end.Stats.Joined != 1 {
		t.Errorf("exit %d, %d replayed, %+v", code, replayed, end.Stats)
	}
}

// TestEventsZMQWords checks the lines in the text format.
func TestEventsZMQWords(t *testing.T) {
	s := startServed(t, t.TempDir()+"/volume")
	s.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "1024").must(t)
	p := startPublishing(t, s.ready.Listen, "--zmq", "tcp://127.0.0.1:*", "--namespace", "m")
	for _, want := range []string{
		" listening at tcp://127.0.0.1:",
		" announced " + s.ready.Listen + " (test): 0 blocks in 1 namespaces",
		" ended: 1 messages, 0 lost by slow subscribers, 0 replays, 0 subscribers joined, 0 refused",
	} {
		if !p.lines.Scan() || !strings.Contains(p.lines.Text(), want) {
			t.Errorf("%q; want %q", p.lines.Text(), want)
		}
		if strings.Contains(want, "announced") {
			p.stop()
		}
	}
	if code := <-p.ended; code != exitOK {
		t.Errorf("exit %d", code)
	}
}

// TestEventsZMQMistakes: invalid flags are usage errors. A node that refuses the token
// ends the command with an error.
func TestEventsZMQMistakes(t *testing.T) {
	dir := t.TempDir()
	for say, args := range map[string][]string{
		`"5557"; want tcp://HOST:PORT`:                     {"--zmq", "5557"},
		`port "x" is not a number`:                         {"--zmq", "tcp://*:x"},
		`--zmq-replay: zmtp: endpoint "udp://*:1"`:         {"--zmq", "tcp://*:0", "--zmq-replay", "udp://*:1"},
		"--zmq-form needs --zmq":                           {"--zmq-form", "maps"},
		`"lists" is not one of arrays, maps`:               {"--zmq", "tcp://*:0", "--zmq-form", "lists"},
		`"uint" is not one of bytes, int`:                  {"--zmq", "tcp://*:0", "--zmq-hashes", "uint"},
		"--count 3: --zmq publishes all":                   {"--zmq", "tcp://*:0", "--count", "3"},
		`same pod, "pool", for all 2 nodes`:                {"--zmq", "tcp://*:0", "--server", "a:1,b:1", "--zmq-topic", "kv@pool@{namespace}"},
		"put {namespace} into it":                          {"--zmq", "tcp://*:0", "--zmq-topic", "kv@{node}@m"},
		"--zmq-keep 0":                                     {"--zmq", "tcp://*:0", "--zmq-keep", "0"},
		"--zmq-keep -1: must not be negative":              {"--zmq", "tcp://*:0", "--zmq-keep", "-1"},
		"--zmq-bare-replays: there are no replays without": {"--zmq", "tcp://*:0", "--zmq-bare-replays"},
		"give one node in --server, and --namespace":       {"--zmq", "tcp://*:0", "--zmq-replay", "tcp://*:0", "--zmq-bare-replays"},
	} {
		r := penstock(t, "", nil, append([]string{"events"}, args...)...)
		if r.code != exitUsage || !strings.Contains(r.err, say) {
			t.Errorf("%v: exit %d, %q; want %q", args, r.code, r.err, say)
		}
	}
	token := writeFile(t, dir, "token", []byte("a token of the node's own\n"))
	s := startServed(t, dir+"/volume", "--auth-token-file", token)
	r := s.run("events", "--zmq", "tcp://127.0.0.1:0", "--format", "json")
	if r.code != exitFailed || !strings.Contains(r.err, `"error"`) || !strings.Contains(r.err, s.ready.Listen) || !strings.Contains(r.err, "--token-file") {
		t.Errorf("without a token: exit %d, %q", r.code, r.err)
	}
}
