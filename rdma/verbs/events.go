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

// eventFile is an event channel of the card, registered with Go's netpoller.
type eventFile struct {
	file *os.File
	raw  syscall.RawConn
}

// openChannels registers both channels with the netpoller.
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
		// The descriptor is nonblocking, therefore os.NewFile registers it with the netpoller.
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

// Wait implements group.Domain. It continues to poll if completions are likely to arrive soon.
// Then it arms the completion queue. It polls once more, because completions from before the
// arming cause no event, and sleeps on the channel. Wake ends the sleep by a deadline in the past.
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
	// The deadline is removed before woken is reset. A Wake between the two steps sets a deadline
	// that makes one later Wait return early, but no Wake is lost.
	_ = d.completions.file.SetReadDeadline(time.Time{})
	d.spin.note(time.Since(began))
	d.woken.Store(false)
}

// polledOn polls for as long as the spinner allows, and reports whether there is work. Other
// goroutines may run between two polls. With one processor, polling would delay the other
// goroutines, so polledOn does not poll.
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

// ready reads the card's completions and reports whether Poll has any to return.
func (d *domain) ready() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.dead != nil || d.head < len(d.out) || d.reapLocked()
}

// sleepy arms the completion queue and reports whether the poller may sleep, because there are no
// completions.
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
	_ = d.completions.file.SetReadDeadline(time.Unix(1, 0)) // fails only for a closed channel, on which no goroutine waits
}

// watchEvents handles the card's asynchronous events until the domain is closed.
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

// takeEvent handles an asynchronous event. Events that need no reaction (a connection was
// established, the subnet manager changed) are ignored. takeEvent queries the device without
// holding a lock.
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
			ep.breakLocked(fmt.Errorf("%s: the device reports for queue pair %#x: %s", d.name, qpn, d.nic.eventText(e)))
		}
	}
}

// checkPort returns an error if the port's LID has changed since it was sent to peers, or if the
// partition of the queue pairs is no longer in its row of the port's table. The domain then ends
// and is opened again with the new values.
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

// errGIDGone: packets with this source address cannot be sent any more.
var errGIDGone = errors.New("the port has lost its GID: was an address removed from its network interface?")

// checkGID returns errGIDGone if the port's GID table no longer has the domain's GID at the
// domain's index. If the GID has moved to another index, the reopened domain finds it there.
func (d *domain) checkGID() error {
	table, err := d.nic.gids()
	if err == nil && !slices.Contains(table, d.gid) {
		err = errGIDGone
	}
	return err
}
