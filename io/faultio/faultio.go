package faultio

import (
	"context"
	"io"
	"math/rand/v2"

	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/io/blockio"
)

// sectorBytes is the unit of a Torn write.
const sectorBytes = 512

// Device is a blockio.Device that fails according to rules. Its files are those of the wrapped
// device.
type Device struct {
	blockio.Device // Lock, Stat, List, Info and Close are those of the wrapped device
	program        *program
	counter        *Counter
}

var _ blockio.Device = (*Device)(nil)

// Wrap returns a device that injects faults into inner according to rules; nil means no rules.
// Closing the result closes inner.
func Wrap(inner blockio.Device, rules *Rules) *Device {
	counter := newCounter()
	return &Device{Device: inner, counter: counter, program: newProgram(counter, rules)}
}

// SetRules replaces the rules, for a test whose setup needs a device without faults. The counts and
// random numbers of the rules start again, but the Counter keeps its records. Calls in progress
// follow the old rules.
func (d *Device) SetRules(rules *Rules) { d.program.set(rules) }

// Counter returns the record of the faults.
func (d *Device) Counter() *Counter { return d.counter }

// Stats implements blockio.Device. It returns the counters of the wrapped device, plus the injected
// failures that the wrapped device did not see.
func (d *Device) Stats() blockio.Stats {
	s := d.Device.Stats()
	for _, i := range d.counter.Injected() {
		if i.Action != Err && i.Action != Short {
			continue
		}
		switch i.Kind {
		case Read:
			s.ReadFailures++
		case Write:
			s.WriteFailures++
		case Sync:
			s.SyncFailures++
		}
	}
	return s
}

// Create implements blockio.Device.
func (d *Device) Create(name string, sizeBytes int64) (blockio.File, error) {
	if err := d.gate(&call{kind: Create, files: []string{name}}); err != nil {
		return nil, err
	}
	return d.Device.Create(name, sizeBytes)
}

// Open implements blockio.Device.
func (d *Device) Open(name string) (blockio.File, error) {
	if err := d.gate(&call{kind: Open, files: []string{name}}); err != nil {
		return nil, err
	}
	return d.Device.Open(name)
}

// Remove implements blockio.Device.
func (d *Device) Remove(name string) error {
	if err := d.gate(&call{kind: Remove, files: []string{name}}); err != nil {
		return err
	}
	return d.Device.Remove(name)
}

// Sync implements blockio.Device.
func (d *Device) Sync(ctx context.Context, files ...blockio.File) error {
	c := &call{kind: Sync}
	for _, f := range files {
		c.files = append(c.files, f.Name())
	}
	if err := d.gate(c); err != nil {
		return err
	}
	return d.Device.Sync(ctx, files...)
}

// gate applies the rules to a call that is not a transfer. It waits for a Delay and a Stall, and returns the
// injected error, if any.
func (d *Device) gate(c *call) error {
	v := d.program.judge(c)
	v.wait()
	if v.rule == nil {
		return nil
	}
	return d.program.failure(v.rule, c, cause(v.rule.errno))
}

// Do implements blockio.Device. A batch that violates the contract is refused before any rule is
// evaluated.
func (d *Device) Do(ctx context.Context, batch []blockio.Request) error {
	if blockio.CheckBatch(batch) != nil || ctx.Err() != nil {
		return d.Device.Do(ctx, batch) // returns the reason
	}
	plans, pause := d.plan(batch)
	pause.wait()
	if plans == nil {
		return d.Device.Do(ctx, batch)
	}
	if err := d.prepare(ctx, plans); err != nil {
		return err
	}
	inner := make([]blockio.Request, 0, len(plans))
	for i := range plans {
		if len(plans[i].send.Bufs) > 0 {
			inner = append(inner, plans[i].send)
		}
	}
	if err := d.Device.Do(ctx, inner); err != nil {
		return err
	}
	for i := range plans {
		sent := len(plans[i].send.Bufs) > 0
		if sent {
			plans[i].send.Err = inner[0].Err
			inner = inner[1:]
		}
		plans[i].finish(d.program, &batch[i])
	}
	return nil
}

// plan is the effect of the rules on one request.
type plan struct {
	verdict
	call call
	// send is the request to the wrapped device. If it has no buffers, nothing is sent.
	send blockio.Request
	// at is the offset of the byte that a Flip changes, from the start of the request, and bit is
	// the bit in that byte.
	at  int64
	bit byte
	// changed is set if a torn write differs from the requested write.
	changed bool
}

// plan evaluates the rules for every request. plans is nil if no request gets a fault. wait
// is for the Delays and Stalls of all requests.
func (d *Device) plan(batch []blockio.Request) (plans []plan, wait pause) {
	plans = make([]plan, len(batch))
	faults := 0
	for i := range batch {
		r, p := &batch[i], &plans[i]
		p.call = call{kind: Read, files: []string{r.File.Name()}, offset: r.Offset, bytes: r.Len()}
		if r.Op == blockio.Write {
			p.call.kind = Write
		}
		p.send = *r
		p.verdict = d.program.judge(&p.call)
		wait.add(p.pause)
		if p.rule != nil {
			faults++
		}
	}
	if faults == 0 {
		return nil, wait
	}
	return plans, wait
}

