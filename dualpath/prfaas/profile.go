package prfaas

import (
	"embed"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/penstock-kv/penstock/internal/yamlfile"
)

//go:embed profiles/*.yaml
var builtIn embed.FS

// Profile has the measurements of one model.
type Profile struct {
	Name, About, Source string
	// GPUsPerInstance is P, the number of GPUs of an instance.
	GPUsPerInstance int
	// KVBytes is S_kv(l), the size of the KV of l tokens in bytes. It is the zero Curve if only KV
	// throughputs were measured.
	KVBytes Curve
	// Accelerators has the accelerators by name, in lower case.
	Accelerators map[string]Accelerator
	// KVThroughputs has the rate Phi_kv(l) at which an instance produces KV, in bytes per second,
	// by accelerator. It has only accelerators for which this rate was measured instead of size and
	// time.
	KVThroughputs map[string]Curve
}

// Accelerator is one instance of the model on one kind of hardware.
type Accelerator struct {
	// PrefillSeconds is T_prefill(l), the time to prefill l tokens, in seconds; the zero Curve if
	// not measured.
	PrefillSeconds Curve
	// DecodeBatch is the largest decode batch in requests (BS_max), StepSeconds the time of a
	// decode step (T_decode); 0 if not measured.
	DecodeBatch, StepSeconds float64
}

// profileFile is the YAML form of a profile.
type profileFile struct {
	Name            string `yaml:"name"`
	About           string `yaml:"about"`
	Source          string `yaml:"source"`
	GPUsPerInstance int    `yaml:"gpus_per_instance"`
	KV              struct {
		Fit    string `yaml:"fit"`
		Points []struct {
			Tokens float64 `yaml:"tokens"`
			MiB    float64 `yaml:"mib"`
		} `yaml:"points"`
	} `yaml:"kv"`
	Accelerators map[string]struct {
		Fit     string `yaml:"fit"`
		Prefill []struct {
			Tokens  float64 `yaml:"tokens"`
			Seconds float64 `yaml:"seconds"`
		} `yaml:"prefill"`
		Decode *struct {
			Batch       float64 `yaml:"batch"`
			StepSeconds float64 `yaml:"step_seconds"`
		} `yaml:"decode"`
	} `yaml:"accelerators"`
	KVThroughput map[string][]struct {
		Tokens float64 `yaml:"tokens"`
		Gbps   float64 `yaml:"gbps"`
	} `yaml:"kv_throughput"`
}

// bytesPerGbps is the number of bytes per second in 1 Gbps.
const bytesPerGbps = 1e9 / 8

// Gbps converts bytes per second to Gbps.
func Gbps(bytesPerSecond float64) float64 { return bytesPerSecond / bytesPerGbps }

// FromGbps converts Gbps to bytes per second.
func FromGbps(gbps float64) float64 { return gbps * bytesPerGbps }

// ParseProfile parses the YAML form of a profile. Errors contain name as the name of the file.
func ParseProfile(name string, raw []byte) (Profile, error) {
	f, err := yamlfile.Parse(name, raw)
	if err != nil {
		return Profile{}, err
	}
	var file profileFile
	if err := f.Decode(&file); err != nil {
		return Profile{}, err
	}
	p := Profile{
		Name: file.Name, About: file.About, Source: file.Source, GPUsPerInstance: file.GPUsPerInstance,
		Accelerators: make(map[string]Accelerator), KVThroughputs: make(map[string]Curve),
	}
	switch {
	case p.Name == "":
		return Profile{}, f.Errorf("name", "is missing; name the model")
	case p.GPUsPerInstance < 1:
		return Profile{}, f.Errorf("gpus_per_instance", "is %d; an instance has at least one GPU", p.GPUsPerInstance)
	case len(file.Accelerators) == 0 && len(file.KVThroughput) == 0:
		return Profile{}, f.Errorf("", "neither accelerators nor kv_throughput is given; a profile has measurements of at least one accelerator")
	case len(file.Accelerators) > 0 && len(file.KV.Points) == 0:
		return Profile{}, f.Errorf("kv", "is missing; give the size of the KV at two lengths or more")
	}
	if len(file.KV.Points) > 0 {
		var points []Point
		for _, q := range file.KV.Points {
			points = append(points, Point{q.Tokens, q.MiB * (1 << 20)})
		}
		if p.KVBytes, err = curve(f, "kv", file.KV.Fit, points); err != nil {
			return Profile{}, err
		}
	}
	for _, acc := range slices.Sorted(maps.Keys(file.Accelerators)) {
		given, at := file.Accelerators[acc], "accelerators."+acc
		var a Accelerator
		if len(given.Prefill) > 0 {
			var points []Point
			for _, q := range given.Prefill {
				points = append(points, Point{q.Tokens, q.Seconds})
			}
			if a.PrefillSeconds, err = curve(f, at, given.Fit, points); err != nil {
				return Profile{}, err
			}
		}
		if d := given.Decode; d != nil {
			if !(d.Batch > 0) || !(d.StepSeconds > 0) {
				return Profile{}, f.Errorf(at+".decode", "a batch of %v in steps of %v s; both must be above 0", d.Batch, d.StepSeconds)
			}
			a.DecodeBatch, a.StepSeconds = d.Batch, d.StepSeconds
		}
		p.Accelerators[strings.ToLower(acc)] = a
	}
	for _, acc := range slices.Sorted(maps.Keys(file.KVThroughput)) {
		var points []Point
		for _, q := range file.KVThroughput[acc] {
			points = append(points, Point{q.Tokens, FromGbps(q.Gbps)})
		}
		if p.KVThroughputs[strings.ToLower(acc)], err = curve(f, "kv_throughput."+acc, "linear", points); err != nil {
			return Profile{}, err
		}
	}
	return p, nil
}

