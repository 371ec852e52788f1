package config

import (
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Gateway has the settings of a gateway of inference engines. As in other nodes, /metrics has an
// address of its own, apart from the API's.
type Gateway struct {
	Listen      string   `yaml:"listen" doc:"address of the OpenAI-compatible API: /v1/completions, /v1/chat/completions, /v1/models, /health" restart:"the listener is open"`
	HTTP        string   `yaml:"http" doc:"address of /metrics, /healthz, /readyz and /debug/pprof, without token or TLS; empty turns it off" restart:"the listener is open"`
	Engines     []string `yaml:"engine" doc:"base URL of an inference engine, e.g. http://10.0.0.1:8000, with its name before it where it has one, e.g. p0=http://10.0.0.1:8000; once for each engine, or with commas between" restart:"the front is made with it"`
	EngineCA    string   `yaml:"engine_ca" doc:"CA (PEM) of engines with https; empty is the system's" restart:"the connections are open"`
	DrainWithin Duration `yaml:"drain_timeout" doc:"maximum wait of SIGTERM for requests in flight" reload:"live"`

	MaxInFlight  int      `yaml:"max_in_flight" doc:"maximum concurrent requests of an engine; further requests wait" restart:"the front is made with it"`
	MaxQueue     int      `yaml:"max_queue" doc:"maximum waiting requests; further requests are answered with 429" restart:"the front is made with it"`
	QueueWait    Duration `yaml:"queue_wait" doc:"maximum wait for an engine before 429" restart:"the front is made with it"`
	MaxAttempts  int      `yaml:"max_attempts" doc:"maximum engines to which a request is sent, one after another, until one answers" restart:"the front is made with it"`
	LoadFactor   float64  `yaml:"load_factor" doc:"load of an engine, as a multiple of the mean, up to which it is chosen for the prefix of a prompt; at least 1" restart:"the front is made with it"`
	PrefixBlocks int      `yaml:"prefix_blocks" doc:"blocks of prompts, of 256 bytes, that are stored for each engine; the least recently used are dropped" restart:"the front is made with it"`
	MaxBody      Size     `yaml:"max_body" doc:"maximum body of a request; a longer one is answered with 413" restart:"the front is made with it"`
	BodyMemory   Size     `yaml:"body_memory" doc:"maximum memory for the bodies of all requests; further requests are answered with 429" restart:"the front is made with it"`

	HealthInterval Duration `yaml:"health_interval" doc:"time between two polls of an engine's /health" restart:"the front is made with it"`
	HealthTimeout  Duration `yaml:"health_timeout" doc:"time limit of a poll" restart:"the front is made with it"`

	Planner      string   `yaml:"planner" doc:"address of the planner of a prefill/decode cluster, host:port; with several planners that elect a leader (cluster.etcd) all addresses, commas between. It then chooses the engines of completions. Empty: the gateway chooses one by prefix and load" restart:"the connections are open"`
	Namespace    string   `yaml:"namespace" doc:"namespace of the cluster's KV at the storage nodes; needed with a planner" restart:"the connections are open"`
	Servers      []string `yaml:"servers" doc:"gRPC addresses of the storage nodes, host:port with commas between; needed with a planner" restart:"the connections are open"`
	Discover     bool     `yaml:"discover" doc:"servers are some members of a cluster: follow the list of all members, and choose the node of a prefix among them. All clients of a cluster must set it alike" restart:"the connections are open"`
	Zone         string   `yaml:"zone" doc:"zone of this host, as in the nodes' cluster.zone: of the replicas of a block, one in this zone is asked first" restart:"the connections are open"`
	OutputTokens int      `yaml:"output_tokens" doc:"tokens that the planner reserves for the output of a request that does not limit it" restart:"the front is made with it"`
	TenantHeader string   `yaml:"tenant_header" doc:"header of a request that names its tenant, at most 256 bytes; the planner has the tenants' weights (schedule.weights). Empty: requests have no tenant" restart:"the front is made with it"`
	FirstToken   Duration `yaml:"first_token" doc:"deadline of the first token after the arrival of a request: the planner refuses requests that it cannot start in time, with 429. 0: no limit" restart:"the front is made with it"`
	FirstHeader  string   `yaml:"first_token_header" doc:"header of a request that has the deadline in milliseconds, which overrides first_token. Empty: no header" restart:"the front is made with it"`
	ReplanWait   Duration `yaml:"replan_wait" doc:"maximum wait of a request whose engines failed before the first byte of the answer, until the planner starts it again" restart:"the front is made with it"`
	TokenFile    string   `yaml:"token_file" doc:"file with the bearer token of planner and storage nodes" restart:"the connections are open"`
	CA           string   `yaml:"ca" doc:"CA (PEM) that their certificates are signed by; implies tls" restart:"the connections are open"`
	Cert         string   `yaml:"cert" doc:"client certificate (PEM) for them; implies tls" restart:"the connections are open"`
	CertKey      string   `yaml:"key" doc:"private key (PEM) of cert" restart:"the connections are open"`
	TLS          bool     `yaml:"tls" doc:"use TLS to planner and storage nodes, with the system's CAs unless ca is given" restart:"the connections are open"`
	PlainToken   bool     `yaml:"plain_token" doc:"send the token of token_file in plain text to a planner or storage node on another machine" restart:"the connections are open"`

	Offload Offload `yaml:"offload" restart:"the remote datacenter is connected"`

	Auth     Auth `yaml:"auth"`
	Log      Log  `yaml:"log"`
	Insecure bool `yaml:"insecure" doc:"allow listening beyond loopback without a token or clients' certificates: anyone who reaches the port can use the engines" reload:"live"`
}

// Offload is the prefill of long prompts in another datacenter.
type Offload struct {
	URL       string   `yaml:"url" doc:"base URL of an OpenAI-compatible API in another datacenter, e.g. another gateway's, whose engines prefill long prompts and store their KV in offload.servers. Empty: none"`
	Servers   []string `yaml:"servers" doc:"gRPC addresses of the remote storage nodes, host:port with commas between, with the credentials of servers"`
	Shards    []string `yaml:"shards" doc:"namespaces of a block's other shards, with commas between: those of all ranks but the first one's, which is namespace. Default: for a namespace NAME/tpN.0, as the engines' adapters call it, NAME/tpN.1 and so on, N-1 in all"`
	Discover  bool     `yaml:"discover" doc:"offload.servers are some members of a cluster, as with discover"`
	Threshold int      `yaml:"threshold" doc:"uncached tokens of a prompt above which it is prefilled remotely (PrfaaS, section 3.4; penstock plan advise computes the best one)"`
	LinkRate  Size     `yaml:"link_rate" doc:"maximum bytes of KV per second on the link between the storages"`
	Abundant  bool     `yaml:"abundant" doc:"the link has spare bandwidth: a prefix that only remote storage has is copied too, instead of a prefill"`
	Model     string   `yaml:"model" doc:"name of the model at offload.url; empty is the first one that it lists"`
	KeyFile   string   `yaml:"key_file" doc:"file with the bearer token of offload.url"`
	Timeout   Duration `yaml:"timeout" doc:"maximum time of a remote prefill and the copy of its KV; then the local cluster prefills the rest. It must be less than queue_wait"`
	Backlog   Duration `yaml:"backlog" doc:"maximum time that the link needs for waiting bytes; above that prompts are prefilled locally"`
	InFlight  int      `yaml:"in_flight" doc:"maximum concurrent remote prefills; further prompts are prefilled locally"`
	Memory    Size     `yaml:"memory" doc:"memory for KV in transit between the storages"`
}

// DefaultGateway returns the default settings of a gateway.
func DefaultGateway() Gateway {
	return Gateway{
		Listen:         "127.0.0.1:7440",
		HTTP:           "127.0.0.1:7442",
		DrainWithin:    Duration(30 * time.Second),
		MaxInFlight:    256,
		MaxQueue:       1024,
		QueueWait:      Duration(10 * time.Second),
		MaxAttempts:    3,
		LoadFactor:     1.25,
		PrefixBlocks:   1 << 16,
		MaxBody:        32 << 20,
		BodyMemory:     1 << 30,
		HealthInterval: Duration(2 * time.Second),
		HealthTimeout:  Duration(5 * time.Second),
		OutputTokens:   1024,
		ReplanWait:     Duration(30 * time.Second),
		Offload:        Offload{Timeout: Duration(5 * time.Second), Backlog: Duration(2 * time.Second), InFlight: 64, Memory: 64 << 20},
		Log:            Log{Level: "info", Format: "text"},
	}
}

// headerName matches a token of HTTP (RFC 9110, section 5.6.2).
var headerName = regexp.MustCompile("^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")

// NamedEngine splits an element of Engines, NAME=URL or URL, into the name (empty if not given) and
// the URL.
func NamedEngine(text string) (name, base string) {
	if before, after, ok := strings.Cut(text, "="); ok && !strings.Contains(before, "/") {
		return before, after
	}
	return "", text
}

// Keys returns every key of g, in the order of the struct. Setting a key sets the field
// of g.
func (g *Gateway) Keys() []Key { return keysOf(g) }

// Validate reports all errors in g, joined into one error, or nil.
func (g *Gateway) Validate() error {
	var errs []error
	bad := complaintsTo(&errs)
	bad.texts(g)
	checkAddresses(bad, map[string]string{"listen": g.Listen, "http": g.HTTP})
	if len(g.Engines) == 0 {
		bad("engine", "name at least one (--engine URL)")
	}
	seen := make(map[string]bool)
	for _, text := range g.Engines {
		name, base := NamedEngine(text)
		if seen[name] && name != "" {
			bad("engine", "two engines have the name %s", name)
		}
		seen[name] = true
		u, err := url.Parse(base)
		switch {
		case err != nil:
			bad("engine", "not a URL such as http://10.0.0.1:8000: %v", errors.Unwrap(err)) // err itself contains the whole URL, with its password
		case u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "":
			bad("engine", "%q is no URL such as http://10.0.0.1:8000", u.Redacted())
		case seen[u.JoinPath("/").String()]:
			bad("engine", "%s is named twice", u)
		default:
			seen[u.JoinPath("/").String()] = true
		}
	}
	for key, v := range map[string]int{"max_in_flight": g.MaxInFlight, "max_queue": g.MaxQueue, "max_attempts": g.MaxAttempts, "prefix_blocks": g.PrefixBlocks, "output_tokens": g.OutputTokens} {
		if v <= 0 {
			bad(key, "must be positive, is %d", v)
		}
	}
	for key, d := range map[string]Duration{"queue_wait": g.QueueWait, "health_interval": g.HealthInterval, "health_timeout": g.HealthTimeout, "replan_wait": g.ReplanWait} {
		if d <= 0 {
			bad(key, "must be positive, is %v", d)
		}
	}
	if g.DrainWithin < 0 {
		bad("drain_timeout", "must not be negative, is %v", g.DrainWithin)
	}
	if !(g.LoadFactor >= 1) {
		bad("load_factor", "must be at least 1, is %v", g.LoadFactor)
	}
	switch {
	case g.MaxBody < 1<<10 || g.MaxBody > 1<<30:
		bad("max_body", "%v is outside 1 KiB to 1 GiB", g.MaxBody)
	case g.BodyMemory < g.MaxBody+1<<20:
		bad("body_memory", "%v is less than max_body, %v, and 1 MiB", g.BodyMemory, g.MaxBody)
	}
	g.checkCluster(bad)
	g.checkClass(bad)
	g.checkOffload(bad)
	g.Auth.check(bad)
	if g.Auth.Roles() {
		bad("auth.roles_file, auth.roles_etcd", "concern nodes and planners: the API of a gateway has no namespaces; use auth.token_file")
	}
	g.Log.check(bad)
	if !g.Insecure {
		g.Auth.checkExposure(bad, map[string]string{"listen": g.Listen})
	}
	return errors.Join(errs...)
}

// checkCluster reports settings for a prefill/decode cluster that are impossible, alone or in
// combination. Credentials without a planner are allowed, because other commands read the same
// variables.
func (g *Gateway) checkCluster(bad complaint) {
	if (g.Cert == "") != (g.CertKey == "") {
		bad("cert, key", "give both or neither")
	}
	if g.Planner == "" {
		if g.Namespace != "" || len(g.Servers) > 0 {
			bad("planner", "is empty, but namespace or servers are given, which only a cluster with a planner needs")
		}
		return
	}
	if g.Namespace == "" {
		bad("namespace", "name the namespace of the cluster's KV: the planner needs it")
	}
	if len(g.Servers) == 0 {
		bad("servers", "name at least one storage node (--servers HOST:PORT): the planner needs the length of the cached prefix")
	}
	for i, s := range g.Servers {
		if s == "" || slices.Contains(g.Servers[:i], s) {
			bad("servers", "storage node %q is empty or named twice", s)
		}
	}
}

// checkOffload reports settings of offload, the prefill in another datacenter, that are impossible,
// alone or in combination.
func (g *Gateway) checkOffload(bad complaint) {
	o := &g.Offload
	if o.URL == "" {
		if len(o.Servers) > 0 || o.Threshold != 0 || o.LinkRate != 0 {
			bad("offload.url", "is empty, but other settings of the other datacenter are given")
		}
		return
	}
	if g.Planner == "" {
		bad("planner", "is empty, but offload.url is given: only a gateway with a planner looks at the storage nodes")
	}
	if u, err := url.Parse(o.URL); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		bad("offload.url", "not a URL such as http://10.1.0.1:7440")
	}
	if len(o.Servers) == 0 {
		bad("offload.servers", "name at least one storage node of the other datacenter")
	}
	for i, name := range o.Shards {
		if name == "" || name == g.Namespace || slices.Contains(o.Shards[:i], name) {
			bad("offload.shards", "namespace %q is empty or named twice; namespace (%s) is the first shard", name, g.Namespace)
		}
	}
	if o.Threshold < 1 {
		bad("offload.threshold", "must be at least 1 token, is %d", o.Threshold)
	}
	if o.LinkRate < 1 {
		bad("offload.link_rate", "must be positive, is %v", o.LinkRate)
	}
	if o.Timeout <= 0 || o.Timeout >= g.QueueWait {
		bad("offload.timeout", "must be above 0 and less than queue_wait (%v), is %v", g.QueueWait, o.Timeout)
	}
	if o.Backlog <= 0 {
		bad("offload.backlog", "must be positive, is %v", o.Backlog)
	}
	if o.InFlight < 1 {
		bad("offload.in_flight", "must be positive, is %d", o.InFlight)
	}
	if o.Memory < 1<<20 {
		bad("offload.memory", "must be at least 1 MiB, is %v", o.Memory)
	}
}

