package helm

import (
	"fmt"
	"net"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	disruption "k8s.io/api/policy/v1"
	rbac "k8s.io/api/rbac/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	podsecurity "k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
	"sigs.k8s.io/yaml"
)

// decode returns the objects of the documents, and the documents that the Kubernetes API would
// refuse: an unknown kind, an unknown field, a field that is given twice or has the wrong type.
func decode(manifests string) (objects []runtime.Object, problems []string) {
	s := runtime.NewScheme()
	utilruntime.Must(scheme.AddToScheme(s))
	utilruntime.Must(monitoring.AddToScheme(s))
	strict := serializer.NewCodecFactory(s, serializer.EnableStrict).UniversalDeserializer()
	for _, doc := range documents(manifests) {
		o, _, err := strict.Decode([]byte(doc), nil, nil)
		if err != nil {
			problems = append(problems, fmt.Sprintf("%v in\n%s", err, doc))
			continue
		}
		objects = append(objects, o)
	}
	return objects, problems
}

// workload is a StatefulSet or a Deployment.
type workload struct {
	name     string
	kind     string
	replicas int
	selector *meta.LabelSelector
	pod      core.PodTemplateSpec
	claims   []string
	service  string // of a StatefulSet
}

func workloads(objects []runtime.Object) (all []workload) {
	for _, o := range objects {
		switch o := o.(type) {
		case *apps.StatefulSet:
			w := workload{o.Name, "StatefulSet", int(*o.Spec.Replicas), o.Spec.Selector, o.Spec.Template, nil, o.Spec.ServiceName}
			for _, c := range o.Spec.VolumeClaimTemplates {
				w.claims = append(w.claims, c.Name)
			}
			all = append(all, w)
		case *apps.Deployment:
			all = append(all, workload{o.Name, "Deployment", int(*o.Spec.Replicas), o.Spec.Selector, o.Spec.Template, nil, ""})
		}
	}
	return all
}

// container returns the only container of the pods.
func (w workload) container() core.Container { return w.pod.Spec.Containers[0] }

// port returns the number of a named port of the container, or 0.
func (w workload) port(name string) int32 {
	for _, p := range w.container().Ports {
		if p.Name == name {
			return p.ContainerPort
		}
	}
	return 0
}

// find returns the object of the type with the name, or nil.
func find[T meta.Object](objects []runtime.Object, name string) (found T, ok bool) {
	for _, o := range objects {
		if o, is := o.(T); is && o.GetName() == name {
			return o, true
		}
	}
	return found, false
}

// verifier collects the findings about objects.
type verifier struct {
	objects   []runtime.Object
	workloads []workload
	problems  []string
}

func (v *verifier) bad(o meta.Object, format string, args ...any) {
	kind := strings.TrimPrefix(fmt.Sprintf("%T", o), "*v1.")
	v.problems = append(v.problems, fmt.Sprintf("%s %s: %s", kind, o.GetName(), fmt.Sprintf(format, args...)))
}

// verify returns one line for each error in the objects of a chart.
func verify(objects []runtime.Object) []string {
	v := &verifier{objects: objects, workloads: workloads(objects)}
	seen := make(map[string]bool)
	for _, o := range objects {
		m, ok := o.(meta.Object)
		if !ok {
			continue
		}
		id := fmt.Sprintf("%T/%s", o, m.GetName())
		if seen[id] {
			v.bad(m, "there are two")
		}
		seen[id] = true
		_, role := o.(*rbac.ClusterRole)
		_, binding := o.(*rbac.ClusterRoleBinding)
		if (role || binding) == (m.GetNamespace() == namespace) {
			v.bad(m, "its namespace is %q", m.GetNamespace())
		}
		switch o := o.(type) {
		case *core.Service:
			for _, w := range v.oneOf(o, labels.SelectorFromSet(o.Spec.Selector)) {
				for _, p := range o.Spec.Ports {
					v.hasPort(o, w, p.TargetPort.String())
					if n := w.port(p.TargetPort.String()); n != 0 && n != p.Port {
						v.bad(o, "its port %d is the port %d of the pods", p.Port, n)
					}
				}
			}
		case *disruption.PodDisruptionBudget:
			v.oneOf(o, v.selector(o, o.Spec.Selector))
			if u := o.Spec.UnhealthyPodEvictionPolicy; u == nil || *u != disruption.AlwaysAllow {
				v.bad(o, "a pod that is not ready keeps its machine from being drained")
			}
		case *networking.NetworkPolicy:
			v.policy(o)
		case *monitoring.ServiceMonitor:
			v.monitor(o)
		case *monitoring.PrometheusRule:
			v.rules(o)
		case *rbac.ClusterRoleBinding:
			if _, ok := find[*rbac.ClusterRole](objects, o.RoleRef.Name); !ok {
				v.bad(o, "there is no ClusterRole %s", o.RoleRef.Name)
			}
			for _, s := range o.Subjects {
				if _, ok := find[*core.ServiceAccount](objects, s.Name); !ok || s.Namespace != namespace {
					v.bad(o, "there is no ServiceAccount %s in %s", s.Name, s.Namespace)
				}
			}
		case *apps.StatefulSet:
			v.workload(o)
		case *apps.Deployment:
			v.workload(o)
		}
	}
	return v.problems
}

