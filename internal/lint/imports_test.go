package lint

import (
	"slices"
	"strings"
	"testing"
)

// edges lists, for each package of the repository, the packages that its code may import. The row
// with the longest matching pattern applies. All packages may import internal/invariants and
// internal/options, which are not listed.
//
//	kv ◄── trie ◄──────┐
//	 ▲ ◄── api ◄─────┐ │
//	 │ ◄── blockstore┼─┤── io/blockio ◄── uring posixio memio faultio
//	 └──── client ───┘ └── server ── rdma ◄── tcp …            cmd imports all
var edges = []struct {
	pkg string
	may []string
	why string
}{
	{"kv", nil, "the types of the domain are pure, so that every package can use them and they change only with the product"},
	{"api/...", []string{"kv", "api/..."}, "messages consist of types of the domain; with a server type in the API, clients would depend on the server"},

	{"io/blockio", nil, "the contract imports nothing of ours, so that a backend or a caller pulls in no other"},
	{"io/uring", []string{"io/blockio", "io/posixio", "internal/sys", "internal/arena"}, "a backend needs its contract and the kernel; only posixio has the layout of a volume's directory (names, lock, space), so that each backend opens the other's volumes"},
	{"io/posixio", []string{"io/blockio", "internal/sys", "internal/arena"}, "a backend needs its contract and the kernel; it depends neither on other backends nor on the stored data"},
	{"io/usrbio", []string{"io/blockio", "io/posixio", "internal/sys", "internal/arena"}, "a backend needs its contract and the kernel; it shares the layout of a volume's directory with posixio, and does not depend on the stored data"},
	{"io/usrbio/usrbiotest", []string{"internal/testkit"}, "a stand-in for 3FS's library that used a part of usrbio would have the same mistakes"},
	{"io/memio", []string{"io/blockio"}, "a backend needs its contract; memory needs no kernel"},
	{"io/faultio", []string{"io/blockio"}, "it wraps any device, so it depends on no backend"},
	{"io/blockiotest", []string{"io/blockio", "internal/testkit", "internal/arena", "internal/sys"}, "a suite that imports a backend would make exceptions for it"},

	{"trie", []string{"kv", "trie/evict"}, "trie uses Pebble but no block device: the caller frees the blocks that it evicts"},
	{"trie/evict", nil, "a policy orders numbers, independent of their meaning"},

	{"blockstore", []string{"kv", "io/blockio", "blockstore/crypt", "blockstore/health", "blockstore/ondisk", "internal/arena", "internal/runs"}, "blockstore has no prefixes, and gets its devices from the composition root"},
	{"blockstore/crypt", nil, "it encrypts bytes; the place of keys and tags in a slot is that of ondisk"},
	{"blockstore/health", nil, "pure: the state of a volume depends only on events"},
	{"blockstore/ondisk", []string{"kv"}, "encoding and decoding only: no I/O, so it can be fuzzed alone"},

	{"rdma", nil, "the contract imports nothing of ours, so that a provider or a caller pulls in no other"},
	{"rdma/rdmatest", []string{"rdma", "internal/testkit", "internal/arena"}, "a suite that imports a provider would make exceptions for it"},
	{"rdma/group/domaintest", []string{"rdma", "rdma/group", "internal/testkit"}, "a suite that imports a provider would make exceptions for it"},
	{"rdma/internal/...", []string{"rdma", "rdma/internal/...", "internal/ratelog"}, "parts that only the providers share"},
	{"rdma/...", []string{"rdma", "rdma/group", "rdma/internal/...", "rdma/qos", "internal/sys", "internal/arena"}, "a provider needs its contract and the kernel, and does not interpret the bytes that it moves"},

	{"dualpath", nil, "the planner is pure: its decisions depend only on events, so that production, tests and simulation run the same code"},
	{"dualpath/...", []string{"dualpath"}, "pure, as the planner"},
	{"dualpath/record", []string{"dualpath", "dualpath/netcost"}, "a record holds the configuration of its planner, including the network's cost"},
	{"dualpath/prfaas", []string{"dualpath", "internal/yamlfile"}, "pure, as the planner; profiles of models are decoded from bytes"},

	{"sim", nil, "the simulation kernel has time, order and randomness, and no models"},
	{"sim/flow", []string{"sim"}, "a network needs the clock, and does not interpret the bytes of its flows"},
	{"sim/workload", []string{"kv", "internal/trace"}, "lengths and times, for simulated and real clusters alike"},
	{"sim/agentic", []string{"sim", "sim/flow", "sim/workload", "dualpath/..."}, "a simulated cluster runs the production planner, and no code that does I/O"},
	{"sim/datacenters", []string{"sim", "sim/flow", "sim/workload", "dualpath/..."}, "a simulated system runs the production router and controllers, and no code that does I/O"},
	{"sim/netkv", []string{"sim", "sim/flow", "sim/workload", "dualpath/..."}, "a simulated cluster runs the production scorer, and no code that does I/O"},

	{"rdma/topo", nil, "it describes the hardware for providers and people, so it depends on no provider"},
	{"rdma/topo/topotest", nil, "it writes files; a description that used package topo would have the same mistakes"},
	{"rdma/topo/...", []string{"rdma/topo"}, "values that the driver or the kernel reports outside of sysfs are passed to topo"},

	{"server/config", []string{"kv", "internal/yamlfile"}, "configuration consists of values; cmd passes them to their users"},
	{"server/planner", []string{"dualpath", "dualpath/netcost", "dualpath/record", "api/..."}, "the planner node is the pure planner, its record and gRPC; it must not depend on parts of a storage node"},
	{"server/access", []string{"kv", "internal/bearer", "internal/yamlfile"}, "it decides from a file of principals; package server applies it to calls"},
	{"server/membership", []string{"kv", "trie", "server/storage", "internal/sys"}, "it keeps a node's namespaces equal to those in etcd; server asks it whether the node may serve"},
	{"server/move", []string{"kv", "trie", "server/storage", "client", "client/relay", "internal/placement"}, "it copies a node's blocks to other nodes, of which it is a client; cmd composes it with the node"},
	{"server/reload", []string{"server/access", "server/config", "server/metrics", "internal/bearer"}, "it compares configurations and exchanges credentials; cmd applies the settings to the parts"},
	{"server/front", []string{"kv", "client", "client/gateway", "internal/bearer", "internal/prefixset", "internal/ratelog", "internal/webmux"}, "it is HTTP between clients and inference engines, and a client of the planner: it must not depend on parts of a storage node or a planner"},
	{"server/offload", []string{"kv", "client", "client/gateway", "client/relay", "dualpath/prfaas"}, "it is a policy of the gateway, which is a client of storage nodes and planner"},
	{"server/netoracle", []string{"dualpath/...", "internal/certs", "internal/yamlfile"}, "it reads the operator's systems and returns the network in the types of netcost, and decides nothing"},
	{"server/monitor", []string{"server", "server/front", "server/netoracle", "server/offload", "server/planner"}, "it reads the definitions of the metrics of each component, and runs no component"},
	{"server/console", []string{"internal/top"}, "it renders the state that a node supplies, and does not depend on the parts of the node"},
	{"server/...", []string{"kv", "api/...", "trie", "trie/evict", "blockstore/...", "io/blockio", "rdma", "server/...", "internal/arena", "internal/bearer", "internal/fair", "internal/placement", "internal/ratelog", "internal/spread", "internal/sys", "internal/top", "internal/top/fromapi", "internal/webmux"}, "the server joins contracts; cmd chooses the backends. Of internal/sys it uses only the memory limits of the process and the time since boot, internal/placement computes which blocks a node would copy to nodes that have joined, and internal/top the rates of the console"},
	{"client/...", []string{"kv", "api/...", "rdma", "rdma/copier", "client/...", "internal/arena", "internal/placement", "internal/spread", "internal/sys"}, "a client is linked into an engine: it must not contain the server, the index or a device. Of internal/sys it uses only blocking calls on a unix socket"},

	{"client/gateway", []string{"kv", "api/...", "client", "internal/prefixset"}, "a gateway calls storage and the planner, and holds no KV"},
	{"client/planners", []string{"api/...", "client"}, "it finds the planner that leads, without access to etcd; leader and gateway use it through grpc.ClientConnInterface"},
	{"client/relay", []string{"kv", "client", "internal/arena"}, "it joins two stores, and decides nothing"},
	{"client/leader", []string{"kv", "api/...", "rdma", "client/traffic"}, "a leader has the types of the engines' transfers and performs no transfers"},
	{"client/capi", []string{"kv", "rdma", "rdma/tcp", "rdma/copier", "client", "client/leader", "client/gateway", "client/traffic", "client/capi/binding"}, "the composition root of a library; it chooses the provider and the copier, like cmd"},
	{"client/capi/binding", []string{"kv", "rdma", "rdma/copier", "client", "client/leader", "client/gateway", "client/planners", "client/traffic", "internal/bearer", "internal/certs", "internal/sys"}, "handles, batches and queues over the client; capi chooses the provider"},

	{"internal/invariants", nil, "every package imports it"},
	{"internal/bearer", nil, "clients and servers read one format of token files, and neither imports the other"},
	{"internal/certs", nil, "clients, engines and servers read certificates from files, and none of them imports the others"},
	{"internal/placement", []string{"kv"}, "clients and the mover of a draining node choose the same nodes, and neither imports the other"},
	{"internal/prefixset", nil, "the gateway approximates engines' caches from hashes of text, and its client library from ids; neither hash is of this package"},
	{"internal/ratelog", nil, "the data plane and the servers limit their logs, and neither imports the other"},
	{"internal/webmux", nil, "storage nodes, planners and gateways list their paths with it, and the gateway does not import the server"},
	{"internal/options", nil, "every package with options imports it"},
	{"internal/sys", nil, "system calls do not depend on their callers"},
	{"internal/spread", nil, "clients and nodes copy and hash with it, and neither imports the other"},
	{"internal/fair", nil, "an order of calls does not depend on the resource that they wait for"},
	{"internal/arena", []string{"internal/fair", "internal/runs", "internal/sys"}, "an allocator does not depend on its users"},
	{"internal/runs", nil, "a set of numbers depends neither on memory nor on disks"},
	{"internal/zmtp", nil, "a wire protocol does not depend on its payload"},
	{"internal/zmtp/zmtptest", []string{"internal/zmtp"}, "the client end of the protocol, for tests"},
	{"internal/kvevents", []string{"kv", "api/...", "internal/zmtp"}, "a publisher is a gRPC client of the nodes; it must not depend on a node's index"},
	{"internal/top", nil, "rates depend only on samples: it is pure, and cmd reads the samples from the nodes"},
	{"internal/top/fromapi", []string{"api/...", "internal/top"}, "it converts messages; package top stays independent of the API"},
	{"internal/top/screen", []string{"internal/top"}, "lines depend only on the state of the screen and its size; cmd has the terminal"},
	{"internal/testkit", nil, "every package's tests import it; any import here would make a cycle"},
	{"internal/lint", nil, "it checks the other packages"},
	{"internal/trace/...", []string{"kv", "internal/trace"}, "a trace is data and depends on no server"},

	{"internal/yamlfile", nil, "it reports mistakes in a file, independent of the meaning of the settings"},
	{"internal/chart", nil, "a figure consists of numbers and words, independent of the measurement"},
	{"sim/scenario", []string{"sim", "sim/agentic", "sim/netkv", "sim/datacenters", "sim/workload", "dualpath/...", "internal/yamlfile"}, "it reads files for the simulators, and runs them"},

	{"python/engines", nil, "it carries files in Python and runs nothing"},

	{"lab", nil, "it has no code"},
	{"lab/bench", nil, "medians and tables do not depend on the measured work"},
	{"lab/bench/peer", []string{"lab/bench", "internal/sys"}, "a program for comparison must not use a part of Penstock"},
	{"lab/bench/suite", []string{"kv", "trie", "trie/evict", "blockstore/...", "io/blockio", "rdma", "client", "api/...", "server/metrics", "server/storage", "internal/arena", "internal/sys", "internal/trace", "lab/bench/...", "lab/cluster", "lab/hitsim", "sim/workload", "dualpath", "python/engines"}, "it measures each part by itself and all of them together; devices and engines come from cmd"},
	{"lab/cluster", []string{"kv", "api/...", "client", "client/leader", "dualpath", "dualpath/batch", "rdma", "rdma/tcp", "rdma/qos", "sim/workload", "lab/emulate", "lab/netlab", "lab/bench"}, "it runs nodes as their users do: the storage node and the planner only through the binary; its own engines embed the client with a provider, as real engines do"},
	{"lab/content", []string{"kv"}, "the bytes of a block are computed from its id"},
	{"lab/crash", nil, "it has only tests, which use the node as its users do: through the binary and the client"},
	{"lab/emulate", []string{"kv", "client/...", "dualpath/...", "rdma", "rdma/copier", "lab/content"}, "an emulated engine embeds the client and its traffic manager, and calls planner and storage, as a real engine does"},
	{"lab/hitsim", []string{"internal/trace", "trie/evict"}, "it compares eviction policies on traces and needs no index"},
	{"lab/netlab", nil, "a network on one machine does not depend on the programs that run in it"},
	{"lab/profile", []string{"kv", "client", "dualpath/...", "internal/arena"}, "it reads as an engine does, and must not depend on the node's code"},
	{"lab/rdmalab", nil, "it boots a machine and runs the given programs; a package that was linked into it could not be the tested one"},
	{"lab/replay", []string{"kv", "client", "internal/trace", "internal/arena", "lab/content"}, "a replay embeds the client as an engine does, and must not depend on the node's code"},
	{"lab/reproduce", []string{"sim", "sim/...", "dualpath/...", "internal/chart", "internal/trace"}, "tables and figures of the papers, over the simulators and the pure planner"},
	{"lab/roundtrip", []string{"rdma"}, "it calls any engine through the contract; other packages fit models to the times"},
	{"lab/scale", nil, "it has only tests, which measure the memberships of many nodes"},
	{"lab/hot", nil, "it has only tests, which use clusters as their users do: through the binary and the client"},
	{"lab/rounds", nil, "it has only tests, which use clusters as their users do: through the binary and the client"},
	{"lab/testnode", []string{"..."}, "a whole storage node, for tests, composed as in cmd"},
	{"lab/testetcd", []string{"internal/testkit"}, "etcd, for tests"},
	{"lab/testplanner", []string{"api/...", "server/planner"}, "a planner node, for tests, without the parts that cmd adds"},

	{"examples/...", []string{"kv", "api/...", "client/...", "dualpath", "rdma", "rdma/tcp", "server/planner"}, "an example imports only packages that another module can import"},

	{"cmd/...", []string{"..."}, "the composition root: only here are concrete backends passed as contracts"},
}

