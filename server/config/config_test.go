package config_test

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/server/config"
)

func load(t *testing.T, yaml string, environ ...string) (config.Config, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "penstock.yaml")
	if err := os.WriteFile(path, []byte(yaml), 0o600); err != nil {
		t.Fatal(err)
	}
	return config.Load(path, environ)
}

func TestDefaultIsValidOnceItHasData(t *testing.T) {
	c := config.Default()
	if err := c.Validate(); !errors.Is(err, config.ErrConfig) || !strings.Contains(err.Error(), "--data DIR") {
		t.Fatalf("without data: %v", err)
	}
	c.Data = []string{"/x"}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
}

func TestEnvironmentOverridesFile(t *testing.T) {
	c, err := load(t, "data: [/a, /b]\ncapacity: 2TiB\nauth:\n  token_file: /t\nlimits:\n  lease_ttl: 90s\n",
		"PENSTOCK_CAPACITY=3GiB", "PENSTOCK_LIMITS_READS=7", "PENSTOCK_SERVER=elsewhere:1", "HOME=/root")
	if err != nil {
		t.Fatal(err)
	}
	if c.Capacity != 3<<30 || c.Limits.Reads != 7 || len(c.Data) != 2 || c.Auth.TokenFile != "/t" || c.Limits.LeaseTTL.Std().Seconds() != 90 {
		t.Fatalf("loaded %+v", c)
	}
}

func TestCallsFitTheArena(t *testing.T) {
	for arena, want := range map[config.Size]config.Size{32 << 20: 8 << 20, 256 << 20: 64 << 20, 1 << 30: 64 << 20} {
		c := config.Default()
		c.Data, c.Arena = []string{"/x"}, arena
		c.EnsureDefaults()
		if c.Limits.ReadBytes != want || c.Limits.WriteBytes != want {
			t.Errorf("arena of %v: calls of %v and %v; want %v", arena, c.Limits.ReadBytes, c.Limits.WriteBytes, want)
		}
		if err := c.Validate(); err != nil {
			t.Error(err)
		}
	}
}

// TestEveryKeySetsItself: the text of each key's value sets the same value, through the function
// that flags and the environment use.
func TestEveryKeySetsItself(t *testing.T) {
	c, p := config.Default(), config.DefaultPlanner()
	c.Data = []string{"/a", "/b"}
	for _, k := range append(c.Keys(), p.Keys()...) {
		before := k.String()
		if err := k.Set(before); err != nil {
			t.Errorf("%s: %v", k.Path, err)
		}
		if k.String() != before {
			t.Errorf("%s: %q became %q", k.Path, before, k.String())
		}
		if k.Doc == "" || strings.Contains(k.Path, "..") || strings.HasSuffix(k.Path, ".") {
			t.Errorf("key %q has no name or no doc", k.Path)
		}
	}
}

func TestMistakesAreNamed(t *testing.T) {
	for name, tc := range map[string]struct {
		yaml    string
		environ []string
		want    string
	}{
		"unknown key":         {yaml: "capcity: 1GiB", want: `penstock.yaml:1: unknown key "capcity"; did you mean "capacity"?`},
		"unknown nested key":  {yaml: "auth:\n  tokenfile: x", want: "tokenfile"},
		"unknown variable":    {environ: []string{"PENSTOCK_CAPACITI=1"}, want: "PENSTOCK_CAPACITY"},
		"garbage":             {yaml: "\x00\x01{{{", want: "penstock.yaml"},
		"wrong type":          {yaml: "data: {a: b}", want: "penstock.yaml:1: data: is a mapping; write a list"},
		"bad size":            {yaml: "capacity: many", want: `penstock.yaml:1: capacity: "many" is not a size; write it like 512MiB, 2TiB or 4096: bad configuration`},
		"bad duration":        {yaml: "sync_interval: soon", want: "soon"},
		"two documents":       {yaml: "capacity: 1GiB\n---\ncapacity: 2GiB", want: "more than one"},
		"bad variable":        {environ: []string{"PENSTOCK_LIMITS_READS=x"}, want: "PENSTOCK_LIMITS_READS"},
		"duplicate key":       {yaml: "io: auto\nio: posix", want: "io"},
		"bool in environment": {environ: []string{"PENSTOCK_INSECURE=maybe"}, want: "maybe"},
	} {
		_, err := load(t, tc.yaml, tc.environ...)
		if !errors.Is(err, config.ErrConfig) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v; want it to name %q", name, err, tc.want)
		}
	}
}

