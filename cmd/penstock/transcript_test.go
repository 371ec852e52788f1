package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma/topo/topotest"
)

// TestTranscripts runs testdata/*.td: command lines and their output.
//
//	start [settings]       starts a node on the directory of the transcript; @NAME is a
//	                       path in that directory
//	stop                   drains and stops the node
//	tokens NAME FIRST N    a file with N token ids
//	data NAME SEED BYTES   a file with bytes that are determined by the seed
//	text NAME              a file with the rest of the input
//	sysfs NAME HOST        a copy of /sys of the host in rdma/topo/testdata/HOST.host,
//	                       with the changes in the rest of the input
//	run                    runs each line as a command line; @NAME is a file
//	fields                 like run, for tables whose columns differ in width between runs:
//	                       blanks in sequence are one
//	succeed                like run, for commands whose output differs between runs: prints
//	                       only the errors
//
// Addresses, directories and durations are replaced, because they differ between runs.
func TestTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		if !strings.HasSuffix(path, ".td") {
			return
		}
		tr := &transcript{t: t, dir: t.TempDir()}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			tr.t = t
			return tr.command(d)
		})
	})
}

type transcript struct {
	t    testing.TB
	dir  string
	node *served
}

func (tr *transcript) command(d *datadriven.TestData) string {
	arg := func(i int) string { return d.CmdArgs[i].String() }
	number := func(i int) int {
		n, err := strconv.Atoi(arg(i))
		if err != nil {
			d.Fatalf(tr.t, "%v", err)
		}
		return n
	}
	switch d.Cmd {
	case "start":
		var more []string
		for i := range d.CmdArgs {
			more = append(more, strings.ReplaceAll(arg(i), "@", tr.dir+"/"))
		}
		return tr.start(more)
	case "stop":
		r := tr.node.stop()
		tr.node = nil
		return exitLine(r.code)
	case "tokens":
		writeFile(tr.t, tr.dir, arg(0), tokens(number(1), number(2)))
	case "data":
		writeFile(tr.t, tr.dir, arg(0), bytesOf(byte(number(1)), number(2)))
	case "text":
		writeFile(tr.t, tr.dir, arg(0), []byte(d.Input))
	case "sysfs":
		tr.sysfs(arg(0), arg(1), d.Input)
	case "same":
		return tr.same(arg(0), arg(1))
	case "succeed":
		var b strings.Builder
		for line := range strings.Lines(d.Input) {
			if r := tr.runLine(strings.TrimSpace(line)); r.code != exitOK {
				b.WriteString(r.err + exitLine(r.code))
			}
		}
		return tr.stable(b.String())
	case "run", "fields":
		var b strings.Builder
		for line := range strings.Lines(d.Input) {
			r := tr.runLine(strings.TrimSpace(line))
			b.WriteString(r.out + r.err)
			if r.code != exitOK {
				b.WriteString(exitLine(r.code))
			}
		}
		said := tr.stable(b.String())
		if d.Cmd == "fields" {
			said = blanks.ReplaceAllString(said, " ")
		}
		for line := range strings.Lines(said) {
			if twice := repeatedPart(line); twice != "" {
				tr.t.Errorf("%q is said twice: %s", twice, line)
			}
		}
		return said
	default:
		d.Fatalf(tr.t, "unknown command %q", d.Cmd)
	}
	return ""
}

func (tr *transcript) start(more []string) string {
	tr.t.Helper()
	node, r := tryServed(tr.t, nil, append(small(tr.dir+"/volume"), more...)...)
	if node == nil {
		return tr.stable(r.err + "\n" + exitLine(r.code))
	}
	tr.node = node
	return "ready\n"
}

func (tr *transcript) sysfs(name, host, changes string) {
	tr.t.Helper()
	raw, err := os.ReadFile(filepath.Join(testkit.RepositoryRoot(tr.t), "rdma", "topo", "testdata", host+".host"))
	if err != nil {
		tr.t.Fatal(err)
	}
	if err := topotest.Write(filepath.Join(tr.dir, name), string(raw)+"\n"+changes); err != nil {
		tr.t.Fatal(err)
	}
}

func (tr *transcript) same(a, b string) string {
	x, err := os.ReadFile(filepath.Join(tr.dir, a))
	if err != nil {
		return err.Error()
	}
	y, err := os.ReadFile(filepath.Join(tr.dir, b))
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintln(string(x) == string(y))
}

func (tr *transcript) runLine(line string) result {
	stdin := ""
	line, from, ok := strings.Cut(line, " < ")
	if ok {
		raw, err := os.ReadFile(filepath.Join(tr.dir, from))
		if err != nil {
			tr.t.Fatal(err)
		}
		stdin = string(raw)
	}
	words := strings.Fields(line)
	for i, w := range words {
		words[i] = strings.ReplaceAll(w, "@", tr.dir+"/")
	}
	server := "127.0.0.1:1" // no process listens there
	if tr.node != nil {
		server = tr.node.ready.Listen
	}
	return penstock(tr.t, stdin, []string{"PENSTOCK_SERVER=" + server}, words...)
}

// repeatedPart returns a part of an error, between colons, that occurs twice.
func repeatedPart(line string) string {
	text, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "penstock: ")
	if !ok {
		return ""
	}
	seen := map[string]bool{}
	for part := range strings.SplitSeq(text, ": ") {
		if seen[part] {
			return part
		}
		seen[part] = true
	}
	return ""
}

func exitLine(code int) string { return fmt.Sprintf("exit %d\n", code) }

var (
	durations = regexp.MustCompile(`\b\d+(\.\d+)?(ns|µs|ms|s)\b`)
	blanks    = regexp.MustCompile(` +`)
	moments   = regexp.MustCompile(`(_unix_ms": )[1-9]\d+`)
	instants  = regexp.MustCompile(`\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z`)
	owners    = regexp.MustCompile(`is in use by .*; stop`)
)

// stable replaces the parts that differ between runs.
func (tr *transcript) stable(s string) string {
	if tr.node != nil {
		s = strings.ReplaceAll(s, tr.node.ready.Listen, "SERVER")
		s = strings.ReplaceAll(s, tr.node.ready.DataListen, "DATA")
	}
	s = strings.ReplaceAll(s, tr.dir, "DIR")
	s = owners.ReplaceAllString(s, "is in use by OWNER; stop")
	s = moments.ReplaceAllString(s, "${1}TIME")
	s = instants.ReplaceAllString(s, "TIME")
	s = durations.ReplaceAllString(s, "DURATION")
	// Trailing blanks of the last column would be invisible in the transcript.
	lines := strings.Split(s, "\n")
	for i := range lines {
		lines[i] = strings.TrimRight(lines[i], " ")
	}
	return strings.Join(lines, "\n")
}
