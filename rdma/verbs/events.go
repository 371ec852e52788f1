package verbs

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"syscall"
	"time"
)

// eventFile is an event channel of the card on Go's netpoller.
type eventFile struct {
	file *os.File
	raw  syscall.RawConn
}

// openChannels puts both channels on the netpoller.
func (d *domain) openChannels() error {
	completions, async, err := d.nic.channels()
	if err != nil {
		return err
	}
	for _, c := range []struct {
		to   *eventFile
		fd   int
		name string
	}{{&d.completions, completions, "completions"}, {&d.async, async, "events"}} {
		// The descriptor does not block, which is what puts it on the netpoller.
		c.to.file = os.NewFile(uintptr(c.fd), d.name+" "+c.name)
		if c.to.raw, err = c.to.file.SyscallConn(); err == nil {
			err = c.to.file.SetReadDeadline(time.Time{})
		}
		if err != nil {
			return errors.Join(fmt.Errorf("%s on the netpoller: %w", c.name, err), d.completions.close(), d.async.close())
		}
	}
	return nil
}

// close removes the channel from the netpoller. Goroutines that wait on it return.
func (f *eventFile) close() error {
	if f.file == nil {
		return nil
	}
	return f.file.Close()
}

// Wait implements group.Domain. It polls on where that is likely to find something
// soon, then arms the completion queue, looks once more, since what completed
// before the arming announces nothing, and sleeps on the channel. A Wake is a
// deadline in the past.
func (d *domain) Wait() {
	if d.woken.Swap(false) {
		return
	}
	began := time.Now()
	if d.polledOn(began) || !d.sleepy() {
		d.spin.note(time.Since(began))
		return
	}
	_ = d.completions.raw.Read(func(uintptr) bool { return d.nic.takeEvents() > 0 || d.woken.Load() })
	// Cleared before woken is looked at: a Wake in between leaves a deadline that
	// makes one later Wait return early, never one that is missed.
	_ = d.completions.file.SetReadDeadline(time.Time{})
	d.spin.note(time.Since(began))
	d.woken.Store(false)
}

// polledOn polls for as long as the spinner allows and reports whether there is
// something to do. Other goroutines have their turn between two polls; with one
// processor they would have to wait for it, so that it does not poll at all.
func (d *domain) polledOn(began time.Time) bool {
	if !d.spin.worth() || runtime.GOMAXPROCS(0) == 1 {
		return false
	}
	for time.Since(began) < d.spin.max {
		if d.woken.Swap(false) || d.ready() {
			return true
		}
		runtime.Gosched()
	}
	return false
}

// ready takes what the card has completed and reports whether Poll has something
// to tell.
func (d *domain) ready() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.dead != nil || d.head < len(d.out) || d.reapLocked()
}

// sleepy arms the completion queue and reports whether there is nothing to do.
func (d *domain) sleepy() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.dead != nil || d.head < len(d.out) {
		return false
	}
	if err := d.nic.arm(); err != nil {
		d.doomLocked(err)
		return false
	}
	return !d.reapLocked()
}

// Wake implements group.Domain.
func (d *domain) Wake() {
	if d.woken.Swap(true) {
		return
	}
	_ = d.completions.file.SetReadDeadline(time.Unix(1, 0)) // no goroutine waits on a closed channel
}

// watchEvents takes the card's asynchronous events until the domain is closed.
func (d *domain) watchEvents() {
	for {
		var e asyncEvent
		var qpn uint32
		err := d.async.raw.Read(func(uintptr) (ok bool) {
			e, qpn, ok = d.nic.asyncEvent()
			return ok
		})
		if err != nil {
			return
		}
		d.takeEvent(e, qpn)
		d.Wake()
	}
}

// takeEvent acts on an asynchronous event. The others (a connection is established, the
// subnet manager changed) ask for nothing. It asks the device without a lock.
func (d *domain) takeEvent(e asyncEvent, qpn uint32) {
	var why error
	switch e {
	case eventPortDown:
		if p, err := d.nic.portState(); err != nil || !p.active {
			why = errPortDown
		}
	case eventGIDChange:
		why = d.checkGID()
	case eventLIDChange, eventPKeyChange:
		why = d.checkPort()
	case eventDeviceFatal, eventCQ, eventSRQ:
		why = fmt.Errorf("the device reports: %s", d.nic.eventText(e))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if why != nil {
		d.doomLocked(why)
	}
	switch e {
	case eventQPFatal, eventQPRequest, eventQPAccess, eventQPLast:
		if ep := d.byQPN[qpn]; ep != nil {
			ep.breakLocked(fmt.Errorf("%s: the device reports of queue pair %#x: %s", d.name, qpn, d.nic.eventText(e)))
		}
	}
}

// checkPort returns an error if peers have another LID of the port than it has now, or if
// its partition has left the row that queue pairs use. The domain then ends, and is opened
// again with what is so by then.
func (d *domain) checkPort() error {
	p, err := d.nic.portState()
	if err != nil {
		return err
	}
	table, err := d.nic.pkeys(p.pkeys)
	if err != nil {
		return err
	}
	return stillThere(d.port.lid, p.lid, d.partition, table, d.partitionRow)
}

// errGIDGone: packets with our address can't be sent any more.
var errGIDGone = errors.New("the port has lost its GID: was an address taken off its network interface?")

// checkGID returns errGIDGone if the port's GID table no longer has the domain's entry at
// its index. If the entry has moved to another index, reopening the domain finds it there.
func (d *domain) checkGID() error {
	table, err := d.nic.gids()
	if err == nil && !slices.Contains(table, d.gid) {
		err = errGIDGone
	}
	return err
}
