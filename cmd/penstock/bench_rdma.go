package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/lab/bench"
	"github.com/penstock-kv/penstock/lab/bench/peer"
	"github.com/penstock-kv/penstock/lab/bench/suite"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/fabric"
	"github.com/penstock-kv/penstock/rdma/group"
	"github.com/penstock-kv/penstock/rdma/shm"
	"github.com/penstock-kv/penstock/rdma/tcp"
	"github.com/penstock-kv/penstock/rdma/verbs"
)

// rdmaConns is the number of TCP connections between two peers, for Penstock and for iperf3.
const rdmaConns = 4

// rdmaProviders are the transfer engines of `bench rdma`, by name.
func rdmaProviders() map[string]suite.RDMAOptions {
	const nearPeak = 0.9
	all := map[string]suite.RDMAOptions{
		"tcp":    {Open: openTCP, Yardstick: iperfYardstick, Conns: rdmaConns, Fraction: nearPeak, Sockets: true},
		"shm":    {Open: openSHM, Yardstick: copyYardstick, Shared: true},
		"verbs":  {Open: openVerbs, Yardstick: verbsYardstick, Fraction: nearPeak, NotRun: verbsMissing()},
		"fabric": {Open: openFabric, Yardstick: fabricYardstick, Fraction: nearPeak, NotRun: fabricMissing()},
		"sim":    {NotRun: "its NICs are simulated, in virtual time and in one process: a rate of theirs says nothing (tests use it)"},
	}
	for name, o := range all {
		o.Provider = name
		all[name] = o
	}
	return all
}

// rdmaProvider returns the options of the provider with that name.
func rdmaProvider(name string) (suite.RDMAOptions, error) {
	o, ok := rdmaProviders()[name]
	if !ok {
		return o, usagef("--provider %q: want tcp, shm, verbs, fabric or sim", name)
	}
	return o, nil
}

// addRDMAProvider adds the flag --provider to a command.
func addRDMAProvider(cmd *cobra.Command, provider *string) {
	cmd.Flags().StringVar(provider, "provider", "tcp", "transfer engine: tcp, shm, verbs, fabric or sim")
	completeValues(cmd, "provider", "tcp", "shm", "verbs", "fabric", "sim")
}

func newBenchRDMA(w world, f *benchFlags) *cobra.Command {
	var provider string
	var quick bool
	cmd := &cobra.Command{
		Use:   "rdma",
		Short: "One-sided writes against the hardware's own benchmark",
		Long: `Write from this process into another's memory through a transfer engine, with single
and paged writes of 1 KiB to 32 MiB, in turns with the benchmark program of the same
hardware: iperf3 and bare sockets over the same memory (tcp), copying (shm), ib_write_bw
(verbs), fi_rma_bw or, without fabtests, a loop in C (fabric). Then measure the time and
the allocations of one call.`,
		Args: args(cobra.NoArgs),
	}
	addRDMAProvider(cmd, &provider)
	cmd.Flags().BoolVar(&quick, "quick", false, "two rounds of the smallest and the largest writes")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		o, err := rdmaProvider(provider)
		if err != nil {
			return err
		}
		o.Quick = quick
		return f.run(cmd, w, func(ctx context.Context, sw suite.World) (bench.Report, error) {
			report, err := suite.RDMA(ctx, sw, o)
			if w.env(envRDMALab) != "" {
				report.Within = "the soft-RoCE guest of lab/rdmalab (rdma_rxe, a NIC in software)"
			}
			return report, err
		})
	}
	return cmd
}

// envRDMALab is set in the guest of the RDMA lab.
const envRDMALab = "PENSTOCK_RDMA_LAB"

// newBenchRDMASink returns the command that registers memory for writes from the parent's transfer
// engine, with the same provider.
func newBenchRDMASink(w world) *cobra.Command {
	var provider string
	cmd := &cobra.Command{Use: "rdma-sink", Short: "Offer memory to be written to", Args: args(cobra.NoArgs)}
	addRDMAProvider(cmd, &provider)
	cmd.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		o, err := rdmaProvider(provider)
		if err != nil {
			return err
		}
		if o.NotRun != "" {
			return errors.New(o.NotRun)
		}
		memory, err := arena.New(arena.Options{SizeBytes: suite.SinkBytes, Shared: o.Shared})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, memory.Close()) }()
		e, err := o.Open(cmd.Context(), suite.EngineOptions{Listen: true, Dir: cmd.Flag("data").Value.String(), Memory: memory})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, e.Close()) }()
		line, _, err := suite.Sink(cmd.Context(), e, memory)
		if err != nil {
			return err
		}
		return w.ready(cmd.Context(), line)
	}
	return cmd
}

