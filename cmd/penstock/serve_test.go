package main

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/cluster"
)

// startProcess runs serve in a separate process.
func startProcess(t *testing.T, data string, more ...string) *process {
	t.Helper()
	p, err := cluster.StartProcess(t.Context(), cluster.ProcessOptions{Name: "the node", Args: append(small(data), more...), Env: append(os.Environ(), childEnv)})
	if err != nil {
		t.Fatal(err)
	}
	return &process{p}
}

// alone runs serve in a separate process until the test ends. doctor compares the memory of that
// process with its budget; the process of the tests has the memory of all of them.
func alone(t *testing.T, data string, more ...string) *served {
	t.Helper()
	p := startProcess(t, data, more...)
	t.Cleanup(func() {
		if err := p.Stop(); err != nil {
			t.Error(err)
		}
	})
	return p.client(t)
}

// process is a node in a separate process.
type process struct{ *cluster.Process }

func (p *process) client(t testing.TB) *served { return &served{t: t, ready: p.Ready} }

// prompt makes the files of a prompt of n blocks of 8 KiB, and the namespace m.
func prompt(t testing.TB, s *served, dir string, blocks int) (tokensFile, dataFile string) {
	t.Helper()
	s.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "1024").must(t)
	return writeFile(t, dir, "tokens", tokens(1, 4*blocks)), writeFile(t, dir, "data", bytesOf(1, blocks*8192))
}

// fetchSame fails unless the whole prompt is returned as it was written.
func fetchSame(t testing.TB, s *served, dir, tokensFile, dataFile string) {
	t.Helper()
	s.run("block", "get", "m", "--tokens-file", tokensFile, "--out", dir+"/got").must(t)
	got, err := os.ReadFile(dir + "/got")
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile(dataFile)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Fatal("the returned bytes differ from the written bytes")
	}
}

// TestKillKeepsAcknowledged: with durability sync, acknowledged blocks are present after SIGKILL of
// a separate process.
func TestKillKeepsAcknowledged(t *testing.T) {
	testkit.VerifyNone(t)
	dir := t.TempDir()
	node := startProcess(t, dir+"/volume", "--durability", "sync")
	tokensFile, dataFile := prompt(t, node.client(t), dir, 12)
	node.client(t).run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
	if err := node.Kill(); err != nil {
		t.Fatal(err)
	}
	again := startProcess(t, dir+"/volume", "--durability", "sync")
	fetchSame(t, again.client(t), dir, tokensFile, dataFile)
	if err := again.Stop(); err != nil {
		t.Fatal(err)
	}
	check := decode[checked](t, penstock(t, "", nil, "store", "check", "--data", dir+"/volume", "--verify", "--format", "json"))
	if check.Blocks != 12 || check.Verified != 12 || len(check.Findings) != 0 {
		t.Fatalf("check after the kill: %+v", check)
	}
}

