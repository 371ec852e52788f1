package main

import (
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/penstock-kv/penstock/dualpath/redistribute"
	"github.com/penstock-kv/penstock/internal/yamlfile"
)

// redistribution has the values of the configuration file, which flags may override. Times are in
// seconds.
type redistribution struct {
	Fabric string `yaml:"fabric"`
	Ranks  int    `yaml:"ranks"`
	Model  struct {
		Key     int `yaml:"key_width"`
		Value   int `yaml:"value_width"`
		Element int `yaml:"element_bytes"`
		Layers  int `yaml:"layers"`
	} `yaml:"model"`
	Splice  float64 `yaml:"splice_seconds"`
	Prefill float64 `yaml:"prefill_seconds_per_token_layer"`
	Merge   float64 `yaml:"merge_seconds"`
	Holder  struct {
		Base  float64 `yaml:"base_seconds"`
		Step  float64 `yaml:"step_seconds"`
		Elbow int     `yaml:"elbow_requesters"`
	} `yaml:"holder"`
	Gather struct {
		Holder    float64 `yaml:"holder_seconds"`
		Bandwidth float64 `yaml:"bandwidth_bytes_per_second"`
	} `yaml:"gather"`
	Host struct {
		Fixed float64 `yaml:"fixed_seconds"`
		Row   float64 `yaml:"row_seconds"`
	} `yaml:"host"`
	Request struct {
		Rows       int      `yaml:"rows"`
		Tokens     int      `yaml:"tokens"`
		Reuse      string   `yaml:"reuse"`
		Holders    int      `yaml:"holders"`
		Steps      int      `yaml:"steps"`
		Trips      int      `yaml:"trips"`
		Requesters int      `yaml:"requesters"`
		Flows      int      `yaml:"flows"`
		Without    []string `yaml:"without"`
	} `yaml:"request"`
}

// paperRedistribution returns the values for the model and the cluster of the paper Move the Query.
func paperRedistribution() redistribution {
	m := redistribute.H100(redistribute.Fabrics()[0])
	r := redistribution{Fabric: m.Fabric.Name, Ranks: 1, Splice: m.Splice, Prefill: m.Prefill, Merge: m.Merge}
	r.Model.Key, r.Model.Value, r.Model.Element, r.Model.Layers = 576, 512, 2, m.Payload.Layers
	r.Holder.Base, r.Holder.Step, r.Holder.Elbow = m.Holder.Base, m.Holder.Step, m.Holder.Elbow
	r.Request.Rows, r.Request.Tokens, r.Request.Reuse = 256, 2048, redistribute.Moved.String()
	r.Request.Holders, r.Request.Steps, r.Request.Trips, r.Request.Requesters = 1, 1, 1, 1
	return r
}

