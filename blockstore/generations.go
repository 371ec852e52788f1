package blockstore

import (
	"context"
	"fmt"
	"sync"

	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/kv"
)

const sequenceBits = 32

// generations assigns generations. The high bits of a generation are the boot counter, which is on
// disk, or the fencing number of a shared store; the low bits are a sequence number, which is in memory only. No two starts of the store
// have the same boot counter, so assigning a generation needs no write to disk.
type generations struct {
	mu   sync.Mutex
	boot uint32
	next uint64 // sequence; never 0, so that no generation is 0
}

// booter can raise the boot counter on disk.
type booter interface {
	raiseBoot(ctx context.Context, beyond uint32) (boot uint32, err error)
}

// start begins to assign generations with the boot counter boot.
func (g *generations) start(boot uint32) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if boot > g.boot {
		g.boot, g.next = boot, 1
	}
}

// take returns the first of n consecutive generations.
func (g *generations) take(ctx context.Context, b booter, n int) (kv.Generation, error) {
	for {
		g.mu.Lock()
		boot := g.boot
		if g.next+uint64(n) <= 1<<sequenceBits {
			gen := kv.Generation(uint64(boot)<<sequenceBits | g.next)
			g.next += uint64(n)
			g.mu.Unlock()
			return gen, nil
		}
		g.mu.Unlock()
		raised, err := b.raiseBoot(ctx, boot)
		if err != nil {
			return 0, err
		}
		g.start(raised)
	}
}

// newest returns the highest generation that may have been assigned.
func (g *generations) newest() kv.Generation {
	g.mu.Lock()
	defer g.mu.Unlock()
	return kv.Generation(uint64(g.boot)<<sequenceBits | (g.next - 1))
}

// NewestGeneration returns the highest generation assigned so far; no slot has a higher one.
func (s *Store) NewestGeneration() kv.Generation { return s.generations.newest() }

// Boot returns the number of this start of the store; later starts have higher numbers.
func (s *Store) Boot() uint64 { return uint64(s.generations.newest() >> sequenceBits) }

// raiseBoot writes a boot counter greater than beyond to the superblocks, durably, and returns it.
// It writes nothing if a concurrent call has already raised the counter above beyond.
func (s *Store) raiseBoot(ctx context.Context, beyond uint32) (uint32, error) {
	if err := s.takeMeta(ctx); err != nil {
		return 0, err
	}
	defer s.giveMeta()
	if s.boot > beyond {
		return s.boot, nil
	}
	next, err := s.nextBoot(ctx, beyond)
	if err != nil {
		return 0, err
	}
	was := s.boot
	s.boot = next
	if err := s.writeSuperblocks(ctx); err != nil {
		// The next call must not return a boot counter that is not durable.
		s.boot = was
		return 0, err
	}
	return next, nil
}

// nextBoot returns the boot counter to use after beyond.
func (s *Store) nextBoot(ctx context.Context, beyond uint32) (uint32, error) {
	if beyond == ondisk.MaxBoot {
		return 0, fmt.Errorf("blockstore: all %d starts of this store are used up; begin with empty volumes: %w", ondisk.MaxBoot, ErrFloor)
	}
	if s.opts.Owner != nil {
		return s.fenceAbove(ctx, beyond)
	}
	return beyond + 1, nil
}
