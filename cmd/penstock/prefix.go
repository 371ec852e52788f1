package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/kv"
)

func newPrefixCommand(w world) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "prefix",
		Short: "Show the cached prefix of a prompt, and why it is not longer",
	}
	c := addConnectionFlags(cmd, w)
	return noun(cmd, newPrefixMatch(w, c))
}

// matched is the output of prefix match and pin.
type matched struct {
	Namespace     string `json:"namespace"`
	Epoch         uint64 `json:"epoch"`
	AskedTokens   int    `json:"asked_tokens"`
	AskedBlocks   int    `json:"asked_blocks"`
	MatchedTokens uint64 `json:"matched_tokens"`
	MatchedBlocks uint32 `json:"matched_blocks"`
	MatchedBytes  int64  `json:"matched_bytes"`
	Cut           string `json:"cut"`
	Lease         uint64 `json:"lease,omitempty"`
	// TTLSeconds is the time until the lease ends. It is absent if the lease lasts until unpin.
	TTLSeconds float64 `json:"ttl_seconds,omitempty"`
	// Epochs are the epochs of the blocks, in order. It is set only with --mix.
	Epochs   []epochRun   `json:"epochs,omitempty"`
	BlockIDs []kv.BlockID `json:"block_ids,omitempty"`
}

// epochRun is a run of consecutive blocks of one epoch: Blocks is their number.
type epochRun struct {
	Epoch  uint64 `json:"epoch"`
	Blocks uint32 `json:"blocks"`
}

// matchOptions are the options of a match.
type matchOptions struct {
	epoch, oldest uint64
	ttl           time.Duration
	pin, mix      bool
}

// match matches a chain on the node.
func (a admin) match(ctx context.Context, w world, flags *chainFlags, name string, opts matchOptions) (matched, chain, error) {
	ch, err := a.chain(ctx, w, flags, name)
	if err != nil {
		return matched{}, chain{}, err
	}
	resp, err := pb.NewCacheClient(a.conn).Match(ctx, &pb.MatchRequest{
		Namespace:  name,
		Epoch:      opts.epoch,
		BlockIds:   api.AppendIDs(nil, ch.ids),
		LeaseTtlMs: uint64(opts.ttl.Milliseconds()),
		Pin:        opts.pin,

		OldestEpoch: opts.oldest,
		Mix:         opts.mix,
	})
	if err != nil {
		return matched{}, chain{}, err
	}
	var epochs []epochRun
	for _, r := range resp.GetEpochs() {
		epochs = append(epochs, epochRun{Epoch: r.GetEpoch(), Blocks: r.GetBlocks()})
	}
	return matched{
		Namespace: name, Epoch: resp.GetEpoch(),
		AskedTokens: ch.tokens, AskedBlocks: len(ch.ids),
		MatchedTokens: resp.GetMatchedTokens(), MatchedBlocks: resp.GetMatchedBlocks(), MatchedBytes: resp.GetBytes(),
		Cut: resp.GetCut(), Lease: resp.GetLease(), TTLSeconds: float64(resp.GetLeaseTtlMs()) / 1e3,
		Epochs: epochs,
	}, ch, nil
}

// Help of flags of prefix match and block get.
const (
	oldestEpochHelp = "return the longest match of any live epoch from this one to --epoch; 0: only --epoch"
	mixHelp         = "match each block in the newest epoch from --oldest-epoch to --epoch that has the block, and print the epochs"
)

func newPrefixMatch(w world, c *connection) *cobra.Command {
	var opts matchOptions
	var showIDs bool
	cmd := &cobra.Command{
		Use:   "match NS --tokens-file F",
		Short: "Find the longest cached prefix of a prompt",
		Long: `Find the longest cached prefix of a prompt. A prefix of no blocks is no failure: the
exit code is 0.

cut is the reason why the prefix is not longer:
  complete        everything asked for is cached
  absent          the next block is not stored
  epoch           no epoch that was asked for is live
  window_missing  a sliding-window group lacks its last blocks
  state_missing   no recurrent state was stored at that length
  lease_denied    cached, but no more leases are granted`,
		Args:              args(cobra.ExactArgs(1)),
		ValidArgsFunction: c.completeNamespaces,
	}
	flags := addChainFlags(cmd)
	cmd.Flags().Uint64Var(&opts.epoch, "epoch", 0, "version of the weights; 0: the newest")
	cmd.Flags().Uint64Var(&opts.oldest, "oldest-epoch", 0, oldestEpochHelp)
	cmd.Flags().BoolVar(&opts.mix, "mix", false, mixHelp)
	cmd.Flags().BoolVar(&showIDs, "show-ids", false, "print the ids of the matched blocks too")
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		return c.admin(cmd, func(ctx context.Context, a admin) error {
			m, ch, err := a.match(ctx, w, flags, names[0], opts)
			if err != nil {
				return err
			}
			if showIDs {
				m.BlockIDs = ch.ids[:m.MatchedBlocks]
			}
			return outputOf(cmd).emit(m, func(t *table) { printMatch(t, m) })
		})
	}
	return cmd
}

