package attention

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// exactly is the error that the paper finds for float32 (section 3.3): the largest difference of
// any output, where values are about 1.
const exactly = 4e-7

// normals returns n normally distributed numbers.
func normals(rng *rand.Rand, n int, scale float64) []float32 {
	out := make([]float32, n)
	for i := range out {
		out[i] = float32(scale * rng.NormFloat64())
	}
	return out
}

// absorbed returns the result of Absorbed, or fails the test.
func absorbed(t rapid.TB, g Latent, query, cache []float32, selected []int) Partial {
	t.Helper()
	var p Partial
	if err := g.Absorbed(&p, query, cache, selected); err != nil {
		t.Fatal(err)
	}
	return p
}

// merged returns the result of Merge into a new partial, or fails the test.
func merged(t rapid.TB, parts ...Partial) Partial {
	t.Helper()
	var dst Partial
	dst.Reserve(parts[0].Rows(), parts[0].Width)
	if err := Merge(&dst, parts); err != nil {
		t.Fatal(err)
	}
	return dst
}

// apart returns the largest difference of two partials' outputs.
func apart(a, b Partial) float64 {
	most := 0.0
	for i := range a.O {
		most = max(most, math.Abs(float64(a.O[i])-float64(b.O[i])))
	}
	return most
}

// same fails the test unless outputs and log-sum-exps agree.
func same(t rapid.TB, what string, a, b Partial, within float64) {
	t.Helper()
	if d := apart(a, b); !(d <= within) {
		t.Fatalf("%s: outputs differ by %v, more than %v", what, d, within)
	}
	for r := range a.L {
		x, y := float64(a.M[r])+math.Log(float64(a.L[r])), float64(b.M[r])+math.Log(float64(b.L[r]))
		if x != y && !(math.Abs(x-y) <= 1e-5*max(1, math.Abs(y))) {
			t.Fatalf("%s: row %d: log-sum-exp %v and %v", what, r, x, y)
		}
	}
}

// split distributes the tokens to m holders; some may get none.
func split(rng *rand.Rand, tokens, m int) [][]int {
	parts := make([][]int, m)
	for i := range parts {
		parts[i] = []int{}
	}
	for _, j := range rng.Perm(tokens) {
		// Shares are uneven, so that a holder may have one token or none.
		i := min(int(rng.ExpFloat64()*float64(m)/3), m-1)
		parts[i] = append(parts[i], j)
	}
	return parts
}

// naive is softmax in float64, computed by its definition.
func naive(g Latent, query, cache []float32) []float64 {
	var out []float64
	for ; len(query) > 0; query = query[g.Key:] {
		logits := make([]float64, len(cache)/g.Key)
		most := math.Inf(-1)
		for j := range logits {
			for c := range g.Key {
				logits[j] += float64(query[c]) * float64(cache[j*g.Key+c])
			}
			logits[j] *= float64(g.Scale)
			most = max(most, logits[j])
		}
		row, sum := make([]float64, g.Value), 0.0
		for j, x := range logits {
			p := math.Exp(x - most)
			sum += p
			for c := range row {
				row[c] += p * float64(cache[j*g.Key+c])
			}
		}
		for c := range row {
			row[c] /= sum
		}
		out = append(out, row...)
	}
	return out
}

// TestExact: 2048 tokens on up to 8 holders, in any distribution, give the result of one instance.
func TestExact(t *testing.T) {
	g := DeepSeekV2Lite()
	rng := rand.New(rand.NewPCG(1, 2))
	query, cache := normals(rng, 4*g.Key, 1), normals(rng, 2048*g.Key, 1)
	whole := absorbed(t, g, query, cache, nil)
	worst := 0.0
	for i, x := range naive(g, query, cache) {
		worst = max(worst, math.Abs(x-float64(whole.O[i])))
	}
	if worst > 1e-5 {
		t.Errorf("the reference is %v from float64", worst)
	}
	wide := 0.0
	for m := 1; m <= 8; m++ {
		var parts []Partial
		var wires []Wire
		for _, tokens := range split(rng, 2048, m) {
			p := absorbed(t, g, query, cache, tokens)
			var w Wire
			if err := Round(&w, p); err != nil {
				t.Fatal(err)
			}
			parts, wires = append(parts, p), append(wires, w)
		}
		same(t, "partition", merged(t, parts...), whole, exactly)
		var over Partial
		over.Reserve(4, g.Value)
		if err := Merge(&over, wires); err != nil {
			t.Fatal(err)
		}
		wide = max(wide, apart(over, whole))
	}
	// bfloat16 has 8 bits of precision, so rounding changes an output by at most half a step of the
	// largest output.
	largest := 0.0
	for _, o := range whole.O {
		largest = max(largest, math.Abs(float64(o)))
	}
	if step := largest / 256; wide > step {
		t.Errorf("over the wire outputs differ by %v, more than %v", wide, step)
	}
}

