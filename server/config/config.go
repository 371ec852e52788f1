package config

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/penstock-kv/penstock/kv"
)

// Config has all settings of a storage node. The tag yaml of a field is the setting's key, and the
// tag doc is the help text of its flag.
type Config struct {
	Data       []string `yaml:"data" doc:"directories of the volumes, one per disk; the index lives in the first of data and shared_data" restart:"volumes are added and removed by penstock volume, or at a start"`
	SharedData []string `yaml:"shared_data" doc:"directories of further volumes, on file systems that other hosts mount: a lease in etcd (cluster.etcd) and a fencing number decide which node owns them, instead of a file lock, so that another node can adopt them. For good: such a volume does not open in data (docs/shared-storage.md)" restart:"volumes are added and removed by penstock volume, or at a start"`
	// AddVolumes is needed only at the start that formats the new volumes. After that the
	// superblocks count these volumes.
	AddVolumes bool `yaml:"add_volumes" doc:"format the empty directories of data and shared_data, for disks that were added or that replace a lost one; otherwise an empty directory counts as a disk that is not mounted, and is refused" restart:"it has an effect only at a start"`
	Degraded   bool `yaml:"degraded" doc:"start although volumes are missing (a disk is not mounted, or does not respond), if at least half of them are present; blocks on the missing volumes are misses until these are back and the node is restarted. Otherwise the node does not start" restart:"it has an effect only at a start"`
	Capacity   Size `yaml:"capacity" doc:"hard cap on the bytes of all volumes and the index, e.g. 2TiB; 0 takes 90% of the space that is free or already used by this node, at each start" restart:"the store and the index are sized by it at the start"`

	Listen      string `yaml:"listen" doc:"address of the gRPC control plane" restart:"the listener is open"`
	DataListen  string `yaml:"data_listen" doc:"address of the data plane; with data_plane.nics only its port is used; with provider shm it is the path of a unix socket" restart:"the listener is open"`
	HTTP        string `yaml:"http" doc:"address of the web console, /metrics, /healthz, /readyz and /debug/pprof, without TLS; without a token too unless auth.roles_file is set; empty turns it off" restart:"the listener is open"`
	LocalSocket string `yaml:"local_socket" doc:"unix socket for engines of the same user on this host, e.g. /run/penstock/local.sock: they detect it, map the arena, copy blocks from the arena or read them in place, and write blocks in one call; empty turns it off. It is fastest with hugetlb" restart:"the listener is open"`
	Advertise   string `yaml:"advertise" doc:"host under which clients reach this node; empty means the one they dialled" restart:"clients have the node's address"`
	Node        string `yaml:"node" doc:"name of this node in status, metrics and logs; empty means the host name" restart:"metrics, spans and clients have the node's name"`

	IO          string   `yaml:"io" values:"auto uring posix usrbio" doc:"I/O backend of the volumes: uring, posix, usrbio (3FS's user-space I/O), or auto: usrbio on a mount of 3FS and uring elsewhere where they work, otherwise posix" restart:"the volumes are opened with it"`
	Arena       Size     `yaml:"arena" doc:"pinned memory that holds all bytes in flight" restart:"the arena is registered with devices and NICs"`
	HugeTLB     bool     `yaml:"hugetlb" doc:"take the arena from reserved huge pages (vm.nr_hugepages) when there are enough; otherwise transparent huge pages" restart:"the arena is registered with devices and NICs"`
	IndexCache  Size     `yaml:"index_cache" doc:"block cache of the index's Pebble store" restart:"the index is opened with it"`
	Segment     Size     `yaml:"segment" doc:"size of one preallocated segment file of a new volume; 0 is 1 GiB, or less where the capacity is small" restart:"the volumes are opened with it"`
	Prewrite    bool     `yaml:"prewrite" doc:"write zeroes into new segments ahead of need, so that first writes run at full speed" restart:"the volumes are opened with it"`
	FreeFloor   Size     `yaml:"free_floor" doc:"refuse writes while the file system has less free space than this" reload:"live"`
	Durability  string   `yaml:"durability" values:"async batch sync" doc:"when a write is acknowledged: async, batch (synced together each sync_interval) or sync" restart:"writers rely on the durability that the node reported to them"`
	SyncEvery   Duration `yaml:"sync_interval" doc:"longest time that durability batch leaves data and index unsynced" restart:"writers rely on the durability that the node reported to them"`
	Eviction    string   `yaml:"eviction" values:"s3fifo lru fifo" doc:"policy: s3fifo, lru or fifo" restart:"the index is opened with it"`
	ScrubRate   Size     `yaml:"scrub_rate" doc:"bytes per second that the background scrubber reads; 0 turns it off" reload:"live"`
	DrainWithin Duration `yaml:"drain_timeout" doc:"maximum wait of SIGTERM for requests in flight" reload:"live"`

	Encryption Encryption `yaml:"encryption"`

	DataPlane DataPlane `yaml:"data_plane" restart:"the transfer engine is opened with it"`
	Auth      Auth      `yaml:"auth"`
	Cluster   Cluster   `yaml:"cluster" restart:"the node has joined the cluster with it"`
	Limits    Limits    `yaml:"limits"`
	Log       Log       `yaml:"log"`
	Trace     Trace     `yaml:"trace" restart:"the exporter of spans is connected"`
	Insecure  bool      `yaml:"insecure" doc:"allow listening beyond loopback without a token or clients' certificates: anyone who reaches the port can read and overwrite the cache" reload:"live"`
}

