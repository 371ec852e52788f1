package main

import (
	"archive/zip"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/client/leader"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/cluster"
)

// version is a program: this one, or the one of the previous release.
type version struct {
	name, path string
	environ    []string
}

// versions returns the program of the previous release and this one.
func versions(t *testing.T) (old, present version) {
	t.Helper()
	previous := os.Getenv("TEST_PREVIOUS_PENSTOCK")
	if previous == "" {
		t.Skip("TEST_PREVIOUS_PENSTOCK, the program of the previous release, is not set: make test-upgrade builds it")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return version{"the previous release", previous, os.Environ()}, version{"this version", self, append(os.Environ(), childEnv)}
}

// serve starts a node of the version. The end of the test kills it, if it was not stopped before.
func (v version) serve(t *testing.T, data string) *cluster.Process {
	t.Helper()
	return v.start(t, "a node", small(data)...)
}

// start is serve for a process with other arguments.
func (v version) start(t *testing.T, what string, args ...string) *cluster.Process {
	t.Helper()
	p, err := cluster.StartProcess(t.Context(), cluster.ProcessOptions{Name: what + " of " + v.name, Args: args, Env: v.environ, Start: func(cmd *exec.Cmd) error {
		cmd.Path = v.path
		return cmd.Start()
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Kill() })
	return p
}

// run runs a command of the version against a node.
func (v version) run(t *testing.T, p *cluster.Process, args ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), v.path, args...)
	cmd.Env = append(append([]string{}, v.environ...), "PENSTOCK_SERVER="+p.Ready.Listen)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// do is run for a command that must succeed.
func (v version) do(t *testing.T, p *cluster.Process, args ...string) string {
	t.Helper()
	out, err := v.run(t, p, args...)
	if err != nil {
		t.Fatalf("%s: penstock %s: %v\n%s", v.name, strings.Join(args, " "), err, out)
	}
	return out
}

// put stores prompts, each of four blocks with bytes of its own.
func (v version) put(t *testing.T, p *cluster.Process, dir string, from, to int) {
	t.Helper()
	for i := from; i < to; i++ {
		tokensFile := writeFile(t, dir, fmt.Sprintf("tokens-%d", i), tokens(1+1000*i, 16))
		v.do(t, p, "block", "put", "m", "--tokens-file", tokensFile, "--data-file", writeFile(t, dir, "data", bytesOf(byte(i), 4*8192)))
	}
}

// check reads the prompts below n: each is a hit with its bytes, and its checksums are right on the disk.
func (v version) check(t *testing.T, p *cluster.Process, dir string, n int) {
	t.Helper()
	for i := range n {
		tokensFile := fmt.Sprintf("%s/tokens-%d", dir, i)
		v.do(t, p, "block", "get", "m", "--tokens-file", tokensFile, "--out", dir+"/got")
		if !bytes.Equal(readAll(t, dir+"/got"), bytesOf(byte(i), 4*8192)) {
			t.Errorf("%s: prompt %d has other bytes", v.name, i)
		}
		if out := v.do(t, p, "block", "verify", "m", "--tokens-file", tokensFile); !strings.Contains(out, "intact 4, absent 0, corrupt 0, failed 0") {
			t.Errorf("%s: prompt %d: %s", v.name, i, out)
		}
	}
}

// state describes the namespaces of a node.
func (v version) state(t *testing.T, p *cluster.Process) string {
	t.Helper()
	var list struct {
		Namespaces []struct {
			Name          string
			Epoch, Blocks uint64
			QuotaBytes    uint64 `json:"quota_bytes"`
		}
	}
	if err := json.Unmarshal([]byte(v.do(t, p, "ns", "list", "--format", "json")), &list); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%+v", list.Namespaces)
}

// TestUpgrade: this version opens the volumes and the index of the previous release with all blocks,
// namespaces, epochs and quotas, after a clean stop and after SIGKILL. The previous release opens the
// volumes that this version wrote, with all blocks. Clients of each version store and read
// at nodes of the other.
func TestUpgrade(t *testing.T) {
	old, present := versions(t)
	create := func(p *cluster.Process, v version) {
		t.Helper()
		v.do(t, p, strings.Fields("ns create m --layers 2 --block-tokens 4 --token-bytes 1024")...)
	}
	stop := func(t *testing.T, p *cluster.Process) {
		t.Helper()
		if err := p.Stop(); err != nil {
			t.Fatal(err)
		}
	}
	t.Run("volumes", func(t *testing.T) {
		dir := t.TempDir()
		data := dir + "/a," + dir + "/b"
		p := old.serve(t, data)
		create(p, old)
		old.do(t, p, "ns", "bump-epoch", "m", "--to", "7")
		old.do(t, p, "ns", "quota", "m", "32MiB")
		old.put(t, p, dir, 0, 10)
		want := old.state(t, p)
		stop(t, p)

		p = present.serve(t, data)
		if got := present.state(t, p); got != want {
			t.Errorf("this version has %s; the previous release had %s", got, want)
		}
		present.check(t, p, dir, 10)
		present.put(t, p, dir, 10, 20)
		present.check(t, p, dir, 20)
		want = present.state(t, p)
		// The previous release reads a catalogue with a deleted name, and forgets the name.
		for _, command := range []string{"create gone --layers 2 --block-tokens 4 --token-bytes 1024", "delete gone --yes"} {
			present.do(t, p, append([]string{"ns"}, strings.Fields(command)...)...)
		}
		stop(t, p)
		if log := p.Log(); strings.Contains(log, "rebuilt") {
			t.Errorf("the index was rebuilt:\n%s", log)
		}

		p = old.serve(t, data)
		if got := old.state(t, p); got != want {
			t.Errorf("the previous release has %s; this version had %s", got, want)
		}
		old.check(t, p, dir, 20)
		old.put(t, p, dir, 20, 25)
		if err := p.Kill(); err != nil {
			t.Fatal(err)
		}

		// A crash may lose blocks that were acknowledged with durability batch, but no block that was synced before.
		p = present.serve(t, data)
		present.check(t, p, dir, 20)
		stop(t, p)
	})
	for _, c := range []struct {
		name         string
		node, client version
	}{{"old client of a new node", present, old}, {"new client of an old node", old, present}} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			p := c.node.serve(t, dir+"/volume")
			create(p, c.client)
			c.client.put(t, p, dir, 0, 10)
			c.client.check(t, p, dir, 10)
			c.node.check(t, p, dir, 10)
			for _, command := range []string{"status", "volume list", "ns show m", "doctor", "ns bump-epoch m"} {
				c.client.do(t, p, strings.Fields(command)...)
			}
			if out, err := c.client.run(t, p, "block", "get", "m", "--tokens-file", dir+"/tokens-0", "--out", dir+"/got"); err == nil {
				t.Errorf("a block of old weights was returned\n%s", out)
			}
			stop(t, p)
		})
	}
	t.Run("several live epochs", func(t *testing.T) {
		dir := t.TempDir()
		p := present.serve(t, dir+"/volume")
		create(p, present)
		present.put(t, p, dir, 0, 5)
		present.do(t, p, "ns", "bump-epoch", "m", "--keep", "2")
		present.put(t, p, dir, 5, 10)
		live := func(v version, p *cluster.Process) {
			t.Helper()
			if out := v.do(t, p, "ns", "show", "m"); !regexp.MustCompile(`(?m)^1 +20 .*$`).MatchString(out) || !regexp.MustCompile(`(?m)^2 +20 .*newest$`).MatchString(out) {
				t.Errorf("%s does not have 20 blocks of each of two live epochs\n%s", v.name, out)
			}
		}
		live(present, p)
		stop(t, p)
		p = old.serve(t, dir+"/volume")
		live(old, p)
		stop(t, p)
		p = present.serve(t, dir+"/volume")
		live(present, p)
		stop(t, p)
	})
}

