package binding

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/client/traffic"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/copier"
)

// TrafficOptions are the options of a Traffic. Compute, Token, the memory, Bases and BufferBytes are
// required. Zero in another field selects the default.
type TrafficOptions struct {
	// Compute opens the engine's compute NIC, whose token is Token. With secure it accepts and dials only
	// engines that use TLS. The Traffic closes it.
	Compute func(ctx context.Context, secure *tls.Config, log *slog.Logger) (rdma.Engine, error)
	Token   rdma.Token
	// CAFile, CertFile and KeyFile are PEM files for TLS between engines: all three, or none for
	// plaintext. Each engine proves its certificate to the other one.
	CAFile, CertFile, KeyFile string
	// Address and Bytes are the address and the size of the engine's device memory, or of host
	// memory used instead.
	Address, Bytes uint64
	// Copier, if set, opens a copier for device memory that the CPU cannot address. The Traffic
	// opens one for loads and one for saves, and closes both. If Copier is nil, the CPU must be able
	// to address the memory.
	Copier func() (copier.DeviceCopier, error)
	// Bases, Stride, Pages and Tables have the meaning of traffic.Device.
	Bases  []uint64
	Stride uint64
	Pages  int
	Tables []int
	// Order has the meaning of traffic.Options.
	Order []int
	// BufferBytes, AppendBytes, PersistMax and Verify have the meaning of traffic.Options.
	BufferBytes, AppendBytes int64
	PersistMax               int
	Verify                   traffic.Verify
	// TransfersMax is the largest number of transfers that have not ended or whose last event was
	// not drained. Default 1024.
	TransfersMax int
}

// TransferKind is the kind of a TransferEvent.
type TransferKind uint32

// The kinds of events of transfers; see penstock.h.
const (
	TransferLoaded TransferKind = iota + 1
	TransferReady
	TransferProgress
	TransferStopped
	TransferFinished
	TransferFailed
)

// TransferEvent is one step of a transfer. Fields that penstock.h does not name for the kind are zero.
type TransferEvent struct {
	Transfer  Handle
	Kind      TransferKind
	FirstMiss int
	Part      traffic.Part
	Upto      int
	Bytes     int64
	Gone      bool
	Intact    int
	Err       error
}

// last reports whether e is the last event of its transfer.
func (e *TransferEvent) last() bool { return e.Kind >= TransferFinished }

// Traffic is a traffic.Manager whose jobs put their events into a queue. All methods may be called
// concurrently.
type Traffic struct {
	*queue[TransferEvent]
	ns      *Namespace
	geo     kv.Geometry
	max     int
	token   rdma.Token
	bases   int
	tables  int
	compute rdma.Engine
	// The device memory is either region, or memory that the copiers can reach. Each copier has a
	// stream of its own, so that a load does not wait for a save that waits for the engine.
	region       rdma.Region
	loads, saves deviceCopies
	manager      *traffic.Manager
	// stream is the engine's stream, or nil if calls wait for none.
	stream atomic.Pointer[uint64]
	// transfers has the transfers whose last event was not drained. requests has the request names
	// of the transfers that have not ended. mu guards both.
	transfers map[Handle]*Transfer
	requests  map[string]bool
}

// deviceCopies are a copier, and device memory on it. Both are nil if the CPU can address the memory.
type deviceCopies struct {
	copier copier.DeviceCopier
	memory copier.Memory
}

func (d *deviceCopies) open(o *TrafficOptions) (err error) {
	c, err := o.Copier()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	d.copier = c
	d.memory, err = d.copier.Import(o.Address, o.Bytes)
	return err
}

func (d *deviceCopies) close(ctx context.Context) error {
	var errs []error
	if d.memory != nil {
		errs = append(errs, d.memory.Close(ctx))
	}
	if d.copier != nil {
		errs = append(errs, d.copier.Close())
	}
	return errors.Join(errs...)
}

