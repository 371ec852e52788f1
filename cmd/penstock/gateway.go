package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/client/gateway"
	"github.com/penstock-kv/penstock/client/relay"
	"github.com/penstock-kv/penstock/dualpath/prfaas"
	"github.com/penstock-kv/penstock/internal/certs"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/config"
	"github.com/penstock-kv/penstock/server/front"
	"github.com/penstock-kv/penstock/server/metrics"
	"github.com/penstock-kv/penstock/server/offload"
	"github.com/penstock-kv/penstock/server/reload"
)

func newGatewayCommand(w world) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "gateway --engine URL[,URL…]",
		Short: "Run an OpenAI-compatible front of inference engines",
		Long: `Run an OpenAI-compatible HTTP front of inference engines (vLLM, SGLang). Requests with
the same prompt prefix go to the same engine, which has the prefix's KV in its memory.
The others go to the engine with the fewest requests. Requests and answers are passed
through unchanged, streams event by event.

A request goes to another engine if the first is down, has many more requests than the
others, or fails before it has sent the first byte of an answer. When all engines are busy
a request waits, at most --queue-wait, and is then answered with 429 and Retry-After.

With --planner the gateway is in front of a prefill/decode cluster: it has an engine
tokenize the prompt, asks the storage nodes (--servers, --namespace) for its cached
prefix, and sends each request to the prefill and the decode engine that the planner has
chosen. --engine NAME=URL then has the name that the engine's leader registers. docs/gateway.md has
the rest.

A setting comes from a flag, else from the environment (PENSTOCK_ and the path of
the key: PENSTOCK_MAX_IN_FLIGHT), else from --config FILE (YAML), else it has the
default shown here.

SIGTERM and SIGINT drain: no connection is accepted, and requests in flight finish within
--drain-timeout.

SIGHUP applies changes of the API's tokens and certificates, the log level and
--drain-timeout in the configuration file while the gateway serves; the log names a
changed setting that needs a restart, and nothing is applied then. Tokens and
certificates are also applied when their files change.`,
		Example: `  penstock gateway --engine http://10.0.0.1:8000 --engine http://10.0.0.2:8000
  penstock gateway --config gateway.yaml --listen 127.0.0.1:8080
  penstock gateway --planner a:7430 --namespace m --servers b:7420 --engine p0=http://c:8000`,
		Args: args(cobra.NoArgs),
	}
	runWithSettings(cmd, w, config.DefaultGateway, nil, func(ctx context.Context, from source[config.Gateway]) error {
		cfg, level, registry := from.cfg, newLevel(from.cfg.Log), newRegistry()
		log := newLogger(w.err, cfg.Log.Format, level)
		if cfg.Planner == "" {
			return runGateway(ctx, from, nil, registry, level, log)
		}
		return withCluster(ctx, cfg, w.startWithin, registry, log, func(p front.Planner) error {
			return runGateway(ctx, from, p, registry, level, log)
		})
	})
	return cmd
}

// storageOf returns a connection to storage nodes with the credentials of a gateway. flag is the
// flag that names the nodes.
func storageOf(cfg *config.Gateway, flag string, servers []string, discover bool, startWithin time.Duration) *connection {
	return &connection{
		endpoint: endpoint{flag: flag}, servers: strings.Join(servers, ","), discover: discover, zone: cfg.Zone, tokenFile: cfg.TokenFile, ca: cfg.CA, cert: cfg.Cert, key: cfg.CertKey,
		tls: cfg.TLS, insecure: cfg.PlainToken, startWithin: startWithin,
	}
}

// withCluster calls run with a client of the planner and the storage nodes.
func withCluster(ctx context.Context, cfg config.Gateway, startWithin time.Duration, registry *prometheus.Registry, log *slog.Logger, run func(front.Planner) error) error {
	c := storageOf(&cfg, "servers", cfg.Servers, cfg.Discover, startWithin)
	return c.store(ctx, log, func(store *client.Store) error {
		ns, err := store.Namespace(ctx, cfg.Namespace)
		if err != nil {
			return err
		}
		if ns.Index != kv.IndexTrie {
			return fmt.Errorf("config: namespace: %q is flat, but a gateway matches prefixes and needs a namespace with --index trie: %w", ns.Name, config.ErrConfig)
		}
		conn, err := c.dialPlanner(cfg.Planner)
		if err != nil {
			return fmt.Errorf("planner: %w", err)
		}
		defer conn.Close()
		session, err := gateway.New(gateway.Options{Namespace: ns, Store: store, Planner: conn})
		if err != nil {
			return err
		}
		if cfg.Offload.URL == "" {
			return run(session)
		}
		there := storageOf(&cfg, "offload-servers", cfg.Offload.Servers, cfg.Offload.Discover, startWithin)
		return there.store(ctx, log, func(far *client.Store) error {
			return withOffload(ctx, &cfg, session, ns, store, far, registry, log, run)
		})
	})
}

