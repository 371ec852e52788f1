package cluster

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/penstock-kv/penstock/kv"
)

// AfterTurns waits until n turns (requests of agents) of the replay have ended.
func (c *Cluster) AfterTurns(ctx context.Context, n int) error {
	return c.after(ctx, n, func() int { return len(c.turns) })
}

// AfterStarts waits until the planner has started turns (requests of agents) of the replay n times;
// a turn that is planned again counts again.
func (c *Cluster) AfterStarts(ctx context.Context, n int) error {
	return c.after(ctx, n, func() int { return c.starts })
}

// after waits until count returns at least n. It calls count with mu held.
func (c *Cluster) after(ctx context.Context, n int, count func() int) error {
	for {
		c.mu.Lock()
		have, changed := count(), c.changed
		c.mu.Unlock()
		if have >= n {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// AfterBytes waits until the storage NICs of the engines have received n bytes in total since the
// call.
func (c *Cluster) AfterBytes(ctx context.Context, n uint64) error {
	received := func() (sum uint64, _ error) {
		for _, m := range c.engines {
			k, err := m.snic.Counters()
			if err != nil {
				return 0, err
			}
			sum += k.ReceivedBytes
		}
		return sum, nil
	}
	begin, err := received()
	if err != nil {
		return err
	}
	t := time.NewTicker(20 * time.Millisecond)
	defer t.Stop()
	for {
		switch now, err := received(); {
		case err != nil:
			return err
		case now-begin >= n:
			return nil
		}
		select {
		case <-t.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// BumpWeights begins a new epoch of the namespace's weights, on the storage node and then on the
// planner, and returns the epoch. Only one call may run at a time.
func (c *Cluster) BumpWeights(ctx context.Context) (kv.Epoch, error) {
	if err := c.gateway.send(Order{Bump: true}); err != nil {
		return 0, err
	}
	select {
	case b := <-c.bumped:
		if b.Err != "" {
			return 0, fmt.Errorf("cluster: new weights: %s", b.Err)
		}
		return b.Epoch, nil
	case <-c.gateway.proc.Over():
		return 0, fmt.Errorf("cluster: the gateway ended before the new weights:\n%s", c.gateway.proc.Log())
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	}
}

// member finds a process by its name, for example storage, planner, P0, D3.
func (c *Cluster) member(name string) (*member, error) {
	for _, m := range append([]*member{c.storage, c.planner, c.gateway}, c.engines...) {
		if m.name == name {
			return m, nil
		}
	}
	return nil, fmt.Errorf("cluster: there is no process %q", name)
}

// Kill ends a process at once (SIGKILL).
func (c *Cluster) Kill(name string) error {
	m, err := c.member(name)
	if err != nil {
		return err
	}
	if m.proc == nil {
		return fmt.Errorf("cluster: %s is not running", name)
	}
	if err := m.proc.Kill(); err != nil {
		return err
	}
	c.ended += m.proc.CPU()
	m.proc = nil
	c.mu.Lock()
	defer c.mu.Unlock()
	// Rename the old process's counters, so that its successor does not overwrite them.
	if n, ok := c.counts[name]; ok {
		delete(c.counts, name)
		c.counts[fmt.Sprintf("%s until %v", name, time.Now())] = n
	}
	return nil
}

// Restart starts a killed process again, with the same arguments.
func (c *Cluster) Restart(ctx context.Context, name string) error {
	m, err := c.member(name)
	if err != nil {
		return err
	}
	if m.proc != nil {
		return fmt.Errorf("cluster: %s is already running", name)
	}
	return c.launch(ctx, m)
}

// Pause stops a process until Resume (SIGSTOP).
func (c *Cluster) Pause(name string) error { return c.signal(name, syscall.SIGSTOP) }

// Resume continues a paused process (SIGCONT).
func (c *Cluster) Resume(name string) error { return c.signal(name, syscall.SIGCONT) }

func (c *Cluster) signal(name string, sig syscall.Signal) error {
	m, err := c.member(name)
	if err != nil {
		return err
	}
	if m.proc == nil {
		return fmt.Errorf("cluster: %s is not running", name)
	}
	return m.proc.Signal(sig)
}

// port returns a NIC of an engine.
func (c *Cluster) port(n NIC) (nicPort, error) {
	m, err := c.member(n.Node)
	if err != nil {
		return nil, err
	}
	p := m.cnic
	if n.Storage {
		p = m.snic
	}
	if p == nil {
		return nil, fmt.Errorf("cluster: %s is not an engine; only engines have NICs", n.Node)
	}
	return p, nil
}

// SetRate changes the rate of a NIC, in bits per second.
func (c *Cluster) SetRate(n NIC, bits uint64) error {
	p, err := c.port(n)
	if err != nil {
		return err
	}
	return p.SetRate(bits)
}

// Plug pulls the cable of a NIC (in is false) or plugs the cable in again.
func (c *Cluster) Plug(n NIC, in bool) error {
	p, err := c.port(n)
	if err != nil {
		return err
	}
	return p.SetUp(in)
}

// FlipBuffer makes an engine flip n bits of its buffer, each at a random offset, one after another
// at the given interval.
func (c *Cluster) FlipBuffer(name string, every time.Duration, n int) error {
	m, err := c.member(name)
	if err != nil {
		return err
	}
	return m.send(Order{Flip: every, Flips: n})
}

// FlipStored flips n bits at random offsets of the storage node's segment files, and returns the
// number of bits flipped.
func (c *Cluster) FlipStored(n int, rng *rand.Rand) (int, error) {
	files, err := filepath.Glob(filepath.Join(c.spec.Dir, "volume", "segment-*"))
	if err != nil {
		return 0, err
	}
	slices.Sort(files)
	done := 0
	for range n {
		if len(files) == 0 {
			return done, errors.New("cluster: storage has no segment file")
		}
		ok, err := flipIn(files[rng.IntN(len(files))], rng)
		if err != nil {
			return done, err
		}
		if ok {
			done++
		}
	}
	return done, nil
}

// flipIn flips a random bit of one file. It returns false if the file is empty.
func flipIn(file string, rng *rand.Rand) (_ bool, err error) {
	f, err := os.OpenFile(file, os.O_RDWR|os.O_SYNC, 0)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	info, err := f.Stat()
	if err != nil || info.Size() == 0 {
		return false, err
	}
	at := rng.Int64N(info.Size())
	b := make([]byte, 1)
	if _, err := f.ReadAt(b, at); err != nil {
		return false, err
	}
	b[0] ^= 1 << rng.IntN(8)
	_, err = f.WriteAt(b, at)
	return err == nil, err
}