// Encryption encrypts the blocks and the catalogue on the volumes. Without keys nothing is encrypted.
type Encryption struct {
	KeysFile    string   `yaml:"keys_file" doc:"file with the keys that encrypt the volumes (AES-256-GCM), one a line: an id, a space, 32 random bytes in base64. The last key encrypts new blocks; the others are needed as long as penstock status shows blocks of them. Without it, volumes that are encrypted are refused (docs/encryption.md)" reload:"live" toggle:"volumes are encrypted from a start on"`
	KeysCommand []string `yaml:"keys_command" doc:"command and arguments that print these keys, in place of encryption.keys_file; it runs at the start and at each reload, without a shell" reload:"live" toggle:"volumes are encrypted from a start on"`
	KeysTimeout Duration `yaml:"keys_timeout" doc:"longest run of encryption.keys_command" reload:"live"`
	// RewriteRate is 0, EpochKeys is false and PlainVolumes is empty without keys.
	RewriteRate  Size     `yaml:"rewrite_rate" doc:"bytes per second that each encrypted volume rewrites to give blocks that are plain or have an older key the newest key; 0: such blocks stay as they are until they are evicted or dropped" reload:"live"`
	EpochKeys    bool     `yaml:"epoch_keys" doc:"encrypt new blocks with a secret of their namespace's epoch too, which the node makes and keeps in the encrypted catalogue; when the epoch ends, the secret is erased, and the blocks cannot be decrypted any more, not even with the keys. Each bump then writes the catalogue more often (docs/encryption.md)" restart:"new blocks have these secrets, or not, from a start on"`
	PlainVolumes []string `yaml:"plain_volumes" doc:"directories of data and shared_data whose blocks are not encrypted; their catalogues are. A volume may be removed from the list later; a volume that is encrypted cannot be added" restart:"a volume encrypts its blocks, or not, from a start on"`
}

// Enabled reports whether keys are configured.
func (e Encryption) Enabled() bool { return e.KeysFile != "" || len(e.KeysCommand) > 0 }