// TestOthersVariablesAreLeftAlone: variables of client commands, and the variables that Kubernetes sets for
// Services named penstock and penstock-planner, are accepted.
func TestOthersVariablesAreLeftAlone(t *testing.T) {
	for _, name := range []string{
		"PENSTOCK_TRACES", "PENSTOCK_FORMAT",
		"PENSTOCK_SERVICE_HOST", "PENSTOCK_SERVICE_PORT", "PENSTOCK_SERVICE_PORT_GRPC",
		"PENSTOCK_PORT", "PENSTOCK_PORT_7420_TCP", "PENSTOCK_PORT_7420_TCP_PROTO", "PENSTOCK_PORT_7420_TCP_ADDR",
		"PENSTOCK_PLANNER_SERVICE_HOST", "PENSTOCK_PLANNER_PORT_7430_TCP_PORT",
	} {
		if _, err := load(t, "", name+"=tcp://10.96.0.1:7420"); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, name := range []string{"PENSTOCK_PORTS", "PENSTOCK_SERVICE", "PENSTOCK_PORT_GRPC"} {
		if _, err := load(t, "", name+"=7420"); !errors.Is(err, config.ErrConfig) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestOneComplaintForOneMistake: an error that follows from another bad value is not reported as
// well.
func TestOneComplaintForOneMistake(t *testing.T) {
	for want, spoil := range map[string]func(*config.Config){
		`config: listen: "foo" is not host:port: bad configuration`:                                          func(c *config.Config) { c.Listen = "foo" },
		`config: listen: "localhost:99999": port "99999" is not a number from 0 to 65535: bad configuration`: func(c *config.Config) { c.Listen = "localhost:99999" },
		`config: limits.read_wait: must be positive, is 0s: bad configuration`:                               func(c *config.Config) { c.Limits.ReadWait = 0 },
		`config: limits.hung_after: 500ms is less than 1s: a volume that is only busy would fail: bad configuration`: func(c *config.Config) {
			c.Limits.HungAfter = config.Duration(500 * time.Millisecond)
		},
		`config: arena: 1.0 KiB is outside 8.0 MiB to 1.0 TiB: bad configuration`: func(c *config.Config) { c.Arena = 1 << 10 },
		`config: data_listen: "foo" is not host:port: bad configuration`:          func(c *config.Config) { c.Advertise, c.DataListen = "n1.example", "foo" },
		`config: advertise: "n1.example" needs a data_listen with a fixed port, not 127.0.0.1:0: bad configuration`: func(c *config.Config) {
			c.Advertise, c.DataListen = "n1.example", "127.0.0.1:0"
		},
		`config: advertise: "n1.example" needs a data_listen with a fixed port, not /run/penstock/data: bad configuration`: func(c *config.Config) {
			c.Advertise, c.DataListen, c.DataPlane.Provider, c.DataPlane.QoS = "n1.example", "/run/penstock/data", config.ProviderSHM, "off"
		},
	} {
		c := config.Default()
		c.Data = []string{"/x"}
		spoil(&c)
		c.EnsureDefaults()
		if err := c.Validate(); err == nil || err.Error() != want {
			t.Errorf("%v; want %s", err, want)
		}
	}
}

func TestValidateNamesEveryBadKey(t *testing.T) {
	c := config.Default()
	c.Data = []string{"/a", "/a"}
	c.IO = "aio"
	c.Durability = "never"
	c.Eviction = "mru"
	c.Listen = "nowhere"
	c.Arena = 1
	c.Capacity = 5
	c.Log.Level = "loud"
	c.Auth.TLSCert = "x"
	c.DataPlane.TLS = "maybe"
	c.DrainWithin = -1
	c.Trace.Endpoint = "collector"
	c.Limits.Reads = 0
	c.Limits.WriteBytes = 1 << 30
	c.Encryption.RewriteRate = 1 << 20
	err := c.Validate()
	for _, key := range []string{"encryption.rewrite_rate", "data", "io", "durability", "eviction", "listen", "arena", "capacity", "log.level", "auth.tls_cert", "data_plane.tls", "drain_timeout", "trace.endpoint", "limits.reads", "limits.write_bytes"} {
		if err == nil || !strings.Contains(err.Error(), "config: "+key) {
			t.Errorf("%s is not named in %v", key, err)
		}
	}
}

// TestOneAddressOfTwoSettings: two listeners cannot have one address, unless the system chooses the port.
func TestOneAddressOfTwoSettings(t *testing.T) {
	for _, tc := range []struct{ listen, data, http, want string }{
		{"127.0.0.1:7", "127.0.0.1:8", "127.0.0.1:7", `config: listen: "127.0.0.1:7" is the address of http too`},
		{"127.0.0.1:7", "127.0.0.1:7", "", `config: listen: "127.0.0.1:7" is the address of data_listen too`},
		{"127.0.0.1:6", "[::1]:7", "[::1]:7", `config: http: "[::1]:7" is the address of data_listen too`},
		{"127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0", ""},
		{"127.0.0.1:7", "127.0.0.2:7", "[::1]:7", ""},
	} {
		c := config.Default()
		c.Data, c.Listen, c.DataListen, c.HTTP = []string{"/a"}, tc.listen, tc.data, tc.http
		if err := c.Validate(); (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%+v: %v", tc, err)
		}
	}
}

// TestTextsThatCannotBeShown: gRPC cannot send a text that is not UTF-8, and a control character in a name changes tables
// and logs. Such settings are refused, except the arguments of a command.
func TestTextsThatCannotBeShown(t *testing.T) {
	for _, text := range []string{"a\xff", "a\nb", "a\tb", "a\x1b[31m", "a\x00"} {
		c := config.Default()
		c.Data = []string{"/a", "/" + text}
		c.Node, c.Cluster.Zone = text, text
		c.Encryption.KeysCommand = []string{"sh", "-c", text}
		err := c.Validate()
		for _, key := range []string{"data", "node", "cluster.zone"} {
			if err == nil || !strings.Contains(err.Error(), "config: "+key+": ") || !strings.Contains(err.Error(), strconv.Quote(text)) {
				t.Errorf("%q of %s: %v", text, key, err)
			}
		}
		if err != nil && strings.Contains(err.Error(), "keys_command: ") {
			t.Error(err)
		}
	}
	c := config.Default()
	c.Data, c.Node = []string{"/données/ディスク"}, "nœud 1"
	if err := c.Validate(); err != nil {
		t.Error(err)
	}
}

// TestDataPlaneFollowsControlPlane: a certificate encrypts both planes, unless the data plane is
// configured otherwise.
func TestDataPlaneFollowsControlPlane(t *testing.T) {
	for _, tc := range []struct {
		tls             string
		cert, encrypted bool
		bad             string
	}{
		{tls: "auto"},
		{tls: "auto", cert: true, encrypted: true},
		{tls: "on", cert: true, encrypted: true},
		{tls: "on", bad: "data_plane.tls"},
		{tls: "off", cert: true},
	} {
		c, err := load(t, "data: [/x]\ndata_plane:\n  tls: "+tc.tls+"\n")
		if err != nil {
			t.Fatal(err)
		}
		if tc.cert {
			c.Auth.TLSCert, c.Auth.TLSKey = "c", "k"
		}
		if err := c.Validate(); (err == nil) != (tc.bad == "") || err != nil && !strings.Contains(err.Error(), tc.bad) {
			t.Errorf("%+v: %v", tc, err)
		}
		if c.Encrypted() != tc.encrypted {
			t.Errorf("%+v: encrypted %v", tc, c.Encrypted())
		}
	}
}

func TestExposureNeedsProtection(t *testing.T) {
	for _, tc := range []struct {
		name string
		edit func(*config.Config)
		ok   bool
	}{
		{"loopback", func(c *config.Config) {}, true},
		{"localhost", func(c *config.Config) { c.Listen = "localhost:1" }, true},
		{"control plane", func(c *config.Config) { c.Listen = "0.0.0.0:7420" }, false},
		{"data plane", func(c *config.Config) { c.DataListen = ":7421" }, false},
		{"with token", func(c *config.Config) { c.Listen = ":7420"; c.Auth.TokenFile = "/t" }, true},
		{"with insecure", func(c *config.Config) { c.Listen = ":7420"; c.Insecure = true }, true},
		{"metrics only", func(c *config.Config) { c.HTTP = ":7422" }, true},
	} {
		c := config.Default()
		c.Data = []string{"/x"}
		tc.edit(&c)
		if err := c.Validate(); (err == nil) != tc.ok {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
}

func TestPlannerMistakes(t *testing.T) {
	if c := config.DefaultPlanner(); c.Validate() != nil {
		t.Errorf("the default is refused: %v", c.Validate())
	}
	for want, spoil := range map[string]func(*config.Planner){
		"listen":         func(c *config.Planner) { c.Listen = "nowhere" },
		"reachable":      func(c *config.Planner) { c.Listen = "0.0.0.0:7430" },
		"http":           func(c *config.Planner) { c.HTTP = "7432" },
		"of http too":    func(c *config.Planner) { c.HTTP = c.Listen },
		"drain_timeout":  func(c *config.Planner) { c.DrainWithin = -1 },
		"auth.tls_cert":  func(c *config.Planner) { c.Auth.TLSCert = "x" },
		"log.level":      func(c *config.Planner) { c.Log.Level = "loud" },
		"trace.endpoint": func(c *config.Planner) { c.Trace.Endpoint = "http://collector:4317" },
	} {
		c := config.DefaultPlanner()
		spoil(&c)
		if err := c.Validate(); !errors.Is(err, config.ErrConfig) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
	c := config.DefaultPlanner()
	if err := config.LoadInto(&c, "", []string{"PENSTOCK_SCHEDULE_READ_RATE=1e6", "PENSTOCK_SCHEDULE_ALPHA=7"}); err != nil || c.Schedule.ReadRate != 1e6 || c.Schedule.Alpha != 7 {
		t.Errorf("from the environment: %+v, %v", c.Schedule, err)
	}
	if err := config.LoadInto(&c, "", []string{"PENSTOCK_SCHEDULE_READ_RATE=fast"}); !errors.Is(err, config.ErrConfig) {
		t.Errorf("a rate of fast: %v", err)
	}
}
