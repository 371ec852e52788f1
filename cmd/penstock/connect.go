package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/client/planners"
	"github.com/penstock-kv/penstock/internal/certs"
	"github.com/penstock-kv/penstock/server/config"
)

// connection has the flags with which a command reaches a node.
type connection struct {
	endpoint  endpoint
	servers   string
	tokenFile string
	ca        string
	cert, key string
	tls       bool
	insecure  bool
	timeout   time.Duration
	// zone is client.Options.Zone.
	zone string
	// discover makes servers the addresses of some members of a cluster. placesBlocks is set for
	// commands with the flag --discover; invalidDiscover is the error of the flag's variable.
	discover        bool
	placesBlocks    bool
	invalidDiscover error
	// startWithin is world.startWithin.
	startWithin time.Duration
}

// addConnectionFlags adds the flags of a client to cmd and its subcommands. The environment sets
// their defaults.
func addConnectionFlags(cmd *cobra.Command, w world) *connection {
	return addEndpointFlags(cmd, w, endpoint{flag: "server", variable: "PENSTOCK_SERVER", def: config.Default().Listen, usage: "gRPC address of the node, host:port"})
}

// endpoint describes the node to which a client connects: the flag and the environment variable
// with the address, the default address, the help text, and the command that runs such a node (""
// for penstock serve).
type endpoint struct{ flag, variable, def, usage, command string }

// addEndpointFlags adds the flags of a client of the node that e describes to cmd and its
// subcommands.
func addEndpointFlags(cmd *cobra.Command, w world, e endpoint) *connection {
	c := &connection{endpoint: e, startWithin: w.startWithin}
	f := cmd.PersistentFlags()
	env := func(p *string, flag, variable, def, usage string) {
		if v := w.env(variable); v != "" {
			def = v
		}
		f.StringVar(p, flag, def, usage+" (environment: "+variable+")")
		annotate(cmd, flag, emptyAllowed) // an empty value overrides the variable
	}
	env(&c.servers, e.flag, e.variable, e.def, e.usage)
	env(&c.tokenFile, "token-file", "PENSTOCK_TOKEN_FILE", "", "file with the bearer token that the node requires")
	env(&c.ca, "ca", "PENSTOCK_CA", "", "CA (PEM) that the node's certificate is signed by; implies --tls")
	env(&c.cert, "cert", "PENSTOCK_CERT", "", "client certificate (PEM); implies --tls")
	env(&c.key, "key", "PENSTOCK_KEY", "", "private key (PEM) of the client certificate")
	f.BoolVar(&c.tls, "tls", false, "use TLS, with the system's CAs unless --ca is given")
	f.BoolVar(&c.insecure, "insecure", false, "send the bearer token in plain text to a node on another machine")
	f.DurationVar(&c.timeout, "timeout", 30*time.Second, "time limit of the command; 0: none. Commands that move blocks have a limit only if the flag is given")
	return c
}

// addDiscoverFlag adds --discover to a command that chooses the node of each sequence.
func (c *connection) addDiscoverFlag(cmd *cobra.Command, w world) {
	const variable = "PENSTOCK_DISCOVER"
	c.placesBlocks = true
	def := false
	if v := w.env(variable); v != "" {
		var err error
		if def, err = strconv.ParseBool(v); err != nil {
			c.invalidDiscover = usagef("%s is %q; want true or false", variable, v)
		}
	}
	cmd.Flags().BoolVar(&c.discover, "discover", def, "--"+c.endpoint.flag+" has some members of a cluster: use all its members. All clients of a cluster must do the same (environment: "+variable+")")
}

// waitForever makes --timeout default to no limit.
func (c *connection) waitForever(cmd *cobra.Command) {
	c.timeout = 0
	cmd.PersistentFlags().Lookup("timeout").DefValue = "0s"
}

// limit applies --timeout to a command.
func (c *connection) limit(ctx context.Context) (context.Context, context.CancelFunc) {
	if c.timeout <= 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, c.timeout)
}