// testEdges lists the imports that tests may have in addition to those of their package's code.
var testEdges = []struct {
	pkg string
	may []string
	why string
}{
	{"...", []string{"internal/testkit", "lab/netlab", "internal/trace", "io/blockiotest", "rdma/rdmatest", "rdma/group/domaintest"}, "suites and helpers exist for tests"},
	{"...", []string{"io/memio", "io/faultio", "io/posixio", "rdma/tcp", "internal/arena"}, "a contract is tested with a real backend behind it"},
	{"client/...", []string{"server/...", "trie", "trie/evict", "blockstore/...", "io/blockio"}, "a client is tested against the real server in one process"},
	{"client", []string{"lab/testetcd", "lab/testnode"}, "a node of another version wraps the sockets of a whole node; members of a cluster have etcd"},
	{"client/capi", []string{"dualpath", "lab/testetcd", "lab/testnode", "lab/testplanner"}, "the tests run C programs against nodes and a planner in their process, and etcd beside it"},
	{"client/capi/binding", []string{"api/...", "dualpath", "lab/testnode", "lab/testplanner", "rdma/tcp", "rdma/copier/copiertest"}, "the tests run batches against a node, leaders against a planner, and transfers on a device of the tests' own, in their process"},
	{"client/gateway", []string{"client/leader", "client/traffic", "dualpath", "dualpath/netcost", "lab/testnode", "lab/testplanner"}, "the tests run a planner, a storage node and leaders in their process"},
	{"client/planners", []string{"lab/testplanner"}, "the tests elect planners in their process"},
	{"server", []string{"lab/testetcd"}, "the tests replace the roles document in etcd"},
	{"server/planner", []string{"client", "lab/testplanner"}, "the tests elect a planner in their process"},
	{"client/relay", []string{"lab/testnode"}, "the tests copy between two storage nodes in their process"},
	{"client/leader", []string{"dualpath", "lab/testplanner"}, "the tests run a planner in their process"},
	{"client/traffic", []string{"rdma/group", "rdma/shm", "rdma/rdmatest/simrdma"}, "copies by a NIC are tested over a provider whose NIC is a goroutine, and waiting in virtual time over a simulated one"},
	{"server/front", []string{"api/...", "client/leader", "client/traffic", "dualpath", "server/planner", "lab/testnode", "lab/testplanner"}, "the tests run a planner, a storage node and leaders in their process"},
	{"server/console", []string{"kv", "client", "server/access", "lab/testetcd", "lab/testnode"}, "the tests show a storage node in their process to a browser; members of a cluster have etcd"},
	{"server/membership", []string{"lab/testetcd", "lab/testnode"}, "the tests run storage nodes in their process, and etcd beside it"},
	{"server/move", []string{"api/penstockv1", "lab/testetcd", "lab/testnode"}, "the tests copy between storage nodes in their process, and etcd is beside the members of a cluster, of which one is drained by a call"},
	{"server/offload", []string{"api/...", "dualpath", "server/planner", "lab/content", "lab/testnode", "lab/testplanner"}, "the tests run a planner and the storage nodes of two datacenters in their process"},
	{"io/usrbio", []string{"io/usrbio/usrbiotest"}, "the tests load a library of their own in the place of 3FS's"},
	{"rdma/group", []string{"rdma/rdmatest/simrdma"}, "the engine is tested on NICs whose failures follow a seed"},
	{"rdma/verbs", []string{"rdma/rdmatest/simrdma"}, "a simulated card declares the properties of a card"},
	{"rdma/fabric", []string{"rdma/rdmatest/simrdma"}, "a simulated EFA declares the properties of EFA"},
	{"rdma/copier", []string{"rdma/copier/copiertest", "rdma/group", "rdma/shm", "rdma/verbs"}, "copies over a NIC are tested over each that has a loopback"},
	{"rdma/topo", []string{"rdma/topo/topotest"}, "hosts that the tests don't run on"},
	{"dualpath/prfaas", []string{"kv", "trie", "trie/evict"}, "the tests compare its pools' reusable prefixes with the prefixes that the index of a storage node finds"},
	{"lab/cluster", []string{"lab/testnode", "lab/testplanner", "server/planner"}, "the tests run the nodes of a cluster in their process"},
	{"lab/replay", []string{"lab/testnode"}, "the tests replay on a node in their process"},
	{"lab/emulate", []string{"api/...", "lab/testnode", "lab/testplanner", "server/planner"}, "an emulated cluster is tested against real nodes in one process"},
	{"internal/zmtp", []string{"internal/zmtp/zmtptest"}, "the tests connect peers"},
	{"internal/kvevents", []string{"client", "lab/testnode", "server/access", "internal/zmtp/zmtptest"}, "the tests compare published blocks with the blocks of real nodes, and remove a principal of one"},
	{"lab/scale", []string{"kv", "api/...", "client", "internal/placement", "lab/testetcd", "lab/testnode", "rdma/tcp", "server/membership", "server/storage"}, "its tests run a storage node, a client and a thousand memberships in one process, and etcd beside it"},
	{"lab/hot", []string{"kv", "api/...", "client", "rdma/tcp", "lab/bench", "lab/content", "lab/netlab"}, "its test compares clusters by turns, in network namespaces, and checks the bytes that clients read"},
	{"lab/rounds", []string{"kv", "api/...", "client", "client/gateway", "client/leader", "client/planners", "client/traffic", "rdma/tcp", "internal/chart", "lab/content", "lab/testetcd"}, "its tests compare the bytes that clients of whole nodes read, send requests to planners, and draw the hit rates"},
	{"lab/crash", []string{"kv", "api/...", "client", "blockstore", "server/storage", "lab/testnode"}, "its tests use the node as its users do; the states of hundreds of power cuts are opened in one process"},
	{"internal/trace", []string{"trie/evict"}, "policies are compared on traces"},
}

