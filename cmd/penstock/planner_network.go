package main

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/dualpath/netcost"
	"github.com/penstock-kv/penstock/server/config"
	"github.com/penstock-kv/penstock/server/netoracle"
	"github.com/penstock-kv/penstock/server/planner"
)

// networkSources returns the configured sources of network data.
func networkSources(c config.Network) ([]netoracle.Source, error) {
	var sources []netoracle.Source
	if c.File != "" {
		sources = append(sources, netoracle.NewFile(c.File, 0))
	}
	if c.Kubernetes {
		k, err := netoracle.NewKubernetes(netoracle.KubernetesOptions{Pod: c.PodLabel, Rack: c.RackLabel})
		if err != nil {
			return nil, err
		}
		sources = append(sources, k)
	}
	if c.Prometheus != "" {
		queries := map[netcost.Tier]string{netcost.SameRack: c.RackQuery, netcost.SamePod: c.PodQuery, netcost.CrossPod: c.CoreQuery}
		maps.DeleteFunc(queries, func(_ netcost.Tier, q string) bool { return q == "" })
		p, err := netoracle.NewPrometheus(netoracle.PrometheusOptions{URL: c.Prometheus, TokenFile: c.PrometheusToken, Queries: queries, Every: c.Refresh.Std()})
		if err != nil {
			return nil, err
		}
		sources = append(sources, p)
	}
	return sources, nil
}

// networkOf returns the network cost model for the planner's options, and the oracle that updates
// the model. Both are nil if no source is configured.
func networkOf(c config.Network, log *slog.Logger, registry prometheus.Registerer) (*netcost.Planner, *netoracle.Oracle, error) {
	if !c.On() {
		return nil, nil, nil
	}
	sources, err := networkSources(c)
	if err != nil {
		return nil, nil, fmt.Errorf("config: network: %w: %w", err, config.ErrConfig)
	}
	oracle, err := netoracle.New(netoracle.Options{Sources: sources, Logger: log, Registry: registry})
	if err != nil {
		return nil, nil, err
	}
	state := oracle.State()
	if !state.Known {
		oracle.Close()
		var why []error
		for _, s := range state.Sources {
			why = append(why, s.Err)
		}
		return nil, nil, errors.Join(append([]error{errors.New("config: network.file: it must have the tiers' bandwidth and latency")}, why...)...)
	}
	cost, err := netcost.NewPlanner(netcost.PlannerOptions{
		Fabric: state.Fabric, BytesPerToken: c.BytesPerToken, Overlap: c.Overlap,
		Model: netcost.Model{Step: c.Step.Std(), StepPerRequest: c.StepPerRequest.Std(), MaxBatch: c.MaxBatch, CongestionHasOwn: c.CountsOwn},
	})
	if err != nil {
		oracle.Close()
		return nil, nil, fmt.Errorf("config: network: %w: %w", err, config.ErrConfig)
	}
	return cost, oracle, nil
}

// networkOfState converts a state of the network to the planner's type.
func networkOfState(s netoracle.State) planner.Network {
	n := planner.Network{
		Bandwidth: s.Fabric.Bandwidth, Latency: s.Fabric.Latency, Congestion: s.Congestion, Measured: s.Measured,
		Places: make(map[string]dualpath.NodePlace, len(s.Places)),
	}
	for name, p := range s.Places {
		n.Places[name] = dualpath.NodePlace{Pod: p.Pod, Rack: p.Rack, Host: p.Node}
	}
	return n
}
