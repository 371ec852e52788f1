package main

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/cluster"
	"github.com/penstock-kv/penstock/lab/netlab"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/fabric"
	"github.com/penstock-kv/penstock/rdma/qos"
	"github.com/penstock-kv/penstock/rdma/topo"
	"github.com/penstock-kv/penstock/rdma/topo/topotest"
	"github.com/penstock-kv/penstock/rdma/verbs"
	"github.com/penstock-kv/penstock/server/config"
)

// hostOfTest is a host that was recorded for the tests of rdma/topo, with a program that was built
// with the given providers. "" is a host without NICs.
func hostOfTest(t *testing.T, name string, built ...string) planeWorld {
	t.Helper()
	dir, text := t.TempDir(), []byte(nil)
	if name != "" {
		var err error
		if text, err = os.ReadFile(filepath.Join(testkit.RepositoryRoot(t), "rdma", "topo", "testdata", name+".host")); err != nil {
			t.Fatal(err)
		}
	}
	if err := topotest.Write(dir, string(text)); err != nil {
		t.Fatal(err)
	}
	return planeWorld{
		host:  func() topo.Host { return topo.Read(topo.Options{Sysfs: os.DirFS(dir)}) },
		verbs: slices.Contains(built, providerVerbs), fabric: slices.Contains(built, providerFabric),
	}
}

// TestChoosePlane: a configured provider is chosen, or refused with the table of the
// host's NICs. auto chooses RDMA only if the NICs support it and this program was built
// with the provider.
func TestChoosePlane(t *testing.T) {
	testkit.Long(t, "reads many copies of /sys")
	for _, c := range []struct {
		name string
		cfg  string // provider, then NICs
		// libfabric is data_plane.libfabric; empty means the default.
		libfabric string
		host      string
		built     []string
		tls       bool
		want      string // provider and its NICs
		err       string
	}{
		{name: "tcp", cfg: "tcp", want: "tcp"},
		{name: "addresses", cfg: "tcp 127.0.0.1 127.0.0.2", want: "tcp 127.0.0.1:7421 127.0.0.2:7421"},
		{name: "an interface", cfg: "tcp lo", want: "tcp 127.0.0.1:7421/lo"},
		{name: "no such interface", cfg: "tcp none7", err: "no interface none7 with an IP address"},
		{name: "shm", cfg: "shm", want: "shm"},
		{name: "verbs that is not built in", cfg: "verbs", host: "dgx-h100", err: "built without libibverbs"},
		{name: "fabric that is not built in", cfg: "fabric", host: "p5", err: "built without libfabric"},
		{name: "verbs", cfg: "verbs", host: "dgx-h100", built: []string{"verbs"}, want: "verbs mlx5_1@3 mlx5_2@3 mlx5_7@3 mlx5_8@3"},
		{name: "verbs, named", cfg: "verbs mlx5_7", host: "dgx-h100", built: []string{"verbs"}, want: "verbs mlx5_7@3"},
		{name: "verbs, by address", cfg: "verbs 10.88.1.1", host: "rxe", built: []string{"verbs"}, want: "verbs rxe2@1"},
		{name: "verbs without a NIC", cfg: "verbs", host: "plain", built: []string{"verbs"}, err: "no usable RDMA NIC of kind ib or roce or iwarp of role snic; `penstock nic check` says what to do. This host has:\nNIC"},
		{name: "verbs on EFA", cfg: "verbs", host: "p5", built: []string{"verbs"}, err: "no usable RDMA NIC of kind ib"},
		{name: "verbs, and TLS", cfg: "verbs", host: "dgx-h100", built: []string{"verbs"}, tls: true, err: "it cannot encrypt"},
		{name: "fabric, over EFA", cfg: "fabric rdmap79s0", host: "p5", built: []string{"fabric"}, want: "fabric efa rdmap79s0-rdm"},
		{name: "fabric without EFA", cfg: "fabric", host: "plain", built: []string{"fabric"}, want: "fabric tcp"},
		{name: "libfabric's shm", cfg: "fabric", libfabric: "shm", host: "plain", built: []string{"fabric"}, err: "data_plane.libfabric: fabric: option Provider is shm"},
		{name: "fabric over an address", cfg: "fabric 10.1.0.4", host: "plain", built: []string{"fabric"}, want: "fabric tcp (10.1.0.4)"},
		{name: "auto in a plain build", cfg: "auto", host: "dgx-h100", want: "tcp"},
		{name: "auto with cards", cfg: "auto", host: "dgx-h100", built: []string{"verbs", "fabric"}, want: "verbs mlx5_1@3 mlx5_2@3 mlx5_7@3 mlx5_8@3"},
		{name: "auto with cards, and TLS", cfg: "auto", host: "dgx-h100", built: []string{"verbs"}, tls: true, want: "tcp"},
		{name: "auto, software RDMA", cfg: "auto", host: "rxe", built: []string{"verbs"}, want: "tcp"},
		{name: "auto, the GPUs' EFA only", cfg: "auto", host: "p5", built: []string{"verbs", "fabric"}, want: "tcp"},
		{name: "auto with nothing", cfg: "auto", built: []string{"verbs", "fabric"}, want: "tcp"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := config.Default()
			f := strings.Fields(c.cfg)
			cfg.DataPlane.Provider, cfg.DataPlane.NICs = f[0], f[1:]
			if c.libfabric != "" {
				cfg.DataPlane.Libfabric = c.libfabric
			}
			if c.tls {
				cfg.Auth.TLSCert, cfg.Auth.TLSKey = "cert", "key"
			}
			p, err := choosePlane(&cfg, hostOfTest(t, c.host, c.built...))
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) {
					t.Fatalf("plane %+v, error %v; want %q", p, err, c.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got := planeText(p); got != c.want || p.reason == "" {
				t.Errorf("plane %q because %q, want %q", got, p.reason, c.want)
			}
		})
	}
}

