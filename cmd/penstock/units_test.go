package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/cluster"
	"github.com/penstock-kv/penstock/server/config"
)

// service is one of the systemd units in deploy.
type service struct {
	// unit and file are names in deploy. file is the example of the configuration in /etc/penstock.
	unit, file string
	// command is the penstock command of the unit, and settings the type of its configuration.
	command  string
	settings func() settings
	// differs are the keys whose example is not the default.
	differs []string
}

func services() []service {
	return []service{
		{"penstock.service", "penstock.yaml", "serve", func() settings { c := config.Default(); return &c }, []string{"data", "degraded"}},
		{"penstock-planner.service", "planner.yaml", "planner", func() settings { c := config.DefaultPlanner(); return &c }, nil},
		{"penstock-gateway.service", "gateway.yaml", "gateway", func() settings { c := config.DefaultGateway(); return &c }, []string{"engine"}},
	}
}

// deployed reads a file of deploy.
func deployed(t testing.TB, name string) (path, text string) {
	t.Helper()
	path = filepath.Join(testkit.RepositoryRoot(t), "deploy", name)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return path, string(b)
}

// directives returns the values of a directive of a unit, in their order.
func directives(unit, name string) (values []string) {
	for line := range strings.Lines(unit) {
		if v, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), name+"="); ok {
			values = append(values, v)
		}
	}
	return values
}

// TestDeploymentFilesAreRight: each example configuration is valid, and has every key with its
// default, except keys that have none or that the unit needs.
func TestDeploymentFilesAreRight(t *testing.T) {
	for _, s := range services() {
		path, text := deployed(t, s.file)
		example, def := s.settings(), s.settings()
		if err := config.LoadInto(example, path, nil); err != nil {
			t.Fatal(err)
		}
		if err := example.Validate(); err != nil {
			t.Errorf("%s: %v", path, err)
		}
		keys := example.Keys()
		for i, k := range def.Keys() {
			if same := keys[i].String() == k.String(); same == slices.Contains(s.differs, k.Path) {
				t.Errorf("%s: %s is %s; the default is %s", path, k.Path, keys[i], k)
			}
			name := k.Path[strings.LastIndex(k.Path, ".")+1:]
			if !strings.Contains(text, name+":") {
				t.Errorf("%s does not mention %s", path, k.Path)
			}
		}
	}
}

// TestUnitsRunTheProgram: the command of each unit is valid and has the configuration file of the
// unit. The node of its unit starts without a missing disk, whatever its configuration file sets.
func TestUnitsRunTheProgram(t *testing.T) {
	for _, s := range services() {
		_, unit := deployed(t, s.unit)
		words := exampleWords(strings.Join(directives(unit, "ExecStart"), " "))
		if len(words) == 0 || words[0] != "penstock" {
			t.Fatalf("%s runs %q", s.unit, words)
		}
		command, rest, err := newRootCommand(world{out: io.Discard, err: io.Discard}).Find(words[1:])
		if err == nil {
			err = command.ParseFlags(rest)
		}
		if err != nil {
			t.Fatalf("%s runs %q: %v", s.unit, words, err)
		}
		if file := command.Flag("config").Value.String(); command.Name() != s.command || file != "/etc/penstock/"+s.file {
			t.Errorf("%s runs %q; want %s with %s", s.unit, words, s.command, s.file)
		}
		// A node whose index is lost reads its volumes before it is ready, and after a restart begins anew.
		if within := directives(unit, "TimeoutStartSec"); s.command == "serve" && !slices.Equal(within, []string{"4h"}) {
			t.Errorf("%s: the start may take %q; want 4h", s.unit, within)
		}
		if degraded := command.Flag("degraded"); s.command == "serve" && degraded.Value.String() != "true" {
			t.Errorf("%s runs %q, which does not serve degraded", s.unit, words)
		}
	}
}

