package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
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