// small is a shape that is fast enough for a fuzzer.
var small = Latent{Key: 12, Value: 8, Scale: 0.3}

// TestAlgebra: the merge is commutative and associative, and a part without tokens is the identity.
func TestAlgebra(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 3))
		m, tokens := rapid.IntRange(1, 8).Draw(t, "holders"), rapid.IntRange(1, 64).Draw(t, "tokens")
		query, cache := normals(rng, 3*small.Key, 2), normals(rng, tokens*small.Key, 1)
		whole := absorbed(t, small, query, cache, nil)
		var parts []Partial
		for _, s := range split(rng, tokens, m) {
			parts = append(parts, absorbed(t, small, query, cache, s))
		}
		// With few tokens outputs exceed 1, and float32 rounds in proportion.
		within := exactly
		for _, o := range whole.O {
			within = max(within, exactly*math.Abs(float64(o)))
		}
		same(t, "any partition", merged(t, parts...), whole, within)
		shuffled := slices.Clone(parts)
		rng.Shuffle(m, func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		same(t, "any order", merged(t, shuffled...), merged(t, parts...), within)
		// Merging two parts in either order gives the same bits.
		if a, b := merged(t, parts[0], parts[m-1]), merged(t, parts[m-1], parts[0]); !slices.Equal(a.O, b.O) || !slices.Equal(a.M, b.M) || !slices.Equal(a.L, b.L) {
			t.Fatalf("of two: %v and %v", a, b)
		}
		// Merging one part after the other into the first, in order of arrival, rounds as often.
		one := merged(t, parts[0])
		for _, p := range parts[1:] {
			if err := Merge(&one, []Partial{one, p}); err != nil {
				t.Fatal(err)
			}
		}
		same(t, "pairwise", one, merged(t, parts...), within*max(1, float64(m)/2))
		// A part without tokens is the identity, even if its unread outputs have any values.
		empty := absorbed(t, small, query, cache, []int{})
		for i := range empty.O {
			empty.O[i] = float32(math.NaN())
		}
		with := merged(t, append([]Partial{empty}, parts...)...)
		if plain := merged(t, parts...); !slices.Equal(with.O, plain.O) || !slices.Equal(with.M, plain.M) || !slices.Equal(with.L, plain.L) {
			t.Fatalf("with a part without tokens %v, without it %v", with, plain)
		}
		if e := merged(t, empty, empty); e.L[0] != 0 || !math.IsInf(float64(e.M[0]), -1) || e.O[0] != 0 {
			t.Fatalf("two parts without tokens: %v", e)
		}
	})
}

// FuzzExtreme: logits of any size, up to the range of float32, cause neither NaN nor overflow, and
// give the result of one instance.
func FuzzExtreme(f *testing.F) {
	f.Add(uint64(1), uint8(3), uint8(20), int16(0), int16(0))
	f.Add(uint64(2), uint8(8), uint8(64), int16(120), int16(3))
	f.Add(uint64(3), uint8(2), uint8(2), int16(-140), int16(-20))
	f.Fuzz(func(t *testing.T, seed uint64, m, tokens uint8, large, values int16) {
		rng := rand.New(rand.NewPCG(seed, 4))
		n := int(tokens)%64 + 1
		// Queries are scaled to 2^large, values to 2^values.
		query := normals(rng, 2*small.Key, math.Exp2(float64(large%127)))
		size := math.Exp2(float64(values % 127))
		cache := normals(rng, n*small.Key, size)
		var whole Partial
		if err := small.Absorbed(&whole, query, cache, nil); err != nil {
			return // the products exceed float32, which the error states
		}
		var parts []Partial
		for _, s := range split(rng, n, int(m)%8+1) {
			parts = append(parts, absorbed(t, small, query, cache, s))
		}
		got := merged(t, parts...)
		for i, x := range got.O {
			if !finite(x) {
				t.Fatalf("output %d is %v", i, x)
			}
		}
		same(t, "partition", got, whole, 8*exactly*size)
	})
}

