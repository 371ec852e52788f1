package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/server/config"
)

// TestErrorsAsJSON: with --format json every kind of error is one line of JSON on standard error,
// with the exit code and no other output.
func TestErrorsAsJSON(t *testing.T) {
	s := startServed(t, t.TempDir()+"/volume")
	for _, c := range []struct {
		args []string
		code int
		say  string
	}{
		{[]string{"ns", "show", "nope"}, exitMiss, "nope"},
		{[]string{"ns", "delete", "nope"}, exitUsage, "--yes"},
		{[]string{"ns", "nonsense"}, exitUsage, "unknown command"},
		{[]string{"status", "--timeout", "-1s"}, exitUsage, "negative"},
		{[]string{"status", "--no-such-flag"}, exitUsage, "no-such-flag"}, // --format comes after an invalid flag
		{[]string{"status", "--timeout", "soon"}, exitUsage, "soon"},
		{[]string{"status", "--server", "127.0.0.1:1"}, exitFailed, "refused"},
	} {
		r := s.run(append(c.args, "--format", "json")...)
		var got struct {
			Error    string `json:"error"`
			ExitCode int    `json:"exit_code"`
		}
		if err := json.Unmarshal([]byte(r.err), &got); err != nil || strings.Count(r.err, "\n") != 1 {
			t.Errorf("%v: %v in %q", c.args, err, r.err)
		}
		if r.code != c.code || got.ExitCode != c.code || !strings.Contains(got.Error, c.say) {
			t.Errorf("%v: exit %d, %+v; want %d and %q", c.args, r.code, got, c.code, c.say)
		}
		if plain := s.run(c.args...); !strings.HasPrefix(plain.err, "penstock: ") {
			t.Errorf("%v without --format: %q", c.args, plain.err)
		}
	}
}

