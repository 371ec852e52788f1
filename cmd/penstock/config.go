package main

import (
	"context"

	"github.com/spf13/cobra"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
)

func newConfigCommand(w world) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Compare a running node with its configuration file, and reload it",
		Long: `Compare a running node with its configuration file, and reload the file. The node reads
its own file (the --config of its penstock serve), with its own flags and environment,
which win over the file.

A reload applies: auth.token_file, auth.roles_file, auth.tls_cert, auth.tls_key and
auth.client_ca, and the content of these files; limits.reads, limits.writes,
limits.leases, limits.lease_ttl, limits.reservation_ttl, limits.loan_bytes,
limits.queue_wait, limits.read_wait; free_floor; scrub_rate; encryption.keys_file,
encryption.keys_command, encryption.rewrite_rate; log.level; drain_timeout; insecure.
The other settings need a restart. The quota of a namespace is not in the file: see
penstock ns quota. The quotas of tenants are in the roles.

To replace a bearer token without a failed call: list the new and the old token in the
token file, one a line, and reload; give the clients the new token (a client sends the
first one of its file, which it reads again when it has changed); remove the old token
and reload.`,
	}
	c := addConnectionFlags(cmd, w)
	return noun(cmd, newConfigDiff(c), newConfigReload(c))
}

func newConfigDiff(c *connection) *cobra.Command {
	return &cobra.Command{
		Use:   "diff",
		Short: "Show the settings that differ between a running node and its file",
		Long: `Show the settings that differ between a running node and its file, and whether a reload
applies them or only a restart, with the reason. It changes nothing.

The exit code is 0 if nothing differs, and 1 if a setting differs. It is 1 too if the file
is invalid; then there is an error on standard error and no output.`,
		Example: `  penstock config diff
  penstock config diff --format json`,
		Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.admin(cmd, func(ctx context.Context, a admin) error {
				d, err := a.DiffConfig(ctx, &pb.DiffConfigRequest{})
				if err != nil {
					return err
				}
				err = outputOf(cmd).emit(d, func(t *table) { printDiff(t, d) })
				if err == nil && len(d.GetChanges()) > 0 {
					return errReported
				}
				return err
			})
		},
	}
}

func newConfigReload(c *connection) *cobra.Command {
	return &cobra.Command{
		Use:   "reload",
		Short: "Make a running node apply its configuration file, as SIGHUP does",
		Long: `Make a running node apply its configuration file, as SIGHUP does. Connections and calls
in progress go on. If a value is invalid, a file of tokens or certificates cannot be used,
or a setting differs that needs a restart, then nothing is applied and the error names
each such setting.`,
		Example: "  penstock config reload",
		Args:    args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.admin(cmd, func(ctx context.Context, a admin) error {
				r, err := a.ReloadConfig(ctx, &pb.ReloadConfigRequest{})
				if err != nil {
					return err
				}
				return outputOf(cmd).emit(r, func(t *table) { printReload(t, r) })
			})
		},
	}
}

// configOf returns a phrase for where the configuration comes from, for use in a sentence.
func configOf(path string) string {
	if path == "" {
		return "its flags and environment"
	}
	return path
}

func printDiff(t *table, d *pb.DiffConfigResponse) {
	if len(d.GetChanges()) == 0 {
		t.row("the node runs with " + configOf(d.GetPath()))
		return
	}
	t.row("SETTING", "RUNNING", "FILE", "APPLIED BY")
	for _, c := range d.GetChanges() {
		by := "reload"
		if c.GetRestart() != "" {
			by = "restart: " + c.GetRestart()
		}
		t.row(c.GetKey(), visible(c.GetRunning()), visible(c.GetFile()), by)
	}
}

func printReload(t *table, r *pb.ReloadConfigResponse) {
	if len(r.GetChanges()) == 0 {
		t.row("nothing to apply: the node runs with " + configOf(r.GetPath()))
		return
	}
	t.row("SETTING", "BEFORE", "APPLIED")
	for _, c := range r.GetChanges() {
		t.row(c.GetKey(), visible(c.GetRunning()), visible(c.GetFile()))
	}
}

// visible returns the text of a value for a table. An empty value becomes "", because an empty cell
// could be overlooked.
func visible(value string) string {
	if value == "" {
		return `""`
	}
	return value
}
