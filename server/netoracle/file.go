package netoracle

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/penstock-kv/penstock/dualpath/netcost"
	"github.com/penstock-kv/penstock/internal/yamlfile"
)

// File reads a YAML file, and reads it again when it has changed.
type File struct {
	path  string
	every time.Duration
	// stamp identifies the version of the file that was read last, and last is its content.
	stamp stamp
	last  Reading
}

// stamp identifies a version of a file.
type stamp struct {
	modified time.Time
	size     int64
}

var _ Source = (*File)(nil)

// NewFile returns a source that checks a file at the interval every; 0 means 5 s.
func NewFile(path string, every time.Duration) *File {
	if every == 0 {
		every = 5 * time.Second
	}
	return &File{path: path, every: every}
}

// Name implements Source.
func (f *File) Name() string { return "file" }

// Every implements Source.
func (f *File) Every() time.Duration { return f.every }

// Read implements Source.
func (f *File) Read(context.Context) (Reading, error) {
	info, err := os.Stat(f.path)
	if err != nil {
		return Reading{}, fmt.Errorf("netoracle: %w", err)
	}
	now := stamp{info.ModTime(), info.Size()}
	if now == f.stamp {
		return f.last, nil
	}
	file, err := os.Open(f.path)
	if err != nil {
		return Reading{}, fmt.Errorf("netoracle: %w", err)
	}
	defer file.Close()
	raw, err := io.ReadAll(io.LimitReader(file, maxAnswerBytes+1))
	if err != nil {
		return Reading{}, fmt.Errorf("netoracle: %w", err)
	}
	r, err := ParseFile(f.path, raw)
	if err != nil {
		return Reading{}, fmt.Errorf("netoracle: %w", err)
	}
	r.Measured = info.ModTime()
	f.stamp, f.last = now, r
	return r, nil
}

// network is the content of the file.
type network struct {
	Tiers      []tier           `yaml:"tiers"`
	Congestion []float64        `yaml:"congestion"`
	Places     map[string]place `yaml:"places"`
}

type tier struct {
	Gbps    float64       `yaml:"bandwidth_gbps"`
	Latency time.Duration `yaml:"latency"`
}

type place struct {
	Pod  string `yaml:"pod"`
	Rack string `yaml:"rack"`
	Host string `yaml:"host"`
}

// ParseFile returns the file's content as a Reading. Its errors contain name and the line.
func ParseFile(name string, raw []byte) (Reading, error) {
	f, err := yamlfile.ParseAtMost(name, raw, maxAnswerBytes)
	if err != nil {
		return Reading{}, err
	}
	if !f.Has("") {
		return Reading{}, f.Errorf("", "empty; it needs tiers, places or congestion")
	}
	var n network
	if err := f.Decode(&n); err != nil {
		return Reading{}, err
	}
	var r Reading
	switch len(n.Tiers) {
	case 0:
	case netcost.Tiers:
		r.Fabric = new(netcost.Fabric)
		for i, t := range n.Tiers {
			r.Fabric.Bandwidth[i], r.Fabric.Latency[i] = t.Gbps*netcost.Gbit, t.Latency
		}
		if err := r.Fabric.Validate(); err != nil {
			return Reading{}, f.Errorf("tiers", "%v", err)
		}
	default:
		return Reading{}, f.Errorf("tiers", "has %d entries; it must have %d, near to far: %v, %v, %v, %v",
			len(n.Tiers), netcost.Tiers, netcost.SameNode, netcost.SameRack, netcost.SamePod, netcost.CrossPod)
	}
	switch len(n.Congestion) {
	case 0:
	case netcost.Tiers:
		c := netcost.Congestion(n.Congestion)
		if err := c.Validate(); err != nil {
			return Reading{}, f.Errorf("congestion", "%v", err)
		}
		r.Congestion = map[netcost.Tier]float64{}
		for i, v := range c {
			r.Congestion[netcost.Tier(i)] = v
		}
	default:
		return Reading{}, f.Errorf("congestion", "has %d entries; it must have %d, near to far", len(n.Congestion), netcost.Tiers)
	}
	if len(n.Places) > 0 {
		r.Places = make(map[string]netcost.Place, len(n.Places))
		for name, p := range n.Places {
			if p.Pod == "" {
				return Reading{}, f.Errorf("places."+name, "has no pod, so it would count as far from all others; name the pod, or leave the place out")
			}
			if p.Host == "" {
				p.Host = name
			}
			r.Places[name] = netcost.Place{Pod: p.Pod, Rack: p.Rack, Node: p.Host}
		}
	}
	return r, nil
}