// withOffload calls run with a planner client that prefills long prompts in another datacenter. far
// is the store of that datacenter.
func withOffload(ctx context.Context, cfg *config.Gateway, session *gateway.Gateway, ns kv.Namespace, store, far *client.Store, registry *prometheus.Registry, log *slog.Logger, run func(front.Planner) error) (err error) {
	o := &cfg.Offload
	if err := sameNamespace(ctx, far, ns, ns); err != nil {
		return err
	}
	var shards []kv.Namespace
	for _, name := range cfg.OffloadShards() {
		shard, err := store.Namespace(ctx, name)
		if err != nil {
			return fmt.Errorf("offload.shards: %w", err)
		}
		if err := sameNamespace(ctx, far, shard, ns); err != nil {
			return err
		}
		shards = append(shards, shard)
	}
	base, err := url.Parse(o.URL)
	if err != nil {
		return fmt.Errorf("config: offload.url: %w", err)
	}
	token, err := openToken(o.KeyFile, log)
	if err != nil {
		return err
	}
	link, err := relay.New(relay.Options{From: far, To: store, BytesPerSecond: float64(o.LinkRate), MemoryBytes: int64(o.Memory)})
	if err != nil {
		return err
	}
	defer func() {
		within, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		err = errors.Join(err, link.Close(within))
	}()
	f, err := offload.New(offload.Options{
		Gateway: session, Namespace: ns, Shards: shards, Here: store, There: far, Link: link, URL: base, Model: o.Model, TokenSource: token,
		Router:   prfaas.Router{Threshold: float64(o.Threshold), Abundant: o.Abundant},
		InFlight: o.InFlight, Timeout: o.Timeout.Std(), BacklogMax: o.Backlog.Std(), Logger: log, Registry: registry,
	})
	if err != nil {
		return err
	}
	return run(f)
}

// sameNamespace returns an error if far has another definition of a namespace, or if its block ids are not
// those of first.
func sameNamespace(ctx context.Context, far *client.Store, ns, first kv.Namespace) error {
	there, err := far.Namespace(ctx, ns.Name)
	if err != nil {
		return fmt.Errorf("offload.servers: %w", err)
	}
	if there.Geometry.Digest() != ns.Geometry.Digest() || there.Index != ns.Index || !bytes.Equal(there.Salt, ns.Salt) {
		return fmt.Errorf("config: offload.servers: namespace %q has another definition than at servers: %w", ns.Name, config.ErrConfig)
	}
	if ns.Geometry.BlockTokens != first.Geometry.BlockTokens || ns.Index != first.Index || !bytes.Equal(ns.Salt, first.Salt) {
		return fmt.Errorf("config: offload.shards: namespace %q has other tokens in a block, another index or another salt than namespace %q: %w", ns.Name, first.Name, config.ErrConfig)
	}
	return nil
}

// frontOf converts the configuration to the options of package front, the HTTP server of the
// gateway.
func frontOf(cfg config.Gateway) (front.Options, error) {
	o := front.Options{
		MaxInFlight: cfg.MaxInFlight, MaxQueue: cfg.MaxQueue, QueueWait: cfg.QueueWait.Std(),
		MaxAttempts: cfg.MaxAttempts, LoadFactor: cfg.LoadFactor, PrefixBlocks: cfg.PrefixBlocks,
		MaxBodyBytes: int64(cfg.MaxBody), BodyMemoryBytes: int64(cfg.BodyMemory),
		HealthInterval: cfg.HealthInterval.Std(), HealthTimeout: cfg.HealthTimeout.Std(),
		TenantHeader: cfg.TenantHeader, FirstToken: cfg.FirstToken.Std(), FirstTokenHeader: cfg.FirstHeader,
		OutputTokens: cfg.OutputTokens, ReplanWait: cfg.ReplanWait.Std(),
	}
	for _, text := range cfg.Engines {
		name, base := config.NamedEngine(text)
		o.Engines = append(o.Engines, front.Engine{Name: name, URL: base})
	}
	if cfg.EngineCA != "" {
		pool, err := certs.Pool(cfg.EngineCA)
		if err != nil {
			return o, fmt.Errorf("config: engine_ca: %w", err)
		}
		o.EngineTLS = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	}
	return o, nil
}

// runGateway serves until ctx ends, and then drains. It reloads the configuration at a hangup.
// planner may be nil.
func runGateway(ctx context.Context, from source[config.Gateway], planner front.Planner, registry *prometheus.Registry, level *slog.LevelVar, log *slog.Logger) error {
	cfg := from.cfg
	opts, err := frontOf(cfg)
	if err != nil {
		return err
	}
	if planner != nil {
		opts.Planner, opts.Instance = planner, rand.Text()
	}
	live, err := newLive(cfg.Auth, level, cfg.DrainWithin, &manager{socket: from.notifySocket, log: log})
	if err != nil {
		return err
	}
	opts.Tokens = live.credentials.Tokens
	api, web, err := listenBoth(ctx, cfg.Listen, cfg.HTTP, false, log)
	if err != nil {
		return err
	}
	opts.Logger, opts.Registry = log, registry
	handler, err := front.New(opts)
	if err != nil {
		return errors.Join(err, api.Close(), closeIf(web))
	}
	node := server.NewFrontNode(server.FrontOptions{Front: handler, TLS: live.credentials.ServerTLS(), Registry: registry})
	log.Info("ready", append(addresses("listen", api, web), "engines", len(cfg.Engines))...)
	live.follow(cfg.Keys(), from.path, func(context.Context) (reload.Candidate, error) {
		next, err := from.read()
		return reload.Candidate{Keys: next.Keys(), Auth: next.Auth, Apply: func() { live.apply(next.Log, next.DrainWithin) }}, err
	}, nil, nil, metrics.NewReloads(registry), log)
	defer live.run(ctx, from.hangups)()
	return serveUntil(ctx, log, live, func() error { return node.Serve(api, web) }, node.Shutdown)
}
