package health

import (
	"fmt"
	"time"

	"github.com/penstock-kv/penstock/internal/options"
)

// State is the state of a volume. It determines which requests the volume gets.
type State uint8

const (
	// OK: the volume gets all kinds of requests.
	OK State = iota
	// Suspect: the volume had an error or was slow. It gets new blocks only while no OK volume
	// takes writes.
	Suspect
	// Failed: the volume takes no writes. Its blocks are still read, unless its reads fail or hang.
	Failed
	// Draining: the volume takes no new blocks, and its blocks are being moved.
	Draining
	// Removed: the volume is no longer used.
	Removed
)

// String returns ok, suspect, failed, draining or removed.
func (s State) String() string {
	switch s {
	case OK:
		return "ok"
	case Suspect:
		return "suspect"
	case Failed:
		return "failed"
	case Draining:
		return "draining"
	case Removed:
		return "removed"
	}
	return fmt.Sprintf("State(%d)", uint8(s))
}

// States returns all states, for metrics with one series per state.
func States() []State { return []State{OK, Suspect, Failed, Draining, Removed} }

// Op is the kind of an I/O. Changes of the directory (create, remove) count as
// Write.
type Op uint8

const (
	// Read is a read of a file or of the directory.
	Read Op = iota
	// Write is a write of a file or a change of the directory.
	Write
	// Sync makes earlier writes durable.
	Sync
)

// String returns read, write or sync.
func (o Op) String() string {
	switch o {
	case Read:
		return "read"
	case Write:
		return "write"
	case Sync:
		return "sync"
	}
	return fmt.Sprintf("Op(%d)", uint8(o))
}

// Status is the state of a volume at one moment.
type Status struct {
	State State
	// Cause is the reason why the volume is not OK. It is nil if the volume is OK, or if
	// the operator ordered the state.
	Cause error
	// Since is the time at which the volume entered the state; zero if it was always OK.
	Since time.Time
	// Duty is the state that the operator ordered: OK, Draining or Removed.
	Duty State

	// unreadable is set if the volume's reads fail or hang.
	unreadable bool
}

// Places reports whether new blocks may be put on the volume.
func (s Status) Places() bool { return s.State == OK || s.State == Suspect }

// Syncs reports whether the volume is synced and holds superblock and catalogue.
func (s Status) Syncs() bool { return s.State != Failed && s.State != Removed }

// Reads reports whether blocks are read from the volume.
func (s Status) Reads() bool {
	return s.State != Removed && (s.State != Failed || !s.unreadable)
}

// Options are the limits of a Machine. The zero value of each field is its
// default.
type Options struct {
	// SlowAfter is the duration of a request from which on the volume is suspect, and the duration of
	// a probe from which on the probe is slow. Default 3 s, or HungAfter if that is less.
	SlowAfter time.Duration
	// HungAfter is the duration after which a request that has not completed counts as hung, and
	// the volume fails. Default 10 s.
	HungAfter time.Duration
	// WriteErrors and ReadErrors are the numbers of errors in a row after which the volume fails. A
	// success of the same kind ends the row. Defaults 3 and 16: several failed reads may have one
	// cause, a bad sector that several readers request. A single failed sync makes the volume fail,
	// because the system may have dropped data that it could not write.
	WriteErrors, ReadErrors int
	// ProbeEvery is the time between two probes. While the store can do without the volume, the time
	// doubles with each failed probe, up to ProbeMax. Defaults 1 s and 30 s.
	ProbeEvery, ProbeMax time.Duration
	// GoodProbes is the number of good probes in a row after which the volume is OK again. Default 3.
	GoodProbes int
	// SlowProbes is the number of slow probes in a row after which a suspect volume fails, if the
	// other volumes that are OK suffice. Default 3.
	SlowProbes int
	// LagFactor and LagFloor are limits of the mean latency. A volume is suspect if its mean is at
	// least LagFloor, and at least LagFactor times the mean of the other volumes. Defaults 10 and
	// 100 ms.
	LagFactor int
	LagFloor  time.Duration
}

