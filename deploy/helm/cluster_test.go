package helm

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

var (
	programs = flag.String("kubernetes", "", "directory with the programs of Kubernetes, as .ci/test-kubernetes builds them; without it TestKubernetes is skipped")
	work     = flag.String("kubernetes.work", "", "directory for the files of the cluster, as .ci/test-kubernetes prepares it")
)

// hostIP is the address of the machine, on an interface that has no other end. The API server,
// etcd and the DNS server are there.
const hostIP = "192.168.77.1"

// kubernetes is a Kubernetes of one machine: each program is a process in the network, mount and PID
// namespace that .ci/test-kubernetes has made. The processes end with the PID namespace.
type kubernetes struct {
	*testing.T
	exited chan error
}

// cluster starts etcd, the API server and the controllers. There is no machine for pods yet.
func cluster(t *testing.T) *kubernetes {
	t.Helper()
	switch {
	case *programs == "" && *work != "":
		t.Fatal("-kubernetes names no directory: .ci/test-kubernetes has built no programs of Kubernetes")
	case *programs == "":
		t.Skip("-kubernetes names no programs of Kubernetes: make test-kubernetes builds them, and runs this test as root in namespaces of its own")
	}
	k := &kubernetes{t, make(chan error, 16)}
	t.Setenv("PATH", *programs+":/usr/sbin:/usr/bin:/sbin:/bin")
	t.Setenv("KUBECONFIG", k.config("admin"))
	t.Setenv("HOME", *work)
	k.sh(`ip link set lo up
		ip link add host0 type bridge; ip addr add %s/24 dev host0; ip link set host0 up; ip route add default dev host0
		echo 1 >/proc/sys/net/ipv4/ip_forward
		openssl genrsa -out %s/service.key 2048`, hostIP, *work)
	var tokens strings.Builder
	for _, u := range []struct{ name, groups string }{
		{"admin", "system:masters"}, {"system:kube-controller-manager", ""}, {"system:kube-scheduler", ""}, {"system:kube-proxy", ""},
		{"system:node:" + machine, "system:nodes"},
	} {
		fmt.Fprintf(&tokens, "%s,%s,%s,%q\n", tokenOf(u.name), u.name, u.name, u.groups)
	}
	k.write("tokens.csv", tokens.String())
	k.program("etcd", "--data-dir=/run/etcd", "--listen-client-urls=http://"+hostIP+":2379", "--advertise-client-urls=http://"+hostIP+":2379")
	k.program("kube-apiserver", "--etcd-servers=http://"+hostIP+":2379", "--bind-address="+hostIP, "--advertise-address="+hostIP, "--cert-dir="+*work+"/api",
		"--service-cluster-ip-range=10.96.0.0/16", "--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+*work+"/service.key",
		"--service-account-signing-key-file="+*work+"/service.key", "--token-auth-file="+*work+"/tokens.csv", "--authorization-mode=Node,RBAC",
		"--kubelet-preferred-address-types=InternalIP", "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true")
	k.until("the API server is ready", func() error { return k.try("kubectl get --raw /readyz") })
	k.program("kube-controller-manager", "--kubeconfig="+k.config("system:kube-controller-manager"), "--service-account-private-key-file="+*work+"/service.key",
		"--root-ca-file="+*work+"/api/apiserver.crt", "--use-service-account-credentials", "--leader-elect=false", "--flex-volume-plugin-dir="+*work+"/plugins")
	for _, crd := range []string{"servicemonitors", "prometheusrules"} {
		k.sh("kubectl apply --server-side -f %s/%s.yaml", *programs, crd)
		k.sh("kubectl wait --for=condition=Established --timeout=60s crd/%s.monitoring.coreos.com", crd)
	}
	k.until("the controllers have made the account of pods", func() error { return k.try("kubectl get serviceaccount default") })
	return k
}

// machine is the name of the node of Kubernetes.
const machine = "machine-0"

