package helm

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	disruption "k8s.io/api/policy/v1"
	"sigs.k8s.io/yaml"
)

// TestKubernetes installs the chart in a real Kubernetes. Namespaces enforce the Pod Security Standard
// "restricted".
func TestKubernetes(t *testing.T) {
	k := cluster(t)
	all := values(t)
	for i, name := range slices.Sorted(maps.Keys(all)) {
		k.sub(name, func(k *kubernetes) { k.installs(fmt.Sprintf("values-%d", i), all[name]) })
	}
	if k.Failed() {
		return
	}
	k.addMachine()
	k.sub("pods", func(k *kubernetes) { k.runs(all["testdata/kubernetes.yaml"]) })
}

// namespace makes a namespace that refuses pods which are not "restricted", and warns of such
// templates.
func (k *kubernetes) namespace(name string) {
	k.Helper()
	k.sh("kubectl create namespace %s", name)
	k.sh("kubectl label namespace %s pod-security.kubernetes.io/enforce=restricted pod-security.kubernetes.io/warn=restricted", name)
}

// list returns the objects of a kind in a namespace.
func list[T any](k *kubernetes, namespace, kind string) []T {
	k.Helper()
	var all struct{ Items []T }
	if err := json.Unmarshal([]byte(k.sh("kubectl -n %s get %s -o json", namespace, kind)), &all); err != nil {
		k.Fatal(err)
	}
	return all.Items
}

// installs installs the chart with values before there is a machine for the pods: the API server admits
// each object, the controllers make pods, claims and the state of the budgets. Then it changes and
// removes the release.
func (k *kubernetes) installs(ns string, values map[string]any) {
	k.namespace(ns)
	text, err := yaml.Marshal(values)
	if err != nil {
		k.Fatal(err)
	}
	file := k.write(ns+".yaml", string(text))
	chart := fmt.Sprintf("%s %s -n %s -f %s", release, chartDir, ns, file)
	k.sh("kubectl apply --server-side -f - <<-END\n{apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, metadata: {name: high}, value: 1000}\nEND")
	// Unknown fields are errors, and so are warnings: of deprecated fields, or of pods that are not restricted.
	// A Helm that go install has built takes any Kubernetes for v1.20, unless it asks the server.
	k.sh("helm template --validate %s | kubectl -n %s apply --server-side --dry-run=server --validate=strict --warnings-as-errors -f -", chart, ns)
	k.sh("helm install %s", chart)
	k.controlled(ns)
	before := list[apps.StatefulSet](k, ns, "statefulset")

	k.sh("helm upgrade %s --set node.podAnnotations.trial=second", chart)
	k.controlled(ns)
	for i, s := range list[apps.StatefulSet](k, ns, "statefulset") {
		if changed := s.Status.UpdateRevision != before[i].Status.UpdateRevision; changed != strings.HasSuffix(s.Name, "-node") {
			k.Errorf("StatefulSet %s: an upgrade that changes the nodes' pods has changed its pods: %v", s.Name, changed)
		}
	}
	if err := k.try("helm upgrade %s --set node.volumes[0].name=other,node.volumes[0].size=2Ti", chart); err == nil || !strings.Contains(err.Error(), "updates to statefulset spec") {
		k.Errorf("an upgrade with other volumes: %v; want that Kubernetes refuses it", err)
	}
	k.sh("helm rollback %s 1 -n %s", release, ns)
	k.controlled(ns)

	claims := len(list[core.PersistentVolumeClaim](k, ns, "pvc"))
	k.sh("helm uninstall %s -n %s --wait --timeout 2m", release, ns)
	k.until("the pods of the release are gone", func() error {
		if pods := list[core.Pod](k, ns, "pod"); len(pods) > 0 {
			return fmt.Errorf("%d pods", len(pods))
		}
		return nil
	})
	if left := len(list[core.PersistentVolumeClaim](k, ns, "pvc")); left != claims {
		k.Errorf("%d claims remain of %d after the release has been removed", left, claims)
	}
	if left := k.sh("kubectl get clusterrole,clusterrolebinding,all,secret,configmap,networkpolicy,pdb,serviceaccount,servicemonitor,prometheusrule -n %s -l app.kubernetes.io/instance=%s -o name", ns, release); left != "" {
		k.Errorf("these objects remain after the release has been removed:\n%s", left)
	}
	k.sh("kubectl delete namespace %s --wait=false", ns)
}

