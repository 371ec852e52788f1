package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/penstock-kv/penstock/server/config"
)

// settings is a configuration of package config that is set by flags, environment and file.
type settings interface {
	Keys() []config.Key
	Validate() error
}

// source is a configuration and where it came from.
type source[C any] struct {
	cfg C
	// path is the configuration file, "" if there is none.
	path string
	// read reads the configuration anew, with the same flags and environment.
	read func() (C, error)
	// hangups delivers SIGHUP, at which the process reads its configuration anew.
	hangups <-chan os.Signal
	// notifySocket is the socket of the service manager, "" without one.
	notifySocket string
}

// runWithSettings adds to cmd the flags --config and --check and a flag for each key of the
// configuration. cmd then loads the configuration and calls run. With --check it calls check
// instead, which reports the errors that the configuration's own Validate leaves out; nil: none.
func runWithSettings[C any, P interface {
	*C
	settings
}](cmd *cobra.Command, w world, defaults func() C, check func(C) error, run func(context.Context, source[C]) error) {
	var file string
	var checkOnly bool
	cmd.Flags().StringVar(&file, "config", "", "configuration file (YAML)")
	cmd.Flags().BoolVar(&checkOnly, "check", false, "check the settings and end, without opening anything but the configuration file; the exit code is 2 if a setting is wrong")
	scratch := defaults()
	keys := P(&scratch).Keys()
	addConfigFlags(cmd.Flags(), keys)
	groupSettings(cmd, keys)
	cmd.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		s := source[C]{path: file, notifySocket: w.env("NOTIFY_SOCKET"), read: func() (C, error) {
			cfg := defaults()
			err := loadSettings(P(&cfg), file, w.environ, cmd.Flags())
			return cfg, err
		}}
		if s.cfg, err = s.read(); err != nil {
			return err
		}
		if checkOnly {
			if check != nil {
				if err := check(s.cfg); err != nil {
					return err
				}
			}
			return outputOf(cmd).emit(struct {
				Valid bool `json:"valid"`
			}{true}, func(t *table) { t.row("the settings are valid") })
		}
		if w.hangups != nil {
			var stop func()
			s.hangups, stop = w.hangups()
			defer stop()
		}
		return run(cmd.Context(), s)
	}
}

// loadSettings reads the file and then the environment into c, which has the defaults. Flags on the
// command line have precedence over both.
func loadSettings(c settings, file string, environ []string, flags *pflag.FlagSet) error {
	if err := config.LoadInto(c, file, environ); err != nil {
		return err
	}
	if err := setFromFlags(c.Keys(), flags); err != nil {
		return err
	}
	if derived, ok := c.(interface{ EnsureDefaults() }); ok {
		derived.EnsureDefaults()
	}
	return c.Validate()
}

// serveUntil calls serve until ctx ends or serve fails, and then shutdown with the drain time limit
// of that time.
func serveUntil(ctx context.Context, log *slog.Logger, l *live, serve func() error, shutdown func(context.Context) error) (err error) {
	stopped := make(chan error, 1)
	go func() { stopped <- serve() }()
	select {
	case err = <-stopped:
		log.Error("a listener failed; shutting down", "err", err)
	case <-ctx.Done():
		log.Info("draining", "within", l.drain())
	}
	l.manager.stopping(l.drain())
	start := time.Now()
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.drain()) // ctx has ended
	defer cancel()
	err = errors.Join(err, shutdown(closing))
	if err == nil {
		log.Info("stopped", "took", time.Since(start).Round(time.Millisecond))
	}
	return err
}

// newRegistry returns a registry with the metrics of the process.
func newRegistry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// listenBoth opens the listener at addr and, unless httpAddr is empty, the HTTP listener. It logs a
// warning if other machines can reach the HTTP address. roles is set if there is a roles file.
func listenBoth(ctx context.Context, addr, httpAddr string, roles bool, log *slog.Logger) (api, web net.Listener, err error) {
	var lc net.ListenConfig
	if api, err = lc.Listen(ctx, "tcp", addr); err != nil {
		return nil, nil, fmt.Errorf("listen: %w", err)
	}
	if httpAddr == "" {
		return api, nil, nil
	}
	if web, err = lc.Listen(ctx, "tcp", httpAddr); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("http: %w", err), api.Close())
	}
	warnOfMetrics(log, httpAddr, roles)
	return api, web, nil
}

// closeIf closes a listener unless it is nil.
func closeIf(l net.Listener) error {
	if l == nil {
		return nil
	}
	return l.Close()
}

// addresses returns the log attributes with the addresses of the listeners: name for api, and http
// for web, which may be nil.
func addresses(name string, api, web net.Listener) []any {
	attrs := []any{name, api.Addr().String()}
	if web != nil {
		attrs = append(attrs, "http", web.Addr().String())
	}
	return attrs
}