func (v *verifier) selector(o meta.Object, s *meta.LabelSelector) labels.Selector {
	selector, err := meta.LabelSelectorAsSelector(s)
	if err != nil {
		v.bad(o, "%v", err)
		return labels.Nothing()
	}
	return selector
}

// selected returns the workloads whose pods have the labels.
func (v *verifier) selected(s labels.Selector) (found []workload) {
	for _, w := range v.workloads {
		if s.Matches(labels.Set(w.pod.Labels)) {
			found = append(found, w)
		}
	}
	return found
}

// oneOf returns the workload whose pods an object selects, which must be one.
func (v *verifier) oneOf(o meta.Object, s labels.Selector) []workload {
	found := v.selected(s)
	if len(found) != 1 {
		v.bad(o, "selects the pods of %v; want those of one workload", names(found))
	}
	return found
}

func names(all []workload) (names []string) {
	for _, w := range all {
		names = append(names, w.name)
	}
	slices.Sort(names)
	return names
}

func (v *verifier) hasPort(o meta.Object, w workload, name string) {
	if w.port(name) == 0 {
		v.bad(o, "no container has the port %s", name)
	}
}

// policy checks a NetworkPolicy. Peers with the name of the chart are pods of the chart, and no rule
// has an empty list of peers, which would allow everyone.
func (v *verifier) policy(o *networking.NetworkPolicy) {
	target := v.oneOf(o, v.selector(o, &o.Spec.PodSelector))
	if !slices.Equal(o.Spec.PolicyTypes, []networking.PolicyType{networking.PolicyTypeIngress}) {
		v.bad(o, "it limits %v; want Ingress only, because the pods reach DNS, etcd and engines", o.Spec.PolicyTypes)
	}
	for _, w := range target {
		v.own(o, w)
	}
	for _, rule := range o.Spec.Ingress {
		if len(rule.From) == 0 || len(rule.Ports) == 0 {
			v.bad(o, "a rule allows every peer or every port")
		}
		for _, p := range rule.Ports {
			for _, w := range target {
				v.hasPort(o, w, p.Port.String())
			}
		}
		for _, peer := range rule.From {
			if peer.PodSelector != nil && peer.PodSelector.MatchLabels["app.kubernetes.io/name"] == "penstock" {
				v.oneOf(o, v.selector(o, peer.PodSelector))
			}
		}
	}
}

// ownPeers has the ports of each component that the other components dial.
var ownPeers = map[string]map[string][]string{
	"node":    {"node": {"grpc", "data"}, "gateway": {"grpc", "data"}},
	"planner": {"gateway": {"grpc"}},
}

// own checks that a policy lets the pods of the chart that dial the workload reach its ports.
func (v *verifier) own(o *networking.NetworkPolicy, w workload) {
	for _, from := range v.workloads {
		for _, port := range ownPeers[w.container().Name][from.container().Name] {
			if !slices.ContainsFunc(o.Spec.Ingress, func(rule networking.NetworkPolicyIngressRule) bool {
				return slices.ContainsFunc(rule.Ports, func(p networking.NetworkPolicyPort) bool { return p.Port.String() == port }) &&
					slices.ContainsFunc(rule.From, func(p networking.NetworkPolicyPeer) bool {
						return p.PodSelector != nil && len(p.PodSelector.MatchLabels) > 0 && v.selector(o, p.PodSelector).Matches(labels.Set(from.pod.Labels))
					})
			}) {
				v.bad(o, "the pods of %s do not reach the port %s", from.name, port)
			}
		}
	}
}

