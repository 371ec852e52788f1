package qos

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// deployed reads a file of deploy/qos.
func deployed(t testing.TB, name string) string {
	raw, err := os.ReadFile(filepath.Join(testkit.RepositoryRoot(t), "deploy", "qos", name))
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

// TestDualPathTables: deploy/qos/opensm.conf has the tables of appendix A.1, and
// collectives get the share that follows from them.
func TestDualPathTables(t *testing.T) {
	o, err := ParseOpenSM(deployed(t, "opensm.conf"))
	if err != nil {
		t.Fatal(err)
	}
	a := o.Ports[""]
	if !o.Enabled || a.VLs != 4 || a.HighLimit != 240 ||
		fmt.Sprint(a.High) != "[{0 192} {1 192} {2 0} {3 192}]" || fmt.Sprint(a.Low) != "[{0 192} {1 192} {2 64} {3 192}]" {
		t.Errorf("%+v is not appendix A.1", o)
	}
	want := 240.0 * 4096 / (240*4096 + 64*64)
	if got := a.HighShare(); math.Abs(got-want) > 1e-9 || fmt.Sprintf("%.1f", 100*got) != "99.6" {
		t.Errorf("high share %v, want %v, 99.6 %%", got, want)
	}
	if r := o.Check(Default()); len(r.Deviations) != 0 || math.Abs(r.HighShare-want) > 1e-9 {
		t.Errorf("%+v", r)
	}
}

// TestSimulatedPort: in a simulation of single packets, the high lanes get at least HighShare
// and divide it evenly; a lane that waits alone gets the whole link.
func TestSimulatedPort(t *testing.T) {
	o, err := ParseOpenSM(deployed(t, "opensm.conf"))
	if err != nil {
		t.Fatal(err)
	}
	a := o.Ports[""]
	const packets, mtu = 1 << 20, 4096
	total := float64(packets * mtu)
	sent := a.Simulate(mtu, packets, 0, 1, 2, 3)
	if share := 1 - float64(sent[2])/total; share < a.HighShare() {
		t.Errorf("high lanes have %.5f, promised %.5f", share, a.HighShare())
	}
	for _, vl := range []int{0, 1, 3} {
		if share := float64(sent[vl]) / total; math.Abs(share-1.0/3) > 0.01 {
			t.Errorf("VL %d has %.3f of the link", vl, share)
		}
	}
	if sent[2] == 0 {
		t.Error("the low lane starves")
	}
	// One collective lane and the cache: the case of the formula.
	sent = a.Simulate(mtu, packets, 0, 2)
	if share := float64(sent[0]) / total; share < a.HighShare() || share == 1 {
		t.Errorf("collectives have %.5f beside the cache, promised %.5f", share, a.HighShare())
	}
	if sent = a.Simulate(mtu, packets, 2); sent[2] != packets*mtu {
		t.Errorf("alone the cache sends %d of %d", sent[2], packets*mtu)
	}
	a.HighLimit = UnlimitedHigh
	if sent = a.Simulate(mtu, packets, 0, 2); sent[2] != 0 {
		t.Errorf("with a limit of 255 the cache sends %d bytes", sent[2])
	}
	a.Low = nil
	if sent = a.Simulate(mtu, packets, 2); len(sent) != 0 {
		t.Errorf("a lane without a weight sends %v", sent)
	}
}

func TestMap(t *testing.T) {
	for _, c := range []struct{ text, want, err string }{
		{"", Default().String(), ""},
		{"off", Map{}.String(), ""},
		{"kv=dscp:10", "kv=sl:2,dscp:10,prio:1 collective=sl:0,dscp:26,prio:3", ""},
		{"collective=sl:3,prio:4 kv=sl:1", "kv=sl:1,dscp:8,prio:1 collective=sl:3,dscp:26,prio:4", ""},
		{"bulk=sl:1", "", `"bulk" is no class`},
		{"kv=vl:1", "", `"vl:1" is no setting`},
		{"kv=sl:16", "", "from 0 to 15"},
		{"kv=dscp:64", "", "from 0 to 63"},
		{"kv=prio:-1", "", "from 0 to 7"},
		{"kv=sl:1 kv=sl:2", "", "twice"},
	} {
		m, err := Parse(c.text)
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%q: %v, want %q", c.text, err, c.err)
			}
			continue
		}
		if err != nil || m.String() != c.want {
			t.Errorf("%q is %v, %v; want %s", c.text, m, err, c.want)
		}
	}
	if err := (Map{{SL: 16}}).Validate(); err == nil {
		t.Error("SL 16 is valid")
	}
}

