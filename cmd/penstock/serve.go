package main

import (
	"context"
	"encoding"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

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
once; nothing that was acknowledged as durable is lost by that.`,
		Example: `  penstock serve --data /mnt/nvme0,/mnt/nvme1 --capacity 3TiB
  penstock serve --config /etc/penstock/penstock.yaml`,
		Args: args(cobra.NoArgs),
	}
	runWithSettings(cmd, w.environ, config.Default, func(ctx context.Context, cfg config.Config) error {
		return serve(ctx, cfg, newLogger(w.err, cfg.Log))
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

func newLogger(w io.Writer, c config.Log) *slog.Logger {
	var level slog.Level
	if level.UnmarshalText([]byte(c.Level)) != nil {
		level = slog.LevelInfo // Validate has refused other values
	}
	opts := &slog.HandlerOptions{Level: level, ReplaceAttr: logText}
	if c.Format == "json" {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}

// logText replaces durations and values with a String method by their text. Without it
// the JSON handler writes durations and states as numbers, and addresses as structs.
// logText omits nil values.
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

// serve runs a node until ctx ends, and then drains it.
func serve(ctx context.Context, cfg config.Config, log *slog.Logger) error {
	n, err := startNode(ctx, cfg, log)
	if err != nil {
		return err
	}
	log.Info("ready", n.readyAttrs()...)
	return serveUntil(ctx, log, cfg.DrainWithin.Std(), func() error { return n.server.Serve(n.control, n.web) }, n.close)
}

// readToken reads a bearer token from a file. Other users should not be able to read the file.
func readToken(path string) (string, error) {
	if path == "" {
		return "", nil
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("token file: %w", err)
	}
	token := strings.TrimSpace(string(b))
	if len(token) < minTokenChars {
		return "", fmt.Errorf("token file %s: a token of %d characters can be guessed; use at least %d (openssl rand -hex 32 > %s)", path, len(token), minTokenChars, path)
	}
	return token, nil
}

// minTokenChars: 16 characters of base64 are 96 random bits.
const minTokenChars = 16
