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
	if err := planner.Validate(); err == nil || !strings.Contains(err.Error(), "auth.roles_file is set; set one") {
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
	if err := gateway.Validate(); err == nil || !strings.Contains(err.Error(), "auth.roles_file: concerns nodes and planners") {
		t.Errorf("a gateway with roles: %v", err)
	}
}
