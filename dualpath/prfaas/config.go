package prfaas

import (
	"strings"

	"github.com/penstock-kv/penstock/internal/yamlfile"
)

// Config is the YAML configuration of a system, written by an operator.
type Config struct {
	// Profile is the name of a built-in profile, ProfileFile the file of another profile. Exactly
	// one of the two is set.
	Profile     string `yaml:"profile"`
	ProfileFile string `yaml:"profile_file"`
	// Lengths has the distribution of the uncached prompt lengths.
	Lengths struct {
		Mu    float64 `yaml:"mu"`
		Sigma float64 `yaml:"sigma"`
		Min   float64 `yaml:"min"`
		Max   float64 `yaml:"max"`
		// Trace is a file of requests. If it is set, the uncached lengths of its prompts are used
		// instead of the distribution.
		Trace string `yaml:"trace"`
	} `yaml:"lengths"`
	OutputTokens float64 `yaml:"output_tokens"`
	PrfaaS       struct {
		Accelerator string `yaml:"accelerator"`
		GPUs        int    `yaml:"gpus"`
	} `yaml:"prfaas"`
	PD struct {
		Accelerator string  `yaml:"accelerator"`
		GPUs        int     `yaml:"gpus"`
		Batch       float64 `yaml:"batch"`
		StepSeconds float64 `yaml:"step_seconds"`
	} `yaml:"pd"`
	EgressGbps float64 `yaml:"egress_gbps"`
	// Present is the current plan, for comparison. A threshold of 0 means that there is no current
	// plan.
	Present struct {
		Threshold float64 `yaml:"threshold"`
		Prefill   int     `yaml:"prefill"`
	} `yaml:"present"`
	Steps int `yaml:"steps"`
}

// CaseStudyYAML is the configuration of CaseStudy.
const CaseStudyYAML = `# The case study of PrfaaS, section 4. Lengths are of the uncached part of the prompts, in tokens.
profile: prfaas-1t              # built in; or profile_file: FILE with measurements of your own
lengths: {mu: 9.90, sigma: 1.00, min: 128, max: 128000}   # log-normal; or {trace: FILE}
output_tokens: 1024
prfaas: {accelerator: h200, gpus: 32}
pd: {accelerator: h20, gpus: 64}   # batch and step_seconds: the profile's, or given here
egress_gbps: 100
present: {threshold: 30000, prefill: 2}   # optional: what runs today
steps: 100                      # of the search for the threshold
`

// Files reads the files that a configuration names.
type Files struct {
	// Profile reads a profile.
	Profile func(path string) ([]byte, error)
	// Prompts reads the uncached prompt lengths of a trace, in tokens.
	Prompts func(path string) ([]float64, error)
}

// System returns the system that a configuration describes. An error names the key of the YAML file
// f that is wrong: prefix, which is empty or ends in a dot, and the key within the configuration.
func (c *Config) System(f *yamlfile.File, prefix string, files Files) (System, error) {
	p, err := c.profile(f, prefix, files)
	if err != nil {
		return System{}, err
	}
	s := System{OutputTokens: c.OutputTokens, KVBytes: p.KVBytes, EgressBytes: FromGbps(c.EgressGbps)}
	if !(c.OutputTokens > 0) {
		return System{}, f.Errorf(prefix+"output_tokens", "is %v; give the mean output, above 0", c.OutputTokens)
	}
	if s.Lengths, err = c.lengths(f, prefix, files); err != nil {
		return System{}, err
	}
	if c.PrfaaS.GPUs != 0 || c.PrfaaS.Accelerator != "" {
		a, n, err := c.cluster(f, prefix+"prfaas", p, c.PrfaaS.Accelerator, c.PrfaaS.GPUs)
		if err != nil {
			return System{}, err
		}
		if a.PrefillSeconds.IsZero() {
			return System{}, f.Errorf(prefix+"prfaas.accelerator", "profile %s has no prefill times on %s", p.Name, c.PrfaaS.Accelerator)
		}
		if !(c.EgressGbps > 0) {
			return System{}, f.Errorf(prefix+"egress_gbps", "is %v; give the bandwidth between the clusters, above 0", c.EgressGbps)
		}
		s.RemoteInstances, s.RemotePrefill = n, a.PrefillSeconds
	}
	a, n, err := c.cluster(f, prefix+"pd", p, c.PD.Accelerator, c.PD.GPUs)
	if err != nil {
		return System{}, err
	}
	s.LocalInstances, s.LocalPrefill, s.DecodeBatch, s.StepSeconds = n, a.PrefillSeconds, a.DecodeBatch, a.StepSeconds
	if f.Has(prefix + "pd.batch") {
		s.DecodeBatch = c.PD.Batch
	}
	if f.Has(prefix + "pd.step_seconds") {
		s.StepSeconds = c.PD.StepSeconds
	}
	if !(s.DecodeBatch > 0) || !(s.StepSeconds > 0) {
		return System{}, f.Errorf(prefix+"pd", "decodes %v requests at once in steps of %v s; give batch and step_seconds, both above 0 (profile %s has none for %s)", s.DecodeBatch, s.StepSeconds, p.Name, c.PD.Accelerator)
	}
	if c.Steps == 0 {
		c.Steps = StepsDefault
	}
	if c.Steps < 1 || c.Steps > stepsMax {
		return System{}, f.Errorf(prefix+"steps", "is %d; from 1 to %d", c.Steps, stepsMax)
	}
	if c.Present.Threshold < 0 || c.Present.Prefill < 0 || c.Present.Prefill >= s.LocalInstances {
		return System{}, f.Errorf(prefix+"present", "threshold %v with %d prefill instances of %d; the threshold is 0 or above, and at least one instance decodes", c.Present.Threshold, c.Present.Prefill, s.LocalInstances)
	}
	if err := s.Validate(); err != nil {
		return System{}, f.Errorf(strings.TrimSuffix(prefix, "."), "%s", strings.TrimPrefix(err.Error(), "prfaas: "))
	}
	return s, nil
}

