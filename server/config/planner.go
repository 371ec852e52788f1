package config

import (
	"errors"
	"time"
)

// Planner has all settings of a planner node.
type Planner struct {
	Listen      string   `yaml:"listen" doc:"address of gRPC, for gateways and the leaders of engine groups" restart:"the listener is open"`
	HTTP        string   `yaml:"http" doc:"address of the web console, /metrics, /healthz, /readyz, /leaderz and /debug/pprof, without TLS; without a token too unless auth.roles_file is set; empty turns it off" restart:"the listener is open"`
	DrainWithin Duration `yaml:"drain_timeout" doc:"maximum wait of SIGTERM for calls in flight" reload:"live"`

	Cluster  Election `yaml:"cluster" restart:"the planner takes part in the election with it"`
	Schedule Schedule `yaml:"schedule" restart:"the requests in progress were planned with it"`
	Network  Network  `yaml:"network" restart:"the sources of the network are open"`
	Auth     Auth     `yaml:"auth"`
	Log      Log      `yaml:"log"`
	Trace    Trace    `yaml:"trace" restart:"the exporter of spans is connected"`
	Insecure bool     `yaml:"insecure" doc:"allow listening beyond loopback without a token or clients' certificates: anyone who reaches the port can submit, take and end requests" reload:"live"`
}

// Election has the settings with which several planners elect a leader by etcd (package membership).
type Election struct {
	Etcd         []string `yaml:"etcd" doc:"addresses of etcd's members, host:port: of the planners with the same etcd and prefix one leads, and the others are standbys; empty: the planner stands alone"`
	Prefix       string   `yaml:"prefix" doc:"beginning of the election's keys in etcd; it may be that of the storage nodes. Each prefill/decode cluster needs its own"`
	LeaseTTL     Duration `yaml:"lease_ttl" doc:"time after which a standby leads if the leader has vanished, in whole seconds; a leader that cannot reach etcd for nine tenths of it serves nothing until it is elected again"`
	CA           string   `yaml:"ca" doc:"CA (PEM) that etcd's certificate must be signed by; empty: plain text, unless cluster.cert is set"`
	Cert         string   `yaml:"cert" doc:"client certificate (PEM) for etcd"`
	Key          string   `yaml:"key" doc:"private key (PEM) of cluster.cert"`
	User         string   `yaml:"user" doc:"user of etcd; empty: no authentication"`
	PasswordFile string   `yaml:"password_file" doc:"file with the password of cluster.user"`
}

// On reports whether planners elect a leader.
func (e *Election) On() bool { return len(e.Etcd) > 0 }

// Connection returns the settings of the connection to etcd in the form that a storage node has.
func (e *Election) Connection() Cluster {
	return Cluster{Etcd: e.Etcd, Prefix: e.Prefix, LeaseTTL: e.LeaseTTL, CA: e.CA, Cert: e.Cert, Key: e.Key, User: e.User, PasswordFile: e.PasswordFile}
}

// Schedule has the constants of dualpath.Options. 0 selects the default, which is computed from
// ReadRate and PrefillRate. Rates are in tokens per second, lengths in tokens.
type Schedule struct {
	ReadPolicy   string   `yaml:"read_policy" values:"split shorter round-robin prefill-only" doc:"which side reads a cached prefix: split (both, by when each would be done), shorter (reading queue), round-robin or prefill-only"`
	ReadRate     float64  `yaml:"read_rate" doc:"throughput of one storage NIC, tokens per second, until its node reports a measurement"`
	PrefillRate  float64  `yaml:"prefill_rate" doc:"throughput of one prefill engine, tokens per second"`
	Alpha        int      `yaml:"alpha" doc:"short reading queue threshold, tokens; 0: 3 s of read_rate"`
	Beta         int      `yaml:"beta" doc:"maximum unfinished tokens of a prefill engine; 0: 5 s of prefill_rate"`
	ZFactor      float64  `yaml:"z_factor" doc:"high-token threshold of decode engines over the mean"`
	BlockTokens  int      `yaml:"block_tokens" doc:"tokens of a block; parts are cut at its multiples"`
	MinPart      int      `yaml:"min_part" doc:"smallest part worth a second side, tokens"`
	SlowFactor   float64  `yaml:"slow_factor" doc:"a read moves to the other side if staying takes this multiple of the time"`
	HedgeFactor  float64  `yaml:"hedge_factor" doc:"a part is read by both sides after this multiple of its predicted time"`
	MaxHedge     int      `yaml:"max_hedge" doc:"longest part that both sides read, tokens"`
	Patience     Duration `yaml:"patience" doc:"time that a side has been reading a part before the other side may read the part too, or instead"`
	GroupTimeout Duration `yaml:"group_timeout" doc:"time without a fetch after which a group counts as lost and its requests are planned again; 0: 5 s. It must exceed the time for which a busy host leaves an engine without a CPU"`
	Weights      []string `yaml:"weights" doc:"weights of tenants, TENANT=WEIGHT with commas between; other tenants have 1. Tenants whose requests wait share the engines in proportion"`
	MaxQueue     int      `yaml:"max_queue" doc:"requests that wait or are served; more are rejected"`
	Explain      int      `yaml:"explain" doc:"number of last requests that plan explain can show"`
}