// printEpochs prints the epochs of a mixed match.
func printEpochs(t *table, runs []epochRun) {
	first := uint32(0)
	for _, r := range runs {
		t.pair(fmt.Sprintf("blocks %d-%d", first, first+r.Blocks-1), fmt.Sprintf("epoch %d", r.Epoch))
		first += r.Blocks
	}
}

func printMatch(t *table, m matched) {
	t.pair("matched", fmt.Sprintf("%d of %d tokens, %d of %d blocks, %s", m.MatchedTokens, m.AskedTokens, m.MatchedBlocks, m.AskedBlocks, size(m.MatchedBytes)))
	t.pair("cut", m.Cut)
	t.pair("epoch", m.Epoch)
	printEpochs(t, m.Epochs)
	if m.Lease != 0 {
		t.pair("lease", m.Lease)
	}
	if m.TTLSeconds != 0 {
		t.pair("ttl", seconds(m.TTLSeconds))
	}
	for i, id := range m.BlockIDs {
		t.row(i, id)
	}
}

func newPinCommand(w world) *cobra.Command {
	var opts matchOptions
	cmd := &cobra.Command{
		Use:   "pin NS --tokens-file F",
		Short: "Keep a cached prefix from being evicted, and print the lease",
		Long: `Keep the longest cached prefix of a prompt from being evicted until unpin, or for
--ttl. The node shortens --ttl to its limits.lease_ttl and returns the granted time, which
pin prints. Pins are kept in memory and end when the node stops. If no block of the prompt
is cached, nothing is pinned and the exit code is 3. pin list lists the pins. Deleting the
namespace ends them. If the namespace has the name list, put the name last, after --.`,
		Example: `  penstock pin llama-3/70b --tokens-file prompt.txt
  penstock pin --tokens-file prompt.txt -- list`,
		Args: args(cobra.ExactArgs(1)),
	}
	c := addConnectionFlags(cmd, w)
	cmd.AddCommand(newPinListCommand(c))
	cmd.ValidArgsFunction = c.completeNamespaces
	flags := addChainFlags(cmd)
	cmd.Flags().DurationVar(&opts.ttl, "ttl", 0, "how long the pin lasts; 0: until unpin")
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		if opts.pin = opts.ttl == 0; !opts.pin && opts.ttl < time.Millisecond {
			return usagef("--ttl %v: want at least 1ms, or 0 for a pin until unpin", opts.ttl)
		}
		return c.admin(cmd, func(ctx context.Context, a admin) error {
			m, _, err := a.match(ctx, w, flags, names[0], opts)
			if err != nil {
				return err
			}
			if m.Lease == 0 {
				if m.MatchedBlocks == 0 {
					return fmt.Errorf("no block of this prompt is cached in %q (cut: %s): %w", m.Namespace, m.Cut, errMiss)
				}
				return fmt.Errorf("%d blocks are cached, but the node grants no lease (cut: %s): %w", m.MatchedBlocks, m.Cut, errBusy)
			}
			return outputOf(cmd).emit(m, func(t *table) { printMatch(t, m) })
		})
	}
	return cmd
}

// pinLine is one line of pin list.
type pinLine struct {
	Lease      uint64  `json:"lease"`
	Namespace  string  `json:"namespace"`
	Epoch      uint64  `json:"epoch"`
	Owner      string  `json:"owner"`
	AgeSeconds float64 `json:"age_seconds"`
	// TTLSeconds is the remaining time of the lease. It is absent if the lease lasts until unpin.
	TTLSeconds *float64 `json:"ttl_seconds,omitempty"`
	// OfEpoch: the pin keeps the epoch live, and holds no individual blocks.
	OfEpoch bool  `json:"of_epoch,omitempty"`
	Blocks  int64 `json:"blocks"`
	Bytes   int64 `json:"bytes"`
}

