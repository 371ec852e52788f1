package shm

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"

	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/rdma/group"
)

// Provider is the Info.Provider of engines of this package.
const Provider = "shm"

// Options configures an engine between processes of a host. The zero value is a client: it opens
// sessions and accepts none.
type Options struct {
	// Listen is the path of the unix socket on which sessions are accepted. A path that begins
	// with @ is in the abstract namespace. Empty: no sessions are accepted.
	Listen string
	// Arenas are the arenas for sources; they must be Shared. Every peer can read all of each
	// arena. The caller keeps ownership of the arenas and closes them after the engine.
	Arenas []*arena.Arena
	// Pollers is the number of goroutines that copy the payload of peers' writes. The engine shows
	// each of them as a NIC. Default 1, at most group.MaxDomains. More pollers help if one core cannot use
	// the whole memory bandwidth.
	Pollers int
	// Group holds the engine's other options; Provider, Detail, Domains, Reopen, Alloc and Control
	// are overwritten.
	Group group.Options
}

// New starts an engine. If Listen is set, the engine listens when New returns. ctx limits only the
// start.
func New(ctx context.Context, o Options) (*group.Engine, error) {
	e, _, err := start(ctx, o, func(int) error { return nil })
	return e, err
}

// start is New with two additions for tests. It also returns the state that the domains share. It
// calls mayOpen before it replaces the dead domain of NIC i; an error of mayOpen prevents the
// replacement.
func start(ctx context.Context, o Options, mayOpen func(i int) error) (*group.Engine, *host, error) {
	if o.Pollers == 0 {
		o.Pollers = 1
	}
	if o.Pollers < 1 || o.Pollers > group.MaxDomains {
		return nil, nil, fmt.Errorf("shm: %d pollers; must be 1 to %d", o.Pollers, group.MaxDomains)
	}
	h := &host{log: o.Group.Logger, arenas: slices.Clone(o.Arenas), domains: make([]*Domain, o.Pollers)}
	g := o.Group
	g.Provider, g.Detail, g.Alloc, g.Domains = Provider, fmt.Sprintf("%d pollers", o.Pollers), h.alloc, nil
	for i := range o.Pollers {
		d, err := h.open(i)
		if err != nil {
			return nil, nil, errors.Join(err, closeAll(g.Domains))
		}
		g.Domains = append(g.Domains, d)
	}
	g.Reopen = func(_ context.Context, i int) (group.Domain, error) {
		if err := mayOpen(i); err != nil {
			return nil, err
		}
		return h.open(i)
	}
	var err error
	if g.Control, err = group.Unix(ctx, o.Listen); err != nil {
		return nil, nil, errors.Join(err, closeAll(g.Domains))
	}
	e, err := group.New(ctx, g)
	return e, h, err
}

func closeAll(domains []group.Domain) (err error) {
	for _, d := range domains {
		err = errors.Join(err, d.Close())
	}
	return err
}

// host is the state that the domains of an engine share: the arenas for sources.
type host struct {
	log *slog.Logger

	mu     sync.Mutex
	arenas []*arena.Arena
	// domains holds the current or last domain of each NIC; nil before the first.
	domains []*Domain
}

// open returns a new domain for NIC i that has all arenas.
func (h *host) open(i int) (*Domain, error) {
	d, err := NewDomain(fmt.Sprint(Provider, i), h.log)
	if err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, a := range h.arenas {
		if err := d.Share(a); err != nil {
			return nil, errors.Join(err, d.Close())
		}
	}
	h.domains[i] = d
	return d, nil
}

// alloc returns memory in a new arena that is shared with every domain.
func (h *host) alloc(bytes int) ([]byte, func(), error) {
	a, err := arena.New(arena.Options{SizeBytes: int64(bytes), Shared: true})
	if err != nil {
		return nil, nil, fmt.Errorf("shm: buffers: %w", err)
	}
	free := func() {
		h.forget(a)
		_ = a.Close() // the arena has no open allocations, so Close cannot fail
	}
	if err := h.share(a); err != nil {
		free()
		return nil, nil, err
	}
	return a.Bytes()[:bytes:bytes], free, nil
}

// share shares an arena with all present and later domains.
func (h *host) share(a *arena.Arena) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.arenas = append(h.arenas, a)
	for _, d := range h.domains {
		if err := d.Share(a); err != nil && !errors.Is(err, errClosed) {
			return err
		}
	}
	return nil
}

// forget undoes share.
func (h *host) forget(a *arena.Arena) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.arenas = slices.DeleteFunc(h.arenas, func(x *arena.Arena) bool { return x == a })
	for _, d := range h.domains {
		d.unshare(a)
	}
}
