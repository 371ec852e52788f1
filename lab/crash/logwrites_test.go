package crash

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"testing"
)

// The log of dm-log-writes (drivers/md/dm-log-writes.c of Linux; all numbers little-endian):
//
//	sector 0        magic u64 | version u64 | entries u64 | bytes per sector u32
//	then, entries times, each from the start of a sector:
//	  sector u64 | sectors u64 | flags u64 | data bytes u64 | the data of a mark, in the same sector
//	  the bytes that were written: sectors × bytes per sector; none for a discard or a mark
//
// dm-log-writes logs a write when the next flush after the write's completion completes. So the drive must keep all entries
// before a flush once that flush has completed. The entries between two flushes are in the order of their completion. After
// a power loss, a drive may have kept any of these entries, and any whole sectors of each.
const (
	logMagic = 0x6a736677736872

	logFlush    = 1 << 0
	logFUA      = 1 << 1
	logDiscard  = 1 << 2
	logMark     = 1 << 3
	logKnown    = logFlush | logFUA | logDiscard | logMark | 1<<4
	logSuper    = 28
	logEntry    = 32
	sectorBytes = 512
)

// logged is one entry of the log.
type logged struct {
	flags  uint64
	offset int64 // bytes, on the recorded device
	bytes  int64 // length of the write or discard
	at     int64 // offset of the data in the log
	mark   string
}

func (l logged) has(flag uint64) bool { return l.flags&flag != 0 }

// readLog reads the entries of a log without their data.
func readLog(log io.ReaderAt) ([]logged, error) {
	head := make([]byte, logSuper)
	if _, err := log.ReadAt(head, 0); err != nil {
		return nil, err
	}
	u64 := binary.LittleEndian.Uint64
	if u64(head) != logMagic || u64(head[8:]) != 1 {
		return nil, fmt.Errorf("not a log of dm-log-writes: magic %#x, version %d", u64(head), u64(head[8:]))
	}
	unit := int64(binary.LittleEndian.Uint32(head[24:]))
	if unit != 512 && unit != 4096 {
		return nil, fmt.Errorf("log with sectors of %d bytes", unit)
	}
	page := make([]byte, unit)
	var entries []logged
	for at := unit; len(entries) < int(u64(head[16:])); at += unit {
		if _, err := log.ReadAt(page, at); err != nil {
			return nil, fmt.Errorf("entry %d: %w", len(entries), err)
		}
		n, data := int64(u64(page[8:])), u64(page[24:])
		e := logged{flags: u64(page[16:]), offset: int64(u64(page)) * unit, bytes: n * unit, at: at + unit}
		if e.flags&^logKnown != 0 || data > uint64(unit-logEntry) {
			return nil, fmt.Errorf("entry %d has flags %#x and %d bytes of data: the log is broken", len(entries), e.flags, data)
		}
		if e.has(logMark) {
			e.mark = string(bytes.TrimRight(page[logEntry:][:data], "\x00"))
		}
		if !e.has(logDiscard | logMark) {
			at += e.bytes
		}
		entries = append(entries, e)
	}
	return entries, nil
}

// device is the target of a replay.
type device interface {
	io.ReaderAt
	io.WriterAt
}

// apply repeats the entry's write or discard on a device, but only its first keep bytes.
func (l logged) apply(to device, log io.ReaderAt, keep int64) error {
	n := min(l.bytes, keep)
	if n == 0 || l.has(logMark) {
		return nil
	}
	data := make([]byte, n) // a discarded range reads as zeroes
	if !l.has(logDiscard) {
		if _, err := log.ReadAt(data, l.at); err != nil {
			return err
		}
	}
	_, err := to.WriteAt(data, l.offset)
	return err
}

// TestReadLog reads and replays entries of each kind, in the kernel's format.
func TestReadLog(t *testing.T) {
	var log bytes.Buffer
	sector := func(words ...uint64) {
		page := make([]byte, 512)
		for i, w := range words {
			binary.LittleEndian.PutUint64(page[8*i:], w)
		}
		log.Write(page)
	}
	sector(logMagic, 1, 4, 512)
	sector(8, 2, 0, 0)
	log.Write(bytes.Repeat([]byte{0xA5}, 1024))
	sector(0, 0, logFlush, 0)
	mark := make([]byte, 512)
	binary.LittleEndian.PutUint64(mark[16:], logMark)
	binary.LittleEndian.PutUint64(mark[24:], 3)
	copy(mark[logEntry:], "k17")
	log.Write(mark)
	sector(9, 1, logDiscard, 0)

	entries, err := readLog(bytes.NewReader(log.Bytes()))
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != 4 || entries[0].offset != 4096 || entries[0].bytes != 1024 || !entries[1].has(logFlush) ||
		entries[2].mark != "k17" || !entries[3].has(logDiscard) || entries[3].offset != 9*512 {
		t.Errorf("entries %+v", entries)
	}
	disk := memory(make([]byte, 6144))
	for i, e := range entries {
		if err := e.apply(disk, bytes.NewReader(log.Bytes()), e.bytes); err != nil {
			t.Errorf("apply entry %d: %v", i, err)
		}
	}
	if want := append(bytes.Repeat([]byte{0xA5}, 512), make([]byte, 512)...); !bytes.Equal(disk[4096:5120], want) {
		t.Error("a write of two sectors, the second discarded: other bytes")
	}
	if _, err := readLog(bytes.NewReader(make([]byte, 512))); err == nil {
		t.Error("zeroes were accepted as a log")
	}
	if _, err := readLog(bytes.NewReader(log.Bytes()[:1536])); err == nil {
		t.Error("a truncated log was accepted")
	}
}

// memory is a device in memory.
type memory []byte

func (m memory) ReadAt(p []byte, off int64) (int, error)  { return copy(p, m[off:]), nil }
func (m memory) WriteAt(p []byte, off int64) (int, error) { return copy(m[off:], p), nil }
