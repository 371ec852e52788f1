package chart

import (
	"encoding/json"
	"errors"
	"fmt"
	"image/color"
	"io"
	"math"
	"os"
	"path/filepath"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	_ "gonum.org/v1/plot/vg/vgimg" // PNG
	_ "gonum.org/v1/plot/vg/vgsvg" // SVG
)

// Kind is the form of a chart.
type Kind uint8

// The forms of a chart.
const (
	Lines Kind = iota
	Steps
	Bars
)

// Format is a file format.
type Format string

// The formats that Save writes.
const (
	PNG Format = "png"
	SVG Format = "svg"
)

// Series is one line, or one bar of each group.
type Series struct {
	Name string `json:"name"`
	// X has the coordinate of each point, ascending; for Bars it is empty.
	X []float64 `json:"x,omitempty"`
	// Y has the value of each point, or the height in each category; NaN leaves a gap.
	Y []float64 `json:"y"`
	// Dashed draws a dashed line, for values that were not measured, such as a bound or a published
	// value.
	Dashed bool `json:"dashed,omitempty"`
	// Points draws the points as well as the line.
	Points bool `json:"points,omitempty"`
}

// Mark is a named place on the X axis of Lines or Steps: a vertical line with the name beside it.
type Mark struct {
	X    float64 `json:"x"`
	Name string  `json:"name"`
}

// Chart is one figure.
type Chart struct {
	Title string `json:"title"`
	// XLabel and YLabel name the axes, with the unit.
	XLabel string `json:"x_label,omitempty"`
	YLabel string `json:"y_label,omitempty"`
	Kind   Kind   `json:"kind"`
	// Categories are the names of the groups of Bars.
	Categories []string `json:"categories,omitempty"`
	Series     []Series `json:"series"`
	Marks      []Mark   `json:"marks,omitempty"`
	// LogX and LogY select a logarithmic axis; every value must be above 0.
	LogX bool `json:"log_x,omitempty"`
	LogY bool `json:"log_y,omitempty"`
	// Width and Height are in inches; 0 means 8 by 4.5.
	Width  float64 `json:"-"`
	Height float64 `json:"-"`
}

// Validate returns an error that names the first part that cannot be drawn.
func (c Chart) Validate() error {
	if len(c.Series) == 0 {
		return fmt.Errorf("chart: %q has no series", c.Title)
	}
	if c.Kind > Bars {
		return fmt.Errorf("chart: %q: kind %d is unknown", c.Title, c.Kind)
	}
	if c.Width < 0 || c.Height < 0 || math.IsNaN(c.Width+c.Height) || c.Width > sideMax || c.Height > sideMax {
		return fmt.Errorf("chart: %q: %v by %v inches; each side is from 0 (the default) to %v", c.Title, c.Width, c.Height, sideMax)
	}
	if c.Kind == Bars && len(c.Marks) > 0 {
		return fmt.Errorf("chart: %q: bars have no marks", c.Title)
	}
	for _, m := range c.Marks {
		if math.IsNaN(m.X) || math.IsInf(m.X, 0) || c.LogX && m.X <= 0 {
			return fmt.Errorf("chart: %q: the x of the mark %q is %v, which this axis cannot show", c.Title, m.Name, m.X)
		}
	}
	drawn := 0
	for _, s := range c.Series {
		n, err := c.validate(s)
		if err != nil {
			return err
		}
		drawn += n
	}
	if drawn == 0 {
		return fmt.Errorf("chart: %q: no series has a value", c.Title)
	}
	return nil
}

// validate checks one series and returns the number of its values that are not NaN.
func (c Chart) validate(s Series) (int, error) {
	if c.Kind == Bars {
		if len(s.X) != 0 || len(s.Y) != len(c.Categories) {
			return 0, fmt.Errorf("chart: %q: series %q has %d x and %d y values for %d categories; bars have no x and one y a category",
				c.Title, s.Name, len(s.X), len(s.Y), len(c.Categories))
		}
	} else if len(s.X) != len(s.Y) {
		return 0, fmt.Errorf("chart: %q: series %q has %d x and %d y values", c.Title, s.Name, len(s.X), len(s.Y))
	}
	for i, x := range s.X {
		if math.IsNaN(x) || math.IsInf(x, 0) || c.LogX && x <= 0 {
			return 0, fmt.Errorf("chart: %q: x %d of series %q is %v, which this axis cannot show", c.Title, i, s.Name, x)
		}
		if i > 0 && x < s.X[i-1] {
			return 0, fmt.Errorf("chart: %q: x %d of series %q is %v, less than the one before (%v)", c.Title, i, s.Name, x, s.X[i-1])
		}
	}
	drawn := 0
	for i, y := range s.Y {
		if math.IsNaN(y) {
			continue
		}
		if math.IsInf(y, 0) || c.LogY && y <= 0 {
			return 0, fmt.Errorf("chart: %q: y %d of series %q is %v, which this axis cannot show", c.Title, i, s.Name, y)
		}
		drawn++
	}
	return drawn, nil
}