// planeText returns a plane as one line.
func planeText(p plane) string {
	words := append([]string{p.provider}, p.devices...)
	if p.libfabric != "" {
		words = append(words, p.libfabric)
	}
	for _, n := range p.tcpNICs {
		s := n.Listen
		if n.Device != "" {
			s += "/" + n.Device
		}
		words = append(words, s)
	}
	for _, n := range p.fabricNICs {
		words = append(words, n.String())
	}
	return strings.Join(words, " ")
}

// TestMarks: data_plane.qos is off by default, and an invalid value is an error with the key.
func TestMarks(t *testing.T) {
	if m, err := marksOf("off"); m != nil || err != nil {
		t.Errorf("off: %v, %v", m, err)
	}
	if m, err := marksOf("default"); err != nil || *m != qos.Default() {
		t.Errorf("default: %v, %v", m, err)
	}
	if m, err := marksOf("kv=dscp:10"); err != nil || m.Lane(rdma.ClassKV).DSCP != 10 {
		t.Errorf("kv=dscp:10: %v, %v", m, err)
	}
	if _, err := marksOf("kv=dscp:64"); !errors.Is(err, config.ErrConfig) || !strings.Contains(err.Error(), "data_plane.qos") {
		t.Errorf("kv=dscp:64: %v", err)
	}
}

// TestServeSHM: a node whose data plane is shared memory stores and returns blocks. It replaces the
// socket file of a killed process.
func TestServeSHM(t *testing.T) {
	testkit.VerifyNone(t)
	dir := t.TempDir()
	path := filepath.Join(dir, "data.sock")
	left, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	left.SetUnlinkOnClose(false)
	if err := left.Close(); err != nil {
		t.Fatal(err)
	}
	s := startServed(t, dir+"/volume", "--data-plane-provider", "shm", "--data-listen", path)
	tokensFile, dataFile := prompt(t, s, dir, 12)
	s.run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
	fetchSame(t, s, dir, tokensFile, dataFile)
	if second, r := tryServed(t, nil, append(small(dir+"/other"), "--data-plane-provider", "shm", "--data-listen", path)...); second != nil || !strings.Contains(r.err, "another process listens on "+path) {
		t.Errorf("a second node on the socket: exit %d\n%s", r.code, r.err)
	}
	if r := s.stop(); r.code != exitOK {
		t.Errorf("exit %d\n%s", r.code, r.err)
	}
}

// TestServeFabric: a node over libfabric's sockets stores and returns blocks. The client opens the
// provider that the node reports.
func TestServeFabric(t *testing.T) {
	if !fabric.Built {
		if os.Getenv("PENSTOCK_FABRIC") != "" {
			t.Fatal("PENSTOCK_FABRIC is set, but this program was built without libfabric (CGO_ENABLED=1, -tags fabric)")
		}
		t.Skip("needs a program built with -tags fabric; CI runs it so")
	}
	dir := t.TempDir()
	s := startServed(t, dir+"/volume", "--data-plane-provider", "fabric", "--data-plane-libfabric", "tcp", "--data-plane-nics", "127.0.0.1", "--insecure")
	tokensFile, dataFile := prompt(t, s, dir, 12)
	s.run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
	fetchSame(t, s, dir, tokensFile, dataFile)
	if r := s.stop(); r.code != exitOK {
		t.Errorf("exit %d\n%s", r.code, r.err)
	}
}

// TestServeVerbs is the same over RDMA devices of the host that reach storage, on both sides. `make
// test-rdma` runs it over soft-RoCE.
func TestServeVerbs(t *testing.T) {
	if len(verbsDevices()) == 0 {
		if os.Getenv("PENSTOCK_RDMA_LAB") != "" {
			t.Fatalf("no RDMA device in the lab: %s", verbsMissing())
		}
		t.Skipf("needs an RDMA device, and a program built with -tags verbs: %s", verbsMissing())
	}
	dir := t.TempDir()
	s := startServed(t, dir+"/volume", "--data-plane-provider", "verbs", "--data-plane-qos", "default")
	tokensFile, dataFile := prompt(t, s, dir, 12)
	s.run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
	fetchSame(t, s, dir, tokensFile, dataFile)
	if r := s.stop(); r.code != exitOK {
		t.Errorf("exit %d\n%s", r.code, r.err)
	}
}