// TestTermDrains: SIGTERM ends a process with code 0 after a sync, and the log records the steps.
func TestTermDrains(t *testing.T) {
	testkit.VerifyNone(t)
	dir := t.TempDir()
	node := startProcess(t, dir+"/volume")
	tokensFile, dataFile := prompt(t, node.client(t), dir, 3)
	node.client(t).run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
	if err := node.Stop(); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"msg":"draining"`, `"msg":"stopped"`} {
		if !strings.Contains(node.Log(), want) {
			t.Errorf("the log does not contain %s:\n%s", want, node.Log())
		}
	}
	s := startServed(t, dir+"/volume")
	fetchSame(t, s, dir, tokensFile, dataFile)
	if r := s.stop(); r.code != exitOK {
		t.Fatalf("exit %d\n%s", r.code, r.err)
	}
}

// TestSecondSignalEndsAtOnce: a second signal ends a draining node at once.
func TestSecondSignalEndsAtOnce(t *testing.T) {
	testkit.VerifyNone(t)
	node := startProcess(t, t.TempDir()+"/volume", "--drain-timeout", "1h")
	// A silent connection keeps the drain from ending.
	hold, err := net.Dial("tcp", node.Ready.Listen)
	if err != nil {
		t.Fatal(err)
	}
	defer hold.Close()
	// Connections are accepted in order: after a response to a later one, the drain waits for this
	// one.
	node.client(t).run("status").must(t)
	// Pending signals of the same kind are merged, so the signal is repeated until the process has
	// ended.
	again := time.NewTicker(10 * time.Millisecond)
	defer again.Stop()
	for {
		select {
		case <-node.Over():
			err := node.Err()
			if err == nil || !strings.Contains(node.Log(), "second signal") {
				t.Errorf("it ended with %v\n%s", err, node.Log())
			}
			return
		case <-again.C:
			if err := node.Signal(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestSecondOwnerIsRefused: a second process on a volume is refused with an error that identifies
// the first process.
func TestSecondOwnerIsRefused(t *testing.T) {
	dir := t.TempDir()
	startServed(t, dir+"/volume")
	s, r := tryServed(t, nil, small(dir+"/volume")...)
	if s != nil {
		t.Fatal("two nodes serve one volume")
	}
	want := []string{"is in use by", "pid " + itoa(os.Getpid())}
	r2 := penstock(t, "", nil, small(dir+"/volume")...)
	for _, w := range want {
		if r2.code != exitFailed || !strings.Contains(r2.err, w) {
			t.Errorf("exit %d, %q not in %s%s", r2.code, w, r2.err, r.err)
		}
	}
}

func itoa(n int) string { return big.NewInt(int64(n)).String() }

// TestOtherFormatVersionIsRefused: a superblock of another version is reported as such, and the
// volume is not changed.
func TestOtherFormatVersionIsRefused(t *testing.T) {
	dir := t.TempDir()
	s := startServed(t, dir+"/volume")
	if r := s.stop(); r.code != exitOK {
		t.Fatal(r.err)
	}
	path := filepath.Join(dir, "volume", ondisk.SuperblockName)
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for at := 0; at < len(raw); at += ondisk.Page {
		record := raw[at : at+ondisk.Page]
		binary.LittleEndian.PutUint32(record[16:], ondisk.Version+1)
		binary.LittleEndian.PutUint64(record[8:], xxh3.Hash(record[16:]))
	}
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	r := penstock(t, "", nil, small(dir+"/volume")...)
	if r.code != exitFailed || !strings.Contains(r.err, "version") {
		t.Fatalf("exit %d\n%s", r.code, r.err)
	}
	if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, raw) {
		t.Fatalf("the superblock was changed (%v)", err)
	}
	inspect := penstock(t, "", nil, "store", "inspect", "--data", dir+"/volume")
	if inspect.code != exitOK || !strings.Contains(inspect.out, "version") {
		t.Fatalf("inspect: exit %d\n%s%s", inspect.code, inspect.out, inspect.err)
	}
}

// TestLostIndexIsRebuilt: without its index a node rebuilds the index before it serves, for any
// order of the volumes.
func TestLostIndexIsRebuilt(t *testing.T) {
	dir := t.TempDir()
	a, b := dir+"/a", dir+"/b"
	s := startServed(t, a+","+b)
	tokensFile, dataFile := prompt(t, s, dir, 40)
	s.run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
	s.stop()
	s = startServed(t, b+","+a)
	fetchSame(t, s, dir, tokensFile, dataFile)
	s.stop()
	if err := os.RemoveAll(a + "/index"); err != nil {
		t.Fatal(err)
	}
	s = startServed(t, a+","+b)
	fetchSame(t, s, dir, tokensFile, dataFile)
	if !strings.Contains(s.log.String(), "index rebuilt") {
		t.Errorf("the log does not report that the index was rebuilt:\n%s", s.log)
	}
}

// TestDamagedCatalogueIsRefused: a volume without an intact catalogue is refused with advice, for
// each way to lose the catalogue. It is served again after a repair.
func TestDamagedCatalogueIsRefused(t *testing.T) {
	volume := t.TempDir() + "/volume"
	startServed(t, volume).stop()
	path := filepath.Join(volume, ondisk.CatalogueName)
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, damage := range []func() error{
		func() error { return os.Truncate(path, 5) },
		func() error { return os.Remove(path) },
	} {
		if err := damage(); err != nil {
			t.Fatal(err)
		}
		r := penstock(t, "", nil, small(volume)...)
		if want := "volume " + volume + ": "; r.code != exitFailed || !strings.Contains(r.err, want) || !strings.Contains(r.err, "restore it, or empty the directory") {
			t.Errorf("exit %d, %q", r.code, r.err)
		}
	}
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	startServed(t, volume)
}

// TestVolumeInMemory: a node logs that a volume does not survive a restart of the machine.
func TestVolumeInMemory(t *testing.T) {
	memory, err := os.MkdirTemp("/dev/shm", "penstock-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(memory); err != nil {
			t.Error(err)
		}
	})
	s := startServed(t, memory)
	s.stop()
	if log := s.log.String(); !strings.Contains(log, "lost when the machine restarts") || !strings.Contains(log, memory) {
		t.Errorf("the log does not report that the volume is in memory:\n%s", log)
	}
}

// TestOneDirectoryTwice: a directory that is given under two names is reported as such, and not as
// in use by another process.
func TestOneDirectoryTwice(t *testing.T) {
	dir := t.TempDir()
	if err := os.Symlink(dir, dir+".link"); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(dir + ".link")
	r := penstock(t, "", nil, small(dir+","+dir+".link")...)
	if want := "volume " + dir + ".link: it is the same directory as " + dir; r.code != exitFailed || !strings.Contains(r.err, want) {
		t.Errorf("exit %d, %q without %q", r.code, r.err, want)
	}
}

// TestForeignIndexIsRefused: the index of another node is refused, because serving with it would
// drop every block. A rebuilt index has all blocks.
func TestForeignIndexIsRefused(t *testing.T) {
	dir := t.TempDir()
	mine, other := dir+"/mine", dir+"/other"
	s := startServed(t, mine)
	tokensFile, dataFile := prompt(t, s, dir, 4)
	s.run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
	s.stop()
	s = startServed(t, other)
	s.run("ns", "create", "n", "--layers", "1", "--block-tokens", "4", "--token-bytes", "1024").must(t)
	s.stop()
	if err := errors.Join(os.RemoveAll(mine+"/index"), os.Rename(other+"/index", mine+"/index")); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{small(mine), {"store", "check", "--data", mine, "--io", "posix"}} {
		r := penstock(t, "", nil, args...)
		if r.code != exitFailed || !strings.Contains(r.err, "index of another store") || !strings.Contains(r.err, "rebuild-index --data "+mine) {
			t.Errorf("%s: exit %d, %q", args[0], r.code, r.err)
		}
	}
	penstock(t, "", nil, "store", "rebuild-index", "--data", mine, "--io", "posix").must(t)
	s = startServed(t, mine)
	fetchSame(t, s, dir, tokensFile, dataFile)
}

// TestDamageIsFound: changed bytes on the disk are a miss, and verify, scrub and check report them.
func TestDamageIsFound(t *testing.T) {
	dir := t.TempDir()
	s := startServed(t, dir+"/volume")
	tokensFile, dataFile := prompt(t, s, dir, 4)
	s.run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
	s.stop()
	flip(t, dir+"/volume/segment-00000000", bytesOf(1, 4*8192)[2*8192:][:64])
	check := penstock(t, "", nil, "store", "check", "--data", dir+"/volume", "--io", "posix", "--verify")
	if check.code != exitFailed || !strings.Contains(check.out, "exact-or-miss") {
		t.Errorf("check: exit %d\n%s%s", check.code, check.out, check.err)
	}
	s = alone(t, dir+"/volume")
	get := s.run("block", "get", "m", "--tokens-file", tokensFile, "--out", dir+"/got")
	if get.code != exitMiss || !strings.Contains(get.out, "2 of 4 blocks") {
		t.Errorf("get: exit %d\n%s%s", get.code, get.out, get.err)
	}
	got, err := os.ReadFile(dir + "/got")
	if err != nil || !bytes.Equal(got, bytesOf(1, 4*8192)[:2*8192]) {
		t.Errorf("the fetched file is not the prefix before the damage (%d bytes, %v)", len(got), err)
	}
	if l := s.diagnose()["state"]; !strings.Contains(l.Hint, "corrupt blocks were found") {
		t.Errorf("doctor: %+v", l)
	}
}

// flip changes one byte of a file, at the position of the given bytes.
func flip(t *testing.T, path string, at []byte) {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	i := bytes.Index(raw, at)
	if i < 0 {
		t.Fatalf("%s does not hold the searched bytes", path)
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte{raw[i+5] ^ 1}, int64(i+5)); err != nil {
		t.Fatal(err)
	}
}

func TestTokenAndTLS(t *testing.T) {
	dir := t.TempDir()
	token := writeFile(t, dir, "token", []byte("0123456789abcdef0123\n"))
	ca, cert, key := certificates(t, dir)
	otherCA, _, _ := certificates(t, t.TempDir())
	s := alone(t, dir+"/volume", "--auth-token-file", token, "--auth-tls-cert", cert, "--auth-tls-key", key, "--auth-client-ca", ca)
	tokensFile, dataFile := prompt2(t, dir)
	secure := []string{"--ca", ca, "--cert", cert, "--key", key}
	for _, tc := range []struct {
		name string
		args []string
		code int
		say  string
	}{
		{"plain text", nil, exitFailed, "does the node want TLS? Give --ca, or --tls"},
		{"another CA", []string{"--ca", otherCA, "--cert", cert, "--key", key, "--token-file", token}, exitFailed, "--ca must name the CA"},
		{"the system's CAs", []string{"--tls", "--cert", cert, "--key", key, "--token-file", token}, exitFailed, "--ca must name the CA"},
		{"no certificate", []string{"--ca", ca, "--token-file", token}, exitFailed, "give one with --cert and --key"},
		{"no token", secure, exitFailed, "bearer token"},
		{"all", append(secure, "--token-file", token), exitOK, ""},
	} {
		r := s.run(append([]string{"status", "--timeout", "10s"}, tc.args...)...)
		if r.code != tc.code || !strings.Contains(r.err, tc.say) {
			t.Errorf("%s: exit %d\n%s", tc.name, r.code, r.err)
		}
	}
	all := append(secure, "--token-file", token)
	s.run(append([]string{"ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "1024"}, all...)...).must(t)
	s.run(append([]string{"block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile}, all...)...).must(t)
	s.diagnose(all...)
}

// TestTLSIsTheNodesChoice: the same client flags work with an encrypted and with a plain data
// plane. The errors of a node without TLS and of one with an expired certificate differ.
func TestTLSIsTheNodesChoice(t *testing.T) {
	testkit.Long(t, "starts many nodes")
	dir := t.TempDir()
	ca, cert, key := certificates(t, dir)
	tokensFile, dataFile := prompt2(t, dir)
	for mode, want := range map[string]string{"auto": `"data_tls":true`, "on": `"data_tls":true`, "off": `"data_tls":false`} {
		s := startServed(t, dir+"/"+mode, "--auth-tls-cert", cert, "--auth-tls-key", key, "--data-plane-tls", mode)
		if !strings.Contains(s.log.String(), want) {
			t.Errorf("%s: %s is not in\n%s", mode, want, s.log.String())
		}
		s.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "1024", "--ca", ca).must(t)
		s.run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile, "--ca", ca).must(t)
		s.run("block", "verify", "m", "--tokens-file", tokensFile, "--ca", ca).must(t)
	}
	hint := func(s *served, say string, args ...string) {
		t.Helper()
		for _, command := range [][]string{{"status"}, {"block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile}} {
			r := s.run(append(command, args...)...)
			if r.code != exitFailed || !strings.Contains(r.err, say) {
				t.Errorf("%v %v: exit %d; want an error with %q\n%s", command, args, r.code, say, r.err)
			}
		}
	}
	hint(startServed(t, dir+"/plain"), "the node does not use TLS", "--ca", ca)
	old := t.TempDir()
	oldCA, oldCert, oldKey := certificatesUntil(t, old, time.Now().Add(-time.Minute))
	hint(startServed(t, dir+"/old", "--auth-tls-cert", oldCert, "--auth-tls-key", oldKey), "has expired", "--ca", oldCA)
}

func prompt2(t testing.TB, dir string) (tokensFile, dataFile string) {
	t.Helper()
	return writeFile(t, dir, "tokens", tokens(1, 8)), writeFile(t, dir, "data", bytesOf(1, 2*8192))
}

// certificates writes the certificate of an authority, and one that it issued with its key.
func certificates(t testing.TB, dir string) (ca, cert, key string) {
	t.Helper()
	return certificatesUntil(t, dir, time.Now().Add(time.Hour))
}

func certificatesUntil(t testing.TB, dir string, end time.Time) (ca, cert, key string) {
	t.Helper()
	a := testkit.NewAuthority(t)
	crt, private := testkit.PairPEM(t, a.Issue(func(c *x509.Certificate) { c.NotAfter = end }))
	return writeFile(t, dir, "ca.pem", a.PEM), writeFile(t, dir, "cert.pem", crt), writeFile(t, dir, "key.pem", private)
}

func TestHealthAndMetrics(t *testing.T) {
	s := startServed(t, t.TempDir()+"/volume")
	client := &http.Client{Timeout: time.Minute}
	defer client.CloseIdleConnections()
	for path, want := range map[string]string{"/healthz": "ok", "/readyz": "serving", "/metrics": "penstock_", "/metrics/summary": "io=posix"} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+s.ready.HTTP+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		var body bytes.Buffer
		_, err = body.ReadFrom(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != http.StatusOK || !strings.Contains(body.String(), want) {
			t.Errorf("%s: %s, %v\n%.200s", path, resp.Status, err, body.String())
		}
	}
}

// TestCapacityIsHard: the volume and the index stay within the capacity when more blocks are
// written than fit.
func TestCapacityIsHard(t *testing.T) {
	dir := t.TempDir()
	s := startServed(t, dir+"/volume", "--capacity", "32MiB")
	s.run("trace", "replay", "sample", "--requests", "10", "--layers", "4", "--token-bytes", "128", "--concurrency", "2", "--window", "4MiB").must(t)
	used, err := treeBytes(dir + "/volume")
	if err != nil {
		t.Fatal(err)
	}
	if used > 32<<20 {
		t.Errorf("%s on disk; the capacity is 32 MiB", size(used))
	}
}

func TestCapacityOfOneStart(t *testing.T) {
	for _, tc := range []struct{ capacity, store, index int64 }{
		{16 << 20, 12 << 20, 4 << 20},
		{64 << 20, 48 << 20, 16 << 20},
		{100 << 30, 98 << 30, 2 << 30},
	} {
		cfg := cfgWith(tc.capacity)
		got, err := splitCapacity(cfg, nil)
		if err != nil || got.storeBytes != tc.store || got.indexBytes != tc.index || got.capacityBytes != tc.capacity {
			t.Errorf("%d: %+v, %v", tc.capacity, got, err)
		}
	}
}

// TestCapacityBeyondTheDisk: a capacity above the disk's is reported with the disk's size. A
// capacity that fits is not reported.
func TestCapacityBeyondTheDisk(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct {
		capacity string
		warns    bool
	}{{"4096TiB", true}, {"64MiB", false}} {
		s := startServed(t, dir+"/volume", "--capacity", c.capacity, "--segment", "4MiB")
		s.stop()
		if log := s.log.String(); strings.Contains(log, "exceeds the free space of the file systems") != c.warns {
			t.Errorf("capacity %s:\n%s", c.capacity, log)
		}
	}
}

// TestEventsFollow: events are printed as they happen, and an interrupted command exits normally.
func TestEventsFollow(t *testing.T) {
	dir := t.TempDir()
	s := startServed(t, dir+"/volume")
	tokensFile, dataFile := prompt(t, s, dir, 2)
	s.run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
	s.run("ns", "bump-epoch", "m").must(t)
	// An unknown number is from another run, so all stored events follow after a gap.
	r := s.run("events", "--after", "99999", "--count", "3", "--format", "json")
	for _, want := range []string{`"kind":"gap"`, `"kind":"block_stored"`, `"kind":"all_blocks_cleared"`} {
		if r.code != exitOK || !strings.Contains(r.out, want) {
			t.Errorf("exit %d, no %s in\n%s%s", r.code, want, r.out, r.err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if r := penstockIn(ctx, "", []string{"PENSTOCK_SERVER=" + s.ready.Listen}, "events"); r.code != exitOK && r.code != exitFailed {
		t.Errorf("interrupted: exit %d\n%s", r.code, r.err)
	}
}

func TestNamespacesComplete(t *testing.T) {
	s := startServed(t, t.TempDir()+"/volume")
	s.run("ns", "create", "llama", "--layers", "2", "--block-tokens", "4", "--token-bytes", "1024").must(t)
	for _, line := range [][]string{{"ns", "show", ""}, {"block", "get", "l"}, {"evict", "--namespace", ""}} {
		r := s.run(append([]string{"__complete"}, line...)...)
		if !strings.Contains(r.must(t), "llama") {
			t.Errorf("%v completes to\n%s%s", line, r.out, r.err)
		}
	}
	if r := s.run("completion", "bash"); !strings.Contains(r.must(t), "penstock") {
		t.Error("no bash completion")
	}
}

// TestWarnOfMetrics: a node whose metrics other machines can read logs a warning at its start, and
// one whose metrics only this machine can read does not.
func TestWarnOfMetrics(t *testing.T) {
	for addr, want := range map[string]bool{
		":7422": true, "0.0.0.0:7422": true, "[::]:7422": true, "10.0.0.7:7422": true, "node7:7422": true,
		"127.0.0.1:7422": false, "[::1]:7422": false, "localhost:7422": false,
	} {
		var log bytes.Buffer
		warnOfMetrics(slog.New(slog.NewTextHandler(&log, nil)), addr, false)
		if got := strings.Contains(log.String(), "level=WARN") && strings.Contains(log.String(), "http="); got != want {
			t.Errorf("%s: %q; want a warning: %v", addr, log.String(), want)
		}
	}
}
