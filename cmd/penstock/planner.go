package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"

	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/config"
	"github.com/penstock-kv/penstock/server/netoracle"
	"github.com/penstock-kv/penstock/server/planner"
)

func newPlannerCommand(w world) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "planner",
		Short: "Run the planner node",
		Long: `Run the planner: it decides which prefill and which decode engine take a request, and
through which storage NICs its cached prefix is read. Gateways submit requests to it,
the leaders of engine groups fetch work from it; it moves no KV and keeps nothing on
disk. After a restart it learns from the leaders what is being served.

A setting comes from a flag, else from the environment (PENSTOCK_ and the path of
the key: PENSTOCK_SCHEDULE_READ_RATE), else from --config FILE (YAML), else it has the
default shown here.`,
		Example: `  penstock planner --schedule-read-rate 640000 --schedule-prefill-rate 8000
  penstock planner --record events.jsonl
  penstock planner replay events.jsonl
  penstock plan top --every 1s`,
		Args: args(cobra.NoArgs),
	}
	var file, record string
	cmd.Flags().StringVar(&file, "config", "", "configuration file (YAML)")
	cmd.Flags().StringVar(&record, "record", "", "file to write every event and decision to, for penstock planner replay; at most 1 GiB; a file of that name is kept as FILE.old")
	cmd.AddCommand(newPlannerReplay())
	scratch := config.DefaultPlanner()
	addConfigFlags(cmd.Flags(), scratch.Keys())
	groupSettings(cmd, scratch.Keys())
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg := config.DefaultPlanner()
		if err := config.LoadInto(&cfg, file, w.environ); err != nil {
			return err
		}
		if err := setFromFlags(cfg.Keys(), cmd.Flags()); err != nil {
			return err
		}
		if err := cfg.Validate(); err != nil {
			return err
		}
		return runPlanner(cmd.Context(), cfg, record, newLogger(w.err, cfg.Log))
	}
	return cmd
}

// scheduleOf turns the configuration into the planner's options.
func scheduleOf(c config.Schedule) (dualpath.Options, error) {
	policy, err := dualpath.ParseReadPolicy(c.ReadPolicy)
	if err != nil {
		return dualpath.Options{}, fmt.Errorf("config: schedule.read_policy: %w: %w", err, config.ErrConfig)
	}
	o := dualpath.Options{
		ReadRate: c.ReadRate, PrefillRate: c.PrefillRate, Alpha: c.Alpha, Beta: c.Beta, ZFactor: c.ZFactor, Policy: policy,
		BlockTokens: c.BlockTokens, MinPart: c.MinPart, SlowFactor: c.SlowFactor, HedgeFactor: c.HedgeFactor, MaxHedge: c.MaxHedge,
		Patience: c.Patience.Std(), GroupTimeout: c.GroupTimeout.Std(), MaxQueue: c.MaxQueue, MaxExplain: c.Explain,
	}
	o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return o, fmt.Errorf("config: schedule: %w: %w", err, config.ErrConfig)
	}
	return o, nil
}

// runPlanner serves until ctx ends. Events are written to the file record, unless it
// is "".
func runPlanner(ctx context.Context, cfg config.Planner, record string, log *slog.Logger) (err error) {
	schedule, err := scheduleOf(cfg.Schedule)
	if err != nil {
		return err
	}
	token, err := readToken(cfg.Auth.TokenFile)
	if err != nil {
		return err
	}
	secure, err := serverTLS(cfg.Auth)
	if err != nil {
		return err
	}
	stopTracing, err := startTracing(ctx, cfg.Trace, "planner", log)
	if err != nil {
		return err
	}
	// What is left after ctx has its own limit.
	closing := func() (context.Context, context.CancelFunc) {
		return context.WithTimeout(context.WithoutCancel(ctx), cfg.DrainWithin.Std())
	}
	defer func() {
		within, cancel := closing()
		defer cancel()
		stopTracing(within)
	}()
	control, web, err := listenBoth(ctx, cfg.Listen, cfg.HTTP)
	if err != nil {
		return err
	}
	if web != nil {
		warnOfMetrics(log, cfg.HTTP)
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	network, oracle, err := networkOf(cfg.Network, log, registry)
	if err != nil {
		return errors.Join(err, control.Close(), closeIf(web))
	}
	if oracle != nil {
		schedule.Network = network
		defer oracle.Close()
	}
	opts := planner.Options{Planner: schedule, Logger: log, Registry: registry}
	if record != "" {
		file, openErr := openRecord(record)
		if openErr != nil {
			return errors.Join(openErr, control.Close(), closeIf(web))
		}
		defer func() { err = errors.Join(err, file.Close()) }() // after Shutdown, which ends the record
		opts.Record = &planner.Record{To: file}
		if network != nil {
			made := network.Options()
			opts.Record.Network = &made
		}
	}
	service, err := planner.New(opts)
	if err != nil {
		return errors.Join(err, control.Close(), closeIf(web))
	}
	if oracle != nil {
		oracle.Watch(func(s netoracle.State) { service.SetNetwork(networkOfState(s)) })
	}
	node := server.NewPlannerNode(server.PlannerOptions{Service: service, BearerToken: token, TLS: secure, Registry: registry})
	attrs := []any{"grpc", control.Addr().String()}
	if web != nil {
		attrs = append(attrs, "http", web.Addr().String())
	}
	log.Info("ready", append(attrs, "read_policy", schedule.Policy.String(), "alpha", schedule.Alpha, "beta", schedule.Beta)...)
	stopped := make(chan error, 1)
	go func() { stopped <- node.Serve(control, web) }()
	select {
	case err = <-stopped:
		log.Error("a listener failed; shutting down", "err", err)
	case <-ctx.Done():
		log.Info("shutting down", "within", cfg.DrainWithin)
	}
	start := time.Now()
	within, cancel := closing()
	defer cancel()
	err = errors.Join(err, node.Shutdown(within))
	if err == nil {
		log.Info("stopped", "took", time.Since(start).Round(time.Millisecond))
	}
	return err
}

// listenBoth opens the gRPC listener and, unless its address is empty, the HTTP
// one.
func listenBoth(ctx context.Context, grpcAddr, httpAddr string) (control, web net.Listener, err error) {
	var lc net.ListenConfig
	if control, err = lc.Listen(ctx, "tcp", grpcAddr); err != nil {
		return nil, nil, fmt.Errorf("listen: %w", err)
	}
	if httpAddr == "" {
		return control, nil, nil
	}
	if web, err = lc.Listen(ctx, "tcp", httpAddr); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("http: %w", err), control.Close())
	}
	return control, web, nil
}

// closeIf closes a listener if there is one.
func closeIf(l net.Listener) error {
	if l == nil {
		return nil
	}
	return l.Close()
}
