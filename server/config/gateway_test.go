package config_test

import (
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/server/config"
)

// gatewayOf returns the default configuration with these engines.
func gatewayOf(engines ...string) config.Gateway {
	c := config.DefaultGateway()
	c.Engines = engines
	return c
}

// TestGatewayNeedsOnlyEngines: the default is valid except for the missing engines.
func TestGatewayNeedsOnlyEngines(t *testing.T) {
	c := gatewayOf()
	const want = "config: engine: name at least one (--engine URL): bad configuration"
	if err := c.Validate(); !errors.Is(err, config.ErrConfig) || err.Error() != want {
		t.Errorf("without engines: %v; want %s", err, want)
	}
	for _, spoil := range []func(*config.Gateway){
		func(c *config.Gateway) {},
		func(c *config.Gateway) {
			c.Engines = []string{"http://10.0.0.1:8000", "https://engine/base/", "http://[::1]:8000", "p0=http://10.0.0.2:8000", "engine:1=http://a/x=y"}
		},
		func(c *config.Gateway) { c.HTTP = "" },
		func(c *config.Gateway) { c.HTTP = "0.0.0.0:7442" },
		func(c *config.Gateway) { c.DrainWithin = 0 },
		func(c *config.Gateway) { c.LoadFactor = 1 },
		func(c *config.Gateway) { c.LoadFactor = math.Inf(1) },
		func(c *config.Gateway) { c.MaxBody, c.BodyMemory = 1<<30, 1<<30+1<<20 },
		func(c *config.Gateway) { c.Listen, c.Insecure = "0.0.0.0:7440", true },
		func(c *config.Gateway) { c.Listen, c.Auth.TokenFile = "0.0.0.0:7440", "token" },
		func(c *config.Gateway) { c.TokenFile, c.CA, c.TLS = "token", "ca", true },
		func(c *config.Gateway) {
			c.Planner, c.Namespace, c.Servers, c.TenantHeader, c.FirstHeader, c.FirstToken = "a:7430", "m", []string{"a:7420"}, "X-Tenant", "X-First-Token-Ms", 1
		},
		func(c *config.Gateway) {
			c.Planner, c.Namespace, c.Servers, c.Cert, c.CertKey = "a:7430", "m", []string{"a:7420", "b:7420"}, "cert", "key"
		},
	} {
		c := gatewayOf("http://10.0.0.1:8000")
		spoil(&c)
		if err := c.Validate(); err != nil {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

// TestGatewayMistakes: each bad value is one error, which starts with the key.
func TestGatewayMistakes(t *testing.T) {
	for _, c := range []struct {
		key   string
		spoil func(*config.Gateway)
	}{
		{"listen", func(c *config.Gateway) { c.Listen = "nowhere" }},
		{"listen", func(c *config.Gateway) { c.Listen = "0.0.0.0:7440" }},
		{"http", func(c *config.Gateway) { c.HTTP = "7442" }},
		{"engine", func(c *config.Gateway) { c.Engines = []string{} }},
		{"engine", func(c *config.Gateway) { c.Engines = []string{""} }},
		{"engine", func(c *config.Gateway) { c.Engines = []string{"10.0.0.1:8000"} }},
		{"engine", func(c *config.Gateway) { c.Engines = []string{"engine:8000"} }},
		{"engine", func(c *config.Gateway) { c.Engines = []string{"ftp://engine"} }},
		{"engine", func(c *config.Gateway) { c.Engines = []string{"http://"} }},
		{"engine", func(c *config.Gateway) { c.Engines = []string{"http://engine?a=b"} }},
		{"engine", func(c *config.Gateway) { c.Engines = []string{"http://engine#a"} }},
		{"engine", func(c *config.Gateway) { c.Engines = []string{"http://user:hidden@engine"} }},
		{"engine", func(c *config.Gateway) { c.Engines = []string{"http://user:hidden@engine:port"} }},
		{"engine", func(c *config.Gateway) { c.Engines = []string{"http://engine", "http://engine/"} }},
		{"engine", func(c *config.Gateway) { c.Engines = []string{"a=http://engine", "b=http://engine"} }},
		{"engine", func(c *config.Gateway) { c.Engines = []string{"a=http://engine", "a=http://another"} }},
		{"engine", func(c *config.Gateway) { c.Engines = []string{"a=engine"} }},
		{"drain_timeout", func(c *config.Gateway) { c.DrainWithin = -1 }},
		{"first_token", func(c *config.Gateway) { c.FirstToken = -1 }},
		{"tenant_header", func(c *config.Gateway) { c.TenantHeader = "X Tenant" }},
		{"first_token_header", func(c *config.Gateway) { c.FirstHeader = "X-First:" }},
		{"planner", func(c *config.Gateway) { c.TenantHeader = "X-Tenant" }},
		{"planner", func(c *config.Gateway) { c.FirstHeader = "X-First-Token-Ms" }},
		{"planner", func(c *config.Gateway) { c.FirstToken = 1 }},
		{"max_in_flight", func(c *config.Gateway) { c.MaxInFlight = 0 }},
		{"max_queue", func(c *config.Gateway) { c.MaxQueue = -1 }},
		{"queue_wait", func(c *config.Gateway) { c.QueueWait = 0 }},
		{"max_attempts", func(c *config.Gateway) { c.MaxAttempts = 0 }},
		{"load_factor", func(c *config.Gateway) { c.LoadFactor = 0.99 }},
		{"load_factor", func(c *config.Gateway) { c.LoadFactor = math.NaN() }},
		{"prefix_blocks", func(c *config.Gateway) { c.PrefixBlocks = 0 }},
		{"max_body", func(c *config.Gateway) { c.MaxBody = 1 }},
		{"max_body", func(c *config.Gateway) { c.MaxBody = 2 << 30 }},
		{"max_body", func(c *config.Gateway) { c.MaxBody = math.MaxInt64 }},
		{"body_memory", func(c *config.Gateway) { c.BodyMemory = c.MaxBody }},
		{"health_interval", func(c *config.Gateway) { c.HealthInterval = 0 }},
		{"health_timeout", func(c *config.Gateway) { c.HealthTimeout = -1 }},
		{"auth.tls_cert, auth.tls_key", func(c *config.Gateway) { c.Auth.TLSKey = "x" }},
		{"planner", func(c *config.Gateway) { c.Namespace = "m" }},
		{"planner", func(c *config.Gateway) { c.Servers = []string{"a:7420"} }},
		{"namespace", func(c *config.Gateway) { c.Planner, c.Servers = "a:7430", []string{"a:7420"} }},
		{"servers", func(c *config.Gateway) { c.Planner, c.Namespace = "a:7430", "m" }},
		{"servers", func(c *config.Gateway) {
			c.Planner, c.Namespace, c.Servers = "a:7430", "m", []string{"a:7420", "a:7420"}
		}},
		{"output_tokens", func(c *config.Gateway) { c.OutputTokens = 0 }},
		{"replan_wait", func(c *config.Gateway) { c.ReplanWait = -1 }},
		{"cert, key", func(c *config.Gateway) { c.Cert = "x" }},
		{"auth.client_ca", func(c *config.Gateway) { c.Auth.ClientCA = "x" }},
		{"log.level", func(c *config.Gateway) { c.Log.Level = "loud" }},
		{"log.format", func(c *config.Gateway) { c.Log.Format = "xml" }},
	} {
		g := gatewayOf("http://10.0.0.1:8000")
		c.spoil(&g)
		err := g.Validate()
		if !errors.Is(err, config.ErrConfig) {
			t.Errorf("%s: %v", c.key, err)
		} else if text := err.Error(); !strings.HasPrefix(text, "config: "+c.key+": ") || strings.Count(text, "bad configuration") != 1 || strings.Contains(text, "hidden") {
			t.Errorf("%s: %s", c.key, text)
		}
	}
}

// TestGatewayOffload: a complete configuration of another datacenter is valid, and the error of each other
// one names its key.
func TestGatewayOffload(t *testing.T) {
	complete := func() config.Gateway {
		g := gatewayOf("http://10.0.0.1:8000")
		g.Planner, g.Namespace, g.Servers = "a:7430", "m", []string{"a:7420"}
		g.Offload.URL, g.Offload.Servers, g.Offload.Threshold, g.Offload.LinkRate = "http://far:7440", []string{"far:7420"}, 1000, 1<<20
		return g
	}
	g := complete()
	if err := g.Validate(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		key   string
		spoil func(g *config.Gateway)
	}{
		{"planner", func(g *config.Gateway) { g.Planner, g.Namespace, g.Servers = "", "", nil }},
		{"offload.url", func(g *config.Gateway) { g.Offload.URL = "" }},
		{"offload.url", func(g *config.Gateway) { g.Offload.URL = "far:7440" }},
		{"offload.url", func(g *config.Gateway) { g.Offload.URL = "http://user:hidden@far" }},
		{"offload.servers", func(g *config.Gateway) { g.Offload.Servers = nil }},
		{"offload.shards", func(g *config.Gateway) { g.Offload.Shards = []string{"m"} }},
		{"offload.shards", func(g *config.Gateway) { g.Offload.Shards = []string{"n", "n"} }},
		{"offload.shards", func(g *config.Gateway) { g.Offload.Shards = []string{""} }},
		{"offload.threshold", func(g *config.Gateway) { g.Offload.Threshold = 0 }},
		{"offload.link_rate", func(g *config.Gateway) { g.Offload.LinkRate = 0 }},
		{"offload.timeout", func(g *config.Gateway) { g.Offload.Timeout = 0 }},
		{"offload.timeout", func(g *config.Gateway) { g.Offload.Timeout = g.QueueWait }},
		{"offload.backlog", func(g *config.Gateway) { g.Offload.Backlog = -1 }},
		{"offload.in_flight", func(g *config.Gateway) { g.Offload.InFlight = 0 }},
		{"offload.memory", func(g *config.Gateway) { g.Offload.Memory = 1 }},
	} {
		g := complete()
		c.spoil(&g)
		if err := g.Validate(); !errors.Is(err, config.ErrConfig) || !strings.HasPrefix(err.Error(), "config: "+c.key+": ") || strings.Contains(err.Error(), "hidden") {
			t.Errorf("%s: %v", c.key, err)
		}
	}
}

// TestOffloadShards: the names of the engines' adapters have the number of ranks, and a setting replaces them.
func TestOffloadShards(t *testing.T) {
	for _, c := range []struct{ namespace, set, want string }{
		{"llama/tp3.0", "", "llama/tp3.1 llama/tp3.2"},
		{"llama/tp1.0", "", ""},
		{"llama/tp3.1", "", ""}, // no first shard
		{"llama", "", ""},
		{"llama", "other other2", "other other2"},
		{"llama/tp3.0", "other", "other"},
	} {
		g := gatewayOf("http://10.0.0.1:8000")
		g.Namespace, g.Offload.Shards = c.namespace, strings.Fields(c.set)
		if got := strings.Join(g.OffloadShards(), " "); got != c.want {
			t.Errorf("%q with %q: %q, want %q", c.namespace, c.set, got, c.want)
		}
	}
}

// TestGatewayFromTheEnvironment: the elements of a list are separated by commas, and an invalid
// value is an error.
func TestGatewayFromTheEnvironment(t *testing.T) {
	c := config.DefaultGateway()
	if err := config.LoadInto(&c, "", []string{"PENSTOCK_ENGINE=http://a,http://b", "PENSTOCK_LOAD_FACTOR=1.5", "PENSTOCK_MAX_BODY=1MiB"}); err != nil || len(c.Engines) != 2 || c.LoadFactor != 1.5 || c.MaxBody != 1<<20 {
		t.Errorf("%+v, %v", c, err)
	}
	if err := config.LoadInto(&c, "", []string{"PENSTOCK_MAX_QUEUE=many"}); !errors.Is(err, config.ErrConfig) || !strings.Contains(err.Error(), "PENSTOCK_MAX_QUEUE") {
		t.Errorf("a queue of many: %v", err)
	}
}
