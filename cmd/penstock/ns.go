package main

import (
	"context"
	"encoding/hex"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/config"
)

func newNamespaceCommand(w world) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "ns",
		Aliases: []string{"namespace", "namespaces"},
		Short:   "Create, show and delete namespaces, and bump their weight epochs",
		Long: `A namespace is one model's KV cache under one geometry: layers, tokens in a block,
bytes per token and layer. Its epoch is the version of the model's weights. A bump begins
a new epoch and makes every block of the old weights unmatchable at once, unless --keep
keeps older epochs live. A block of one epoch is never served as one of another.`,
	}
	c := addConnectionFlags(cmd, w)
	return noun(cmd, newNamespaceCreate(c), newNamespaceList(c), newNamespaceShow(c), newNamespaceDelete(c), newNamespaceBump(c), newNamespaceRetire(c), newNamespacePin(c), newNamespaceQuota(c), newNamespaceReplicas(c), newNamespaceTenants(c), newNamespaceTop(c, w))
}

// geometryFlags are the flags of ns create.
type geometryFlags struct {
	layers, blockTokens, tokenBytes int
	groups                          []string
	dtype, layout, index            string
	tenant, salt, saltFile          string
	noSalt                          bool
	quota                           int64
	replicas                        int
}

func newNamespaceCreate(c *connection) *cobra.Command {
	var g geometryFlags
	cmd := &cobra.Command{
		Use:   "create NAME --layers N --block-tokens N --token-bytes N",
		Short: "Create a namespace; the same definition twice is no error",
		Long: `Create a namespace. A model with full attention only has one layer group, given by
--layers and --token-bytes (bytes per token and layer, K and V together). A hybrid
model has several, each given by --group:

  full:LAYERS:BYTES             bytes per token and layer
  window:LAYERS:BYTES:TOKENS    sliding window of TOKENS tokens
  state:LAYERS:BYTES            recurrent state, bytes per layer

The full group, if there is one, comes first.

A tenant's new namespace gets a random salt unless a salt or --no-salt is given. A tenant
is a principal of the node's roles that has the role admin on some namespaces only. Nodes
without etcd would each make a salt of their own: give all of them the same --salt-file,
or let an engine create the namespace.

Give all nodes of a cluster without etcd to --server, with commas between: the namespace then
has the same salt and the same first epoch on all. A node on which the name was deleted
before begins at a later epoch than the others, and clients use only the newest epoch.`,
		Example: `  penstock ns create llama-3/70b --layers 80 --block-tokens 64 --token-bytes 4096 --dtype bf16
  penstock ns create hybrid --block-tokens 64 --group full:12:1024 --group state:36:524288
  penstock ns create chat --layers 32 --block-tokens 64 --token-bytes 4096 --server n1:7420,n2:7420
  penstock ns create lmcache --layers 32 --block-tokens 256 --token-bytes 4096 --index flat`,
		Args: args(cobra.ExactArgs(1)),
	}
	f := cmd.Flags()
	f.IntVar(&g.layers, "layers", 0, "layers of the one full-attention group")
	f.IntVar(&g.tokenBytes, "token-bytes", 0, "bytes per token and layer of the geometry")
	f.IntVar(&g.blockTokens, "block-tokens", 0, "tokens in a block")
	f.StringArrayVar(&g.groups, "group", nil, "a layer group of a hybrid model, instead of --layers and --token-bytes (repeatable)")
	f.StringVar(&g.dtype, "dtype", "", "tag of the element type, part of the geometry's identity")
	f.StringVar(&g.layout, "layout", "", "tag of the parallel layout, part of the geometry's identity")
	f.StringVar(&g.index, "index", "trie", "trie: chained blocks; flat: opaque keys without parents")
	f.StringVar(&g.tenant, "tenant", "", "tenant of the cache; part of every block id")
	f.StringVar(&g.salt, "salt", "", "secret that is part of every block id, as text or as hex:DIGITS. Other users of this machine can see the flag: prefer --salt-file")
	f.StringVar(&g.saltFile, "salt-file", "", "file with the secret of --salt; a line end after it does not count")
	f.BoolVar(&g.noSalt, "no-salt", false, "the namespace has no salt, also if its creator is a tenant")
	cmd.MarkFlagsMutuallyExclusive("salt", "salt-file", "no-salt")
	f.Var(sizeFlag{&g.quota}, "quota", "cap on the storage of this namespace, e.g. 500GiB; 0: none")
	f.IntVar(&g.replicas, "replicas", 1, "nodes of a cluster that store each sequence; clients need --discover or its equivalent for more than one")
	annotate(cmd, "replicas", ownRange)      // kv.Namespace.Validate checks it
	_ = cmd.MarkFlagRequired("block-tokens") // the flag was defined above
	for _, name := range []string{"layers", "token-bytes", "block-tokens"} {
		annotate(cmd, name, ownRange) // kv.Geometry.Validate checks them
	}
	completeValues(cmd, "index", "trie", "flat")
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		def, err := g.namespace(names[0])
		if err != nil {
			return err
		}
		made := func(ns *pb.Namespace) error {
			// The node cannot distinguish --quota 0 from no flag.
			if cmd.Flags().Changed("quota") && ns.GetQuotaBytes() != g.quota {
				return fmt.Errorf("namespace %q already exists with a quota of %s; to remove the quota: penstock ns quota %s 0", ns.GetName(), size(ns.GetQuotaBytes()), ns.GetName())
			}
			if cmd.Flags().Changed("replicas") && int(ns.GetReplicas()) != def.Replicas {
				return fmt.Errorf("namespace %q already exists with %d replicas; to change that: penstock ns replicas %s %d", ns.GetName(), max(1, ns.GetReplicas()), ns.GetName(), g.replicas)
			}
			return emitNamespace(cmd, ns)
		}
		if len(c.list()) > 1 {
			if g.noSalt {
				return usagef("--no-salt with several addresses in --server: give one address, or a salt")
			}
			return c.createOnAll(cmd, def, made)
		}
		return c.admin(cmd, func(ctx context.Context, a admin) error {
			ns, err := a.CreateNamespace(ctx, &pb.CreateNamespaceRequest{Namespace: api.NamespaceProto(def), Salting: g.salting()})
			if err != nil {
				return err
			}
			return made(ns)
		})
	}
	return cmd
}