func (e Encryption) check(bad complaint, dirs []string) {
	if len(e.PlainVolumes) > 0 && !e.Enabled() {
		bad("encryption.plain_volumes", "needs encryption.keys_file or encryption.keys_command: without keys no volume is encrypted")
	}
	switch {
	case e.RewriteRate < 0:
		bad("encryption.rewrite_rate", "must not be negative")
	case e.RewriteRate > 0 && !e.Enabled():
		bad("encryption.rewrite_rate", "needs encryption.keys_file or encryption.keys_command: without keys no block is encrypted")
	}
	if e.EpochKeys && !e.Enabled() {
		bad("encryption.epoch_keys", "needs encryption.keys_file or encryption.keys_command: without keys no block is encrypted")
	}
	for i, dir := range e.PlainVolumes {
		if !slices.Contains(dirs, dir) || slices.Contains(e.PlainVolumes[:i], dir) {
			bad("encryption.plain_volumes", "%q is not in data or shared_data, or is named twice", dir)
		}
	}
	if e.KeysFile != "" && len(e.KeysCommand) > 0 {
		bad("encryption.keys_file, encryption.keys_command", "give only one of them")
	}
	if len(e.KeysCommand) > 0 && e.KeysCommand[0] == "" {
		bad("encryption.keys_command", "the name of the program is empty")
	}
	if e.KeysTimeout <= 0 {
		bad("encryption.keys_timeout", "must be positive, is %v", e.KeysTimeout)
	}
}

// DataPlane selects and configures the transfer engine.
type DataPlane struct {
	Provider   string   `yaml:"provider" values:"auto tcp shm verbs fabric" doc:"transfer engine: tcp, shm (clients on this host), verbs (InfiniBand, RoCE), fabric (libfabric: EFA), or auto: verbs or fabric where this program was built with it and a NIC for it reaches storage, otherwise tcp. Clients need the same one"`
	NICs       []string `yaml:"nics" doc:"NICs of the data plane, each by its name or by one of its addresses; empty: tcp listens on data_listen, verbs and fabric use all NICs that reach storage (penstock nic list). tcp binds its sockets to the named NICs, so clients on this host cannot reach the node over them"`
	QoS        string   `yaml:"qos" doc:"marks of the traffic classes: off, default (the marks of deploy/qos), or a list, e.g. kv=sl:2,dscp:8,prio:1 collective=sl:0,dscp:26,prio:3"`
	Libfabric  string   `yaml:"libfabric" doc:"libfabric's provider, for provider fabric: auto (efa if there is such a NIC, otherwise tcp), or a name"`
	Congestion string   `yaml:"congestion" doc:"TCP congestion control of data connections; empty keeps the system's"`
	TLS        string   `yaml:"tls" values:"auto on off" doc:"encrypt the data plane with auth.tls_cert, and require clients' certificates if auth.client_ca is set: auto (if gRPC has TLS), on or off. Encryption takes about four times the CPU of plain text; use off only in an isolated network"`
	CutThrough Size     `yaml:"cut_through" doc:"minimum size of a block that is sent while the end of the block is still being read from the disk; 0 sends each block after it was read"`
}

// Encrypted reports whether the data plane's connections are encrypted. With a certificate they are
// by default, because a node with a certificate should not send KV in plain text.
func (c *Config) Encrypted() bool { return c.Auth.TLSCert != "" && c.DataPlane.TLS != "off" }

// Auth protects the control plane, over which the data plane's token is sent.
type Auth struct {
	TokenFile string `yaml:"token_file" doc:"file with the bearer tokens, one a line, one of which every call must carry; every caller may do everything" reload:"live"`
	RolesFile string `yaml:"roles_file" doc:"file with the principals, by the SHA-256 of their bearer tokens or the subjects of their certificates, and their roles on namespaces (docs/access.md); replaces auth.token_file" reload:"live"`
	RolesEtcd string `yaml:"roles_etcd" doc:"key in etcd (cluster.etcd) that has the content of a roles file, e.g. /penstock/roles: all nodes and planners with the same key follow it (penstock cluster roles); it replaces auth.roles_file. Without a valid document every call is refused, and when etcd has not answered for cluster.lease_ttl, every call but those that show the state of the process" restart:"the process follows the key from its start"`
	TLSCert   string `yaml:"tls_cert" doc:"certificate (PEM) of the listener and, unless data_plane.tls is off, of the data plane" reload:"live" toggle:"a listener that is open cannot change between plain text and TLS"`
	TLSKey    string `yaml:"tls_key" doc:"private key (PEM) of auth.tls_cert" reload:"live" toggle:"a listener that is open cannot change between plain text and TLS"`
	ClientCA  string `yaml:"client_ca" doc:"CA (PEM) that client certificates must be signed by: mutual TLS" reload:"live"`
}

