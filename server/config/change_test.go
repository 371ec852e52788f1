package config_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/server/config"
)

// TestChanges: each key that was set to another value is a change with both values, and with the
// reason if a reload cannot apply it.
func TestChanges(t *testing.T) {
	secure := config.Default()
	secure.Auth = config.Auth{TLSCert: "/a/crt", TLSKey: "/a/key"}
	for _, c := range []struct {
		name string
		from config.Config
		set  func(*config.Config)
		want []config.Change
	}{
		{"nothing", config.Default(), func(*config.Config) {}, nil},
		{"a limit", config.Default(), func(c *config.Config) { c.Limits.Writes = 3 }, []config.Change{{Key: "limits.writes", Old: "256", New: "3"}}},
		{"a size that is rounded in tables", config.Default(), func(c *config.Config) { c.Limits.LoanBytes = 1<<30 + 1 }, []config.Change{{Key: "limits.loan_bytes", Old: "0 B", New: "1073741825"}}},
		{"two sizes with one rounded form", config.Config{Capacity: 1<<40 + 1}, func(c *config.Config) { c.Capacity++ }, []config.Change{{Key: "capacity", Old: "1099511627777", New: "1099511627778", Restart: "the store and the index are sized by it at the start"}}},
		{"a group with one reason", config.Default(), func(c *config.Config) { c.DataPlane.QoS = "default" }, []config.Change{{Key: "data_plane.qos", Old: "off", New: "default", Restart: "the transfer engine is opened with it"}}},
		{"another certificate", secure, func(c *config.Config) { c.Auth.TLSCert = "/b/crt" }, []config.Change{{Key: "auth.tls_cert", Old: "/a/crt", New: "/b/crt"}}},
		{"TLS off", secure, func(c *config.Config) { c.Auth = config.Auth{} }, []config.Change{
			{Key: "auth.tls_cert", Old: "/a/crt", Restart: "a listener that is open cannot change between plain text and TLS"},
			{Key: "auth.tls_key", Old: "/a/key", Restart: "a listener that is open cannot change between plain text and TLS"},
		}},
	} {
		to := c.from
		c.set(&to)
		if got := config.Changes(c.from.Keys(), to.Keys()); !slices.Equal(got, c.want) {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
	}
}

// TestChangesHaveNoPassword: a password in the URL of an engine is neither in the old nor in the new
// value, and another password is a change.
func TestChangesHaveNoPassword(t *testing.T) {
	from, to := config.DefaultGateway(), config.DefaultGateway()
	from.Engines = []string{"p0=http://user:secret1@a:1", "http://b:2"}
	to.Engines = []string{"p0=http://user:secret2@a:1", "http://b:2"}
	got := config.Changes(from.Keys(), to.Keys())
	if len(got) != 1 || strings.Contains(got[0].String(), "secret") || !strings.Contains(got[0].New, "@a:1,http://b:2") {
		t.Errorf("%v", got)
	}
}

// TestChangeNamesTheRemedy: the text of a change that a reload cannot apply has the key, both values,
// the reason and what to do.
func TestChangeNamesTheRemedy(t *testing.T) {
	c := config.Change{Key: "node", Old: "", New: "b", Restart: "clients have it"}
	if got, want := c.String(), `node: "" → b: clients have it; restart to apply it, or set it back`; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
