package topo

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma/topo/topotest"
)

// TestTranscripts runs testdata/*.td.
//
//	host [FILE]     a host: the description in testdata, then the input's lines
//	addrs           lines of: interface address…; before the first, they are not known
//	roles           lines of: NIC role, as configuration has them
//	list            the table
//	choose [gpu=] [role=] [rdma] [nic=] [kind=]
//	facts           lines of what a live host adds; see factsOf
//	check
func TestTranscripts(t *testing.T) {
	testkit.Long(t, "reads many copies of /sys")
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		if !strings.HasSuffix(path, ".td") {
			return
		}
		w := &world{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string { return w.command(t, d) })
	})
}

// world is the host of a transcript.
type world struct {
	options Options
	facts   Facts
}

func (w *world) command(t *testing.T, d *datadriven.TestData) string {
	switch d.Cmd {
	case "host":
		*w = world{options: Options{Sysfs: os.DirFS(hostTree(t, d))}}
	case "addrs":
		w.options.Addrs = addrsOf(t, d.Input)
	case "roles":
		w.options.Roles = rolesOf(t, d.Input)
	case "facts":
		w.facts = factsOf(t, d.Input)
	case "list":
		return Read(w.options).String()
	case "choose":
		return w.choose(d)
	case "check":
		h := Read(w.options)
		return Report(Check(h, w.facts))
	default:
		d.Fatalf(t, "unknown command")
	}
	return ""
}

// hostTree writes the tree of a description and returns its root.
func hostTree(t testing.TB, d *datadriven.TestData) string {
	text := d.Input
	for _, a := range d.CmdArgs {
		raw, err := os.ReadFile(filepath.Join("testdata", a.Key))
		if err != nil {
			t.Fatal(err)
		}
		text = string(raw) + "\n" + text
	}
	dir := t.TempDir()
	if err := topotest.Write(dir, text); err != nil {
		t.Fatal(err)
	}
	return dir
}

func (w *world) choose(d *datadriven.TestData) string {
	var want Want
	for _, a := range d.CmdArgs {
		switch a.Key {
		case "gpu":
			want.GPU = a.Vals[0]
		case "role":
			want.Role = Role(a.Vals[0])
		case "nic":
			want.NICs = a.Vals
		case "rdma":
			want.RDMA = true
		case "kind":
			for _, k := range a.Vals {
				want.Kinds = append(want.Kinds, Kind(k))
			}
		}
	}
	h := Read(w.options)
	nics, err := h.Choose(want)
	if err != nil {
		if none := (*NoNICError)(nil); !errors.As(err, &none) {
			return "not a NoNICError: " + err.Error()
		}
		return err.Error()
	}
	names := make([]string, len(nics))
	for i, n := range nics {
		names[i] = n.Name
	}
	return strings.Join(names, " ") + "\n"
}

// fields cuts lines into words.
func fields(text string) (out [][]string) {
	for line := range strings.Lines(text) {
		if words := strings.Fields(line); len(words) > 0 {
			out = append(out, words)
		}
	}
	return out
}

func addrsOf(t testing.TB, text string) func(string) []netip.Prefix {
	m := make(map[string][]netip.Prefix)
	for _, words := range fields(text) {
		for _, a := range words[1:] {
			p, err := netip.ParsePrefix(a)
			if err != nil {
				t.Fatal(err)
			}
			m[words[0]] = append(m[words[0]], p)
		}
	}
	return func(name string) []netip.Prefix { return m[name] }
}

func rolesOf(t testing.TB, text string) map[string]Role {
	m := make(map[string]Role)
	for _, words := range fields(text) {
		r, err := ParseRole(words[1])
		if err != nil {
			t.Fatal(err)
		}
		m[words[0]] = r
	}
	return m
}

// readHost reads the host of a description with additional lines.
func readHost(t testing.TB, file, more string) Host {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("testdata", file))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := topotest.Write(dir, string(raw)+"\n"+more); err != nil {
		t.Fatal(err)
	}
	return Read(Options{Sysfs: os.DirFS(dir)})
}

// TestPairsOfDGX: the pairs are those of NVIDIA's DGX H100 user guide, Table 6.
func TestPairsOfDGX(t *testing.T) {
	h := readHost(t, "dgx-h100.host", "")
	want := []string{"mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"}
	if len(h.GPUs) != len(want) {
		t.Fatalf("%d GPUs, want %d", len(h.GPUs), len(want))
	}
	for i, g := range h.GPUs {
		if len(g.Pairs) != 1 || g.Pairs[0].NIC != want[i] || g.Pairs[0].Distance != ViaSwitch {
			t.Errorf("%s has %v, want %s through a switch", g.Name, g.Pairs, want[i])
		}
	}
}

// TestNoNICIdles: on hosts of any shape each usable NIC serves a GPU, each GPU has its share of
// the NICs, and no NIC serves more GPUs than necessary.
func TestNoNICIdles(t *testing.T) {
	for gpus := 1; gpus <= 8; gpus *= 2 {
		for nics := 1; nics <= 32; nics *= 2 {
			for perSwitch := 1; perSwitch <= gpus; perSwitch *= 2 {
				h := shape(gpus, nics, perSwitch)
				h.assignRoles(nil)
				h.pair()
				t.Run(fmt.Sprintf("%dgpus/%dnics/%d", gpus, nics, perSwitch), func(t *testing.T) { checkPairs(t, h, nics) })
			}
		}
	}
}