// Cluster makes the node a member of a cluster by etcd (package membership).
type Cluster struct {
	Etcd         []string `yaml:"etcd" doc:"addresses of etcd's members, host:port: the nodes with the same etcd and prefix are a cluster, which has its namespaces and epochs in common; empty: the node stands alone"`
	Prefix       string   `yaml:"prefix" doc:"beginning of the cluster's keys in etcd"`
	Zone         string   `yaml:"zone" doc:"failure domain of the node, such as a rack, as the list of members shows it"`
	LeaseTTL     Duration `yaml:"lease_ttl" doc:"time after which a node that has vanished leaves the list of members, in whole seconds; a node that cannot reach etcd for nine tenths of it serves nothing until it can"`
	Adopt        bool     `yaml:"adopt" doc:"take over the shared volumes of a node that has died or stopped, if they are mounted here, and give them back when the node waits for them"`
	Mounts       []string `yaml:"mounts" doc:"mount points of shared file systems on this host, each as NAME=DIRECTORY, e.g. pool-a=/mnt/x. The cluster records a directory of shared_data below a mount point by NAME and the path below it, so that the mount point may differ on each host; other directories are recorded by their paths"`
	AdoptArena   Size     `yaml:"adopt_arena" doc:"arena of each adopted node, in addition to arena"`
	CA           string   `yaml:"ca" doc:"CA (PEM) that etcd's certificate must be signed by; empty: plain text, unless cluster.cert is set"`
	Cert         string   `yaml:"cert" doc:"client certificate (PEM) for etcd"`
	Key          string   `yaml:"key" doc:"private key (PEM) of cluster.cert"`
	User         string   `yaml:"user" doc:"user of etcd; empty: no authentication"`
	PasswordFile string   `yaml:"password_file" doc:"file with the password of cluster.user"`

	MoveRate      Size     `yaml:"move_rate" doc:"maximum rate, in bytes per second, at which a draining node copies its blocks to other nodes, unless the order to drain has one"`
	HotMatches    int      `yaml:"hot_matches" doc:"matches per second that make the prefix they find hot: its blocks are copied to hot_copies further nodes, at most at move_rate, and clients read them from the least loaded node; 0: no prefix is copied"`
	HotCopies     int      `yaml:"hot_copies" doc:"number of nodes with copies of a hot prefix, in addition to the replicas of its namespace; a prefix is on at most 4 nodes"`
	HotFor        Duration `yaml:"hot_for" doc:"time for which a hot prefix keeps its copies after the last second with hot_matches matches; then they are the first blocks that their nodes evict"`
	PeerTokenFile string   `yaml:"peer_token_file" doc:"file with the bearer token that a draining node sends to the other nodes; with auth.roles_file its principal needs read and write on \"*\"; empty: the first token of auth.token_file"`
	PeerCA        string   `yaml:"peer_ca" doc:"CA (PEM) that the certificates of the other nodes are signed by; empty: the CAs of the system. It has a meaning only with auth.tls_cert, which is also the client certificate of a draining node"`
}