func newPlanRedistribute() *cobra.Command {
	r := paperRedistribution()
	var file string
	var transport bool
	cmd := &cobra.Command{
		Use:   "redistribute --rows N --tokens N",
		Short: "Compare the time to move the query, to move the cache, and to compute again",
		Long: `A request attends to a chunk of KV that another instance holds. Its query rows can be
routed there and the partial results merged, the chunk can be fetched, or its tokens can
be computed again. The command prints the time of each method, a sum of terms, and the
fastest method (Move the Query, sections 4 and 5).

Numbers come from flags, else from --config FILE (YAML; the keys are those of
--print-config), else they are the paper's: DeepSeek-V2-Lite on H100 over IBGDA.
--fabric is one of ` + strings.Join(fabricNames(), ", ") + `,
or a file that penstock fabric probe wrote.

The paper counts one round trip a decoding step. If each layer's query waits for the
layer before, set --trips to the number of attention layers.

  --reuse moved      contiguous, at another position than in the cache: fetch
                     re-rotates and splices it, once
  --reuse prefix     contiguous, at its position in the cache: no splice
  --reuse selected   entries that an indexer selects in every step, on --holders
                     instances: no splice, but a fetch serves one step`,
		Example: `  penstock plan redistribute --rows 256 --tokens 2048
  penstock plan redistribute --tokens 2048 --reuse selected --holders 7 --trips 27
  penstock fabric probe --write tcp.json && penstock plan redistribute --fabric tcp.json`,
		Args: args(cobra.NoArgs),
	}
	f := cmd.Flags()
	f.StringVar(&file, "config", "", "file with the numbers (YAML)")
	show := f.Bool("print-config", false, "print the configuration with these numbers, and compute no plan")
	f.BoolVar(&transport, "transport", false, "count only the wire, without compute, merge and host, as in the paper's figures")
	f.StringVar(&r.Fabric, "fabric", r.Fabric, "fabric between the instances: a name or a file")
	f.IntVar(&r.Ranks, "ranks", r.Ranks, "tensor-parallel degree: costs are those of one pair of ranks")
	f.IntVar(&r.Request.Rows, "rows", r.Request.Rows, "query rows of the batch")
	f.IntVar(&r.Request.Tokens, "tokens", r.Request.Tokens, "tokens of the chunk, or entries of the selection")
	f.StringVar(&r.Request.Reuse, "reuse", r.Request.Reuse, "moved, prefix or selected")
	f.IntVar(&r.Request.Holders, "holders", r.Request.Holders, "instances that hold the selected entries")
	f.IntVar(&r.Request.Steps, "steps", r.Request.Steps, "decoding steps that attend to the chunk")
	f.IntVar(&r.Request.Trips, "trips", r.Request.Trips, "round trips of route in a step")
	f.IntVar(&r.Request.Requesters, "requesters", r.Request.Requesters, "requesters that the holder serves concurrently")
	f.IntVar(&r.Request.Flows, "flows", r.Request.Flows, "flows of others on the same link")
	f.StringSliceVar(&r.Request.Without, "without", nil, "methods that are not available: route, fetch, local")
	completeFlag(cmd, "fabric", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return fabricNames(), cobra.ShellCompDirectiveDefault // the default adds file names
	})
	completeValues(cmd, "reuse", redistribute.Moved.String(), redistribute.Prefix.String(), redistribute.Selected.String())
	completeList(cmd, "without", redistribute.Route.String(), redistribute.Fetch.String(), redistribute.Local.String())
	splice := f.Duration("splice", secondsOf(r.Splice), "time to adapt a fetched chunk to its new position")
	prefill := f.Duration("prefill-token", secondsOf(r.Prefill), "time to recompute one token of one layer")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		flags := r
		flags.Splice, flags.Prefill = splice.Seconds(), prefill.Seconds()
		cfg, err := readRedistribution(file)
		if err != nil {
			return err
		}
		cfg.override(cmd, flags)
		if *show {
			return printYAML(cmd.OutOrStdout(), cfg)
		}
		answer, err := cfg.decide(transport)
		if err != nil && file != "" {
			err = fmt.Errorf("with %s and the flags: %w", file, err)
		}
		var bad *yamlfile.Error
		switch {
		case errors.As(err, &bad):
			return err
		case err != nil:
			return usageError{err}
		}
		return outputOf(cmd).emit(answer, func(t *table) { answer.print(t) })
	}
	return cmd
}

func fabricNames() []string {
	var names []string
	for _, f := range redistribute.Fabrics() {
		names = append(names, f.Name)
	}
	return names
}

// secondsOf returns a duration of s seconds.
func secondsOf(s float64) time.Duration { return time.Duration(math.Round(s * 1e9)) }

// readRedistribution reads the file, with the paper's numbers as defaults. "" means no file.
func readRedistribution(path string) (redistribution, error) {
	r := paperRedistribution()
	if path == "" {
		return r, nil
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return r, err
	}
	f, err := yamlfile.Parse(path, raw)
	if err == nil {
		err = f.Decode(&r)
	}
	if err == nil {
		err = r.check(f)
	}
	return r, err
}