// prepare changes the requests that will be sent. It returns an error if the wrapped device refuses
// a batch; nothing has been written then.
func (d *Device) prepare(ctx context.Context, plans []plan) error {
	for i := range plans {
		p := &plans[i]
		if p.rule == nil {
			continue
		}
		switch p.rule.action {
		case Err:
			p.send.Bufs = nil
		case Short:
			p.send.Bufs = firstHalf(p.send.Bufs)
		case Flip:
			p.aim()
			if p.call.kind == Write {
				p.send.Bufs = [][]byte{p.copied()}
				p.send.Bufs[0][p.at] ^= p.bit
			}
		case Torn:
			if p.call.kind == Write {
				if err := d.tear(ctx, p); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// aim chooses the bit that a Flip changes.
func (p *plan) aim() {
	bit := p.rule.bit
	if bit < 0 {
		bit = int64(p.draw >> 1)
	}
	bit %= p.call.bytes * 8
	p.at, p.bit = bit/8, 1<<(bit%8)
}

// copied returns a copy of the request's data.
func (p *plan) copied() []byte {
	out := aligned(int(p.call.bytes))
	at := out
	for _, b := range p.send.Bufs {
		at = at[copy(at, b):]
	}
	return out
}

// tear changes the data of a write so that some sectors keep their old content in the file.
func (d *Device) tear(ctx context.Context, p *plan) error {
	old := aligned(int(p.call.bytes))
	read := []blockio.Request{{Op: blockio.Read, File: p.send.File, Offset: p.send.Offset, Bufs: [][]byte{old}}}
	if err := d.Device.Do(ctx, read); err != nil {
		return err
	}
	whole := p.copied()
	if read[0].Err != nil {
		clear(old) // the old content cannot be read: zeroes take its place
	}
	torn := p.mix(whole, old)
	p.changed = string(torn) != string(whole)
	p.send.Bufs = [][]byte{torn}
	return nil
}

// mix returns whole with about half of its sectors, at least one, replaced by those of old.
func (p *plan) mix(whole, old []byte) []byte {
	out := aligned(len(whole))
	copy(out, whole)
	rng := rand.New(rand.NewPCG(p.draw, 0))
	sectors := len(whole) / sectorBytes
	lost := rng.IntN(sectors)
	for s := range sectors {
		if at := s * sectorBytes; s == lost || rng.IntN(2) == 0 {
			copy(out[at:at+sectorBytes], old[at:])
		}
	}
	return out
}

// finish sets the outcome of the request, damages the data of a read, and records the fault. If the
// request failed for another reason, the fault had no effect and is not recorded.
func (p *plan) finish(prog *program, r *blockio.Request) {
	r.Err = p.send.Err
	if p.rule == nil {
		return
	}
	defer p.mangle(r)
	switch action := p.rule.action; {
	case action == Err:
		r.Err = prog.failure(p.rule, &p.call, cause(p.rule.errno))
	case action == Short && r.Err == nil:
		r.Err = prog.failure(p.rule, &p.call, io.ErrUnexpectedEOF)
	case r.Err != nil:
	case action == Flip:
		p.flipped(prog, r)
	case action == Torn:
		p.torn(prog, r)
	}
}

// mangle overwrites the buffers of a read that failed because of a rule: the contract leaves their
// content undefined.
func (p *plan) mangle(r *blockio.Request) {
	if p.call.kind != Read || r.Err == nil {
		return
	}
	for _, b := range r.Bufs {
		invariants.Mangle(b)
	}
}

func (p *plan) flipped(prog *program, r *blockio.Request) {
	if p.call.kind == Read {
		at := p.at
		for _, b := range r.Bufs {
			if at < int64(len(b)) {
				b[at] ^= p.bit
				break
			}
			at -= int64(len(b))
		}
	}
	i := p.rule.injection(&p.call)
	i.Offset, i.Bytes = i.Offset+p.at, 1
	prog.counter.add(i)
}

// torn records a torn write, or damages the data of a read. A fault that changed no byte is not
// recorded.
func (p *plan) torn(prog *program, r *blockio.Request) {
	if p.call.kind == Read {
		p.send.Bufs = r.Bufs
		whole := p.copied()
		got := p.mix(whole, make([]byte, len(whole)))
		p.changed = string(got) != string(whole)
		for _, b := range r.Bufs {
			got = got[copy(b, got):]
		}
	}
	if p.changed {
		prog.counter.add(p.rule.injection(&p.call))
	}
}

// firstHalf returns the first half of the bytes, rounded down to whole pages. Of a single page it
// returns nothing.
func firstHalf(bufs [][]byte) [][]byte {
	total := 0
	for _, b := range bufs {
		total += len(b)
	}
	left := total / 2 &^ (blockio.Align - 1)
	var out [][]byte
	for _, b := range bufs {
		if left == 0 {
			break
		}
		b = b[:min(len(b), left)]
		left -= len(b)
		out = append(out, b)
	}
	return out
}
