package trace

import (
	"bytes"
	"encoding/json"
	"strconv"
	"time"
)

// mooncakeBlockTokens is the number of tokens per hash id of a Mooncake trace.
const mooncakeBlockTokens = 512

// mooncakeSource decodes one request per line.
type mooncakeSource struct {
	lines *lines
	count uint64
	last  int64 // ms
}

type mooncakeLine struct {
	Timestamp    *int64   `json:"timestamp"` // ms
	InputLength  *int64   `json:"input_length"`
	OutputLength *int64   `json:"output_length"`
	HashIDs      []uint64 `json:"hash_ids"`
}

func (s *mooncakeSource) next() (Request, error) {
	line, err := s.lines.next()
	if err != nil {
		return Request{}, err
	}
	var v mooncakeLine
	if err := json.Unmarshal(line, &v); err != nil {
		return Request{}, s.lines.errorf("%v; want one JSON object with timestamp, input_length, output_length, hash_ids", err)
	}
	if v.Timestamp == nil || v.InputLength == nil || v.OutputLength == nil {
		return Request{}, s.lines.errorf("timestamp, input_length or output_length is missing; want all three as integers")
	}
	if *v.Timestamp < s.last || *v.Timestamp > maxTime.Milliseconds() {
		return Request{}, s.lines.errorf("timestamp %d ms after %d ms; sort the file by timestamp, which starts at 0", *v.Timestamp, s.last)
	}
	if bad := checkLengths(*v.InputLength, *v.OutputLength); bad != "" {
		return Request{}, s.lines.errorf("%s", bad)
	}
	if want := ceilDiv(*v.InputLength, mooncakeBlockTokens); int64(len(v.HashIDs)) != want {
		return Request{}, s.lines.errorf("%d hash_ids for %d tokens; want %d, one per %d tokens", len(v.HashIDs), *v.InputLength, want, mooncakeBlockTokens)
	}
	s.last = *v.Timestamp
	r := Request{
		Time:         time.Duration(*v.Timestamp) * time.Millisecond,
		Session:      s.count,
		InputTokens:  int(*v.InputLength),
		OutputTokens: int(*v.OutputLength),
		BlockTokens:  mooncakeBlockTokens,
		Blocks:       v.HashIDs,
	}
	s.count++
	return r, nil
}

func ceilDiv(a, b int64) int64 { return (a + b - 1) / b }

const (
	azureHeader = "TIMESTAMP,ContextTokens,GeneratedTokens"
	azureTime   = "2006-01-02 15:04:05.9999999"
	// azureBlockTokens is the number of tokens per block. The value is arbitrary, because the
	// format has no blocks.
	azureBlockTokens = 64
)

// azureSource decodes one request per line. No two requests share a block.
type azureSource struct {
	lines  *lines
	count  uint64
	header bool
	start  time.Time
	last   time.Duration
	blocks []uint64
}

func (s *azureSource) next() (Request, error) {
	if !s.header {
		s.header = true
		line, err := s.lines.next()
		if err != nil {
			return Request{}, err
		}
		if !bytes.Equal(line, []byte(azureHeader)) {
			return Request{}, s.lines.errorf("header %.60q; want %q", line, azureHeader)
		}
	}
	line, err := s.lines.next()
	if err != nil {
		return Request{}, err
	}
	fields := bytes.Split(line, []byte(","))
	if len(fields) != 3 {
		return Request{}, s.lines.errorf("%d fields; want 3: %s", len(fields), azureHeader)
	}
	at, err := time.Parse(azureTime, string(fields[0]))
	if err != nil {
		return Request{}, s.lines.errorf("time %.40q; want the form %s", fields[0], azureTime)
	}
	input, errIn := strconv.ParseInt(string(fields[1]), 10, 64)
	output, errOut := strconv.ParseInt(string(fields[2]), 10, 64)
	if errIn != nil || errOut != nil {
		return Request{}, s.lines.errorf("token counts %.20q and %.20q; want two integers", fields[1], fields[2])
	}
	if bad := checkLengths(input, output); bad != "" {
		return Request{}, s.lines.errorf("%s", bad)
	}
	if s.count == 0 {
		s.start = at
	}
	since := at.Sub(s.start)
	if since < s.last || since > maxTime {
		return Request{}, s.lines.errorf("%v after the start follows %v; sort the file by time", since, s.last)
	}
	s.last = since
	s.blocks = s.blocks[:0]
	for i := range uint64(input) / azureBlockTokens {
		s.blocks = append(s.blocks, blockID(s.count, i))
	}
	r := Request{
		Time:         since,
		Session:      s.count,
		InputTokens:  int(input),
		OutputTokens: int(output),
		BlockTokens:  azureBlockTokens,
		Blocks:       s.blocks,
	}
	s.count++
	return r, nil
}

var (
	_ source = (*mooncakeSource)(nil)
	_ source = (*azureSource)(nil)
)
