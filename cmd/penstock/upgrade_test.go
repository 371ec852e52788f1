package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

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
	p, err := cluster.StartProcess(t.Context(), cluster.ProcessOptions{Name: "a node of " + v.name, Args: small(data), Env: v.environ, Start: func(cmd *exec.Cmd) error {
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