func openTCP(ctx context.Context, o suite.EngineOptions) (rdma.Engine, error) {
	t := tcp.Options{Conns: o.Conns, OnPost: o.OnPost, ZeroCopy: true}
	if o.Listen {
		t.Listen, t.Token = "127.0.0.1:0", suite.SinkToken()
	}
	return tcp.New(ctx, t)
}

func openSHM(ctx context.Context, o suite.EngineOptions) (rdma.Engine, error) {
	s := shm.Options{Arenas: []*arena.Arena{o.Memory}, Group: group.Options{OnPost: o.OnPost}}
	if o.Listen {
		s.Listen, s.Group.Token = filepath.Join(o.Dir, fmt.Sprintf("shm-%d.sock", time.Now().UnixNano())), suite.SinkToken()
	}
	return shm.New(ctx, s)
}

// groupOptions returns the options of an engine that connects to its peers over the loopback
// interface.
func groupOptions(ctx context.Context, o suite.EngineOptions) (g group.Options, err error) {
	listen := ""
	g.OnPost = o.OnPost
	if o.Listen {
		listen, g.Token = "127.0.0.1:0", suite.SinkToken()
	}
	g.Control, err = group.TCP(ctx, listen, "", nil)
	return g, err
}

func openVerbs(ctx context.Context, o suite.EngineOptions) (rdma.Engine, error) {
	g, err := groupOptions(ctx, o)
	if err != nil {
		return nil, err
	}
	return verbs.New(ctx, verbs.Options{Devices: verbsDevices(), Group: g, NIC: verbs.NICOptions{Spin: verbsSpin}})
}

// verbsSpin is the time for which the engine polls for completions before it sleeps. The time is
// long because ib_write_bw, the program of comparison, never sleeps.
const verbsSpin = 10 * time.Millisecond

// verbsDevices returns the first usable port: one NIC, because ib_write_bw uses one.
func verbsDevices() []string {
	all, _ := verbs.List() // an engine without devices reports the error
	for _, d := range all {
		if d.Up {
			return []string{d.Name}
		}
	}
	return nil
}

// verbsMissing returns the reason why verbs cannot be measured, or "".
func verbsMissing() string {
	all, err := verbs.List()
	if err != nil {
		return err.Error()
	}
	if len(verbsDevices()) > 0 {
		return ""
	}
	why := make([]string, 0, len(all))
	for _, d := range all {
		why = append(why, d.Name+": "+d.Reason)
	}
	return fmt.Sprintf("no RDMA device of this machine can be used; %d are there %s", len(all), strings.Join(why, "; "))
}

// fabricProvider is the libfabric provider that is measured.
const fabricProvider = "tcp"

func openFabric(ctx context.Context, o suite.EngineOptions) (rdma.Engine, error) {
	g, err := groupOptions(ctx, o)
	if err != nil {
		return nil, err
	}
	return fabric.New(ctx, fabric.Options{Domain: fabric.DomainOptions{Provider: fabricProvider}, Group: g})
}

func fabricMissing() string {
	if _, err := fabric.List(fabricProvider); err != nil {
		return err.Error()
	}
	return ""
}

// iperfYardstick returns iperf3 over the same number of connections, as the program of comparison.
func iperfYardstick(context.Context) (suite.Yardstick, error) {
	if why := peer.Installed("iperf3", "iperf3"); why != "" {
		return suite.Yardstick{}, errors.New(why)
	}
	i, err := peer.StartIperf()
	if err != nil {
		return suite.Yardstick{}, err
	}
	return suite.Yardstick{
		Name: "iperf3", Close: i.Close,
		Turn: func(ctx context.Context, d time.Duration, l suite.Load) (bench.Sample, error) {
			if l.InFlight() >= rdmaConns<<20 {
				return i.Run(ctx, peer.IperfLoad{Conns: rdmaConns, WriteBytes: 1 << 20}, d)
			}
			// iperf3 does not wait for replies, so a small window limits its bytes in flight
			conns := min(l.Depth, rdmaConns)
			window := l.InFlight() / int64(conns)
			return i.Run(ctx, peer.IperfLoad{Conns: conns, WriteBytes: min(l.Bytes, window), WindowBytes: window}, d)
		},
		Notes: []string{"iperf3 has 4 connections and 1 MiB a write; where less than 4 MiB is in flight, one for each write and a window of what is in flight (at least 64 KiB)"},
	}, nil
}

