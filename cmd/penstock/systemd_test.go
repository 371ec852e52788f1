package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/cluster"
)

// booted is a machine on which systemd runs as the first process, in namespaces of its own except
// for the network's.
type booted struct {
	t       *testing.T
	systemd int // its process id on this machine
}

// bootScript makes the mounts of a machine, with fresh /dev, /proc, /run and control groups, and
// starts systemd. Its arguments are the root and the unit.
const bootScript = `
root=$1 unit=$2
mounts=$(awk '$3 == "cgroup" || $3 == "cgroup2" && $2 == "/sys/fs/cgroup" {print $3, $2, $4}' /proc/mounts)
mount --make-rprivate /
mount --bind $root $root
mount -t proc proc $root/proc
mount -t sysfs -o ro sysfs $root/sys
mount -t tmpfs -o mode=755 tmpfs $root/run
mount -t tmpfs -o mode=755 tmpfs $root/dev
for node in null zero random urandom full tty; do
	touch $root/dev/$node
	mount --bind /dev/$node $root/dev/$node
done
mkdir $root/dev/pts $root/dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts $root/dev/pts
ln -s pts/ptmx $root/dev/ptmx
case "$mounts" in cgroup2*) ;; *) mount -t tmpfs tmpfs $root/sys/fs/cgroup ;; esac
echo "$mounts" | while read -r kind at options; do
	mkdir -p $root$at
	case $kind in
	cgroup2) mount -t cgroup2 cgroup2 $root$at ;;
	*) mount -t cgroup -o $(echo $options | sed 's/^rw,//; s/\(nosuid\|nodev\|noexec\|relatime\|xattr\|clone_children\|release_agent=[^,]*\),//g; s/^name=/none,name=/') cgroup $root$at ;;
	esac
done
mkdir $root/old
cd $root
pivot_root . old
umount -l old
exec env -i container=test PATH=/usr/sbin:/usr/bin /usr/lib/systemd/systemd --unit=$unit --log-target=null </dev/null
`

// boot starts systemd with a unit, until the test ends.
func (m *machine) boot(unit string) *booted {
	m.t.Helper()
	group := "penstock-" + filepath.Base(filepath.Dir(m.root)) + fmt.Sprint(os.Getpid())
	table, err := os.ReadFile("/proc/mounts")
	if err != nil {
		m.t.Fatal(err)
	}
	// A group of its own in each hierarchy, whose namespace makes it the root.
	join := ""
	for line := range strings.Lines(string(table)) {
		fields := strings.Fields(line)
		if !strings.HasPrefix(fields[2], "cgroup") {
			continue
		}
		dir := filepath.Join(fields[1], group)
		if err := os.Mkdir(dir, 0o755); err != nil {
			if os.Getenv("CI") == "true" {
				m.t.Fatalf("continuous integration must have a writable control group file system: %v", err)
			}
			m.t.Skipf("needs a writable control group file system: %v", err)
		}
		m.t.Cleanup(func() { removeGroup(m.t, dir) })
		if strings.Contains(fields[3], "cpuset") {
			// A new group of this hierarchy takes no process before it has CPUs and memory.
			for _, name := range []string{"cpuset.cpus", "cpuset.mems"} {
				value := readAll(m.t, filepath.Join(fields[1], name))
				if err := os.WriteFile(filepath.Join(dir, name), value, 0o644); err != nil {
					m.t.Fatal(err)
				}
			}
		}
		join += "echo $$ > " + dir + "/cgroup.procs\n"
	}
	cmd := exec.Command("sh", "-e", "-c", join+`exec unshare -m -p -f -C -u -i --kill-child sh -e -c "$1" sh "$2" "$3"`, "sh", bootScript, m.root, unit)
	var log strings.Builder
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		m.t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	m.t.Cleanup(func() {
		_ = cmd.Process.Kill() // its child, systemd, ends with it
		<-ended
	})
	b := &booted{t: m.t}
	within(m.t, "systemd answers", func() bool {
		select {
		case err := <-ended:
			ended <- err
			m.t.Fatalf("systemd has ended: %v\n%s", err, log.String())
		default:
		}
		text, err := os.ReadFile(fmt.Sprintf("/proc/%[1]d/task/%[1]d/children", cmd.Process.Pid))
		if err != nil || len(text) == 0 {
			return false
		}
		b.systemd = number(m.t, string(text))
		_, err = b.run("systemctl", "show", "--property=Version")
		return err == nil
	})
	return b
}

// removeGroup removes a control group whose processes end.
func removeGroup(t *testing.T, dir string) {
	within(t, "the control group "+dir+" is empty", func() bool {
		var groups []string
		_ = filepath.WalkDir(dir, func(path string, entry os.DirEntry, err error) error {
			if err == nil && entry.IsDir() {
				groups = append(groups, path)
			}
			return nil // a group may vanish meanwhile
		})
		for i := len(groups) - 1; i >= 0; i-- {
			_ = os.Remove(groups[i]) // fails while a process is in the group
		}
		_, err := os.Stat(dir)
		return errors.Is(err, os.ErrNotExist)
	})
}