// controlled waits until the controllers have seen the workloads and made their pods and claims.
func (k *kubernetes) controlled(ns string) {
	k.Helper()
	pods := make(map[string]int32)
	for _, s := range list[apps.StatefulSet](k, ns, "statefulset") {
		pods[s.Name] = *s.Spec.Replicas
		k.until("StatefulSet "+s.Name+" has its pods", func() error {
			return k.try("kubectl -n %s wait --timeout=1s --for=jsonpath='{.status.observedGeneration}'=%d statefulset/%s && kubectl -n %[1]s wait --timeout=1s --for=jsonpath='{.status.replicas}'=%[4]d statefulset/%[3]s",
				ns, s.Generation, s.Name, *s.Spec.Replicas)
		})
		for _, c := range s.Spec.VolumeClaimTemplates {
			for i := range *s.Spec.Replicas {
				k.sh("kubectl -n %s get pvc %s-%s-%d", ns, c.Name, s.Name, i)
			}
		}
	}
	for _, d := range list[apps.Deployment](k, ns, "deployment") {
		pods[d.Name] = *d.Spec.Replicas
		k.until("Deployment "+d.Name+" has its pods", func() error {
			return k.try("kubectl -n %s wait --timeout=1s --for=jsonpath='{.status.observedGeneration}'=%d deployment/%s && kubectl -n %[1]s wait --timeout=1s --for=jsonpath='{.status.updatedReplicas}'=%[4]d deployment/%[3]s",
				ns, d.Generation, d.Name, *d.Spec.Replicas)
		})
	}
	for _, b := range list[disruption.PodDisruptionBudget](k, ns, "pdb") {
		k.until("PodDisruptionBudget "+b.Name+" counts its pods", func() error {
			return k.try("kubectl -n %s wait --timeout=1s --for=jsonpath='{.status.expectedPods}'=%d pdb/%s", ns, pods[b.Name], b.Name)
		})
	}
}

