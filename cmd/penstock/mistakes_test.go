package main

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/penstock-kv/penstock/server/config"
)

// TestMistakesOfConfiguration: a bad value from any source has exit code 2. The error has the
// source, the value, and the valid values.
func TestMistakesOfConfiguration(t *testing.T) {
	dir := t.TempDir()
	typo := writeFile(t, dir, "penstock.yaml", []byte("data: [/x]\ncapcity: 1GiB\n"))
	for _, c := range []struct {
		args, environ []string
		say           string
	}{
		{args: []string{}, say: "data: name at least one directory (--data DIR)"},
		{args: []string{"--data", "/x", "--durability", "never"}, say: `durability: "never" is not one of [async batch sync]`},
		{args: []string{"--data", "/x", "--capacity", "lots"}, say: `"lots" is not a size; write it like 512MiB`},
		{args: []string{"--config", typo}, say: typo + `:2: unknown key "capcity"; did you mean "capacity"?`},
		{args: []string{"--data", "/x"}, environ: []string{"PENSTOCK_LIMITS_READS=many"}, say: `PENSTOCK_LIMITS_READS: "many" is not a whole number`},
	} {
		r := penstock(t, "", c.environ, append([]string{"serve"}, c.args...)...)
		if r.code != exitUsage || !strings.Contains(r.err, c.say) || strings.Count(r.err, "bad configuration") > 1 {
			t.Errorf("%v %v: exit %d, %q without %q", c.environ, c.args, r.code, r.err, c.say)
		}
	}
}

// TestCheck: --check accepts valid settings of each command and starts nothing. It refuses a wrong
// setting with the error of a start.
func TestCheck(t *testing.T) {
	dir := t.TempDir()
	for _, s := range services() {
		path, text := deployed(t, s.file)
		if out := penstock(t, "", nil, s.command, "--config", path, "--check").must(t); out != "the settings are valid\n" {
			t.Errorf("%s prints %q", s.command, out)
		}
		if v := decode[struct{ Valid bool }](t, penstock(t, "", nil, s.command, "--config", path, "--check", "--format", "json")); !v.Valid {
			t.Errorf("%s: not valid in JSON", s.command)
		}
		typo := writeFile(t, dir, s.file, []byte(strings.Replace(text, "\nlisten:", "\nlistn:", 1)))
		if r := penstock(t, "", nil, s.command, "--config", typo, "--check"); r.code != exitUsage || !strings.Contains(r.err, `unknown key "listn"`) || r.out != "" {
			t.Errorf("%s with a wrong key: exit %d, %q, %q", s.command, r.code, r.out, r.err)
		}
	}
	volume := dir + "/volume"
	penstock(t, "", []string{"PENSTOCK_NODE=n"}, "serve", "--check", "--data", volume).must(t)
	if _, err := os.Stat(volume); !os.IsNotExist(err) {
		t.Errorf("serve --check made the volume: %v", err)
	}
	for _, args := range [][]string{
		{"serve", "--check"},
		{"planner", "--check", "--schedule-read-policy", "fastest"},
		{"planner", "--check", "--schedule-z-factor", "-1"},
		{"gateway", "--check"},
	} {
		if r := penstock(t, "", nil, args...); r.code != exitUsage || !strings.Contains(r.err, "bad configuration") || r.out != "" {
			t.Errorf("%v: exit %d, %q, %q", args, r.code, r.out, r.err)
		}
	}
}