// createOnAll creates a namespace on several nodes without etcd, with the same salt and the same first epoch, and calls made. It
// fails if a node does not have the namespace then, or has it at another epoch.
func (c *connection) createOnAll(cmd *cobra.Command, def kv.Namespace, made func(*pb.Namespace) error) error {
	return c.data(cmd, func(ctx context.Context, s *client.Store) error {
		if _, err := s.EnsureNamespace(ctx, def); err != nil {
			return err
		}
		var newest *pb.Namespace
		all := make([]*pb.Namespace, len(c.list()))
		for i, target := range c.list() {
			conn, err := c.dial(target)
			if err != nil {
				return err
			}
			all[i], err = pb.NewAdminClient(conn).GetNamespace(ctx, &pb.GetNamespaceRequest{Name: def.Name})
			_ = conn.Close() // it was only read
			if err != nil {
				return fmt.Errorf("namespace %q is not on all nodes; repeat the command when %s answers: %w", def.Name, target, err)
			}
			if newest == nil || all[i].GetEpoch() > newest.GetEpoch() {
				newest = all[i]
			}
		}
		var differ, remedy []string
		for i, target := range c.list() {
			if epoch := all[i].GetEpoch(); epoch < newest.GetEpoch() {
				differ = append(differ, fmt.Sprintf("%d on %s", epoch, target))
				remedy = append(remedy, fmt.Sprintf("penstock --server %s ns bump-epoch %s --to %d", target, def.Name, newest.GetEpoch()))
			}
		}
		if len(differ) > 0 {
			return fmt.Errorf("namespace %q is at epoch %d, and at epoch %s: clients use the newest epoch, whose blocks these nodes neither store nor find. To end their older epochs: %s",
				def.Name, newest.GetEpoch(), strings.Join(differ, ", "), strings.Join(remedy, "; "))
		}
		return made(newest)
	})
}