// check reports invalid settings. addr is the address at which clients reach the control plane.
func (c Cluster) check(bad complaint, addr string) {
	if len(c.Etcd) == 0 {
		return
	}
	c.checkEtcd(bad)
	c.checkMounts(bad)
	if c.MoveRate < 1 {
		bad("cluster.move_rate", "%v must be positive", c.MoveRate)
	}
	switch {
	case c.HotMatches < 0:
		bad("cluster.hot_matches", "%d must not be negative", c.HotMatches)
	case c.HotCopies < 1 || c.HotCopies >= kv.MaxReplicas:
		bad("cluster.hot_copies", "%d must be between 1 and %d", c.HotCopies, kv.MaxReplicas-1)
	case c.HotFor.Std() < time.Second:
		bad("cluster.hot_for", "%v must be at least 1s", c.HotFor)
	}
	host, _, err := net.SplitHostPort(addr)
	if ip := net.ParseIP(host); err != nil || host == "" || ip != nil && ip.IsUnspecified() {
		bad("advertise", "a member of a cluster needs the host under which clients reach it, since listen is %s", addr)
	}
}

// Dirs returns the directories of all volumes: the local ones, then the shared ones.
func (c *Config) Dirs() []string { return slices.Concat(c.Data, c.SharedData) }

// checkEtcd reports invalid settings of the connection to etcd and of the lease.
func (c Cluster) checkEtcd(bad complaint) {
	for i, e := range c.Etcd {
		if _, _, err := net.SplitHostPort(e); err != nil || slices.Contains(c.Etcd[:i], e) {
			bad("cluster.etcd", "%q is not host:port, or is named twice", e)
		}
	}
	if !strings.HasPrefix(c.Prefix, "/") || strings.HasSuffix(c.Prefix, "/") {
		bad("cluster.prefix", "%q must begin with a slash and not end with one", c.Prefix)
	}
	if ttl := c.LeaseTTL.Std(); ttl < 2*time.Second || ttl%time.Second != 0 {
		bad("cluster.lease_ttl", "%v; give whole seconds, at least 2s", c.LeaseTTL)
	}
	if (c.Cert == "") != (c.Key == "") {
		bad("cluster.cert, cluster.key", "need each other")
	}
	if (c.User == "") != (c.PasswordFile == "") {
		bad("cluster.user, cluster.password_file", "need each other")
	}
}

// ControlAddr returns the address at which clients reach the control plane.
func (c *Config) ControlAddr() string {
	if c.Advertise == "" {
		return c.Listen
	}
	_, port, err := net.SplitHostPort(c.Listen)
	if err != nil {
		return c.Listen // checkAddresses reports it
	}
	return net.JoinHostPort(c.Advertise, port)
}

// DataAddr returns the address at which clients reach the data plane, "" if Advertise is empty or
// DataListen has no port.
func (c *Config) DataAddr() string {
	_, port, err := net.SplitHostPort(c.DataListen)
	if c.Advertise == "" || err != nil {
		return ""
	}
	return net.JoinHostPort(c.Advertise, port)
}

// Limits bounds every queue. The doc tag of each field states the behaviour when the queue is full.
type Limits struct {
	Reads        int      `yaml:"reads" doc:"concurrent Read calls for each volume; further calls wait in a queue of the same length, and calls beyond that get Busy" reload:"live"`
	Writes       int      `yaml:"writes" doc:"maximum number of open reservations; further ones get Busy" reload:"live"`
	ReadBytes    Size     `yaml:"read_bytes" doc:"maximum payload of one Read call; 0 means 64 MiB, or a quarter of the arena if that is less" restart:"clients have this limit from the node since they connected, and send calls up to it"`
	WriteBytes   Size     `yaml:"write_bytes" doc:"maximum payload of one Reserve call; 0 as for read_bytes" restart:"clients have this limit from the node since they connected, and send calls up to it"`
	Leases       int      `yaml:"leases" doc:"maximum number of open leases; further leases are denied, and the match is not leased" reload:"live"`
	LeaseTTL     Duration `yaml:"lease_ttl" doc:"longest lease; longer ones are shortened to this" reload:"live"`
	ChainBlocks  int      `yaml:"chain_blocks" doc:"maximum number of blocks in one chain; longer chains are refused" restart:"clients have this limit from the node since they connected, and send calls up to it"`
	Reservation  Duration `yaml:"reservation_ttl" doc:"time for which a reservation stays open without Commit" reload:"live"`
	EventHistory int      `yaml:"event_history" doc:"events kept for consumers that reconnect; a consumer that needs older ones gets a gap" restart:"the log of events has this size"`
	LoanBytes    Size     `yaml:"loan_bytes" doc:"maximum arena memory on loan to engines on this host; further reads get Busy; 0 is a quarter of the arena" reload:"live"`
	StagingBytes Size     `yaml:"staging_bytes" doc:"memory, in addition to the arena, for the bytes that engines on this host write; an engine for which too little is left writes over the data plane; 0 is a quarter of the arena" restart:"engines on this host have mapped the memory"`
	QueueWait    Duration `yaml:"queue_wait" doc:"longest wait for memory before Busy" reload:"live"`
	ReadWait     Duration `yaml:"read_wait" doc:"longest wait of a Read call for a volume; blocks that the volume has not read by then are misses" reload:"live"`
	HungAfter    Duration `yaml:"hung_after" doc:"time after which a request to a volume, or to the drive of the index, counts as hung: the volume fails, or the index refuses changes, until the device works again; at least 1s, and longer than any pause of a shared file system, e.g. a failover" restart:"volumes and index are opened with it"`
}