// monitor checks a ServiceMonitor: one Service has its labels and ports, and the job is one of those
// that the rules expect.
func (v *verifier) monitor(o *monitoring.ServiceMonitor) {
	selector := v.selector(o, &o.Spec.Selector)
	var services []*core.Service
	for _, object := range v.objects {
		if s, ok := object.(*core.Service); ok && selector.Matches(labels.Set(s.Labels)) {
			services = append(services, s)
		}
	}
	if len(services) != 1 {
		v.bad(o, "selects %d Services; want one", len(services))
		return
	}
	for _, e := range o.Spec.Endpoints {
		if !slices.ContainsFunc(services[0].Spec.Ports, func(p core.ServicePort) bool { return p.Name == e.Port }) {
			v.bad(o, "the Service has no port %s", e.Port)
		}
		for _, r := range e.RelabelConfigs {
			for _, w := range v.selected(labels.SelectorFromSet(services[0].Spec.Selector)) {
				if r.TargetLabel == "job" && *r.Replacement != "penstock-"+w.container().Name {
					v.bad(o, "the job %s is not the one of the rules, penstock-%s", *r.Replacement, w.container().Name)
				}
			}
		}
	}
}

// rules compares the rules with those of deploy/monitoring, which `penstock metrics rules` writes.
func (v *verifier) rules(o *monitoring.PrometheusRule) {
	var want monitoring.PrometheusRuleSpec
	if err := yaml.UnmarshalStrict([]byte(mustRead("../monitoring/rules.yaml")), &want); err != nil {
		v.bad(o, "%v", err)
		return
	}
	got, _ := yaml.Marshal(o.Spec)
	expected, _ := yaml.Marshal(want)
	if string(got) != string(expected) {
		v.bad(o, "the rules are not those of penstock metrics rules")
	}
}

// workload checks the pods of a StatefulSet or a Deployment.
func (v *verifier) workload(o meta.Object) {
	i := slices.IndexFunc(v.workloads, func(w workload) bool {
		return w.name == o.GetName() && strings.HasSuffix(fmt.Sprintf("%T", o), w.kind)
	})
	w := v.workloads[i]
	if !v.selector(o, w.selector).Matches(labels.Set(w.pod.Labels)) {
		v.bad(o, "its selector does not match its pods")
	}
	spec, c := w.pod.Spec, w.container()
	for _, s := range spec.TopologySpreadConstraints {
		if got := names(v.selected(v.selector(o, s.LabelSelector))); !slices.Equal(got, []string{w.name}) {
			v.bad(o, "it is spread among the pods of %v", got)
		}
	}
	if _, ok := find[*core.ServiceAccount](v.objects, spec.ServiceAccountName); !ok {
		v.bad(o, "there is no ServiceAccount %s", spec.ServiceAccountName)
	}
	v.secure(o, w)
	for _, p := range []*core.Probe{c.StartupProbe, c.LivenessProbe, c.ReadinessProbe} {
		if p != nil {
			v.hasPort(o, w, p.HTTPGet.Port.String())
		}
	}
	if c.LivenessProbe == nil || c.ReadinessProbe == nil || c.Lifecycle == nil {
		v.bad(o, "it lacks probes or preStop")
	}
	v.files(o, w)
	if w.service != "" {
		v.identity(o, w)
	}
	if c.Name == "node" {
		v.start(o, w)
	}
	if c.Name == "planner" && w.replicas > 1 && len(w.service) == 0 {
		v.bad(o, "its clients cannot reach each planner")
	}
}

// start checks the time until the kubelet ends a node that does not answer yet. A node whose index is lost
// reads its volumes before it answers, and begins anew after a restart. 24 TiB take 4 h at 1.7 GiB/s.
func (v *verifier) start(o meta.Object, w workload) {
	p := w.container().StartupProbe
	if p == nil {
		v.bad(o, "it lacks a startup probe")
		return
	}
	if within := time.Duration(p.FailureThreshold) * time.Duration(p.PeriodSeconds) * time.Second; within < 4*time.Hour {
		v.bad(o, "its start may take %v; want 4 h", within)
	}
}

// secure checks the pods against the Pod Security Standard "restricted".
func (v *verifier) secure(o meta.Object, w workload) {
	evaluator, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	if err != nil {
		v.bad(o, "%v", err)
		return
	}
	level := podsecurity.LevelVersion{Level: podsecurity.LevelRestricted, Version: podsecurity.LatestVersion()}
	if r := policy.AggregateCheckResults(evaluator.EvaluatePod(level, &w.pod.ObjectMeta, &w.pod.Spec)); !r.Allowed {
		v.bad(o, "its pods are not restricted: %s", r.ForbiddenDetail())
	}
	if s := w.container().SecurityContext; s == nil || s.ReadOnlyRootFilesystem == nil || !*s.ReadOnlyRootFilesystem {
		v.bad(o, "the root file system is writable")
	}
}

