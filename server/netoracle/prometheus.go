package netoracle

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/penstock-kv/penstock/dualpath/netcost"
)

// PrometheusOptions are the options of a Prometheus source.
type PrometheusOptions struct {
	// URL is the URL of the server, such as http://prometheus:9090, including any path before /api.
	URL string
	// TokenFile, unless empty, is the file with a bearer token.
	TokenFile string
	// Queries has a PromQL expression for each measured tier. The expression's value is the share
	// of the bandwidth of the tier's links, 0 to 1, that is used by traffic other than the
	// planner's transfers. The expression can exclude transfers that have a traffic class of their
	// own (DSCP, queue). If it cannot exclude them, set netcost.Model.CongestionHasOwn.
	Queries map[netcost.Tier]string
	// Every is the interval between queries. Default 1 s (NetKV paper, section V-B). With an
	// interval of one minute, placement is only slightly worse.
	Every time.Duration
}

// Prometheus reads the congestion of each tier by instant queries.
type Prometheus struct{ o PrometheusOptions }

var _ Source = (*Prometheus)(nil)

// NewPrometheus returns a source.
func NewPrometheus(o PrometheusOptions) (*Prometheus, error) {
	if o.URL == "" {
		return nil, fmt.Errorf("%w of Prometheus", errNoURL)
	}
	if u, err := url.Parse(o.URL); err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
		return nil, fmt.Errorf("netoracle: the URL of Prometheus is %q; it must be as http://prometheus:9090", o.URL)
	}
	if len(o.Queries) == 0 {
		return nil, fmt.Errorf("netoracle: no query for Prometheus at %s: name one for a tier, 0 to %d", o.URL, netcost.Tiers-1)
	}
	for t, q := range o.Queries {
		if t >= netcost.Tiers || strings.TrimSpace(q) == "" {
			return nil, fmt.Errorf("netoracle: query %q for tier %d; tiers are 0 to %d, and a query is not empty", q, t, netcost.Tiers-1)
		}
	}
	if o.Every == 0 {
		o.Every = time.Second
	}
	o.URL = strings.TrimRight(o.URL, "/")
	return &Prometheus{o}, nil
}

// Name implements Source.
func (p *Prometheus) Name() string { return "prometheus" }

// Every implements Source.
func (p *Prometheus) Every() time.Duration { return p.o.Every }

// Read implements Source. It fails if one query fails.
func (p *Prometheus) Read(ctx context.Context) (Reading, error) {
	r := Reading{Congestion: map[netcost.Tier]float64{}}
	for t := range netcost.Tier(netcost.Tiers) {
		q, ok := p.o.Queries[t]
		if !ok {
			continue
		}
		v, at, err := p.query(ctx, q)
		if err != nil {
			return Reading{}, fmt.Errorf("netoracle: congestion of tier %d (%v), query %s: %w", t, t, q, err)
		}
		r.Congestion[t] = v
		if r.Measured.IsZero() || at.Before(r.Measured) {
			r.Measured = at
		}
	}
	return r, nil
}

// answer is the answer of /api/v1/query.
type answer struct {
	Status string `json:"status"`
	Error  string `json:"error"`
	Data   struct {
		Type   string          `json:"resultType"`
		Result json.RawMessage `json:"result"`
	} `json:"data"`
}

// query returns the result of a query, which must be one number, and the time of that number.
func (p *Prometheus) query(ctx context.Context, q string) (float64, time.Time, error) {
	var a answer
	err := getJSON(ctx, http.DefaultClient, p.o.URL+"/api/v1/query?"+url.Values{"query": {q}}.Encode(), "application/json", p.o.TokenFile, &a)
	if err != nil {
		return 0, time.Time{}, err
	}
	if a.Status != "success" {
		return 0, time.Time{}, fmt.Errorf("Prometheus answers %s: %s", a.Status, a.Error)
	}
	var sample [2]any
	switch a.Data.Type {
	case "scalar":
		err = json.Unmarshal(a.Data.Result, &sample)
	case "vector":
		var series []struct {
			Value [2]any `json:"value"`
		}
		if err = json.Unmarshal(a.Data.Result, &series); err == nil && len(series) != 1 {
			return 0, time.Time{}, fmt.Errorf("%d series; it must be one: aggregate with avg(…) or max(…)", len(series))
		}
		if len(series) == 1 {
			sample = series[0].Value
		}
	default:
		return 0, time.Time{}, fmt.Errorf("a result of type %q; it must be a scalar or an instant vector", a.Data.Type)
	}
	if err != nil {
		return 0, time.Time{}, err
	}
	seconds, ok := sample[0].(float64)
	text, ok2 := sample[1].(string)
	if !ok || !ok2 {
		return 0, time.Time{}, fmt.Errorf("a sample %v; it must be a time and a number", sample)
	}
	v, err := strconv.ParseFloat(text, 64)
	if err != nil || math.IsNaN(v) || v < 0 {
		return 0, time.Time{}, fmt.Errorf("a value of %s; it must be a share, 0 to 1", text)
	}
	whole, part := math.Modf(seconds)
	return v, time.Unix(int64(whole), int64(part*1e9)), nil
}