// OpenTraffic opens a traffic manager of an engine that serves the namespace's KV. Storage is the
// namespace's store.
func (n *Namespace) OpenTraffic(o TrafficOptions) (Handle, error) {
	s := n.store
	if err := s.begin(); err != nil {
		return 0, err
	}
	defer s.calls.Done()
	def := n.Definition()
	switch {
	case def.Index != kv.IndexTrie:
		return 0, fmt.Errorf("%w: namespace %q is flat; a traffic manager needs a chained one, because it moves prefixes", ErrInvalid, def.Name)
	case !n.ids:
		return 0, fmt.Errorf("%w: the keys of namespace %q are not block ids; open it with ids as keys", ErrInvalid, def.Name)
	case o.Address == 0 || o.Bytes == 0 || o.Bytes > math.MaxInt64 || o.Address > math.MaxUint64-o.Bytes:
		return 0, fmt.Errorf("%w: device memory of %d bytes at address %#x", ErrInvalid, o.Bytes, o.Address)
	}
	q, err := newQueue[TransferEvent](s)
	if err != nil {
		return 0, err
	}
	t := &Traffic{
		queue: q, ns: n, geo: def.Geometry, max: cmp.Or(o.TransfersMax, 1024), token: o.Token, bases: len(o.Bases), tables: tablesOf(o.Tables),
		transfers: make(map[Handle]*Transfer), requests: make(map[string]bool),
	}
	if err := t.open(def, o); err != nil {
		return 0, errors.Join(err, t.release(), q.discard())
	}
	t.ended = t.endTransfers
	t.handle = s.library.add(t)
	s.own(t.handle, t)
	return t.handle, nil
}

// tablesOf returns the number of page tables.
func tablesOf(tables []int) int {
	if len(tables) == 0 {
		return 1
	}
	return slices.Max(tables) + 1
}

// tls returns the TLS configuration of both sides of a connection between two engines, or nil.
func (o *TrafficOptions) tls(log *slog.Logger) (*tls.Config, error) {
	if o.CAFile == "" && o.CertFile == "" && o.KeyFile == "" {
		return nil, nil
	}
	if o.CAFile == "" || o.CertFile == "" || o.KeyFile == "" {
		return nil, fmt.Errorf("%w: TLS between engines needs ca_file, cert_file and key_file: ca_file %q, cert_file %q, key_file %q", ErrInvalid, o.CAFile, o.CertFile, o.KeyFile)
	}
	files := Credentials{CAFile: o.CAFile, CertFile: o.CertFile, KeyFile: o.KeyFile}
	secure, err := files.tls(log)
	if err != nil {
		return nil, err
	}
	secure.MinVersion = tls.VersionTLS13 // both sides are this library
	secure.ClientCAs, secure.ClientAuth = secure.RootCAs, tls.RequireAndVerifyClientCert
	return secure, nil
}

// open opens the compute NIC and the manager. release closes both.
func (t *Traffic) open(def kv.Namespace, o TrafficOptions) (err error) {
	log := t.store.logs.logger()
	secure, err := o.tls(log)
	if err != nil {
		return err
	}
	if t.compute, err = o.Compute(context.Background(), secure, log); err != nil {
		return err
	}
	if err := t.openDevice(o); err != nil {
		return fmt.Errorf("device memory: %w", err)
	}
	options := traffic.Options{
		Namespace: def, Order: o.Order, Storage: t.store.client, Compute: t.compute, BufferBytes: o.BufferBytes, AppendBytes: o.AppendBytes,
		Device:     traffic.Device{Region: t.region, Bases: o.Bases, Stride: o.Stride, Pages: o.Pages, Tables: o.Tables},
		PersistMax: o.PersistMax, Verify: o.Verify, Logger: log,
	}
	if t.loads.copier != nil {
		options.Copier, options.DeviceCopies = t.loads.copier, t.loads.memory
		options.SaveCopier, options.SaveCopies = t.saves.copier, t.saves.memory
	}
	t.manager, err = traffic.New(options)
	return err
}

func (t *Traffic) openDevice(o TrafficOptions) (err error) {
	if o.Copier == nil {
		t.region, err = t.compute.Register(bytesAt(o.Address, o.Bytes), rdma.RegisterOptions{Local: true})
		return err
	}
	if err := t.loads.open(&o); err != nil {
		return err
	}
	return t.saves.open(&o)
}

// FollowStream makes later calls of Prefill, Decode, AddPages, Computed and Append wait for the work
// that a stream of the device has when they are called: their copies wait on the device.
func (t *Traffic) FollowStream(stream uint64) error {
	if err := t.begin(); err != nil {
		return err
	}
	defer t.calls.Done()
	if t.loads.copier == nil {
		return fmt.Errorf("%w: a stream is for device memory, and the memory of this traffic manager is host memory", ErrInvalid)
	}
	t.stream.Store(&stream)
	return nil
}

// mark records an event in the engine's stream for copies of d. It returns nil without a stream.
func (t *Traffic) mark(d *deviceCopies) (copier.Mark, error) {
	stream := t.stream.Load()
	if stream == nil {
		return nil, nil
	}
	return d.copier.Mark(*stream)
}