// EnsureDefaults fills the fields that are zero.
func (o *Options) EnsureDefaults() {
	options.SetDefault(&o.HungAfter, 10*time.Second)
	options.SetDefault(&o.SlowAfter, min(3*time.Second, o.HungAfter))
	options.SetDefault(&o.WriteErrors, 3)
	options.SetDefault(&o.ReadErrors, 16)
	options.SetDefault(&o.ProbeEvery, time.Second)
	options.SetDefault(&o.ProbeMax, 30*time.Second)
	options.SetDefault(&o.GoodProbes, 3)
	options.SetDefault(&o.SlowProbes, 3)
	options.SetDefault(&o.LagFactor, 10)
	options.SetDefault(&o.LagFloor, 100*time.Millisecond)
}

// Validate reports the first field that is out of range, or nil.
func (o Options) Validate() error {
	o.EnsureDefaults()
	switch {
	case o.SlowAfter <= 0 || o.HungAfter < o.SlowAfter:
		return fmt.Errorf("health: slow after %v and hung after %v; want 0 < slow ≤ hung", o.SlowAfter, o.HungAfter)
	case o.WriteErrors < 1 || o.ReadErrors < 1 || o.GoodProbes < 1 || o.SlowProbes < 1 || o.LagFactor < 2:
		return fmt.Errorf("health: %d write errors, %d read errors, %d good probes, %d slow probes, lag factor %d; want at least 1, 1, 1, 1 and 2", o.WriteErrors, o.ReadErrors, o.GoodProbes, o.SlowProbes, o.LagFactor)
	case o.ProbeEvery <= 0 || o.ProbeMax < o.ProbeEvery || o.LagFloor <= 0:
		return fmt.Errorf("health: probes every %v to %v, lag floor %v; want positive times, the first not above the second", o.ProbeEvery, o.ProbeMax, o.LagFloor)
	}
	return nil
}

const (
	// meanShift sets the weight of one request in the mean latency: 1/2^meanShift = 1/32.
	meanShift = 5
	// meanSamples is the number of requests after which the mean is compared with that of other
	// volumes.
	meanSamples = 1 << meanShift
	// relapseWithin: if a volume fails again this soon after a recovery, the time between its
	// probes doubles.
	relapseWithin = 5 * time.Minute
)

// Machine is the state machine of one volume. Each method is an event and reports whether it
// changed the Status. The methods must not be called concurrently.
type Machine struct {
	opts Options

	// condition is OK, Suspect or Failed, as the I/O determines it. duty is OK, Draining or
	// Removed, as the operator ordered it.
	condition, duty State
	cause           error
	unreadable      bool
	since           time.Time

	// writeErrors and readErrors count errors in a row.
	writeErrors, readErrors int

	mean    time.Duration
	samples int

	// probing is set while a probe is running. The next probe is due at the time wait after pausedAt.
	// interval is the time between two probes while they fail. good and slowProbes are the numbers of
	// good and of slow probes in a row.
	probing          bool
	pausedAt         time.Time
	wait, interval   time.Duration
	good, slowProbes int
	// slow is set if at the last Tick a request had been outstanding for SlowAfter. others is that of
	// the last Tick.
	slow   bool
	others Others
	// horizon is the time of the last probe that ended the state Failed, and recovered the time at
	// which the volume last became OK.
	horizon, recovered time.Time
}

// New returns the machine of a volume that is OK.
func New(o Options) *Machine {
	o.EnsureDefaults()
	return &Machine{opts: o, interval: o.ProbeEvery}
}

// Status returns the state and its cause.
func (m *Machine) Status() Status {
	s := Status{State: m.condition, Cause: m.cause, Since: m.since, Duty: m.duty, unreadable: m.unreadable}
	switch {
	case m.duty == Removed, m.duty == Draining && m.condition != Failed:
		s.State = m.duty
	}
	return s
}

// Mean returns the mean latency of the volume's recent requests, or 0 if there were fewer than
// meanSamples requests.
func (m *Machine) Mean() time.Duration {
	if m.samples < meanSamples {
		return 0
	}
	return m.mean
}

// Horizon returns the time of the last probe that ended the state Failed, or zero. Requests that
// started before that time do not make the volume fail again, because some of them may never
// complete.
func (m *Machine) Horizon() time.Time { return m.horizon }

// Order sets the duty that the operator ordered: OK, Draining or Removed.
func (m *Machine) Order(now time.Time, duty State) (changed bool) {
	if m.duty == duty {
		return false
	}
	return m.change(now, func() { m.duty = duty })
}