// copyYardstick returns a benchmark that copies between two arenas in this process.
func copyYardstick(context.Context) (suite.Yardstick, error) {
	from, err := arena.New(arena.Options{SizeBytes: suite.SinkBytes})
	if err != nil {
		return suite.Yardstick{}, err
	}
	to, err := arena.New(arena.Options{SizeBytes: suite.SinkBytes})
	if err != nil {
		return suite.Yardstick{}, errors.Join(err, from.Close())
	}
	return suite.Yardstick{
		Name: "copy", Close: func() error { return errors.Join(from.Close(), to.Close()) },
		Notes: []string{"copy is one goroutine copying 1 MiB after 1 MiB between two arenas of its own"},
		Turn: func(ctx context.Context, d time.Duration, _ suite.Load) (bench.Sample, error) {
			return peer.Copy(ctx, to.Bytes()[:suite.SinkBytes], from.Bytes()[:suite.SinkBytes], 1<<20, d)
		},
	}, nil
}

// verbsYardstick returns ib_write_bw on the same port, as the program of comparison.
func verbsYardstick(context.Context) (suite.Yardstick, error) {
	if why := peer.Installed("ib_write_bw", "perftest"); why != "" {
		return suite.Yardstick{}, errors.New(why)
	}
	all, err := verbs.List()
	if err != nil {
		return suite.Yardstick{}, err
	}
	i := slices.IndexFunc(all, func(d verbs.Device) bool { return d.Up })
	if i < 0 {
		return suite.Yardstick{}, errors.New(verbsMissing())
	}
	var nic verbs.NICOptions
	nic.EnsureDefaults()
	return suite.Yardstick{
		Name: "ib_write_bw", Close: nothingToClose,
		Turn: func(ctx context.Context, d time.Duration, l suite.Load) (bench.Sample, error) {
			return peer.IBWrite(ctx, all[i].Name, writeLoad(l, all[i].MaxWrite, nic.QueueDepth), d)
		},
		Notes: []string{fmt.Sprintf("ib_write_bw has writes of the same length in flight, as many, on one queue pair: "+
			"a page each, or what a longer write is cut into (%d KiB here), %d at most; "+
			"it polls and never sleeps, the engine sleeps where %v of polling found nothing; it writes from one buffer into one, which stay in the cache",
			all[i].MaxWrite>>10, nic.QueueDepth, verbsSpin)},
	}, nil
}

// writeLoad returns the writes that the engine posts to the NIC for the load l. A write has one
// page, or the whole operation if there are no pages, but at most maxWrite bytes. The depth is the
// number of such writes in flight, at most queueDepth.
func writeLoad(l suite.Load, maxWrite int64, queueDepth int) peer.WriteLoad {
	piece := l.Page
	if piece == 0 {
		piece = l.Bytes
	}
	piece = min(piece, maxWrite)
	pieces := (l.InFlight() + piece - 1) / piece
	return peer.WriteLoad{WriteBytes: piece, Depth: int(min(pieces, int64(queueDepth)))}
}

// fabricYardstick returns the program of comparison: fi_rma_bw if fabtests is installed, and
// otherwise a loop of writes in C. Before libfabric 1.18 the provider of reliable datagrams over
// TCP had the name net.
func fabricYardstick(ctx context.Context) (suite.Yardstick, error) {
	if peer.Installed("fi_rma_bw", "fabtests") == "" {
		return suite.Yardstick{Name: "fi_rma_bw", Close: nothingToClose, Turn: func(ctx context.Context, _ time.Duration, l suite.Load) (bench.Sample, error) {
			return peer.FabricRMA(ctx, fabricProvider, fabricWrites(l))
		}}, nil
	}
	l, err := peer.StartFabricLoop(ctx, "net", fabricProvider)
	if err != nil {
		return suite.Yardstick{}, err
	}
	return suite.Yardstick{
		Name: "loop in C", Close: l.Close,
		Turn: func(ctx context.Context, d time.Duration, load suite.Load) (bench.Sample, error) {
			return l.Run(ctx, fabricWrites(load), d)
		},
		Notes: []string{"the loop in C has writes of the same length under way, as many (a page each, 128 at most), between two processes, as fi_rma_bw (fabtests, not installed) does; it never sleeps"},
	}, nil
}

// fabricWrites returns the writes that the engine posts to libfabric for the load l. The size of a
// write is not limited; the depth is at most the length of an endpoint's queue.
func fabricWrites(l suite.Load) peer.WriteLoad {
	var o fabric.DomainOptions
	o.EnsureDefaults()
	return writeLoad(l, suite.SinkBytes, o.QueueDepth)
}

func nothingToClose() error { return nil }
