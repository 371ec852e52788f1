package main

import (
	"context"
	"encoding/hex"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/config"
)

func newNamespaceCommand(w world) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "ns",
		Aliases: []string{"namespace", "namespaces"},
		Short:   "Create, show and delete namespaces, and bump their weight epochs",
		Long: `A namespace is one model's KV cache under one geometry: layers, tokens in a block,
bytes per token and layer. Its epoch is the version of the model's weights; bumping
it makes every block of the old weights unmatchable at once.`,
	}
	c := addConnectionFlags(cmd, w)
	return noun(cmd, newNamespaceCreate(c), newNamespaceList(c), newNamespaceShow(c), newNamespaceDelete(c), newNamespaceBump(c), newNamespaceQuota(c))
}

// geometryFlags are the flags of ns create.
type geometryFlags struct {
	layers, blockTokens, tokenBytes int
	groups                          []string
	dtype, layout, index            string
	tenant, salt, saltFile          string
	quota                           int64
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

The full group, if there is one, comes first.`,
		Example: `  penstock ns create llama-3/70b --layers 80 --block-tokens 64 --token-bytes 4096 --dtype bf16
  penstock ns create hybrid --block-tokens 64 --group full:12:1024 --group state:36:524288
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
	f.StringVar(&g.tenant, "tenant", "", "whose cache it is; mixed into every block id")
	f.StringVar(&g.salt, "salt", "", "secret mixed into every block id; hex: or plain text. Other users of this machine can see it: prefer --salt-file")
	f.StringVar(&g.saltFile, "salt-file", "", "file with the secret of --salt; a line end after it does not count")
	cmd.MarkFlagsMutuallyExclusive("salt", "salt-file")
	f.Var(sizeFlag{&g.quota}, "quota", "cap on the storage of this namespace, e.g. 500GiB; 0: none")
	_ = cmd.MarkFlagRequired("block-tokens") // it was defined above
	for _, name := range []string{"layers", "token-bytes", "block-tokens"} {
		annotate(cmd, name, ownRange) // kv.Geometry.Validate checks them
	}
	completeValues(cmd, "index", "trie", "flat")
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		def, err := g.namespace(names[0])
		if err != nil {
			return err
		}
		return c.admin(cmd, func(ctx context.Context, a admin) error {
			ns, err := a.CreateNamespace(ctx, &pb.CreateNamespaceRequest{Namespace: api.NamespaceProto(def)})
			if err != nil {
				return err
			}
			// The node cannot tell --quota 0 from none.
			if cmd.Flags().Changed("quota") && ns.GetQuotaBytes() != g.quota {
				return fmt.Errorf("namespace %q was there already, with a quota of %s; lift it with: penstock ns quota %s 0", ns.GetName(), size(ns.GetQuotaBytes()), ns.GetName())
			}
			return emitNamespace(cmd, ns)
		})
	}
	return cmd
}

// namespace builds the definition and checks it here, before the node is asked.
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
		Name: name, Tenant: g.tenant, Salt: salt, Index: index, QuotaBytes: g.quota,
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

// parseSalt reads a salt that flag gave. Its errors do not repeat the salt.
func parseSalt(flag, text string) ([]byte, error) {
	digits, ok := strings.CutPrefix(text, "hex:")
	if !ok {
		return []byte(text), nil
	}
	if digits == "" {
		return nil, usagef("%s: nothing follows hex:", flag)
	}
	salt, err := hex.DecodeString(digits)
	if err != nil {
		return nil, usagef("%s: what follows hex: is not pairs of hexadecimal digits", flag)
	}
	return salt, nil
}

