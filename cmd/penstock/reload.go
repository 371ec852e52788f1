package main

import (
	"context"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/server/access"
	"github.com/penstock-kv/penstock/server/config"
	"github.com/penstock-kv/penstock/server/metrics"
	"github.com/penstock-kv/penstock/server/reload"
)

// live has the settings that a reload changes and that every kind of process has (node, planner,
// gateway).
type live struct {
	level       *slog.LevelVar
	drainWithin atomic.Int64 // nanoseconds
	credentials *reload.Credentials
	reloader    *reload.Reloader
	manager     *manager
	// roles follows the roles document in etcd until its context ends; nil without auth.roles_etcd.
	roles func(context.Context)
}

// newLive reads the credentials from the files that auth names, and returns the settings.
func newLive(auth config.Auth, level *slog.LevelVar, drainWithin config.Duration, m *manager) (*live, error) {
	c, err := reload.OpenCredentials(auth)
	if err != nil {
		return nil, err
	}
	l := &live{level: level, credentials: c, manager: m}
	l.drainWithin.Store(int64(drainWithin))
	return l, nil
}

// apply puts the log level and the drain time limit of a new configuration into effect. The caller
// has validated them.
func (l *live) apply(log config.Log, drainWithin config.Duration) {
	l.level.Set(levelOf(log))
	l.drainWithin.Store(int64(drainWithin))
}

// drain returns the current drain_timeout.
func (l *live) drain() time.Duration { return time.Duration(l.drainWithin.Load()) }

// follow makes the reloader of a process. keys is the configuration with which the process runs,
// and read returns the configuration to change to. check, if not nil, returns an error if the process cannot use a
// policy. changed, if not nil, is called after the credentials have changed.
func (l *live) follow(keys []config.Key, path string, read func(context.Context) (reload.Candidate, error), check func(*access.Policy) error, changed func(), counters *metrics.Reloads, log *slog.Logger) {
	l.reloader = reload.New(keys, reload.Options{
		Read: read, Path: path, Credentials: l.credentials, Check: check, Changed: changed, Metrics: counters, Logger: log,
		Began: l.manager.reloading, Ended: l.manager.reloaded,
	})
}

// run reports to the service manager that the process is ready. Then it starts a goroutine that
// reloads the configuration at each hangup, and the credentials when their files change, and one that follows the
// roles document in etcd. stop ends the goroutines and waits for their end.
func (l *live) run(ctx context.Context, hangups <-chan os.Signal) (stop func()) {
	l.manager.ready()
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { l.reloader.Run(ctx, hangups) })
	if l.roles != nil {
		running.Go(func() { l.roles(ctx) })
	}
	return func() {
		cancel()
		running.Wait()
	}
}