// TestUpgradeWheels: the Python package of the previous release, with its libpenstock, works with a node of this
// version, and the package of this version with a node of the previous release. Each package reads and
// deletes the blocks that the other has stored, and sees the epochs that the other has begun.
func TestUpgradeWheels(t *testing.T) {
	old, present := versions(t)
	oldWheel, wheel := installed(t, "TEST_PREVIOUS_WHEEL"), installed(t, "TEST_WHEEL")
	script, err := filepath.Abs("testdata/upgrade.py")
	if err != nil {
		t.Fatal(err)
	}
	for _, node := range []version{old, present} {
		t.Run("a node of "+node.name, func(t *testing.T) {
			p := node.serve(t, t.TempDir()+"/volume")
			for _, step := range []struct{ wheel, step string }{
				{oldWheel, "put-1"}, {wheel, "check-1"}, {oldWheel, "check-1"},
				{wheel, "put-2"}, {oldWheel, "check-2"}, {wheel, "check-2"},
				{oldWheel, "delete-2"}, {wheel, "delete-1"},
				{oldWheel, "bump-1"}, {wheel, "gone-1"}, {wheel, "gone-2"}, {oldWheel, "gone-2"},
				{wheel, "put-3"}, {oldWheel, "check-3"}, {wheel, "bump-3"}, {oldWheel, "gone-3"}, {oldWheel, "put-4"}, {wheel, "check-4"},
			} {
				cmd := exec.CommandContext(t.Context(), "python3", script, p.Ready.Listen, step.step)
				cmd.Env = append(os.Environ(), "PYTHONPATH="+step.wheel, "PYTHONDONTWRITEBYTECODE=1")
				if out, err := cmd.CombinedOutput(); err != nil {
					t.Fatalf("%s by the wheel of %s: %v\n%s\n%s", step.step, map[string]string{oldWheel: old.name, wheel: present.name}[step.wheel], err, out, p.Log())
				}
			}
		})
	}
}

