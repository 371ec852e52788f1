package record

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"time"

	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/dualpath/netcost"
)

// Version is the version of the format.
const Version = 3

// MaxLine is the maximum length of a line in bytes. The line of a Fetch of a very large group has
// several hundred KiB.
const MaxLine = 16 << 20

// ErrFormat is wrapped by every error about a malformed record.
var ErrFormat = errors.New("not a planner's record")

// Header has the options of the planner. Options.Network is not written. Instead, the field Network
// has the options of the planner's network cost model; nil if the planner had none.
type Header struct {
	Options dualpath.Options
	Network *netcost.PlannerOptions
}

// header is the first line.
type header struct {
	Version int                     `json:"penstock_planner_record"`
	Options dualpath.Options        `json:"options"`
	Network *netcost.PlannerOptions `json:"network,omitempty"`
}

// step is a line after the first: an event with its actions.
type step struct {
	Kind    string          `json:"e"`
	Event   json.RawMessage `json:"v"`
	Actions []action        `json:"a,omitempty"`
}

// action is a dualpath.Action without its zero fields.
type action struct {
	Kind    string             `json:"kind"`
	Seq     uint64             `json:"seq"`
	Request dualpath.RequestID `json:"request,omitempty"`
	Group   dualpath.GroupID   `json:"group,omitempty"`
	Engine  dualpath.EngineID  `json:"engine,omitempty"`
	PE      dualpath.EngineID  `json:"pe,omitempty"`
	DE      dualpath.EngineID  `json:"de,omitempty"`
	Side    dualpath.Role      `json:"side,omitempty"`
	Parts   []part             `json:"parts,omitempty"`
	Hedge   bool               `json:"hedge,omitempty"`
	Why     dualpath.Reason    `json:"why,omitempty"`
	Epoch   uint64             `json:"epoch,omitempty"`
	Need    int                `json:"need,omitempty"`
	Most    int                `json:"most,omitempty"`
}

// part is [side, from, to].
type part [3]int

// AppendHeader appends the first line to dst.
func AppendHeader(dst []byte, h Header) ([]byte, error) {
	h.Options.Network = nil
	line, err := json.Marshal(header{Version, h.Options, h.Network})
	if err != nil {
		return dst, fmt.Errorf("record: the planner's options: %w", err)
	}
	return append(append(dst, line...), '\n'), nil
}

// AppendStep appends the line of an event and its actions to dst.
func AppendStep(dst []byte, ev dualpath.Event, actions []dualpath.Action) ([]byte, error) {
	raw, err := json.Marshal(ev)
	if err != nil {
		return dst, fmt.Errorf("record: an event %T: %w", ev, err)
	}
	s := step{Kind: reflect.TypeOf(ev).Name(), Event: raw}
	for i := range actions {
		s.Actions = append(s.Actions, wireOf(&actions[i]))
	}
	line, err := json.Marshal(s)
	if err != nil {
		return dst, fmt.Errorf("record: the actions of an event %T: %w", ev, err)
	}
	return append(append(dst, line...), '\n'), nil
}

// wireOf returns the written form of an action.
func wireOf(a *dualpath.Action) action {
	w := action{
		Kind: a.Kind.String(), Seq: a.Seq, Request: a.Request, Group: a.Group, Engine: a.Engine, PE: a.PE, DE: a.DE,
		Side: a.Side, Hedge: a.Hedge, Why: a.Why, Epoch: a.Epoch, Need: a.Need, Most: a.Most,
	}
	for _, p := range a.Parts[:a.NParts] {
		w.Parts = append(w.Parts, part{int(p.Side), p.From, p.To})
	}
	return w
}

// Reader reads a record. It must be used by one goroutine at a time.
type Reader struct {
	in     *bufio.Scanner
	line   int
	header Header
}

// NewReader reads the first line of a record.
func NewReader(r io.Reader) (*Reader, error) {
	in := bufio.NewScanner(r)
	in.Buffer(make([]byte, 64<<10), MaxLine)
	d := &Reader{in: in}
	raw, err := d.next()
	if errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("record: an empty file: %w", ErrFormat)
	}
	if err != nil {
		return nil, err
	}
	var h header
	if err := json.Unmarshal(raw, &h); err != nil || h.Version == 0 {
		return nil, fmt.Errorf("record: line 1 does not name the format; is this a file of `penstock planner --record`? %w", ErrFormat)
	}
	if h.Version != Version {
		return nil, fmt.Errorf("record: version %d; this program reads version %d: %w", h.Version, Version, ErrFormat)
	}
	d.header = Header{h.Options, h.Network}
	return d, nil
}

// Header returns the planner's options.
func (r *Reader) Header() Header { return r.header }

// Line returns the number of the last line read, from 1.
func (r *Reader) Line() int { return r.line }

// next returns the next line, or io.EOF.
func (r *Reader) next() ([]byte, error) {
	if r.in.Scan() {
		r.line++
		return r.in.Bytes(), nil
	}
	switch err := r.in.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		return nil, fmt.Errorf("record: line %d is longer than %d bytes: %w", r.line+1, MaxLine, ErrFormat)
	case err != nil:
		return nil, fmt.Errorf("record: after line %d: %w", r.line, err)
	}
	return nil, io.EOF
}