// FuzzMerge: partials of arbitrary bits, as from a faulty holder, are refused or give finite
// outputs between the parts' outputs.
func FuzzMerge(f *testing.F) {
	f.Add([]byte{}, []byte{})
	f.Add(make([]byte, RowBytes(2)), []byte{0, 0, 128, 63, 0, 0, 128, 63, 0, 0, 128, 63})
	f.Fuzz(func(t *testing.T, a, b []byte) {
		const width = 2
		n := min(len(a), len(b)) / RowBytes(width) * RowBytes(width)
		parts := make([]Wire, 2)
		for i, raw := range [][]byte{a[:n], b[:n]} {
			if err := ParseWire(&parts[i], raw, width); err != nil {
				t.Fatal(err)
			}
			if back := AppendWire(nil, parts[i]); string(back) != string(raw) {
				t.Fatalf("%x was read as %x", raw, back)
			}
		}
		var dst Partial
		dst.Reserve(n/RowBytes(width), width)
		if err := Merge(&dst, parts); err != nil {
			if !errors.Is(err, ErrInvalid) {
				t.Fatal(err)
			}
			return
		}
		for i, x := range dst.O {
			r := i / width
			if dst.L[r] == 0 {
				continue
			}
			low, high := math.Inf(1), math.Inf(-1)
			for _, p := range parts {
				if p.L[r] > 0 {
					v := float64(p.O[i].Float32())
					// A part whose weight is 0 is not read.
					if !math.IsNaN(v) {
						low, high = min(low, v), max(high, v)
					}
				}
			}
			slack := 1e-6 * max(math.Abs(low), math.Abs(high))
			if !finite(x) || float64(x) < low-slack || float64(x) > high+slack {
				t.Fatalf("output %d is %v, of parts between %v and %v", i, x, low, high)
			}
		}
	})
}