// TestInterrupted: a command that a signal ends has the exit code 128 plus the signal. A node that
// drains after the signal exits with 0.
func TestInterrupted(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for signal, want := range map[syscall.Signal]int{syscall.SIGINT: 130, syscall.SIGTERM: 143} {
		waiting := exec.Command(self, "status", "--wait", "--timeout", "0", "--server", testkit.Port(t))
		waiting.Env = append(os.Environ(), childEnv)
		if err := waiting.Start(); err != nil {
			t.Fatal(err)
		}
		// Before the child has its handler, the signal kills it, which a shell reports with the
		// same number.
		if err := waiting.Process.Signal(signal); err != nil {
			t.Fatal(err)
		}
		_ = waiting.Wait() // the exit code is checked
		state := waiting.ProcessState.Sys().(syscall.WaitStatus)
		got := state.ExitStatus()
		if state.Signaled() {
			got = 128 + int(state.Signal())
		}
		if got != want {
			t.Errorf("%v: exit %d; want %d", signal, got, want)
		}
	}

	serve := exec.Command(self, small(t.TempDir()+"/volume")...)
	serve.Env = append(os.Environ(), childEnv)
	log, err := serve.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := serve.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(log)
	for lines.Scan() {
		if strings.Contains(lines.Text(), `"msg":"ready"`) {
			if err := serve.Process.Signal(os.Interrupt); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := serve.Wait(); err != nil {
		t.Errorf("a node that drained: %v", err)
	}
}

// TestInterruptedAsJSON: the JSON error of an interrupted command has the exit code of
// the process, and its text contains "interrupted".
func TestInterruptedAsJSON(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(signalError{syscall.SIGINT})
	for _, args := range [][]string{{"status", "--wait"}, {"events"}, {"block", "get", "m", "--tokens-file", "/dev/null", "--out", "/dev/null"}} {
		r := penstockIn(ctx, "", nil, append(args, "--server", testkit.Port(t), "--format", "json")...)
		var got jsonError
		if err := json.Unmarshal([]byte(r.err), &got); err != nil || r.code != 130 || got.ExitCode != 130 || !strings.Contains(got.Error, "interrupted") {
			t.Errorf("%v: exit %d, %q, %v", args, r.code, r.err, err)
		}
	}
}

// TestInterruptedInput: an interrupt ends a command that reads an input with no bytes and no end.
func TestInterruptedInput(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	in, typed := io.Pipe()
	defer typed.Close()
	var errs bytes.Buffer
	code := make(chan int)
	go func() {
		code <- run(ctx, world{in: in, out: io.Discard, err: &errs}, []string{"profile", "--samples", "-"})
	}()
	if _, err := typed.Write([]byte("tokens")); err != nil { // returns when the command has read it
		t.Fatal(err)
	}
	cancel(signalError{syscall.SIGINT})
	if got := <-code; got != 130 || !strings.Contains(errs.String(), "interrupted") {
		t.Errorf("exit %d, %s", got, errs.String())
	}
}

// TestEventsOfANodeThatStops: if the node ends the stream before --count events, the
// command fails.
func TestEventsOfANodeThatStops(t *testing.T) {
	s := startServed(t, t.TempDir()+"/volume")
	s.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "64").must(t)
	s.run("ns", "bump-epoch", "m").must(t)
	out, print := io.Pipe()
	var errs bytes.Buffer
	code := make(chan int)
	go func() {
		// The node has no event 99, so the first event is a gap.
		code <- run(t.Context(), world{in: strings.NewReader(""), out: print, err: &errs},
			[]string{"events", "--server", s.ready.Listen, "--after", "99", "--count", "1000"})
	}()
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	go func() { _, _ = io.Copy(io.Discard, out) }() // ends with the test
	s.stop()
	if got := <-code; got != exitFailed || !strings.Contains(errs.String(), "shutting down") {
		t.Errorf("exit %d, %q", got, errs.String())
	}
	print.Close()
}

// TestOnlyNothing: a benchmark fails if no comparison has the requested name.
func TestOnlyNothing(t *testing.T) {
	r := penstock(t, "", nil, "bench", "index", "--only", "no such comparison", "--blocks", "32768", "--node-blocks", "0", "--rounds", "1", "--seconds", "0.05", "--data", t.TempDir())
	if r.code != exitUsage || !strings.Contains(r.err, "no such comparison") {
		t.Errorf("exit %d, %q, %q", r.code, r.out, r.err)
	}
}

// TestStatusOfSeveralDisks: the rows of all volumes have the columns of the header.
func TestStatusOfSeveralDisks(t *testing.T) {
	dir := t.TempDir()
	s := startServed(t, dir+"/short,"+dir+"/a-much-longer-name,"+dir+"/c")
	out := s.run("status").must(t)
	_, table, ok := strings.Cut(out, "\nVOLUME")
	if !ok {
		t.Fatalf("no volumes in\n%s", out)
	}
	lines := strings.Split("VOLUME"+table, "\n")
	column := strings.Index(lines[0], "IO")
	for _, line := range lines[1:4] {
		if len(line) <= column || line[column-1] != ' ' || !strings.HasPrefix(line[column:], "posix") {
			t.Errorf("column IO is at %d, and the row is %q", column, line)
		}
	}
}

// TestLoggedDurations: in a JSON log every time span is text.
func TestLoggedDurations(t *testing.T) {
	s := startServed(t, t.TempDir()+"/volume")
	log := s.stop().err
	found := 0
	for line := range strings.Lines(log) {
		var fields map[string]any
		if err := json.Unmarshal([]byte(line), &fields); err != nil {
			t.Fatalf("%v in %q", err, line)
		}
		for _, name := range []string{"took", "within", "recovery"} {
			if v, ok := fields[name]; ok {
				found++
				if _, text := v.(string); !text {
					t.Errorf("%s is %v in %s", name, v, line)
				}
			}
		}
	}
	if found < 2 {
		t.Errorf("the log has %d time spans: %s", found, log)
	}
}

// TestLoggedText: a value with a String method is logged as that text in both formats,
// and a nil value is omitted.
func TestLoggedText(t *testing.T) {
	values := []any{
		"span", 1500 * time.Millisecond, "setting", config.Duration(time.Minute), "state", health.Draining,
		"remote", &net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 7421}, "capacity", config.Size(1 << 30),
		"cause", error(nil), "err", io.ErrUnexpectedEOF, "count", 3,
	}
	for format, want := range map[string]string{
		"json": `"span":"1.5s","setting":"1m0s","state":"draining","remote":"10.0.0.1:7421","capacity":"1.0 GiB","err":"unexpected EOF","count":3}`,
		"text": `span=1.5s setting=1m0s state=draining remote=10.0.0.1:7421 capacity="1.0 GiB" err="unexpected EOF" count=3`,
	} {
		var out bytes.Buffer
		newLogger(&out, format, slog.LevelInfo).Info("said", values...)
		if !strings.HasSuffix(out.String(), want+"\n") {
			t.Errorf("%s: %s; want %s at its end", format, out.String(), want)
		}
	}
}

