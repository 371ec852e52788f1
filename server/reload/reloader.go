package reload

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/penstock-kv/penstock/internal/options"
	"github.com/penstock-kv/penstock/server/access"
	"github.com/penstock-kv/penstock/server/config"
	"github.com/penstock-kv/penstock/server/metrics"
)

// ErrRestart: a setting differs that a running process cannot change. Restart the process, or set
// the setting back.
var ErrRestart = errors.New("a restart is necessary")

// A Candidate is a configuration that was read and validated.
type Candidate struct {
	// Keys are the settings, and Auth the part of them that names the files of credentials.
	Keys []config.Key
	Auth config.Auth
	// Files are the changes of the content of files that Auth does not name, and of the output of
	// commands.
	Files []config.Change
	// Prepare, if not nil, makes the changes that can fail. It is called before any other change. If it
	// fails, it has changed nothing. It may take long.
	Prepare func() error
	// Apply makes the process use the settings except Auth. It cannot fail.
	Apply func()
}

// Options are the options of a Reloader. Read, Credentials and Metrics are required.
type Options struct {
	// Read reads and validates the configuration anew. Its error names the bad settings. Read may take
	// long, for example if it runs a command, and returns early when ctx ends. Calls may be concurrent.
	Read func(ctx context.Context) (Candidate, error)
	// Path is the configuration file, "" if there is none.
	Path string
	// Credentials are the ones that the process uses. The Reloader replaces their content.
	Credentials *Credentials
	Metrics     *metrics.Reloads
	// Changed, if not nil, is called after the content of Credentials was replaced, before the next
	// reload begins.
	Changed func()
	// Check, if not nil, returns an error if the process cannot use the roles of a file, nil if there is
	// none. It is called before they are used, while files of credentials are read, and must not wait.
	Check func(*access.Policy) error
	// Settle is the time between two reads of changed files, which are used if both reads return
	// the same content. Default 250 ms.
	Settle time.Duration
	// Began is called when Reload begins, and Ended with the error of Reload before Reload returns.
	// The calls of one Reload are not interleaved with those of another. Both may be nil.
	Began func()
	Ended func(error)
	// Logger receives a line for each change and each refusal. Default: discard.
	Logger *slog.Logger
}

// A Reloader replaces the configuration of the process. All methods may be called concurrently.
type Reloader struct {
	opts Options

	// turn holds a value during a Reload, so that two of them do not interleave. A Reload waits for its turn.
	turn chan struct{}
	// reloaded has a value after a Reload that Run has not seen.
	reloaded chan struct{}

	// mu is held while files of credentials are read and while credentials or keys change. It is not held
	// during Options.Read and Candidate.Prepare.
	mu   sync.Mutex
	keys []config.Key
}