func newPinListCommand(c *connection) *cobra.Command {
	var namespace string
	var leases bool
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the pins, the oldest first: owner, age, held blocks and bytes",
		Long: `List the pins, the oldest first. BYTES counts the whole prefix that a pin holds: bytes
that two pins share are in both. BLOCKS is "epoch" for a pin of an epoch, which keeps the epoch
live and holds no blocks. With --leases, leases on blocks that end by themselves are
listed too: those of pin --ttl, and those of engines.`,
		Example: `  penstock pin list
  penstock pin list --namespace llama-3/70b --leases
  penstock unpin 4294967296`,
		Args: args(cobra.NoArgs),
	}
	cmd.Flags().StringVar(&namespace, "namespace", "", "only the pins and leases of this namespace")
	cmd.Flags().BoolVar(&leases, "leases", false, "also list leases that expire")
	c.completeNamespaceFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return c.admin(cmd, func(ctx context.Context, a admin) error {
			lines := []pinLine{}
			req := &pb.ListPinsRequest{Namespace: namespace, Leases: leases}
			for {
				resp, err := a.ListPins(ctx, req)
				if err != nil {
					return err
				}
				now := time.Now()
				for _, p := range resp.GetPins() {
					lines = append(lines, pinLineOf(p, now))
				}
				if req.Cursor = resp.GetCursor(); req.Cursor == 0 {
					break
				}
			}
			slices.SortStableFunc(lines, func(a, b pinLine) int { return cmp.Compare(b.AgeSeconds, a.AgeSeconds) })
			return outputOf(cmd).emit(map[string][]pinLine{"pins": lines}, func(t *table) {
				t.row("LEASE", "NAMESPACE", "EPOCH", "OWNER", "AGE", "TTL", "BLOCKS", "BYTES")
				for _, l := range lines {
					ttl := "none"
					if l.TTLSeconds != nil {
						ttl = seconds(*l.TTLSeconds).Round(time.Second).String()
					}
					blocks := count(l.Blocks)
					if l.OfEpoch {
						blocks = "epoch"
					}
					t.row(l.Lease, l.Namespace, l.Epoch, l.Owner, seconds(l.AgeSeconds).Round(time.Second), ttl, blocks, size(l.Bytes))
				}
			})
		})
	}
	return cmd
}

func pinLineOf(p *pb.Pin, now time.Time) pinLine {
	l := pinLine{
		Lease: p.GetLease(), Namespace: p.GetNamespace(), Epoch: p.GetEpoch(), Owner: p.GetOwner(),
		AgeSeconds: max(0, now.Sub(time.UnixMilli(p.GetSinceUnixMs())).Seconds()), Blocks: p.GetBlocks(), Bytes: p.GetBytes(), OfEpoch: p.GetOfEpoch(),
	}
	if ms := p.GetExpiresUnixMs(); ms != 0 {
		ttl := max(0, time.UnixMilli(ms).Sub(now).Seconds())
		l.TTLSeconds = &ttl
	}
	return l
}

func newUnpinCommand(w world) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "unpin LEASE…",
		Short: "End pins by the lease that pin printed",
		Args:  args(cobra.MinimumNArgs(1)),
	}
	c := addConnectionFlags(cmd, w)
	cmd.RunE = func(cmd *cobra.Command, given []string) error {
		leases := make([]uint64, len(given))
		for i, text := range given {
			var err error
			if leases[i], err = strconv.ParseUint(text, 10, 64); err != nil || leases[i] == 0 {
				return usagef("%q is not a lease; pin prints the lease", text)
			}
		}
		return c.admin(cmd, func(ctx context.Context, a admin) error {
			for _, lease := range leases {
				if _, err := pb.NewCacheClient(a.conn).ReleaseLease(ctx, &pb.ReleaseLeaseRequest{Lease: lease}); err != nil {
					return err // the error names the lease
				}
			}
			return outputOf(cmd).emit(map[string][]uint64{"released": leases}, func(t *table) { fmt.Fprintln(t, "released:", leases) })
		})
	}
	return cmd
}