// Log has the settings of the log on standard error.
type Log struct {
	Level  string `yaml:"level" values:"debug info warn error" doc:"debug, info, warn or error" reload:"live"`
	Format string `yaml:"format" values:"text json" doc:"text or json" restart:"a log in two formats cannot be parsed"`
}

// Trace has the settings for OpenTelemetry spans.
type Trace struct {
	Endpoint string `yaml:"endpoint" doc:"host:port of an OTLP/gRPC collector; empty turns spans off"`
}

// Default returns the configuration of a node without any settings.
func Default() Config {
	return Config{
		Listen:      "127.0.0.1:7420",
		DataListen:  "127.0.0.1:7421",
		HTTP:        "127.0.0.1:7422",
		IO:          "auto",
		Arena:       256 << 20,
		IndexCache:  64 << 20,
		Prewrite:    true,
		FreeFloor:   1 << 30,
		Durability:  "batch",
		SyncEvery:   Duration(time.Second),
		Eviction:    "s3fifo",
		ScrubRate:   16 << 20,
		DrainWithin: Duration(15 * time.Second),
		Encryption:  Encryption{KeysTimeout: Duration(30 * time.Second)},
		DataPlane:   DataPlane{Provider: "tcp", QoS: "off", Libfabric: "auto", Congestion: "cubic", TLS: "auto", CutThrough: 8 << 20},
		Limits: Limits{
			Reads:        256,
			Writes:       256,
			Leases:       100_000,
			LeaseTTL:     Duration(10 * time.Minute),
			ChainBlocks:  131072,
			Reservation:  Duration(30 * time.Second),
			EventHistory: 65536,
			QueueWait:    Duration(2 * time.Second),
			ReadWait:     Duration(5 * time.Second),
			HungAfter:    Duration(10 * time.Second),
		},
		Cluster: Cluster{Prefix: "/penstock", LeaseTTL: Duration(10 * time.Second), AdoptArena: 128 << 20, MoveRate: 256 << 20, HotCopies: 1, HotFor: Duration(time.Minute)},
		Log:     Log{Level: "info", Format: "text"},
	}
}

// callBytesMax is the default payload of one call.
const callBytesMax = 64 << 20

// EnsureDefaults fills the keys that are 0 and whose defaults depend on other keys.
func (c *Config) EnsureDefaults() {
	for _, v := range []*Size{&c.Limits.ReadBytes, &c.Limits.WriteBytes} {
		if *v == 0 {
			*v = defaultCallBytes(c.Arena)
		}
	}
}

// defaultCallBytes returns the default payload of one call.
func defaultCallBytes(arena Size) Size { return min(callBytesMax, arena/4) }