// runs runs a cluster of nodes, a planner and gateways in pods, with volumes of the machine.
func (k *kubernetes) runs(values map[string]any) {
	const ns, name = "inference", "kv"
	k.namespace(ns)
	k.sh("kubectl label node %s topology.kubernetes.io/zone=pod-0 topology.kubernetes.io/rack=rack-0", machine)
	k.volumes()
	k.engines(ns)
	text, err := yaml.Marshal(values)
	if err != nil {
		k.Fatal(err)
	}
	chart := fmt.Sprintf("%s %s -n %s -f %s", name, chartDir, ns, k.write("runs.yaml", string(text)))
	k.Cleanup(func() {
		if k.Failed() {
			out, _ := exec.Command("sh", "-c", "kubectl -n "+ns+" get pods,pvc,pv -o wide; kubectl -n "+ns+" get events | tail -40; for p in $(kubectl -n "+ns+" get pods -o name); do echo $p; kubectl -n "+ns+" logs --tail 20 $p; done").CombinedOutput()
			k.Logf("%s", out)
		}
	})

	// The pods wait for the Secret, which the notes say how to make.
	k.sh("helm install %s", chart)
	notes := k.sh("helm get notes %s -n %s", name, ns)
	for _, command := range regexp.MustCompile(`(?m)^  ((?:openssl|kubectl .* create secret) .*)$`).FindAllStringSubmatch(notes, -1) {
		k.sh("cd %s && %s", *work, command[1])
	}
	k.sh("kubectl -n %s rollout status statefulset/%s-node --timeout=5m", ns, name)
	k.sh("kubectl -n %s rollout status deployment/%s-planner --timeout=5m", ns, name)
	status := regexp.MustCompile(`(?m)^  (kubectl .* /usr/bin/penstock status .*)$`).FindStringSubmatch(notes)
	if status == nil {
		k.Fatalf("the notes have no command for the state of a node:\n%s", notes)
	}
	if out := k.sh("%s", status[1]); !strings.Contains(out, "serving") {
		k.Errorf("the state of a node:\n%s", out)
	}

	// A client outside of the pods has the same names and the address of the Service.
	penstock := fmt.Sprintf("../../bin/image/usr/bin/penstock %%s --server %s.%s.svc.cluster.local:7420 --insecure --token-file %s/token", name, ns, *work)
	k.sh(penstock, "ns create m --layers 2 --block-tokens 4 --token-bytes 64")
	prompt, data := k.write("prompt", "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16"), k.write("blocks", strings.Repeat("0123456789abcdef", 4*2*4*64/16))
	k.sh(penstock, "block put m --discover --tokens-file "+prompt+" --data-file "+data)
	stored := func(when string) {
		k.Helper()
		back := filepath.Join(*work, "back")
		_ = os.Remove(back) // it is not there at first
		k.until("the blocks are there "+when, func() error {
			return k.try(penstock, "block get m --discover --tokens-file "+prompt+" --out "+back)
		})
		if got := mustRead(back); got != mustRead(data) {
			k.Errorf("%s: the blocks have other bytes", when)
		}
	}
	stored("after they have been stored")

	// Gateways start again until the namespace m exists.
	k.sh("kubectl -n %s rollout status deployment/%s-gateway --timeout=6m", ns, name)
	if log := k.sh("kubectl -n %s logs deployment/%s-gateway", ns, name); strings.Contains(log, "fixed list of nodes") {
		k.Errorf("the gateway does not discover the members of the cluster:\n%s", log)
	}
	proxy := "kubectl get --raw /api/v1/namespaces/" + ns + "/%s/proxy%s"
	for target, want := range map[string]string{
		"pods/" + name + "-node-0:7422":                "penstock_arena_size_bytes",
		"services/http:" + name + "-planner:http":      "penstock_planner_",
		"services/http:" + name + "-gateway-http:http": "penstock_gateway_requests_total",
	} {
		if out := k.sh(proxy, target, "/metrics"); !strings.Contains(out, want) {
			k.Errorf("the metrics of %s have no %s:\n%.2000s", target, want, out)
		}
	}

	// The planner reads the labels of the machines with its service account.
	k.until("the planner has read the machines", func() error {
		out := k.sh(proxy, "services/http:"+name+"-planner:http", "/metrics")
		if !regexp.MustCompile(`(?m)^penstock_network_source_up\{source="kubernetes"\} 1$`).MatchString(out) {
			return fmt.Errorf("its metrics are\n%s", out)
		}
		return nil
	})

	k.sub("a pod is deleted", func(k *kubernetes) {
		uid := k.sh("kubectl -n %s get pod %s-node-0 -o jsonpath='{.metadata.uid}'", ns, name)
		var log bytes.Buffer
		follow := exec.CommandContext(k.Context(), "kubectl", "-n", ns, "logs", "-f", "--tail=0", name+"-node-0")
		follow.Stdout, follow.Stderr = &log, &log
		if err := follow.Start(); err != nil {
			k.Fatal(err)
		}
		k.sh("kubectl -n %s delete pod %s-node-0 --timeout=3m", ns, name)
		_ = follow.Wait() // the log ends with the container, and a connection that is cut is no error here
		if !strings.Contains(log.String(), "drain") {
			k.Errorf("the pod has not drained; its last lines are\n%s", log.String())
		}
		k.sh("kubectl -n %s rollout status statefulset/%s-node --timeout=5m", ns, name)
		if now := k.sh("kubectl -n %s get pod %s-node-0 -o jsonpath='{.metadata.uid}'", ns, name); now == uid {
			k.Error("the pod has not been replaced")
		}
		stored("after a pod has been deleted")
	})

	k.sub("an eviction takes one node", func(k *kubernetes) {
		uid := func(i int) string {
			return k.sh("kubectl -n %s get pod %s-node-%d -o jsonpath='{.metadata.uid}' --ignore-not-found", ns, name, i)
		}
		replaced := func(i int, before string) {
			k.Helper()
			k.until("the evicted pod has been replaced", func() error {
				if now := uid(i); now == before || now == "" {
					return fmt.Errorf("the pod is %q", now)
				}
				return nil
			})
			k.sh("kubectl -n %s rollout status statefulset/%s-node --timeout=5m", ns, name)
		}
		first, second := uid(0), uid(1)
		evict := func(i int) error {
			return k.try(`kubectl create --raw /api/v1/namespaces/%s/pods/%s-node-%d/eviction -f - <<-END
				{"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "%[2]s-node-%[3]d", "namespace": "%[1]s"}}
			END`, ns, name, i)
		}
		if err := evict(0); err != nil {
			k.Fatal(err)
		}
		if err := evict(1); err == nil || !strings.Contains(err.Error(), "disruption budget") {
			k.Errorf("the eviction of a second node: %v; want that the budget refuses it", err)
		}
		replaced(0, first)
		k.until("the budget allows an eviction again", func() error { return evict(1) })
		replaced(1, second)
		stored("after evictions")
	})

	k.sub("an upgrade replaces one node after another", func(k *kubernetes) {
		var counts bytes.Buffer
		ready := exec.CommandContext(k.Context(), "kubectl", "-n", ns, "get", "statefulset", name+"-node", "--watch", "-o", `jsonpath={.status.readyReplicas}{"\n"}`)
		ready.Stdout = &counts
		if err := ready.Start(); err != nil {
			k.Fatal(err)
		}
		before := k.sh("kubectl -n %s get statefulset %s-node -o jsonpath='{.status.currentRevision}'", ns, name)
		k.sh("helm upgrade %s --set node.config.drain_timeout=20s", chart)
		k.sh("kubectl -n %s rollout status statefulset/%s-node --timeout=8m", ns, name)
		_ = ready.Process.Kill() // it may have ended
		_ = ready.Wait()         // by the signal
		for _, n := range strings.Fields(counts.String()) {
			if n < "2" {
				k.Errorf("of three nodes %s were ready during the upgrade", n)
			}
		}
		if after := k.sh("kubectl -n %s get statefulset %s-node -o jsonpath='{.status.currentRevision}'", ns, name); after == before {
			k.Error("the upgrade has changed no pod")
		}
		stored("after an upgrade")
	})

	k.sub("the release is removed and installed again", func(k *kubernetes) {
		k.sh("helm uninstall %s -n %s --wait --timeout 5m", name, ns)
		k.sh("helm install %s", chart)
		k.sh("kubectl -n %s rollout status statefulset/%s-node --timeout=5m", ns, name)
		k.sh("kubectl -n %s rollout status deployment/%s-planner --timeout=5m", ns, name)
		k.sh("kubectl -n %s rollout status deployment/%s-gateway --timeout=5m", ns, name)
		stored("with the claims of the release before")
	})
	k.sh("helm uninstall %s -n %s --wait --timeout 5m", name, ns)
	k.until("all pods have ended", func() error { return k.try("! kubectl -n %s get pods -o name | grep %s-", ns, name) })
}