// Next returns the next event and its actions, each action as JSON text. The error is io.EOF at the
// end.
func (r *Reader) Next() (dualpath.Event, []string, error) {
	raw, err := r.next()
	if err != nil {
		return nil, nil, err
	}
	var s step
	if err := json.Unmarshal(raw, &s); err != nil {
		return nil, nil, fmt.Errorf("record: line %d: %v; a planner that was killed leaves its last line cut, remove it: %w", r.line, err, ErrFormat)
	}
	ev, err := eventOf(s.Kind, s.Event)
	if err != nil {
		return nil, nil, fmt.Errorf("record: line %d: %w: %w", r.line, err, ErrFormat)
	}
	var lines []string
	for i := range s.Actions {
		lines = append(lines, text(&s.Actions[i]))
	}
	return ev, lines, nil
}

// text returns an action as JSON text, for comparison and for errors.
func text(a *action) string {
	raw, err := json.Marshal(a)
	if err != nil {
		return err.Error() // numbers and booleans always encode
	}
	return string(raw)
}

// eventOf decodes an event of a kind.
func eventOf(kind string, raw json.RawMessage) (dualpath.Event, error) {
	switch kind {
	case "Submit":
		return decode[dualpath.Submit](kind, raw)
	case "GroupUp":
		return decode[dualpath.GroupUp](kind, raw)
	case "GroupDown":
		return decode[dualpath.GroupDown](kind, raw)
	case "Fetch":
		return decode[dualpath.Fetch](kind, raw)
	case "Progress":
		return decode[dualpath.Progress](kind, raw)
	case "Stopped":
		return decode[dualpath.Stopped](kind, raw)
	case "Finished":
		return decode[dualpath.Finished](kind, raw)
	case "Failed":
		return decode[dualpath.Failed](kind, raw)
	case "Cancelled":
		return decode[dualpath.Cancelled](kind, raw)
	case "Epoch":
		return decode[dualpath.Epoch](kind, raw)
	case "SwitchRole":
		return decode[dualpath.SwitchRole](kind, raw)
	case "SwitchRefused":
		return decode[dualpath.SwitchRefused](kind, raw)
	case "NetworkReport":
		return decode[dualpath.NetworkReport](kind, raw)
	case "Tick":
		return decode[dualpath.Tick](kind, raw)
	}
	return nil, fmt.Errorf("an event of the unknown kind %q", kind)
}

// decode decodes an event. It returns an error if the event has an unknown field, because the
// planner would ignore the value.
func decode[E dualpath.Event](kind string, raw json.RawMessage) (dualpath.Event, error) {
	var ev E
	d := json.NewDecoder(bytes.NewReader(raw))
	d.DisallowUnknownFields()
	if err := d.Decode(&ev); err != nil {
		return nil, fmt.Errorf("an event %s: %v", kind, err) // not %w: io.EOF is the end of a file
	}
	return ev, nil
}

// Summary has the counts of a replay.
type Summary struct {
	// Events and Actions are the numbers of replayed events and of the planner's actions. Kinds has
	// the number of events of each kind.
	Events, Actions int
	Kinds           map[string]int
	// Span is the time from the first event to the last.
	Span time.Duration
	// Stats are the planner's stats at the end.
	Stats dualpath.Stats
}

// Difference is an event for which the planner of this program returned other actions than the
// record has.
type Difference struct {
	Line  int
	Event dualpath.Event
	// Recorded are the actions in the record, Now those of this program's planner.
	Recorded, Now []string
}

// Error describes the difference.
func (d *Difference) Error() string {
	return fmt.Sprintf("record: line %d: after %T %+v\n  recorded %v\n  now      %v\nthis program's planner decides otherwise than the one that was recorded", d.Line, d.Event, d.Event, d.Recorded, d.Now)
}

// Replay passes the events of a record to a new planner and compares the planner's actions with the
// recorded actions. At the first difference it returns a *Difference as the error.
func Replay(r *Reader) (Summary, error) {
	sum := Summary{Kinds: make(map[string]int)}
	opts := r.header.Options
	if n := r.header.Network; n != nil {
		network, err := netcost.NewPlanner(*n)
		if err != nil {
			return sum, fmt.Errorf("record: the recorded network: %w", err)
		}
		opts.Network = network
	}
	p, err := dualpath.New(opts)
	if err != nil {
		return sum, fmt.Errorf("record: the recorded options: %w", err)
	}
	first, last := time.Duration(-1), time.Duration(0)
	for {
		ev, recorded, err := r.Next()
		if errors.Is(err, io.EOF) {
			sum.Stats = p.Stats()
			return sum, nil
		}
		if err != nil {
			return sum, err
		}
		sum.Events++
		sum.Kinds[reflect.TypeOf(ev).Name()]++
		last = max(last, dualpath.TimeOf(ev))
		if first < 0 {
			first = last
		}
		sum.Span = last - first
		actions := p.Step(ev)
		sum.Actions += len(actions)
		now := make([]string, 0, len(actions))
		for i := range actions {
			w := wireOf(&actions[i])
			now = append(now, text(&w))
		}
		if !slices.Equal(recorded, now) {
			return sum, &Difference{Line: r.line, Event: ev, Recorded: recorded, Now: now}
		}
	}
}
