package main

import (
	"context"
	"log/slog"
	"net"
	"os"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/dualpath/netcost"
	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/config"
	"github.com/penstock-kv/penstock/server/membership"
	"github.com/penstock-kv/penstock/server/planner"
)

// plannerService is a planner that may be elected.
type plannerService interface {
	server.PlannerService
	SetNetwork(planner.Network)
}

// plannerOpening opens the service of a planner.
type plannerOpening struct {
	schedule dualpath.Options
	network  *netcost.Planner // nil: the costs of the network are equal
	record   string           // file; "": none
	registry *prometheus.Registry
	log      *slog.Logger
}

// planner opens the service that cfg describes. With cfg.Cluster it is elected: it has a service
// without state in each of its terms. The caller calls closed after the service's Close.
func (o *plannerOpening) planner(cfg config.Planner, listener net.Addr) (s plannerService, closed func() error, err error) {
	if !cfg.Cluster.On() {
		return o.service(nil)
	}
	c := cfg.Cluster.Connection()
	secure, password, err := etcdCredentials(c, o.log)
	if err != nil {
		return nil, nil, err
	}
	addr, err := electionAddress(cfg.Listen, listener)
	if err != nil {
		return nil, nil, err
	}
	by, err := membership.NewElection(membership.ElectionOptions{
		Endpoints: c.Etcd, Prefix: c.Prefix, TLS: secure, Username: c.User, Password: password, TTL: c.LeaseTTL.Std(), Address: addr, Logger: o.log,
	})
	if err != nil {
		return nil, nil, err
	}
	elected, err := planner.NewElected(planner.ElectedOptions{
		Election: election{by}, New: o.service, Registry: o.registry,
		Failed: func(err error) { o.log.Error("this planner cannot serve; it gives its term up", "err", err) },
	})
	if err != nil {
		return nil, nil, err
	}
	return elected, by.Close, nil
}

// service opens a service without state. lease is nil if the planner is not elected.
func (o *plannerOpening) service(lease planner.Lease) (s *planner.Service, closed func() error, err error) {
	opts := planner.Options{Planner: o.schedule, Lease: lease, Logger: o.log, Registry: o.registry}
	if o.network != nil {
		// The costs have the transfers in flight of one service.
		cost, err := netcost.NewPlanner(o.network.Options())
		if err != nil {
			return nil, nil, err
		}
		opts.Planner.Network = cost
	}
	closed = func() error { return nil }
	if o.record != "" {
		file, err := openRecord(o.record)
		if err != nil {
			return nil, nil, err
		}
		opts.Record, closed = &planner.Record{To: file}, file.Close
		if o.network != nil {
			made := o.network.Options()
			opts.Record.Network = &made
		}
	}
	if s, err = planner.New(opts); err != nil {
		_ = closed() // nothing was written
		return nil, nil, err
	}
	return s, closed, nil
}

// electionAddress returns the address by which an election names this planner: that of --listen with the
// port of the listener, and the name of this machine if --listen has no host.
func electionAddress(listen string, listener net.Addr) (string, error) {
	host, _, err := net.SplitHostPort(listen)
	if err != nil {
		return "", err
	}
	_, port, err := net.SplitHostPort(listener.String()) // listen may have the port 0
	if err != nil {
		return "", err
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		if host, err = os.Hostname(); err != nil {
			return "", err
		}
	}
	return net.JoinHostPort(host, port), nil
}

// election is a membership.Election for package planner.
type election struct{ *membership.Election }

// Campaign implements planner.Election.
func (e election) Campaign(ctx context.Context) (planner.Lease, error) {
	t, err := e.Election.Campaign(ctx)
	if err != nil {
		return nil, err
	}
	return t, nil
}

// Leader implements planner.Election.
func (e election) Leader() planner.Leader {
	r := e.Election.Leader()
	return planner.Leader{Address: r.Address, Term: r.Term, Since: r.Since}
}
