package reproduce

import (
	"encoding/json"
	"fmt"
	"math"

	"github.com/penstock-kv/penstock/internal/chart"
)

// NoteAbove is the relative deviation from the published value above which a cell needs a note.
const NoteAbove = 0.05

// Kind is the origin of a cell's value.
type Kind uint8

const (
	// Predicted: none of the constants on which the value depends was chosen to match the published
	// value, or another value of the same figure or table.
	Predicted Kind = iota + 1
	// Fitted: a constant was chosen to match the published value, or another value of the same
	// figure or table.
	Fitted
	// Derived: arithmetic on numbers that the paper prints. Nothing is simulated.
	Derived
)

var kindNames = [...]string{Predicted: "predicted", Fitted: "fitted", Derived: "derived"}

// String returns the kind's name in docs/reproduction.md.
func (k Kind) String() string {
	if k == 0 || int(k) >= len(kindNames) {
		return fmt.Sprintf("kind %d", uint8(k))
	}
	return kindNames[k]
}

// Cell is one number of a table.
type Cell struct {
	// ID is the name of the number in the project's list of expected values ("PF-5", "NK-A1"), or
	// "".
	ID string
	// Name describes the number; it is unique within its table.
	Name string
	// Unit is "s", "req/s", "%", …; "" for a ratio, and UnitHolds for a statement.
	Unit string
	// Paper is the published value; NaN if there is none.
	Paper float64
	// Ours is the computed or simulated value. The accepted range is Low to High, inclusive; either
	// bound may be infinite.
	Ours, Low, High float64
	// Std is the standard deviation of Ours over the seeds; 0 if there is none.
	Std float64
	// Note explains a deviation from Paper.
	Note string
	// Kind 0 means the table's Kind.
	Kind Kind
}

// UnitHolds is the unit of a statement. The value is 1 if the statement holds, 0 if it does not.
const UnitHolds = "holds"

// Near returns a cell whose value is accepted within a relative tolerance of the published one.
func Near(id, name, unit string, paper, ours, tolerance float64) Cell {
	d := math.Abs(paper) * tolerance
	return Cell{ID: id, Name: name, Unit: unit, Paper: paper, Ours: ours, Low: paper - d, High: paper + d}
}

// Within returns a cell whose value is accepted from low to high. Without a published value, paper
// is NaN.
func Within(id, name, unit string, paper, ours, low, high float64) Cell {
	return Cell{ID: id, Name: name, Unit: unit, Paper: paper, Ours: ours, Low: low, High: high}
}

// Holds returns the cell of a statement. The cell is in range if holds is true.
func Holds(id, name string, holds bool) Cell {
	c := Cell{ID: id, Name: name, Unit: UnitHolds, Paper: math.NaN(), Low: 1, High: 1}
	if holds {
		c.Ours = 1
	}
	return c
}

// Noted returns the cell with a note.
func (c Cell) Noted(format string, args ...any) Cell {
	c.Note = fmt.Sprintf(format, args...)
	return c
}

// As returns the cell with another kind than its table's.
func (c Cell) As(k Kind) Cell {
	c.Kind = k
	return c
}

// Published reports whether the paper prints the number.
func (c Cell) Published() bool { return !math.IsNaN(c.Paper) }

// Claim returns the cell's kind in docs/reproduction.md. A predicted cell without a
// published value is a "check".
func (c Cell) Claim() string {
	if c.Kind == Predicted && !c.Published() {
		return "check"
	}
	return c.Kind.String()
}

// OK reports whether Ours is in the accepted range; NaN is never accepted.
func (c Cell) OK() bool { return c.Ours >= c.Low && c.Ours <= c.High }

// Deviation returns (Ours - Paper)/Paper: 0.02 is 2 % above the published value. It is NaN if there
// is no published value, or if that value is 0.
func (c Cell) Deviation() float64 {
	if c.Paper == 0 {
		return math.NaN()
	}
	return (c.Ours - c.Paper) / math.Abs(c.Paper)
}

// NeedsNote reports whether the cell has no note but deviates from the paper so much that it must
// have one.
func (c Cell) NeedsNote() bool {
	if c.Note != "" || math.IsNaN(c.Paper) {
		return false
	}
	return math.Abs(c.Deviation()) > NoteAbove || c.Paper < c.Low || c.Paper > c.High
}

// validate returns an error for an incomplete cell.
func (c Cell) validate() error {
	switch {
	case c.Kind == 0 || int(c.Kind) >= len(kindNames):
		return fmt.Errorf("cell %q has %v: say whether it was predicted, fitted or derived", c.Name, c.Kind)
	case c.Name == "":
		return fmt.Errorf("a cell (id %q) has no name", c.ID)
	case math.IsNaN(c.Low) || math.IsNaN(c.High) || c.Low > c.High:
		return fmt.Errorf("cell %q accepts %v to %v; it must be a range", c.Name, c.Low, c.High)
	case math.IsInf(c.Low, -1) && math.IsInf(c.High, 1) && math.IsNaN(c.Paper):
		return fmt.Errorf("cell %q accepts any value and has no published one: it asserts nothing", c.Name)
	}
	return nil
}

// cellJSON is the JSON form of a cell: absent values are null.
type cellJSON struct {
	ID        string   `json:"id,omitempty"`
	Name      string   `json:"name"`
	Unit      string   `json:"unit,omitempty"`
	Kind      string   `json:"kind"`
	Paper     *float64 `json:"paper"`
	Ours      *float64 `json:"ours"`
	Std       *float64 `json:"std,omitempty"`
	Low       *float64 `json:"low"`
	High      *float64 `json:"high"`
	Deviation *float64 `json:"deviation"`
	OK        bool     `json:"ok"`
	Note      string   `json:"note,omitempty"`
}

// MarshalJSON encodes NaN and the infinities, which JSON does not have, as null.
func (c Cell) MarshalJSON() ([]byte, error) {
	j := cellJSON{
		ID: c.ID, Name: c.Name, Unit: c.Unit, Kind: c.Claim(), Paper: finite(c.Paper), Ours: finite(c.Ours),
		Low: finite(c.Low), High: finite(c.High), Deviation: finite(c.Deviation()), OK: c.OK(), Note: c.Note,
	}
	if c.Std != 0 {
		j.Std = finite(c.Std)
	}
	return json.Marshal(j)
}

func finite(v float64) *float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return nil
	}
	return &v
}

// Table is one table of a paper, or the numbers of one figure or paragraph.
type Table struct {
	Title string `json:"title"`
	// Source names the place in the paper: "PrfaaS, Table 6".
	Source string `json:"source"`
	// Command reproduces only this table.
	Command string `json:"command,omitempty"`
	// Text is a paragraph before the table, with the assumptions.
	Text string `json:"text,omitempty"`
	// Kind is the kind of the cells whose Kind is 0.
	Kind  Kind   `json:"-"`
	Cells []Cell `json:"cells"`
}

// Omission is a result of a paper that the tables lack, with the reason.
type Omission struct {
	What string `json:"what"`
	Why  string `json:"why"`
}

// Figure is one figure, with its data.
type Figure struct {
	// Name is the file's name without extension: "prfaas-fig5a".
	Name  string      `json:"name"`
	Title string      `json:"title"`
	Chart chart.Chart `json:"chart"`
}