// firstShard matches the namespace of the first rank of several, as the engines' adapters call it.
var firstShard = regexp.MustCompile(`^(.*/tp)(\d{1,3})\.0$`)

// OffloadShards returns the namespaces of the other shards of a block: offload.shards or its default.
func (g *Gateway) OffloadShards() []string {
	name := firstShard.FindStringSubmatch(g.Namespace)
	if len(g.Offload.Shards) > 0 || name == nil {
		return g.Offload.Shards
	}
	var shards []string
	ranks, _ := strconv.Atoi(name[2]) // digits
	for i := 1; i < ranks; i++ {
		shards = append(shards, fmt.Sprintf("%s%d.%d", name[1], ranks, i))
	}
	return shards
}

// checkClass reports errors in the settings for tenants and first tokens.
func (g *Gateway) checkClass(bad complaint) {
	named := func(header string) bool { return header == "" || headerName.MatchString(header) }
	switch {
	case g.FirstToken < 0:
		bad("first_token", "must not be negative, is %v", g.FirstToken)
	case !named(g.TenantHeader):
		bad("tenant_header", "%q is no name of a header", g.TenantHeader)
	case !named(g.FirstHeader):
		bad("first_token_header", "%q is no name of a header", g.FirstHeader)
	case g.Planner == "" && (g.TenantHeader != "" || g.FirstHeader != "" || g.FirstToken != 0):
		bad("planner", "is empty, but tenant_header, first_token or first_token_header are given, which only a cluster with a planner needs")
	}
}