// mounted returns the files in the volumes of the pods, with their content, or "" where only a
// Secret outside of the chart has it.
func (v *verifier) mounted(o meta.Object, w workload) map[string]string {
	files := make(map[string]string)
	for _, m := range w.container().VolumeMounts {
		for _, volume := range w.pod.Spec.Volumes {
			if volume.Name != m.Name || volume.Projected == nil {
				continue
			}
			for _, source := range volume.Projected.Sources {
				if source.ConfigMap != nil {
					c, ok := find[*core.ConfigMap](v.objects, source.ConfigMap.Name)
					if !ok {
						v.bad(o, "there is no ConfigMap %s", source.ConfigMap.Name)
						continue
					}
					for key, text := range c.Data {
						files[path.Join(m.MountPath, key)] = text
					}
				}
				if source.Secret == nil {
					continue
				}
				s, made := find[*core.Secret](v.objects, source.Secret.Name)
				for _, item := range source.Secret.Items {
					text := ""
					if made {
						if text = s.StringData[item.Key]; text == "" {
							v.bad(o, "the Secret %s has no key %s", s.Name, item.Key)
						}
					}
					files[path.Join(m.MountPath, item.Path)] = text
				}
			}
		}
	}
	return files
}

// settings returns the file after --config, and the settings in it.
func settings(w workload, files map[string]string) (file string, parsed map[string]any, err error) {
	args := w.container().Args
	at := slices.Index(args, "--config")
	if at < 0 || at+1 == len(args) {
		return "", nil, fmt.Errorf("the command %v has no --config", args)
	}
	text, ok := files[args[at+1]]
	if !ok {
		return args[at+1], nil, fmt.Errorf("the pods have no file %s", args[at+1])
	}
	err = yaml.Unmarshal([]byte(text), &parsed)
	return args[at+1], parsed, err
}

// setting returns a text of the settings, or other where it is not set.
func setting(parsed map[string]any, key, other string) string {
	if text, ok := parsed[key].(string); ok {
		return text
	}
	return other
}

// drains are the defaults of drain_timeout by command, and the time that follows it.
var drains = map[string]struct{ timeout, after time.Duration }{
	"serve":   {15 * time.Second, 3 * time.Minute},
	"planner": {5 * time.Second, 0},
	"gateway": {30 * time.Second, 0},
}

// files checks the volumes of the pods against the settings: the settings name files that exist, the
// directories of data are on claims, and the ports are those of the container.
func (v *verifier) files(o meta.Object, w workload) {
	c, files := w.container(), v.mounted(o, w)
	mounts := make(map[string]string)
	for _, m := range c.VolumeMounts {
		volume := slices.ContainsFunc(w.pod.Spec.Volumes, func(v core.Volume) bool { return v.Name == m.Name })
		if !volume && !slices.Contains(w.claims, m.Name) {
			v.bad(o, "there is no volume %s", m.Name)
		}
		if !volume {
			mounts[m.MountPath] = m.Name
		} else if !m.ReadOnly {
			v.bad(o, "%s is writable", m.MountPath)
		}
	}
	if len(mounts) != len(w.claims) {
		v.bad(o, "it has %d claims, and mounts %d", len(w.claims), len(mounts))
	}
	_, parsed, err := settings(w, files)
	if err != nil {
		v.bad(o, "%v", err)
		return
	}
	var walk func(key string, value any)
	walk = func(key string, value any) {
		switch value := value.(type) {
		case map[string]any:
			for k, x := range value {
				walk(key+"."+k, x)
			}
		case []any:
			for _, x := range value {
				walk(key, x)
			}
		case string:
			if _, ok := files[value]; !ok && strings.HasPrefix(value, "/etc/") {
				v.bad(o, "%s: the pods have no file %s", key[1:], value)
			}
			if _, ok := mounts[path.Dir(value)]; !ok && strings.HasPrefix(value, "/var/") {
				v.bad(o, "%s: %s is on no claim", key[1:], value)
			}
			for address := range strings.SplitSeq(value, ",") {
				if strings.Contains(address, ".svc.") && !reachable(v.objects, address) {
					v.bad(o, "%s: %s is the address of nothing", key[1:], address)
				}
			}
		}
	}
	walk("", parsed)
	for name, key := range map[string]string{"grpc": "listen", "api": "listen", "data": "data_listen", "http": "http"} {
		_, port, err := net.SplitHostPort(setting(parsed, key, ""))
		if n := w.port(name); n != 0 && (err != nil || strconv.Itoa(int(n)) != port) {
			v.bad(o, "the port %s is %d; the settings have %s", name, n, port)
		}
	}
	cluster, clustered := parsed["cluster"].(map[string]any)
	inEtcd := strings.Contains(fmt.Sprint(parsed["auth"]), "roles_etcd")
	if c.Name == "planner" && clustered != (w.replicas > 1 || inEtcd) {
		v.bad(o, "it has %d planners; the settings have cluster: %v", w.replicas, clustered)
	}
	if clustered && c.Name == "node" && strings.Contains(fmt.Sprint(parsed["auth"]), "tls_cert") && setting(cluster, "peer_ca", "") != "/etc/penstock/tls/ca.crt" {
		v.bad(o, "cluster.peer_ca is %q, so a node that drains does not trust the other nodes", setting(cluster, "peer_ca", ""))
	}
	if servers, ok := parsed["servers"].([]any); ok && c.Name == "gateway" {
		if discovers := parsed["discover"] == true; discovers != v.isCluster() {
			v.bad(o, "discover is %v with %d servers, and that they are a cluster is %v", discovers, len(servers), v.isCluster())
		}
	}
	drain := drains[c.Args[0]]
	timeout, err := time.ParseDuration(setting(parsed, "drain_timeout", drain.timeout.String()))
	grace := time.Duration(*w.pod.Spec.TerminationGracePeriodSeconds) * time.Second
	if before := time.Duration(c.Lifecycle.PreStop.Sleep.Seconds) * time.Second; err != nil || grace < before+timeout+drain.after {
		v.bad(o, "terminationGracePeriodSeconds is %v, less than %v before the drain, %v for it, and %v after it: %v", grace, before, timeout, drain.after, err)
	}
}