// TestSaltStaysSecret: no output contains a salt, for both ways to give it. Both ways give the same
// namespace.
func TestSaltStaysSecret(t *testing.T) {
	s := startServed(t, t.TempDir()+"/volume")
	file := writeFile(t, t.TempDir(), "salt", []byte("hush-hush\n"))
	create := []string{"ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "64", "--format", "json"}
	outs := []string{
		s.run(append(create, "--salt-file", file)...).must(t),
		s.run(append(create, "--salt", "hush-hush")...).must(t), // a repeated definition is no error
		s.run(append(create, "--salt", "hex:"+"687573682d68757368")...).must(t),
		s.run("ns", "list", "--format", "json").must(t),
		s.run("ns", "show", "m", "--format", "json").must(t),
		s.run("ns", "show", "m").must(t),
	}
	for _, out := range outs {
		if strings.Contains(out, "hush") || strings.Contains(out, "68757368") {
			t.Errorf("the salt is in %s", out)
		}
	}
	if !strings.Contains(outs[3], `"salt_bytes": 9`) {
		t.Errorf("the length of the salt is not in %s", outs[3])
	}
	for _, wrong := range [][]string{
		{"--salt", "a", "--salt-file", file},
		{"--salt-file", writeFile(t, t.TempDir(), "empty", []byte("\n"))},
		{"--salt", "hex:secret"},
	} {
		if r := s.run(append(create, wrong...)...); r.code != exitUsage || strings.Contains(r.err, "secret") {
			t.Errorf("%v: exit %d, %s", wrong, r.code, r.err)
		}
	}
}

// TestHelpOfServe: all settings are listed by section, in lines that fit a terminal.
func TestHelpOfServe(t *testing.T) {
	for _, command := range []string{"serve", "planner", "gateway"} {
		out := penstock(t, "", nil, command, "--help").must(t)
		if !strings.Contains(out, "\nSettings:\n") || !strings.Contains(out, "\nSettings of log:\n") || !strings.Contains(out, "\nFlags:\n") {
			t.Errorf("%s has no sections:\n%s", command, out)
		}
		for line := range strings.Lines(out) {
			if utf8.RuneCountInString(strings.TrimRight(line, "\n")) > helpWidth {
				t.Errorf("%s: a line of more than %d characters: %s", command, helpWidth, line)
			}
		}
		cmd, _, err := newRootCommand(world{}).Find([]string{command})
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range strings.Fields("config format listen log-level log-format") {
			if cmd.Flag(name) == nil || strings.Count(out, "--"+name+" ") < 1 {
				t.Errorf("%s --help does not list --%s", command, name)
			}
		}
	}
}

// TestFixedValuesComplete: the shell completes a flag with fixed values to these values, and not to
// file names.
func TestFixedValuesComplete(t *testing.T) {
	const noFiles = ":4\n"
	for command, want := range map[string]string{
		"serve --durability":             "async batch sync",
		"serve --io":                     "auto uring posix usrbio",
		"serve --eviction":               "s3fifo lru fifo",
		"serve --log-level":              "debug info warn error",
		"serve --log-format":             "text json",
		"serve --data-plane-provider":    "auto tcp shm verbs fabric",
		"serve --data-plane-tls":         "auto on off",
		"planner --log-format":           "text json",
		"ns create --index":              "trie flat",
		"store check --io":               "auto uring posix usrbio",
		"fabric probe --provider":        "tcp shm verbs fabric",
		"bench rdma --provider":          "tcp shm verbs fabric sim",
		"demo node --io":                 "auto uring posix usrbio",
		"status --format":                "table json",
		"demo --set":                     "32K 48K 64K",
		"planner --schedule-read-policy": "split shorter round-robin prefill-only",
	} {
		out := penstock(t, "", nil, append(append([]string{"__complete"}, strings.Fields(command)...), "")...).must(t)
		if got := strings.Fields(strings.TrimSuffix(out, noFiles)); !strings.HasSuffix(out, noFiles) || strings.Join(got, " ") != want {
			t.Errorf("%s: offered %q; want %q", command, out, want)
		}
	}
}

// TestEveryFlagCompletes: a flag whose help lists its values completes to these and
// not to file names; only flags that take a path complete to files.
func TestEveryFlagCompletes(t *testing.T) {
	// list matches a list of values in a help text, such as "a, b or c", at the start of
	// the text or after a colon. explained matches remarks in brackets after a value.
	list := regexp.MustCompile(`(?:^|: )([\w-]+(?:, [\w-]+)*(?:,? or |, )[\w-]+)(?:$|;|\.| of )`)
	explained := regexp.MustCompile(` \([^)]*\)`)
	// prose has the flags whose help contains such a list that is not a list of values.
	prose := map[string]string{
		"--role":    "NIC=ROLE, with names of NICs that exist only on the machine",
		"--qos-map": "a language of its own",
	}
	paths := regexp.MustCompile(`(?i)\b(file|directory|directories|page|socket|log|trace)\b|\(PEM\)|private key|/sys`)
	lists := 0
	var walk func(cmd *cobra.Command)
	walk = func(cmd *cobra.Command) {
		check := func(f *pflag.Flag) {
			name := cmd.CommandPath() + " --" + f.Name
			complete, ok := cmd.GetFlagCompletionFunc(f.Name)
			if !ok {
				if !paths.MatchString(f.Usage) {
					t.Errorf("%s completes to file names: %s", name, f.Usage)
				}
				return
			}
			usage := explained.ReplaceAllString(f.Usage, "")
			m := list.FindStringSubmatch(usage)
			switch f.Value.Type() {
			case "bool", "int", "float64", "duration", "uint", "uint64", "size":
				return
			}
			if _, ok := prose["--"+f.Name]; ok || m == nil || f.Name == "namespace" || f.Name == "server" {
				return
			}
			lists++
			got, directive := complete(cmd, nil, "")
			if directive&cobra.ShellCompDirectiveNoFileComp == 0 {
				t.Errorf("%s has fixed values, %s, and completes to file names", name, m[1])
			}
			for _, want := range regexp.MustCompile(`,? or |, `).Split(m[1], -1) {
				if !slices.Contains(got, want) {
					t.Errorf("%s offers %q, without %q: %s", name, got, want, f.Usage)
				}
			}
		}
		cmd.PersistentFlags().VisitAll(check)
		cmd.LocalNonPersistentFlags().VisitAll(check)
		for _, sub := range cmd.Commands() {
			walk(sub)
		}
	}
	walk(newRootCommand(world{}))
	if lists < 15 {
		t.Errorf("%d flags list their values in their help: the expression that finds the lists is out of date", lists)
	}
}

// TestListsComplete: a flag with a list value completes to the values not in the list.
func TestListsComplete(t *testing.T) {
	for typed, want := range map[string]string{
		"":                       "basic dualpath oracle",
		"dualpath,":              "dualpath,basic dualpath,oracle",
		"basic,dualpath,oracle,": "",
	} {
		out := penstock(t, "", nil, "__complete", "demo", "--modes", typed).must(t)
		offered, directive, _ := strings.Cut(out, ":")
		if got := strings.Join(strings.Fields(offered), " "); got != want || directive != "6\n" {
			t.Errorf("after %q: offered %q, directive %q; want %q", typed, got, directive, want)
		}
	}
}

// TestNamespaceCalledList: a namespace with the name of a subcommand of pin can be
// pinned.
func TestNamespaceCalledList(t *testing.T) {
	dir := t.TempDir()
	s := startServed(t, dir+"/volume")
	tokensFile, dataFile := prompt2(t, dir)
	s.run("ns", "create", "list", "--layers", "2", "--block-tokens", "4", "--token-bytes", "1024").must(t)
	s.run("block", "put", "list", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
	pin := []string{"pin", "--server", s.ready.Listen, "--format", "json", "--tokens-file", tokensFile, "--", "list"}
	if out := penstock(t, "", nil, pin...).must(t); !strings.Contains(out, `"lease": `) {
		t.Errorf("no lease in %s", out)
	}
	if out := s.run("pin", "list").must(t); !strings.Contains(out, "  list  ") {
		t.Errorf("the pin is not in\n%s", out)
	}
}

// TestLogOfAPut: when a client has closed its session, the node does not log that the
// peer failed.
func TestLogOfAPut(t *testing.T) {
	dir := t.TempDir()
	s := startServed(t, dir+"/volume", "--log-level", "debug")
	tokensFile, dataFile := prompt2(t, dir)
	s.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "1024").must(t)
	s.run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
	s.run("block", "get", "m", "--tokens-file", tokensFile, "--out", dir+"/back").must(t)
	if log := s.stop().err; strings.Contains(log, "died") || !strings.Contains(log, "data-plane session ended by the peer") {
		t.Errorf("the log:\n%s", log)
	}
}