// releaseWithin is the longest wait until the peers' writes to device memory have ended.
const releaseWithin = 30 * time.Second

// release closes everything that open has opened.
func (t *Traffic) release() error {
	ctx, cancel := context.WithTimeout(context.Background(), releaseWithin)
	defer cancel()
	var errs []error
	if t.manager != nil {
		errs = append(errs, t.manager.Close())
	}
	if t.region != nil {
		errs = append(errs, t.region.Close(ctx))
	}
	errs = append(errs, t.loads.close(ctx), t.saves.close(ctx))
	if t.compute != nil {
		errs = append(errs, t.compute.Close())
	}
	return errors.Join(errs...)
}

// endTransfers closes the handles of the transfers of a closed traffic manager, and the manager.
func (t *Traffic) endTransfers() error {
	t.mu.Lock()
	transfers := t.transfers
	t.transfers = nil
	t.mu.Unlock()
	for h := range transfers {
		t.store.library.remove(h)
	}
	return t.release()
}

// TrafficDescription has the fields of Member that the planner and the engines of the other role
// need.
type TrafficDescription struct {
	Address, Token []byte
	Footprint      traffic.Footprint
}

// Describe returns the description, which does not change.
func (t *Traffic) Describe() (TrafficDescription, error) {
	if err := t.begin(); err != nil {
		return TrafficDescription{}, err
	}
	defer t.calls.Done()
	d := TrafficDescription{Token: t.token, Footprint: t.manager.Footprint()}
	if nics := t.compute.Addr().NICs; len(nics) > 0 {
		d.Address = []byte(nics[0])
	}
	return d, nil
}

// NICs returns the state of the compute NICs.
func (t *Traffic) NICs() ([]rdma.NIC, error) {
	if err := t.begin(); err != nil {
		return nil, err
	}
	defer t.calls.Done()
	return t.compute.NICs(), nil
}

// Drain moves up to len(dst) events to dst and returns their number. It closes the handles of the
// transfers whose last event it returns.
func (t *Traffic) Drain(dst []TransferEvent) (int, error) {
	n, err := t.queue.Drain(dst)
	for _, e := range dst[:n] {
		if e.last() {
			t.mu.Lock()
			delete(t.transfers, e.Transfer)
			t.mu.Unlock()
			t.store.library.remove(e.Transfer)
		}
	}
	return n, err
}

// within returns a context that ends with the Traffic or after d; with NoLimit only with the Traffic.
func (t *Traffic) within(d time.Duration) (context.Context, context.CancelFunc) {
	if d == NoLimit {
		return context.WithCancel(t.ctx)
	}
	return context.WithTimeout(t.ctx, d)
}

// ofCall returns the error of a call that ended with err. If the Traffic was closed during the
// call, the result is an ErrHandle that gives this as the reason.
func (t *Traffic) ofCall(err error) error {
	if err != nil && t.ctx.Err() != nil {
		return fmt.Errorf("%w: the traffic manager was closed during the call", ErrHandle)
	}
	return err
}

// Append stores one block that decoding has filled; see traffic.Manager.Append. epoch 0 selects the
// namespace's epoch. If it returns a timeout, no byte was copied from the pages.
func (t *Traffic) Append(request string, ids []kv.BlockID, epoch kv.Epoch, timeout time.Duration, pages ...uint32) error {
	if err := t.begin(); err != nil {
		return err
	}
	defer t.calls.Done()
	after, err := t.mark(&t.saves)
	if err != nil {
		return err
	}
	if after != nil {
		defer func() { _ = after.Close() }()
	}
	ctx, cancel := t.within(timeout)
	defer cancel()
	return t.ofCall(t.manager.AppendAfter(ctx, request, ids, t.epoch(epoch), after, pages...))
}

// Settle waits until storage has the block id, or until the write of this block has failed; see
// traffic.Manager.Settle.
func (t *Traffic) Settle(id kv.BlockID, timeout time.Duration) error {
	if err := t.begin(); err != nil {
		return err
	}
	defer t.calls.Done()
	ctx, cancel := t.within(timeout)
	defer cancel()
	return t.ofCall(t.manager.Settle(ctx, id))
}

// epoch returns e, or the namespace's epoch if e is 0.
func (t *Traffic) epoch(e kv.Epoch) kv.Epoch { return cmp.Or(e, t.ns.Definition().Epoch) }