// Network has the sources of the network's costs between machines. Without a source the costs
// between all machines are equal.
type Network struct {
	File            string   `yaml:"file" doc:"YAML file with tiers, places and congestion of the network (docs/network.md); with a source the decode engine is chosen by transfer, wait and first step"`
	Kubernetes      bool     `yaml:"kubernetes" doc:"read machines' places from the labels of Kubernetes nodes, with the pod's service account"`
	PodLabel        string   `yaml:"pod_label" doc:"node label that names the pod of the network"`
	RackLabel       string   `yaml:"rack_label" doc:"node label that names the rack"`
	Prometheus      string   `yaml:"prometheus" doc:"URL of the Prometheus server that measures congestion, e.g. http://prometheus:9090"`
	PrometheusToken string   `yaml:"prometheus_token_file" doc:"file with the bearer token for Prometheus"`
	RackQuery       string   `yaml:"rack_query" doc:"PromQL expression of the share of the links within racks that other traffic uses, one number from 0 to 1"`
	PodQuery        string   `yaml:"pod_query" doc:"PromQL expression of the same share of the racks' uplinks"`
	CoreQuery       string   `yaml:"core_query" doc:"PromQL expression of the same share of the pods' uplinks"`
	Refresh         Duration `yaml:"refresh" doc:"interval between measurements of congestion"`
	BytesPerToken   int      `yaml:"bytes_per_token" doc:"KV of one token, bytes, all layers; needed with a source"`
	MaxBatch        int      `yaml:"max_batch" doc:"requests that a decode engine serves together"`
	Step            Duration `yaml:"step" doc:"time of a decode step"`
	StepPerRequest  Duration `yaml:"step_per_request" doc:"additional time of a decode step for each request"`
	CountsOwn       bool     `yaml:"counts_own" doc:"set this if the measured congestion includes the planner's own transfers"`
	Overlap         bool     `yaml:"overlap" doc:"the two hops of a read overlap, so the slower one counts; otherwise their sum"`
}

// On reports whether a source is configured.
func (n *Network) On() bool { return n.File != "" || n.Kubernetes || n.Prometheus != "" }

// check reports errors in n.
func (n *Network) check(bad func(string, string, ...any)) {
	queries := n.RackQuery != "" || n.PodQuery != "" || n.CoreQuery != ""
	switch {
	case n.On() && n.BytesPerToken <= 0:
		bad("network.bytes_per_token", "must be the bytes of KV of one token, is %d", n.BytesPerToken)
	case n.Prometheus != "" && !queries:
		bad("network.prometheus", "is given without a query: set rack_query, pod_query or core_query")
	case n.Prometheus == "" && queries:
		bad("network.prometheus", "is empty, but there are queries for it")
	case n.On() && n.File == "":
		bad("network.file", "is empty: the bandwidth and latency of the tiers are in it")
	}
	if n.Refresh < 0 || (n.On() && n.Refresh == 0) {
		bad("network.refresh", "must be more than 0, is %v", n.Refresh)
	}
}

// DefaultPlanner returns the configuration of a planner without any settings. The zeros of Schedule
// select dualpath's defaults.
func DefaultPlanner() Planner {
	return Planner{
		Listen:      "127.0.0.1:7430",
		HTTP:        "127.0.0.1:7432",
		DrainWithin: Duration(5 * time.Second),
		Cluster:     Election{Prefix: "/penstock", LeaseTTL: Duration(5 * time.Second)},
		Schedule:    Schedule{ReadPolicy: "split"},
		Network: Network{
			PodLabel: "topology.kubernetes.io/zone", RackLabel: "topology.kubernetes.io/rack", Refresh: Duration(time.Second),
			MaxBatch: 64, Step: Duration(12300 * time.Microsecond), StepPerRequest: Duration(160 * time.Microsecond),
		},
		Log: Log{Level: "info", Format: "text"},
	}
}

// Keys returns every key of p, in the order of the struct. Setting a key sets
// the field of p.
func (p *Planner) Keys() []Key { return keysOf(p) }

// Validate reports all errors in p except in Schedule, which the planner checks, joined into one
// error, or nil.
func (p *Planner) Validate() error {
	var errs []error
	bad := complaintsTo(&errs)
	bad.texts(p)
	checkAddresses(bad, map[string]string{"listen": p.Listen, "http": p.HTTP})
	if p.DrainWithin < 0 {
		bad("drain_timeout", "must not be negative, is %v", p.DrainWithin)
	}
	if c := p.Cluster.Connection(); p.Cluster.On() {
		c.checkEtcd(bad)
	}
	p.Network.check(bad)
	p.Auth.check(bad)
	p.Auth.checkRolesEtcd(bad, p.Cluster.Connection())
	p.Log.check(bad)
	p.Trace.check(bad)
	if !p.Insecure {
		p.Auth.checkExposure(bad, map[string]string{"listen": p.Listen})
	}
	return errors.Join(errs...)
}
