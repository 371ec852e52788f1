package binding

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/rdma/copier"
)

// Memory is registered memory of the caller.
type Memory struct {
	store  *Store
	handle Handle
	// client is the memory as package client has it. Memory of a device has loads and saves instead.
	client       *client.Memory
	device       *device
	loads, saves copier.Memory
	// The memory is [addr, end).
	addr, end uint64
	// users counts the batches that use the memory. It is -1 while the memory is being
	// unregistered. Guarded by Store.mu.
	users int
}

func (m *Memory) of() *Store { return m.store }

func checkMemory(addr, n uint64) error {
	if addr == 0 || n == 0 || n > math.MaxInt64 || addr > math.MaxUint64-n {
		return fmt.Errorf("%w: memory of %d bytes at address %#x", ErrInvalid, n, addr)
	}
	return nil
}

// close ends the registration. No batch uses the memory.
func (m *Memory) close(ctx context.Context) error {
	var errs []error
	if m.client != nil {
		errs = append(errs, m.client.Close(ctx))
	}
	for _, of := range []copier.Memory{m.loads, m.saves} {
		if of != nil {
			errs = append(errs, of.Close(ctx))
		}
	}
	return errors.Join(errs...)
}

// register registers n bytes at addr with the transfer engine.
func (s *Store) register(addr, n uint64) (*Memory, error) {
	if err := checkMemory(addr, n); err != nil {
		return nil, err
	}
	mem, err := s.client.Register(bytesAt(addr, n))
	if err != nil {
		return nil, err
	}
	return &Memory{store: s, client: mem, addr: addr, end: addr + n}, nil
}

// Register registers memory for values. Registered memories must not overlap.
func (s *Store) Register(addr, n uint64) (Handle, error) {
	if err := s.begin(); err != nil {
		return 0, err
	}
	defer s.calls.Done()
	m, err := s.register(addr, n)
	if err != nil {
		return 0, err
	}
	return s.addMemory(m)
}

// addMemory adds a new memory to the store and returns its handle.
func (s *Store) addMemory(m *Memory) (Handle, error) {
	s.mu.Lock()
	i, _ := slices.BinarySearchFunc(s.memories, m.addr, func(m *Memory, addr uint64) int { return cmp.Compare(m.addr, addr) })
	for _, near := range s.memories[max(0, i-1):min(len(s.memories), i+1)] {
		if near.addr < m.end && m.addr < near.end {
			s.mu.Unlock()
			return 0, errors.Join(fmt.Errorf("%w: memory [%#x,%#x) overlaps [%#x,%#x), which is registered", ErrInvalid, m.addr, m.end, near.addr, near.end),
				m.close(context.Background()))
		}
	}
	s.memories = slices.Insert(s.memories, i, m)
	s.mu.Unlock()
	m.handle = s.library.add(m)
	return m.handle, nil
}

// Unregister ends a registration. It fails with ErrBusy while batches use the memory.
func (m *Memory) Unregister() error {
	s := m.store
	if err := s.begin(); err != nil {
		return err
	}
	defer s.calls.Done()
	s.mu.Lock()
	if m.users != 0 {
		users := m.users
		s.mu.Unlock()
		return fmt.Errorf("%w: %d batches use memory [%#x,%#x)", ErrBusy, users, m.addr, m.end)
	}
	m.users = -1
	s.memories = slices.DeleteFunc(s.memories, func(x *Memory) bool { return x == m })
	s.mu.Unlock()
	s.library.remove(m.handle)
	// No transfer uses the memory, so Close does not wait for a transfer.
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return m.close(ctx)
}

// use returns the memory that contains [addr, addr+n) and adds 1 to its users. It returns
// nil if no registered memory contains the range.
func (s *Store) use(addr, n uint64) *Memory {
	s.mu.Lock()
	defer s.mu.Unlock()
	i, found := slices.BinarySearchFunc(s.memories, addr, func(m *Memory, addr uint64) int { return cmp.Compare(m.addr, addr) })
	if !found {
		i--
	}
	if i < 0 || addr < s.memories[i].addr || n > s.memories[i].end-s.memories[i].addr || addr-s.memories[i].addr > s.memories[i].end-s.memories[i].addr-n {
		return nil
	}
	s.memories[i].users++
	return s.memories[i]
}

// unuse subtracts 1 from the users of each memory.
func (s *Store) unuse(memories []*Memory) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range memories {
		m.users--
	}
}
