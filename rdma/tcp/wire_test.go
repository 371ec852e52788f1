package tcp

import (
	"encoding/binary"
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/penstock-kv/penstock/rdma"
)

// TestWire prints the bytes of frames and hellos field by field, as doc.go draws them, so that
// another implementation can be written from the transcript.
func TestWire(t *testing.T) {
	datadriven.RunTest(t, "testdata/wire.td", func(t *testing.T, d *datadriven.TestData) string {
		switch d.Cmd {
		case "header":
			return printHeader(t, d)
		case "table":
			return printTable(t, d)
		case "ack":
			var a ack
			var status uint64
			d.ScanArgs(t, "op", &a.op)
			d.ScanArgs(t, "status", &status)
			a.status = rdma.Reason(status)
			b := make([]byte, ackSize)
			a.put(b)
			return fields(b, "op 8", "status 1", "zero 7")
		case "hello":
			return printHello()
		}
		t.Fatalf("%s: unknown command %q", d.Pos, d.Cmd)
		return ""
	})
}

// printHeader encodes a header from arguments.
func printHeader(t *testing.T, d *datadriven.TestData) string {
	var h header
	kinds := map[string]uint8{"write": frameWrite, "ack": frameAck, "message": frameMessage, "heartbeat": frameHeartbeat, "down": frameDown}
	numbers := map[string]uint64{}
	for _, a := range d.CmdArgs {
		var n uint64
		if len(a.Vals) == 0 {
			h.kind = kinds[a.Key]
			continue
		}
		if _, err := fmt.Sscan(a.Vals[0], &n); err != nil {
			t.Fatalf("%s: %v", d.Pos, err)
		}
		numbers[a.Key] = n
	}
	h.flags, h.runs, h.imm, h.frames = uint8(numbers["flags"]), uint16(numbers["runs"]), uint32(numbers["imm"]), uint32(numbers["frames"])
	h.piece = uint32(numbers["piece"])
	h.op, h.key, h.offset, h.length = numbers["op"], numbers["key"], numbers["offset"], numbers["length"]
	b := h.raw()
	var back header
	if err := back.decode(b); err != nil {
		return "does not decode: " + err.Error()
	}
	return fields(b, "magic 4", "type 1", "flags 1", "runs 2", "imm 4", "frames 4", "op 8", "key 8", "offset 8", "length 8", "tableSum 4", "piece 4", "zero 4", "headerSum 4")
}

// printTable decodes runs given as offset+length.
func printTable(t *testing.T, d *datadriven.TestData) string {
	var table []byte
	for _, line := range strings.Fields(d.Input) {
		var s span
		if _, err := fmt.Sscanf(line, "%d+%d", &s.offset, &s.length); err != nil {
			t.Fatalf("%s: %v", d.Pos, err)
		}
		var b [runSize]byte
		putSpan(b[:], s)
		table = append(table, b[:]...)
	}
	h := header{kind: frameWrite, tableSum: tableSum(table)}
	d.ScanArgs(t, "length", &h.length)
	spans, err := h.decodeTable(table, nil)
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("tableSum %#x\n%+v", h.tableSum, spans)
}

// printHello prints the fields of a hello that belong to this protocol.
func printHello() string {
	h := hello{index: 1, conns: 4, lane: 1, lanes: 2, rail: 2, rails: 3, generation: 7, engine: rdma.EngineID{0xaa, 15: 0xaa}, session: [16]byte{0xbb, 15: 0xbb}}
	said := h.encode()
	param := binary.LittleEndian.AppendUint32(nil, said.Param)
	return "param\n" + fields(param, "index 2", "conns 2") +
		"more\n" + fields(said.More, "lane 1", "lanes 1", "rail 1", "rails 1", "generation 4", "zero 8")
}

// fields prints b, split by the given names and sizes.
func fields(b []byte, names ...string) string {
	var out strings.Builder
	for _, f := range names {
		var name string
		var n int
		_, _ = fmt.Sscanf(f, "%s %d", &name, &n)
		fmt.Fprintf(&out, "  %-10s %x\n", name, b[:n])
		b = b[n:]
	}
	if len(b) > 0 {
		fmt.Fprintf(&out, "  left over  %x\n", b)
	}
	return out.String()
}
