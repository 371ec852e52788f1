package gateway

import (
	"encoding/json"
	"fmt"

	"github.com/penstock-kv/penstock/kv"
)

// Payload is the data that a gateway sends to both engines of a request through the planner, in
// addition to the lengths. The planner accepts a payload of at most 3 MiB in JSON form.
type Payload struct {
	// IDs are the chain of the prompt's full blocks, and of the output's full blocks if
	// the gateway has them.
	IDs []kv.BlockID
	// Extra is further JSON data for the engines; nil: none.
	Extra json.RawMessage
}

// jsonPayload is a Payload as JSON.
type jsonPayload struct {
	IDs   []byte          `json:"ids"` // 16 bytes each, in base64
	Extra json.RawMessage `json:"extra,omitempty"`
}

// Encode returns the payload in JSON form. It returns an error if Extra is not JSON.
func (p Payload) Encode() ([]byte, error) {
	j := jsonPayload{IDs: make([]byte, 0, len(p.IDs)*kv.BlockIDSize), Extra: p.Extra}
	for _, id := range p.IDs {
		j.IDs = append(j.IDs, id[:]...)
	}
	b, err := json.Marshal(j)
	if err != nil {
		return nil, fmt.Errorf("payload: %w", err)
	}
	return b, nil
}

// ParsePayload decodes a payload, for engines.
func ParsePayload(b []byte) (p Payload, err error) {
	var j jsonPayload
	if err := json.Unmarshal(b, &j); err != nil {
		return p, fmt.Errorf("gateway: payload: %w", err)
	}
	if len(j.IDs)%kv.BlockIDSize != 0 {
		return p, fmt.Errorf("gateway: payload: ids of %d bytes; want a multiple of %d", len(j.IDs), kv.BlockIDSize)
	}
	p.IDs, p.Extra = make([]kv.BlockID, len(j.IDs)/kv.BlockIDSize), j.Extra
	for i := range p.IDs {
		copy(p.IDs[i][:], j.IDs[i*kv.BlockIDSize:])
	}
	return p, nil
}
