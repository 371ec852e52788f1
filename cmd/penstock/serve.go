package main

import (
	"context"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/penstock-kv/penstock/internal/bearer"
	"github.com/penstock-kv/penstock/server/config"
)

func newServeCommand(w world) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "serve --data DIR[,DIR…]",
		Short: "Run the storage node",
		Long: `Run the storage node: volumes, prefix index, control plane (gRPC), data plane,
/metrics and health.

A setting comes from a flag, else from the environment (PENSTOCK_ and the path of
the key: PENSTOCK_LIMITS_READS), else from --config FILE (YAML), else it has the
default shown here.

SIGTERM and SIGINT drain: new writes are refused, calls in flight finish within
--drain-timeout, data and index are synced. A second signal ends the process at
once; nothing that was acknowledged as durable is lost by that.

SIGHUP and penstock config reload apply changes of the configuration file while the
node serves: bearer tokens, certificates, some limits, the log level. Tokens and
certificates are also applied when their files change. penstock config diff shows
which differences need a restart, and why. Because of SIGHUP the end of its terminal
does not end the node.`,
		Example: `  penstock serve --data /mnt/nvme0,/mnt/nvme1 --capacity 3TiB
  penstock serve --config /etc/penstock/penstock.yaml`,
		Args: args(cobra.NoArgs),
	}
	runWithSettings(cmd, w, config.Default, nil, func(ctx context.Context, from source[config.Config]) error {
		level := newLevel(from.cfg.Log)
		return serve(ctx, from, level, newLogger(w.err, from.cfg.Log.Format, level))
	})
	return cmd
}

// keyFlag is the flag of one configuration key. It parses into a scratch configuration, so that an
// invalid value is refused with the flag's name. It keeps the typed text, because Size.String
// rounds.
type keyFlag struct {
	key   config.Key
	typed string
}

func (f *keyFlag) String() string {
	switch {
	case f.typed != "":
		return f.typed
	case f.key.Path == "":
		return "" // pflag calls String on a zero flag
	}
	return f.key.String()
}

func (f *keyFlag) Set(text string) error {
	if f.key.List() && f.typed != "" {
		text = f.typed + "," + text // --data A --data B is --data A,B
	}
	f.typed = text
	return f.key.Set(text)
}

func (f *keyFlag) Type() string {
	if f.key.Bool() {
		return "bool"
	}
	return "value"
}

// helpWidth is the width of help lines, in characters.
const helpWidth = 100

// groupSettings lists the flags of keys in the usage of cmd by their section in the configuration
// file, after the command's own flags. It adds completions for flags with fixed values.
func groupSettings(cmd *cobra.Command, keys []config.Key) {
	for _, k := range keys {
		if len(k.Values) > 0 {
			completeValues(cmd, k.Flag(), k.Values...)
		}
	}
	cmd.SetUsageFunc(func(cmd *cobra.Command) error {
		own := pflag.NewFlagSet("", pflag.ContinueOnError)
		sections := make(map[string]*pflag.FlagSet)
		var order []string
		setting := make(map[string]bool)
		for _, k := range keys {
			section, _, nested := strings.Cut(k.Path, ".")
			if !nested {
				section = ""
			}
			if sections[section] == nil {
				sections[section] = pflag.NewFlagSet("", pflag.ContinueOnError)
				order = append(order, section)
			}
			sections[section].AddFlag(cmd.Flags().Lookup(k.Flag()))
			setting[k.Flag()] = true
		}
		for _, set := range []*pflag.FlagSet{cmd.LocalFlags(), cmd.InheritedFlags()} {
			set.VisitAll(func(f *pflag.Flag) {
				if !setting[f.Name] {
					own.AddFlag(f)
				}
			})
		}
		var b strings.Builder
		fmt.Fprintf(&b, "Usage:\n  %s\n", cmd.UseLine())
		if cmd.Example != "" {
			fmt.Fprintf(&b, "\nExamples:\n%s\n", cmd.Example)
		}
		fmt.Fprintf(&b, "\nFlags:\n%s", own.FlagUsagesWrapped(helpWidth))
		for _, section := range order {
			title := "Settings"
			if section != "" {
				title = "Settings of " + section
			}
			fmt.Fprintf(&b, "\n%s:\n%s", title, sections[section].FlagUsagesWrapped(helpWidth))
		}
		_, err := io.WriteString(cmd.OutOrStderr(), b.String())
		return err
	})
}

// addConfigFlags adds a flag for every key of a scratch configuration.
func addConfigFlags(flags *pflag.FlagSet, keys []config.Key) {
	for _, key := range keys {
		f := flags.VarPF(&keyFlag{key: key}, key.Flag(), "", key.Doc)
		if key.Bool() {
			f.NoOptDefVal = "true"
		}
	}
}

// setFromFlags sets the keys whose flags were given.
func setFromFlags(keys []config.Key, flags *pflag.FlagSet) error {
	for _, key := range keys {
		f := flags.Lookup(key.Flag())
		if !f.Changed {
			continue
		}
		if err := key.Set(f.Value.String()); err != nil {
			return fmt.Errorf("--%s: %w", f.Name, err)
		}
	}
	return nil
}

// levelOf returns the level of the log.
func levelOf(c config.Log) (level slog.Level) {
	if level.UnmarshalText([]byte(c.Level)) != nil {
		return slog.LevelInfo // Validate has refused other values
	}
	return level
}

// newLevel returns the level of the log, which can be changed.
func newLevel(c config.Log) *slog.LevelVar {
	level := new(slog.LevelVar)
	level.Set(levelOf(c))
	return level
}

func newLogger(w io.Writer, format string, level slog.Leveler) *slog.Logger {
	opts := &slog.HandlerOptions{Level: level, ReplaceAttr: logText}
	if format == "json" {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}

// logText replaces durations and values with a String method by their text. Without logText, the
// JSON handler writes durations and states as numbers, and addresses as structs. logText omits nil
// values.
func logText(_ []string, a slog.Attr) slog.Attr {
	switch a.Value.Kind() {
	case slog.KindDuration:
		a.Value = slog.StringValue(a.Value.Duration().String())
	case slog.KindAny:
		switch v := a.Value.Any().(type) {
		case nil:
			return slog.Attr{}
		case error, json.Marshaler, encoding.TextMarshaler, *slog.Source:
		case fmt.Stringer:
			a.Value = slog.StringValue(v.String())
		}
	}
	return a
}

// serve runs a node until ctx ends, and then drains it. It reloads the configuration at a hangup.
func serve(ctx context.Context, from source[config.Config], level *slog.LevelVar, log *slog.Logger) error {
	n, err := startNode(ctx, from, level, log)
	if err != nil {
		return err
	}
	log.Info("ready", n.readyAttrs()...)
	defer n.live.run(ctx, from.hangups)()
	ctx, ended := n.whileOwner(ctx)
	err = serveUntil(ctx, log, n.live, func() error { return n.server.Serve(n.control, n.web) }, n.close)
	return errors.Join(ended(), err)
}

// readToken returns the first token of a file. Other users should not be
// able to read the file.
func readToken(path string) (string, error) {
	tokens, err := bearer.Read(path)
	if err != nil || len(tokens) == 0 {
		return "", err
	}
	return tokens[0], nil
}

// openToken returns a function that returns the token that a client sends, the first one of a file, which it reads again
// when it has changed. The function is nil if path is "".
func openToken(path string, log *slog.Logger) (func() string, error) {
	if path == "" {
		return nil, nil
	}
	f, err := bearer.Open(path, log)
	if err != nil {
		return nil, err
	}
	return f.Token, nil
}
