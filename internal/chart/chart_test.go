package chart

import (
	"bytes"
	"encoding/xml"
	"image/png"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func lines() Chart {
	return Chart{
		Title: "Rates", XLabel: "time, s", YLabel: "GB/s",
		Series: []Series{
			{Name: "ours", X: []float64{0, 1, 2, 3}, Y: []float64{1, 2, math.NaN(), 4}, Points: true},
			{Name: "bound", X: []float64{0, 3}, Y: []float64{5, 5}, Dashed: true},
		},
	}
}

func bars() Chart {
	return Chart{
		Title: "Time", YLabel: "s", Kind: Bars, Categories: []string{"RR", "CLA*", "NetKV"},
		Series: []Series{{Name: "paper", Y: []float64{1969, 1812, 1598}, Dashed: true}, {Name: "ours", Y: []float64{2082, math.NaN(), 1692}}},
	}
}

// TestFormats: a PNG decodes to the requested size and is not blank; an SVG is well-formed and
// contains the labels.
func TestFormats(t *testing.T) {
	logs := lines()
	logs.LogX, logs.LogY = true, true
	logs.Series = []Series{{Name: "ours", X: []float64{1, 10, 1000}, Y: []float64{0.1, 1, 100}}, {Name: "bound", X: []float64{1}, Y: []float64{3}}}
	logBars := bars()
	logBars.LogY = true
	steps := Chart{Title: "NICs", XLabel: "time, s", YLabel: "GB/s", Kind: Steps, Series: []Series{
		{Name: "snic0", X: []float64{0, 0.1, 0.2}, Y: []float64{0, 1, 2}}, {Name: "snic1", X: []float64{0, 0.1, 0.2}, Y: []float64{2, 1, 0}},
	}}
	steps.Marks = []Mark{{X: 0.05, Name: "begin"}, {X: 0.15, Name: "end"}}
	for name, c := range map[string]Chart{"lines": lines(), "bars": bars(), "logarithmic": logs, "logarithmic bars": logBars, "steps": steps} {
		t.Run(name, func(t *testing.T) {
			c.Width, c.Height = 4, 3
			var raw bytes.Buffer
			if err := c.Write(&raw, PNG); err != nil {
				t.Fatal(err)
			}
			img, err := png.Decode(&raw)
			if err != nil {
				t.Fatal(err)
			}
			b := img.Bounds()
			if b.Dx() != 4*96 || b.Dy() != 3*96 {
				t.Errorf("%d by %d pixels", b.Dx(), b.Dy())
			}
			coloured := 0
			for y := range b.Dy() {
				for x := range b.Dx() {
					if r, g, bl, _ := img.At(x, y).RGBA(); r != g || g != bl {
						coloured++
					}
				}
			}
			if coloured < 50 {
				t.Errorf("%d coloured pixels: nothing was drawn", coloured)
			}
			var svg bytes.Buffer
			if err := c.Write(&svg, SVG); err != nil {
				t.Fatal(err)
			}
			wellFormed(t, svg.Bytes())
			for _, word := range []string{c.Title, c.YLabel, c.Series[0].Name, c.Series[1].Name} {
				if !strings.Contains(svg.String(), word) {
					t.Errorf("the SVG does not contain %q", word)
				}
			}
			for _, m := range c.Marks {
				if !strings.Contains(svg.String(), m.Name) {
					t.Errorf("the SVG does not contain the mark %q", m.Name)
				}
			}
			for _, word := range c.Categories {
				if !strings.Contains(svg.String(), word) {
					t.Errorf("the SVG does not contain %q", word)
				}
			}
		})
	}
}

func wellFormed(t *testing.T, raw []byte) {
	t.Helper()
	d := xml.NewDecoder(bytes.NewReader(raw))
	for {
		if _, err := d.Token(); err == io.EOF {
			return
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

// TestSameBytes: the same chart gives the same bytes.
func TestSameBytes(t *testing.T) {
	for _, f := range []Format{PNG, SVG} {
		var a, b bytes.Buffer
		if err := lines().Write(&a, f); err != nil {
			t.Fatal(err)
		}
		if err := lines().Write(&b, f); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(a.Bytes(), b.Bytes()) {
			t.Errorf("%s differs", f)
		}
	}
}

func TestSave(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "figures")
	paths, err := bars().Save(dir, "fig7")
	if err != nil {
		t.Fatal(err)
	}
	if len(paths) != 2 {
		t.Fatal(paths)
	}
	for _, p := range paths {
		if st, err := os.Stat(p); err != nil || st.Size() < 500 {
			t.Errorf("%s: %v", p, err)
		}
	}
	if _, err := bars().Save(dir, "../escape"); err == nil {
		t.Error("a name with a slash was accepted")
	}
	if _, err := (Chart{Title: "empty"}).Save(dir, "empty"); err == nil {
		t.Error("an empty chart was saved")
	}
	if _, err := os.Stat(filepath.Join(dir, "empty.png")); !os.IsNotExist(err) {
		t.Error("a chart that cannot be drawn left a file")
	}
}

// TestBadCharts: the error names the part that cannot be drawn.
func TestBadCharts(t *testing.T) {
	for name, c := range map[string]struct {
		chart Chart
		word  string
	}{
		"nothing":        {Chart{Title: "T"}, "no series"},
		"kind":           {Chart{Title: "T", Kind: 9, Series: lines().Series}, "kind 9"},
		"lengths":        {Chart{Title: "T", Series: []Series{{Name: "s", X: []float64{1}, Y: []float64{1, 2}}}}, "1 x and 2 y"},
		"only gaps":      {Chart{Title: "T", Series: []Series{{Name: "s", X: []float64{1}, Y: []float64{math.NaN()}}}}, "no series has a value"},
		"infinite":       {Chart{Title: "T", Series: []Series{{Name: "s", X: []float64{1}, Y: []float64{math.Inf(1)}}}}, "+Inf"},
		"no x":           {Chart{Title: "T", Series: []Series{{Name: "s", X: []float64{math.NaN()}, Y: []float64{1}}}}, "NaN"},
		"backwards":      {Chart{Title: "T", Series: []Series{{Name: "s", X: []float64{2, 1}, Y: []float64{1, 1}}}}, "less than the one before"},
		"zero on a log":  {Chart{Title: "T", LogY: true, Series: []Series{{Name: "s", X: []float64{1}, Y: []float64{0}}}}, "cannot show"},
		"bars with x":    {Chart{Title: "T", Kind: Bars, Categories: []string{"a"}, Series: []Series{{Name: "s", X: []float64{1}, Y: []float64{1}}}}, "bars have no x"},
		"bars too few":   {Chart{Title: "T", Kind: Bars, Categories: []string{"a", "b"}, Series: []Series{{Name: "s", Y: []float64{1}}}}, "2 categories"},
		"as big as wall": {Chart{Title: "T", Width: 1e6, Series: lines().Series}, "inches"},
	} {
		t.Run(name, func(t *testing.T) {
			err := c.chart.Write(io.Discard, PNG)
			if err == nil || !strings.Contains(err.Error(), c.word) {
				t.Errorf("%v; want %q", err, c.word)
			}
		})
	}
	if err := lines().Write(io.Discard, "gif"); err == nil || !strings.Contains(err.Error(), "png or svg") {
		t.Error(err)
	}
}