// parseGroup reads kind:layers:bytes[:window].
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
	return outputOf(cmd).emit(ns, func(t *table) {
		t.pair("name", ns.GetName())
		t.pair("id", ns.GetId())
		t.pair("tenant", ns.GetTenant())
		t.pair("salt", saltWord(ns.GetSalt()))
		t.pair("index", enumWord(ns.GetIndex().Descriptor(), ns.GetIndex().Number()))
		t.pair("geometry", geometryWords(ns.GetGeometry()))
		t.pair("block", size(blockBytes(ns.GetGeometry())))
		t.pair("epoch", ns.GetEpoch())
		t.pair("quota", quotaWord(ns.GetQuotaBytes()))
		t.pair("used", size(ns.GetUsedBytes()))
		t.pair("blocks", count(ns.GetBlocks()))
		t.pair("leases", count(ns.GetLeases()))
	})
}

// saltWord says that there is a salt, not which: tables are pasted into tickets.
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
		Short: "List the namespaces with what they hold",
		Args:  args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.admin(cmd, func(ctx context.Context, a admin) error {
				resp, err := a.ListNamespaces(ctx, &pb.ListNamespacesRequest{})
				if err != nil {
					return err
				}
				return outputOf(cmd).emit(resp, func(t *table) {
					t.row("NAME", "TENANT", "INDEX", "EPOCH", "BLOCKS", "USED", "QUOTA", "BLOCK", "GEOMETRY")
					for _, ns := range resp.GetNamespaces() {
						t.row(ns.GetName(), ns.GetTenant(), enumWord(ns.GetIndex().Descriptor(), ns.GetIndex().Number()), ns.GetEpoch(), count(ns.GetBlocks()),
							size(ns.GetUsedBytes()), quotaWord(ns.GetQuotaBytes()), size(blockBytes(ns.GetGeometry())), geometryWords(ns.GetGeometry()))
					}
				})
			})
		},
	}
}

func newNamespaceShow(c *connection) *cobra.Command {
	cmd := &cobra.Command{Use: "show NAME", Short: "Show one namespace"}
	return c.onNamespace(cmd, func(ctx context.Context, a admin, name string) error {
		ns, err := a.GetNamespace(ctx, &pb.GetNamespaceRequest{Name: name})
		if err != nil {
			return err
		}
		return emitNamespace(cmd, ns)
	})
}

func newNamespaceDelete(c *connection) *cobra.Command {
	var yes, dryRun bool
	cmd := &cobra.Command{
		Use:               "delete NAME --yes | --dry-run",
		Short:             "Delete a namespace and all its blocks",
		Args:              args(cobra.ExactArgs(1)),
		ValidArgsFunction: c.completeNamespaces,
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "really delete it")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "say what would be deleted and change nothing")
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		if !yes && !dryRun {
			return usagef("namespace %q would be deleted with all its blocks, which cannot be undone; say --yes, or see what it holds with --dry-run", names[0])
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

// removed is what every command that removes blocks prints.
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

// bumped is what ns bump-epoch prints.
type bumped struct {
	Namespace string `json:"namespace"`
	OldEpoch  uint64 `json:"old_epoch"`
	NewEpoch  uint64 `json:"new_epoch"`
}

func newNamespaceBump(c *connection) *cobra.Command {
	var to uint64
	cmd := &cobra.Command{
		Use:   "bump-epoch NAME",
		Short: "Make every block of the old weights unmatchable, at once",
	}
	cmd.Flags().Uint64Var(&to, "to", 0, "the new epoch, greater than the present one; 0: the next")
	return c.onNamespace(cmd, func(ctx context.Context, a admin, name string) error {
		resp, err := a.BumpEpoch(ctx, &pb.BumpEpochRequest{Name: name, To: to})
		if err != nil {
			return err
		}
		b := bumped{Namespace: name, OldEpoch: resp.GetOldEpoch(), NewEpoch: resp.GetNewEpoch()}
		return outputOf(cmd).emit(b, func(t *table) {
			fmt.Fprintf(t, "namespace %s: epoch %d -> %d\n", b.Namespace, b.OldEpoch, b.NewEpoch)
		})
	})
}

func newNamespaceQuota(c *connection) *cobra.Command {
	return &cobra.Command{
		Use:               "quota NAME SIZE",
		Short:             "Set how much storage a namespace may take; 0 lifts the cap",
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
