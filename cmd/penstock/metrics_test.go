package main

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/server/monitor"
)

// TestMonitoringFiles: deploy/monitoring has the output of the commands, and docs/monitoring.md the
// table of the alerts. To write them again: go test ./cmd/penstock -run TestMonitoringFiles -rewrite
func TestMonitoringFiles(t *testing.T) {
	root := testkit.RepositoryRoot(t)
	page := filepath.Join(root, "docs", "monitoring.md")
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	const begin, end = "<!-- alerts -->\n", "<!-- end of alerts -->\n"
	before, rest, ok := strings.Cut(string(text), begin)
	_, after, found := strings.Cut(rest, end)
	if !ok || !found {
		t.Fatalf("%s has no place for the table of alerts", page)
	}
	for path, want := range map[string]string{
		filepath.Join(root, "deploy", "monitoring", "rules.yaml"):     penstock(t, "", nil, "metrics", "rules").must(t),
		filepath.Join(root, "deploy", "monitoring", "dashboard.json"): penstock(t, "", nil, "metrics", "dashboard").must(t),
		page: before + begin + alertTable() + end + after,
	} {
		if rewriting() {
			if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != want {
			t.Errorf("%s is not current (%v); write it again: go test ./cmd/penstock -run TestMonitoringFiles -rewrite", path, err)
		}
	}
}

// alertTable returns the alerts as a table in Markdown.
func alertTable() string {
	var b strings.Builder
	b.WriteString("| alert | severity | time | fires when | cause, and what to do |\n| --- | --- | --- | --- | --- |\n")
	for _, a := range monitor.Alerts() {
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", a.Name, a.Severity, a.For, a.Meaning, a.Description)
	}
	return b.String()
}

// TestAlertsNameExistingCommands: each command in the description of an alert exists, with its flags.
func TestAlertsNameExistingCommands(t *testing.T) {
	command := regexp.MustCompile("`penstock ([^`]+)`")
	found := 0
	for _, a := range monitor.Alerts() {
		for _, m := range command.FindAllStringSubmatch(a.Description, -1) {
			cmd, rest, err := newRootCommand(world{out: io.Discard, err: io.Discard}).Find(strings.Fields(m[1]))
			if err == nil {
				err = cmd.ParseFlags(rest)
			}
			if err == nil && len(cmd.Flags().Args()) > 0 {
				err = fmt.Errorf("%s has no command %v", cmd.CommandPath(), cmd.Flags().Args())
			}
			if err != nil {
				t.Errorf("%s: penstock %s: %v", a.Name, m[1], err)
			}
			found++
		}
	}
	if found < 20 {
		t.Errorf("%d commands were found", found)
	}
}

// TestMonitoringConfiguration: Prometheus accepts the example of a configuration and the rules in
// both formats.
func TestMonitoringConfiguration(t *testing.T) {
	promtool := testkit.Program(t, "promtool", "prometheus")
	dir := filepath.Join(testkit.RepositoryRoot(t), "deploy", "monitoring")
	config, err := os.ReadFile(filepath.Join(dir, "prometheus.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, job := range []string{monitor.NodeJob, monitor.PlannerJob, monitor.GatewayJob} {
		if !strings.Contains(string(config), "job_name: "+job+"\n") {
			t.Errorf("deploy/monitoring/prometheus.yaml has no job %s", job)
		}
	}
	rules := writeFile(t, t.TempDir(), "rules.json", []byte(penstock(t, "", nil, "metrics", "rules", "--format", "json").must(t)))
	for _, args := range [][]string{{"check", "config", filepath.Join(dir, "prometheus.yaml")}, {"check", "rules", "--lint-fatal", rules}} {
		if out, err := exec.CommandContext(t.Context(), promtool, args...).CombinedOutput(); err != nil {
			t.Errorf("promtool %v: %v\n%s", args, err, out)
		}
	}
	alerts := decode[[]monitor.Alert](t, penstock(t, "", nil, "metrics", "alerts", "--format", "json"))
	table := penstock(t, "", nil, "metrics", "alerts").must(t)
	for _, a := range alerts {
		if a.Expr == "" || !strings.Contains(table, a.Name) {
			t.Errorf("alert %+v is not in the table, or has no expression", a)
		}
	}
	if len(alerts) != len(monitor.Alerts()) {
		t.Errorf("%d alerts", len(alerts))
	}
}