// forbidden lists edges that must not exist even indirectly.
var forbidden = []struct {
	from []string
	to   []string
	why  string
}{
	{[]string{"kv", "io/blockio", "rdma"}, []string{"trie/...", "blockstore/...", "server/...", "client/...", "api/...", "cmd/..."}, "contracts and types of the domain are the bottom of the tree"},
	{[]string{"trie/..."}, []string{"io/...", "blockstore/...", "rdma/..."}, "trie uses no block device: an index that reads data would need locks across both"},
	{[]string{"blockstore/..."}, []string{"trie/...", "rdma/..."}, "blockstore has no prefixes: it must be able to rebuild an index from data alone"},
	{[]string{"blockstore/...", "server/...", "client/...", "trie/..."}, []string{"io/uring", "io/posixio", "io/usrbio", "io/memio", "io/faultio"}, "concrete devices are chosen in cmd, by probing"},
	{[]string{"server/...", "client", "client/traffic", "client/leader", "client/gateway", "client/capi/binding"}, []string{"rdma/tcp", "rdma/verbs", "rdma/fabric", "rdma/shm"}, "only cmd and capi choose providers"},
	{[]string{"client/..."}, []string{"server/..."}, "a client must not link the server into an engine's process"},
	{[]string{"server", "server/config", "server/handoff", "server/metrics", "server/netoracle", "server/planner", "server/storage"}, []string{"client/...", "server/front"}, "a storage node and a planner are servers and no clients; server/front is a client of both"},
	{[]string{"server/..."}, []string{"dualpath/redistribute/..."}, "docs/reproduction.md states that no server imports them: change that text (lab/reproduce) with this row"},
	{[]string{"api/..."}, []string{"server/...", "client/...", "trie/...", "blockstore/...", "rdma/..."}, "both sides of the wire import the API"},
	{[]string{"kv", "trie/...", "blockstore/...", "io/...", "rdma/...", "api/...", "server/...", "client/...", "dualpath/...", "sim/...", "internal/...", "examples/...", "python/..."}, []string{"lab/..."}, "packages of lab use the product; only cmd/penstock imports them"},
	{[]string{"kv", "trie/...", "blockstore/...", "io/blockio", "rdma", "server/...", "client/...", "api/..."}, []string{"internal/testkit", "io/blockiotest", "rdma/rdmatest/..."}, "test code stays out of the product"},
}

