package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testetcd"
	"github.com/penstock-kv/penstock/server/config"
)

// keysText returns a text of keys with the given ids.
func keysText(ids ...string) []byte {
	var b bytes.Buffer
	for _, id := range ids {
		fmt.Fprintf(&b, "%s %s\n", id, base64.StdEncoding.EncodeToString(bytesOf(id[len(id)-1], 32)))
	}
	return b.Bytes()
}

// findIn returns the names of the files below a directory that contain the bytes.
func findIn(t *testing.T, dir string, wanted []byte) (names []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		raw, err := os.ReadFile(path)
		if bytes.Contains(raw, wanted) {
			names = append(names, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// keyUse returns the keys of a node, as "id blocks newest".
func keyUse(t *testing.T, s *served) string {
	t.Helper()
	var all []string
	for _, k := range decode[struct{ Keys []*pb.KeyStatus }](t, s.run("status", "--format", "json")).Keys {
		all = append(all, fmt.Sprintf("%s %d %v", k.GetId(), k.GetBlocks(), k.GetNewest()))
	}
	return strings.Join(all, ", ")
}

// TestEncryptedNode: the blocks of a node with keys are not on the disk in plain, the node does not start
// without the keys, and a reload takes a new key and refuses to remove one that blocks need.
func TestEncryptedNode(t *testing.T) {
	dir := t.TempDir()
	volume := dir + "/volume"
	keys := writeFile(t, dir, "keys", keysText("k1"))
	s := startServed(t, volume, "--encryption-keys-file", keys)
	tokensFile, dataFile := prompt(t, s, dir, 4)
	s.run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
	fetchSame(t, s, dir, tokensFile, dataFile)
	if got := keyUse(t, s); got != "k1 4 true" {
		t.Errorf("keys: %s", got)
	}

	writeFile(t, dir, "keys", keysText("k2"))
	if r := s.run("config", "reload"); r.code != exitFailed || !strings.Contains(r.err, "nothing was applied") || !strings.Contains(r.err, "key k1 encrypts new blocks") {
		t.Errorf("reload without the key in use: exit %d\n%s", r.code, r.err)
	}
	writeFile(t, dir, "keys", keysText("k1", "k2"))
	if r := s.run("config", "diff"); !strings.Contains(r.out, "encryption.keys_file") || !strings.Contains(r.out, "the newest is k2") {
		t.Errorf("diff: %s", r.out)
	}
	s.run("config", "reload").must(t)
	if got := keyUse(t, s); got != "k1 4 false, k2 0 true" {
		t.Errorf("keys after the reload: %s", got)
	}
	status := s.run("status").must(t)
	if !strings.Contains(status, "encrypts new blocks") || !strings.Contains(status, "in use") {
		t.Errorf("status:\n%s", status)
	}
	writeFile(t, dir, "keys", keysText("k2"))
	if r := s.run("config", "reload"); r.code != exitFailed || !strings.Contains(r.err, "4 blocks are encrypted with key k1") {
		t.Errorf("reload without a key that blocks need: exit %d\n%s", r.code, r.err)
	}
	fetchSame(t, s, dir, tokensFile, dataFile)
	s.stop()
	for _, id := range []string{"k1", "k2"} {
		secret := strings.Fields(string(keysText(id)))[1]
		if strings.Contains(s.log.String(), secret[:20]) {
			t.Errorf("the log has the secret of %s", id)
		}
	}
	for i := range 4 {
		if names := findIn(t, volume, bytesOf(1, 4*8192)[i*8192:][:32]); len(names) > 0 {
			t.Errorf("block %d is in %v in plain", i, names)
		}
	}

	for _, c := range []struct {
		args []string
		want string
	}{
		{nil, "is encrypted, its newest key is k2"},
		{[]string{"--encryption-keys-file", keys}, "4 blocks are encrypted with key k1, which is not given"},
		{[]string{"--encryption-keys-file", dir + "/none"}, "encryption.keys_file"},
		{[]string{"--encryption-keys-command", "false"}, "exit status 1"},
	} {
		if r := penstock(t, "", nil, append(small(volume), c.args...)...); r.code != exitFailed || !strings.Contains(r.err, c.want) {
			t.Errorf("serve %v: exit %d without %q\n%s", c.args, r.code, c.want, r.err)
		}
	}
	writeFile(t, dir, "keys", keysText("k1", "k2"))
	offline := func(args ...string) result {
		return penstock(t, "", nil, append([]string{"store"}, append(args, "--data", volume)...)...)
	}
	if r := offline("check", "--verify", "--io", "posix", "--encryption-keys-file", keys); r.code != exitOK || !strings.Contains(r.out, "all invariants hold") {
		t.Errorf("check: exit %d\n%s%s", r.code, r.out, r.err)
	}
	if r := offline("check", "--io", "posix"); r.code != exitFailed || !strings.Contains(r.err, "is encrypted") {
		t.Errorf("check without keys: exit %d\n%s", r.code, r.err)
	}
	if r := offline("rebuild-index", "--verify", "--io", "posix", "--encryption-keys-file", keys); r.code != exitOK || !strings.Contains(r.out, "4 blocks") {
		t.Errorf("rebuild-index: exit %d\n%s%s", r.code, r.out, r.err)
	}
	if r := offline("inspect", "--segment", "0", "--slot", "0", "--encryption-keys-file", keys); r.code != exitOK || !strings.Contains(r.out, "every layer has its checksum") {
		t.Errorf("inspect: exit %d\n%s%s", r.code, r.out, r.err)
	}
	if r := offline("inspect", "--segment", "0", "--slot", "0"); r.code != exitOK || !strings.Contains(r.out, "encrypted with key k1, which is not given") {
		t.Errorf("inspect without keys: exit %d\n%s%s", r.code, r.out, r.err)
	}
	s = startServed(t, volume, "--encryption-keys-command", "cat,"+keys)
	fetchSame(t, s, dir, tokensFile, dataFile)
}

// TestRewrittenNode: a reload that gives a node a rate rewrites the blocks of an older key, which another reload can then remove. The node
// starts without that key, and has the blocks.
func TestRewrittenNode(t *testing.T) {
	dir := t.TempDir()
	keys := writeFile(t, dir, "keys", keysText("k1"))
	settings := func(rate string) string {
		return writeFile(t, dir, "penstock.yaml", fmt.Appendf(nil, "encryption: {keys_file: %s, rewrite_rate: %s}\n", keys, rate))
	}
	s := startServed(t, dir+"/volume", "--config", settings("0B"))
	tokensFile, dataFile := prompt(t, s, dir, 4)
	s.run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
	writeFile(t, dir, "keys", keysText("k1", "k2"))
	s.run("config", "reload").must(t)
	if got := keyUse(t, s); got != "k1 4 false, k2 0 true" {
		t.Errorf("keys after the rotation: %s", got)
	}
	settings("64MiB")
	if got := s.run("config", "reload").must(t); !strings.Contains(got, "encryption.rewrite_rate") {
		t.Errorf("reload: %s", got)
	}
	awaitTrue(t, "the blocks have the new key", func() bool { return keyUse(t, s) == "k1 0 false, k2 4 true" })
	if status := s.run("status").must(t); !strings.Contains(status, "can be removed") {
		t.Errorf("status:\n%s", status)
	}
	writeFile(t, dir, "keys", keysText("k2"))
	s.run("config", "reload").must(t)
	fetchSame(t, s, dir, tokensFile, dataFile)
	s.stop()
	s = startServed(t, dir+"/volume", "--config", dir+"/penstock.yaml")
	fetchSame(t, s, dir, tokensFile, dataFile)
	if got := keyUse(t, s); got != "k2 4 true" {
		t.Errorf("keys after a restart: %s", got)
	}
}

// TestEpochKeysOfANode: the setting encryption.epoch_keys encrypts new blocks with the secret of their epoch. After a bump, no
// command with the keys reads the old slots, which are still on the volume. The status counts blocks without a secret, and the blocks of the
// new epoch stay readable when the setting is removed.
func TestEpochKeysOfANode(t *testing.T) {
	dir := t.TempDir()
	volume := dir + "/volume"
	keys := writeFile(t, dir, "keys", keysText("k1"))
	settings := func(epochKeys string) string {
		return writeFile(t, dir, "penstock.yaml", fmt.Appendf(nil, "encryption: {keys_file: %s%s}\n", keys, epochKeys))
	}
	s := startServed(t, volume, "--config", settings(", epoch_keys: true"))
	tokensFile, dataFile := prompt(t, s, dir, 4)
	put := func() {
		t.Helper()
		s.run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
		fetchSame(t, s, dir, tokensFile, dataFile)
	}
	status := func(want string) {
		t.Helper()
		if got := s.run("status").must(t); !regexp.MustCompile(want).MatchString(got) {
			t.Errorf("status:\n%s\nwant %s", got, want)
		}
	}
	// slots returns the verdicts about the slots of an epoch that have content.
	slots := func(epoch int) (verdicts []string) {
		t.Helper()
		for slot := range 4 {
			got := s.run("store", "inspect", "--data", volume, "--encryption-keys-file", keys, "--segment", "0", "--slot", fmt.Sprint(slot)).must(t)
			if _, verdict, ok := strings.Cut(got, "verdict"); ok && strings.Contains(got, fmt.Sprintf("epoch %d ", epoch)) {
				verdicts = append(verdicts, strings.TrimSpace(verdict))
			}
		}
		return verdicts
	}
	put()
	status(`EPOCH KEYS +BLOCKS WITHOUT +BYTES WITHOUT\non +0 +0 B\n`)
	if got := slots(1); len(got) != 4 || got[0] != "every layer has its checksum" {
		t.Errorf("before the bump: %q", got)
	}
	s.run("ns", "bump-epoch", "m").must(t)
	if got := slots(1); len(got) != 4 || !strings.HasPrefix(got[0], "not readable: the catalogue of this volume has no secret of epoch 1") {
		t.Errorf("after the bump: %q", got)
	}
	put()
	s.stop()
	s = startServed(t, volume, "--config", settings(""))
	fetchSame(t, s, dir, tokensFile, dataFile)
	if got := s.run("status").must(t); strings.Contains(got, "EPOCH KEYS") {
		t.Errorf("status without the setting:\n%s", got)
	}
	s.run("ns", "bump-epoch", "m").must(t)
	put()
	s.stop()
	s = startServed(t, volume, "--config", settings(", epoch_keys: true"))
	status(`\non +4 +`)
	s.stop()
	bad := writeFile(t, dir, "bad.yaml", []byte("encryption: {epoch_keys: true}\n"))
	if r := s.run("serve", "--check", "--config", bad, "--data", volume); r.code == 0 || !strings.Contains(r.err, "encryption.epoch_keys") {
		t.Errorf("epoch_keys without keys: exit %d\n%s", r.code, r.err)
	}
}

// TestPendingErasures: an administrator who does not read the status finds the erasures that wait for a missing volume in the
// metrics and in the console, with the time at which the epoch ended, also after a restart, until the volume is back.
func TestPendingErasures(t *testing.T) {
	dir := t.TempDir()
	keys := writeFile(t, dir, "keys", keysText("k1"))
	config := writeFile(t, dir, "penstock.yaml", fmt.Appendf(nil, "data: [%s/a, %s/b]\ndegraded: true\nencryption: {keys_file: %s, epoch_keys: true}\n", dir, dir, keys))
	s := startServed(t, "", "--config", config)
	tokensFile, dataFile := prompt(t, s, dir, 20)
	s.run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
	web := gatewayClient(t, nil)
	open := func(path string) string {
		t.Helper()
		_, body := call(t, web, "GET", "http://"+s.ready.HTTP+path, "")
		return body
	}
	// check compares the metrics of the volumes and the faults of the console with the number of namespaces whose
	// erasure waits for the volume b. It returns the time that the status has.
	check := func(want int) (since time.Time) {
		t.Helper()
		metrics := open("/metrics")
		for volume, n := range map[string]int{"a": 0, "b": want} {
			count := regexp.MustCompile(fmt.Sprintf(`(?m)^penstock_volume_pending_erasures\{volume="%s/%s"\} %d$`, dir, volume, n))
			age := regexp.MustCompile(fmt.Sprintf(`(?m)^penstock_volume_pending_erasure_seconds\{volume="%s/%s"\} (.+)$`, dir, volume)).FindStringSubmatch(metrics)
			if !count.MatchString(metrics) || age == nil || (age[1] == "0") != (n == 0) {
				t.Errorf("volume %s without %d pending erasures: seconds %q in\n%s", volume, n, age, metrics)
			}
		}
		pending := decode[struct {
			EpochKeys *pb.EpochKeysStatus `json:"epoch_keys"`
		}](t, s.run("status", "--format", "json")).EpochKeys.GetPending()
		fault := fmt.Sprintf("it may have the secrets of ended epochs of %d namespace", want)
		if len(pending) != want {
			t.Errorf("status %v; want %d pending", pending, want)
		}
		awaitTrue(t, fmt.Sprintf("the console shows %d erasures", want), func() bool { // its pages show a state of up to a second ago
			page := open("/")
			if strings.Contains(page, "volume "+dir+"/a") {
				t.Errorf("a fault of the other volume:\n%s", page)
			}
			return strings.Contains(page, fault) == (want > 0) && strings.Contains(page, "erasure pending") == (want > 0)
		})
		list := decode[struct{ Pending []*pb.PendingErasure }](t, s.run("volume", "list", "--format", "json")).Pending
		if len(list) != want || want > 0 && (list[0].GetSinceUnixMs() != pending[0].GetSinceUnixMs() || list[0].GetNamespace() != "m") {
			t.Errorf("volume list has %v; status has %v", list, pending)
		}
		shown := s.run("volume", "list").must(t)
		if strings.Contains(shown, "to be erased") != (want > 0) {
			t.Errorf("volume list with %d pending erasures:\n%s", want, shown)
		}
		for _, e := range pending {
			since = time.UnixMilli(e.GetSinceUnixMs())
			line := fmt.Sprintf("%s/b: secrets of ended epochs of 1 namespace are still to be erased, since %s (m)", dir, since.UTC().Format(time.RFC3339))
			if !strings.Contains(shown, "\n  "+line) {
				t.Errorf("no line %q in\n%s", line, shown)
			}
			if stamp := since.UTC().Format(time.RFC3339); !strings.Contains(s.run("status").must(t), "pending since "+stamp+": "+dir+"/b") {
				t.Errorf("the status has no line of the volume since %s", stamp)
			}
		}
		return since
	}
	// examine compares the line of doctor with a state and a pattern. Doctor makes and deletes a namespace.
	examine := func(state, detail string) {
		t.Helper()
		if l := s.diagnose()["epoch keys"]; l.State != state || !regexp.MustCompile(detail).MatchString(l.Detail) {
			t.Errorf("doctor has %+v; want %s %s", l, state, detail)
		}
	}
	restart := func(change func() error) {
		t.Helper()
		s.stop()
		if err := change(); err != nil {
			t.Fatal(err)
		}
		s = startServed(t, "", "--config", config)
	}
	check(0)
	examine(layerOK, "^every erasure is complete$")
	restart(func() error { return os.Rename(dir+"/b", dir+"/away") })
	check(0)
	began := time.Now().Truncate(time.Millisecond)
	s.run("ns", "bump-epoch", "m").must(t)
	since := check(1)
	if since.Before(began) || since.After(time.Now()) {
		t.Errorf("the epoch ended at %v, after %v", since, began)
	}
	restart(func() error { return nil })
	if again := check(1); !again.Equal(since) {
		t.Errorf("pending since %v after a restart; want %v", again, since)
	}
	s.run("ns", "bump-epoch", "m").must(t)
	if again := check(1); !again.Equal(since) {
		t.Errorf("pending since %v after another bump; want the first one, %v", again, since)
	}
	examine(layerWarning, "^"+regexp.QuoteMeta(dir)+`/b: secrets of ended epochs of 1 namespace are still to be erased, since 20\d\d-\d\d-\d\dT\S+ \(m\)$`)
	restart(func() error { return os.Rename(dir+"/away", dir+"/b") })
	check(0)
}

// TestEpochKeysOfAdoptedVolumes: a node that is killed has shared volumes with the secrets of epochs. The node that adopts them by itself
// returns its blocks. An epoch that ends after the adoption, or while no node has the volumes, is erased from them: then no
// answer of the adopted node comes before the erasure.
func TestEpochKeysOfAdoptedVolumes(t *testing.T) {
	testkit.VerifyNone(t)
	for _, held := range []bool{true, false} {
		t.Run(fmt.Sprintf("held=%v", held), func(t *testing.T) {
			e, dir := testetcd.Start(t, 1), t.TempDir()
			volume, keys := dir+"/a", writeFile(t, dir, "keys", keysText("k1"))
			own := sharedOf(e, "a", volume, "--encryption-keys-file", keys, "--encryption-epoch-keys")
			a := startProcess(t, "", own...)
			start := func(adopts bool) *served {
				b := startServed(t, dir+"/b", slowLease(e, "b", "--encryption-keys-file", keys, fmt.Sprintf("--cluster-adopt=%v", adopts))...)
				awaitTrue(t, "node b serves", serving(t, b))
				return b
			}
			b := start(held)
			awaitTrue(t, "node a serves", serving(t, a.client(t)))
			tokensFile, dataFile := prompt(t, b, dir, 20)
			eventually(t, a.client(t), "block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile)
			// readable returns the numbers of slots of an epoch that the keys decrypt with the secrets on the volume, and
			// that they do not.
			readable := func(epoch int) (yes, no int) {
				t.Helper()
				for slot := range 32 {
					r := b.run("store", "inspect", "--data", volume, "--encryption-keys-file", keys, "--segment", "0", "--slot", fmt.Sprint(slot))
					_, verdict, ok := strings.Cut(r.out, "verdict")
					switch {
					case !ok || !strings.Contains(r.out, fmt.Sprintf("epoch %d ", epoch)):
					case strings.Contains(verdict, "every layer has its checksum"):
						yes++
					case strings.Contains(verdict, fmt.Sprintf("the catalogue of this volume has no secret of epoch %d ", epoch)):
						no++
					default:
						t.Errorf("slot %d: %s", slot, r.out)
					}
				}
				return yes, no
			}
			want := func(when string, epoch, yes, no int) {
				t.Helper()
				if y, n := readable(epoch); y != yes || n != no {
					t.Errorf("%s: %d slots of epoch %d can be read and %d cannot; want %d and %d", when, y, epoch, n, yes, no)
				}
			}
			if err := a.Kill(); err != nil {
				t.Fatal(err)
			}
			if !held {
				awaitTrue(t, "the lease has ended", func() bool {
					return strings.Contains(b.run("volume", "adopt", volume, "--dry-run").must(t), "none: the volumes can be adopted")
				})
				eventually(t, b, "ns", "bump-epoch", "m")
				want("no node has the volumes", 1, 20, 0)
				b.stop()
				b = start(true)
			}
			guest := adoptedClient(t, a, b)
			if held {
				fetchEventually(t, guest, dir, tokensFile, dataFile)
				want("after the adoption", 1, 20, 0)
				eventually(t, b, "ns", "bump-epoch", "m")
			}
			// The bump waits for all members, and an adopted node serves when it has applied the cluster's epochs.
			want("the adopted node serves the next epoch", 1, 0, 20)
			if r := guest.run("block", "get", "m", "--tokens-file", tokensFile, "--out", dir+"/old"); r.code == exitOK {
				t.Errorf("blocks of the ended epoch are returned:\n%s", r.out)
			}
			if names, err := filepath.Glob(volume + "/catalogue*"); err != nil || !slices.Equal(names, []string{volume + "/catalogue-00000002"}) {
				t.Errorf("catalogues %q, %v; want that of the new owner only", names, err)
			}
			eventually(t, guest, "block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile)
			fetchEventually(t, guest, dir, tokensFile, dataFile)
			status := func(s *served) {
				t.Helper()
				if got := s.run("status").must(t); !regexp.MustCompile(`\non +0 +0 B\n`).MatchString(got) || strings.Contains(got, "pending") {
					t.Errorf("epoch keys are on and no erasure is pending; status:\n%s", got)
				}
			}
			status(guest)
			back := alone(t, "", own...)
			awaitTrue(t, "the node has its volumes back", func() bool { return states(t, b) == "a:serving b:serving" && serving(t, back)() })
			fetchEventually(t, back, dir, tokensFile, dataFile)
			status(back)
			if yes, _ := readable(1); yes > 0 {
				t.Errorf("%d slots of the ended epoch can be read", yes)
			}
			b.stop()
		})
	}
}

// TestKeysCommand: the error of a command has its standard error and not its output.
func TestKeysCommand(t *testing.T) {
	secret := string(keysText("k1"))
	dir := t.TempDir()
	good := writeFile(t, dir, "good", []byte(secret))
	script := func(text string) []string { return []string{"sh", "-c", text} }
	for _, c := range []struct {
		name    string
		args    []string
		timeout time.Duration
		want    string
	}{
		{"good", []string{"cat", good}, time.Minute, ""},
		{"fails", script("cat " + good + "; echo no access >&2; exit 3"), time.Minute, "exit status 3; standard error: no access"},
		{"hangs", script("cat " + good + "; exec sleep 600"), 50 * time.Millisecond, "not finished within encryption.keys_timeout 50ms"},
		{"absent", []string{dir + "/absent"}, time.Minute, "no such file"},
		{"too much", script("head -c 100000 /dev/zero"), time.Minute, "printed more than"},
		{"no keys", script("echo " + strings.Fields(secret)[1]), time.Minute, "line 1 has 1 words"},
	} {
		log := &bytes.Buffer{}
		ring, err := readVolumeKeys(context.Background(), config.Encryption{KeysCommand: c.args, KeysTimeout: config.Duration(c.timeout)}, slog.New(slog.NewTextHandler(log, nil)))
		if c.want == "" {
			if err != nil || ring.Newest().ID() != "k1" {
				t.Errorf("%s: %v, %v", c.name, ring, err)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q", c.name, err, c.want)
		}
		if text := fmt.Sprint(err, log); strings.Contains(text, strings.Fields(secret)[1][:16]) {
			t.Errorf("%s: the error or the log has the secret: %s", c.name, text)
		}
	}
}

// TestKeysCommandEndsWithItsCaller: when the caller of a reload no longer waits, the error names this reason, and not
// encryption.keys_timeout.
func TestKeysCommandEndsWithItsCaller(t *testing.T) {
	hangs := config.Encryption{KeysCommand: []string{"sleep", "600"}, KeysTimeout: config.Duration(time.Hour)}
	deadline, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	left, leave := context.WithCancel(t.Context())
	leave()
	for _, ctx := range []context.Context{deadline, left} {
		_, err := readVolumeKeys(ctx, hangs, slog.New(slog.DiscardHandler))
		if !errors.Is(err, ctx.Err()) || !strings.Contains(err.Error(), "the caller no longer waits") || strings.Contains(err.Error(), "keys_timeout") {
			t.Errorf("%v; want the end of the caller, %v", err, ctx.Err())
		}
	}
}

// TestKeysFileMode: a file of keys that every user can read is reported.
func TestKeysFileMode(t *testing.T) {
	path := writeFile(t, t.TempDir(), "keys", keysText("k1"))
	for _, mode := range []fs.FileMode{0o600, 0o644} {
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		var log bytes.Buffer
		if _, err := readVolumeKeys(t.Context(), config.Encryption{KeysFile: path}, slog.New(slog.NewTextHandler(&log, nil))); err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(log.String(), "chmod o-rwx"); got != (mode == 0o644) {
			t.Errorf("mode %v: warning %v", mode, got)
		}
	}
}

// TestAdoptionOfEncryptedVolumes: a node adopts encrypted shared volumes only with the keys that they need. With
// other keys, or none, the adoption fails with an error that names the key, and the volumes stay as they
// are: a node with the keys adopts them, with the catalogue and the key period of their node.
func TestAdoptionOfEncryptedVolumes(t *testing.T) {
	testkit.VerifyNone(t)
	e, dir := testetcd.Start(t, 1), t.TempDir()
	own := memberConfig(e, "a", "")
	own.Data, own.SharedData = nil, []string{dir + "/a"}
	own.Encryption.KeysFile = writeFile(t, dir, "own", keysText("k1"))
	t.Run("node a", func(t *testing.T) {
		a := openMember(t, own)
		if _, err := a.storage.CreateNamespace(t.Context(), kv.Namespace{Name: "m", Geometry: kv.SingleGroup(1, 256, 16), Index: kv.IndexTrie}); err != nil {
			t.Fatal(err)
		}
	})
	other := bytes.Replace(keysText("k2"), []byte("k2 "), []byte("k1 "), 1)
	for _, tc := range []struct {
		name string
		keys []byte
		want string
	}{
		{"none", nil, "is encrypted, its newest key is k1: give the keys of the node"},
		{"another id", keysText("k2"), "the catalogue is encrypted with key k1, which is not given"},
		{"another key", other, "key k1 is another key than the one with this id"},
		{"the key", keysText("k1", "k2"), ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := memberConfig(e, "b", t.TempDir())
			if tc.keys != nil {
				cfg.Encryption.KeysFile = writeFile(t, t.TempDir(), "keys", tc.keys)
			}
			b := openMember(t, cfg)
			_, err := b.adopter.Adopt(t.Context(), dir+"/a", false)
			if tc.want != "" {
				if err == nil || !strings.Contains(err.Error(), tc.want) || len(guests(b)) > 0 {
					t.Errorf("adopted %q, %v; want %q", guests(b), err, tc.want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			for _, g := range b.adopter.guests {
				if _, err := g.node.storage.Namespace("m"); err != nil {
					t.Error(err)
				}
				if use := g.node.storage.KeyUse(); len(use) != 2 || !use[1].Newest || use[1].ID != "k2" {
					t.Errorf("keys of the adopted node: %+v", use)
				}
			}
		})
	}
}

// encryptedStore runs a node a whose key is k1 until its namespace m has 4 blocks. It returns the shared
// volume and the files of the prompt.
func encryptedStore(t *testing.T, e *testetcd.Etcd) (volume, tokensFile, dataFile string) {
	t.Helper()
	dir := t.TempDir()
	volume = dir + "/a"
	s := startServed(t, "", sharedOf(e, "a", volume, "--encryption-keys-file", writeFile(t, dir, "keys", keysText("k1")))...)
	awaitTrue(t, "node a serves", serving(t, s))
	tokensFile, dataFile = prompt(t, s, dir, 4)
	eventually(t, s, "block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile)
	s.stop()
	return volume, tokensFile, dataFile
}

// reloadRefused fails unless a reload is refused with the text.
func reloadRefused(t *testing.T, s *served, want string) {
	t.Helper()
	if r := s.run("config", "reload"); r.code != exitFailed || !strings.Contains(r.err, "nothing was applied") || !strings.Contains(r.err, want) {
		t.Errorf("reload: exit %d without %q\n%s%s", r.code, want, r.out, r.err)
	}
}

// TestReloadOfAdoptedVolumes: a reload gives new keys to the adopted nodes too. It is refused as a whole, and
// no node gets other keys, if an adopted node has blocks of a key that is missing. When the blocks' epoch
// has ended, the key can be removed.
func TestReloadOfAdoptedVolumes(t *testing.T) {
	testkit.VerifyNone(t)
	e, dir := testetcd.Start(t, 1), t.TempDir()
	volume, tokensFile, dataFile := encryptedStore(t, e)
	keys := writeFile(t, dir, "keys", keysText("k1"))
	b := startServed(t, dir+"/b", slowLease(e, "b", "--encryption-keys-file", keys, "--cluster-adopt=false")...)
	awaitTrue(t, "node b serves", serving(t, b))
	eventually(t, b, "volume", "adopt", volume)
	awaitTrue(t, "the adopted node serves", func() bool { return states(t, b) == "a:serving b:serving" })
	_, addrs := adoptedBy(t, b)
	guest := &served{t: t, ready: b.ready}
	guest.ready.Listen = addrs[0]
	want := func(own, adopted string) {
		t.Helper()
		if a, b := keyUse(t, b), keyUse(t, guest); a != own || b != adopted {
			t.Errorf("keys of b: %s; of the adopted node: %s\nwant %s and %s", a, b, own, adopted)
		}
	}
	want("k1 0 true", "k1 4 true")

	writeFile(t, dir, "keys", keysText("k1", "k2"))
	if out := guest.run("config", "reload").must(t); !strings.Contains(out, "nothing") {
		t.Errorf("the adopted node reads keys itself:\n%s", out)
	}
	want("k1 0 true", "k1 4 true")
	b.run("config", "reload").must(t)
	want("k1 0 false, k2 0 true", "k1 4 false, k2 0 true")
	writeFile(t, dir, "keys", keysText("k2", "k3"))
	reloadRefused(t, b, "volumes adopted from node a: ")
	reloadRefused(t, b, "4 blocks are encrypted with key k1")
	want("k1 0 false, k2 0 true", "k1 4 false, k2 0 true")

	fetchEventually(t, guest, dir, tokensFile, dataFile)
	eventually(t, b, "ns", "bump-epoch", "m")
	awaitTrue(t, "the blocks of the old epoch are dropped", func() bool { return keyUse(t, guest) == "k1 0 false, k2 0 true" })
	eventually(t, guest, "block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile)
	want("k1 0 false, k2 0 true", "k1 0 false, k2 4 true")
	b.run("config", "reload").must(t)
	want("k2 0 false, k3 0 true", "k2 4 false, k3 0 true")
	fetchEventually(t, guest, dir, tokensFile, dataFile)
}

// TestReloadDuringAdoption: a node whose volumes are opened while a reload changes the keys is adopted with the
// changed keys. If a key that it needs was removed meanwhile, it is not adopted.
func TestReloadDuringAdoption(t *testing.T) {
	testkit.VerifyNone(t)
	e, dir := testetcd.Start(t, 1), t.TempDir()
	volume, _, _ := encryptedStore(t, e)
	writeFile(t, dir, "keys", keysText("k1"))
	b := startServed(t, dir+"/b", slowLease(e, "b", "--encryption-keys-file", dir+"/keys", "--cluster-adopt=false")...)
	awaitTrue(t, "node b serves", serving(t, b))
	// adopt runs f when the opening of the volumes waits for the copy of their index.
	adopt := func(fence int, f func()) result {
		t.Helper()
		pipe := fmt.Sprintf("%s/index-%08d/pipe", volume, fence)
		if err := os.Remove(pipe); err != nil && !errors.Is(err, fs.ErrNotExist) { // a copy of an earlier pipe
			t.Fatal(err)
		}
		if err := syscall.Mkfifo(pipe, 0o600); err != nil {
			t.Fatal(err)
		}
		ended := make(chan result, 1)
		go func() { ended <- b.run("volume", "adopt", volume, "--timeout", "0") }()
		var writer *os.File
		awaitTrue(t, "the index is copied", func() (ok bool) {
			var err error
			writer, err = os.OpenFile(pipe, os.O_WRONLY|syscall.O_NONBLOCK, 0)
			return err == nil
		})
		f()
		if err := writer.Close(); err != nil {
			t.Fatal(err)
		}
		return <-ended
	}
	reload := func(ids ...string) {
		t.Helper()
		writeFile(t, dir, "keys", keysText(ids...))
		b.run("config", "reload").must(t)
	}
	r := adopt(1, func() {
		reload("k1", "k2")
		reload("k2")
	})
	if names, _ := adoptedBy(t, b); r.code == exitOK || !strings.Contains(r.err, "key k1 encrypts new blocks") || len(names) > 0 {
		t.Errorf("without a key of the blocks: exit %d, adopted %q\n%s%s", r.code, names, r.out, r.err)
	}
	reload("k1", "k2")
	adopt(2, func() { reload("k1", "k2", "k3") }).must(t)
	_, addrs := adoptedBy(t, b)
	guest := &served{t: t, ready: b.ready}
	guest.ready.Listen = addrs[0]
	awaitTrue(t, "the adopted node serves", func() bool { return states(t, b) == "a:serving b:serving" })
	if got := keyUse(t, guest); got != "k1 4 false, k2 0 false, k3 0 true" {
		t.Errorf("keys of the adopted node: %s", got)
	}
}

// TestGuestWithoutNewKeys: an adopted node whose volumes fail while it gets new keys is given up, and the
// reload is applied. Its volumes can be adopted again, with the new keys.
func TestGuestWithoutNewKeys(t *testing.T) {
	testkit.VerifyNone(t)
	e, dir := testetcd.Start(t, 1), t.TempDir()
	keys := writeFile(t, dir, "keys", keysText("k1"))
	own := memberConfig(e, "a", "")
	own.Data, own.SharedData, own.Encryption.KeysFile = nil, []string{dir + "/a"}, keys
	t.Run("node a", func(t *testing.T) { openMember(t, own) })
	cfg := memberConfig(e, "b", dir+"/b")
	cfg.Encryption.KeysFile = keys
	b := openMember(t, cfg)
	if _, err := b.adopter.Adopt(t.Context(), dir+"/a", false); err != nil {
		t.Fatal(err)
	}
	if err := b.adopter.serving()[0].node.volumes[0].Device.Close(); err != nil {
		t.Fatal(err)
	}
	writeFile(t, dir, "keys", keysText("k1", "k2"))
	if changes, err := b.live.reloader.Reload(t.Context()); err != nil || len(changes) != 1 {
		t.Fatalf("reload: %v, %v", changes, err)
	}
	awaitTrue(t, "the adopted node is given up", func() bool { return len(guests(b)) == 0 })
	awaitTrue(t, "the volumes are adopted again", func() bool {
		_, err := b.adopter.Adopt(t.Context(), dir+"/a", false)
		return err == nil
	})
	for _, n := range []*node{b, b.adopter.serving()[0].node} {
		if use := n.storage.KeyUse(); len(use) != 2 || !use[1].Newest || use[1].ID != "k2" {
			t.Errorf("keys of node %s: %+v", n.cfg.Node, use)
		}
	}
}

// TestPendingErasuresOfAdoptedVolumes: an adopted node has no HTTP, so the metrics and the console of its adopter show the erasures
// that wait for one of its volumes, until the volumes are opened again.
func TestPendingErasuresOfAdoptedVolumes(t *testing.T) {
	testkit.VerifyNone(t)
	e, dir := testetcd.Start(t, 1), t.TempDir()
	keys := writeFile(t, dir, "keys", keysText("k1"))
	own := memberConfig(e, "a", "")
	own.Data, own.SharedData, own.Encryption.KeysFile, own.Encryption.EpochKeys = nil, []string{dir + "/bad", dir + "/good"}, keys, true
	t.Run("node a", func(t *testing.T) {
		a := openMember(t, own)
		if _, err := a.storage.CreateNamespace(t.Context(), kv.Namespace{Name: "m", Geometry: kv.SingleGroup(1, 256, 16), Index: kv.IndexTrie}); err != nil {
			t.Fatal(err)
		}
	})
	cfg := memberConfig(e, "b", dir+"/b")
	cfg.HTTP, cfg.Encryption.KeysFile = "127.0.0.1:0", keys
	b := openMember(t, cfg)
	go func() { _ = b.server.Serve(b.control, b.web) }() // until openMember closes the node
	web := gatewayClient(t, nil)
	open := func(path string) string {
		_, body := call(t, web, "GET", "http://"+b.web.Addr().String()+path, "")
		return body
	}
	adopt := func() *node {
		t.Helper()
		awaitTrue(t, "the volumes are adopted", func() bool {
			_, err := b.adopter.Adopt(t.Context(), dir+"/good", false)
			return err == nil
		})
		n := b.adopter.serving()[0].node
		<-n.cluster.Joined()
		return n
	}
	check := func(when string, bad int) {
		t.Helper()
		metrics := open("/metrics")
		for volume, n := range map[string]int{"b": 0, "good": 0, "bad": bad} {
			if line := fmt.Sprintf("penstock_volume_pending_erasures{volume=\"%s/%s\"} %d\n", dir, volume, n); !strings.Contains(metrics, line) {
				t.Errorf("%s: no %q in\n%s", when, line, metrics)
			}
		}
		address := b.control.Addr().String()
		words := regexp.MustCompile(regexp.QuoteMeta(dir) + `/bad: secrets of ended epochs of 1 namespace are still to be erased, since 20\d\d-`)
		if shown := penstock(t, "", nil, "volume", "list", "--server", address).must(t); words.MatchString(shown) != (bad > 0) || strings.Contains(shown, "to be erased") != (bad > 0) {
			t.Errorf("%s: volume list shows\n%s", when, shown)
		}
		awaitTrue(t, when+": cluster status", func() bool { // a node writes its record within a second
			r := penstock(t, "", nil, "cluster", "status", "--server", address)
			all := decode[clusterState](t, penstock(t, "", nil, "cluster", "status", "--server", address, "--format", "json")).Erasures
			pending := regexp.MustCompile("(?m)^erasure pending: node a, volume " + words.String())
			return pending.MatchString(r.out) == (bad > 0) && len(all) == bad && r.code == exitOK
		})
		fault := "volume " + dir + "/bad</th><td><span class=\"state\" data-state=\"erasure pending\">"
		awaitTrue(t, when+": the console", func() bool { return strings.Contains(open("/"), fault) == (bad > 0) })
	}
	guest := adopt()
	check("after the adoption", 0)
	if err := guest.volumes[0].Device.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := b.cluster.BumpEpoch(t.Context(), "m", 0, 1); err != nil {
		t.Fatal(err)
	}
	check("after the bump", 1)
	b.adopter.serving()[0].giveUp()
	awaitTrue(t, "the adopted node is given up", func() bool { return len(guests(b)) == 0 })
	adopt()
	check("after the next adoption", 0)
}

// TestKeysCommandHangsAtReload: while the command of a reload hangs, the node answers config diff and status. When
// the caller of the reload leaves, the command is ended, nothing changes, and the next reload is applied.
func TestKeysCommandHangsAtReload(t *testing.T) {
	dir := t.TempDir()
	writeFile(t, dir, "keys", keysText("k1"))
	// The first run after the file armed exists removes it and waits for a writer of the pipe.
	if err := syscall.Mkfifo(dir+"/pipe", 0o600); err != nil {
		t.Fatal(err)
	}
	script := writeFile(t, dir, "command", fmt.Appendf(nil, "#!/bin/sh\ncd %s\nif rm armed 2>/dev/null; then exec cat pipe; fi\nexec cat keys\n", dir))
	s := startServed(t, dir+"/volume", "--encryption-keys-command", "sh,"+script, "--encryption-keys-timeout", "1h")
	writeFile(t, dir, "keys", keysText("k1", "k2"))
	armed := writeFile(t, dir, "armed", nil)
	ctx, leave := context.WithCancel(t.Context())
	ended := make(chan result, 1)
	go func() {
		ended <- penstockIn(ctx, "", nil, "config", "reload", "--server", s.ready.Listen, "--timeout", "0")
	}()
	awaitTrue(t, "the command runs", func() bool {
		_, err := os.Stat(armed)
		return errors.Is(err, fs.ErrNotExist)
	})
	if r := s.run("config", "diff"); !strings.Contains(r.out, "the newest is k2") {
		t.Errorf("diff: %s%s", r.out, r.err)
	}
	if got := keyUse(t, s); got != "k1 0 true" {
		t.Errorf("keys during the reload: %s", got)
	}
	leave()
	if r := <-ended; r.code == exitOK {
		t.Errorf("the reload that its caller left: %s", r.out)
	}
	if out := s.run("config", "reload").must(t); !strings.Contains(out, "the newest is k2") {
		t.Errorf("reload: %s", out)
	}
	if got := keyUse(t, s); got != "k1 0 false, k2 0 true" {
		t.Errorf("keys after the reload: %s", got)
	}
	if strings.Count(s.log.String(), "the configuration was not reloaded") != 1 {
		t.Errorf("the log does not have one refused reload:\n%s", s.log)
	}
}

// TestPlainVolumes: a volume in encryption.plain_volumes has plain blocks, beside an encrypted volume; volume list
// shows both. An encrypted volume in the list is refused, and a plain volume that is not in the list is
// encrypted from the next start on.
func TestPlainVolumes(t *testing.T) {
	dir := t.TempDir()
	keys := writeFile(t, dir, "keys", keysText("k1"))
	args := []string{"--data", dir + "/open", "--encryption-keys-file", keys}
	s := startServed(t, dir+"/sealed", append(args, "--encryption-plain-volumes", dir+"/open")...)
	prompt(t, s, dir, 1)
	// fetch fails the test unless each sequence of one block is returned as it was put.
	sequences := 0
	fetch := func() {
		t.Helper()
		for i := range sequences {
			name := fmt.Sprint(dir, "/", i)
			fetchSame(t, s, dir, name+".tokens", name+".data")
		}
	}
	for used := 0; used < 2; sequences++ {
		tokensFile := writeFile(t, dir, fmt.Sprint(sequences, ".tokens"), tokens(1000*sequences, 4))
		dataFile := writeFile(t, dir, fmt.Sprint(sequences, ".data"), bytesOf(byte(sequences), 8192))
		s.run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
		used = 0
		for _, v := range decode[struct{ Volumes []*pb.VolumeStatus }](t, s.run("volume", "list", "--format", "json")).Volumes {
			if v.Blocks > 0 {
				used++
			}
		}
	}
	fetch()
	list := s.run("volume", "list").must(t)
	for _, want := range []string{"/sealed: new blocks are encrypted with key k1", "/open: new blocks are not encrypted"} {
		if !strings.Contains(list, dir+want) {
			t.Errorf("no line %q in\n%s", want, list)
		}
	}
	s.stop()
	plain := 0
	for i := range sequences {
		for _, name := range findIn(t, dir, bytesOf(byte(i), 8192)[:32]) {
			switch {
			case strings.HasPrefix(name, dir+"/sealed"):
				t.Errorf("block %d is in %s in plain", i, name)
			case strings.HasPrefix(name, dir+"/open"):
				plain++
			}
		}
	}
	if plain == 0 || plain == sequences {
		t.Errorf("%d of %d blocks are plain; want a part of them", plain, sequences)
	}
	for _, c := range []struct{ volume, want string }{
		{dir + "/sealed", "is encrypted, its newest key is k1, and encryption.plain_volumes names it: remove it"},
		{dir + "/other", "is not in data or shared_data"},
	} {
		if r := penstock(t, "", nil, append(small(dir+"/sealed"), append(args, "--encryption-plain-volumes", c.volume)...)...); r.code == exitOK || !strings.Contains(r.err, c.want) {
			t.Errorf("%s: exit %d without %q\n%s", c.volume, r.code, c.want, r.err)
		}
	}
	s = startServed(t, dir+"/sealed", args...)
	fetch()
	if list := s.run("volume", "list").must(t); !strings.Contains(list, "/open: new blocks are encrypted with key k1") {
		t.Errorf("the volume is not encrypted:\n%s", list)
	}
	if got, want := keyUse(t, s), fmt.Sprintf(" %d false, k1 %d true", plain, sequences-plain); got != want {
		t.Errorf("keys: %s, want %s", got, want)
	}
}

// TestAdoptionOfPlainVolumes: an adopted node with keys does not encrypt a volume that its own node leaves plain.
func TestAdoptionOfPlainVolumes(t *testing.T) {
	testkit.VerifyNone(t)
	e, dir := testetcd.Start(t, 1), t.TempDir()
	own := memberConfig(e, "a", "")
	own.Data, own.SharedData = nil, []string{dir + "/a", dir + "/b"}
	own.Encryption.KeysFile, own.Encryption.PlainVolumes = writeFile(t, dir, "keys", keysText("k1")), []string{dir + "/b"}
	t.Run("node a", func(t *testing.T) { openMember(t, own) })
	cfg := memberConfig(e, "b", dir+"/own")
	cfg.Data = append(cfg.Data, dir+"/own2")
	cfg.Encryption = own.Encryption
	cfg.Encryption.PlainVolumes = []string{dir + "/own2"}
	b := openMember(t, cfg)
	if _, err := b.adopter.Adopt(t.Context(), dir+"/a", false); err != nil {
		t.Fatal(err)
	}
	for _, n := range []*node{b, b.adopter.serving()[0].node} {
		var keys []string
		for _, v := range n.storage.Volumes() {
			keys = append(keys, v.Key)
		}
		if !slices.Equal(keys, []string{"k1", ""}) {
			t.Errorf("keys of the volumes of node %s: %q", n.cfg.Node, keys)
		}
	}
	t.Run("node a again", func(t *testing.T) {
		if n := openMember(t, own); n.storage.Volumes()[1].Key != "" {
			t.Error("the plain volume is encrypted")
		}
	})
}
