package monitor

import (
	"encoding/json"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func definitions(t *testing.T) map[string]Metric {
	t.Helper()
	metrics, err := Metrics()
	if err != nil {
		t.Fatal(err)
	}
	return metrics
}

// TestMetrics: the definitions are those of all components, with their labels.
func TestMetrics(t *testing.T) {
	metrics := definitions(t)
	for name, labels := range map[string]string{
		"penstock_read_failures_total": "reason", "penstock_store_used_bytes": "", "penstock_volume_state": "volume state", "penstock_epoch_blocks": "namespace epoch",
		"penstock_planner_step_seconds": "", "penstock_network_source_up": "source", "penstock_gateway_requests_total": "engine code", "penstock_offload_seconds": "",
	} {
		if m, ok := metrics[name]; !ok || strings.Join(m.Labels, " ") != labels || m.Help == "" {
			t.Errorf("%s: %+v; want the labels %q", name, m, labels)
		}
	}
	if len(metrics) < 150 {
		t.Errorf("%d metrics", len(metrics))
	}
	if m, err := metricOf("Desc{}"); err == nil {
		t.Errorf("a definition of an unknown form is %+v", m)
	}
}

var (
	text     = regexp.MustCompile(`"(?:[^"\\]|\\.)*"`)
	grouping = regexp.MustCompile(`\b(?:by|without|on|ignoring) \(([^)]*)\)`)
	matchers = regexp.MustCompile(`\{([^}]*)\}`)
	word     = regexp.MustCompile(`[a-zA-Z_:][a-zA-Z0-9_:]*`)
)

// unknownIn returns the metrics and labels of an expression that no component exports.
func unknownIn(expr string, metrics map[string]Metric) (unknown []string) {
	labels := []string{"job", "instance", "le", "alertname", "alertstate"}
	for _, name := range metricsOf(expr) {
		m, ok := definition(metrics, name)
		if !ok && name != "up" {
			unknown = append(unknown, name)
		}
		labels = append(labels, m.Labels...)
	}
	bare := text.ReplaceAllString(expr, "")
	for _, group := range append(grouping.FindAllStringSubmatch(bare, -1), matchers.FindAllStringSubmatch(bare, -1)...) {
		for _, l := range word.FindAllString(group[1], -1) {
			if !slices.Contains(labels, l) {
				unknown = append(unknown, "label "+l)
			}
		}
	}
	return unknown
}

var legendLabel = regexp.MustCompile(`\{\{(\w+)\}\}`)

// legendLabels returns the expression that has the labels of a template in a grouping.
func legendLabels(template string) string {
	var labels []string
	for _, m := range legendLabel.FindAllStringSubmatch(template, -1) {
		labels = append(labels, m[1])
	}
	return " by (" + strings.Join(labels, ", ") + ")"
}

var templateLabel = regexp.MustCompile(`\$labels\.(\w+)`)

// TestExpressionsHaveExistingMetrics: each metric and each label in a rule, an alert or a panel is
// one that a component exports.
func TestExpressionsHaveExistingMetrics(t *testing.T) {
	metrics := definitions(t)
	checked := 0
	check := func(what, expr string) {
		t.Helper()
		checked++
		if unknown := unknownIn(expr, metrics); len(unknown) > 0 {
			t.Errorf("%s: %v in %s", what, unknown, expr)
		}
	}
	for _, r := range Records() {
		check(r.Name, r.Expr)
	}
	for _, a := range Alerts() {
		check(a.Name, a.Expr)
		check(a.Name+", summary", a.Expr+legendLabels(templateLabel.ReplaceAllString(strings.ReplaceAll(a.Summary, "{{ ", "{{"), "$1}}")))
		if strings.Contains(a.Description, "{{") {
			t.Errorf("%s: the description is a template", a.Name)
		}
		for _, name := range regexp.MustCompile("`(penstock_[a-z0-9_]+)`").FindAllStringSubmatch(a.Description, -1) {
			check(a.Name+", description", name[1])
		}
	}
	for _, row := range Rows() {
		for _, p := range row.Panels {
			for _, q := range p.Queries {
				check(row.Title+": "+p.Title, q.Expr)
				check(row.Title+": "+p.Title+", legend", q.Expr+legendLabels(q.Legend))
			}
		}
	}
	if checked < 200 {
		t.Errorf("%d expressions were checked", checked)
	}
}

// TestUnknownIn: the check of expressions finds what does not exist.
func TestUnknownIn(t *testing.T) {
	metrics := definitions(t)
	for expr, want := range map[string]string{
		"penstock_no_such_metric > 1":                                    "penstock_no_such_metric",
		"rate(penstock_read_latency_seconds_bucket[5m])":                 "",
		"rate(penstock_read_latency_seconds_buckets[5m])":                "penstock_read_latency_seconds_buckets",
		`penstock_volume_state{stage="failed"}`:                          "label stage",
		"sum by (nic) (penstock_volume_state)":                           "label nic",
		"instance:penstock_no_record:ratio > 0":                          "instance:penstock_no_record:ratio",
		"instance:penstock_store_used_bytes:ratio":                       "",
		`sum by (job, reason) (rate(penstock_removed_bytes_total[1h]))`:  "",
		`sum by (job, reason) (rate(penstock_store_used_bytes[1h]))`:     "label reason",
		`penstock_gateway_requests_total{code=~"5..",instance="reason"}`: "",
	} {
		if got := strings.Join(unknownIn(expr, metrics), " "); got != want {
			t.Errorf("%s: unknown: %q; want %q", expr, got, want)
		}
	}
}

// TestRecordsAreUsed: each recording rule is in an alert or a panel.
func TestRecordsAreUsed(t *testing.T) {
	var all strings.Builder
	for _, a := range Alerts() {
		all.WriteString(a.Expr + "\n")
	}
	for _, row := range Rows() {
		for _, p := range row.Panels {
			for _, q := range p.Queries {
				all.WriteString(q.Expr + "\n")
			}
		}
	}
	names := make(map[string]bool)
	for _, r := range Records() {
		if !strings.Contains(all.String(), r.Name) {
			t.Errorf("%s is used nowhere", r.Name)
		}
		if names[r.Name] {
			t.Errorf("%s is there twice", r.Name)
		}
		names[r.Name] = true
	}
}

// TestScoped: each metric of a query is restricted to the selected jobs and instances.
func TestScoped(t *testing.T) {
	const both = `job=~"$job",instance=~"$instance"`
	for expr, want := range map[string]string{
		"sum(1 - up)":            "sum(1 - up{" + both + "})",
		"penstock_data_nic_up":   "penstock_data_nic_up{" + both + "}",
		`penstock_a{reason="b"}`: `penstock_a{` + both + `,reason="b"}`,
		"sum by (nic) (rate(penstock_a_total[5m])) / instance:penstock_b:ratio": "sum by (nic) (rate(penstock_a_total{" + both + "}[5m])) / instance:penstock_b:ratio{" + both + "}",
		"namespace:penstock_b:ratio": `namespace:penstock_b:ratio{job=~"$job"}`,
	} {
		if got := scoped(expr); got != want {
			t.Errorf("%s\n%s\nwant\n%s", expr, got, want)
		}
	}
}

// TestDashboard: the model has the panels of all rows, with distinct ids, on the grid without
// overlaps, and each with a unit, a description, and queries.
func TestDashboard(t *testing.T) {
	metrics := definitions(t)
	raw, err := json.Marshal(NewDashboard(metrics))
	if err != nil {
		t.Fatal(err)
	}
	var d Dashboard
	if err := json.Unmarshal(raw, &d); err != nil {
		t.Fatal(err)
	}
	ids := make(map[int]bool)
	panels := 0
	place := func(p grafanaPanel, grid map[[2]int]string) {
		if p.ID <= 0 || ids[p.ID] {
			t.Errorf("%s: id %d", p.Title, p.ID)
		}
		ids[p.ID] = true
		for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
			for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
				if other := grid[[2]int{x, y}]; other != "" || x >= gridColumns {
					t.Errorf("%s overlaps %q or the edge at column %d, line %d", p.Title, other, x, y)
				}
				grid[[2]int{x, y}] = p.Title
			}
		}
		if p.Type == "row" {
			return
		}
		panels++
		if p.FieldConfig.Defaults.Unit == "" || len(p.Targets) == 0 {
			t.Errorf("%s has no unit or no queries", p.Title)
		}
		refs := make(map[string]bool)
		for _, q := range p.Targets {
			if refs[q.RefID] || q.Expr == "" || p.Type != string(Stat) && q.LegendFormat == "" {
				t.Errorf("%s: query %+v", p.Title, q)
			}
			refs[q.RefID] = true
			for _, name := range metricsOf(q.Expr) {
				if m, _ := definition(metrics, name); !strings.Contains(p.Description, m.Help) {
					t.Errorf("%s: the help text of %s is not in the description:\n%s", p.Title, name, p.Description)
				}
			}
		}
	}
	top := make(map[[2]int]string)
	var rows []string
	for _, p := range d.Panels {
		place(p, top)
		if p.Type != "row" {
			continue
		}
		rows = append(rows, p.Title)
		inner := make(map[[2]int]string)
		for _, q := range *p.Panels {
			place(q, inner)
		}
	}
	want := 0
	for i, row := range Rows() {
		want += len(row.Panels)
		if i >= len(rows) || rows[i] != row.Title {
			t.Fatalf("rows %v", rows)
		}
	}
	if panels != want || len(rows) != 8 {
		t.Errorf("%d panels in %d rows; want %d in 8", panels, len(rows), want)
	}
	var variables []string
	for _, v := range d.Templating.List {
		variables = append(variables, v.Name)
	}
	if !slices.Equal(variables, []string{"datasource", "job", "instance"}) {
		t.Errorf("variables %v", variables)
	}
}
