package metrics

import (
	"github.com/prometheus/client_golang/prometheus"
)

// ReloadResult is the result of a reload of the configuration. It is the value of the label result
// of the reload counter.
type ReloadResult string

const (
	// ReloadApplied: settings, tokens or certificates changed.
	ReloadApplied ReloadResult = "applied"
	// ReloadUnchanged: nothing differed.
	ReloadUnchanged ReloadResult = "unchanged"
	// ReloadRefused: nothing changed, because a setting differed that needs a restart.
	ReloadRefused ReloadResult = "refused"
	// ReloadFailed: nothing changed, because a value or a file was bad.
	ReloadFailed ReloadResult = "failed"
)

// Reloads has the metrics of reloads of the configuration of one process.
type Reloads struct {
	count      *prometheus.CounterVec // result
	successful prometheus.Gauge
	last       prometheus.Gauge
	// rolesRevision and rolesValid describe the roles document in etcd.
	rolesRevision, rolesValid prometheus.Gauge
}

// NewReloads registers the metrics with r. The start of the process counts as a success.
func NewReloads(r prometheus.Registerer) *Reloads {
	reg := registrar{r}
	m := &Reloads{
		count:      reg.vec("config_reloads_total", "Reloads of settings, tokens and certificates by their result (applied, unchanged, refused because a setting needs a restart, failed because a value or a file is bad).", "result"),
		successful: reg.gauge("config_last_reload_successful", "1 if the last reload was applied or changed nothing, 0 if it was refused or failed. 1 before the first reload."),
		last:       reg.gauge("config_last_reload_success_timestamp_seconds", "Time of the last reload that was applied or changed nothing, or of the start, in Unix seconds."),

		rolesRevision: reg.gauge("config_roles_revision", "Revision in etcd of the roles document in use (auth.roles_etcd); 0: none."),
		rolesValid:    reg.gauge("config_roles_valid", "0 while the roles document in etcd (auth.roles_etcd) is missing, invalid or cannot be read; the document that was read before stays in use. Otherwise 1, also without auth.roles_etcd."),
	}
	m.rolesValid.Set(1)
	for _, result := range []ReloadResult{ReloadApplied, ReloadUnchanged, ReloadRefused, ReloadFailed} {
		m.count.WithLabelValues(string(result))
	}
	m.succeeded()
	return m
}

// Note counts a reload.
func (m *Reloads) Note(result ReloadResult) {
	m.count.WithLabelValues(string(result)).Inc()
	if result == ReloadRefused || result == ReloadFailed {
		m.successful.Set(0)
		return
	}
	m.succeeded()
}

// NoteRoles sets the revision of the roles document in use, and whether it is the one that etcd has.
func (m *Reloads) NoteRoles(revision int64, valid bool) {
	m.rolesRevision.Set(float64(revision))
	m.rolesValid.Set(0)
	if valid {
		m.rolesValid.Set(1)
	}
}

func (m *Reloads) succeeded() {
	m.successful.Set(1)
	m.last.SetToCurrentTime()
}
