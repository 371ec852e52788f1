package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/penstock-kv/penstock/client/leader"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/cluster"
	"github.com/penstock-kv/penstock/lab/testetcd"
)

// runbook is a section of docs/operate.md: commands, each with its prompt and the lines of its output
// that the page shows.
type runbook struct {
	title string
	steps []step
}

type step struct {
	host, command string
	output        []string
	exit          int
}

var (
	promptLine = regexp.MustCompile(`^(\w+)\$ (.*)$`)
	exitLines  = regexp.MustCompile(`^\(exit code (\d+)\)$`)
)

// runbooks reads the page.
func runbooks(t *testing.T) (all []runbook) {
	t.Helper()
	text := string(readAll(t, filepath.Join(testkit.RepositoryRoot(t), "docs", "operate.md")))
	for section := range strings.SplitSeq(text, "\n## ") {
		title, body, _ := strings.Cut(section, "\n")
		r := runbook{title: title}
		for i, fence := range regexp.MustCompile("(?m)^```.*(\n.*)?").FindAllString(body, -1) {
			language, first, _ := strings.Cut(fence, "\n")
			if i%2 == 0 && (language != "```text" || !promptLine.MatchString(first)) {
				t.Errorf("section %q: the block that begins with %q, %q is not run; a block of commands is text with prompts", title, language, first)
			}
		}
		for _, block := range regexp.MustCompile("(?ms)^```text\n(.*?)^```$").FindAllStringSubmatch(body, -1) {
			for line := range strings.Lines(block[1]) {
				line = strings.TrimSuffix(line, "\n")
				if m := promptLine.FindStringSubmatch(line); m != nil {
					r.steps = append(r.steps, step{host: m[1], command: m[2]})
					continue
				}
				s := &r.steps[len(r.steps)-1]
				if m := exitLines.FindStringSubmatch(line); m != nil {
					s.exit, _ = strconv.Atoi(m[1])
					continue
				}
				s.output = append(s.output, line)
			}
		}
		all = append(all, r)
	}
	return all
}

// host is a machine of the page: a directory that has its files, and a node.
type host struct {
	name, dir          string
	listen, http, data string
	node               *cluster.Process
	// args are the arguments of the program in the host's unit, and tokenFile is PENSTOCK_TOKEN_FILE of
	// its shell.
	args           []string
	tokenFile      string
	toReal, toPage *strings.Replacer
	// mounted is the root of a new file system, which belongs to root, or "". unplugged is the directory that
	// has the file system of a disk which is not mounted, or "".
	mounted, unplugged string
}

// operator runs the commands of a section.
type operator struct {
	t     *testing.T
	hosts map[string]*host
	etcd  *testetcd.Etcd
	bin   string
}

// memberOfCluster are the settings of a node in a cluster.
var memberOfCluster = [][2]string{{"  etcd", "[etcd.example:2379]"}, {"  lease_ttl", "2s"}, {"  zone", "rack-1"}, {"advertise", "127.0.0.1"}}

