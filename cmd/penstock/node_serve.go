package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/access"
	"github.com/penstock-kv/penstock/server/config"
	"github.com/penstock-kv/penstock/server/handoff"
	"github.com/penstock-kv/penstock/server/metrics"
)

// listen binds the listeners before the slow part of the start, so that a port in use is reported
// first.
func (n *node) listen() (err error) {
	// Multipath TCP is off, because its sockets refuse options that the data plane uses, and both
	// ends are in one cluster.
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	if n.control, err = lc.Listen(context.Background(), "tcp", n.cfg.Listen); err != nil {
		return fmt.Errorf("control plane (listen): %w", err)
	}
	n.onClose(closeListener(n.control))
	if n.cfg.HTTP == "" {
		return nil
	}
	if n.web, err = lc.Listen(context.Background(), "tcp", n.cfg.HTTP); err != nil {
		return fmt.Errorf("metrics and health (http): %w", err)
	}
	warnOfMetrics(n.log, n.cfg.HTTP, n.cfg.Auth.Roles())
	n.onClose(closeListener(n.web))
	return nil
}

// warnOfMetrics logs what other machines can read without a token or, if there is a roles file, that
// tokens go over the network in plain text.
func warnOfMetrics(log *slog.Logger, http string, roles bool) {
	switch {
	case config.Loopback(http):
	case roles:
		log.Warn("/metrics is served to other machines without TLS, so the tokens of scrapers go over the network in plain text; let only the monitoring network reach this port, or listen on 127.0.0.1", "http", http)
	default:
		log.Warn("/metrics and health are served to other machines without a token or TLS: they show the names of namespaces, volumes and NICs, and traffic; let only the monitoring network reach this port, or listen on 127.0.0.1", "http", http)
	}
}

// closeListener closes a listener that a server may have closed already.
func closeListener(l net.Listener) func(context.Context) error {
	return func(context.Context) error {
		if err := l.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			return err
		}
		return nil
	}
}

// openServer starts the data plane and joins all parts.
func (n *node) openServer(ctx context.Context, memory *arena.Arena, counters *metrics.Node, registry *prometheus.Registry, level *slog.LevelVar) (err error) {
	if n.live, err = newLive(n.cfg.Auth, level, n.cfg.DrainWithin, &manager{socket: n.from.notifySocket, log: n.log}); err != nil {
		return err
	}
	n.live.follow(n.from.cfg.Keys(), n.from.path, n.candidate, n.checkRoles, func() {
		n.server.EndRemovedSessions()
		n.storage.SetTenantQuotas(n.live.credentials.Roles().TenantQuotas())
	}, counters.Reloads, n.log)
	n.storage.SetTenantQuotas(n.live.credentials.Roles().TenantQuotas())
	roles, err := n.live.followRoles(n.cfg.Auth, n.cfg.Cluster, n.log)
	if err != nil {
		return err
	}
	var document server.RolesDocument
	if roles != nil {
		document = roles
	}
	tlsConfig := n.live.credentials.ServerTLS()
	secret := make(rdma.Token, 32)
	if _, err := rand.Read(secret); err != nil {
		return err
	}
	sessions, err := server.NewSessions(secret, n.live.credentials.Tokens, n.live.credentials.Roles, n.live.credentials.ClientCAs)
	if err != nil {
		return err
	}
	dataTLS := tlsConfig
	if !n.cfg.Encrypted() {
		dataTLS = nil
	}
	n.data, err = n.plane.open(ctx, planeOptions{
		listen:     n.cfg.DataListen,
		advertise:  n.cfg.DataAddr(),
		admission:  sessions.Admission(),
		tls:        dataTLS,
		congestion: congestion(n.cfg.DataPlane.Congestion),
		memory:     memory,
		log:        n.log,
	})
	if err != nil {
		return fmt.Errorf("data plane (provider %s, data_listen): %w", n.plane.provider, withNICs(err))
	}
	n.onClose(func(context.Context) error { return n.data.Close() })
	local, err := n.openLocal(memory)
	if err != nil {
		return err
	}
	links := newLinkRates()
	if n.cluster, err = n.join(links); err != nil {
		return err
	}
	n.openAdopter(level)
	var adoption server.Adopter
	if n.adopter != nil {
		adoption = n.adopter
	}
	n.server, err = server.New(server.Options{
		Cluster:  n.cluster,
		Adopter:  adoption,
		Fence:    n.fence,
		Node:     n.cfg.Node,
		Version:  readBuildInfo().String(),
		Storage:  n.storage,
		Arena:    memory,
		Data:     n.data,
		Sessions: sessions,
		DataPort: portOf(n.dataAddr()),
		Local:    local,
		Limits: server.Limits{
			ReadBytes:   int64(n.cfg.Limits.ReadBytes),
			WriteBytes:  int64(n.cfg.Limits.WriteBytes),
			ChainBlocks: n.cfg.Limits.ChainBlocks,
			LandWithin:  n.cfg.Limits.QueueWait.Std(),
		},
		Volumes:       n.volumes,
		LinkRate:      links.of,
		Durability:    n.cfg.Durability,
		CapacityBytes: n.share.capacityBytes,
		MemoryBudget:  n.budget.parts,
		Tokens:        n.live.credentials.Tokens,
		Roles:         n.live.credentials.Roles,
		RolesDocument: document,
		RolesState:    n.live.credentials.RolesState,
		ClientCAs:     n.live.credentials.ClientCAs,
		TLS:           tlsConfig,
		Config:        n.live.reloader,
		Metrics:       counters,
		Registry:      registry,
		Logger:        n.log,
	})
	return err
}

// checkRoles returns an error if the node cannot use a policy, which may be nil.
func (n *node) checkRoles(p *access.Policy) error {
	return n.storage.CheckTenantQuotas(p.TenantQuotas())
}

// openLocal returns a listener on the unix socket, for engines on this host, or nil if no socket is
// configured.
func (n *node) openLocal(memory *arena.Arena) (*handoff.Listener, error) {
	if n.cfg.LocalSocket == "" {
		return nil, nil
	}
	local, err := handoff.Listen(handoff.Options{
		Path: n.cfg.LocalSocket, Arena: memory, StagingBytesMax: int64(n.cfg.Limits.StagingBytes), Logger: n.log,
	})
	if err != nil {
		return nil, fmt.Errorf("engines on this host (local_socket): %w", err)
	}
	n.budget.local.Store(local)
	n.onClose(func(context.Context) error { return local.Close() })
	return local, nil
}

// dataAddr returns the address of the data plane's listener, with the actual port.
func (n *node) dataAddr() string {
	return cmp.Or(listensOn(n.data), n.cfg.DataListen)
}

// congestion returns the transfer engine's name for the configured congestion control.
// An empty setting means the system's default.
func congestion(name string) string {
	if name == "" {
		return "system"
	}
	return name
}

func portOf(addr string) int {
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return 0
	}
	n, err := strconv.Atoi(port)
	if err != nil {
		return 0
	}
	return n
}
