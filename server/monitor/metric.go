package monitor

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/front"
	"github.com/penstock-kv/penstock/server/netoracle"
	"github.com/penstock-kv/penstock/server/offload"
	"github.com/penstock-kv/penstock/server/planner"
)

// Metric is the definition of a metric that a component exports.
type Metric struct {
	Name   string
	Help   string
	Labels []string
}

// describedMetric matches the text of a prometheus.Desc. The text is parsed, because a Desc has no
// methods that return its parts.
var describedMetric = regexp.MustCompile(`^Desc\{fqName: ("(?:[^"\\]|\\.)*"), help: ("(?:[^"\\]|\\.)*"),.* variableLabels: \{([^}]*)\}\}$`)

// Metrics returns the metrics of all components by their names.
func Metrics() (map[string]Metric, error) {
	all := make(map[string]Metric)
	for _, describe := range []func(chan<- *prometheus.Desc){
		server.DescribeMetrics, planner.DescribeMetrics, netoracle.DescribeMetrics, front.DescribeMetrics, offload.DescribeMetrics,
	} {
		ch := make(chan *prometheus.Desc)
		go func() {
			describe(ch)
			close(ch)
		}()
		var err error
		for d := range ch { // also after an error, because describe blocks until all is received
			m, e := metricOf(d.String())
			if e != nil {
				err = e
			}
			all[m.Name] = m
		}
		if err != nil {
			return nil, err
		}
	}
	return all, nil
}

func metricOf(desc string) (m Metric, err error) {
	parts := describedMetric.FindStringSubmatch(desc)
	if parts == nil {
		return m, fmt.Errorf("monitor: the definition of a metric has an unknown form: %s", desc)
	}
	if m.Name, err = strconv.Unquote(parts[1]); err != nil {
		return m, fmt.Errorf("monitor: name in %s: %w", desc, err)
	}
	if m.Help, err = strconv.Unquote(parts[2]); err != nil {
		return m, fmt.Errorf("monitor: help in %s: %w", desc, err)
	}
	if parts[3] != "" {
		m.Labels = strings.Split(parts[3], ",")
	}
	return m, nil
}