func (c *Config) profile(f *yamlfile.File, prefix string, files Files) (Profile, error) {
	switch {
	case c.Profile != "" && c.ProfileFile != "":
		return Profile{}, f.Errorf(prefix+"profile_file", "profile %q is given too; keep one of them", c.Profile)
	case c.ProfileFile != "":
		raw, err := files.Profile(c.ProfileFile)
		if err != nil {
			return Profile{}, f.Errorf(prefix+"profile_file", "%v", err)
		}
		return ParseProfile(c.ProfileFile, raw)
	case c.Profile == "":
		return Profile{}, f.Errorf(prefix+"profile", "is missing; name one of %s, or a file of your own with profile_file", strings.Join(ProfileNames(), ", "))
	}
	p, err := BuiltIn(c.Profile)
	if err != nil {
		return Profile{}, f.Errorf(prefix+"profile", "%s", strings.TrimPrefix(err.Error(), "prfaas: "))
	}
	return p, nil
}

func (c *Config) lengths(f *yamlfile.File, prefix string, files Files) (Lengths, error) {
	l := c.Lengths
	if l.Trace != "" {
		if f.Has(prefix+"lengths.mu") || f.Has(prefix+"lengths.sigma") {
			return nil, f.Errorf(prefix+"lengths.trace", "mu and sigma are given too; keep the trace or the distribution")
		}
		prompts, err := files.Prompts(l.Trace)
		if err != nil {
			return nil, f.Errorf(prefix+"lengths.trace", "%v", err)
		}
		s, err := NewSample(prompts)
		if err != nil {
			return nil, f.Errorf(prefix+"lengths.trace", "%s", strings.TrimPrefix(err.Error(), "prfaas: "))
		}
		return s, nil
	}
	d := LogNormal{Mu: l.Mu, Sigma: l.Sigma, Min: l.Min, Max: l.Max}
	if err := d.Validate(); err != nil {
		return nil, f.Errorf(prefix+"lengths", "%s", strings.TrimPrefix(err.Error(), "prfaas: "))
	}
	return d, nil
}

// cluster returns the accelerator of a cluster and the number of its instances.
func (c *Config) cluster(f *yamlfile.File, path string, p Profile, accelerator string, gpus int) (Accelerator, int, error) {
	a, ok := p.Accelerators[strings.ToLower(accelerator)]
	if !ok {
		return a, 0, f.Errorf(path+".accelerator", "is %q; profile %s knows %s", accelerator, p.Name, strings.Join(p.accelerators(), ", "))
	}
	if gpus < p.GPUsPerInstance || gpus%p.GPUsPerInstance != 0 {
		return a, 0, f.Errorf(path+".gpus", "is %d; an instance of %s takes %d, so give a multiple of that", gpus, p.Name, p.GPUsPerInstance)
	}
	return a, gpus / p.GPUsPerInstance, nil
}