// TestUnitsAreValid: systemd accepts each unit, and the node's unit with each drop-in file of
// docs/install.md, without a warning. The units are in a root directory that has their commands and
// the targets that every unit needs.
func TestUnitsAreValid(t *testing.T) {
	analyze := testkit.Program(t, "systemd-analyze", "systemd")
	root := t.TempDir()
	write := func(path, text string, mode os.FileMode) {
		t.Helper()
		path = filepath.Join(root, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), mode)); err != nil {
			t.Fatal(err)
		}
	}
	verify := func(what, unit string) {
		t.Helper()
		out, err := exec.Command(analyze, "verify", "--root="+root, unit).CombinedOutput()
		if err != nil || len(out) != 0 {
			t.Errorf("%s: %v\n%s", what, err, out)
		}
	}
	for _, program := range []string{"penstock", "kill"} {
		write("usr/bin/"+program, "#!/bin/sh\n", 0o755)
	}
	for _, target := range []string{"sysinit", "basic"} {
		write("etc/systemd/system/"+target+".target", "[Unit]\n", 0o644)
	}
	for _, s := range services() {
		_, text := deployed(t, s.unit)
		write("etc/systemd/system/"+s.unit, text, 0o644)
	}
	for _, s := range services() {
		verify(s.unit, s.unit)
	}
	dropIns := blocks(t, "install.md", "ini")
	if len(dropIns) < 4 {
		t.Errorf("docs/install.md has %d drop-in files", len(dropIns))
	}
	for _, text := range dropIns {
		write("etc/systemd/system/penstock.service.d/override.conf", text, 0o644)
		verify("penstock.service with\n"+text, "penstock.service")
	}
}

// blocks returns the code blocks of a page in docs that have the language.
func blocks(t testing.TB, page, language string) (texts []string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(testkit.RepositoryRoot(t), "docs", page))
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile("(?ms)^```"+language+"\n(.*?)^```$").FindAllSubmatch(text, -1) {
		texts = append(texts, string(m[1]))
	}
	return texts
}

// exposedMax is the exposure level that no version of systemd may compute for a unit.
const exposedMax = 2.0

// TestUnitsAreHardened: the exposure level of each unit is the one in docs/install.md, if
// systemd-analyze has the version that the page names. Other versions rate other settings, and have
// only a maximum.
func TestUnitsAreHardened(t *testing.T) {
	analyze := testkit.Program(t, "systemd-analyze", "systemd")
	page, err := os.ReadFile(filepath.Join(testkit.RepositoryRoot(t), "docs", "install.md"))
	if err != nil {
		t.Fatal(err)
	}
	version, err := exec.Command(analyze, "--version").Output()
	if err != nil {
		t.Fatal(err)
	}
	named := regexp.MustCompile(`of (systemd \d+)\.`).FindSubmatch(page)
	if named == nil {
		t.Fatal("docs/install.md does not name a version of systemd")
	}
	same := bytes.HasPrefix(version, append(named[1], ' '))
	level := regexp.MustCompile(`Overall exposure level for \S+: ([0-9.]+) `)
	for _, s := range services() {
		path, _ := deployed(t, s.unit)
		out, err := exec.Command(analyze, "security", "--offline=true", "--no-pager", fmt.Sprintf("--threshold=%.0f", 10*exposedMax), path).CombinedOutput()
		m := level.FindSubmatch(out)
		if err != nil || m == nil {
			t.Errorf("%s: %v\n%s", s.unit, err, out)
			continue
		}
		if row := fmt.Sprintf("| %s | ", s.unit); same && !regexp.MustCompile(`(?m)^`+regexp.QuoteMeta(row)+`.* \| `+regexp.QuoteMeta(string(m[1]))+` \|$`).Match(page) {
			t.Errorf("docs/install.md does not have the exposure level %s of %s", m[1], s.unit)
		}
	}
}

// systemCalls expands the system call filter of a unit.
func systemCalls(t *testing.T, filters []string) map[string]bool {
	t.Helper()
	out, err := exec.Command(testkit.Program(t, "systemd-analyze", "systemd"), "syscall-filter", "--no-pager").Output()
	if err != nil {
		t.Fatal(err)
	}
	sets := map[string][]string{}
	set := ""
	for line := range strings.Lines(string(out)) {
		switch name := strings.TrimSpace(line); {
		case strings.HasPrefix(line, "@"):
			set = name
		case name == "":
			set = ""
		case set != "" && !strings.HasPrefix(name, "#"):
			sets[set] = append(sets[set], name)
		}
	}
	var expand func(name string) []string
	expand = func(name string) (calls []string) {
		if !strings.HasPrefix(name, "@") {
			return []string{name}
		}
		if len(sets[name]) == 0 {
			t.Fatalf("systemd has no set of system calls %s", name)
		}
		for _, member := range sets[name] {
			calls = append(calls, expand(member)...)
		}
		return calls
	}
	// systemd always allows the calls of @default.
	allowed := map[string]bool{}
	for _, filter := range filters {
		names, denied := strings.CutPrefix(filter, "~")
		for _, name := range strings.Fields(names) {
			for _, call := range expand(name) {
				allowed[call] = !denied
			}
		}
	}
	for _, call := range expand("@default") {
		allowed[call] = true
	}
	maps.DeleteFunc(allowed, func(_ string, ok bool) bool { return !ok })
	return allowed
}