// shape is a host whose GPUs and NICs are distributed in order over switches of perSwitch GPUs
// each.
func shape(gpus, nics, perSwitch int) Host {
	switches := gpus / perSwitch
	under := func(i int, name string) PCI {
		s := i % switches
		return PCI{Address: name, NUMA: 2 * s / switches, Path: []string{fmt.Sprintf("pci0000:%02x", s), fmt.Sprintf("0000:%02x:01.0", s), name}}
	}
	var h Host
	for i := range gpus {
		h.GPUs = append(h.GPUs, GPU{Name: fmt.Sprintf("gpu%d", i), PCI: under(i, fmt.Sprintf("0000:80:%02x.0", i))})
	}
	for i := range nics {
		h.NICs = append(h.NICs, NIC{Name: fmt.Sprintf("mlx5_%d", i), Kind: InfiniBand, Usable: true, PCI: under(i, fmt.Sprintf("0000:81:%02x.0", i))})
	}
	return h
}

func checkPairs(t *testing.T, h Host, nics int) {
	t.Helper()
	if len(h.NICs) != nics {
		t.Fatalf("%d NICs, want %d\n%s", len(h.NICs), nics, h)
	}
	most := 0
	for _, n := range h.NICs {
		if len(n.GPUs) == 0 {
			t.Errorf("%s idles\n%s", n.Name, h)
		}
		most = max(most, len(n.GPUs))
	}
	if bound := max(1, (len(h.GPUs)+nics-1)/nics); most > bound {
		t.Errorf("a NIC serves %d GPUs, others fewer; %d would do\n%s", most, bound, h)
	}
	for _, g := range h.GPUs {
		if len(g.Pairs) == 0 {
			t.Errorf("%s has no NIC\n%s", g.Name, h)
		}
		if least := max(1, nics/len(h.GPUs)); len(g.Pairs) < least {
			t.Errorf("%s has %d NICs, %d would be its share\n%s", g.Name, len(g.Pairs), least, h)
		}
	}
}

func TestCompareNames(t *testing.T) {
	got := []string{"mlx5_10", "eth0", "mlx5_2", "rdmap79s0", "mlx5_2:1", "rdmap201s0", "eth00", "a"}
	slices.SortFunc(got, compareNames)
	want := []string{"a", "eth0", "eth00", "mlx5_2", "mlx5_2:1", "mlx5_10", "rdmap79s0", "rdmap201s0"}
	if !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// TestLinkGbps: the capacities of slots agree with NVIDIA's and AMD's data sheets.
func TestLinkGbps(t *testing.T) {
	for _, c := range []struct {
		link Link
		want float64
	}{
		{Link{2.5, 1}, 2}, {Link{5, 8}, 32}, {Link{8, 16}, 126.03}, {Link{16, 16}, 252.06}, {Link{32, 16}, 504.12},
	} {
		if got := c.link.Gbps(); got < c.want-0.01 || got > c.want+0.01 {
			t.Errorf("%v carries %.2f Gb/s, want %.2f", c.link, got, c.want)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{"400 Gb/sec (4X NDR)", "2.5 Gb/sec (1X SDR)", "32.0 GT/s PCIe", "Unknown", "4: ACTIVE", "", "1e309 Gb/sec (99X", "NaN Gb/sec (4X", "-1"} {
		f.Add(s, s)
	}
	f.Fuzz(func(t *testing.T, a, b string) {
		if gbps, lanes := parseRate(a); !(gbps >= 0 && gbps < 1e6) || lanes < 0 || lanes > 16 || gbps == 0 && lanes != 0 {
			t.Errorf("parseRate(%q) = %v, %d", a, gbps, lanes)
		}
		if l := parseLink(a, b); l != (Link{}) && !(l.GTs > 0 && l.Lanes > 0 && l.Gbps() < 1e6) {
			t.Errorf("parseLink(%q, %q) = %v", a, b, l)
		}
		if path := pciPath(a); path != nil && !strings.HasSuffix(pciDir(a), path[len(path)-1]) {
			t.Errorf("path %q of %q ends elsewhere than %q", path, a, pciDir(a))
		}
		if x, y := compareNames(a, b), compareNames(b, a); (x > 0) != (y < 0) || (x == 0) != (y == 0) {
			t.Errorf("compareNames(%q, %q) = %d and %d", a, b, x, y)
		}
	})
}

// factsOf reads lines of: memlock BYTES, rate GBPS, kernel RELEASE, device NIC
// ERROR…, counter NETDEV NAME BEFORE AFTER.
func factsOf(t testing.TB, text string) Facts {
	f := Facts{DeviceErr: map[string]error{}, Before: map[string]map[string]uint64{}, After: map[string]map[string]uint64{}, Interval: time.Second}
	number := func(s string) uint64 {
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	for _, w := range fields(text) {
		switch w[0] {
		case "memlock":
			n := number(w[1])
			f.MemlockBytes = &n
		case "rate":
			f.RateGbps = float64(number(w[1]))
		case "kernel":
			f.Kernel = w[1]
		case "device":
			f.DeviceErr[w[1]] = errors.New(strings.Join(w[2:], " "))
		case "counter":
			for _, m := range []map[string]map[string]uint64{f.Before, f.After} {
				if m[w[1]] == nil {
					m[w[1]] = map[string]uint64{}
				}
			}
			f.Before[w[1]][w[2]], f.After[w[1]][w[2]] = number(w[3]), number(w[4])
		default:
			t.Fatalf("unknown fact %q", w[0])
		}
	}
	return f
}
