package main

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"strconv"

	"github.com/spf13/cobra"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/access"
	"github.com/penstock-kv/penstock/server/config"
	"github.com/penstock-kv/penstock/server/membership"
)

// rolesRead is the output of cluster roles get.
type rolesRead struct {
	Revision int64  `json:"revision"`
	Document string `json:"document"`
}

// rolesSet is the output of cluster roles set.
type rolesSet struct {
	Revision int64    `json:"revision"`
	DryRun   bool     `json:"dry_run"`
	Changes  []string `json:"changes"`
}

// rolesChecked is the output of cluster roles check.
type rolesChecked struct {
	Principals int `json:"principals"`
	// Governed is set if cluster roles set takes the document, as far as the caller is not concerned.
	Governed bool `json:"governed"`
}

func newClusterRoles(w world, c *connection) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "roles",
		Short: "Read, check and replace the roles document in etcd",
		Long: `Read, check and replace the roles document in etcd, which has the content of a roles file
(docs/access.md). All nodes and planners with the same setting auth.roles_etcd follow it.

A node that has no document yet refuses every call. Write the first one, and replace one
that locks every administrator out, with --config FILE: the command then reaches
etcd itself, with the settings cluster and auth.roles_etcd of a node's configuration file.`,
	}
	return noun(cmd, newRolesGet(w, c), newRolesSet(w, c), newRolesCheck())
}

func newRolesGet(w world, c *connection) *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "get",
		Short: "Print the roles document, with its revision in the first line",
		Args:  args(cobra.NoArgs),
	}
	addConfigFlag(cmd, &file)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return c.roles(cmd, w, file, func(ctx context.Context, s rolesStore) error {
			out, err := s.get(ctx)
			if err != nil {
				return err
			}
			if to := outputOf(cmd); to.json {
				return to.emitJSON(out, "  ")
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "# revision %d\n%s", out.Revision, out.Document) // no table, which would change its tabs
			return err
		})
	}
	return cmd
}

func newRolesSet(w world, c *connection) *cobra.Command {
	var file string
	var dryRun bool
	revision := int64(-1)
	cmd := &cobra.Command{
		Use:   "set FILE",
		Short: "Replace the roles document, unless it has changed since it was read",
		Long: `Replace the roles document by a file, and print what differs. The first
line of the file has the revision of the document that the change was made from, as
penstock cluster roles get prints it: if the document has another revision, the command is
refused, so that it replaces no change of another administrator.

The command needs the roles operate and admin on "*". It is refused if the file is invalid, if
the caller would lack these roles afterwards, or if the quota of a tenant is below one block of
one of its namespaces on the node.`,
		Example: `  penstock cluster roles get > roles.yaml
  penstock cluster roles set roles.yaml --dry-run
  penstock cluster roles set roles.yaml
  penstock cluster roles set first.yaml --revision 0 --config /etc/penstock/penstock.yaml`,
		Args: args(cobra.ExactArgs(1)),
	}
	addConfigFlag(cmd, &file)
	f := cmd.Flags()
	f.BoolVar(&dryRun, "dry-run", false, "print the principals and quotas that differ, and change nothing")
	f.Int64Var(&revision, "revision", -1, "revision of the document that is replaced, instead of the one in the first line of the file; 0: there is no document")
	cmd.RunE = func(cmd *cobra.Command, paths []string) error {
		raw, err := os.ReadFile(paths[0])
		if err != nil {
			return err
		}
		if _, err := access.Parse(paths[0], raw); err != nil {
			return err
		}
		text, from := withoutRevision(raw)
		if cmd.Flags().Changed("revision") {
			from = revision
		}
		if from < 0 {
			return usagef("%s has no line \"# revision N\" at its beginning: make the change in the output of penstock cluster roles get, or give --revision", paths[0])
		}
		return c.roles(cmd, w, file, func(ctx context.Context, s rolesStore) error {
			out, err := s.set(ctx, text, from, dryRun)
			if err != nil {
				return err
			}
			return outputOf(cmd).emit(out, func(t *table) { fmt.Fprint(t, out.words()) })
		})
	}
	return cmd
}

func (r rolesSet) words() (text string) {
	for _, line := range r.Changes {
		text += line + "\n"
	}
	if len(r.Changes) == 0 {
		text = "nothing differs\n"
	}
	if r.DryRun {
		return text + fmt.Sprintf("nothing was changed; the document has revision %d\n", r.Revision)
	}
	return text + fmt.Sprintf("set: the document has revision %d\n", r.Revision)
}