// installed unpacks the wheel whose path is the environment variable's value, and returns the directory of its packages.
func installed(t *testing.T, variable string) string {
	t.Helper()
	wheel := os.Getenv(variable)
	if wheel == "" {
		t.Fatalf("%s, a wheel, is not set: make test-upgrade builds it", variable)
	}
	dir := t.TempDir()
	r, err := zip.OpenReader(wheel)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.CopyFS(dir, r), r.Close()); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestUpgradePlanner: leaders of engine groups, traffic managers and the gateway package of this version serve requests
// with a planner and a node of the previous release. penstock gateway refuses that planner by name, and answers
// requests when the planner has been replaced by this version. The previous release returns in the place of this
// version, too.
func TestUpgradePlanner(t *testing.T) {
	old, present := versions(t)
	testkit.VerifyNone(t)
	node := old.serve(t, t.TempDir()+"/volume")
	old.do(t, node, strings.Fields("ns create m --layers 2 --block-tokens 4 --token-bytes 1024")...)
	addr, web := testkit.Port(t), testkit.Port(t)
	plan := func(v version) *cluster.Process {
		return v.start(t, "a planner", "planner", "--listen", addr, "--http", web, "--log-format", "json", "--schedule-block-tokens", "4", "--schedule-min-part", "4")
	}
	p := plan(old)
	example := filepath.Join(t.TempDir(), "dualpath")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", example, "github.com/penstock-kv/penstock/examples/dualpath").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	// The second request of the program reads all blocks that the first has stored.
	reads := regexp.MustCompile(`(?m)^second: prefill-0 reads (\d+) tokens, decode-0 reads (\d+)$`)
	out, err := exec.CommandContext(t.Context(), example, "-storage", node.Ready.Listen, "-planner", addr).CombinedOutput()
	if err != nil {
		t.Fatalf("engines with a planner of %s: %v\n%s\n%s", old.name, err, out, p.Log())
	}
	sides := reads.FindSubmatch(out)
	if sides == nil || !bytes.HasSuffix(out, []byte("second: done\n")) {
		t.Fatalf("engines with a planner of %s print\n%s", old.name, out)
	}
	prefill, _ := strconv.Atoi(string(sides[1]))
	decode, _ := strconv.Atoi(string(sides[2]))
	if prefill+decode != 320 {
		t.Errorf("engines with a planner of %s: %d and %d tokens are read, of 320\n%s", old.name, prefill, decode, out)
	}

	c := &electorate{T: t}
	args := append(gatewayArgs(), "--planner", addr, "--namespace", "m", "--servers", node.Ready.Listen)
	for i, role := range []leader.Role{leader.Prefill, leader.Decode} {
		args = append(args, "--engine", c.lead(fmt.Sprintf("e%d", i), role, addr))
	}
	s := startGateway(t, args...)
	client := gatewayClient(t, nil)
	answers := func(by version, status int, want string) {
		t.Helper()
		within(t, "the groups register with a planner of "+by.name, func() bool {
			out, err := present.run(t, node, "plan", "top", "--planner", addr)
			return err == nil && strings.Contains(out, "e0") && strings.Contains(out, "e1")
		})
		for _, v := range []version{old, present} {
			if out := v.do(t, node, "plan", "top", "--planner", addr); !strings.Contains(out, "e0") || !strings.Contains(out, "e1") {
				t.Errorf("plan top of %s does not have the engines of the planner of %s\n%s", v.name, by.name, out)
			}
		}
		for range 5 {
			resp, err := client.Post("http://"+s.ready.Listen+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"x"}`))
			if err != nil {
				t.Fatal(err)
			}
			text, err := io.ReadAll(resp.Body)
			if err = errors.Join(err, resp.Body.Close()); err != nil || resp.StatusCode != status || !bytes.Contains(text, []byte(want)) {
				t.Errorf("the gateway with a planner of %s: %s, %s, %v", by.name, resp.Status, text, err)
			}
		}
	}
	answers(old, http.StatusBadGateway, "planner_version")
	for _, v := range []version{present, old} {
		if err := p.Stop(); err != nil {
			t.Fatal(err)
		}
		p = plan(v)
		if v.name == old.name {
			answers(v, http.StatusBadGateway, "planner_version")
		} else {
			answers(v, http.StatusOK, "e1")
		}
	}
}