// limitMove applies --timeout to a command that moves blocks, if the flag was given. There is no
// default limit, because the time depends on the number of blocks.
func (c *connection) limitMove(cmd *cobra.Command) (context.Context, context.CancelFunc) {
	if f := cmd.Flag("timeout"); f == nil || !f.Changed {
		return context.WithCancel(cmd.Context())
	}
	return c.limit(cmd.Context())
}

// list returns the addresses of --server. Commands that move blocks distribute the sequences among
// several nodes.
func (c *connection) list() []string { return strings.Split(c.servers, ",") }

// checkServers returns a usage error if --server contains an invalid address.
func (c *connection) checkServers() error {
	for _, server := range c.list() {
		if err := client.CheckServer(server); err != nil {
			return usagef("--%s: %w", c.endpoint.flag, err)
		}
	}
	return nil
}

// one returns the address of --server for an admin command. More than one address is an error.
func (c *connection) one() (string, error) {
	if l := c.list(); len(l) != 1 || l[0] == "" {
		return "", usagef("--%s %q: this command uses one node; give one address", c.endpoint.flag, c.servers)
	}
	return c.servers, c.checkServers()
}

// tlsConfig returns nil for plain text. log gets a warning when a renewed certificate cannot be used.
func (c *connection) tlsConfig(log *slog.Logger) (*tls.Config, error) {
	if (c.cert == "") != (c.key == "") {
		return nil, usagef("--cert %q, --key %q: give both a certificate and its key", c.cert, c.key)
	}
	if !c.tls && c.ca == "" && c.cert == "" {
		return nil, nil
	}
	t := &tls.Config{MinVersion: tls.VersionTLS12}
	if c.ca != "" {
		pool, err := certs.Pool(c.ca)
		if err != nil {
			return nil, fmt.Errorf("--ca: %w", err)
		}
		t.RootCAs = pool
	}
	if c.cert != "" {
		pair, err := certs.OpenPair(c.cert, c.key, log)
		if err != nil {
			return nil, fmt.Errorf("--cert %s, --key %s: %w", c.cert, c.key, err)
		}
		pair.SetOn(t)
	}
	return t, nil
}

// dial opens the control plane of one node.
func (c *connection) dial(target string) (*grpc.ClientConn, error) {
	o, err := c.dialOptions()
	if err != nil {
		return nil, err
	}
	return client.Dial(target, o)
}

// dialPlanner opens a connection to the planner that leads, among those at addresses.
func (c *connection) dialPlanner(addresses string) (*planners.Conn, error) {
	o, err := c.dialOptions()
	if err != nil {
		return nil, err
	}
	return planners.Dial(addresses, o)
}

// dialOptions returns the options of a connection to the control plane.
func (c *connection) dialOptions() (client.DialOptions, error) {
	token, err := openToken(c.tokenFile, slog.Default())
	if err != nil {
		return client.DialOptions{}, err
	}
	t, err := c.tlsConfig(slog.Default())
	if err != nil {
		return client.DialOptions{}, err
	}
	// --timeout also bounds the first connection, because a busy node may take long to accept it.
	return client.DialOptions{TokenSource: token, TLS: t, Insecure: c.insecure, Timeout: c.timeout}, nil
}

// admin is a connection to a node's Admin service.
type admin struct {
	pb.AdminClient
	conn *grpc.ClientConn
}

// admin calls f with a connection, and closes the connection afterwards.
func (c *connection) admin(cmd *cobra.Command, f func(ctx context.Context, a admin) error) error {
	return c.connected(cmd, func(ctx context.Context, conn *grpc.ClientConn) error {
		return f(ctx, admin{AdminClient: pb.NewAdminClient(conn), conn: conn})
	})
}

// connected calls f with a connection to one node, and closes the connection afterwards.
func (c *connection) connected(cmd *cobra.Command, f func(ctx context.Context, conn *grpc.ClientConn) error) error {
	target, err := c.one()
	if err != nil {
		return err
	}
	conn, err := c.dial(target)
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := c.limit(cmd.Context())
	defer cancel()
	if err := c.awaitListening(ctx); err != nil {
		return err
	}
	return c.hinted(f(ctx, conn))
}