// Done reports a completed request. err is nil or a fault of the volume. A full volume, a malformed
// request and an ended context are no faults of the volume.
func (m *Machine) Done(now time.Time, op Op, took time.Duration, err error) (changed bool) {
	if err == nil && op != Sync {
		m.sample(took)
	}
	switch {
	case err == nil:
		m.succeeded(op)
		if took < m.opts.SlowAfter {
			return false
		}
		return m.suspect(now, fmt.Errorf("a %v took %v", op, took.Round(time.Millisecond)))
	case op == Sync:
		return m.fail(now, fmt.Errorf("a sync failed: %w", err), false)
	case op == Write:
		if m.writeErrors++; m.writeErrors >= m.opts.WriteErrors {
			return m.fail(now, fmt.Errorf("%d writes failed in a row: %w", m.writeErrors, err), false)
		}
	default:
		if m.readErrors++; m.readErrors >= m.opts.ReadErrors {
			return m.fail(now, fmt.Errorf("%d reads failed in a row: %w", m.readErrors, err), true)
		}
	}
	return m.suspect(now, fmt.Errorf("a %v failed: %w", op, err))
}

func (m *Machine) succeeded(op Op) {
	switch op {
	case Read:
		m.readErrors = 0
	case Write:
		m.writeErrors = 0
	}
}

func (m *Machine) sample(took time.Duration) {
	if m.samples++; m.samples == 1 {
		m.mean = took
		return
	}
	m.mean += (took - m.mean) >> meanShift
}

// Outstanding has the start times of the oldest requests that have not completed. It leaves out
// requests that started before Horizon. A zero time means that there is no such request.
type Outstanding struct {
	// Any is the start of the oldest request, Read the start of the oldest request that
	// contains a read.
	Any, Read time.Time
}

// Others has the state of the other volumes of the store, as far as it concerns this volume.
type Others struct {
	// Mean is the mean latency of the other volumes, 0 if it is not known.
	Mean time.Duration
	// Suffice is OK if the other volumes that are OK suffice for the store: one of them takes new
	// blocks, and they are a quorum for changes of the catalogue. It is Suspect if the other volumes
	// that are OK or suspect suffice. It is Failed if the store needs this volume.
	Suffice State
}

// Tick informs the machine of the time and of the other volumes. A request that hangs makes the
// volume fail. The volume stays readable unless a read hangs.
func (m *Machine) Tick(now time.Time, oldest Outstanding, others Others) (changed bool) {
	m.others = others
	m.slow = !oldest.Any.IsZero() && now.Sub(oldest.Any) >= m.opts.SlowAfter
	if !oldest.Any.IsZero() {
		switch age := now.Sub(oldest.Any); {
		case age >= m.opts.HungAfter:
			unreadable := !oldest.Read.IsZero() && now.Sub(oldest.Read) >= m.opts.HungAfter
			what := "write or sync"
			if unreadable {
				what = "read"
			}
			return m.fail(now, fmt.Errorf("a %s has not completed for %v", what, m.opts.HungAfter), unreadable)
		case age >= m.opts.SlowAfter:
			return m.suspect(now, fmt.Errorf("a request has not completed for %v", m.opts.SlowAfter))
		}
	}
	if mean := m.Mean(); others.Mean > 0 && mean >= m.opts.LagFloor && mean >= others.Mean*time.Duration(m.opts.LagFactor) {
		return m.suspect(now, fmt.Errorf("requests take %v, those of other volumes %v", mean.Round(time.Millisecond), others.Mean.Round(time.Microsecond)))
	}
	return false
}

// ProbeDue reports whether the caller should start a probe at the time now. After it has returned
// true, it returns false until Probed has reported the outcome. A probe writes the volume's newest
// superblock and catalogue, syncs, and reads back.
func (m *Machine) ProbeDue(now time.Time) bool {
	wait := m.wait
	if m.others.Suffice == Failed {
		wait = min(wait, m.opts.ProbeEvery)
	}
	if m.condition == OK || m.duty == Removed || m.probing || now.Before(m.pausedAt.Add(wait)) {
		return false
	}
	m.probing = true
	return true
}

// Probe is the outcome of a probe.
type Probe struct {
	// Took is the duration of the probe.
	Took time.Duration
	// Late is set if the store stopped waiting for the probe. The catalogue may have changed since, so
	// a late probe does not end the state Failed.
	Late bool
	// Err is the reason why the probe failed, or nil.
	Err error
}