// check returns an error for values out of their ranges, each with its line in the file.
func (r redistribution) check(f *yamlfile.File) error {
	q := r.Request
	for _, x := range []struct {
		path       string
		value, min float64
	}{
		{"ranks", float64(r.Ranks), 1},
		{"model.key_width", float64(r.Model.Key), 1}, {"model.value_width", float64(r.Model.Value), 1},
		{"model.element_bytes", float64(r.Model.Element), 1}, {"model.layers", float64(r.Model.Layers), 1},
		{"splice_seconds", r.Splice, 0}, {"prefill_seconds_per_token_layer", r.Prefill, 0}, {"merge_seconds", r.Merge, 0},
		{"holder.base_seconds", r.Holder.Base, 0}, {"holder.step_seconds", r.Holder.Step, 0}, {"holder.elbow_requesters", float64(r.Holder.Elbow), 0},
		{"gather.holder_seconds", r.Gather.Holder, 0}, {"gather.bandwidth_bytes_per_second", r.Gather.Bandwidth, 0},
		{"host.fixed_seconds", r.Host.Fixed, 0}, {"host.row_seconds", r.Host.Row, 0},
		{"request.rows", float64(q.Rows), 1}, {"request.tokens", float64(q.Tokens), 1}, {"request.holders", float64(q.Holders), 1},
		{"request.steps", float64(q.Steps), 1}, {"request.trips", float64(q.Trips), 1}, {"request.requesters", float64(q.Requesters), 1},
		{"request.flows", float64(q.Flows), 0},
	} {
		if !(x.value >= x.min) {
			return f.Errorf(x.path, "is %v; it must be at least %v", x.value, x.min)
		}
	}
	if _, err := redistribute.ParseReuse(q.Reuse); err != nil {
		return f.Errorf("request.reuse", "%v", err)
	}
	for i, w := range q.Without {
		if !slices.Contains([]string{redistribute.Route.String(), redistribute.Fetch.String(), redistribute.Local.String()}, w) {
			return f.Errorf(fmt.Sprintf("request.without.%d", i), "is %q; it must be route, fetch or local", w)
		}
	}
	return nil
}

// printYAML prints v in the format of the configuration file.
func printYAML(w io.Writer, v any) error {
	enc := yaml.NewEncoder(w)
	enc.SetIndent(2)
	return errors.Join(enc.Encode(v), enc.Close())
}

// override sets the values of the flags that were given.
func (r *redistribution) override(cmd *cobra.Command, flags redistribution) {
	for name, set := range map[string]func(){
		"fabric": func() { r.Fabric = flags.Fabric }, "ranks": func() { r.Ranks = flags.Ranks },
		"rows": func() { r.Request.Rows = flags.Request.Rows }, "tokens": func() { r.Request.Tokens = flags.Request.Tokens },
		"reuse": func() { r.Request.Reuse = flags.Request.Reuse }, "holders": func() { r.Request.Holders = flags.Request.Holders },
		"steps": func() { r.Request.Steps = flags.Request.Steps }, "trips": func() { r.Request.Trips = flags.Request.Trips },
		"requesters": func() { r.Request.Requesters = flags.Request.Requesters }, "flows": func() { r.Request.Flows = flags.Request.Flows },
		"without": func() { r.Request.Without = flags.Request.Without }, "splice": func() { r.Splice = flags.Splice },
		"prefill-token": func() { r.Prefill = flags.Prefill },
	} {
		if cmd.Flags().Changed(name) {
			set()
		}
	}
}

// model returns the cost model with these values.
func (r redistribution) model(transport bool) (redistribute.Model, error) {
	m := redistribute.Model{
		Payload: redistribute.MLA(r.Model.Key, r.Model.Value, r.Model.Element, r.Model.Layers),
		Splice:  r.Splice, Prefill: r.Prefill, Merge: r.Merge,
		Holder: redistribute.Holder{Base: r.Holder.Base, Step: r.Holder.Step, Elbow: r.Holder.Elbow},
		Gather: redistribute.Gather{Holder: r.Gather.Holder, Bandwidth: r.Gather.Bandwidth},
		Host:   redistribute.Host{Fixed: r.Host.Fixed, Row: r.Host.Row},
	}
	var err error
	if m.Fabric, err = readFabric(r.Fabric); err != nil {
		return m, err
	}
	if m.Payload, err = m.Payload.Rank(r.Ranks); err != nil {
		return m, err
	}
	if transport {
		m = m.Transport()
	}
	return m, m.Validate()
}

