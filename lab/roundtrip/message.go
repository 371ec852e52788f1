package roundtrip

import (
	"encoding/json"
	"fmt"

	"github.com/penstock-kv/penstock/rdma"
)

// version is the version of the messages.
const version = 1

// Bounds of an Answerer.
const (
	// MaxShapes bounds the shapes of one measurement.
	MaxShapes = 256
	// MaxRequesters bounds the concurrent requesters.
	MaxRequesters = 16
)

// messageBytes bounds a message: MaxShapes shapes and a Desc with many NICs.
const messageBytes = 32 << 10

// Shape is the payload of a round trip, in bytes: There to the holder, Back to the requester.
type Shape struct {
	There int `json:"there"`
	Back  int `json:"back"`
}

// Bytes returns the sum of the bytes in both directions.
func (s Shape) Bytes() int { return s.There + s.Back }

// hello is a requester's message that opens a measurement. Without shapes it ends the measurement.
type hello struct {
	Version int     `json:"version"`
	Desc    []byte  `json:"desc,omitempty"`
	Shapes  []Shape `json:"shapes,omitempty"`
}

// reply is the holder's answer to a hello that has shapes.
type reply struct {
	Desc  []byte `json:"desc,omitempty"`
	Base  uint32 `json:"base,omitempty"`
	Error string `json:"error,omitempty"`
}

// check returns an error unless each direction of every shape fits into half of a memory of the
// given number of bytes.
func check(shapes []Shape, memory int) error {
	if len(shapes) < 1 || len(shapes) > MaxShapes {
		return fmt.Errorf("roundtrip: %d shapes; want 1 to %d", len(shapes), MaxShapes)
	}
	for _, s := range shapes {
		if s.There < 0 || s.Back < 0 || s.There > memory/2 || s.Back > memory/2 {
			return fmt.Errorf("roundtrip: %d bytes there and %d back; each must fit into %d, half of the memory", s.There, s.Back, memory/2)
		}
	}
	return nil
}

// encode encodes a message, which cannot fail.
func encode(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic("roundtrip: a message of plain values does not encode: " + err.Error())
	}
	return b
}

// describe encodes a Desc for a message.
func describe(d rdma.Desc) ([]byte, error) { return d.MarshalBinary() }
