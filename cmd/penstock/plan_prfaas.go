package main

import (
	"fmt"
	"io"
	"math"
	"os"

	"github.com/spf13/cobra"

	"github.com/penstock-kv/penstock/dualpath/prfaas"
	"github.com/penstock-kv/penstock/internal/trace"
	"github.com/penstock-kv/penstock/internal/yamlfile"
)

// prfaasPlan is one deployment in the output of `penstock plan prfaas`.
type prfaasPlan struct {
	Name         string   `json:"name"`
	Threshold    *float64 `json:"threshold_tokens"`
	Remote       int      `json:"prfaas_instances"`
	Prefill      int      `json:"prefill_instances"`
	Decode       int      `json:"decode_instances"`
	Throughput   float64  `json:"requests_per_second"`
	Binds        string   `json:"binds"`
	Offloaded    float64  `json:"offloaded_share"`
	Long         float64  `json:"offloaded_mean_tokens"`
	RemoteRate   *float64 `json:"prfaas_requests_per_second"`
	LocalRate    *float64 `json:"prefill_requests_per_second"`
	DecodeRate   float64  `json:"decode_requests_per_second"`
	EgressGbps   float64  `json:"egress_gbps"`
	MeanTTFT     float64  `json:"ttft_mean_seconds"`
	P90TTFT      float64  `json:"ttft_p90_seconds"`
	AgainstNoWAN float64  `json:"over_homogeneous"`
}

func newPlanPrfaaS() *cobra.Command {
	var profile string
	var sample, expected bool
	cmd := &cobra.Command{
		Use:   "prfaas [FILE.yaml]",
		Short: "Compute which prompts to prefill in another datacenter, and the division of instances",
		Long: `A remote PrfaaS cluster prefills the prompts longer than a threshold and sends their KV
over a link; the local cluster prefills the other prompts and decodes all. For the
numbers in FILE.yaml ("-": standard input) print the threshold and the division of
prefill and decode instances with the highest throughput, its bottleneck, the traffic on
the link, and the same without the PrfaaS cluster (PrfaaS, section 3.4). --print-config
prints an example file. A model of your own is a profile with its KV size and prefill
time at some lengths. A length from a trace is the number of a prompt's tokens that a
cache without a limit lacks.

Times to first token are prefill and transfer without waiting. "homogeneous" is the local
cluster with additional GPUs, as many as the PrfaaS cluster has; it is omitted if the
profile has no prefill times of the local accelerator.`,
		Example: `  penstock plan prfaas --print-config > prfaas.yaml
  penstock plan prfaas prfaas.yaml`,
		Args: args(cobra.MaximumNArgs(1)),
	}
	cmd.Flags().StringVar(&profile, "profile", "", "file with the model's profile, instead of the one that FILE.yaml names")
	cmd.Flags().BoolVar(&sample, "print-config", false, "print an example: the paper's case study")
	cmd.Flags().BoolVar(&expected, "expected", false, "mean service times, E[T(l)], instead of the time at the mean length that the paper takes")
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		if sample {
			_, err := fmt.Fprint(cmd.OutOrStdout(), prfaas.CaseStudyYAML)
			return err
		}
		if len(names) == 0 {
			return usagef("give a FILE.yaml with the system; --print-config prints an example")
		}
		s, c, err := prfaasSystem(cmd, names[0], profile)
		if err != nil {
			return err
		}
		if expected {
			s.Service = prfaas.Expected
		}
		plans, err := prfaasPlans(s, c)
		if err != nil {
			return err
		}
		return outputOf(cmd).emit(plans, func(t *table) { printPrfaaS(t, plans) })
	}
	return cmd
}

// prfaasSystem reads the configuration file name and the files that the configuration names.
// profile, unless empty, replaces the profile that the configuration names.
func prfaasSystem(cmd *cobra.Command, name, profile string) (prfaas.System, prfaas.Config, error) {
	var c prfaas.Config
	raw, err := readNamed(cmd.InOrStdin(), name)
	if err != nil {
		return prfaas.System{}, c, err
	}
	if name == "-" {
		name = "standard input"
	}
	f, err := yamlfile.Parse(name, raw)
	if err != nil {
		return prfaas.System{}, c, err
	}
	if err := f.Decode(&c); err != nil {
		return prfaas.System{}, c, err
	}
	if profile != "" {
		c.Profile, c.ProfileFile = "", profile
	}
	s, err := c.System(f, "", prfaasFiles())
	return s, c, err
}

// prfaasFiles reads the files that a configuration names.
func prfaasFiles() prfaas.Files { return prfaas.Files{Profile: os.ReadFile, Prompts: uncachedPrompts} }

// readNamed reads a file, or standard input if name is "-".
func readNamed(in io.Reader, name string) ([]byte, error) {
	if name == "-" {
		return io.ReadAll(io.LimitReader(in, yamlfile.SizeMax+1))
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, yamlfile.SizeMax+1))
}