// request returns the request for which the model chooses the cheapest primitive (route, fetch or
// local).
func (r redistribution) request() (redistribute.Request, error) {
	q := r.Request
	out := redistribute.Request{Rows: q.Rows, Tokens: q.Tokens, Holders: q.Holders, Steps: q.Steps, Trips: q.Trips, Requesters: q.Requesters, Flows: q.Flows}
	var err error
	if out.Reuse, err = redistribute.ParseReuse(q.Reuse); err != nil {
		return out, err
	}
	for _, w := range q.Without {
		switch w {
		case redistribute.Route.String():
			out.NoRoute = true
		case redistribute.Fetch.String():
			out.NoFetch = true
		case redistribute.Local.String():
			out.NoLocal = true
		default:
			return out, fmt.Errorf("without %q: it must be route, fetch or local", w)
		}
	}
	return out, nil
}

// readFabric returns a fabric of the paper, or of a file.
func readFabric(name string) (redistribute.Fabric, error) {
	f, err := redistribute.FabricNamed(name)
	if err == nil {
		return f, nil
	}
	raw, fileErr := os.ReadFile(name)
	if fileErr != nil {
		return f, fmt.Errorf("%w, or a file that penstock fabric probe wrote: %w", err, fileErr)
	}
	// JSON is a subset of YAML. The YAML parser is used because its errors have line numbers.
	file, err := yamlfile.Parse(name, raw)
	if err != nil {
		return f, err
	}
	f = redistribute.Fabric{}
	if err := file.Decode(&f); err != nil {
		return f, err
	}
	if err := f.Validate(); err != nil {
		return f, file.Errorf("", "%v", err)
	}
	return f, nil
}

// redistributePlan is the output of the command.
type redistributePlan struct {
	Winner redistribute.Primitive `json:"winner"`
	Rule   redistribute.Rule      `json:"rule_of_thumb"`
	Fabric redistribute.Fabric    `json:"fabric"`
	Costs  []redistribute.Cost    `json:"costs"`
	// Replicas is the number of replicas of the chunk that is worth its cost for the number of
	// requesters.
	Replicas   int                    `json:"replicas"`
	BreakEvens redistributeBreakEvens `json:"break_evens"`

	ranks int
	reuse redistribute.Reuse
}

// redistributeBreakEvens has break-even points. A field is null in JSON if there is no such point.
type redistributeBreakEvens struct {
	WireRows        *float64 `json:"rows_as_many_bytes_as_a_layer"`
	RouteRows       *float64 `json:"rows_as_long_as_fetch"`
	SpliceTokens    *float64 `json:"tokens_computed_within_a_splice"`
	LocalTokens     *float64 `json:"tokens_computed_within_a_fetch"`
	SpliceBandwidth *float64 `json:"bandwidth_where_route_takes_a_splice_bytes_per_second"`
	AmortiseSteps   *float64 `json:"steps_that_repay_a_fetch"`
}

// some returns a pointer to v, or nil if v is not finite.
func some(v float64) *float64 {
	if math.IsInf(v, 0) || math.IsNaN(v) {
		return nil
	}
	return &v
}

// decide computes the plan.
func (r redistribution) decide(transport bool) (redistributePlan, error) {
	m, err := r.model(transport)
	if err != nil {
		return redistributePlan{}, err
	}
	q, err := r.request()
	if err != nil {
		return redistributePlan{}, err
	}
	d, err := m.Decide(q)
	if err != nil {
		return redistributePlan{}, err
	}
	p := redistributePlan{
		Winner: d.Winner, Rule: q.RuleOfThumb(), Fabric: m.Fabric, Costs: d.Costs[:], Replicas: d.Replicas, ranks: r.Ranks, reuse: q.Reuse,
		BreakEvens: redistributeBreakEvens{WireRows: some(m.Payload.BreakEvenRows(q.Tokens)), RouteRows: some(m.RouteRows(q)), AmortiseSteps: some(m.AmortiseSteps(q))},
	}
	if b := &p.BreakEvens; q.Reuse == redistribute.Moved { // only a chunk that is moved to another position has a splice
		b.SpliceTokens, b.LocalTokens, b.SpliceBandwidth = some(m.SpliceTokens()), some(m.LocalTokens()), some(m.SpliceBandwidth(q.Rows))
	}
	return p, nil
}