// addMachine starts what runs pods: the scheduler, DNS, containerd, kubelet and kube-proxy.
func (k *kubernetes) addMachine() {
	k.Helper()
	k.write("Corefile", ".:53 {\n errors\n kubernetes cluster.local {\n  kubeconfig "+k.config("admin")+"\n }\n}\n")
	k.write("resolv.conf", "nameserver "+hostIP+"\nsearch svc.cluster.local\n")
	k.sh("mount --bind %s/resolv.conf /etc/resolv.conf", *work)
	k.write("containerd.toml", fmt.Sprintf(`version = 2
root = "%[1]s/containerd"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "penstock.test/busybox:1"
# A machine may lack the capability to lower it.
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "%[1]s/cni"
`, *work))
	k.write("cni/10-pods.conflist", fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "ptp", "ipMasq": false,
		"ipam": {"type": "host-local", "dataDir": "%s/addresses", "ranges": [[{"subnet": "10.244.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}`, *work))
	k.write("kubelet.yaml", fmt.Sprintf(`
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: cgroupfs
cgroupRoot: /%s
enforceNodeAllocatable: [none]
protectKernelDefaults: true
failSwapOn: false
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
clusterDNS: [%s]
clusterDomain: cluster.local
resolvConf: %s/resolv.conf
volumePluginDir: %[3]s/plugins
# The disk is the developer's, and its fill is no concern of the test.
evictionHard: {memory.available: 1Mi, nodefs.available: 0%%, imagefs.available: 0%%, nodefs.inodesFree: 0%%}
imageGCHighThresholdPercent: 100
`, os.Getenv("group"), hostIP, *work))
	k.write("proxy.yaml", fmt.Sprintf(`
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: iptables
hostnameOverride: %s
clusterCIDR: 10.244.0.0/16
clientConnection: {kubeconfig: %s}
# This setting of the kernel is the machine's.
conntrack: {maxPerCore: 0, min: 0}
`, machine, k.config("system:kube-proxy")))
	k.program("containerd", "--config="+*work+"/containerd.toml")
	k.until("containerd answers", func() error { return k.try("ctr version") })
	for _, image := range []string{"busybox", "penstock"} {
		k.sh("ctr -n k8s.io images import %s/%s.tar", *work, image)
	}
	k.program("coredns", "-conf="+*work+"/Corefile")
	k.program("kube-scheduler", "--kubeconfig="+k.config("system:kube-scheduler"), "--leader-elect=false")
	k.program("kube-proxy", "--config="+*work+"/proxy.yaml")
	k.program("kubelet", "--config="+*work+"/kubelet.yaml", "--kubeconfig="+k.config("system:node:"+machine), "--root-dir="+*work+"/kubelet",
		"--cert-dir="+*work+"/kubelet/pki", "--hostname-override="+machine, "--node-ip="+hostIP)
	k.until("the machine has registered", func() error { return k.try("kubectl get node " + machine) })
	k.sh("kubectl wait --for=condition=Ready --timeout=120s node/%s", machine)
}

// sub runs a subtest.
func (k *kubernetes) sub(name string, f func(k *kubernetes)) {
	k.Helper()
	k.Run(name, func(t *testing.T) { f(&kubernetes{t, k.exited}) })
}

// tokenOf returns the bearer token of a user of the API server.
func tokenOf(user string) string { return strings.ReplaceAll(user, ":", "-") + "-token" }

// config returns a file with address and token of a user. The API server's certificate, which it
// makes when it starts, is its own CA.
func (k *kubernetes) config(user string) string {
	k.Helper()
	return k.write(tokenOf(user)+".yaml", fmt.Sprintf(`
apiVersion: v1
kind: Config
clusters: [{name: test, cluster: {server: "https://%s:6443", certificate-authority: %s/api/apiserver.crt}}]
users: [{name: user, user: {token: %s}}]
contexts: [{name: test, context: {cluster: test, user: user}}]
current-context: test
`, hostIP, *work, tokenOf(user)))
}

// write writes a file of the cluster and returns its path.
func (k *kubernetes) write(name, text string) string {
	k.Helper()
	path := filepath.Join(*work, name)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o600)); err != nil {
		k.Fatal(err)
	}
	return path
}

// program starts a program, which runs until the PID namespace ends. Its log is in the work directory.
// A failed test prints the end of each log.
func (k *kubernetes) program(name string, args ...string) {
	k.Helper()
	log, err := os.Create(filepath.Join(*work, name+".log"))
	if err != nil {
		k.Fatal(err)
	}
	cmd := exec.Command(name, args...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		k.Fatal(err)
	}
	go func() { k.exited <- fmt.Errorf("%s ended: %w", name, cmd.Wait()) }()
	k.Cleanup(func() {
		if k.Failed() {
			text, _ := os.ReadFile(log.Name()) // without a log there is nothing to show
			k.Logf("the end of the log of %s:\n%s", name, text[max(0, len(text)-4000):])
		}
	})
}

// until waits until check returns nil.
func (k *kubernetes) until(state string, check func() error) {
	k.Helper()
	deadline := time.After(3 * time.Minute)
	for {
		err := check()
		if err == nil {
			return
		}
		select {
		case err := <-k.exited:
			k.Fatal(err)
		case <-deadline:
			k.Fatalf("three minutes have passed, and not yet: %s: %v", state, err)
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// try runs a shell command. The error has what the command printed.
func (k *kubernetes) try(format string, args ...any) error {
	_, err := k.output(format, args...)
	return err
}

// sh is try for a command that must succeed, and returns its standard output without the last line end.
func (k *kubernetes) sh(format string, args ...any) string {
	k.Helper()
	out, err := k.output(format, args...)
	if err != nil {
		k.Fatal(err)
	}
	return out
}

func (k *kubernetes) output(format string, args ...any) (string, error) {
	script := fmt.Sprintf(format, args...)
	cmd := exec.CommandContext(k.Context(), "sh", "-ec", script)
	var out, log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &log
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s: %w\n%s%s", script, err, out.Bytes(), log.Bytes())
	}
	return strings.TrimSuffix(out.String(), "\n"), nil
}