// run runs a command on the machine.
func (b *booted) run(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(b.t.Context(), 2*time.Minute) // only a command that hangs reaches the limit
	defer cancel()
	cmd := exec.CommandContext(ctx, "nsenter", append([]string{"-t", fmt.Sprint(b.systemd), "-m", "-p", "-C", "-u", "-i", "-r", "--wd=/"}, args...)...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// systemctl runs systemctl, which must succeed.
func (b *booted) systemctl(args ...string) string {
	b.t.Helper()
	out, err := b.run(append([]string{"systemctl"}, args...)...)
	if err != nil {
		status, _ := b.run("systemctl", "status", "--no-pager", "penstock", "penstock-planner", "penstock-gateway")
		b.t.Fatalf("systemctl %s: %v\n%s%s", strings.Join(args, " "), err, out, status)
	}
	return strings.TrimSpace(out)
}

// property returns a property of a unit.
func (b *booted) property(unit, name string) string {
	b.t.Helper()
	return b.systemctl("show", "--value", "--property="+name, unit)
}

// testUnderSystemd installs the package, boots systemd, and starts, reloads, restarts and stops the
// services. The package's removal stops services too. The node stores and returns blocks under its
// unit's restrictions.
func testUnderSystemd(t *testing.T, made packages, commands string) {
	testkit.Program(t, "systemctl", "systemd")
	m := copyOfThisMachine(t)
	m.installDeb(made, commands)
	if out := m.sh("penstock version"); !strings.Contains(out, " v"+testVersion+"\n") {
		t.Errorf("penstock version prints\n%s", out)
	}
	// Only Penstock's services run, and not those of this machine.
	for _, target := range []string{"sysinit", "basic", "local-fs", "network-online", "shutdown", "multi-user"} {
		m.put("etc/systemd/system/"+target+".target", "[Unit]\n", 0o644)
	}
	m.put("etc/systemd/system/test.target", "[Unit]\nDefaultDependencies=no\n", 0o644)
	ports := map[string]string{}
	for _, s := range services() {
		// The settings of small, and addresses that the test has chosen.
		ports[s.command] = testkit.Port(t)
		environ := append(smallEnv(s.command), "PENSTOCK_LISTEN="+ports[s.command])
		m.put("etc/systemd/system/"+s.unit+".d/test.conf", "[Service]\nEnvironment="+strings.Join(environ, " ")+"\nStandardError=file:/var/log/"+s.unit+"\n", 0o644)
	}
	b := m.boot("test.target")
	for _, s := range services() {
		b.systemctl("start", s.unit) // returns when the process has sent READY
		if got := b.property(s.unit, "ActiveState"); got != "active" {
			t.Errorf("%s is %s after its start", s.unit, got)
		}
	}
	node := &cluster.Process{Ready: cluster.Ready{Listen: ports["serve"]}}
	stores(t, node)

	refused := map[string]string{
		"serve":   "data: [/var/lib/penstock/volume]\nlimits:\n  event_history: 77\n",
		"planner": "schedule:\n  max_queue: 77\n",
		"gateway": "engine: [\"http://127.0.0.1:8000\"]\nmax_queue: 77\n",
	}
	status := func(unit, want string) {
		t.Helper()
		within(t, unit+" has the status "+want, func() bool {
			return strings.HasPrefix(b.property(unit, "StatusText"), want) && b.property(unit, "ActiveState") == "active"
		})
	}
	for _, s := range services() {
		b.systemctl("reload", s.unit)
		status(s.unit, "the configuration was reloaded")
		m.put("etc/penstock/"+s.file, refused[s.command], 0o644)
		b.systemctl("reload", s.unit)
		status(s.unit, "the configuration was not reloaded: ")
	}

	before := b.property("penstock.service", "MainPID")
	b.systemctl("restart", "penstock.service")
	if after := b.property("penstock.service", "MainPID"); after == before {
		t.Error("a restart did not start another process")
	}
	out := penstock(t, "", nil, "ns", "list", "--server", ports["serve"], "--format", "json").must(t)
	if !strings.Contains(out, `"m"`) {
		t.Errorf("after a restart the node does not have its namespace: %s", out)
	}
	ended := func(unit string) {
		t.Helper()
		if got := b.property(unit, "ActiveState") + " " + b.property(unit, "Result"); got != "inactive success" {
			t.Errorf("%s has ended and is %s", unit, got)
		}
	}
	b.systemctl("stop", "penstock-gateway.service")
	ended("penstock-gateway.service")
	// The removal of the package stops the others.
	if out, err := b.run("apt-get", "remove", "-qy", "penstock"); err != nil {
		t.Fatalf("apt-get remove: %v\n%s", err, out)
	}
	ended("penstock-planner.service")
	ended("penstock.service")
	if _, err := os.Stat(m.root + "/var/lib/penstock/volume"); err != nil {
		t.Error(err)
	}
}