// TestMarks: the bytes in the packets are those of NCCL_IB_TC and IP_TOS.
func TestMarks(t *testing.T) {
	m := Default()
	coll, kv := m.Lane(rdma.ClassCollective), m.Lane(rdma.ClassKV)
	if coll.TrafficClass() != 106 || kv.TrafficClass() != 34 || kv.TOS() != 0x20 || coll.TOS() != 104 {
		t.Errorf("collective %d, %d; kv %d, %#x", coll.TrafficClass(), coll.TOS(), kv.TrafficClass(), kv.TOS())
	}
	if m.Lane(rdma.Classes) != kv {
		t.Error("a class that does not exist is not on the low lane")
	}
}

// TestTranscripts: testdata/*.td; check compares the input with the default map,
// or with map=….
func TestTranscripts(t *testing.T) {
	datadriven.RunTest(t, "testdata/check.td", func(t *testing.T, d *datadriven.TestData) string {
		m := Default()
		for _, a := range d.CmdArgs {
			var err error
			if m, err = Parse(strings.Join(append([]string{a.Key}, a.Vals...), "=")); err != nil {
				d.Fatalf(t, "%v", err)
			}
		}
		r, err := Check(d.Input, m)
		if err != nil {
			return err.Error()
		}
		var b strings.Builder
		fmt.Fprintf(&b, "%s, collectives are guaranteed %.1f %%\n", r.Fabric, 100*r.HighShare)
		for _, dev := range r.Deviations {
			if dev.Where != "" {
				b.WriteString(dev.Where + ": ")
			}
			fmt.Fprintf(&b, "%s\n  → %s\n", dev.What, dev.Do)
		}
		return b.String()
	})
}

func FuzzParse(f *testing.F) {
	f.Add(Default().String())
	f.Add("kv=sl:15,dscp:63,prio:7")
	f.Fuzz(func(t *testing.T, text string) {
		m, err := Parse(text)
		if err != nil {
			return
		}
		if again, err := Parse(m.String()); err != nil || again != m {
			t.Errorf("%q is %v, which reads as %v, %v", text, m, again, err)
		}
	})
}

// FuzzCheck: for every file the share is between 0 and 1, and the simulated port gives its high
// lanes at least this share.
func FuzzCheck(f *testing.F) {
	f.Add(deployed(f, "opensm.conf"))
	f.Add("qos TRUE\nqos_max_vls 2\nqos_high_limit 0\nqos_vlarb_high 0:255\nqos_vlarb_low 1:1\nqos_swe_sl2vl 0,1,15")
	f.Add("tc-bw 0:50 1:50\nprio-tc all:1\ndscp-prio CS1:1 AF31:3\nprio-pfc 3:on")
	f.Fuzz(func(t *testing.T, text string) {
		r, err := Check(text, Default())
		if err != nil {
			return
		}
		if !(r.HighShare >= 0 && r.HighShare <= 1) {
			t.Errorf("share %v", r.HighShare)
		}
		o, err := ParseOpenSM(text)
		if err != nil {
			return
		}
		for _, a := range o.Ports {
			checkShare(t, a)
		}
	})
}

// checkShare compares HighShare with a simulation of packets.
func checkShare(t *testing.T, a Arbiter) {
	var high, all []int
	for vl := range vlMax + 1 {
		switch {
		case weightOf(a.High, vl) > 0:
			high = append(high, vl)
			all = append(all, vl)
		case weightOf(a.Low, vl) > 0:
			all = append(all, vl)
		}
	}
	if len(high) == 0 {
		return
	}
	const mtu, packets = 4096, 1 << 14
	sent := a.Simulate(mtu, packets, all...)
	bytes := 0
	for _, vl := range high {
		bytes += sent[vl]
	}
	const slack = 1.0 / packets // the run may end after a low packet
	if got := float64(bytes) / (mtu * packets); got+slack < a.HighShare() {
		t.Errorf("%+v gives the high lanes %.4f, promised %.4f", a, got, a.HighShare())
	}
}
