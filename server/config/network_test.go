package config_test

import (
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/server/config"
)

func TestNetwork(t *testing.T) {
	for _, c := range []struct {
		what string
		env  []string
		says string
	}{
		{"nothing", nil, ""},
		{"a file and the bytes", []string{"PENSTOCK_NETWORK_FILE=n.yaml", "PENSTOCK_NETWORK_BYTES_PER_TOKEN=327680"}, ""},
		{"no bytes", []string{"PENSTOCK_NETWORK_FILE=n.yaml"}, "network.bytes_per_token"},
		{"no file", []string{"PENSTOCK_NETWORK_KUBERNETES=true", "PENSTOCK_NETWORK_BYTES_PER_TOKEN=1"}, "network.file"},
		{"no query", []string{"PENSTOCK_NETWORK_FILE=n.yaml", "PENSTOCK_NETWORK_BYTES_PER_TOKEN=1", "PENSTOCK_NETWORK_PROMETHEUS=http://p"}, "without a query"},
		{"a query for nobody", []string{"PENSTOCK_NETWORK_POD_QUERY=x"}, "there are queries"},
		{"no refresh", []string{"PENSTOCK_NETWORK_FILE=n.yaml", "PENSTOCK_NETWORK_BYTES_PER_TOKEN=1", "PENSTOCK_NETWORK_REFRESH=0s"}, "network.refresh"},
	} {
		cfg := config.DefaultPlanner()
		if err := config.LoadInto(&cfg, "", c.env); err != nil {
			t.Errorf("%s: %v", c.what, err)
			continue
		}
		err := cfg.Validate()
		if (c.says == "") != (err == nil) || (err != nil && !strings.Contains(err.Error(), c.says)) {
			t.Errorf("%s: %v, want %q", c.what, err, c.says)
		}
	}
}