// salting returns the rule for a definition without a salt.
func (g *geometryFlags) salting() pb.Salting {
	if g.noSalt {
		return pb.Salting_SALTING_NONE
	}
	return pb.Salting_SALTING_RANDOM
}

// namespace makes the definition of the namespace from the flags and checks it. No node is
// contacted.
func (g *geometryFlags) namespace(name string) (kv.Namespace, error) {
	index, err := kv.ParseIndexKind(g.index)
	if err != nil {
		return kv.Namespace{}, usagef("--index: %w", err)
	}
	flag, text := "--salt", g.salt
	if g.saltFile != "" {
		b, err := os.ReadFile(g.saltFile)
		if err != nil {
			return kv.Namespace{}, fmt.Errorf("--salt-file: %w", err)
		}
		flag, text = "--salt-file", strings.TrimRight(string(b), "\r\n")
		if text == "" {
			return kv.Namespace{}, usagef("--salt-file %s: the file is empty", g.saltFile)
		}
	}
	salt, err := parseSalt(flag, text)
	if err != nil {
		return kv.Namespace{}, err
	}
	ns := kv.Namespace{
		Name: name, Tenant: g.tenant, Salt: salt, Index: index, QuotaBytes: g.quota, Replicas: replicasOf(g.replicas),
		Geometry: kv.Geometry{BlockTokens: g.blockTokens, DType: g.dtype, Layout: g.layout},
	}
	switch {
	case len(g.groups) == 0:
		ns.Geometry.Groups = []kv.Group{{Kind: kv.Full, Layers: g.layers, TokenBytes: g.tokenBytes}}
	case g.layers != 0 || g.tokenBytes != 0:
		return ns, usagef("give either --layers and --token-bytes, or --group for each layer group")
	}
	for _, text := range g.groups {
		group, err := parseGroup(text)
		if err != nil {
			return ns, err
		}
		ns.Geometry.Groups = append(ns.Geometry.Groups, group)
	}
	if err := ns.Validate(); err != nil {
		return ns, usageError{err}
	}
	return ns, nil
}

// parseSalt parses the salt of a flag. Its errors do not contain the salt.
func parseSalt(flag, text string) ([]byte, error) {
	digits, ok := strings.CutPrefix(text, "hex:")
	if !ok {
		return []byte(text), nil
	}
	if digits == "" {
		return nil, usagef("%s: there are no digits after hex:", flag)
	}
	salt, err := hex.DecodeString(digits)
	if err != nil {
		return nil, usagef("%s: the text after hex: must be pairs of hexadecimal digits", flag)
	}
	return salt, nil
}

// parseGroup parses kind:layers:bytes[:window].
func parseGroup(text string) (kv.Group, error) {
	bad := func(why string) (kv.Group, error) {
		return kv.Group{}, usagef("--group %q: %s; write full:LAYERS:BYTES, window:LAYERS:BYTES:TOKENS or state:LAYERS:BYTES", text, why)
	}
	parts := strings.Split(text, ":")
	kind, err := kv.ParseGroupKind(parts[0])
	if err != nil {
		return bad("unknown kind")
	}
	want := 3
	if kind == kv.Window {
		want = 4
	}
	if len(parts) != want {
		return bad(fmt.Sprintf("%d parts, want %d", len(parts), want))
	}
	numbers := make([]int, 3)
	for i, p := range parts[1:] {
		if numbers[i], err = strconv.Atoi(p); err != nil {
			return bad(fmt.Sprintf("%q is not a number", p))
		}
	}
	return kv.Group{Kind: kind, Layers: numbers[0], TokenBytes: numbers[1], WindowTokens: numbers[2]}, nil
}

// emitNamespace prints one namespace.
func emitNamespace(cmd *cobra.Command, ns *pb.Namespace) error {
	return outputOf(cmd).emit(ns, func(t *table) { printNamespace(t, ns) })
}