// Validate reports all errors in c, joined into one error, or nil.
func (c *Config) Validate() error {
	var errs []error
	bad := complaintsTo(&errs)
	bad.texts(c)
	oneOf := bad.oneOf
	dirs := c.Dirs()
	if len(dirs) == 0 {
		bad("data", "name at least one directory (--data DIR)")
	}
	for i, d := range dirs {
		if d == "" || slices.Contains(dirs[:i], d) {
			bad("data, shared_data", "directory %q is empty or named twice", d)
		}
	}
	addrs := map[string]string{"listen": c.Listen, "http": c.HTTP}
	if c.DataPlane.Provider != ProviderSHM {
		addrs["data_listen"] = c.DataListen
	}
	checkAddresses(bad, addrs)
	c.checkDataPlane(bad)
	oneOf("io", c.IO, "auto", "uring", "posix", "usrbio")
	oneOf("durability", c.Durability, "async", "batch", "sync")
	oneOf("eviction", c.Eviction, "s3fifo", "lru", "fifo")
	c.Log.check(bad)
	within := func(key string, v, lo, hi Size) {
		if v < lo || v > hi {
			bad(key, "%v is outside %v to %v", v, lo, hi)
		}
	}
	within("arena", c.Arena, 8<<20, 1<<40)
	within("index_cache", c.IndexCache, 1<<20, 1<<40)
	if c.Segment != 0 {
		within("segment", c.Segment, 1<<20, 64<<30)
	}
	// A call that needs more than its share of the arena would wait forever, so one call may use at
	// most a quarter of the arena. The default value is not checked, because an arena that is too
	// small is reported separately.
	for key, v := range map[string]Size{"limits.read_bytes": c.Limits.ReadBytes, "limits.write_bytes": c.Limits.WriteBytes} {
		if v != 0 && v != defaultCallBytes(c.Arena) {
			within(key, v, 1<<16, c.Arena/4)
		}
	}
	within("limits.loan_bytes", c.Limits.LoanBytes, 0, c.Arena)
	within("limits.staging_bytes", c.Limits.StagingBytes, 0, c.Arena)
	checkSocket(bad, "local_socket", c.LocalSocket)
	if c.Capacity < 0 || c.FreeFloor < 0 || c.ScrubRate < 0 {
		bad("capacity, free_floor, scrub_rate", "must not be negative")
	}
	if c.Capacity > 0 && c.Capacity < 16<<20 {
		bad("capacity", "%v is less than the smallest useful store, 16 MiB", c.Capacity)
	}
	positive := func(key string, v int) {
		if v <= 0 {
			bad(key, "must be positive, is %d", v)
		}
	}
	lasting := func(key string, d Duration) {
		if d <= 0 {
			bad(key, "must be positive, is %v", d)
		}
	}
	if c.DrainWithin < 0 {
		bad("drain_timeout", "must not be negative, is %v", c.DrainWithin)
	}
	c.Trace.check(bad)
	lasting("sync_interval", c.SyncEvery)
	positive("limits.reads", c.Limits.Reads)
	positive("limits.writes", c.Limits.Writes)
	positive("limits.leases", c.Limits.Leases)
	if c.Limits.Leases > leasesMax {
		bad("limits.leases", "%d is more than %d", c.Limits.Leases, leasesMax)
	}
	lasting("limits.lease_ttl", c.Limits.LeaseTTL)
	positive("limits.chain_blocks", c.Limits.ChainBlocks)
	lasting("limits.reservation_ttl", c.Limits.Reservation)
	positive("limits.event_history", c.Limits.EventHistory)
	lasting("limits.queue_wait", c.Limits.QueueWait)
	lasting("limits.read_wait", c.Limits.ReadWait)
	if c.Limits.HungAfter < Duration(time.Second) {
		bad("limits.hung_after", "%v is less than 1s: a volume that is only busy would fail", c.Limits.HungAfter)
	}
	c.Cluster.check(bad, c.ControlAddr())
	if len(c.Cluster.Etcd) == 0 && len(c.SharedData) > 0 {
		bad("shared_data", "needs cluster.etcd: without etcd no node can find out whether another node owns the volumes")
	}
	if len(c.Cluster.Etcd) == 0 && c.Cluster.Adopt {
		bad("cluster.adopt", "needs cluster.etcd, which has the shared volumes of the cluster")
	}
	within("cluster.adopt_arena", c.Cluster.AdoptArena, 8<<20, 1<<40)
	c.Auth.check(bad)
	c.Encryption.check(bad, c.Dirs())
	c.Auth.checkRolesEtcd(bad, c.Cluster)
	if !c.Insecure {
		c.Auth.checkExposure(bad, c.exposed())
	}
	return errors.Join(errs...)
}