// New returns a Reloader. keys are the settings with which the process runs.
func New(keys []config.Key, opts Options) *Reloader {
	options.SetDefault(&opts.Settle, 250*time.Millisecond)
	if opts.Began == nil {
		opts.Began = func() {}
	}
	if opts.Ended == nil {
		opts.Ended = func(error) {}
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	return &Reloader{opts: opts, keys: keys, turn: make(chan struct{}, 1), reloaded: make(chan struct{}, 1)}
}

// Path returns the path of the configuration file, "" if there is none.
func (r *Reloader) Path() string { return r.opts.Path }

// Diff returns the differences between the process and its configuration. It changes nothing, and does
// not wait for a Reload.
func (r *Reloader) Diff(ctx context.Context) ([]config.Change, error) {
	candidate, err := r.opts.Read(ctx)
	if err != nil {
		return nil, err
	}
	_, _, changes, err := r.compare(candidate)
	return changes, err
}

// Reload applies the differences that Diff returns, and returns them. If it fails, nothing has
// changed; the error is ErrRestart if settings differ that need a restart. When ctx ends before the
// configuration was read, Reload fails.
func (r *Reloader) Reload(ctx context.Context) (changes []config.Change, err error) {
	select {
	case r.turn <- struct{}{}:
	case <-ctx.Done():
		return nil, r.failed(fmt.Errorf("nothing was applied: an earlier reload has not ended: %w", context.Cause(ctx)))
	}
	defer func() { <-r.turn }()
	r.opts.Began()
	defer func() { r.opts.Ended(err) }()
	candidate, err := r.opts.Read(ctx)
	if err != nil {
		return nil, r.failed(fmt.Errorf("nothing was applied: %w", err))
	}
	was, files, changes, err := r.compare(candidate)
	if err != nil {
		return nil, r.failed(fmt.Errorf("nothing was applied: %w", err))
	}
	if err := refusal(changes); err != nil {
		return nil, r.failed(err)
	}
	if candidate.Prepare != nil {
		if err := candidate.Prepare(); err != nil {
			return nil, r.failed(fmt.Errorf("nothing was applied: %w", err))
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	// Changed files that adopt has used since compare are newer than files.
	if now := r.opts.Credentials.current.Load(); now == was || now.auth != files.auth {
		r.opts.Credentials.current.Store(files)
	}
	candidate.Apply()
	r.keys = candidate.Keys
	r.changed()
	r.done(changes)
	select {
	case r.reloaded <- struct{}{}:
	default:
	}
	return changes, nil
}

// compare reads the files of a candidate's credentials, and compares candidate and files with the settings and the
// credentials in use, which are was.
func (r *Reloader) compare(candidate Candidate) (was, files *contents, changes []config.Change, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if files, err = r.readLocked(candidate.Auth); err != nil {
		return nil, nil, nil, err
	}
	was = r.opts.Credentials.current.Load()
	return was, files, slices.Concat(config.Changes(r.keys, candidate.Keys), was.changes(files), candidate.Files), nil
}

// refusal returns an error that names each change that needs a restart, or nil.
func refusal(changes []config.Change) error {
	var errs []error
	for _, c := range changes {
		if c.Restart != "" {
			errs = append(errs, errors.New(c.String()))
		}
	}
	if len(errs) == 0 {
		return nil
	}
	return fmt.Errorf("%w, and nothing was applied:\n%w", ErrRestart, errors.Join(errs...))
}

// failed counts and logs a reload that changed nothing, and returns err.
func (r *Reloader) failed(err error) error {
	result := metrics.ReloadFailed
	if errors.Is(err, ErrRestart) {
		result = metrics.ReloadRefused
	}
	r.opts.Metrics.Note(result)
	r.opts.Logger.Warn("the configuration was not reloaded", "err", err)
	return err
}

// done counts and logs a reload that succeeded.
func (r *Reloader) done(changes []config.Change) {
	result := metrics.ReloadApplied
	if len(changes) == 0 {
		result = metrics.ReloadUnchanged
	}
	r.opts.Metrics.Note(result)
	for _, c := range changes {
		r.opts.Logger.Info("setting changed", "key", c.Key, "old", c.Old, "new", c.New)
	}
	r.opts.Logger.Info("configuration reloaded", "changes", len(changes))
}

// reread reads the files of credentials with the settings in use.
func (r *Reloader) reread() (*contents, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.readLocked(r.opts.Credentials.current.Load().auth)
}

// readLocked reads and checks the files of auth.
func (r *Reloader) readLocked(auth config.Auth) (*contents, error) {
	files, err := readContents(auth)
	if err == nil && r.opts.Check != nil {
		if err = r.opts.Check(files.roles); err != nil {
			return nil, fmt.Errorf("config: auth.roles_file: %s: %w", auth.RolesFile, err)
		}
	}
	return files, err
}

// adopt uses files that reread has returned, unless a reload has changed their paths since then.
// repaired is set if an error of the files was reported and this is the first good read since then.
// Then adopt reports the success even if the content is the one in use.
func (r *Reloader) adopt(files *contents, repaired bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	was := r.opts.Credentials.current.Load()
	if was.auth != files.auth || was.equal(files) && !repaired {
		return
	}
	changes := was.changes(files)
	r.opts.Credentials.current.Store(files)
	r.changed()
	r.done(changes)
}

// changed reports new credentials to the process.
func (r *Reloader) changed() {
	if r.opts.Changed != nil {
		r.opts.Changed()
	}
}

// Run reloads at each signal from hangups, and uses changed files of credentials. It returns when
// ctx ends.
func (r *Reloader) Run(ctx context.Context, hangups <-chan os.Signal) {
	w := newWatch(r.opts.Logger)
	defer w.close()
	var signals sync.WaitGroup
	defer signals.Wait()
	signals.Go(func() { r.reloadAt(ctx, hangups) })
	var s settling
	for {
		if w.follow(paths(r.opts.Credentials.current.Load().auth)) {
			s.begin(r.opts.Settle) // the files may have changed before they were watched
		}
		select {
		case <-ctx.Done():
			return
		case <-r.reloaded: // the paths may have changed
		case <-w.changed():
			s.begin(r.opts.Settle)
		case <-s.due:
			files, err := r.reread()
			switch {
			case !s.agrees(files, err):
				s.begin(r.opts.Settle)
			case err != nil:
				r.damaged(&s, err)
			default:
				r.adopt(files, s.reported != "")
				s.reported = ""
			}
		}
	}
}

// reloadAt reloads at each signal from hangups until ctx ends.
func (r *Reloader) reloadAt(ctx context.Context, hangups <-chan os.Signal) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-hangups:
			_, _ = r.Reload(ctx) // Reload logs its error
		}
	}
}

// damaged logs and counts an error of the watched files. It does nothing if the same error was
// reported last and no good read has come since then.
func (r *Reloader) damaged(s *settling, err error) {
	if s.reported == err.Error() {
		return
	}
	s.reported = err.Error()
	r.opts.Metrics.Note(metrics.ReloadFailed)
	r.opts.Logger.Warn("changed files of tokens or certificates cannot be used; the ones in use stay", "err", err)
}

// settling decides when changed files are complete: when two reads of them agree.
type settling struct {
	// due is the time of the next read, nil if there is none to make.
	due <-chan time.Time
	// read and failed are the result of the previous read.
	read   *contents
	failed string
	// reported is the error that was logged last, "" after a good read.
	reported string
}

// begin schedules a read, unless one is scheduled.
func (s *settling) begin(after time.Duration) {
	if s.due == nil {
		s.due = time.After(after)
	}
}

// agrees reports whether the previous read had the same result. If not, it keeps this result for
// the next call.
func (s *settling) agrees(files *contents, err error) bool {
	s.due = nil
	text := ""
	if err != nil {
		text = err.Error()
	}
	if was := s.read; text == s.failed && (err != nil || was != nil && was.auth == files.auth && was.equal(files)) {
		s.read, s.failed = nil, ""
		return true
	}
	s.read, s.failed = files, text
	return false
}