func TestRefuses(t *testing.T) {
	good := Partial{Width: 2, O: []float32{1, 2}, M: []float32{0}, L: []float32{1}}
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	for name, bad := range map[string]Partial{
		"other width": {Width: 1, O: []float32{1}, M: []float32{0}, L: []float32{1}}, "other rows": {Width: 2, O: []float32{1, 2, 3, 4}, M: []float32{0, 0}, L: []float32{1, 1}},
		"NaN maximum": {Width: 2, O: good.O, M: []float32{nan}, L: good.L}, "infinite maximum": {Width: 2, O: good.O, M: []float32{inf}, L: good.L},
		"minus infinity": {Width: 2, O: good.O, M: []float32{-inf}, L: good.L}, "NaN denominator": {Width: 2, O: good.O, M: good.M, L: []float32{nan}},
		"negative": {Width: 2, O: good.O, M: good.M, L: []float32{-1}}, "infinite": {Width: 2, O: good.O, M: good.M, L: []float32{inf}},
		"NaN output": {Width: 2, O: []float32{nan, 0}, M: good.M, L: good.L}, "infinite output": {Width: 2, O: []float32{inf, 0}, M: good.M, L: good.L},
	} {
		var dst Partial
		dst.Reserve(1, 2)
		if err := Merge(&dst, []Partial{good, bad}); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	var dst Partial
	dst.Reserve(1, 2)
	if err := Merge(&dst, make([]Partial, MaxParts+1)); err == nil {
		t.Error("too many parts were merged")
	}
	if err := Merge(&dst, []Wire{{Width: 3}}); !errors.Is(err, ErrInvalid) {
		t.Errorf("a wire of another width: %v", err)
	}
	if err := ParseWire(new(Wire), make([]byte, 11), 2); !errors.Is(err, ErrInvalid) {
		t.Errorf("a part of a row: %v", err)
	}
	if err := Merge[float32](&dst, nil); err != nil || dst.L[0] != 0 {
		t.Errorf("of no parts: %v, %v", dst, err)
	}
	huge := slices.Repeat([]float32{math.MaxFloat32}, small.Key)
	for name, f := range map[string]func() error{
		"overflow":   func() error { return small.Absorbed(&dst, huge, huge, nil) },
		"no token":   func() error { return small.Absorbed(&dst, huge, huge, []int{1}) },
		"half a row": func() error { return small.Absorbed(&dst, huge[:5], huge, nil) },
		"shape":      func() error { return Latent{Key: 2, Value: 3}.Absorbed(&dst, nil, nil, nil) },
	} {
		if f() == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// TestBFloat16 compares rounding (nearest, ties to even) with a search over all values.
func TestBFloat16(t *testing.T) {
	if RowBytes(512) != 1032 {
		t.Errorf("a row is %d bytes", RowBytes(512))
	}
	for b := range 1 << 16 {
		x := BFloat16(b).Float32()
		if back := ToBFloat16(x); x == x && back != BFloat16(b) || x != x && back.Float32() == back.Float32() {
			t.Fatalf("%04x is %v and comes back as %04x", b, x, back)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		x := math.Float32frombits(rapid.Uint32().Draw(t, "bits"))
		got := ToBFloat16(x)
		if x != x {
			if f := got.Float32(); f == f {
				t.Fatalf("NaN became %v", f)
			}
			return
		}
		if finite(x) && !finite(got.Float32()) {
			t.Fatalf("%v became %v", x, got.Float32())
		}
		d := math.Abs(float64(got.Float32()) - float64(x))
		for _, other := range []BFloat16{got - 1, got + 1} {
			o := other.Float32()
			if !finite(o) || !finite(x) {
				continue
			}
			if e := math.Abs(float64(o) - float64(x)); e < d || e == d && got&1 == 1 {
				t.Fatalf("%v became %v; %v is nearer, or as near and even", x, got.Float32(), o)
			}
		}
	})
}

func TestMergeAllocatesNothing(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	query, cache := normals(rng, 4*small.Key, 1), normals(rng, 64*small.Key, 1)
	var parts []Partial
	wires := make([]Wire, 8)
	for i, s := range split(rng, 64, 8) {
		parts = append(parts, absorbed(t, small, query, cache, s))
		if err := Round(&wires[i], parts[i]); err != nil {
			t.Fatal(err)
		}
	}
	dst := merged(t, parts...)
	raw := AppendWire(nil, wires[0])
	for name, f := range map[string]func() error{
		"merge": func() error { return Merge(&dst, parts) }, "wire": func() error { return Merge(&dst, wires) },
		"round": func() error { return Round(&wires[0], parts[0]) }, "parse": func() error { return ParseWire(&wires[0], raw, small.Value) },
	} {
		if n := testing.AllocsPerRun(100, func() {
			if err := f(); err != nil {
				t.Fatal(err)
			}
		}); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

// BenchmarkMerge measures one decoding step of 16 heads from 8 holders.
func BenchmarkMerge(b *testing.B) {
	const rows, width, holders = 16, 512, 8
	rng := rand.New(rand.NewPCG(5, 6))
	parts, wires := make([]Partial, holders), make([]Wire, holders)
	for i := range parts {
		parts[i] = Partial{Width: width, O: normals(rng, rows*width, 1), M: normals(rng, rows, 1), L: slices.Repeat([]float32{10}, rows)}
		if err := Round(&wires[i], parts[i]); err != nil {
			b.Fatal(err)
		}
	}
	var dst Partial
	dst.Reserve(rows, width)
	for name, f := range map[string]func() error{"float32": func() error { return Merge(&dst, parts) }, "bfloat16": func() error { return Merge(&dst, wires) }} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := f(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