// newOperator makes the hosts n1 and n2, with two disks each. Their configuration is that of the package
// with other values, of which settings are some: the first line of the file with such a key, after its
// indentation, gets the value.
func newOperator(t *testing.T, settings [][2]string, etcd ...*testetcd.Etcd) *operator {
	t.Helper()
	o := newHosts(t)
	var pairs []string
	for _, name := range []string{"n1", "n2"} {
		h := &host{name: name, dir: t.TempDir(), listen: testkit.Port(t), http: testkit.Port(t), data: testkit.Port(t)}
		o.hosts[name] = h
		pairs = append(pairs, name+".example:7420", h.listen, name+".example:7422", h.http)
	}
	if len(etcd) > 0 {
		o.etcd = etcd[0]
		pairs = append(pairs, "new-etcd.example:2379", etcd[len(etcd)-1].Endpoints[0], "etcd.example:2379", etcd[0].Endpoints[0])
	}
	for _, h := range o.hosts {
		h.replace(append([]string{"/mnt/", h.dir + "/mnt/"}, pairs...))
		for _, dir := range []string{"/etc/penstock", "/mnt/nvme0", "/mnt/nvme1", "/root"} {
			if err := os.MkdirAll(h.dir+dir, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		h.args = []string{"serve", "--degraded", "--config", h.dir + "/etc/penstock/penstock.yaml"}
		text := configured(t, "penstock.yaml", slices.Concat([][2]string{
			{"data", "[/mnt/nvme0/penstock, /mnt/nvme1/penstock]"}, {"node", h.name}, {"listen", h.listen}, {"data_listen", h.data}, {"http", h.http},
			{"capacity", "128MiB"}, {"arena", "32MiB"}, {"index_cache", "4MiB"}, {"free_floor", "1MiB"}, {"prewrite", "false"}, {"scrub_rate", "0B"},
			{"io", "posix"}, {"  format", "json"},
		}, settings))
		writeFile(t, h.dir+"/etc/penstock", "penstock.yaml", []byte(h.toReal.Replace(text)))
		writeFile(t, h.dir+"/root", "agents.jsonl", []byte(`{"id":"a","rounds":[[20000,200],[1000,200]]}`+"\n"))
		h.stopAtEnd(t)
	}
	return o
}

// newPlannerHosts makes the hosts p1 and p2, each with a planner that stands for election.
func newPlannerHosts(t *testing.T, etcd *testetcd.Etcd) *operator {
	t.Helper()
	o := newHosts(t)
	var pairs []string
	for _, name := range []string{"p1", "p2"} {
		h := &host{name: name, dir: t.TempDir(), listen: testkit.Port(t), http: testkit.Port(t)}
		h.args = []string{"planner", "--config", h.dir + "/etc/penstock/planner.yaml"}
		o.hosts[name] = h
		pairs = append(pairs, name+".example:7430", h.listen)
	}
	for _, h := range o.hosts {
		h.replace(pairs)
		for _, dir := range []string{"/etc/penstock", "/root"} {
			if err := os.MkdirAll(h.dir+dir, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		writeFile(t, h.dir+"/etc/penstock", "planner.yaml", []byte(configured(t, "planner.yaml", [][2]string{
			{"listen", h.listen}, {"http", h.http}, {"  etcd", "[" + etcd.Endpoints[0] + "]"}, {"  format", "json"},
			{"  lease_ttl", "10s"}, // A shorter lease may end on a busy machine, and the other planner would lead.
		})))
		h.stopAtEnd(t)
	}
	return o
}

// newHosts returns an operator without hosts, for which the command penstock is the program of the test.
func newHosts(t *testing.T) *operator {
	t.Helper()
	o := &operator{t: t, hosts: make(map[string]*host), bin: t.TempDir()}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(o.bin+"/penstock", []byte("#!/bin/sh\nexec env "+childEnv+" "+self+` "$@"`+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return o
}

// configured returns a configuration of deploy with other values.
func configured(t *testing.T, file string, settings [][2]string) string {
	t.Helper()
	text := string(readAll(t, filepath.Join(testkit.RepositoryRoot(t), "deploy", file)))
	for _, set := range settings {
		line := regexp.MustCompile("(?m)^" + set[0] + ": .*$").FindStringIndex(text)
		if line == nil {
			t.Fatalf("deploy/%s has no line of %s", file, set[0])
		}
		text = text[:line[0]] + set[0] + ": " + set[1] + text[line[1]:]
	}
	return text
}

// replace sets the host's replacements: each name of the page is followed by its real value.
func (h *host) replace(pairs []string) {
	pairs = append([]string{"/etc/penstock", h.dir + "/etc/penstock"}, pairs...)
	h.toReal = strings.NewReplacer(pairs...)
	var back []string
	for i := 0; i < len(pairs); i += 2 {
		back = append(back, pairs[i+1], pairs[i])
	}
	h.toPage = strings.NewReplacer(back...)
}

// stopAtEnd stops the host's process at the end of the test.
func (h *host) stopAtEnd(t *testing.T) {
	t.Cleanup(func() {
		if h.node != nil {
			if err := h.node.Stop(); err != nil {
				t.Error(err)
			}
		}
	})
}

// run runs the steps of a section, and compares their output with the page.
func (o *operator) run(steps []step) {
	o.t.Helper()
	for _, s := range steps {
		out, code := o.do(s.host, s.command)
		if code != s.exit {
			o.t.Fatalf("%s$ %s: exit %d, the page has %d\n%s", s.host, s.command, code, s.exit, out)
		}
		rest := out
		for _, want := range s.output {
			at := afterLine(rest, want)
			if at < 0 {
				o.t.Fatalf("%s$ %s: no line %q, in this order, in\n%s", s.host, s.command, want, out)
			}
			rest = rest[at:]
		}
	}
}

// afterLine returns the position after the first line of the text that is the wanted one, or -1. Blanks
// in sequence are one, and … is any text.
func afterLine(text, want string) int {
	pattern := strings.ReplaceAll(regexp.QuoteMeta(strings.Join(strings.Fields(want), " ")), "…", ".*")
	line := regexp.MustCompile("^" + pattern + "$")
	at := 0
	for l := range strings.Lines(text) {
		at += len(l)
		if line.MatchString(strings.Join(strings.Fields(l), " ")) {
			return at
		}
	}
	return -1
}

// do runs one command. systemctl and the commands of disks act on the test's substitutes:
// the node in a process of its own, and directories.
func (o *operator) do(name, command string) (out string, code int) {
	o.t.Helper()
	words := strings.Fields(command)
	h := o.hosts[name]
	switch words[0] {
	case "systemctl":
		if name == "etcd" && words[1] == "stop" {
			o.etcd.Kill(0)
			return "", 0
		}
		if name == "etcd" {
			o.etcd.Run(0)
			o.etcd.Await()
			return "", 0
		}
		if _, err := os.Stat(h.mounted + "penstock"); h.mounted != "" && err != nil {
			o.t.Errorf("the user penstock cannot make its directory on the new file system: %v", err)
		}
		h.systemctl(o.t, words[1])
		return "", 0
	case "umount":
		unused(o.t, h.toReal.Replace(words[1]+"/"))
		return "", 0
	case "mkfs.ext4":
		h.unplugged = "" // mount makes the file system
		return "", 0
	case "mount":
		dir := h.toReal.Replace(words[1] + "/")
		if err := os.RemoveAll(dir); err != nil {
			o.t.Fatal(err)
		}
		if h.unplugged != "" {
			if err := os.Rename(h.unplugged, dir); err != nil {
				o.t.Fatal(err)
			}
			h.unplugged = ""
			return "", 0
		}
		if err := os.Mkdir(dir, 0o755); err != nil {
			o.t.Fatal(err)
		}
		h.mounted = dir
		return "", 0
	case "install":
		// The directory belongs to the user of the unit, which in the test is the one of the test.
		if !slices.Equal(words[:6], []string{"install", "-d", "-o", "penstock", "-g", "penstock"}) {
			o.t.Fatalf("%s makes no directory of the user penstock", command)
		}
		if err := os.Mkdir(h.toReal.Replace(words[6]), 0o755); err != nil {
			o.t.Fatal(err)
		}
		return "", 0
	case "promtool":
		testkit.Program(o.t, "promtool", "prometheus")
	}
	cmd := exec.CommandContext(o.t.Context(), "sh", "-c", h.toReal.Replace(command))
	cmd.Dir = h.dir + "/root"
	cmd.Env = append(os.Environ(), "PATH="+o.bin+":"+os.Getenv("PATH"), "PENSTOCK_SERVER="+h.listen, "PENSTOCK_TOKEN_FILE="+h.tokenFile)
	b, err := cmd.CombinedOutput()
	if err != nil && cmd.ProcessState == nil {
		o.t.Fatal(err)
	}
	return h.toPage.Replace(string(b)), cmd.ProcessState.ExitCode()
}

// systemctl starts, stops, restarts or kills the node, as its unit does.
func (h *host) systemctl(t *testing.T, verb string) {
	t.Helper()
	if verb == "restart" || verb == "stop" {
		if err := h.node.Stop(); err != nil {
			t.Fatal(err)
		}
		h.node = nil
	}
	if verb == "kill" {
		if err := h.node.Kill(); err != nil {
			t.Fatal(err)
		}
		h.node = nil
	}
	if verb == "start" || verb == "restart" {
		p, err := cluster.StartProcess(t.Context(), cluster.ProcessOptions{
			Name: h.name, Args: h.args, Env: append(os.Environ(), childEnv),
		})
		if err != nil {
			t.Fatal(err)
		}
		h.node = p
	}
}

// unused fails the test if a process has a file below dir open, so that the disk cannot be unmounted.
func unused(t *testing.T, dir string) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if file, err := os.Readlink(f); err == nil && strings.HasPrefix(file, dir) {
			t.Errorf("%s is open, so that umount fails", file)
		}
	}
}

// load stores prompts and reads them, until it is stopped.
type load struct {
	t   *testing.T
	h   *host
	dir string
	// stored are the prompts whose put succeeded. Only the goroutine of the load uses the list until
	// stop has returned; puts counts them.
	stored []int
	puts   atomic.Int64
	stop   func()
}

func (l *load) file(i int) string { return fmt.Sprintf("%s/tokens-%d", l.dir, i) }

func (l *load) run(ctx context.Context, args ...string) result {
	return penstockIn(ctx, "", []string{"PENSTOCK_SERVER=" + l.h.listen}, args...)
}

// get reads a prompt, and reports whether all its blocks were there. A block with other bytes than the stored
// ones fails the test.
func (l *load) get(ctx context.Context, i int) bool {
	out := l.dir + "/got"
	if r := l.run(ctx, "block", "get", "m", "--tokens-file", l.file(i), "--out", out); r.code != exitOK {
		return false
	}
	got, err := os.ReadFile(out)
	if err != nil {
		l.t.Error(err)
		return false
	}
	if string(got) != string(bytesOf(byte(i), 8192*2)) {
		l.t.Errorf("prompt %d has other bytes", i)
	}
	return true
}

// startLoad begins to store and to read prompts of the namespace m at the host's node.
func startLoad(t *testing.T, h *host) *load {
	l := &load{t: t, h: h, dir: t.TempDir()}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			writeFile(t, l.dir, filepath.Base(l.file(i)), tokens(1+100*i, 8))
			data := writeFile(t, l.dir, "data", bytesOf(byte(i), 8192*2))
			if r := l.run(ctx, "block", "put", "m", "--tokens-file", l.file(i), "--data-file", data); r.code == exitOK {
				l.stored = append(l.stored, i)
				l.puts.Add(1)
			}
			if n := len(l.stored); n > 0 {
				l.get(ctx, l.stored[i*7919%n])
			}
		}
	})
	l.stop = sync.OnceFunc(func() {
		cancel()
		running.Wait()
	})
	t.Cleanup(l.stop)
	awaitTrue(t, "20 prompts are stored", func() bool { return l.puts.Load() >= 20 })
	return l
}

// TestRunbooks runs the commands of docs/operate.md.
func TestRunbooks(t *testing.T) {
	testkit.Long(t, "runs the commands of docs/operate.md with nodes and etcd")
	const makeNamespace = "penstock ns create m --layers 2 --block-tokens 4 --token-bytes 1024"
	// started returns the hosts with running nodes: n1, and n2 if a command concerns it.
	started := func(t *testing.T, steps []step, settings [][2]string, etcd ...*testetcd.Etcd) *operator {
		t.Helper()
		o := newOperator(t, settings, etcd...)
		o.hosts["n1"].systemctl(t, "start")
		if slices.ContainsFunc(steps, func(s step) bool { return s.host == "n2" || strings.Contains(s.command, "n2.example") }) {
			o.hosts["n2"].systemctl(t, "start")
		}
		return o
	}
	known := map[string]func(t *testing.T, steps []step){
		"Install": func(t *testing.T, steps []step) { newOperator(t, nil).run(steps) },
		"Size":    func(t *testing.T, steps []step) { started(t, steps, nil).run(steps) },
		"Secure":  func(t *testing.T, steps []step) { started(t, steps, nil).run(steps) },
		"Monitor": func(t *testing.T, steps []step) { started(t, steps, nil).run(steps) },
		"Back up": func(t *testing.T, steps []step) { started(t, steps, nil).run(steps) },
		"Upgrade": func(t *testing.T, steps []step) {
			o := started(t, steps, nil)
			o.do("n1", makeNamespace)
			l := startLoad(t, o.hosts["n1"])
			l.stop()
			o.run(steps)
			l.all()
		},
		"A tenant is at its quota": func(t *testing.T, steps []step) {
			o := newOperator(t, [][2]string{{"  roles_file", "/etc/penstock/roles.yaml"}})
			h := o.hosts["n1"]
			r := &rolesRig{T: t, dir: h.dir + "/root"}
			all := r.principal("sre", `{roles: [read, write, admin, operate], namespaces: ["*"]}`)
			roles := "principals:\n" + all + "tenants:\n  - {namespaces: team-a/*, quota: 256KiB}\n"
			writeFile(t, h.dir+"/etc/penstock", "roles.yaml", []byte(roles))
			h.tokenFile = filepath.Join(r.dir, "sre.token")
			h.systemctl(t, "start")
			put := func(ns string, from, blocks int) (out string, code int) {
				writeFile(t, r.dir, "prompt", tokens(from, 4*blocks))
				writeFile(t, r.dir, "blocks", bytesOf(1, 16384*blocks))
				return o.do("n1", "penstock block put "+ns+" --tokens-file prompt --data-file blocks")
			}
			must := func(out string, code int) {
				t.Helper()
				if code != 0 {
					t.Fatal(out)
				}
			}
			must(o.do("n1", "penstock status --wait"))
			for _, ns := range []string{"team-a/old", "team-a/new"} {
				must(o.do("n1", "penstock ns create "+ns+" --layers 4 --block-tokens 4 --token-bytes 1024"))
			}
			must(put("team-a/old", 1, 8))
			must(o.do("n1", "penstock pin team-a/old --tokens-file prompt"))
			if out, code := put("team-a/new", 1, 8); code == 0 || !strings.Contains(out, "over_quota") {
				t.Fatalf("beside pinned blocks: exit %d\n%s", code, out)
			}
			raise := slices.IndexFunc(steps, func(s step) bool { return strings.HasPrefix(s.command, "sed ") })
			o.run(steps[:raise])
			must(put("team-a/new", 1, 12))
			o.run(steps[raise:])
			must(put("team-a/new", 1000, 40))
		},
		"Replace a disk that can be read": func(t *testing.T, steps []step) {
			o := started(t, steps, nil)
			o.do("n1", makeNamespace)
			l := startLoad(t, o.hosts["n1"])
			before := l.puts.Load()
			o.run(steps)
			awaitTrue(t, "the load goes on", func() bool { return l.puts.Load() > before })
			l.stop()
			l.all()
		},
		"Replace a dead disk": func(t *testing.T, steps []step) {
			o := started(t, steps, nil)
			o.do("n1", makeNamespace)
			l := startLoad(t, o.hosts["n1"])
			l.stop()
			h := o.hosts["n1"]
			h.systemctl(t, "stop")
			if err := os.RemoveAll(h.dir + "/mnt/nvme1"); err != nil {
				t.Fatal(err)
			}
			h.systemctl(t, "start")
			o.run(steps)
			hits := 0
			for _, i := range l.stored {
				if l.get(t.Context(), i) {
					hits++
				}
			}
			if hits == 0 || hits == len(l.stored) {
				t.Errorf("%d of %d prompts are hits without one of two disks", hits, len(l.stored))
			}
		},
		"A disk may have secrets of ended epochs": func(t *testing.T, steps []step) {
			o := newOperator(t, [][2]string{{"  keys_file", "/etc/penstock/keys"}, {"  epoch_keys", "true"}})
			h := o.hosts["n1"]
			writeFile(t, h.dir+"/etc/penstock", "keys", keysText("2026-11"))
			h.systemctl(t, "start")
			must := func(out string, code int) {
				t.Helper()
				if code != 0 {
					t.Fatal(out)
				}
			}
			must(o.do("n1", "penstock status --wait && "+makeNamespace))
			// unplugged starts the node without a disk, and ends the epoch of the namespace.
			unplugged := func() {
				t.Helper()
				h.systemctl(t, "stop")
				h.unplugged = t.TempDir() + "/disk"
				if err := os.Rename(h.dir+"/mnt/nvme1", h.unplugged); err != nil {
					t.Fatal(err)
				}
				h.systemctl(t, "start")
				must(o.do("n1", "penstock status --wait && penstock ns bump-epoch m"))
			}
			startLoad(t, h).stop()
			unplugged()
			remove := slices.IndexFunc(steps, func(s step) bool { return strings.Contains(s.command, "volume remove") })
			o.run(steps[:remove])
			l := startLoad(t, h)
			l.stop()
			unplugged()
			rewritten := slices.IndexFunc(steps[remove:], func(s step) bool { return s.command == "penstock status" }) + remove
			o.run(steps[remove:rewritten])
			awaitTrue(t, "no block needs the old key", func() bool {
				out, _ := o.do("n1", "penstock status")
				if strings.Contains(out, "pending") {
					t.Errorf("the removed volume is waited for:\n%s", out)
				}
				return strings.Contains(out, "can be removed")
			})
			o.run(steps[rewritten:])
		},
		"Lose a node": func(t *testing.T, steps []step) {
			o := started(t, steps, memberOfCluster, testetcd.Start(t, 1))
			awaitTrue(t, "both nodes serve", func() bool {
				out, _ := o.do("n1", "penstock cluster members")
				return strings.Count(out, " serving ") == 2
			})
			o.do("n1", makeNamespace)
			o.hosts["n2"].systemctl(t, "kill")
			awaitTrue(t, "the lease of the killed node has ended", func() bool {
				out, _ := o.do("n1", "penstock cluster members")
				return regexp.MustCompile(`(?m)^n2 +down .* 20\d\d-\S+Z +n2`).MatchString(out) && !strings.Contains(out, " after ")
			})
			// The page has no bump, because a reader would lose the blocks of the model. One happens while the
			// node is down.
			back := slices.IndexFunc(steps, func(s step) bool { return s.host == "n2" })
			o.run(steps[:back])
			if out, code := o.do("n1", "penstock ns bump-epoch m"); code != 0 || !strings.Contains(out, "epoch 1 -> 2") {
				t.Fatal(out)
			}
			o.run(steps[back:])
		},
		"Lose a planner": func(t *testing.T, steps []step) {
			o := newPlannerHosts(t, testetcd.Start(t, 1))
			const planners = "--planner p1.example:7430,p2.example:7430"
			// p2 leads, because it is alone at first, and is lost.
			o.hosts["p2"].systemctl(t, "start")
			awaitTrue(t, "p2 leads", func() bool {
				_, code := o.do("p1", "penstock plan status "+planners)
				return code == 0
			})
			o.hosts["p1"].systemctl(t, "start")
			c := &electorate{T: t}
			c.lead("e0", leader.Prefill, o.hosts["p1"].listen+","+o.hosts["p2"].listen)
			o.hosts["p2"].systemctl(t, "kill")
			awaitTrue(t, "p1 leads, and has the group", func() bool {
				out, _ := o.do("p1", "penstock plan top "+planners)
				return strings.Contains(out, "\ne0 ")
			})
			start := slices.IndexFunc(steps, func(s step) bool { return s.host == "p2" })
			o.run(steps[:start+1])
			awaitTrue(t, "p2 is a standby", func() bool {
				out, _ := o.do("p1", "penstock plan status "+planners)
				return strings.Contains(out, "standby")
			})
			o.run(steps[start+1:])
		},
		"Add a node": func(t *testing.T, steps []step) {
			o := newOperator(t, memberOfCluster, testetcd.Start(t, 1))
			o.hosts["n1"].systemctl(t, "start")
			if out, code := o.do("n1", "penstock status --wait && "+makeNamespace); code != 0 {
				t.Fatal(out)
			}
			l := startLoad(t, o.hosts["n1"])
			l.stop()
			start := 1 + slices.IndexFunc(steps, func(s step) bool { return s.command == "penstock status --wait" })
			o.run(steps[:start])
			awaitTrue(t, "the list of members has the fills", func() bool {
				out, _ := o.do("n1", "penstock cluster rebalance --dry-run")
				return strings.Contains(out, "n2")
			})
			o.run(steps[start:])
			l.all()
			l.h = o.hosts["n2"]
			if n := len(slices.DeleteFunc(l.stored, func(i int) bool { return !l.get(t.Context(), i) })); n == 0 {
				t.Error("the new node has none of the prompts")
			}
		},
		"Take a node out for good": func(t *testing.T, steps []step) {
			o := started(t, steps, memberOfCluster, testetcd.Start(t, 1))
			if out, code := o.do("n1", "penstock status --wait && "+makeNamespace); code != 0 {
				t.Fatal(out)
			}
			if out, code := o.do("n2", "penstock status --wait"); code != 0 {
				t.Fatal(out)
			}
			l := startLoad(t, o.hosts["n2"])
			awaitTrue(t, "blocks are stored", func() bool { return l.puts.Load() > 0 })
			l.stop()
			o.run(steps)
			l.all()
		},
		"Move to shared storage": func(t *testing.T, steps []step) {
			o := started(t, steps, memberOfCluster, testetcd.Start(t, 1))
			if out, code := o.do("n1", "penstock status --wait && mkdir /mnt/shared && "+makeNamespace); code != 0 {
				t.Fatal(out)
			}
			// The process on n2 uses the paths of n1: the file system is mounted on both hosts.
			o.hosts["n2"].toReal = strings.NewReplacer("/mnt/shared/", o.hosts["n1"].dir+"/mnt/shared/")
			l := startLoad(t, o.hosts["n1"])
			l.stop()
			o.run(steps)
			l.all()
		},
		"Lose etcd": func(t *testing.T, steps []step) {
			o := started(t, steps, memberOfCluster, testetcd.Start(t, 1), testetcd.Start(t, 1))
			if out, code := o.do("n1", "penstock status --wait && "+makeNamespace); code != 0 {
				t.Fatal(out)
			}
			// A node has only the namespaces with blocks on its volumes.
			l := startLoad(t, o.hosts["n1"])
			awaitTrue(t, "blocks are stored", func() bool { return l.puts.Load() > 0 })
			l.stop()
			if out, code := o.do("n1", "penstock ns bump-epoch m --to 3"); code != 0 {
				t.Fatal(out)
			}
			o.etcd.Kill(0)
			awaitTrue(t, "the node has lost its lease", func() bool {
				out, _ := o.do("n1", "curl -s http://n1.example:7422/readyz")
				return strings.Contains(out, "no_lease")
			})
			o.run(steps)
		},
	}
	seen := 0
	for _, r := range runbooks(t) {
		if len(r.steps) == 0 {
			continue
		}
		check := known[r.title]
		if check == nil {
			t.Errorf("no test runs the commands of the section %q", r.title)
			continue
		}
		seen++
		t.Run(r.title, func(t *testing.T) {
			t.Parallel()
			check(t, r.steps)
		})
	}
	if seen != len(known) {
		t.Errorf("%d sections have commands; want %d", seen, len(known))
	}
}

// all waits until every prompt that was stored is a hit: a node whose lease has ended on a busy machine serves nothing until it has joined again.
func (l *load) all() {
	l.t.Helper()
	for _, i := range l.stored {
		awaitTrue(l.t, fmt.Sprintf("prompt %d of %d is a hit", i, len(l.stored)), func() bool { return l.get(l.t.Context(), i) })
	}
}
