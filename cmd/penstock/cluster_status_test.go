package main

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/testetcd"
)

// threeMembers returns members without faults, of which two are in the zone a.
func threeMembers() []*pb.Member {
	var all []*pb.Member
	for i, zone := range []string{"b", "a", "a"} {
		all = append(all, &pb.Member{
			Name: fmt.Sprintf("n%d", i), Addr: fmt.Sprintf("host%d:7420", i), Zone: zone, State: "serving", CapacityBytes: 1 << 40, UsedBytes: 1 << 38,
			Version: "v1", SinceUnixMs: int64(1000 * (i + 1)),
		})
	}
	return all
}

func listOf(members []*pb.Member) *pb.ListMembersResponse {
	return &pb.ListMembersResponse{Members: members}
}

// TestClusterState: a sound cluster has no faults, and each fault of a member is one line.
func TestClusterState(t *testing.T) {
	s := clusterStateOf(listOf(threeMembers()), 3)
	if len(s.Faults)+len(s.Notes)+len(s.Moves) > 0 || s.Serving != 3 || len(s.Zones) != 2 || s.Zones[0] != (zoneState{"a", 2, 2, 2 << 40, 1 << 39}) {
		t.Errorf("a sound cluster: %+v", s)
	}
	for name, c := range map[string]struct {
		change      func(m []*pb.Member)
		expect      int
		fault, note string
	}{
		"a node is missing": {func([]*pb.Member) {}, 4, "^3 nodes serve; --expect has 4$", ""},
		"a node joins":      {func(m []*pb.Member) { m[1].State = "joining" }, 0, "^node n1 is joining since 1970-01-01T00:00:02Z: it serves nothing$", ""},
		"a node stops":      {func(m []*pb.Member) { m[1].State = "stopping" }, 0, "^node n1 is stopping", ""},
		"a drain":           {func(m []*pb.Member) { m[0].State, m[0].Move = "draining", &pb.MoveStatus{Phase: "copying"} }, 3, "", ""},
		"a drain that is stuck": {func(m []*pb.Member) {
			m[0].State, m[0].Move = "draining", &pb.MoveStatus{LeftBlocks: 2, Reason: "n1 is full"}
		}, 0, "^the draining of node n0 does not advance: n1 is full$", ""},
		"a node is overfull":     {func(m []*pb.Member) { m[0].UsedBytes = 1 << 40 }, 0, "", "^node n0 is 100.* full: new sequences pass it over$"},
		"two versions":           {func(m []*pb.Member) { m[1].Version = "v2" }, 0, "", "^the nodes have different versions: v1 on n0, n2; v2 on n1$"},
		"a record without sizes": {func(m []*pb.Member) { m[0].CapacityBytes, m[0].UsedBytes = 0, 0 }, 0, "", ""},
	} {
		m := threeMembers()
		c.change(m)
		s := clusterStateOf(listOf(m), c.expect)
		for what, is := range map[string]struct {
			lines []string
			want  string
		}{"faults": {s.Faults, c.fault}, "notes": {s.Notes, c.note}} {
			if is.want == "" && len(is.lines) > 0 || is.want != "" && (len(is.lines) != 1 || !regexp.MustCompile(is.want).MatchString(is.lines[0])) {
				t.Errorf("%s: %s %q; want %q", name, what, is.lines, is.want)
			}
		}
	}
	list := twoDown()
	list.Members[1].Erasures = []*pb.VolumeErasures{{Volume: "/d", Namespaces: 1200, SinceUnixMs: 1000}}
	list.Down[0].Erasures = []*pb.VolumeErasures{{Volume: "/c", Namespaces: 1, SinceUnixMs: 2000}}
	if s, want := clusterStateOf(list, 0), []string{
		"node n1, volume /d: secrets of ended epochs of 1,200 namespaces are still to be erased, since 1970-01-01T00:00:01Z",
		"node n3, volume /c: secrets of ended epochs of 1 namespace are still to be erased, since 1970-01-01T00:00:02Z",
	}; !slices.Equal(s.Erasures, want) || len(s.Faults) != 1 {
		t.Errorf("erasures %q, faults %q; want %q and the node that is down", s.Erasures, s.Faults, want)
	}
	if s := clusterStateOf(nil, 1); len(s.Faults) != 1 {
		t.Errorf("without members: %+v", s)
	}
}

