package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/config"
	"github.com/penstock-kv/penstock/server/metrics"
	"github.com/penstock-kv/penstock/server/netoracle"
	"github.com/penstock-kv/penstock/server/reload"
)

func newPlannerCommand(w world) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "planner",
		Short: "Run the planner node",
		Long: `Run the planner: it decides which prefill and which decode engine take a request, and
through which storage NICs its cached prefix is read. Gateways submit requests to it,
the leaders of engine groups fetch work from it; it moves no KV and keeps nothing on
disk. After a restart the leaders report the requests in progress.

A setting comes from a flag, else from the environment (PENSTOCK_ and the path of
the key: PENSTOCK_SCHEDULE_READ_RATE), else from --config FILE (YAML), else it has the
default shown here.

SIGHUP applies changes of tokens, certificates, the log level and --drain-timeout in
the configuration file while the planner serves; the log names a changed setting that
needs a restart, and nothing is applied then. Tokens and certificates are also applied
when their files change.`,
		Example: `  penstock planner --schedule-read-rate 640000 --schedule-prefill-rate 8000
  penstock planner --record events.jsonl
  penstock planner replay events.jsonl
  penstock plan top --every 1s`,
		Args: args(cobra.NoArgs),
	}
	var record string
	cmd.Flags().StringVar(&record, "record", "", "file to write every event and decision to, for penstock planner replay; at most 1 GiB; a file of that name is kept as FILE.old")
	cmd.AddCommand(newPlannerReplay())
	runWithSettings(cmd, w, config.DefaultPlanner, checkSchedule, func(ctx context.Context, from source[config.Planner]) error {
		level := newLevel(from.cfg.Log)
		return runPlanner(ctx, from, record, level, newLogger(w.err, from.cfg.Log.Format, level))
	})
	return cmd
}

// checkSchedule reports errors in the schedule, which the configuration does not check.
func checkSchedule(c config.Planner) error {
	_, err := scheduleOf(c.Schedule)
	return err
}

// scheduleOf converts the configuration to the planner's options.
func scheduleOf(c config.Schedule) (dualpath.Options, error) {
	policy, err := dualpath.ParseReadPolicy(c.ReadPolicy)
	if err != nil {
		return dualpath.Options{}, fmt.Errorf("config: schedule.read_policy: %w: %w", err, config.ErrConfig)
	}
	weights, err := weightsOf(c.Weights)
	if err != nil {
		return dualpath.Options{}, err
	}
	o := dualpath.Options{
		Weights: weights, ReadRate: c.ReadRate, PrefillRate: c.PrefillRate, Alpha: c.Alpha, Beta: c.Beta, ZFactor: c.ZFactor, Policy: policy,
		BlockTokens: c.BlockTokens, MinPart: c.MinPart, SlowFactor: c.SlowFactor, HedgeFactor: c.HedgeFactor, MaxHedge: c.MaxHedge,
		Patience: c.Patience.Std(), GroupTimeout: c.GroupTimeout.Std(), MaxQueue: c.MaxQueue, MaxExplain: c.Explain,
	}
	o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return o, fmt.Errorf("config: schedule: %w: %w", err, config.ErrConfig)
	}
	return o, nil
}

// weightsOf parses TENANT=WEIGHT. The weight follows the last =.
func weightsOf(list []string) (map[string]float64, error) {
	weights := make(map[string]float64, len(list))
	for _, text := range list {
		at := strings.LastIndexByte(text, '=')
		w, err := strconv.ParseFloat(text[at+1:], 64)
		if at < 1 || err != nil {
			return nil, fmt.Errorf("config: schedule.weights: %q: want TENANT=WEIGHT, e.g. team-a=2: %w", text, config.ErrConfig)
		}
		tenant := text[:at]
		if _, twice := weights[tenant]; twice {
			return nil, fmt.Errorf("config: schedule.weights: tenant %q has two weights: %w", tenant, config.ErrConfig)
		}
		weights[tenant] = w
	}
	return weights, nil
}

// runPlanner serves until ctx ends, and reloads the configuration at a hangup. It
// writes events to the file record, unless record is "".
func runPlanner(ctx context.Context, from source[config.Planner], record string, level *slog.LevelVar, log *slog.Logger) (err error) {
	cfg := from.cfg
	schedule, err := scheduleOf(cfg.Schedule)
	if err != nil {
		return err
	}
	live, err := newLive(cfg.Auth, level, cfg.DrainWithin, &manager{socket: from.notifySocket, log: log})
	if err != nil {
		return err
	}
	if _, err := live.followRoles(cfg.Auth, cfg.Cluster.Connection(), log); err != nil {
		return err
	}
	stopTracing, err := startTracing(ctx, cfg.Trace, "planner", log)
	if err != nil {
		return err
	}
	defer func() {
		within, cancel := context.WithTimeout(context.WithoutCancel(ctx), live.drain()) // ctx has ended
		defer cancel()
		stopTracing(within)
	}()
	control, web, err := listenBoth(ctx, cfg.Listen, cfg.HTTP, cfg.Auth.Roles(), log)
	if err != nil {
		return err
	}
	registry := newRegistry()
	network, oracle, err := networkOf(cfg.Network, log, registry)
	if err != nil {
		return errors.Join(err, control.Close(), closeIf(web))
	}
	if oracle != nil {
		defer oracle.Close()
	}
	open := &plannerOpening{schedule: schedule, network: network, record: record, registry: registry, log: log}
	service, closeService, err := open.planner(cfg, control.Addr())
	if err != nil {
		return errors.Join(err, control.Close(), closeIf(web))
	}
	defer func() { err = errors.Join(err, closeService()) }() // runs after Shutdown, which writes the end of the record
	if oracle != nil {
		oracle.Watch(func(s netoracle.State) { service.SetNetwork(networkOfState(s)) })
	}
	node := server.NewPlannerNode(server.PlannerOptions{Service: service, Name: "planner " + control.Addr().String(), Tokens: live.credentials.Tokens, Roles: live.credentials.Roles, ClientCAs: live.credentials.ClientCAs, TLS: live.credentials.ServerTLS(), Registry: registry, Logger: log})
	log.Info("ready", append(addresses("grpc", control, web), "read_policy", schedule.Policy.String(), "alpha", schedule.Alpha, "beta", schedule.Beta)...)
	live.follow(cfg.Keys(), from.path, func(context.Context) (reload.Candidate, error) {
		next, err := from.read()
		return reload.Candidate{Keys: next.Keys(), Auth: next.Auth, Apply: func() { live.apply(next.Log, next.DrainWithin) }}, err
	}, nil, node.EndUnverified, metrics.NewReloads(registry), log)
	defer live.run(ctx, from.hangups)()
	return serveUntil(ctx, log, live, func() error { return node.Serve(control, web) }, node.Shutdown)
}