func printNamespace(t *table, ns *pb.Namespace) {
	t.pair("name", ns.GetName())
	t.pair("id", ns.GetId())
	t.pair("tenant", ns.GetTenant())
	t.pair("salt", saltWord(ns.GetSalt()))
	t.pair("index", enumWord(ns.GetIndex().Descriptor(), ns.GetIndex().Number()))
	t.pair("geometry", geometryWords(ns.GetGeometry()))
	t.pair("block", size(blockBytes(ns.GetGeometry())))
	t.pair("epoch", ns.GetEpoch())
	if ms := ns.GetEpochSinceUnixMs(); ms != 0 {
		t.pair("epoch since", time.UnixMilli(ms).UTC().Format("2006-01-02T15:04:05.000Z"))
	}
	t.pair("quota", quotaWord(ns.GetQuotaBytes()))
	if k := ns.GetReplicas(); k > 1 {
		t.pair("replicas", k)
	}
	t.pair("used", size(ns.GetUsedBytes()))
	t.pair("blocks", count(ns.GetBlocks()))
	t.pair("leases", count(ns.GetLeases()))
}

// printLive prints the contents of each live epoch. live is empty if the node does not list live
// epochs; the namespace then has only one.
func printLive(t *table, live []*pb.LiveEpoch) {
	if len(live) == 0 {
		return
	}
	t.row()
	t.row("EPOCH", "BLOCKS", "USED", "MATCHES", "HITS", "LEASES", "PINS", "LIVE")
	for i, e := range live {
		why := "kept by the bump"
		switch {
		case i == 0:
			why = "newest"
		case !e.GetKept():
			why = "until its pins end"
		}
		t.row(e.GetEpoch(), count(e.GetBlocks()), size(e.GetBytes()), count(e.GetMatches()), count(e.GetHits()), count(e.GetLeases()), count(e.GetPins()), why)
	}
}

// saltWord returns text that shows whether there is a salt, but not the salt itself, because
// operators paste tables into tickets.
func saltWord(salt []byte) string {
	if len(salt) == 0 {
		return ""
	}
	return fmt.Sprintf("%d bytes", len(salt))
}

func quotaWord(bytes int64) string {
	if bytes == 0 {
		return "none"
	}
	return size(bytes)
}

func geometryWords(m *pb.Geometry) string {
	g, err := api.Geometry(m)
	if err != nil {
		return err.Error()
	}
	tags := strings.Join(slices.DeleteFunc([]string{g.DType, g.Layout}, func(s string) bool { return s == "" }), ", ")
	if tags == "" {
		return g.String()
	}
	return g.String() + " " + tags
}

func blockBytes(m *pb.Geometry) int64 {
	g, err := api.Geometry(m)
	if err != nil {
		return 0
	}
	return g.BlockBytes()
}

func newNamespaceList(c *connection) *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "List the namespaces with their blocks and bytes",
		Args:  args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.admin(cmd, func(ctx context.Context, a admin) error {
				all, err := listNamespaces(ctx, a)
				if err != nil {
					return err
				}
				list := make([]any, len(all))
				for i, ns := range all {
					list[i] = plain(ns.ProtoReflect())
				}
				return outputOf(cmd).emit(map[string]any{"namespaces": list}, func(t *table) {
					t.row("NAME", "TENANT", "INDEX", "EPOCH", "BLOCKS", "USED", "QUOTA", "BLOCK", "GEOMETRY")
					for _, ns := range all {
						t.row(ns.GetName(), ns.GetTenant(), enumWord(ns.GetIndex().Descriptor(), ns.GetIndex().Number()), ns.GetEpoch(), count(ns.GetBlocks()),
							size(ns.GetUsedBytes()), quotaWord(ns.GetQuotaBytes()), size(blockBytes(ns.GetGeometry())), geometryWords(ns.GetGeometry()))
					}
				})
			})
		},
	}
}

func newNamespaceShow(c *connection) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "show NAME",
		Short: "Show one namespace, with the blocks and pins of each live epoch",
		Long: `Show one namespace. For each live epoch, the newest first, BLOCKS and USED are its stored
blocks and bytes, MATCHES the prefix matches since the node started and HITS the blocks
that they found, LEASES the leases of readers and writers on its blocks, and PINS the
pins of the epoch itself.`,
	}
	return c.onNamespace(cmd, func(ctx context.Context, a admin, name string) error {
		ns, err := a.GetNamespace(ctx, &pb.GetNamespaceRequest{Name: name})
		if err != nil {
			return err
		}
		return outputOf(cmd).emit(ns, func(t *table) {
			printNamespace(t, ns)
			printLive(t, ns.GetLive())
		})
	})
}