// twoDown returns three members and two nodes that are down, of which one is drained.
func twoDown() *pb.ListMembersResponse {
	list := listOf(threeMembers())
	list.Members[1].HotPrefixes = 2
	list.Members[1].Nics = []*pb.MemberNIC{{Name: "eth0", Address: "10.0.0.1:7421", Up: true, LinkBitsPerSecond: 400e9}, {Name: "eth1", Address: "10.0.1.1:7421", LinkBitsPerSecond: 400e9}}
	list.Members[1].Volumes = []*pb.MemberVolume{{Path: "/a", State: "ok"}, {Path: "/b", State: "failed", Reason: "EIO"}}
	list.Down = []*pb.Member{
		{Name: "n3", State: "down", Zone: "b", CapacityBytes: 1 << 40, UsedBytes: 1 << 38, Blocks: 70_000, Leases: 2, LeftUnixMs: 60_000, WrittenUnixMs: 50_000, Volumes: []*pb.MemberVolume{{Path: "/c", State: "ok"}, {Path: "/d", State: "ok"}}},
		{Name: "n4", State: "down", WrittenUnixMs: 50_000, Move: &pb.MoveStatus{Phase: "done"}},
	}
	return list
}

// TestClusterStateDown: a node that is down is a fault, and one that is drained is a note. The number of hot prefixes is that of
// all nodes. The plan of a restart waits for the node that is down, and counts it among the nodes.
func TestClusterStateDown(t *testing.T) {
	s := clusterStateOf(twoDown(), 3)
	if want := []string{"node n3 is down since 1970-01-01T00:01:00Z: start it, or take it out with penstock cluster remove n3 --force"}; !slices.Equal(s.Faults, want) {
		t.Errorf("faults %q; want %q", s.Faults, want)
	}
	if want := []string{"node n4 is drained and down since a time after 1970-01-01T00:00:50Z: start it, or take it out with penstock cluster remove n4"}; !slices.Equal(s.Notes, want) {
		t.Errorf("notes %q; want %q", s.Notes, want)
	}
	evicted := twoDown()
	evicted.Down[1].Move = &pb.MoveStatus{Phase: "done", Blocks: 5000, CopiedBlocks: 4000, CheckedUnixMs: 55_000}
	if s, want := clusterStateOf(evicted, 3), "penstock cluster remove n4, checked at 1970-01-01T00:00:55Z; the other nodes have evicted or lost 1,000 blocks that were copied, which a repeated drain copies again"; len(s.Notes) != 1 || !strings.HasSuffix(s.Notes[0], want) {
		t.Errorf("notes %q; want %q", s.Notes, want)
	}
	if s.Members != 3 || s.Down != 2 || s.HotPrefixes != 2 || !slices.Equal(s.Hot, []string{"node n1: 2"}) {
		t.Errorf("%+v", s)
	}
	p := restartPlanOf(twoDown(), time.Time{}, 0)
	if len(p.Blocked) != 1 || !strings.Contains(p.Blocked[0], "n3 is down") || len(p.Steps) != 3 || !strings.HasSuffix(p.Steps[0].Commands[2], " --expect 4") {
		t.Errorf("%+v", p)
	}
}

// TestPrintMembers: the table has the volumes and NICs of each node, and and of each node that is down the end of its lease, the zone, the
// capacity, the volumes and the blocks.
func TestPrintMembers(t *testing.T) {
	var b strings.Builder
	tab := &table{tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)}
	list := twoDown()
	printMembers(tab, list)
	printDetails(tab, append(slices.Clone(list.Members), list.Down...))
	_ = tab.Flush()
	got := strings.Join(strings.Fields(b.String()), " ")
	for _, want := range []string{
		"n0 serving b 1.0 TiB 256 GiB - - 0", "n1 serving a 1.0 TiB 256 GiB 1 of 2 ok 1 of 2 up, 400 Gbit/s 0",
		"n3 down b 1.0 TiB 256 GiB 2 ok - 0 1970-01-01T00:01:00Z", "n4 down 0 B 0 B - - 0 after 1970-01-01T00:00:50Z",
		"n3: it had 70,000 blocks, 256 GiB, and 2 leases and pins on /c, /d", "n4: it had 0 blocks, 0 B, and 0 leases and pins; drained",
		"n1 /b failed 0 B 0 B 0 EIO", "n1 eth1 10.0.1.1:7421 down 400 Gbit/s",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("without %q:\n%s", want, b.String())
		}
	}
}