// curve returns the curve through the points by the given kind of fit: linear, which is the
// default, or quadratic.
func curve(f *yamlfile.File, at, fit string, points []Point) (Curve, error) {
	var c Curve
	var err error
	switch fit {
	case "", "linear":
		c, err = Interpolate(points)
	case "quadratic":
		c, err = FitQuadratic(points)
	default:
		return Curve{}, f.Errorf(at+".fit", "is %q; it is linear or quadratic", fit)
	}
	if err != nil {
		return Curve{}, f.Errorf(at, "%s", strings.TrimPrefix(err.Error(), "prfaas: "))
	}
	return c, nil
}

// KVThroughput returns the rate Phi_kv(l) at which an instance on an accelerator produces KV, in
// bytes per second: the measured rate, or the KV size divided by the prefill time. It returns false
// if the profile has neither.
func (p Profile) KVThroughput(accelerator string, tokens float64) (float64, bool) {
	if c, ok := p.KVThroughputs[accelerator]; ok {
		return c.At(tokens), true
	}
	a, ok := p.Accelerators[accelerator]
	if !ok || a.PrefillSeconds.IsZero() || p.KVBytes.IsZero() {
		return 0, false
	}
	return KVThroughput(p.KVBytes, a.PrefillSeconds, tokens), true
}

// ProfileNames returns the names of the built-in profiles, in alphabetical order.
func ProfileNames() []string {
	files, _ := fs.ReadDir(builtIn, "profiles") // the directory is embedded, so this cannot fail
	var names []string
	for _, f := range files {
		names = append(names, strings.TrimSuffix(f.Name(), ".yaml"))
	}
	return names
}

// BuiltIn returns a profile that is part of the program.
func BuiltIn(name string) (Profile, error) {
	raw, err := fs.ReadFile(builtIn, path.Join("profiles", path.Base(name)+".yaml"))
	if err != nil {
		return Profile{}, fmt.Errorf("prfaas: no profile is called %q; built in are %s", name, strings.Join(ProfileNames(), ", "))
	}
	return ParseProfile("profiles/"+name+".yaml", raw)
}

// CaseStudy returns the system of PrfaaS section 4: 32 H200 for PrfaaS, 64 H20 for PD, 100 Gbps
// between them, outputs of 1,024 tokens, and the lengths of section 4.1.
func CaseStudy() (System, error) {
	p, err := BuiltIn("prfaas-1t")
	if err != nil {
		return System{}, err
	}
	h200, h20 := p.Accelerators["h200"], p.Accelerators["h20"]
	return System{
		Lengths:      LogNormal{Mu: 9.90, Sigma: 1.00, Min: 128, Max: 128000},
		OutputTokens: 1024,
		KVBytes:      p.KVBytes, RemoteInstances: 32 / p.GPUsPerInstance, RemotePrefill: h200.PrefillSeconds, EgressBytes: FromGbps(100),
		LocalInstances: 64 / p.GPUsPerInstance, LocalPrefill: h20.PrefillSeconds, DecodeBatch: h20.DecodeBatch, StepSeconds: h20.StepSeconds,
	}, nil
}

func (p Profile) accelerators() []string {
	names := slices.Sorted(maps.Keys(p.Accelerators))
	if len(names) == 0 {
		return []string{"none: it has KV throughputs only"}
	}
	return names
}