func newNamespaceDelete(c *connection) *cobra.Command {
	var yes, dryRun bool
	cmd := &cobra.Command{
		Use:   "delete NAME --yes | --dry-run",
		Short: "Delete a namespace and all its blocks",
		Long: `Delete a namespace and all its blocks. The name keeps its last epoch: a namespace that is
created with this name later begins at a higher epoch, so a client that still has the old
namespace gets misses and stores nothing. A node without a cluster remembers 1,024 deleted
names, fewer if the catalogue of its volumes is full. It forgets those with the lowest epochs,
and a new namespace of any name then begins above these epochs.`,
		Args:              args(cobra.ExactArgs(1)),
		ValidArgsFunction: c.completeNamespaces,
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "confirm the deletion")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "print what would be deleted, and change nothing")
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		if !yes && !dryRun {
			return usagef("namespace %q would be deleted with all its blocks, which cannot be undone; give --yes, or show the contents with --dry-run", names[0])
		}
		return c.admin(cmd, func(ctx context.Context, a admin) error {
			resp, err := a.DeleteNamespace(ctx, &pb.DeleteNamespaceRequest{Name: names[0], DryRun: dryRun})
			if err != nil {
				return err
			}
			return emitRemoved(cmd, "deleted", dryRun, resp.GetBlocks(), resp.GetBytes())
		})
	}
	return cmd
}

// removed is the output of every command that removes blocks.
type removed struct {
	Blocks int64 `json:"blocks"`
	Bytes  int64 `json:"bytes"`
	DryRun bool  `json:"dry_run"`
}

func emitRemoved(cmd *cobra.Command, verb string, dryRun bool, blocks, bytes int64) error {
	return outputOf(cmd).emit(removed{Blocks: blocks, Bytes: bytes, DryRun: dryRun}, func(t *table) {
		if dryRun {
			verb = "would be " + verb
		}
		fmt.Fprintf(t, "%s: %s blocks, %s\n", verb, count(blocks), size(bytes))
	})
}

// bumped is the output of ns bump-epoch.
type bumped struct {
	Namespace string   `json:"namespace"`
	OldEpoch  uint64   `json:"old_epoch"`
	NewEpoch  uint64   `json:"new_epoch"`
	Live      []uint64 `json:"live_epochs"`
	Retired   []uint64 `json:"retired_epochs"`
}

func newNamespaceBump(c *connection) *cobra.Command {
	var to uint64
	var keep uint32
	cmd := &cobra.Command{
		Use:   "bump-epoch NAME",
		Short: "Begin a new epoch; every block of the epochs not kept is unmatchable at once",
		Long: fmt.Sprintf(`Begin a new epoch, for new weights. All blocks of the older epochs become unmatchable
at once, whatever their number, and the space is freed in the background. With --keep
the newest epochs stay live, the new one included: engines that still have the weights of
a live epoch continue to read and store blocks of this epoch only. A pinned epoch stays
live too, until its pins end. At most %d epochs are live: beyond that the oldest pinned
epochs are retired. When space is short, blocks of the oldest epoch are evicted first.`, kv.MaxLive),
		Example: `  penstock ns bump-epoch llama-3/70b
  penstock ns bump-epoch llama-3/70b --keep 2`,
	}
	cmd.Flags().Uint64Var(&to, "to", 0, fmt.Sprintf("the new epoch, above the current one and at most %d; 0: the next", kv.MaxEpoch))
	cmd.Flags().Uint32Var(&keep, "keep", 1, fmt.Sprintf("how many epochs stay live, the new one included, at most %d", kv.MaxLive))
	return c.onNamespace(cmd, func(ctx context.Context, a admin, name string) error {
		if keep < 1 || keep > kv.MaxLive {
			return usagef("--keep %d: want 1 to %d", keep, kv.MaxLive)
		}
		resp, err := a.BumpEpoch(ctx, &pb.BumpEpochRequest{Name: name, To: to, Keep: keep})
		if err != nil {
			return err
		}
		b := bumped{Namespace: name, OldEpoch: resp.GetOldEpoch(), NewEpoch: resp.GetNewEpoch(), Live: resp.GetLive(), Retired: append([]uint64{}, resp.GetRetired()...)}
		return outputOf(cmd).emit(b, func(t *table) {
			fmt.Fprintf(t, "namespace %s: epoch %d -> %d\n", b.Namespace, b.OldEpoch, b.NewEpoch)
			if len(b.Live) > 1 {
				fmt.Fprintf(t, "live: %s\n", joinNumbers(b.Live))
			}
		})
	})
}