// TestRefusedValues: an invalid value of a flag or an argument is a usage error.
func TestRefusedValues(t *testing.T) {
	dir := t.TempDir()
	geometry := " --layers 2 --block-tokens 4 --token-bytes 64"
	for line, say := range map[string]string{
		"evict --bytes 1 --namespace=":                                    `--namespace "": must not be empty`,
		"pin list --namespace=":                                           `--namespace "": must not be empty`,
		"events --namespace=":                                             `--namespace "": must not be empty`,
		"ns create m --salt=" + geometry:                                  `--salt "": must not be empty`,
		"ns create m --salt-file=" + geometry:                             `--salt-file "": must not be empty`,
		"ns create m --salt=hex:" + geometry:                              `--salt: there are no digits after hex:`,
		"ns create m --tenant=" + geometry:                                `--tenant "": must not be empty`,
		"ns create m --index=tree" + geometry:                             `--index "tree": want trie or flat`,
		"ns quota m -1":                                                   `-1: must not be negative`,
		"unpin -1":                                                        `-1: must not be negative`,
		"block get m --tokens-file x --out=":                              `--out "": must not be empty`,
		"pin m --tokens-file x --ttl 100us":                               `--ttl 100µs: want at least 1ms`,
		"store check --data=":                                             `--data "": must not be empty`,
		"store check --io=foo --data " + dir:                              `--io "foo": want auto, uring, posix or usrbio`,
		"store rebuild-index --io=foo --data " + dir:                      `--io "foo": want auto, uring, posix or usrbio`,
		"demo node --io=foo":                                              `--io "foo": want auto, uring, posix or usrbio`,
		"status --server=foo":                                             `server "foo" is not host:port`,
		"status --server=127.0.0.1:99999":                                 `port "99999" is not a number`,
		"status --server=a:1,b:2":                                         `this command uses one node`,
		"doctor --server=foo":                                             `server "foo" is not host:port`,
		"block get m --tokens-file x --out y --server=foo":                `server "foo" is not host:port`,
		"block put m --tokens-file x --data-file y --server=127.0.0.1:1,": `no server given`,
		"plan explain x --planner=foo":                                    `server "foo" is not host:port`,
		"completion nonsense":                                             `unknown command "nonsense"`,
		"help nonsense":                                                   `unknown command "nonsense"`,
		"help ns nonsense":                                                `unknown command "nonsense"`,
	} {
		r := penstock(t, "", nil, strings.Fields(line)...)
		if r.code != exitUsage || !strings.Contains(r.err, say) || r.out != "" {
			t.Errorf("%s: exit %d, %q without %q", line, r.code, r.err, say)
		}
	}
	for _, line := range []string{"help ns create", "help", "completion bash", "completion"} {
		if out := penstock(t, "", nil, strings.Fields(line)...).must(t); out == "" {
			t.Errorf("%s prints nothing", line)
		}
	}
	// An empty flag overrides the environment variable.
	s := startServed(t, dir+"/volume")
	environ := []string{"PENSTOCK_SERVER=" + s.ready.Listen, "PENSTOCK_TOKEN_FILE=/does/not/exist"}
	if r := penstock(t, "", environ, "status"); r.code != exitFailed || !strings.Contains(r.err, "/does/not/exist") {
		t.Errorf("with a missing file in the variable: exit %d, %q", r.code, r.err)
	}
	penstock(t, "", environ, "status", "--token-file", "").must(t)
}

// TestPinPrintsItsTTL: pin prints the TTL that the node granted, which may be less than
// --ttl.
func TestPinPrintsItsTTL(t *testing.T) {
	dir := t.TempDir()
	s := startServed(t, dir+"/volume", "--limits-lease-ttl", "2m")
	tokensFile, dataFile := prompt2(t, dir)
	s.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "1024").must(t)
	s.run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
	for ttl, want := range map[string]float64{"1h": 120, "90s": 90, "0": 0} {
		got := decode[matched](t, s.run("pin", "m", "--tokens-file", tokensFile, "--ttl", ttl, "--format", "json"))
		if got.Lease == 0 || got.TTLSeconds != want {
			t.Errorf("--ttl %s: lease %d for %v seconds; want %v", ttl, got.Lease, got.TTLSeconds, want)
		}
	}
}

// TestNoEventsInTime: the error of --timeout names the option, before and after the connection is
// made.
func TestNoEventsInTime(t *testing.T) {
	s := startServed(t, t.TempDir()+"/volume")
	for timeout := time.Nanosecond; ; timeout *= 10 {
		r := s.run("events", "--timeout", timeout.String())
		if r.code == exitFailed && strings.Contains(r.err, fmt.Sprintf("--timeout %v ended the command after 0 events", timeout)) {
			return
		}
		if r.code != exitFailed || !strings.Contains(r.err, fmt.Sprintf("no connection within --timeout %v to %s", timeout, s.ready.Listen)) {
			t.Fatalf("exit %d, %q", r.code, r.err)
		}
	}
}