// print writes the plan as a table.
func (p redistributePlan) print(t *table) {
	head := []any{""}
	for _, c := range p.Costs {
		name := c.Primitive.String()
		if c.Barred {
			name += " (ruled out)"
		}
		head = append(head, name)
	}
	t.row(head...)
	for _, term := range []struct {
		name string
		of   func(redistribute.Terms) float64
	}{
		{"probe", func(t redistribute.Terms) float64 { return t.Probe }}, {"turnaround", func(t redistribute.Terms) float64 { return t.Turnaround }},
		{"queries there", func(t redistribute.Terms) float64 { return t.Transfer }}, {"holder's compute", func(t redistribute.Terms) float64 { return t.Compute }},
		{"partials back", func(t redistribute.Terms) float64 { return t.Return }}, {"merge", func(t redistribute.Terms) float64 { return t.Merge }},
		{"host", func(t redistribute.Terms) float64 { return t.Host }}, {"pull", func(t redistribute.Terms) float64 { return t.Pull }},
		{"gather", func(t redistribute.Terms) float64 { return t.Gather }}, {"splice", func(t redistribute.Terms) float64 { return t.Splice }},
		{"prefill", func(t redistribute.Terms) float64 { return t.Prefill }},
	} {
		row, any := []any{term.name}, false
		for _, c := range p.Costs {
			v := term.of(c.Terms)
			any = any || v > 0
			row = append(row, spell(v))
		}
		if any {
			t.row(row...)
		}
	}
	total, bytes := []any{"altogether"}, []any{"over the fabric"}
	for _, c := range p.Costs {
		total, bytes = append(total, spell(c.Seconds)), append(bytes, size(int64(c.Bytes)))
	}
	t.row(total...)
	t.row(bytes...)
	t.row()
	t.row("winner", p.Winner)
	t.row("rule of thumb", fmt.Sprintf("%v: %s", p.Rule.Primitive, p.Rule.Why))
	fabric := fmt.Sprintf("%s: %s and bytes at %.3g GB/s", p.Fabric.Name, spell(p.Fabric.Probe+p.Fabric.Turnaround), p.Fabric.Bandwidth/1e9)
	if p.ranks > 1 {
		fabric += fmt.Sprintf(", each of %d pairs of ranks", p.ranks)
	}
	t.row("fabric", fabric)
	if p.Replicas > 1 {
		t.row("replicas", fmt.Sprintf("%d: a holder serves %d requesters almost for free, each more costs", p.Replicas, redistribute.FanIn))
	}
	b := p.BreakEvens
	t.row()
	t.row("break-evens")
	t.row("bytes of one layer", rowsOf(b.WireRows))
	t.row("time of fetch", rowsOf(b.RouteRows))
	if p.reuse == redistribute.Moved {
		t.row("computed within a splice", tokensOf(b.SpliceTokens))
		t.row("computed within a fetch", tokensOf(b.LocalTokens))
		if b.SpliceBandwidth != nil {
			t.row("route takes a splice", fmt.Sprintf("at %.3g GB/s", *b.SpliceBandwidth/1e9))
		}
	}
	switch {
	case b.AmortiseSteps == nil:
		t.row("fetch is repaid", "never: it serves one step")
	case *b.AmortiseSteps == 1:
		t.row("fetch is repaid", "at once")
	default:
		t.row("fetch is repaid", fmt.Sprintf("after %.0f steps", *b.AmortiseSteps))
	}
}

func rowsOf(v *float64) string {
	if v == nil {
		return "any number of rows"
	}
	return fmt.Sprintf("%.0f rows", math.Floor(*v))
}

func tokensOf(v *float64) string {
	if v == nil {
		return "any number of tokens"
	}
	return fmt.Sprintf("%.0f tokens", math.Floor(*v))
}

// spell returns a time, in seconds, as text, or "" for 0.
func spell(s float64) string {
	switch {
	case s == 0:
		return ""
	case s < 1e-6:
		return fmt.Sprintf("%.3g ns", s*1e9)
	case s < 1e-3:
		return fmt.Sprintf("%.3g µs", s*1e6)
	case s < 1:
		return fmt.Sprintf("%.4g ms", s*1e3)
	}
	return fmt.Sprintf("%.4g s", s)
}