// traced runs a penstock command in a process whose system calls strace writes into a file.
func traced(t *testing.T, file string, args ...string) *cluster.Process {
	t.Helper()
	strace := testkit.Program(t, "strace", "strace")
	p, err := cluster.StartProcess(t.Context(), cluster.ProcessOptions{Name: args[0], Args: args, Env: append(os.Environ(), childEnv), Start: func(cmd *exec.Cmd) error {
		// -D: strace is no parent of the process, so the process has the id of the command.
		cmd.Args = append([]string{strace, "-D", "-f", "-qq", "-v", "-s", "0", "-o", file, "--", cmd.Path}, cmd.Args[1:]...)
		cmd.Path = strace
		return cmd.Start()
	}})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// TestUnitsAllowTheProgram: node, planner and gateway make no system call that their unit refuses:
// neither one outside of the filter, nor a socket of another family, memory that is writable and
// executable, or a namespace.
func TestUnitsAllowTheProgram(t *testing.T) {
	testkit.Long(t, "runs node, planner and gateway under strace")
	engine := textEngine(t, "an answer")
	dir := t.TempDir()
	file := writeFile(t, dir, "settings.yaml", nil)
	common := []string{"--http", "127.0.0.1:0", "--log-format", "json", "--config", file}
	for _, s := range services() {
		t.Run(s.command, func(t *testing.T) {
			_, unit := deployed(t, s.unit)
			trace := filepath.Join(dir, s.command)
			var p *cluster.Process
			switch s.command {
			case "serve":
				p = traced(t, trace, append(small(dir+"/volume"), "--config", file, "--io", "auto", "--prewrite=true", "--scrub-rate", "1MiB", "--data-plane-nics", "lo", "--insecure")...)
				node := &served{t: t, ready: p.Ready}
				tokensFile, dataFile := prompt(t, node, dir, 4)
				node.run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
				fetchSame(t, node, dir, tokensFile, dataFile)
				node.run("config", "reload").must(t)
			case "planner":
				listen := testkit.Port(t)
				p = traced(t, trace, append([]string{s.command, "--listen", listen}, common...)...)
				penstock(t, "", nil, "plan", "top", "--planner", listen).must(t)
			case "gateway":
				p = traced(t, trace, append([]string{s.command, "--listen", "127.0.0.1:0", "--engine", engine}, common...)...)
				c := gatewayClient(t, nil)
				within(t, "an engine answers", func() bool {
					status, _ := call(t, c, "POST", "http://"+p.Ready.Listen+"/v1/completions", "")
					return status == http.StatusOK
				})
			}
			if err := p.Signal(syscall.SIGHUP); err != nil {
				t.Fatal(err)
			}
			if err := p.Stop(); err != nil {
				t.Fatal(err)
			}
			refused, calls := refusedCalls(t, unit, trace)
			for _, line := range refused {
				t.Errorf("%s refuses %s", s.unit, line)
			}
			if calls < 20 {
				t.Errorf("strace saw %d different system calls", calls)
			}
		})
	}
}

// refusedCalls returns the lines of a trace that the unit refuses, one for each system call, and the
// number of different system calls in the trace.
func refusedCalls(t *testing.T, unit, trace string) (lines []string, calls int) {
	t.Helper()
	allowed := systemCalls(t, directives(unit, "SystemCallFilter"))
	families := strings.Fields(strings.Join(directives(unit, "RestrictAddressFamilies"), " "))
	one := regexp.MustCompile(`(?m)^\d+ +(\w+)\((\w*)(.*)$`)
	executable := regexp.MustCompile(`^mmap\(.*PROT_WRITE\|PROT_EXEC|^(mprotect|pkey_mprotect)\(.*PROT_EXEC`)
	names, seen := map[string]bool{}, map[string]bool{}
	for _, m := range one.FindAllStringSubmatch(string(readAll(t, trace)), -1) {
		line, name, first := m[1]+"("+m[2]+m[3], m[1], m[2]
		names[name] = true
		ok := allowed[name] && !executable.MatchString(line) && !strings.Contains(line, "CLONE_NEW") && (name != "socket" || slices.Contains(families, first))
		if key := name + first; !ok && !seen[key] {
			seen[key] = true
			lines = append(lines, line)
		}
	}
	return lines, len(names)
}
