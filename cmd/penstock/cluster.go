package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/certs"
	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/config"
	"github.com/penstock-kv/penstock/server/membership"
)

// join begins to make the node a member of the configured cluster. It returns nil if the node stands
// alone.
func (n *node) join(links *linkRates) (*membership.Cluster, error) {
	c := n.cfg.Cluster
	if len(c.Etcd) == 0 {
		return nil, nil
	}
	secure, password, err := etcdCredentials(c, n.log)
	if err != nil {
		return nil, err
	}
	host, _, err := net.SplitHostPort(n.cfg.ControlAddr())
	if err != nil {
		return nil, err
	}
	_, port, err := net.SplitHostPort(n.control.Addr().String()) // listen may have the port 0
	if err != nil {
		return nil, err
	}
	var held func() error
	if n.owner != nil {
		held = n.owner.Held
	}
	mv := &moves{node: n, addr: net.JoinHostPort(host, port)}
	m, err := membership.Join(membership.Options{
		Held:      held,
		Endpoints: c.Etcd, Prefix: c.Prefix, TLS: secure, Username: c.User, Password: password, TTL: c.LeaseTTL.Std(),
		Member: membership.Member{Name: n.cfg.Node, Addr: mv.addr, Store: n.storeID, Zone: c.Zone, Version: readBuildInfo().String()},
		Usage: func() membership.Usage {
			st := n.storage.Stats()
			return membership.Usage{
				CapacityBytes: n.share.capacityBytes, UsedBytes: st.Store.Slots.UsedBytes() + st.Index.DiskBytes, Blocks: st.Index.Pieces, Leases: st.Index.Leases,
			}
		},
		Details: func() membership.Details { return server.Details(n.storage, n.data, links.of) },
		Move:    mv.state, Copies: mv.copied, Node: n.storage, Logger: n.log,
	})
	if err != nil {
		return nil, err
	}
	n.onClose(func(ctx context.Context) error {
		limited, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		if err := m.Close(limited); err != nil {
			n.log.Warn("etcd did not confirm that this node has left; its lease ends by itself", "err", err)
		}
		return nil
	})
	n.moves = mv
	n.onClose(func(context.Context) error {
		mv.close()
		return nil
	})
	mv.start(m)
	return m, nil
}

// etcdCredentials returns the TLS configuration of the connections to etcd, nil for plain text, and the
// password.
func etcdCredentials(c config.Cluster, log *slog.Logger) (*tls.Config, string, error) {
	secure, err := etcdTLS(c, log)
	if err != nil {
		return nil, "", fmt.Errorf("config: cluster: %w: %w", err, config.ErrConfig)
	}
	if c.PasswordFile == "" {
		return secure, "", nil
	}
	password, err := os.ReadFile(c.PasswordFile)
	if err != nil {
		return nil, "", fmt.Errorf("config: cluster.password_file: %w: %w", err, config.ErrConfig)
	}
	return secure, strings.TrimSpace(string(password)), nil
}

// etcdTLS returns the configuration of the connections to etcd, or nil for plain text.
func etcdTLS(c config.Cluster, log *slog.Logger) (*tls.Config, error) {
	if c.CA == "" && c.Cert == "" {
		return nil, nil
	}
	t := &tls.Config{MinVersion: tls.VersionTLS12}
	if c.CA != "" {
		pool, err := certs.Pool(c.CA)
		if err != nil {
			return nil, err
		}
		t.RootCAs = pool
	}
	if c.Cert != "" {
		pair, err := certs.OpenPair(c.Cert, c.Key, log)
		if err != nil {
			return nil, err
		}
		pair.SetOn(t)
	}
	return t, nil
}

func newClusterCommand(w world) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cluster",
		Short: "Show, drain and remove the nodes of a cluster, and replace its roles",
		Long: `Show, drain and remove the nodes of a cluster, and replace its roles. Nodes with the same setting cluster.etcd and cluster.prefix
are a cluster: a namespace that is created, bumped or deleted on one of them changes on all.`,
	}
	c := addConnectionFlags(cmd, w)
	return noun(cmd, newClusterMembers(c), newClusterStatus(c), newClusterDrain(w, c), newClusterUndrain(c), newClusterRebalance(w, c), newClusterRemove(c), newClusterReadmit(c), newClusterRestartPlan(c), newClusterRoles(w, c))
}

func newClusterMembers(c *connection) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "members",
		Short: "List the nodes of the cluster, as etcd has them",
		Long: `List the nodes of the cluster, as etcd has them. A node that was stopped or is lost is down, until
it starts or is removed; it becomes down at most cluster.lease_ttl after its end. SINCE is the
time at which a node joined, or at which its lease ended: "after" a time, if no other node was
there at the end. VOLUMES, NICS (with the sum of their link rates) and the use are those of
the node's last record. Only callers with the role operate see the volumes. APPLIED is the
revision of etcd up to which a node has applied all changes of namespaces. A line below the
table has the progress of each node that drains, or copies sequences to nodes that have
joined, and what each node that is down had. With --details, further tables have each volume
and each NIC.`,
		Args: args(cobra.NoArgs),
	}
	details := cmd.Flags().Bool("details", false, "list the volumes and the NICs of all nodes, too")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return c.admin(cmd, func(ctx context.Context, a admin) error {
			resp, err := a.ListMembers(ctx, &pb.ListMembersRequest{Nodes: true})
			if err != nil {
				return err
			}
			return outputOf(cmd).emit(resp, func(t *table) {
				printMembers(t, resp)
				if *details {
					printDetails(t, append(slices.Clone(resp.GetMembers()), resp.GetDown()...))
				}
			})
		})
	}
	return cmd
}