// leasesMax is the limit of the index (trie.MaxLeasesLimit).
const leasesMax = 1 << 24

// ProviderSHM is the data plane between processes of one host. Its data_listen is a path.
const ProviderSHM = "shm"

// checkDataPlane reports settings of the data plane that are impossible, alone or in combination.
// Settings that depend on the host are checked at the start.
func (c *Config) checkDataPlane(bad complaint) {
	p := &c.DataPlane
	bad.oneOf("data_plane.provider", p.Provider, "auto", "tcp", ProviderSHM, "verbs", "fabric")
	bad.oneOf("data_plane.tls", p.TLS, "auto", "on", "off")
	if p.TLS == "on" && c.Auth.TLSCert == "" {
		bad("data_plane.tls", "on needs auth.tls_cert and auth.tls_key")
	}
	for i, n := range p.NICs {
		if n == "" || slices.Contains(p.NICs[:i], n) {
			bad("data_plane.nics", "NIC %q is empty or named twice", n)
		}
	}
	if len(p.NICs) > 0 && (p.Provider == "auto" || p.Provider == ProviderSHM) {
		bad("data_plane.nics", "%v can't be given with provider %s: say which provider they are for (tcp, verbs or fabric)", p.NICs, p.Provider)
	}
	if len(p.NICs) > 0 && c.Advertise != "" {
		bad("advertise", "%q can't be given with data_plane.nics, each of which clients reach by its own address", c.Advertise)
	}
	if addr := c.DataAddr(); c.Advertise != "" && (addr == "" && p.Provider == ProviderSHM || strings.HasSuffix(addr, ":0")) {
		bad("advertise", "%q needs a data_listen with a fixed port, not %s", c.Advertise, c.DataListen)
	}
	if p.Provider != ProviderSHM {
		return
	}
	if !strings.HasPrefix(c.DataListen, "/") {
		bad("data_listen", "%q: with data_plane.provider shm it is the absolute path of a unix socket, e.g. /run/penstock/data.sock", c.DataListen)
	}
	checkSocket(bad, "data_listen", c.DataListen)
	if p.QoS != "off" {
		bad("data_plane.qos", "%q with data_plane.provider shm, which has no wire: leave it off", p.QoS)
	}
}

// exposed returns the addresses, by setting, that other machines may be able to reach. It leaves
// out the path of a socket file, which the file system protects. It includes NICs of the provider
// tcp, which are configured to be reached from other machines. It leaves out RDMA NICs, because
// only peers that connected through data_listen can write to them.
func (c *Config) exposed() map[string]string {
	all := map[string]string{"listen": c.Listen}
	switch {
	case c.DataPlane.Provider == ProviderSHM:
	case c.DataPlane.Provider == "tcp" && len(c.DataPlane.NICs) > 0:
		for i, n := range c.DataPlane.NICs {
			all[fmt.Sprintf("data_plane.nics[%d]", i)] = net.JoinHostPort(n, "0")
		}
	default:
		all["data_listen"] = c.DataListen
	}
	return all
}

// checkSocket reports a path that is too long for a unix socket.
func checkSocket(bad complaint, key, path string) {
	if len(path) > maxSocketPath {
		bad(key, "%q has %d characters; a unix socket's path has at most %d", path, len(path), maxSocketPath)
	}
}

// maxSocketPath is the length of sun_path in sockaddr_un, without the final zero.
const maxSocketPath = 107