// Probed reports the outcome of a probe. A probe fails with an error; it is slow if it is late or
// took SlowAfter, and good otherwise.
func (m *Machine) Probed(now time.Time, p Probe) (changed bool) {
	m.probing, m.pausedAt = false, now
	switch {
	case p.Err != nil:
		m.good, m.slowProbes = 0, 0
		m.postpone()
		if m.condition == Suspect {
			return m.fail(now, fmt.Errorf("a probe failed: %w", p.Err), false)
		}
		return false
	case p.Late || p.Took >= m.opts.SlowAfter:
		return m.probedSlow(now, p)
	}
	m.wait, m.slowProbes = m.opts.ProbeEvery, 0
	if m.condition == OK || (m.condition == Suspect && m.slow) {
		// While a request is outstanding for too long, a good probe does not change the state: the
		// request either completes or makes the volume fail.
		return false
	}
	m.good++
	switch {
	case m.good >= m.opts.GoodProbes:
		return m.change(now, func() {
			m.condition, m.cause, m.unreadable = OK, nil, false
			m.horizon, m.recovered = now, now
			m.resetHistory()
		})
	case m.condition == Failed:
		return m.readmit(now)
	}
	return false
}

// probedSlow continues Probed after a slow probe.
func (m *Machine) probedSlow(now time.Time, p Probe) (changed bool) {
	m.good = 0
	switch m.condition {
	case Suspect:
		m.wait = m.opts.ProbeEvery
		if m.slowProbes++; m.slowProbes >= m.opts.SlowProbes && m.others.Suffice == OK {
			return m.fail(now, fmt.Errorf("%d probes in a row took %v or longer, the last one %v", m.opts.SlowProbes, m.opts.SlowAfter, p.Took.Round(time.Millisecond)), false)
		}
	case Failed:
		if m.others.Suffice == Failed && !p.Late {
			m.wait = m.opts.ProbeEvery
			return m.readmit(now)
		}
		m.postpone()
	}
	return false
}

// postpone sets the time to the next probe after one that showed no recovery.
func (m *Machine) postpone() {
	if m.others.Suffice != Failed {
		m.interval = min(2*m.interval, m.opts.ProbeMax)
	}
	m.wait = m.interval
}

// readmit makes a failed volume suspect.
func (m *Machine) readmit(now time.Time) (changed bool) {
	return m.change(now, func() {
		m.condition, m.cause, m.unreadable = Suspect, fmt.Errorf("recovering: %w", m.cause), false
		m.horizon = now
		m.resetHistory()
	})
}

// resetHistory drops the errors, latencies and slow probes from before a recovery.
func (m *Machine) resetHistory() {
	m.writeErrors, m.readErrors, m.mean, m.samples, m.slow, m.slowProbes = 0, 0, 0, 0, false, 0
}

// Lost is the event that the volume did not store a change that it must store, such as a newer
// catalogue. The volume is failed until a probe has written the newest superblock and catalogue to
// it.
func (m *Machine) Lost(now time.Time, cause error) (changed bool) {
	return m.fail(now, cause, false)
}

func (m *Machine) suspect(now time.Time, cause error) bool {
	m.good = 0
	if m.condition != OK {
		return false
	}
	m.startProbing(now)
	return m.change(now, func() { m.condition, m.cause = Suspect, cause })
}

// fail makes the volume Failed and keeps the first cause. If the reads of a volume have failed or
// hung once, it stays unreadable, whatever the cause of a later failure.
func (m *Machine) fail(now time.Time, cause error, unreadable bool) bool {
	m.good = 0
	if m.condition == Failed {
		if !unreadable || m.unreadable {
			return false
		}
		return m.change(now, func() { m.cause, m.unreadable = cause, true })
	}
	if m.condition == OK {
		m.startProbing(now)
	}
	return m.change(now, func() { m.condition, m.cause, m.unreadable = Failed, cause, unreadable })
}

// startProbing schedules the first probe of a volume that was OK.
func (m *Machine) startProbing(now time.Time) {
	if !m.recovered.IsZero() && now.Sub(m.recovered) < relapseWithin {
		m.interval = min(2*m.interval, m.opts.ProbeMax)
	} else {
		m.interval = m.opts.ProbeEvery
	}
	m.pausedAt, m.wait = now, m.interval
}

// change calls f and reports whether f changed the state. The time of such a change is recorded in
// m.since.
func (m *Machine) change(now time.Time, f func()) bool {
	was := m.Status()
	f()
	if m.Status().State != was.State {
		m.since = now
	}
	return m.Status() != was
}