// isCluster reports whether the nodes are a cluster, whose clients must all discover the members.
func (v *verifier) isCluster() bool {
	for _, o := range v.objects {
		if m, ok := o.(*core.ConfigMap); ok {
			var settings map[string]any
			if err := yaml.Unmarshal([]byte(m.Data["penstock.yaml"]), &settings); err == nil && settings["cluster"] != nil {
				return true
			}
		}
	}
	return false
}

// identity checks the names of the pods of a StatefulSet: a headless Service has their DNS names, and
// nodes advertise these.
func (v *verifier) identity(o meta.Object, w workload) {
	s, ok := find[*core.Service](v.objects, w.service)
	if !ok || s.Spec.ClusterIP != core.ClusterIPNone {
		v.bad(o, "there is no headless Service %s", w.service)
		return
	}
	v.oneOf(s, labels.SelectorFromSet(s.Spec.Selector))
	if w.container().Name != "node" {
		return
	}
	host := environ(w)["PENSTOCK_ADVERTISE"]
	if !reachable(v.objects, net.JoinHostPort(host, "7420")) {
		v.bad(o, "a pod advertises %s, which is the address of nothing", host)
	}
}

// environ returns the variables of the first pod of a workload, as the kubelet expands them.
func environ(w workload) map[string]string {
	vars := make(map[string]string)
	for _, e := range w.container().Env {
		value := e.Value
		if e.ValueFrom != nil && e.ValueFrom.FieldRef != nil && e.ValueFrom.FieldRef.FieldPath == "metadata.name" {
			value = w.name + "-0"
		}
		for name, known := range vars {
			value = strings.ReplaceAll(value, "$("+name+")", known)
		}
		vars[e.Name] = value
	}
	return vars
}

// reachable reports whether a Service has the port and gives the host a DNS name: SERVICE.NAMESPACE.svc,
// or POD.SERVICE.NAMESPACE.svc for a pod of a StatefulSet with this Service.
func reachable(objects []runtime.Object, address string) bool {
	host, port, err := net.SplitHostPort(address)
	before, _, ok := strings.Cut(host, "."+namespace+".svc")
	if err != nil || !ok {
		return false
	}
	pod, service, ofPod := strings.Cut(before, ".")
	if !ofPod {
		service = before
	}
	s, ok := find[*core.Service](objects, service)
	if !ok || !slices.ContainsFunc(s.Spec.Ports, func(p core.ServicePort) bool { return strconv.Itoa(int(p.Port)) == port }) {
		return false
	}
	if !ofPod {
		return true
	}
	for _, w := range workloads(objects) {
		for i := range w.replicas {
			if w.service == service && pod == fmt.Sprintf("%s-%d", w.name, i) {
				return true
			}
		}
	}
	return false
}