// TestRestartPlan: the nodes of a zone follow each other, nodes that have started since the restart
// began are done, and a fault blocks the next step.
func TestRestartPlan(t *testing.T) {
	order := func(p restartPlan) string {
		var names []string
		for _, s := range p.Steps {
			names = append(names, s.Node)
		}
		return strings.Join(names, " ")
	}
	p := restartPlanOf(listOf(threeMembers()), time.Time{}, 0)
	if order(p) != "n1 n2 n0" || len(p.Blocked)+len(p.Done) > 0 || p.Steps[0].Share < 0.33 || p.Steps[0].Share > 0.34 {
		t.Errorf("%+v", p)
	}
	want := []string{"ssh host1 systemctl restart penstock", "penstock --server host1:7420 status --wait", "penstock --server host1:7420 cluster status --wait --expect 3"}
	if !slices.Equal(p.Steps[0].Commands, want) {
		t.Errorf("commands %q; want %q", p.Steps[0].Commands, want)
	}
	if p := restartPlanOf(listOf(threeMembers()), time.UnixMilli(1500), 3); order(p) != "n0" || !slices.Equal(p.Done, []string{"n1", "n2"}) || len(p.Blocked) > 0 {
		t.Errorf("after two restarts: %+v", p)
	}
	if p := restartPlanOf(listOf(threeMembers()[:2]), time.Time{}, 3); len(p.Blocked) != 1 || !strings.Contains(p.Blocked[0], "2 nodes serve") {
		t.Errorf("while a node is down: %+v", p)
	}
	m := threeMembers()
	m[0].State = "draining"
	if p := restartPlanOf(listOf(m), time.Time{}, 0); len(p.Blocked) != 1 || !strings.Contains(p.Blocked[0], "penstock cluster undrain n0") {
		t.Errorf("while a node drains: %+v", p)
	}
}

// TestClusterStatus follows the plan of a restart on a cluster of two nodes.
func TestClusterStatus(t *testing.T) {
	testkit.VerifyNone(t)
	etcd, dir := testetcd.Start(t, 1), t.TempDir()
	a := startServed(t, dir+"/a", clusterOf(etcd, "a")...)
	c := startProcess(t, dir+"/c", clusterOf(etcd, "c")...)
	out := a.run("cluster", "status", "--wait", "--expect", "2", "--timeout", "2m").must(t)
	for _, want := range []string{"2 of 2 nodes serve", "rack-a", "rack-c", "no faults"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	if r := a.run("cluster", "status", "--expect", "3"); r.code != exitFailed || !strings.Contains(r.out, "fault: 2 nodes serve; --expect has 3") {
		t.Errorf("with a missing node: exit %d\n%s%s", r.code, r.out, r.err)
	}
	if r := a.run("cluster", "restart-plan", "--since", "yesterday"); r.code != exitUsage || !strings.Contains(r.err, `--since "yesterday"`) {
		t.Errorf("a bad time: exit %d\n%s", r.code, r.err)
	}
	out = a.run("cluster", "restart-plan").must(t)
	if first, second := strings.Index(out, "1. node a, zone rack-a: 50 % of"), strings.Index(out, "2. node c, zone rack-c"); first < 0 || second < first {
		t.Errorf("the plan is\n%s", out)
	}
	began := time.Now().Add(time.Second).UTC().Truncate(time.Second)
	awaitTrue(t, "the next second begins", func() bool { return time.Now().After(began.Add(time.Millisecond)) })
	if err := c.Kill(); err != nil {
		t.Fatal(err)
	}
	awaitTrue(t, "the killed node leaves the list, and the end of its lease is noted", func() bool {
		out := a.run("cluster", "members").must(t)
		return states(t, a) == "a:serving" && regexp.MustCompile(`(?m)^c +down +rack-c +[^-]+ 1 ok +1 up.* 20\d\d-\S+Z +\S+`).MatchString(out) && !strings.Contains(out, "after 20")
	})
	if out := a.run("cluster", "members").must(t); !strings.Contains(out, "  c: it had 0 blocks") || !strings.Contains(out, " leases and pins on "+dir+"/c") {
		t.Errorf("the nodes are\n%s", out)
	}
	if r := a.run("cluster", "status"); r.code != exitFailed || !strings.Contains(r.out, "1 of 2 nodes serve") || !strings.Contains(r.out, "fault: node c is down since 20") {
		t.Errorf("while a node is down: exit %d\n%s%s", r.code, r.out, r.err)
	}
	if r := a.run("cluster", "restart-plan", "--since", began.Format(time.RFC3339), "--expect", "2"); r.code != exitFailed || !strings.Contains(r.out, "not now: 1 nodes serve") {
		t.Errorf("while a node is down: exit %d\n%s%s", r.code, r.out, r.err)
	}
	again := alone(t, dir+"/c", clusterOf(etcd, "c")...)
	again.run("cluster", "status", "--wait", "--expect", "2", "--timeout", "2m").must(t)
	out = a.run("cluster", "restart-plan", "--since", began.Format(time.RFC3339), "--expect", "2").must(t)
	if !strings.HasPrefix(out, "done: c\n1. node a") {
		t.Errorf("after the restart of c the plan is\n%s", out)
	}
}