// sideMax is the maximum width and height of a picture, in inches; 40 inches are 3,840 pixels.
const sideMax = 40.0

// Write draws the chart into w.
func (c Chart) Write(w io.Writer, f Format) error {
	if f != PNG && f != SVG {
		return fmt.Errorf("chart: format %q; it is %s or %s", f, PNG, SVG)
	}
	p, err := c.plot()
	if err != nil {
		return err
	}
	width, height := c.Width, c.Height
	if width == 0 {
		width = 8
	}
	if height == 0 {
		height = 4.5
	}
	to, err := p.WriterTo(vg.Length(width)*vg.Inch, vg.Length(height)*vg.Inch, string(f))
	if err != nil {
		return fmt.Errorf("chart: %q: %w", c.Title, err)
	}
	if _, err := to.WriteTo(w); err != nil {
		return fmt.Errorf("chart: write %q: %w", c.Title, err)
	}
	return nil
}

// Save writes dir/name.png and dir/name.svg and returns their paths. It creates the directory if
// necessary.
func (c Chart) Save(dir, name string) ([]string, error) {
	if name == "" || filepath.Base(name) != name {
		return nil, fmt.Errorf("chart: %q is not a valid file name without extension", name)
	}
	if err := c.Validate(); err != nil { // before a file is created
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("chart: %w", err)
	}
	var paths []string
	for _, f := range []Format{PNG, SVG} {
		path := filepath.Join(dir, name+"."+string(f))
		if err := c.save(path, f); err != nil {
			return paths, err
		}
		paths = append(paths, path)
	}
	return paths, nil
}

func (c Chart) save(path string, f Format) error {
	file, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("chart: %w", err)
	}
	return errors.Join(c.Write(file, f), file.Close())
}

// plot builds the plot of package gonum.
func (c Chart) plot() (*plot.Plot, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	p := plot.New()
	p.BackgroundColor = color.White
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = c.Title, c.XLabel, c.YLabel
	p.Title.Padding = vg.Points(6)
	p.Legend.Top = true
	p.Legend.ThumbnailWidth = vg.Points(24)
	p.Legend.Padding, p.Legend.XOffs = vg.Points(3), -vg.Points(6)
	p.Legend.TextStyle.Font.Size = vg.Points(9)
	grid := plotter.NewGrid()
	grid.Vertical.Color, grid.Horizontal.Color = color.Gray{225}, color.Gray{225}
	p.Add(grid)
	if c.LogX {
		p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
	}
	if c.LogY {
		p.Y.Scale, p.Y.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
	}
	var err error
	if c.Kind == Bars {
		err = c.addBars(p)
	} else {
		err = c.addLines(p)
	}
	if err != nil {
		return nil, fmt.Errorf("chart: %q: %w", c.Title, err)
	}
	if !c.LogY && p.Y.Min > 0 {
		p.Y.Min = 0 // bars start at zero, so that their heights can be compared
	}
	room := 0.04 * float64(len(c.Series)+1) // room for the legend, as a share of the height
	if c.LogY {
		p.Y.Max *= math.Pow(p.Y.Max/p.Y.Min, room)
	} else {
		p.Y.Max += (p.Y.Max - p.Y.Min) * room
	}
	if err := c.addMarks(p); err != nil {
		return nil, fmt.Errorf("chart: %q: %w", c.Title, err)
	}
	return p, nil
}

// addMarks draws the marks over the height of the plot.
func (c Chart) addMarks(p *plot.Plot) error {
	for _, m := range c.Marks {
		l, err := plotter.NewLine(plotter.XYs{{X: m.X, Y: p.Y.Min}, {X: m.X, Y: p.Y.Max}})
		if err != nil {
			return err
		}
		l.Color, l.Dashes = color.Gray{110}, []vg.Length{vg.Points(2), vg.Points(2)}
		name, err := plotter.NewLabels(plotter.XYLabels{XYs: plotter.XYs{{X: m.X, Y: p.Y.Min}}, Labels: []string{m.Name}})
		if err != nil {
			return err
		}
		// The text runs upwards, to the right of the line.
		style := &name.TextStyle[0]
		style.Font.Size, style.Rotation, style.YAlign = vg.Points(8), math.Pi/2, text.YTop
		name.Offset = vg.Point{X: vg.Points(2), Y: vg.Points(4)}
		p.Add(l, name)
	}
	return nil
}

