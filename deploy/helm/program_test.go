package helm

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// program is the path of penstock.
type program string

var builder struct {
	once sync.Once
	dir  string
	out  []byte
	err  error
}

func TestMain(m *testing.M) {
	code := m.Run()
	if builder.dir != "" {
		_ = os.RemoveAll(builder.dir)
	}
	os.Exit(code)
}

// build builds penstock once for all tests.
func build(t *testing.T) program {
	t.Helper()
	builder.once.Do(func() {
		if builder.dir, builder.err = os.MkdirTemp("", "penstock-chart-"); builder.err == nil {
			builder.out, builder.err = exec.Command("go", "-C", "../..", "build", "-o", filepath.Join(builder.dir, "penstock"), "./cmd/penstock").CombinedOutput()
		}
	})
	if builder.err != nil {
		t.Fatalf("build: %v\n%s", builder.err, builder.out)
	}
	return program(filepath.Join(builder.dir, "penstock"))
}

func mustRead(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		panic(err)
	}
	return string(text)
}

// command returns the command of the containers of a workload, with the files of the pods below dir
// instead of /.
func (p program) command(t *testing.T, objects []runtime.Object, w workload, dir string, more ...string) *exec.Cmd {
	t.Helper()
	v := &verifier{objects: objects}
	move := strings.NewReplacer("/etc/penstock", dir+"/etc/penstock", "/var/lib/penstock", dir+"/var/lib/penstock")
	for file, text := range v.mounted(&w.pod, w) {
		file = move.Replace(file)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if text == "" {
			text = "a-token-of-the-test\n"
		}
		if err := os.WriteFile(file, []byte(move.Replace(text)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var args []string
	for _, a := range w.container().Args {
		args = append(args, move.Replace(a))
	}
	cmd := exec.CommandContext(t.Context(), string(p), append(args, more...)...)
	cmd.Env = []string{"PATH=/usr/bin", "KUBERNETES_SERVICE_HOST=10.0.0.1", "PENSTOCK_NODE_SERVICE_HOST=10.0.0.2", "PENSTOCK_NODE_PORT=tcp://10.0.0.2:7420"}
	for name, value := range environ(w) {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	return cmd
}

// check returns the errors that the program reports about the command lines and the settings.
func (p program) check(t *testing.T, objects []runtime.Object) (problems []string) {
	t.Helper()
	for _, w := range workloads(objects) {
		if out, err := p.command(t, objects, w, t.TempDir(), "--check").CombinedOutput(); err != nil {
			problems = append(problems, fmt.Sprintf("%s: %v\n%s", w.name, err, out))
		} else if string(out) != "the settings are valid\n" {
			problems = append(problems, fmt.Sprintf("%s prints %q", w.name, out))
		}
	}
	return problems
}

// checkCommands fails the test if a penstock command in the text does not exist or has a wrong flag.
func (p program) checkCommands(t *testing.T, text string) {
	t.Helper()
	for _, m := range regexp.MustCompile(`-- /usr/bin/penstock (.*)`).FindAllStringSubmatch(text, -1) {
		// The flags are parsed before --help is looked at.
		if out, err := exec.Command(string(p), append(strings.Fields(m[1]), "--help")...).CombinedOutput(); err != nil {
			t.Errorf("penstock %s: %v\n%s", m[1], err, out)
		}
	}
}

// TestProbes: the processes of the chart start with their settings, and answer the requests of their
// probes on the port of the settings' http. The addresses are on loopback, and the volume is small.
func TestProbes(t *testing.T) {
	p := build(t)
	common := []string{"--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"}
	for _, c := range []struct {
		component, values string
		more              []string
		ready             int
	}{
		{"node", "defaults", []string{"--data-listen", "127.0.0.1:0", "--advertise", "", "--capacity", "64MiB", "--arena", "32MiB", "--free-floor", "1MiB"}, http.StatusOK},
		{"planner", "testdata/dualpath.yaml", nil, http.StatusOK},
		{"gateway", "testdata/open.yaml", nil, http.StatusServiceUnavailable}, // no engine answers
	} {
		t.Run(c.component, func(t *testing.T) {
			objects, _ := decode(must(t, values(t)[c.values]).manifests)
			all := workloads(objects)
			i := slices.IndexFunc(all, func(w workload) bool { return w.container().Name == c.component })
			if i < 0 {
				t.Fatalf("%s has no %s", c.values, c.component)
			}
			address, stop := start(t, p.command(t, objects, all[i], t.TempDir(), append(common, c.more...)...))
			defer stop()
			status := func(probe *core.Probe) int {
				r, err := http.Get("http://" + address + probe.HTTPGet.Path)
				if err != nil {
					t.Fatal(err)
				}
				_ = r.Body.Close()
				return r.StatusCode
			}
			container := all[i].container()
			if container.StartupProbe != nil && status(container.StartupProbe) != http.StatusOK {
				t.Errorf("%s fails", container.StartupProbe.HTTPGet.Path)
			}
			if status(container.LivenessProbe) != http.StatusOK {
				t.Errorf("%s fails", container.LivenessProbe.HTTPGet.Path)
			}
			if got := status(container.ReadinessProbe); got != c.ready {
				t.Errorf("%s has the status %d; want %d", container.ReadinessProbe.HTTPGet.Path, got, c.ready)
			}
		})
	}
}

// start starts a process and returns its HTTP address. stop sends it SIGTERM, and waits for its end.
func start(t *testing.T, cmd *exec.Cmd) (address string, stop func()) {
	t.Helper()
	log, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var ready struct{ Msg, HTTP string }
	var all strings.Builder
	lines := bufio.NewScanner(log)
	for ready.Msg != "ready" && lines.Scan() {
		all.WriteString(lines.Text() + "\n")
		if err := json.Unmarshal(lines.Bytes(), &ready); err != nil {
			t.Errorf("the log is not JSON: %s", lines.Text())
		}
	}
	if ready.Msg != "ready" {
		t.Fatalf("%v\n%s", cmd.Wait(), all.String())
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = io.Copy(io.Discard, log)
	}()
	return ready.HTTP, func() {
		t.Helper()
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		<-ended
		if err := cmd.Wait(); err != nil {
			t.Errorf("SIGTERM: %v", err)
		}
	}
}
