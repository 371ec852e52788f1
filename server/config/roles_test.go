package config_test

import (
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/server/config"
)

// TestRolesFile: a roles file protects a listener beyond loopback, excludes a token file, and is no
// setting of a gateway.
func TestRolesFile(t *testing.T) {
	planner := config.DefaultPlanner()
	planner.Listen = "0.0.0.0:7430"
	if err := planner.Validate(); err == nil || !strings.Contains(err.Error(), "auth.roles_file or auth.roles_etcd is set; set one") {
		t.Errorf("a planner beyond loopback without credentials: %v", err)
	}
	planner.Auth.RolesFile = "roles.yaml"
	if err := planner.Validate(); err != nil {
		t.Errorf("a planner beyond loopback with roles: %v", err)
	}
	planner.Auth.TokenFile = "token"
	if err := planner.Validate(); err == nil || !strings.Contains(err.Error(), "auth.roles_file: is set together with auth.token_file") {
		t.Errorf("roles and tokens: %v", err)
	}
	gateway := config.DefaultGateway()
	gateway.Auth.RolesFile = "roles.yaml"
	if err := gateway.Validate(); err == nil || !strings.Contains(err.Error(), "auth.roles_file, auth.roles_etcd: concern nodes and planners") {
		t.Errorf("a gateway with roles: %v", err)
	}
}

// TestRolesEtcd: a key in etcd protects a listener as a roles file does, and excludes one. It needs etcd, and must be no
// other key of the cluster.
func TestRolesEtcd(t *testing.T) {
	planner := config.DefaultPlanner()
	planner.Listen, planner.Auth.RolesEtcd = "0.0.0.0:7430", "/penstock/roles"
	refused := func(want string) {
		t.Helper()
		if err := planner.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", planner.Auth, err, want)
		}
	}
	refused("auth.roles_etcd: needs cluster.etcd")
	planner.Cluster.Etcd = []string{"127.0.0.1:2379"}
	for _, key := range []string{"/penstock/roles", "/other/key"} {
		planner.Auth.RolesEtcd = key
		if err := planner.Validate(); err != nil {
			t.Errorf("%s: %v", key, err)
		}
	}
	for _, key := range []string{"penstock/roles", "/penstock/", "/penstock/members/a", "/penstock/roles/x"} {
		planner.Auth.RolesEtcd = key
		refused("only /penstock/roles is free")
	}
	planner.Auth.RolesEtcd, planner.Auth.RolesFile = "/penstock/roles", "roles.yaml"
	refused("auth.roles_etcd: is set together")
	planner.Auth.RolesFile, planner.Auth.TokenFile = "", "token"
	refused("auth.roles_etcd: is set together")

	node := config.Default()
	node.Data, node.Auth.RolesEtcd = []string{"/data"}, "/penstock/roles"
	if err := node.Validate(); err == nil || !strings.Contains(err.Error(), "auth.roles_etcd: needs cluster.etcd") {
		t.Errorf("a node without etcd: %v", err)
	}
	gateway := config.DefaultGateway()
	gateway.Auth.RolesEtcd = "/penstock/roles"
	if err := gateway.Validate(); err == nil || !strings.Contains(err.Error(), "auth.roles_etcd: concern nodes and planners") {
		t.Errorf("a gateway with roles: %v", err)
	}
}