// joinNumbers returns numbers separated by commas, like 3, 2, 1.
func joinNumbers(numbers []uint64) string {
	words := make([]string, len(numbers))
	for i, n := range numbers {
		words[i] = strconv.FormatUint(n, 10)
	}
	return strings.Join(words, ", ")
}

func newNamespaceRetire(c *connection) *cobra.Command {
	var yes, dryRun, force bool
	cmd := &cobra.Command{
		Use:   "retire-epoch NAME EPOCH --yes | --dry-run",
		Short: "Make every block of one older live epoch unmatchable, at once",
		Long: `Make every block of an older live epoch unmatchable, at once; the space is freed in the
background. The newest epoch cannot be retired: bump it. A pinned epoch is refused,
unless --force is given, which ends its pins.`,
		Args:              args(cobra.ExactArgs(2)),
		ValidArgsFunction: c.completeNamespaces,
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "really retire it")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "say what would become unmatchable and change nothing")
	cmd.Flags().BoolVar(&force, "force", false, "retire it although it is pinned")
	cmd.RunE = func(cmd *cobra.Command, given []string) error {
		epoch, err := strconv.ParseUint(given[1], 10, 64)
		if err != nil {
			return usagef("%q is not an epoch; ns show lists the live ones", given[1])
		}
		if !yes && !dryRun {
			return usagef("the blocks of epoch %d of namespace %q would be deleted, which cannot be undone; give --yes, or show the contents with --dry-run", epoch, given[0])
		}
		return c.admin(cmd, func(ctx context.Context, a admin) error {
			resp, err := a.RetireEpoch(ctx, &pb.RetireEpochRequest{Name: given[0], Epoch: epoch, Force: force, DryRun: dryRun})
			if err != nil {
				return err
			}
			return emitRemoved(cmd, "retired", dryRun, resp.GetBlocks(), resp.GetBytes())
		})
	}
	return cmd
}

// pinnedEpoch is the output of ns pin-epoch.
type pinnedEpoch struct {
	Namespace  string  `json:"namespace"`
	Epoch      uint64  `json:"epoch"`
	Lease      uint64  `json:"lease"`
	TTLSeconds float64 `json:"ttl_seconds"`
}

func newNamespacePin(c *connection) *cobra.Command {
	var epoch uint64
	var ttl time.Duration
	cmd := &cobra.Command{
		Use:   "pin-epoch NAME --ttl D",
		Short: "Keep an epoch live for a time, also after bumps, and print the lease",
		Long: `Keep an epoch live for a time, also after bumps, for a group of rollouts that continues
with its first weights. The pin keeps the epoch, not its blocks, which may
be evicted. unpin and a restart of the node end the pin; pin list shows it. An engine
pins an epoch with the client library, which renews the lease.`,
		Example: `  penstock ns pin-epoch llama-3/70b --epoch 7 --ttl 10m`,
	}
	cmd.Flags().Uint64Var(&epoch, "epoch", 0, "the epoch; 0: the newest")
	cmd.Flags().DurationVar(&ttl, "ttl", 10*time.Minute, "how long the pin lasts, at most limits.lease_ttl of the node")
	return c.onNamespace(cmd, func(ctx context.Context, a admin, name string) error {
		if ttl < time.Millisecond {
			return usagef("--ttl %v: want at least 1ms", ttl)
		}
		resp, err := pb.NewCacheClient(a.conn).PinEpoch(ctx, &pb.PinEpochRequest{Namespace: name, Epoch: epoch, TtlMs: uint64(ttl.Milliseconds())})
		if err != nil {
			return err
		}
		p := pinnedEpoch{Namespace: name, Epoch: resp.GetEpoch(), Lease: resp.GetLease(), TTLSeconds: float64(resp.GetTtlMs()) / 1000}
		return outputOf(cmd).emit(p, func(t *table) {
			t.pair("namespace", p.Namespace)
			t.pair("epoch", p.Epoch)
			t.pair("lease", p.Lease)
			t.pair("ttl", seconds(p.TTLSeconds))
		})
	})
}