// planner calls f with a connection to the planner that leads, and closes the connection afterwards.
func (c *connection) planner(cmd *cobra.Command, f func(ctx context.Context, conn *planners.Conn) error) error {
	if err := planners.Check(c.servers); err != nil {
		return usagef("--%s: %w", c.endpoint.flag, err)
	}
	conn, err := c.dialPlanner(c.servers)
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := c.limit(cmd.Context())
	defer cancel()
	if len(c.list()) == 1 {
		if err := c.awaitListening(ctx); err != nil {
			return err
		}
	}
	return c.hinted(f(ctx, conn))
}

// awaitListening waits while a node refuses connections, because the node may still be starting. It
// waits at most startWithin. It returns an error only if ctx ended during the wait; the caller's
// next call reports all other failures.
func (c *connection) awaitListening(ctx context.Context) error {
	within, cancel := context.WithTimeout(ctx, c.startWithin)
	defer cancel()
	servers := c.list()
	refusals := make([]error, len(servers))
	var wg sync.WaitGroup
	for i, target := range servers {
		wg.Go(func() {
			for {
				refused, err := refuses(within, target)
				if refused {
					refusals[i] = err
				} else if over(within) == nil {
					refusals[i] = nil
				}
				if !refused || !pause(within, connectPause) {
					return
				}
			}
		})
	}
	wg.Wait()
	switch refused, ended := errors.Join(refusals...), over(ctx); {
	case ended == nil:
		return nil
	case !errors.Is(ended, context.DeadlineExceeded):
		return ended
	case refused != nil:
		return c.hinted(status.Errorf(codes.Unavailable, "no connection within --timeout %v: %v", c.timeout, refused))
	}
	return status.Errorf(codes.Unavailable, "no connection within --timeout %v to %s", c.timeout, strings.Join(servers, ", "))
}

// connectPause is the time between two attempts to connect to a node that is starting.
const connectPause = 100 * time.Millisecond

// refuses reports whether the target, host:port, refuses a connection. It also returns the error of
// the attempt.
func refuses(ctx context.Context, target string) (bool, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", target)
	if err == nil {
		_ = conn.Close() // nothing was sent
	}
	return errors.Is(err, syscall.ECONNREFUSED), err
}

// pause waits for d. It reports false if ctx ended first.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// over returns ctx.Err, or context.DeadlineExceeded if the deadline of ctx has passed. ctx.Err alone
// is not enough: a call under ctx may fail at the deadline, before the timer of ctx has run.
func over(ctx context.Context) error {
	if deadline, ok := ctx.Deadline(); ok && ctx.Err() == nil && !time.Now().Before(deadline) {
		return context.DeadlineExceeded
	}
	return ctx.Err()
}

// outOfTime reports whether a call failed because ctx ended. The server has the same deadline and
// may answer DeadlineExceeded before ctx ends here.
func outOfTime(ctx context.Context, err error) bool {
	return over(ctx) != nil || status.Code(err) == codes.DeadlineExceeded
}

// onNamespace makes cmd take the name of a namespace as its argument. cmd then calls do with a
// connection to the node.
func (c *connection) onNamespace(cmd *cobra.Command, do func(ctx context.Context, a admin, name string) error) *cobra.Command {
	cmd.Args = args(cobra.ExactArgs(1))
	cmd.ValidArgsFunction = c.completeNamespaces
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		return c.admin(cmd, func(ctx context.Context, a admin) error { return do(ctx, a, names[0]) })
	}
	return cmd
}

