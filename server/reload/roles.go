package reload

import (
	"fmt"
	"time"

	"github.com/penstock-kv/penstock/server/access"
	"github.com/penstock-kv/penstock/server/config"
	"github.com/penstock-kv/penstock/server/metrics"
)

// RolesState is the roles document in etcd (auth.roles_etcd) as the process has it.
type RolesState struct {
	// Policy is the document in use. Until a valid document was read it has no principal, so every call is
	// refused.
	Policy *access.Policy
	// Revision is the revision of the document in use; 0: none is in use.
	Revision int64
	// Until is the time after which calls are decided by outdated and not by Policy: etcd has not answered for longer than cluster.lease_ttl.
	Until time.Time
	// Problem is the reason why the content of etcd is not in use; "": it is in use.
	Problem string
	// outdated is Policy.Outdate().
	outdated *access.Policy
}

// RolesState returns the state of the roles document in etcd.
func (c *Credentials) RolesState() RolesState { return *c.document.Load() }

// TakeRoles uses a roles document that was read from etcd, until the given time, or until the time of an earlier call if
// it is zero. A document that is invalid, or revision 0 for a key that does not exist, leaves the one in use, also until that
// time, and is a problem until a valid document is read.
func (r *Reloader) TakeRoles(text []byte, revision int64, until time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	key := r.opts.Credentials.current.Load().auth.RolesEtcd
	was := r.opts.Credentials.RolesState()
	if !until.IsZero() {
		was.Until = until
		state := was
		r.opts.Credentials.document.Store(&state)
	}
	if revision == 0 {
		r.rolesProblemLocked(fmt.Sprintf("etcd has no key %s; write the document with: penstock cluster roles set", key))
		return
	}
	if revision == was.Revision && was.Problem == "" {
		return
	}
	policy, err := access.Parse(fmt.Sprintf("etcd key %s, revision %d", key, revision), text)
	if err != nil {
		r.rolesProblemLocked(err.Error())
		return
	}
	r.opts.Credentials.document.Store(&RolesState{Policy: policy, Revision: revision, Until: was.Until, outdated: policy.Outdate()})
	r.opts.Metrics.NoteRoles(revision, true)
	if policy.Equal(was.Policy) {
		if was.Problem != "" {
			r.opts.Logger.Info("the roles document in etcd is the one in use again", "key", key, "revision", revision)
		}
		return
	}
	r.changed()
	r.opts.Metrics.Note(metrics.ReloadApplied)
	change := config.Change{Key: "auth.roles_etcd", Old: was.describe(), New: r.opts.Credentials.RolesState().describe()}
	r.opts.Logger.Info("setting changed", "key", change.Key, "old", change.Old, "new", change.New)
}

// RolesFailed records that the roles document could not be read. The one in use stays, until RolesState.Until.
func (r *Reloader) RolesFailed(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rolesProblemLocked(err.Error())
}

// rolesProblemLocked records, logs and counts a problem, unless it is the last one.
func (r *Reloader) rolesProblemLocked(problem string) {
	state := r.opts.Credentials.RolesState()
	if state.Problem == problem {
		return
	}
	state.Problem = problem
	r.opts.Credentials.document.Store(&state)
	r.opts.Metrics.NoteRoles(state.Revision, false)
	text := "the roles document in etcd cannot be used; the one in use stays"
	if state.Revision == 0 {
		text = "there is no roles document from etcd, so every call is refused"
	}
	r.opts.Logger.Warn(text, "key", r.opts.Credentials.current.Load().auth.RolesEtcd, "revision_in_use", state.Revision, "err", problem)
}

// describe describes the document in use for people.
func (s RolesState) describe() string {
	if s.Revision == 0 {
		return "none"
	}
	return fmt.Sprintf("%s, revision %d", describeRoles(s.Policy), s.Revision)
}