// uncachedPrompts returns, for each prompt of a trace, the number of tokens that a cache without a
// limit would not have. For traces without prefixes it returns the lengths of the prompts.
func uncachedPrompts(path string) ([]float64, error) {
	r, err := trace.Open(path, trace.Options{})
	if err != nil {
		return nil, err
	}
	defer r.Close()
	seen := make(map[uint64]bool)
	var out []float64
	for req, err := range r.All() {
		if err != nil {
			return nil, err
		}
		hit, whole := 0, req.WholeBlocks()
		for hit < whole && seen[req.Blocks[hit]] {
			hit++
		}
		for _, b := range req.Blocks[hit:whole] {
			seen[b] = true
		}
		if left := req.InputTokens - hit*req.BlockTokens; left > 0 {
			out = append(out, float64(left))
		}
	}
	return out, nil
}

// prfaasPlans evaluates the best plan, the current plan, and the two plans without offload.
func prfaasPlans(s prfaas.System, c prfaas.Config) ([]prfaasPlan, error) {
	best, err := prfaas.Optimize(s, c.Steps)
	if err != nil {
		return nil, err
	}
	out := []prfaasPlan{prfaasPlanOf("best", s, best)}
	if c.Present.Threshold > 0 {
		out = append(out, prfaasPlanOf("present", s, s.Evaluate(prfaas.Plan{Threshold: c.Present.Threshold, Prefill: c.Present.Prefill, Decode: s.LocalInstances - c.Present.Prefill})))
	}
	if !s.LocalPrefill.IsZero() {
		if h, err := prfaas.Homogeneous(s, s.LocalInstances+s.RemoteInstances); err == nil {
			without := s
			without.RemoteInstances = 0
			out = append(out, prfaasPlanOf("homogeneous", without, h))
			for i := range out {
				out[i].AgainstNoWAN = out[i].Throughput / h.Max
			}
		}
	}
	if s.RemoteInstances > 0 {
		n, err := prfaas.Naive(s)
		if err != nil {
			return nil, err
		}
		naive := prfaasPlanOf("naive", s, n)
		if h := out[len(out)-1]; h.Name == "homogeneous" {
			naive.AgainstNoWAN = n.Max / h.Throughput
		}
		out = append(out, naive)
	}
	return out, nil
}

func prfaasPlanOf(name string, s prfaas.System, x prfaas.Throughput) prfaasPlan {
	ttft := s.TTFT(x.Plan)
	p := prfaasPlan{
		Name: name, Threshold: &x.Threshold, Remote: s.RemoteInstances, Prefill: x.Prefill, Decode: x.Plan.Decode,
		Throughput: x.Max, Binds: x.Binds.String(), Offloaded: x.Offloaded, Long: x.Long,
		RemoteRate: finiteOrNil(x.Remote), LocalRate: finiteOrNil(x.LocalPrefill), DecodeRate: x.DecodeRate,
		EgressGbps: prfaas.Gbps(x.EgressBytes), MeanTTFT: ttft.Mean(), P90TTFT: ttft.Quantile(0.9),
	}
	if x.Offloaded <= 0 || x.Offloaded >= 1 {
		p.Threshold = nil
	}
	return p
}

func finiteOrNil(v float64) *float64 {
	if math.IsInf(v, 0) || math.IsNaN(v) {
		return nil
	}
	return &v
}

func printPrfaaS(t *table, plans []prfaasPlan) {
	column := func(name string, cell func(p prfaasPlan) string) {
		cells := []any{name}
		for _, p := range plans {
			cells = append(cells, cell(p))
		}
		t.row(cells...)
	}
	rate := func(v *float64) string {
		if v == nil {
			return "-"
		}
		return fmt.Sprintf("%.2f", *v)
	}
	column("", func(p prfaasPlan) string { return p.Name })
	column("threshold, tokens", func(p prfaasPlan) string {
		if p.Threshold == nil {
			return "-"
		}
		return count(int64(math.Round(*p.Threshold)))
	})
	column("instances: PrfaaS/prefill/decode", func(p prfaasPlan) string { return fmt.Sprintf("%d/%d/%d", p.Remote, p.Prefill, p.Decode) })
	column("requests/s", func(p prfaasPlan) string { return fmt.Sprintf("%.2f", p.Throughput) })
	column("binds", func(p prfaasPlan) string { return p.Binds })
	column("requests/s of PrfaaS", func(p prfaasPlan) string { return rate(p.RemoteRate) })
	column("requests/s of prefill", func(p prfaasPlan) string { return rate(p.LocalRate) })
	column("requests/s of decode", func(p prfaasPlan) string { return fmt.Sprintf("%.2f", p.DecodeRate) })
	column("offloaded", func(p prfaasPlan) string { return fmt.Sprintf("%.1f %%", 100*p.Offloaded) })
	column("egress, Gbps", func(p prfaasPlan) string { return fmt.Sprintf("%.1f", p.EgressGbps) })
	column("TTFT, mean", func(p prfaasPlan) string { return fmt.Sprintf("%.2f s", p.MeanTTFT) })
	column("TTFT, P90", func(p prfaasPlan) string { return fmt.Sprintf("%.2f s", p.P90TTFT) })
	column("against homogeneous", func(p prfaasPlan) string {
		if p.AgainstNoWAN == 0 {
			return "-"
		}
		return fmt.Sprintf("%.2f times", p.AgainstNoWAN)
	})
}