func (c Chart) addLines(p *plot.Plot) error {
	for i, s := range c.Series {
		named := false
		for _, run := range runs(s) {
			l, err := plotter.NewLine(run)
			if err != nil {
				return err
			}
			l.LineStyle = style(i, s.Dashed)
			if c.Kind == Steps {
				l.StepStyle = plotter.PostStep
			}
			p.Add(l)
			thumbs := []plot.Thumbnailer{l}
			if s.Points || len(run) == 1 {
				pts, err := plotter.NewScatter(run)
				if err != nil {
					return err
				}
				pts.GlyphStyle = draw.GlyphStyle{Color: l.Color, Radius: vg.Points(2.5), Shape: draw.CircleGlyph{}}
				p.Add(pts)
				thumbs = append(thumbs, pts)
			}
			if !named && s.Name != "" {
				p.Legend.Add(s.Name, thumbs...)
				named = true
			}
		}
	}
	return nil
}

// runs divides the points of a series into runs without a NaN between them.
func runs(s Series) []plotter.XYs {
	var out []plotter.XYs
	var run plotter.XYs
	for i, y := range s.Y {
		if math.IsNaN(y) {
			if len(run) > 0 {
				out, run = append(out, run), nil
			}
			continue
		}
		run = append(run, plotter.XY{X: s.X[i], Y: y})
	}
	if len(run) > 0 {
		out = append(out, run)
	}
	return out
}

// groupWidth is the share of a category's width that all its bars take together.
const groupWidth = 0.8

func (c Chart) addBars(p *plot.Plot) error {
	n := float64(len(c.Series))
	width := groupWidth / n
	base := 0.0
	if c.LogY {
		base = c.lowest() / 2 // a logarithmic axis has no zero
	}
	for i, s := range c.Series {
		st := style(i, s.Dashed)
		named := false
		for j, y := range s.Y {
			if math.IsNaN(y) {
				continue
			}
			left := float64(j) - groupWidth/2 + float64(i)*width
			bar, err := plotter.NewPolygon(plotter.XYs{{X: left, Y: base}, {X: left, Y: y}, {X: left + width, Y: y}, {X: left + width, Y: base}})
			if err != nil {
				return err
			}
			bar.LineStyle, bar.Color = st, st.Color
			if s.Dashed {
				bar.Color = color.White
			}
			p.Add(bar)
			if !named && s.Name != "" {
				p.Legend.Add(s.Name, bar)
				named = true
			}
		}
	}
	p.NominalX(c.Categories...)
	p.X.Min, p.X.Max = -0.5, float64(len(c.Categories))-0.5
	return nil
}

func (c Chart) lowest() float64 {
	low := math.Inf(1)
	for _, s := range c.Series {
		for _, y := range s.Y {
			if y < low { // false for NaN
				low = y
			}
		}
	}
	return low
}

// style returns the line style of the i-th series.
func style(i int, dashed bool) draw.LineStyle {
	// The palette is that of Okabe and Ito, "Color Universal Design" (2008), without yellow and
	// black.
	palette := [...]color.RGBA{
		{0x00, 0x72, 0xb2, 0xff}, {0xd5, 0x5e, 0x00, 0xff}, {0x00, 0x9e, 0x73, 0xff},
		{0xcc, 0x79, 0xa7, 0xff}, {0xe6, 0x9f, 0x00, 0xff}, {0x56, 0xb4, 0xe9, 0xff},
	}
	s := draw.LineStyle{Color: palette[i%len(palette)], Width: vg.Points(1.5)}
	if dashed {
		s.Dashes = []vg.Length{vg.Points(5), vg.Points(3)}
	}
	if i >= len(palette) {
		s.Dashes = append(s.Dashes, vg.Points(1+float64(i/len(palette))), vg.Points(2))
	}
	return s
}

// MarshalJSON writes null for a NaN, which JSON cannot represent.
func (s Series) MarshalJSON() ([]byte, error) {
	y := make([]*float64, len(s.Y))
	for i := range y {
		if !math.IsNaN(s.Y[i]) {
			y[i] = &s.Y[i]
		}
	}
	type plain Series // without this method
	return json.Marshal(struct {
		plain
		Y []*float64 `json:"y"`
	}{plain(s), y})
}