// data calls f with an open Store, and closes the Store and its transfer engine afterwards.
func (c *connection) data(cmd *cobra.Command, f func(ctx context.Context, s *client.Store) error) (err error) {
	ctx, cancel := c.limitMove(cmd)
	defer cancel()
	defer func() {
		// A call that the deadline has ended may have returned a miss. The deadline is reported in
		// place of the miss.
		if err != nil && errors.Is(over(ctx), context.DeadlineExceeded) {
			err = fmt.Errorf("not complete within --timeout %v: %s", c.timeout, explain(err))
		}
	}()
	// The command prints its errors, so the client need not log them.
	return c.store(ctx, slog.New(slog.DiscardHandler), func(s *client.Store) error {
		if c.placesBlocks && !c.discover && slices.ContainsFunc(s.Nodes(), func(n client.NodeStatus) bool { return n.Cluster }) {
			fmt.Fprintf(cmd.ErrOrStderr(), "warning: the node has a cluster, and this command uses only --%s %s: clients that discover the members store sequences on other nodes (--discover does the same)\n", c.endpoint.flag, c.servers)
		}
		return f(ctx, s)
	})
}

// store calls f with an open Store, without a time limit, and closes the Store and its transfer
// engine afterwards. The client logs to log.
func (c *connection) store(ctx context.Context, log *slog.Logger, f func(s *client.Store) error) (err error) {
	if err := errors.Join(c.invalidDiscover, c.checkServers()); err != nil {
		return err
	}
	token, err := openToken(c.tokenFile, log)
	if err != nil {
		return err
	}
	t, err := c.tlsConfig(log)
	if err != nil {
		return err
	}
	engine, err := c.engine(ctx, t)
	if err != nil {
		return err
	}
	defer func() {
		if e := engine.Close(); err == nil {
			err = e
		}
	}()
	if err := c.awaitListening(ctx); err != nil {
		return err
	}
	o := client.Options{Servers: c.list(), Discover: c.discover, Zone: c.zone, Engine: engine, TokenSource: token, TLS: t, Insecure: c.insecure, Logger: log}
	if len(o.Servers) == 1 {
		o.DialTimeout = max(0, c.timeout) // a busy node may take long to accept a connection, and no other node could be used meanwhile
	}
	s, err := client.Open(ctx, o)
	if err != nil {
		return err
	}
	defer func() {
		if e := s.Close(); err == nil {
			err = e
		}
	}()
	return c.hinted(f(s))
}

// namespacesPerCall is the number of namespaces that one call of ListNamespaces returns.
const namespacesPerCall = 4096

// listNamespaces returns all namespaces of a node, sorted by name.
func listNamespaces(ctx context.Context, a pb.AdminClient) (all []*pb.Namespace, err error) {
	req := &pb.ListNamespacesRequest{Limit: namespacesPerCall}
	for {
		resp, err := a.ListNamespaces(ctx, req)
		if err != nil {
			return nil, err
		}
		all = append(all, resp.GetNamespaces()...)
		if req.After = resp.GetNext(); req.After == "" {
			return all, nil
		}
	}
}

// completeNamespaces completes an argument to the names of the node's namespaces.
func (c *connection) completeNamespaces(cmd *cobra.Command, given []string, _ string) ([]string, cobra.ShellCompDirective) {
	return c.completeNames(cmd, given, func(ctx context.Context, a admin) (names []string, err error) {
		all, err := listNamespaces(ctx, a)
		for _, ns := range all {
			names = append(names, ns.GetName())
		}
		return names, err
	})
}

// completeNames completes the first argument of a command to the names that list returns.
func (c *connection) completeNames(cmd *cobra.Command, given []string, list func(context.Context, admin) ([]string, error)) (names []string, directive cobra.ShellCompDirective) {
	if len(given) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	err := c.admin(cmd, func(ctx context.Context, a admin) (err error) {
		ctx, cancel := context.WithTimeout(ctx, completionWait)
		defer cancel()
		names, err = list(ctx, a)
		return err
	})
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// completeNamespaceFlag completes --namespace to the node's namespaces.
func (c *connection) completeNamespaceFlag(cmd *cobra.Command) {
	completeFlag(cmd, "namespace", func(cmd *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
		return c.completeNamespaces(cmd, nil, typed)
	})
}

// completionWait is the time limit of a completion. It is short, because the shell waits for the
// completion.
const completionWait = 2 * time.Second