func newRolesCheck() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "check FILE",
		Short: "Check a roles file or document, without a node",
		Args:  args(cobra.ExactArgs(1)),
	}
	cmd.RunE = func(cmd *cobra.Command, paths []string) error {
		raw, err := os.ReadFile(paths[0])
		if err != nil {
			return err
		}
		policy, err := access.Parse(paths[0], raw)
		if err != nil {
			return err
		}
		out := rolesChecked{Principals: policy.Principals(), Governed: policy.Governed()}
		return outputOf(cmd).emit(out, func(t *table) {
			fmt.Fprintf(t, "valid: %d principals\n", out.Principals)
			if !out.Governed {
				fmt.Fprintln(t, `no principal has the roles operate and admin on "*": it can be a roles file, and no document in etcd`)
			}
		})
	}
	return cmd
}

func addConfigFlag(cmd *cobra.Command, file *string) {
	cmd.Flags().StringVar(file, "config", "", "configuration file of a node: reach etcd with its settings, and no node")
}

// revisionLine is the first line of a document that was read.
var revisionLine = regexp.MustCompile(`\A# revision ([0-9]{1,18})\r?\n`)

// withoutRevision returns a document without the line that has its revision, and the revision, -1 without the line.
func withoutRevision(raw []byte) ([]byte, int64) {
	at := revisionLine.FindSubmatch(raw)
	if at == nil {
		return raw, -1
	}
	revision, err := strconv.ParseInt(string(at[1]), 10, 64)
	if err != nil { // 18 digits fit
		return raw, -1
	}
	return bytes.TrimPrefix(raw, at[0]), revision
}

// rolesStore reads and replaces the roles document, by a node or in etcd.
type rolesStore struct {
	get func(ctx context.Context) (rolesRead, error)
	set func(ctx context.Context, text []byte, revision int64, dryRun bool) (rolesSet, error)
}

// roles calls do with the document: the node's or, if file is not "", that of etcd by the settings in file.
func (c *connection) roles(cmd *cobra.Command, w world, file string, do func(context.Context, rolesStore) error) error {
	if file == "" {
		return c.admin(cmd, func(ctx context.Context, a admin) error { return do(ctx, rolesBy(a)) })
	}
	cfg, err := config.Load(file, w.environ)
	if err != nil {
		return err
	}
	if cfg.Auth.RolesEtcd == "" {
		return fmt.Errorf("config: auth.roles_etcd is empty in %s: the node takes no roles from etcd: %w", file, config.ErrConfig)
	}
	if len(cfg.Cluster.Etcd) == 0 {
		return fmt.Errorf("config: cluster.etcd is empty in %s: %w", file, config.ErrConfig)
	}
	document, err := openRoles(cfg.Auth, cfg.Cluster, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	ctx, cancel := c.limit(cmd.Context())
	defer cancel()
	err = do(ctx, rolesIn(document))
	_ = document.Close() // it closes only connections
	return err
}

func rolesBy(a admin) rolesStore {
	return rolesStore{
		get: func(ctx context.Context) (rolesRead, error) {
			resp, err := a.GetRoles(ctx, &pb.GetRolesRequest{})
			return rolesRead{resp.GetRevision(), string(resp.GetDocument())}, err
		},
		set: func(ctx context.Context, text []byte, revision int64, dryRun bool) (rolesSet, error) {
			resp, err := a.SetRoles(ctx, &pb.SetRolesRequest{Document: text, Revision: revision, DryRun: dryRun})
			return rolesSet{resp.GetRevision(), dryRun, append([]string{}, resp.GetChanges()...)}, err
		},
	}
}

func rolesIn(document *membership.Roles) rolesStore {
	return rolesStore{
		get: func(ctx context.Context) (rolesRead, error) {
			d, err := document.Get(ctx)
			return rolesRead{d.Revision, string(d.Text)}, err
		},
		set: func(ctx context.Context, text []byte, revision int64, dryRun bool) (rolesSet, error) {
			changes, now, err := server.ReplaceRoles(ctx, document, text, revision, nil, nil, dryRun)
			return rolesSet{now, dryRun, append([]string{}, changes...)}, err
		},
	}
}
