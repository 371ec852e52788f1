// Package helm tests the chart penstock: Helm renders and lints it with several values, each object is
// decoded against the types of the Kubernetes API, objects are compared with each other, and the
// program checks the settings and the command lines of the containers. It is a module of its own, so
// that the modules of Helm and Kubernetes are not among those of Penstock.
//
//	make test-chart
//
//	chart_test.go    renders the chart, and changes the rendered objects: each change must be found
//	verify_test.go   the rules that the objects follow
//	program_test.go  settings and command lines, with the real program
//
//	make test-kubernetes
//
//	cluster_test.go     a Kubernetes of one machine, with the programs of the module kubernetes
//	kubernetes_test.go  installs the chart there, and runs its pods
package helm

import (
	"bytes"
	"io"
	"log"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/Masterminds/semver/v3"
	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/lint"
	"helm.sh/helm/v3/pkg/lint/support"
	networking "k8s.io/api/networking/v1"
	"sigs.k8s.io/yaml"
)

const (
	chartDir = "penstock"
	page     = "../../docs/kubernetes.md"
	// release and namespace are the arguments of helm install in the tests.
	release, namespace = "kv-cache", "inference"
)

// rendered is the output of the chart with some values.
type rendered struct{ manifests, notes string }

// values are the cases of the tests: the files in testdata, the values of the page, and none.
func values(t *testing.T) map[string]map[string]any {
	t.Helper()
	texts := map[string]string{"defaults": ""}
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(files) < 4 {
		t.Fatalf("testdata has %d files of values: %v", len(files), err)
	}
	for _, file := range files {
		texts[file] = read(t, file)
	}
	blocks := regexp.MustCompile("(?ms)^```yaml\n(.*?)^```$").FindAllStringSubmatch(read(t, page), -1)
	if len(blocks) < 3 {
		t.Fatalf("%s has %d examples of values", page, len(blocks))
	}
	for _, b := range blocks {
		texts[page+": "+strings.SplitN(b[1], "\n", 2)[0]] = b[1]
	}
	all := make(map[string]map[string]any)
	for name, text := range texts {
		v, err := chartutil.ReadValues([]byte(text))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		all[name] = v
	}
	return all
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// load reads the chart. Helm reports links to files outside of the chart, which here are intended:
// the rules and the dashboard are those of deploy/monitoring.
func load(t *testing.T) *chart.Chart {
	t.Helper()
	log.SetOutput(io.Discard)
	defer log.SetOutput(os.Stderr)
	c, err := loader.Load(chartDir)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// render renders the chart as helm install does.
func render(c *chart.Chart, values map[string]any) (rendered, error) {
	options := chartutil.ReleaseOptions{Name: release, Namespace: namespace, IsInstall: true, Revision: 1}
	merged, err := chartutil.ToRenderValues(c, values, options, chartutil.DefaultCapabilities)
	if err != nil {
		return rendered{}, err
	}
	files, err := engine.Render(c, merged)
	if err != nil {
		return rendered{}, err
	}
	var r rendered
	for _, path := range slices.Sorted(maps.Keys(files)) {
		switch filepath.Ext(path) {
		case ".yaml":
			r.manifests += "---\n" + files[path] + "\n"
		case ".txt":
			r.notes += files[path]
		}
	}
	return r, nil
}

// must is render for values that are right.
func must(t *testing.T, values map[string]any) rendered {
	t.Helper()
	r, err := render(load(t), values)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestChart: for each case the objects of the chart follow all rules.
func TestChart(t *testing.T) {
	program := build(t)
	for name, v := range values(t) {
		t.Run(name, func(t *testing.T) {
			r := must(t, v)
			objects, problems := decode(r.manifests)
			problems = append(problems, verify(objects)...)
			problems = append(problems, program.check(t, objects)...)
			for _, p := range problems {
				t.Error(p)
			}
			if len(objects) < 5 {
				t.Errorf("%d objects", len(objects))
			}
			program.checkCommands(t, r.notes)
			for _, address := range regexp.MustCompile(`[a-z0-9.-]+\.svc[a-z0-9.]*:\d+`).FindAllString(r.notes, -1) {
				if !reachable(objects, address) {
					t.Errorf("the notes name %s, which no Service has", address)
				}
			}
			if !strings.Contains(r.notes, "-node-0.") {
				t.Errorf("the notes name no node:\n%s", r.notes)
			}
		})
	}
}

// TestLint: Helm finds nothing wrong in the chart, with the values of each case.
func TestLint(t *testing.T) {
	log.SetOutput(io.Discard)
	defer log.SetOutput(os.Stderr)
	for name, v := range values(t) {
		for _, m := range lint.All(chartDir, v, namespace, true).Messages {
			if m.Severity > support.InfoSev {
				t.Errorf("%s: %s", name, m)
			}
		}
	}
}

// TestMutants: each change of the rendered objects is found, by the rule that it breaks.
func TestMutants(t *testing.T) {
	program := build(t)
	all := must(t, values(t)["testdata/everything.yaml"]).manifests
	cluster := must(t, values(t)["testdata/cluster.yaml"]).manifests
	for _, c := range []struct{ name, in, old, new, finding string }{
		{"a misspelt field", all, "imagePullPolicy:", "imagePulPolicy:", `unknown field "spec.template.spec.containers[0].imagePulPolicy"`},
		{"a misspelt field of a ServiceMonitor", all, "  endpoints:", "  endpoint:", `unknown field "spec.endpoint"`},
		{"a field of the wrong type", all, "replicas: 3", "replicas: three", "cannot unmarshal string"},
		{"a field twice", all, "  podManagementPolicy: Parallel", "  podManagementPolicy: Parallel\n  podManagementPolicy: Parallel", "already set"},
		{"a kind that does not exist", all, "kind: StatefulSet", "kind: StatefulSets", "no kind"},
		{"a wrong target port", all, "{name: data, port: 7421, targetPort: data}", "{name: data, port: 7421, targetPort: dta}", "no container has the port dta"},
		{"a wrong container port", all, "{name: http, containerPort: 7432}", "{name: http, containerPort: 7433}", "the port http is 7433; the settings have 7432"},
		{"a wrong port of the settings", all, `listen: :7440`, `listen: :7450`, "the port api is 7440; the settings have 7450"},
		{"a wrong port of a probe", all, "httpGet: {path: /readyz, port: http}", "httpGet: {path: /readyz, port: web}", "no container has the port web"},
		{"a wrong port of a policy", all, "- ports: [{port: api}]", "- ports: [{port: apis}]", "no container has the port apis"},
		{"a wrong port of a ServiceMonitor", all, "- port: http\n      path: /metrics", "- port: metrics\n      path: /metrics", "the Service has no port metrics"},
		{"a Service that selects nothing", all, "  clusterIP: None\n  publishNotReadyAddresses: true\n  selector:\n    app.kubernetes.io/name: penstock", "  clusterIP: None\n  publishNotReadyAddresses: true\n  selector:\n    app.kubernetes.io/name: penstck", "selects the pods of []"},
		{"a selector without the component", all, "  selector:\n    app.kubernetes.io/name: penstock\n    app.kubernetes.io/instance: kv-cache\n    app.kubernetes.io/component: gateway\n  ports:\n    - {name: api", "  selector:\n    app.kubernetes.io/name: penstock\n    app.kubernetes.io/instance: kv-cache\n  ports:\n    - {name: api", "selects the pods of [kv-gateway kv-node kv-planner]"},
		{"a budget that selects nothing", all, "    matchLabels:\n      app.kubernetes.io/name: penstock\n      app.kubernetes.io/instance: kv-cache\n      app.kubernetes.io/component: node\n---\napiVersion: apps/v1", "    matchLabels:\n      app.kubernetes.io/name: penstock\n      app.kubernetes.io/instance: kv-cache\n      app.kubernetes.io/component: nodes\n---\napiVersion: apps/v1", "PodDisruptionBudget kv-node: selects the pods of []"},
		{"a budget for pods that are not ready", all, "  unhealthyPodEvictionPolicy: AlwaysAllow\n", "", "keeps its machine from being drained"},
		{"labels that the selector lacks", all, "    metadata:\n      labels:\n        app.kubernetes.io/name: penstock", "    metadata:\n      labels:\n        app.kubernetes.io/name: penstok", "its selector does not match its pods"},
		{"a misspelt setting", cluster, "drain_timeout:", "drain_timout:", "unknown key"},
		{"a bad value of a setting", cluster, "lease_ttl: 5s", "lease_ttl: 5ms", "cluster.lease_ttl"},
		{"an unknown flag", all, "--degraded", "--degradd", "unknown flag"},
		{"an unknown command", all, "args: [planner,", "args: [plannr,", "kv-planner: exit status 2"},
		{"a wrong name of a variable", all, "PENSTOCK_ADVERTISE", "PENSTOCK_ADVERTIZE", "names no key"},
		{"another file of the settings", all, "/etc/penstock/gateway.yaml", "/etc/penstock/gatway.yaml", "no file /etc/penstock/gatway.yaml"},
		{"a key that is not mounted", cluster, "- {key: roles.yaml, path: roles.yaml}", "- {key: roles.yml, path: roles.yml}", "no file /etc/penstock/roles.yaml"},
		{"a key that the Secret lacks", all, "  prometheus-token: a-token-of-a-trial\n", "", "the Secret kv-auth has no key prometheus-token"},
		{"nodes that do not trust each other", cluster, "peer_ca: /etc/penstock/tls/ca.crt", "peer_ca: ''", "does not trust the other nodes"},
		{"a token of the nodes that is not mounted", cluster, "- {key: peer-token, path: peer-token}", "- {key: peer-token, path: peer}", "no file /etc/penstock/peer-token"},
		{"a volume off the claims", cluster, "mountPath: /var/lib/penstock/nvme1", "mountPath: /var/lib/penstock/nvme2", "/var/lib/penstock/nvme1/volume is on no claim"},
		{"a claim of another name", cluster, "        name: nvme1\n", "        name: nvme3\n", "there is no volume nvme1"},
		{"a root file system that is writable", all, "readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false", "root file system"},
		{"a capability", all, "drop: [ALL]", "drop: [CHOWN]", "unrestricted capabilities"},
		{"a process of root", all, "runAsNonRoot: true", "runAsNonRoot: false", "runAsNonRoot"},
		{"too little time for the drain", all, "terminationGracePeriodSeconds: 240", "terminationGracePeriodSeconds: 120", "terminationGracePeriodSeconds"},
		{"too little time for the start", all, "failureThreshold: 2880", "failureThreshold: 180", "its start may take 15m0s"},
		{"a policy without the data plane", all, "- ports: [{port: grpc}, {port: data}]", "- ports: [{port: grpc}]", "NetworkPolicy kv-node: the pods of kv-node do not reach the port data"},
		{"a policy without the other nodes", all, "    - ports: [{port: grpc}, {port: data}]\n      from:\n        - podSelector:\n            matchLabels:\n              app.kubernetes.io/name: penstock\n              app.kubernetes.io/instance: kv-cache\n              app.kubernetes.io/component: node\n", "    - ports: [{port: grpc}, {port: data}]\n      from:\n", "the pods of kv-node do not reach the port grpc"},
		{"a policy for outgoing connections", all, "  policyTypes: [Ingress]", "  policyTypes: [Ingress, Egress]", "want Ingress only"},
		{"another domain of the pods", all, "serviceName: kv-node", "serviceName: kv-nodes", "no headless Service kv-nodes"},
		{"a gateway that does not discover the nodes of a cluster", all, "discover: true", "discover: false", "discover is false"},
		{"an address that is no node", all, "- kv-node-1.kv-node.inference.svc.k8s.example:7420", "- kv-node-9.kv-node.inference.svc.k8s.example:7420", "kv-node-9.kv-node.inference.svc.k8s.example:7420 is the address of nothing"},
		{"an advertised name without DNS", all, "$(PENSTOCK_NODE).kv-node.", "$(PENSTOCK_NODE).kv-nods.", "advertises"},
		{"another service account", all, "serviceAccountName: kv\n", "serviceAccountName: kvv\n", "no ServiceAccount kvv"},
		{"a role that does not exist", all, "kind: ClusterRole\n  name: inference-kv-planner", "kind: ClusterRole\n  name: kv-planner", "no ClusterRole kv-planner"},
		{"another name of a job", all, "replacement: penstock-planner", "replacement: planner", "the job planner"},
		{"a rule of another release", all, "alert: PenstockNodeDown", "alert: PenstockNodDown", "the rules are not those of penstock metrics rules"},
		{"an object twice", all, "kind: PodDisruptionBudget\nmetadata:\n  name: kv-gateway", "kind: PodDisruptionBudget\nmetadata:\n  name: kv-node", "PodDisruptionBudget kv-node: there are two"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if !strings.Contains(c.in, c.old) {
				t.Fatalf("no %q in\n%s", c.old, c.in)
			}
			objects, problems := decode(strings.Replace(c.in, c.old, c.new, 1))
			problems = append(problems, verify(objects)...)
			problems = append(problems, program.check(t, objects)...)
			if !slices.ContainsFunc(problems, func(p string) bool { return strings.Contains(p, c.finding) }) {
				t.Errorf("no finding with %q; the findings are\n%s", c.finding, strings.Join(problems, "\n"))
			}
		})
	}
}

// TestSchema: the schema refuses values that are misspelt, that the chart sets, or that contradict
// each other.
func TestSchema(t *testing.T) {
	c := load(t)
	for text, finding := range map[string]string{
		"nod: {replicas: 3}":                         "additional properties 'nod' not allowed",
		"node: {replica: 3}":                         "additional properties 'replica' not allowed",
		"node: {replicas: 0}":                        "minimum",
		"node: {volumes: []}":                        "minItems",
		"node: {volumes: [{name: data}]}":            "missing property 'size'",
		"node: {volumes: [{name: a/b, size: 1Gi}]}":  "does not match pattern",
		"node: {config: {listen: ':1'}}":             "/node/config/listen",
		"node: {config: {cluster: {prefix: /x}}}":    "/node/config/cluster/prefix",
		"node: {config: {cluster: {peer_ca: /x}}}":   "/node/config/cluster/peer_ca",
		"node: {secretKeys: [a/b]}":                  "/node/secretKeys/0",
		"planner: {config: {network: {file: /x}}}":   "/planner/config/network/file",
		"planner: {config: {cluster: {etcd: []}}}":   "/planner/config/cluster/etcd",
		"planner: {replicas: 0}":                     "minimum",
		"gateway: {enabled: true}":                   "/gateway/engines",
		"gateway: {config: {servers: []}}":           "/gateway/config/servers",
		"auth: {kind: password}":                     "/auth/kind",
		"tls: {clientCertificates: true}":            "/tls/enabled",
		"etcd: {clientCertificate: true}":            "/etcd/tlsSecret",
		"etcd: {endpoints: ['http://etcd:2379']}":    "/etcd/endpoints/0",
		"gateway: {service: {type: Public}}":         "/gateway/service/type",
		"monitoring: {serviceMonitor: {every: 15s}}": "additional properties 'every' not allowed",
	} {
		v, err := chartutil.ReadValues([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := render(c, v); err == nil || !strings.Contains(err.Error(), finding) {
			t.Errorf("%s: %v; want an error with %q", text, err, finding)
		}
	}
	for text, finding := range map[string]string{
		"{planner: {enabled: true}, gateway: {enabled: true, engines: ['p0=http://a:1']}}": "gateway.namespace is needed",
		"etcd: {endpoints: ['e:2379'], user: u}":                                           "etcd.passwordSecret is needed",
		"auth: {kind: roles-etcd}":                                                         "needs etcd.endpoints",
		"planner: {enabled: true, replicas: 2}":                                            "needs etcd.endpoints",
	} {
		v, err := chartutil.ReadValues([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := render(c, v); err == nil || !strings.Contains(err.Error(), finding) {
			t.Errorf("%s: %v; want an error with %q", text, err, finding)
		}
	}
}

// TestSchemaIsComplete: the schema has each key of values.yaml, and no other.
func TestSchemaIsComplete(t *testing.T) {
	var given map[string]any
	if err := yaml.Unmarshal([]byte(read(t, chartDir+"/values.yaml")), &given); err != nil {
		t.Fatal(err)
	}
	var schema map[string]any
	if err := yaml.Unmarshal([]byte(read(t, chartDir+"/values.schema.json")), &schema); err != nil {
		t.Fatal(err)
	}
	var compare func(path string, given, schema map[string]any)
	compare = func(path string, given, schema map[string]any) {
		properties, ok := schema["properties"].(map[string]any)
		if !ok || schema["additionalProperties"] != false {
			return // the keys are free
		}
		for key := range properties {
			if _, ok := given[key]; !ok && path+key != "global" {
				t.Errorf("the schema has %s%s, and values.yaml does not", path, key)
			}
		}
		for key, value := range given {
			if properties[key] == nil {
				t.Errorf("values.yaml has %s%s, and the schema does not", path, key)
				continue
			}
			if inner, ok := value.(map[string]any); ok {
				compare(path+key+".", inner, properties[key].(map[string]any))
			}
		}
	}
	compare("", given, schema)
}

// TestVersion: chart and program have the same version, the one of the newest release in CHANGELOG.md
// or a newer one.
func TestVersion(t *testing.T) {
	m := load(t).Metadata
	if m.Version != m.AppVersion {
		t.Errorf("the chart is %s, and its program %s", m.Version, m.AppVersion)
	}
	newest := regexp.MustCompile(`(?m)^## (\d+\.\d+\.\d+),`).FindStringSubmatch(read(t, "../../CHANGELOG.md"))
	if newest == nil {
		t.Fatal("CHANGELOG.md has no release")
	}
	if semver.MustParse(m.Version).LessThan(semver.MustParse(newest[1])) {
		t.Errorf("the chart is %s; the newest release is %s", m.Version, newest[1])
	}
}

// documents splits a stream of YAML documents. Those without an object are left out.
func documents(text string) (docs []string) {
	for doc := range strings.SplitSeq(text, "\n---\n") {
		var object map[string]any
		if err := yaml.Unmarshal(bytes.TrimPrefix([]byte(doc), []byte("---\n")), &object); err != nil || len(object) > 0 {
			docs = append(docs, strings.TrimPrefix(doc, "---\n"))
		}
	}
	return docs
}

// TestPolicyPeers: the peers of each list of networkPolicy reach the ports that docs/kubernetes.md and
// values.yaml name, and no others.
func TestPolicyPeers(t *testing.T) {
	lists := map[string]any{"enabled": true}
	for _, list := range []string{"engines", "callers", "monitoring"} {
		lists[list] = []any{map[string]any{"podSelector": map[string]any{"matchLabels": map[string]any{"list": list}}}}
	}
	v := values(t)["testdata/everything.yaml"]
	v["networkPolicy"] = lists
	objects, problems := decode(must(t, v).manifests)
	got := make(map[string][]string)
	for _, o := range objects {
		p, ok := o.(*networking.NetworkPolicy)
		if !ok {
			continue
		}
		for _, rule := range p.Spec.Ingress {
			for _, peer := range rule.From {
				list := peer.PodSelector.MatchLabels["list"]
				for _, port := range rule.Ports {
					if list != "" {
						got[list] = append(got[list], p.Name+" "+port.Port.String())
					}
				}
			}
		}
	}
	want := map[string][]string{
		"engines":    {"kv-node grpc", "kv-node data", "kv-planner grpc"},
		"callers":    {"kv-gateway api"},
		"monitoring": {"kv-node http", "kv-planner http", "kv-gateway http"},
	}
	if !maps.EqualFunc(got, want, slices.Equal) || len(problems) > 0 {
		t.Errorf("the lists reach %v; want %v; %v", got, want, problems)
	}
}
