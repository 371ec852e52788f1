package main

import (
	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/penstock-kv/penstock/server/monitor"
)

func newMetricsCommand() *cobra.Command {
	return noun(&cobra.Command{
		Use:   "metrics",
		Short: "Dashboard and alert rules for Grafana and Prometheus",
	}, newMetricsAlertsCommand(), newMetricsDashboardCommand(), newMetricsRulesCommand())
}

func newMetricsRulesCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "rules",
		Short: "Print the recording rules and alerts for Prometheus",
		Long: `Print a file for rule_files of Prometheus: recording rules and alerts. Each alert has a
severity (critical or warning), a summary, and a description that says what to do. The
file is YAML. With --format json it is JSON, which Prometheus reads too.

The rules expect the jobs penstock-node, penstock-planner and penstock-gateway
(deploy/monitoring/prometheus.yaml).`,
		Example: "penstock metrics rules > /etc/prometheus/penstock.yaml",
		Args:    args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			out := outputOf(cmd)
			rules := monitor.NewRules()
			if out.json {
				return out.emitJSON(rules, "  ")
			}
			enc := yaml.NewEncoder(out.w)
			enc.SetIndent(2)
			if err := enc.Encode(rules); err != nil {
				return err
			}
			return enc.Close()
		},
	}
}

func newMetricsDashboardCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "dashboard",
		Short: "Print the dashboard for Grafana",
		Long: `Print a dashboard for Grafana, as JSON whatever --format is. It shows the cluster, storage
nodes, volumes, namespaces, the transfer engine, the planner and the gateway. Variables
select the data source, the jobs and the instances. The dashboard needs the recording
rules of ` + "`penstock metrics rules`" + `, and no plugin.`,
		Example: "penstock metrics dashboard > penstock.json",
		Args:    args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			metrics, err := monitor.Metrics()
			if err != nil {
				return err
			}
			return outputOf(cmd).emitJSON(monitor.NewDashboard(metrics), "  ")
		},
	}
}

func newMetricsAlertsCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "alerts",
		Short: "List the alerts",
		Long: `List the alerts of ` + "`penstock metrics rules`" + `: severity, the time for which the condition
must hold, and the condition. With --format json also the expression, the summary and the
instructions.`,
		Example: "penstock metrics alerts --format json",
		Args:    args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			alerts := monitor.Alerts()
			return outputOf(cmd).emit(alerts, func(t *table) {
				t.row("ALERT", "SEVERITY", "FOR", "MEANING")
				for _, a := range alerts {
					t.row(a.Name, a.Severity, a.For, a.Meaning)
				}
			})
		},
	}
}