// rowFor returns the index of the longest pattern that matches, or -1.
func rowFor(path string) int {
	best := -1
	for i, e := range edges {
		if matches(path, []string{e.pkg}) && (best < 0 || len(strings.TrimSuffix(e.pkg, "/...")) > len(strings.TrimSuffix(edges[best].pkg, "/..."))) {
			best = i
		}
	}
	return best
}

// leaf reports whether every package may import pkg.
func leaf(pkg string) bool { return pkg == "internal/invariants" || pkg == "internal/options" }

func TestImports(t *testing.T) {
	for _, p := range load(t) {
		i := rowFor(p.path)
		if i < 0 {
			t.Errorf("package %s has no row in edges: add one, with the packages that it may import and the reason", p.path)
			continue
		}
		row := edges[i]
		for _, imp := range p.imports {
			to, ok := ours(imp)
			if !ok || to == p.path || leaf(to) || matches(to, row.may) {
				continue
			}
			t.Errorf("%s imports %s; it may import %s of ours\n\twhy: %s", p.path, to, list(row.may), row.why)
		}
	}
}

func TestTestImports(t *testing.T) {
	for _, p := range load(t) {
		i := rowFor(p.path)
		if i < 0 {
			continue // TestImports reports this
		}
		may := slices.Clone(edges[i].may)
		for _, e := range testEdges {
			if matches(p.path, []string{e.pkg}) {
				may = append(may, e.may...)
			}
		}
		for _, imp := range p.tests {
			to, ok := ours(imp)
			if !ok || to == p.path || leaf(to) || matches(to, may) {
				continue
			}
			t.Errorf("the tests of %s import %s; they may import %s of ours\n\twhy: %s", p.path, to, list(may), edges[i].why)
		}
	}
}