// TestServeProviders: a provider that is unknown, or not in this build, is an error with advice.
func TestServeProviders(t *testing.T) {
	for _, c := range []struct {
		flags []string
		want  string
		skip  bool
	}{
		{[]string{"--data-plane-provider", "carrier-pigeon"}, "data_plane.provider: \\\"carrier-pigeon\\\" is not one of [auto tcp shm verbs fabric]", false},
		{[]string{"--data-plane-provider", "verbs"}, "-tags verbs", verbs.Built},
		{[]string{"--data-plane-provider", "shm"}, "the absolute path of a unix socket", false},
		{[]string{"--data-plane-nics", "none7", "--insecure"}, "no interface none7", false},
		{[]string{"--data-plane-nics", "eth0"}, "none of auth.token_file", false},
		{[]string{"--data-plane-qos", "loud"}, "data_plane.qos", false},
	} {
		if c.skip {
			continue
		}
		node, r := tryServed(t, nil, append(small(t.TempDir()), c.flags...)...)
		if node != nil {
			t.Errorf("%v: the node runs", c.flags)
		} else if said := strings.ReplaceAll(r.err, `"`, `\"`); r.code == exitOK || !strings.Contains(r.err, c.want) && !strings.Contains(said, c.want) {
			t.Errorf("%v: exit %d\n%s", c.flags, r.code, r.err)
		}
	}
}

// labLinkBits is the rate of a link between client and node. It is low, so that one link cannot
// carry all traffic.
const labLinkBits = 200_000_000

// TestServeTwoNICs: a node with two NICs sends and receives over both, and over the remaining one
// when a link is disconnected.
func TestServeTwoNICs(t *testing.T) {
	testkit.VerifyNone(t)
	lab := netlab.ForTest(t)
	engine, err := lab.Namespace("engine")
	store, err2 := lab.Namespace("store")
	if err := errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
	var links []*netlab.Link
	var nics []string
	for range 2 {
		k, err := lab.Link(engine, store, netlab.LinkOptions{RateBits: labLinkBits})
		if err != nil {
			t.Fatal(err)
		}
		links, nics = append(links, k), append(nics, k.B.Device)
	}
	dir := t.TempDir()
	args := append(small(dir+"/volume"), "--insecure", "--listen", net.JoinHostPort(links[0].B.IP().String(), "0"),
		"--data-plane-nics", strings.Join(nics, ","), "--data-plane-qos", "default")
	env := append(os.Environ(), childEnv)
	node, err := cluster.StartProcess(t.Context(), cluster.ProcessOptions{Name: "the node", Args: args, Env: env, Start: store.Start})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := node.Stop(); err != nil {
			t.Error(err)
		}
	})
	run := func(args ...string) string {
		t.Helper()
		cmd := exec.Command(os.Args[0], args...)
		var out bytes.Buffer
		cmd.Env, cmd.Stdout, cmd.Stderr = append(slices.Clone(env), "PENSTOCK_SERVER="+node.Ready.Listen), &out, &out
		err := engine.Start(cmd)
		if err == nil {
			err = cmd.Wait()
		}
		if err != nil {
			t.Fatalf("%v: %v\n%s\n%s", args, err, out.String(), node.Log())
		}
		return out.String()
	}
	const blocks = 512
	payload := bytesOf(1, blocks*8192)
	tokensFile, dataFile := writeFile(t, dir, "tokens", tokens(1, 4*blocks)), writeFile(t, dir, "data", payload)
	run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "1024")
	run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile)
	fetch := func() {
		t.Helper()
		run("block", "get", "m", "--tokens-file", tokensFile, "--out", dir+"/got")
		if got, err := os.ReadFile(dir + "/got"); err != nil || !bytes.Equal(got, payload) {
			t.Fatalf("%d bytes were returned, and they differ from the written bytes (%v)", len(got), err)
		}
	}
	fetch()
	for i, k := range links {
		c, err := k.Counters()
		if err != nil {
			t.Fatal(err)
		}
		if least := uint64(len(payload) / 4); c.SentBytes < least || c.ReceivedBytes < least {
			t.Errorf("link %d carried %d bytes to the node and %d from it, of %d each way; want a quarter at least", i, c.SentBytes, c.ReceivedBytes, len(payload))
		}
	}
	if err := links[1].SetUp(false); err != nil {
		t.Fatal(err)
	}
	fetch()
	// The node checks its interfaces periodically.
	const asked = 200
	for i := 0; !strings.Contains(run("status"), "has no carrier"); i++ {
		if i == asked {
			t.Fatalf("after %d requests the node does not report that its second NIC is down:\n%s", asked, run("status"))
		}
	}
	if log := node.Log(); !strings.Contains(log, fmt.Sprintf("%q:%q", "data_provider", "tcp")) {
		t.Errorf("the log does not name the provider:\n%s", log)
	}
}
