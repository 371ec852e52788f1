package monitor

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	"github.com/grafana/grafana-foundation-sdk/go/prometheus"
	"github.com/grafana/grafana-foundation-sdk/go/stat"
	"github.com/grafana/grafana-foundation-sdk/go/timeseries"
)

// faultsOf returns the violations of Grafana's schemas by a dashboard, or "".
func faultsOf(raw []byte) string {
	known := cog.NewRuntime()
	known.RegisterPanelcfgVariant(stat.VariantConfig())
	known.RegisterPanelcfgVariant(timeseries.VariantConfig())
	known.RegisterDataqueryVariant(prometheus.VariantConfig())
	//lint:ignore SA1019 the dashboard has the first version of the model, because older releases of Grafana read no other
	var d dashboard.Dashboard
	if err := d.UnmarshalJSONStrict(raw); err != nil { // an error without faults is not nil
		return err.Error()
	}
	return ""
}

// TestGrafanaSchema: Grafana's schemas of dashboards, of the panels and of Prometheus' queries
// accept the dashboard, and do not accept one with a mistake.
func TestGrafanaSchema(t *testing.T) {
	raw, err := json.Marshal(NewDashboard(definitions(t)))
	if err != nil {
		t.Fatal(err)
	}
	if faults := faultsOf(raw); faults != "" {
		t.Errorf("the dashboard violates Grafana's schemas:\n%s", faults)
	}
	for right, wrong := range map[string]string{
		`"title":"Read from devices"`:           `"tittle":"Read from devices"`,
		`"legendFormat":"{{instance}} {{nic}}"`: `"legend":"{{instance}} {{nic}}"`,
		`"placement":"bottom"`:                  `"placement":1`,
		`"colorMode":"none",`:                   ``,
		`"includeAll":true`:                     `"includeAll":"yes"`,
	} {
		mistaken := strings.Replace(string(raw), right, wrong, 1)
		if mistaken == string(raw) || faultsOf([]byte(mistaken)) == "" {
			t.Errorf("a dashboard with %s is accepted, or ours has no %s", wrong, right)
		}
	}
}