func TestForbiddenEdges(t *testing.T) {
	for _, p := range load(t) {
		for _, f := range forbidden {
			if !matches(p.path, f.from) {
				continue
			}
			for _, dep := range p.deps {
				if to, ok := ours(dep); ok && to != p.path && matches(to, f.to) {
					t.Errorf("%s depends on %s, directly or through its imports (go list -deps shows them)\n\twhy not: %s", p.path, to, f.why)
				}
			}
		}
	}
}

// decides lists the packages that decide in production and, with the same code, in a simulator.
var decides = []struct{ decides, production, simulator string }{
	{"dualpath", "server/planner", "sim/agentic"},
	{"dualpath/netcost", "cmd/penstock", "sim/netkv"},
	{"dualpath/prfaas", "cmd/penstock", "sim/datacenters"},
}

// TestOneDecider: the simulators run the code that decides in production.
func TestOneDecider(t *testing.T) {
	imports := make(map[string][]string)
	for _, p := range load(t) {
		imports[p.path] = p.imports
	}
	for _, d := range decides {
		for _, pkg := range []string{d.production, d.simulator} {
			if !slices.ContainsFunc(imports[pkg], func(imp string) bool { to, ok := ours(imp); return ok && to == d.decides }) {
				t.Errorf("%s does not import %s, the code of the decisions that %s and %s share", pkg, d.decides, d.production, d.simulator)
			}
		}
	}
}