func newNamespaceQuota(c *connection) *cobra.Command {
	return &cobra.Command{
		Use:               "quota NAME SIZE",
		Short:             "Set the limit of a namespace's storage; 0 removes the limit",
		Args:              args(cobra.ExactArgs(2)),
		ValidArgsFunction: c.completeNamespaces,
		RunE: func(cmd *cobra.Command, given []string) error {
			quota, err := config.ParseSize(given[1])
			if err != nil {
				return usageError{err}
			}
			return c.admin(cmd, func(ctx context.Context, a admin) error {
				ns, err := a.SetQuota(ctx, &pb.SetQuotaRequest{Name: given[0], QuotaBytes: int64(quota)})
				if err != nil {
					return err
				}
				return emitNamespace(cmd, ns)
			})
		},
	}
}

func newNamespaceTenants(c *connection) *cobra.Command {
	return &cobra.Command{
		Use:   "tenants",
		Short: "List the tenants with a quota, and the bytes that they use",
		Long: `List the tenants with a quota in the roles of the node, and the bytes that they use on
this node. A tenant is all namespaces whose names begin with its prefix. A caller with a role
on the whole prefix sees its tenant, and no other. USED is the size of the tenant's blocks on
storage, EVICTED the size of the blocks that the node evicted because of the quota. REFUSED
BLOCKS counts the blocks that the node did not store because of the quota. Both counts begin
when the tenant gets its quota, or when the node starts.`,
		Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.admin(cmd, func(ctx context.Context, a admin) error {
				resp, err := a.ListTenants(ctx, &pb.ListTenantsRequest{})
				if err != nil {
					return err
				}
				return outputOf(cmd).emit(resp, func(t *table) {
					if len(resp.GetTenants()) == 0 {
						t.row("no tenant with a quota on all of whose namespaces the caller has a role")
						return
					}
					printTenants(t, resp.GetTenants())
				})
			})
		},
	}
}

// replicasOf returns kv.Namespace.Replicas for a number of replicas. The default has one form, 0.
func replicasOf(n int) int {
	if n == 1 {
		return 0
	}
	return n
}

func newNamespaceReplicas(c *connection) *cobra.Command {
	return &cobra.Command{
		Use:   "replicas NAME N",
		Short: "Set the number of nodes that store each sequence of a namespace",
		Long: `Set the number of nodes of a cluster that store each sequence of a namespace, 1 to 4.
Clients that discover the members use it when they open the namespace again; until then
they store as before. No block is copied or deleted: a sequence has the new number of
copies when it is stored again.`,
		Args:              args(cobra.ExactArgs(2)),
		ValidArgsFunction: c.completeNamespaces,
		RunE: func(cmd *cobra.Command, given []string) error {
			n, err := strconv.ParseUint(given[1], 10, 8)
			if err != nil || n < 1 || n > kv.MaxReplicas {
				return usagef("%q: want a number from 1 to %d", given[1], kv.MaxReplicas)
			}
			return c.admin(cmd, func(ctx context.Context, a admin) error {
				ns, err := a.SetReplicas(ctx, &pb.SetReplicasRequest{Name: given[0], Replicas: uint32(replicasOf(int(n)))})
				if err != nil {
					return err
				}
				return emitNamespace(cmd, ns)
			})
		},
	}
}