// TestFormatOfTheEnvironment: an unknown format is refused, unless a flag overrides it.
func TestFormatOfTheEnvironment(t *testing.T) {
	if r := penstock(t, "", []string{"PENSTOCK_FORMAT=JSON"}, "version"); r.code != exitUsage || !strings.Contains(r.err, `PENSTOCK_FORMAT: "JSON" is neither table nor json`) {
		t.Errorf("exit %d, %q", r.code, r.err)
	}
	if r := penstock(t, "", []string{"PENSTOCK_FORMAT=JSON"}, "version", "--format", "json"); !strings.HasPrefix(r.must(t), "{") {
		t.Errorf("not JSON: %s", r.out)
	}
}

// TestFlagsAreTakenAsTyped: the size of a flag is not rounded, and a list flag that is given twice
// is one list.
func TestFlagsAreTakenAsTyped(t *testing.T) {
	flags := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	scratch := config.Default()
	addConfigFlags(flags, scratch.Keys())
	if err := flags.Parse([]string{"--data", "/a", "--data", "/b,/c", "--capacity", "1450MiB", "--free-floor", "1234567890", "--prewrite=false"}); err != nil {
		t.Fatal(err)
	}
	got := config.Default()
	if err := loadSettings(&got, "", nil, flags); err != nil {
		t.Fatal(err)
	}
	if got.Capacity != 1450<<20 || got.FreeFloor != 1234567890 || got.Prewrite || !slices.Equal(got.Data, []string{"/a", "/b", "/c"}) {
		t.Errorf("capacity %d, free floor %d, prewrite %v, data %q", got.Capacity, got.FreeFloor, got.Prewrite, got.Data)
	}
}

// TestServerIsNotGRPC: if --server has the port of /metrics, the error reports that.
func TestServerIsNotGRPC(t *testing.T) {
	s := startServed(t, t.TempDir()+"/volume")
	r := penstock(t, "", nil, "status", "--server", s.ready.HTTP, "--timeout", "10s")
	if r.code != exitFailed || !strings.Contains(r.err, "HTTP answers there") || strings.Contains(r.err, "TLS") {
		t.Errorf("exit %d, %q", r.code, r.err)
	}
}

// TestBelowTheFloor: a node whose disk is full reports that at its start, to each writer and in its
// status, with the setting and both sizes. No error reports the node as down.
func TestBelowTheFloor(t *testing.T) {
	dir := t.TempDir()
	s := startServed(t, dir+"/volume", "--free-floor", "1000TiB")
	if log := s.log.String(); !strings.Contains(log, "takes no writes") || !strings.Contains(log, "free_floor") {
		t.Errorf("the log does not have the line:\n%s", log)
	}
	tokensFile, dataFile := prompt2(t, dir)
	s.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "1024").must(t)
	remedy := regexp.MustCompile(`volume 0: (\d+) bytes free, (\d+) fewer than the floor of 1099511627776000: free as many, or lower free_floor`)
	for range 2 {
		r := s.run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile)
		if r.code != exitFailed || !strings.Contains(r.err, "refused: read_only: ") || !remedy.MatchString(r.err) || strings.Contains(r.err, "down") {
			t.Errorf("exit %d, %q", r.code, r.err)
		}
	}
	if out := s.run("status").must(t); !strings.Contains(out, "read_only: node takes no writes") || !remedy.MatchString(out) {
		t.Errorf("status:\n%s", out)
	}
}

// TestAddedDisk: an empty directory in addition to a node's volume is refused with the setting that
// formats it. With the setting the node serves both permanently, and the stored blocks are still
// there.
func TestAddedDisk(t *testing.T) {
	dir := t.TempDir()
	one := dir + "/one"
	two := dir + "/two"
	tokensFile, dataFile := prompt2(t, dir)
	s := startServed(t, one)
	s.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "1024").must(t)
	s.run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
	s.stop()
	if err := os.Mkdir(two, 0o700); err != nil {
		t.Fatal(err)
	}
	both := one + "," + two
	r := penstock(t, "", nil, small(both)...)
	if want := fmt.Sprintf("%s is one of 1 volumes, 2 are given; give those, or set add_volumes to format the others", one); r.code != exitFailed || !strings.Contains(r.err, want) {
		t.Fatalf("exit %d, %q without %q", r.code, r.err, want)
	}
	startServed(t, both, "--add-volumes").stop()
	s = startServed(t, both)
	s.run("block", "verify", "m", "--tokens-file", tokensFile).must(t)
	if out := s.run("status").must(t); !strings.Contains(out, two) {
		t.Errorf("the added volume is not in\n%s", out)
	}
}
