package blockstore

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/io/faultio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
)

// Sizes for stores of two segments of 64 KiB, which hold 7 slots of 8 KiB or 5 of
// 12 KiB.
const (
	growPiece      = 3000
	growLargePiece = 6000
	growSlots      = 7
)

func openGrowing(t *testing.T, opts Options, text string) (*Store, *faultio.Device) {
	d := faultio.Wrap(memio.New(memio.Options{}), rules(t, ""))
	opts.CapacityBytes, opts.SegmentBytes, opts.CatalogueBytes = 160<<10, 64<<10, 4096
	s := mustOpen(t, opts, d)
	d.SetRules(rules(t, text))
	return s, d
}

func reserveSlots(ctx context.Context, s *Store, pieceBytes int64, n int) ([]kv.Ref, error) {
	return s.Reserve(ctx, pieceBytes, 1, n, 0, false)
}

// TestBadSegmentIsCutAgain: a segment whose header could not be written becomes blank, and can be
// cut again, after a probe of its volume has succeeded.
func TestBadSegmentIsCutAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, d := openGrowing(t, Options{}, `(Err EIO (And Writes (File "segment-00000000") (Offset 0 4096) (Count 1)))`)
		if _, err := reserveSlots(t.Context(), s, growPiece, growSlots); err != nil {
			t.Fatal(err)
		}
		if n := d.Counter().Repaired("segment-00000000", 0, 4096); n != 1 {
			t.Errorf("%d faults were met; want 1", n)
		}
		if _, err := reserveSlots(t.Context(), s, growPiece, 1); !errors.Is(err, ErrFull) {
			t.Errorf("reserve before the probe: %v; want %v", err, ErrFull)
		}
		if st := s.Stats().Volumes[0]; st.Bad != 1 || st.Health.State != health.Suspect {
			t.Errorf("%d bad segments of a volume that is %v; want 1 and suspect", st.Bad, st.Health.State)
		}
		awaitState(t, s, 0, health.OK, time.Minute)
		synctest.Wait()
		if st := s.Stats().Volumes[0]; st.Bad != 0 || st.Blank != 1 {
			t.Errorf("after the recovery of the volume: %d bad and %d blank segments; want 0 and 1", st.Bad, st.Blank)
		}
		if _, err := reserveSlots(t.Context(), s, growPiece, growSlots); err != nil {
			t.Errorf("reserve after the probe: %v", err)
		}
	})
}

// TestBadHeaderForEver: the header of one segment can never be written. The store uses the other
// segments, and returns ErrFull when they are full, so that the caller evicts.
func TestBadHeaderForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, d := openGrowing(t, Options{}, `(Err EIO (And Writes (File "segment-00000000") (Offset 0 4096)))`)
		refs, err := reserveSlots(t.Context(), s, growPiece, growSlots)
		if err != nil {
			t.Fatal(err)
		}
		for range 5 {
			if _, err := reserveSlots(t.Context(), s, growPiece, 1); !errors.Is(err, ErrFull) {
				t.Fatalf("reserve: %v; want %v", err, ErrFull)
			}
			if err := s.Abandon(refs[0]); err != nil {
				t.Fatal(err)
			}
			again, err := reserveSlots(t.Context(), s, growPiece, 1)
			if err != nil {
				t.Fatal(err)
			}
			refs[0] = again[0]
			awaitState(t, s, 0, health.OK, time.Minute)
			synctest.Wait()
		}
		if n := d.Counter().Repaired("segment-00000000", 0, 4096); n < 2 {
			t.Errorf("the header was written %d times; want once for each recovery", n)
		}
	})
}

// TestCutIsWaitedFor: several writers wait for one cut. A writer whose context ends first returns,
// and the cut continues for the others. A writer of another slot size does not wait.
func TestCutIsWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, _ := openGrowing(t, Options{}, `(Delay 2s (And Writes (File "segment-00000000") (Offset 0 4096)))`)
		start := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		waiters := make(chan error, growSlots)
		for range growSlots {
			go func() {
				_, err := reserveSlots(t.Context(), s, growPiece, 1)
				waiters <- err
			}()
		}
		synctest.Wait()
		if _, err := reserveSlots(t.Context(), s, growLargePiece, 1); err != nil || time.Since(start) != 0 {
			t.Errorf("reserve of another size: %v after %v; want 0", err, time.Since(start))
		}
		if _, err := reserveSlots(ctx, s, growPiece, 1); !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != time.Second {
			t.Errorf("reserve for 1 s: %v after %v", err, time.Since(start))
		}
		for range growSlots {
			if err := <-waiters; err != nil || time.Since(start) != 2*time.Second {
				t.Errorf("reserve: %v after %v; want 2 s", err, time.Since(start))
			}
		}
		if st := s.Stats(); st.Volumes[0].Segments != 2 || st.Slots.FreeBytes != 4*12288 {
			t.Errorf("%d segments with %d bytes free; want 2 with 4 slots of 12288", st.Volumes[0].Segments, st.Slots.FreeBytes)
		}
	})
}

// TestReserveWithoutKeepersMemory: a writer does not wait for a keeper that waits for memory.
// Otherwise both could wait forever, because the writer may hold that memory.
func TestReserveWithoutKeepersMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		s, _ := openGrowing(t, Options{Prewrite: true, Alloc: func(ctx context.Context, sizeBytes int) ([]byte, func(), error) {
			<-release
			return heapAlloc(ctx, sizeBytes)
		}}, "")
		defer close(release)
		synctest.Wait()
		start := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := reserveSlots(ctx, s, growPiece, 1); err != nil || time.Since(start) != 0 {
			t.Errorf("reserve: %v after %v", err, time.Since(start))
		}
	})
}