// TestEdgesAgree: no row allows a forbidden edge.
func TestEdgesAgree(t *testing.T) {
	for _, e := range edges {
		from := strings.TrimSuffix(e.pkg, "/...")
		for _, f := range forbidden {
			if !matches(from, f.from) {
				continue
			}
			for _, m := range e.may {
				if matches(strings.TrimSuffix(m, "/..."), f.to) && !under(strings.TrimSuffix(m, "/..."), from) {
					t.Errorf("edges allows %s to import %s, which is forbidden: %s", e.pkg, m, f.why)
				}
			}
		}
		if e.why == "" {
			t.Errorf("edges: %s has no reason", e.pkg)
		}
	}
}

func TestMatches(t *testing.T) {
	for _, c := range []struct {
		path, pattern string
		want          bool
	}{
		{"trie", "trie", true}, {"trie/evict", "trie", false}, {"trie/evict", "trie/...", true},
		{"trie", "trie/...", true}, {"tries", "trie/...", false}, {"x", "...", true},
	} {
		if got := matches(c.path, []string{c.pattern}); got != c.want {
			t.Errorf("matches(%s, %s) = %v", c.path, c.pattern, got)
		}
	}
	if got := edges[rowFor("rdma/rdmatest")].pkg; got != "rdma/rdmatest" {
		t.Errorf("row of rdma/rdmatest is %s", got)
	}
	if got := edges[rowFor("rdma/tcp")].pkg; got != "rdma/..." {
		t.Errorf("row of rdma/tcp is %s", got)
	}
}

func list(may []string) string {
	if len(may) == 0 {
		return "nothing"
	}
	return strings.Join(may, ", ")
}