// volumes makes the default class of storage, and a volume in a directory of the machine for each node.
func (k *kubernetes) volumes() {
	k.Helper()
	objects := `
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: local, annotations: {storageclass.kubernetes.io/is-default-class: "true"}}
provisioner: kubernetes.io/no-provisioner
volumeBindingMode: WaitForFirstConsumer
`
	for i := range 3 {
		dir := fmt.Sprintf("%s/volumes/%d", *work, i)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			k.Fatal(err)
		}
		objects += fmt.Sprintf(`---
apiVersion: v1
kind: PersistentVolume
metadata: {name: local-%d}
spec:
  capacity: {storage: 1Gi}
  accessModes: [ReadWriteOnce]
  storageClassName: local
  local: {path: %s}
  nodeAffinity: {required: {nodeSelectorTerms: [{matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [%s]}]}]}}
`, i, dir, machine)
	}
	k.sh("kubectl apply --server-side --validate=strict -f %s", k.write("volumes.yaml", objects))
}

// engines makes HTTP servers in the place of the inference engines: a gateway is ready when one answers
// GET /health.
func (k *kubernetes) engines(ns string) {
	k.Helper()
	k.sh("kubectl -n %s apply --server-side --validate=strict --warnings-as-errors -f %s", ns, k.write("engines.yaml", `
apiVersion: v1
kind: ConfigMap
metadata: {name: engine}
data: {health: ok}
---
apiVersion: v1
kind: Service
metadata: {name: engine}
spec: {selector: {app: engine}, ports: [{name: p, port: 8000, targetPort: 8000}, {name: d, port: 8001, targetPort: 8000}]}
---
apiVersion: v1
kind: Pod
metadata: {name: engine, labels: {app: engine}}
spec:
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: 1
  securityContext: {runAsNonRoot: true, runAsUser: 65532, seccompProfile: {type: RuntimeDefault}}
  containers:
    - name: engine
      image: penstock.test/busybox:1
      args: [httpd, -f, -p, "8000", -h, /www]
      securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
      volumeMounts: [{name: www, mountPath: /www}]
  volumes: [{name: www, configMap: {name: engine}}]
`))
}
