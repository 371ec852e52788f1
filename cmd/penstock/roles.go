package main

import (
	"context"
	"log/slog"

	"github.com/penstock-kv/penstock/server/config"
	"github.com/penstock-kv/penstock/server/membership"
)

// openRoles returns the roles document of auth.roles_etcd, nil if the setting is empty.
func openRoles(auth config.Auth, c config.Cluster, log *slog.Logger) (*membership.Roles, error) {
	if auth.RolesEtcd == "" {
		return nil, nil
	}
	secure, password, err := etcdCredentials(c, log)
	if err != nil {
		return nil, err
	}
	return membership.NewRoles(membership.RolesOptions{
		Endpoints: c.Etcd, TLS: secure, Username: c.User, Password: password, Key: auth.RolesEtcd, Timeout: c.LeaseTTL.Std(),
	})
}

// followRoles makes run follow the roles document, and returns it, nil without auth.roles_etcd. run closes it.
func (l *live) followRoles(auth config.Auth, c config.Cluster, log *slog.Logger) (*membership.Roles, error) {
	roles, err := openRoles(auth, c, log)
	if roles != nil {
		l.roles = func(ctx context.Context) {
			roles.Follow(ctx, func(d membership.RolesDocument) { l.reloader.TakeRoles(d.Text, d.Revision, d.Until) }, l.reloader.RolesFailed)
			_ = roles.Close() // it closes only connections
		}
	}
	return roles, err
}
